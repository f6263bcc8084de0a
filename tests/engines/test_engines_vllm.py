"""The vLLM engine against a server that speaks vLLM's JSON; against vLLM itself in test_engines_vllm_real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engines_helpers import ask
from vllm_fake import LENGTH, FakeVllm, expected, policy

from polarlike.engines.base import CannotScore, Chunk, EngineError, EngineOptions, GenerateRequest
from polarlike.engines.log import read_log
from polarlike.engines.vllm import VllmEngine, VllmSettings, create
from polarlike.records import PolarError, Sampling, UsageError
from trainers import rescore

PROMPT = np.array([30, 31, 32, 33, 34], np.int32)  # the fake's reply to it is 5, 6, 7, ...


@asynccontextmanager
async def engine_at(
    url: str, tiny: Path, *, log: Path | None = None, temperature: float | None = None, **extra: Any
) -> AsyncIterator[VllmEngine]:
    engine = create(url, EngineOptions(model=tiny, log=log, temperature=temperature, extra=extra))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    yield FakeVllm()


@pytest.fixture
async def engine(fake: FakeVllm, tiny: Path, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    async with (
        fake.serving() as url,
        engine_at(url, tiny, log=tmp_path / "log.jsonl", stream_interval=4) as engine,
    ):
        fake.requests.clear()
        yield engine


# ---------------------------------------------------------------- tokens


async def test_ids_logprobs_and_versions_are_what_the_server_sent(engine: VllmEngine, tmp_path: Path) -> None:
    reply = await ask(engine, PROMPT, "call_1", max_tokens=10, temperature=0.7)
    assert reply.ids.tolist() == list(range(5, 15))
    assert np.array_equal(reply.logprobs, expected(reply.ids, temperature=0.7))
    assert (reply.versions.tolist(), reply.finish_reason, reply.chunks) == ([0] * 10, "length", 3)
    assert (reply.ids.dtype, reply.logprobs.dtype, reply.versions.dtype) == (np.int32, np.float32, np.int32)
    entry = read_log(tmp_path / "log.jsonl")["call_1"]
    assert entry.prompt_ids.tolist() == PROMPT.tolist()
    assert entry.completion_ids.tolist() == reply.ids.tolist()
    assert entry.logprobs.tolist() == reply.logprobs.tolist()
    assert (entry.finish_reason, entry.temperature) == ("length", 0.7)


async def test_every_sampling_field_is_sent(engine: VllmEngine, fake: FakeVllm) -> None:
    await ask(engine, PROMPT, "call_1", (7,), max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=4, stop=("x",))
    [body] = fake.requests
    assert body["prompt"] == PROMPT.tolist()
    wanted = {
        "model": "base-model",
        "request_id": "call_1",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "n": 1,
        "seed": 4,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    assert {k: body[k] for k in wanted} == wanted
    await ask(engine, PROMPT, top_k=0)
    assert fake.requests[-1]["top_k"] == -1  # off


async def test_a_stop_id_ends_the_reply_and_is_part_of_it(engine: VllmEngine) -> None:
    reply = await ask(engine, PROMPT, "r", (8,), max_tokens=10)
    assert (reply.ids.tolist(), reply.finish_reason) == ([5, 6, 7, 8], "stop")


async def test_the_limit_is_the_room_left(engine: VllmEngine, fake: FakeVllm) -> None:
    assert engine.context_length == LENGTH
    await ask(engine, np.ones(LENGTH - 3, np.int32), max_tokens=500)
    assert fake.requests[-1]["max_tokens"] == 3
    with pytest.raises(EngineError, match="no room for a reply"):
        await ask(engine, np.ones(LENGTH, np.int32))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("null_logprob", "sent None as a logprob"),
        ("sentinel", r"sent -9999\.0 as a logprob"),
        ("positive", r"sent 0\.5 as a logprob"),
        ("short", "4 token ids and 3 logprobs"),
        ("no_ids", "sent no token ids"),
        ("no_logprobs", "sent no logprobs"),
        ("no_finish", "without a finish reason"),
        ("error_event", "failed in mid-reply: the engine died"),
        ("abort", "aborted the reply"),
        ("other_model", "was asked for base-model and answered as another"),
        ("other_prompt", "given 5 prompt ids"),
        ("refuse", "answered 400 to /v1/completions: max_tokens is wrong"),
        ("reset_late", "broke"),
    ],
)
async def test_what_cannot_be_trained_on_fails_the_reply(
    engine: VllmEngine, fake: FakeVllm, tmp_path: Path, fault: str, message: str
) -> None:
    fake.faults = [fault]
    with pytest.raises(EngineError, match=message):
        await ask(engine, PROMPT, "call_1", max_tokens=10)
    assert read_log(tmp_path / "log.jsonl")["call_1"].finish_reason == "error"
    assert (await ask(engine, PROMPT, max_tokens=10)).ids.size == 10


async def test_a_connection_that_breaks_before_the_first_token_is_tried_once_more(
    engine: VllmEngine, fake: FakeVllm
) -> None:
    fake.faults = ["reset"]
    reply = await ask(engine, PROMPT, "call_1", max_tokens=6)
    assert reply.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert [r["request_id"] for r in fake.requests] == ["call_1", "call_1-0-1"]
    fake.faults = ["reset", "reset"]
    with pytest.raises(EngineError, match="broke"):
        await ask(engine, PROMPT)


async def test_replies_that_follow_one_another_use_one_connection(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.connections.clear()
    for _ in range(5):
        await ask(engine, PROMPT)
    assert len(fake.connections) == 1


async def test_leaving_a_reply_closes_its_request_and_logs_what_came(
    engine: VllmEngine, fake: FakeVllm, tmp_path: Path
) -> None:
    fake.gate.clear()
    fake.tokens_before_gate = 8
    request = GenerateRequest("call_1", PROMPT, Sampling(max_tokens=100))
    got: list[int] = []
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            got += chunk.ids.tolist()
            if len(got) == 8:
                break
    entry = read_log(tmp_path / "log.jsonl")["call_1"]
    assert (entry.completion_ids.tolist(), entry.finish_reason) == (list(range(5, 13)), "abort")
    fake.gate.set()
    await asyncio.wait_for(fake.client_left.wait(), 10)


# ---------------------------------------------------------------- which logprobs the server reports


@pytest.mark.parametrize("temperature", [0.5, 0.95, 1.3])
async def test_raw_logprobs_stop_a_run_at_another_temperature_with_the_missing_flag(
    tiny: Path, temperature: float
) -> None:
    async with FakeVllm(processed=False).serving() as url:
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            async with engine_at(url, tiny, temperature=temperature):
                pass


async def test_raw_logprobs_will_do_at_temperature_1_and_nothing_else(tiny: Path) -> None:
    async with FakeVllm(processed=False).serving() as url, engine_at(url, tiny, temperature=1.0) as engine:
        reply = await ask(engine, PROMPT)
        assert np.array_equal(reply.logprobs, expected(reply.ids))
        await ask(engine, PROMPT, temperature=0.0)
        for shaped in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"presence_penalty": 0.5}):
            with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
                await ask(engine, PROMPT, **shaped)


async def test_a_model_that_likes_all_tokens_alike_cannot_be_probed(tiny: Path) -> None:
    async with FakeVllm(flat=True).serving() as url:
        with pytest.raises(EngineError, match="cannot be told which logprobs"):
            async with engine_at(url, tiny):
                pass


# ---------------------------------------------------------------- score


async def test_a_score_is_that_of_the_prompt_at_temperature_1(engine: VllmEngine) -> None:
    scores = await engine.score(PROMPT, 2, 1.0)
    assert scores.dtype == np.float32
    assert np.array_equal(scores, expected(PROMPT[2:]))
    assert (await engine.score(PROMPT, PROMPT.size, 1.0)).size == 0
    with pytest.raises(CannotScore, match="temperature 1 alone"):
        await engine.score(PROMPT, 2, 0.7)
    with pytest.raises(EngineError, match="must have a token before it"):
        await engine.score(PROMPT, 0, 1.0)


async def test_a_score_waits_until_no_reply_is_at_the_server(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.gate.clear()
    running = asyncio.create_task(ask(engine, PROMPT, max_tokens=8))
    await fake.arrived.acquire()
    scoring = [asyncio.create_task(engine.score(PROMPT, 2, 1.0)) for _ in range(2)]
    await asyncio.sleep(0.1)
    later = asyncio.create_task(ask(engine, PROMPT, max_tokens=8))
    await asyncio.sleep(0.1)
    assert len(fake.requests) == 1
    fake.gate.set()
    await asyncio.gather(running, later, *scoring)
    order = ["prompt_logprobs" in r for r in fake.requests]
    assert order == [False, True, True, False] or order == [False, True, False, True]


# ---------------------------------------------------------------- publishing


async def test_an_adapter_is_served_under_a_name_of_its_version(engine: VllmEngine, fake: FakeVllm) -> None:
    await engine.publish(policy(0.4), 2)
    assert engine.policy_version == 2
    reply = await ask(engine, PROMPT, max_tokens=6)
    assert reply.versions.tolist() == [2] * 6
    assert np.array_equal(reply.logprobs, expected(reply.ids, shift=0.4))
    assert fake.requests[-1]["model"].endswith("-v2")
    assert np.array_equal(await engine.score(PROMPT, 2, 1.0), expected(PROMPT[2:], shift=0.4))


async def test_old_adapters_are_unloaded_once_no_reply_uses_them(engine: VllmEngine, fake: FakeVllm) -> None:
    await engine.publish(policy(0.1), 1)
    fake.gate.clear()
    fake.tokens_before_gate = 4
    running = asyncio.create_task(ask(engine, PROMPT, max_tokens=12))
    await fake.arrived.acquire()
    await engine.publish(policy(0.2), 2)
    assert [n[-2:] for n in sorted(fake.shifts)] == ["el", "v1", "v2"]  # the base model, and two adapters
    fake.gate.set()
    reply = await running
    assert reply.versions.tolist() == [1] * 12  # the whole reply, by the weights it began with
    assert np.array_equal(reply.logprobs, expected(reply.ids, shift=0.1))
    await engine.publish(policy(0.3), 3)
    assert [n[-2:] for n in sorted(fake.shifts)] == ["el", "v3"]


async def test_a_server_that_keeps_an_old_adapter_fails_no_publish_and_is_named_once(
    engine: VllmEngine, fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refuse_paths = {"/v1/unload_lora_adapter": 500}
    for version in (1, 2, 3):
        await engine.publish(policy(version / 10), version)
    assert (await ask(engine, PROMPT, max_tokens=2)).versions.tolist() == [3, 3]
    assert [r.message.startswith("the vLLM server keeps old adapters loaded") for r in caplog.records] == [True]
    fake.refuse_paths = {}
    await engine.publish(policy(0.4), 4)
    assert [n[-2:] for n in sorted(fake.shifts)] == ["el", "v4"]


async def test_a_publish_of_whole_weights_that_fails_leaves_no_folder(
    fake: FakeVllm, tiny: Path, tmp_path: Path
) -> None:
    fake.refuse_paths = {"/collective_rpc": 500}
    async with fake.serving() as url, engine_at(url, tiny, weights=str(tmp_path / "shared")) as engine:
        with pytest.raises(EngineError, match="not today"):
            await engine.publish(policy(0.1, adapter=False), 1)
        assert list((tmp_path / "shared").iterdir()) == []


async def test_closing_leaves_no_adapter_and_no_file_behind(fake: FakeVllm, tiny: Path, tmp_path: Path) -> None:
    async with fake.serving() as url:
        async with engine_at(url, tiny, weights=str(tmp_path / "shared")) as engine:
            await engine.publish(policy(0.1), 1)
            assert len(list((tmp_path / "shared").iterdir())) == 1
        assert list(fake.shifts) == ["base-model"]
        assert list((tmp_path / "shared").iterdir()) == []


async def test_whole_weights_cut_what_runs_and_it_goes_on_under_the_new_ones(
    engine: VllmEngine, fake: FakeVllm, tmp_path: Path
) -> None:
    fake.gate.clear()
    fake.tokens_before_gate = 8
    eight = asyncio.Event()
    parts: list[Chunk] = []

    async def read() -> None:
        async for chunk in engine.generate(GenerateRequest("call_1", PROMPT, Sampling(max_tokens=20))):
            parts.append(chunk)
            if len(parts) == 2:
                eight.set()

    running = asyncio.create_task(read())
    await asyncio.wait_for(eight.wait(), 10)
    await engine.publish(policy(0.5, adapter=False), 1)
    fake.gate.set()
    await running
    ids, logprobs, versions = (np.concatenate([getattr(c, f) for c in parts]) for f in ("ids", "logprobs", "versions"))
    assert ids.tolist() == list(range(5, 25))
    assert versions.tolist() == [0] * 8 + [1] * 12
    assert np.array_equal(logprobs[:8], expected(ids[:8]))
    assert np.array_equal(logprobs[8:], expected(ids[8:], shift=0.5))
    assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + ["length"]
    assert fake.requests[-1]["prompt"] == [*PROMPT.tolist(), *range(5, 13)]
    assert fake.requests[-1]["max_tokens"] == 12
    order = [path for path, _ in fake.calls]
    assert order == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    entry = read_log(tmp_path / "log.jsonl")["call_1"]
    assert entry.prompt_ids.tolist() == PROMPT.tolist()
    assert entry.completion_ids.tolist() == ids.tolist()
    assert entry.versions.tolist() == versions.tolist()


async def test_weights_that_were_not_taken_are_caught_by_the_rescore(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.partial_reload = True  # 200, and nothing changed
    await engine.publish(policy(0.5, adapter=False), 1)
    theirs = await engine.score(PROMPT, 1, 1.0)
    values = rescore.compare(rescore.Sample(PROMPT, 1), expected(PROMPT[1:], shift=0.5), theirs)
    with pytest.raises(PolarError, match="does not serve what the trainer holds at policy version 1"):
        rescore.check(values, rescore.Limits(rescore.FLOAT32_MAX, None), engine)


async def test_a_server_that_refuses_weights_is_resumed_and_goes_on(engine: VllmEngine, fake: FakeVllm) -> None:
    fake.refuse_paths = {"/collective_rpc": 500}
    with pytest.raises(EngineError, match=r"not today.*VLLM_SERVER_DEV_MODE=1"):
        await engine.publish(policy(0.5, adapter=False), 1)
    assert fake.calls[-1][0] == "/resume"
    assert engine.policy_version == 0
    fake.refuse_paths = {"/v1/load_lora_adapter": 404}
    with pytest.raises(EngineError, match="--enable-lora"):
        await engine.publish(policy(0.5), 1)
    assert (await ask(engine, PROMPT, max_tokens=3)).versions.tolist() == [0, 0, 0]


async def test_a_version_that_is_not_higher_is_refused(engine: VllmEngine) -> None:
    await engine.publish(policy(0.1), 3)
    with pytest.raises(EngineError, match="version 3 is not above the current one, 3"):
        await engine.publish(policy(0.2), 3)


@pytest.mark.parametrize(("way", "adapter", "path"), [("folder", True, "/pause"), ("auto", False, "/pause")])
async def test_which_way_weights_go_can_be_set(fake: FakeVllm, tiny: Path, way: str, adapter: bool, path: str) -> None:
    async with fake.serving() as url, engine_at(url, tiny, publish=way) as engine:
        await engine.publish(policy(0.1, adapter=adapter), 1)
        assert fake.calls[0][0] == path


async def test_an_adapter_cannot_be_published_of_a_policy_that_is_none(fake: FakeVllm, tiny: Path) -> None:
    async with fake.serving() as url, engine_at(url, tiny, publish="adapter") as engine:
        with pytest.raises(UsageError, match="no LoRA"):
            await engine.publish(policy(0.1, adapter=False), 1)


# ---------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("argument", "extra", "message"),
    [
        ("ftp://host", {}, "no URL"),
        ("http://h:1", {"publich": "auto"}, "no setting 'publich'; did you mean 'publish'"),
        ("http://h:1", {"publish": "lora"}, "use auto, adapter or folder"),
        ("http://h:1", {"timeout_s": 0}, "must be above 0"),
        ("http://h:1", {"timeout_s": "soon"}, "timeout_s is 'soon'; it must be a number"),
        ("http://h:1", {"stream_interval": None}, "stream_interval is None; it must be a number"),
        ("http://h:1", {"weights": 3}, "weights is 3; it must be a folder"),
    ],
)
def test_wrong_settings_are_one_sentence(tiny: Path, argument: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create(argument, EngineOptions(model=tiny, extra=extra))


def test_a_number_that_yaml_reads_as_text_is_one() -> None:
    settings = VllmSettings.of({"timeout_s": "6e2", "stream_interval": "4"}, "vllm")
    assert (settings.timeout_s, settings.stream_interval) == (600.0, 4)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("<p>hello</p>", "lists no model with its length; is it vLLM"),
        ('{"data": [{"id": "m", "max_model_len": 64}]}', "sent no logprobs when asked; is it vLLM"),
    ],
)
async def test_a_server_of_another_kind_is_said_so(tiny: Path, models: str, message: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=models if request.path == "/v1/models" else '{"choices": [{"text": "hello"}]}')

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        with pytest.raises(EngineError, match=message):
            async with engine_at(str(server.make_url("")), tiny):
                pass


def test_without_a_model_folder_there_is_no_tokenizer() -> None:
    with pytest.raises(UsageError, match="--model MODEL_DIR"):
        create("http://127.0.0.1:8000", EngineOptions())


async def test_a_server_that_is_not_there_is_said_so(tiny: Path) -> None:
    with pytest.raises(EngineError, match=r"There is no vLLM server at http://127\.0\.0\.1:1 "):
        async with engine_at("127.0.0.1:1/v1", tiny):
            pass
