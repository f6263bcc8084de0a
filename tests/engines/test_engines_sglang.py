"""The SGLang engine against a server that speaks SGLang's JSON. No real one was at hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from engines_helpers import ask
from sglang_fake import FakeSglang
from vllm_fake import LENGTH, expected, policy

from polarlike.engines.base import CannotScore, Chunk, EngineError, EngineOptions, GenerateRequest
from polarlike.engines.log import read_log
from polarlike.engines.sglang import SglangEngine, create
from polarlike.records import Sampling

PROMPT = np.array([30, 31, 32, 33, 34], np.int32)  # the fake's reply to it is 5, 6, 7, ...


@asynccontextmanager
async def engine_at(
    fake: FakeSglang, tiny: Path, *, log: Path | None = None, temperature: float | None = None
) -> AsyncIterator[SglangEngine]:
    async with fake.serving() as url:
        engine = create(url, EngineOptions(model=tiny, log=log, temperature=temperature))
        try:
            await engine.start()
            fake.requests.clear()
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize("cumulative", [True, False])
async def test_each_token_counts_once_whichever_way_the_stream_is_told(
    tiny: Path, tmp_path: Path, cumulative: bool
) -> None:
    async with engine_at(FakeSglang(cumulative=cumulative), tiny, log=tmp_path / "log.jsonl") as engine:
        assert engine.context_length == LENGTH
        reply = await ask(engine, PROMPT, "call_1", max_tokens=10, temperature=0.7)
        stopped = await ask(engine, PROMPT, "call_2", (8,), max_tokens=10)
    assert reply.ids.tolist() == list(range(5, 15))
    assert np.array_equal(reply.logprobs, expected(reply.ids, temperature=0.7))
    assert (reply.finish_reason, reply.chunks) == ("length", 3)
    assert (stopped.ids.tolist(), stopped.finish_reason) == ([5, 6, 7, 8], "stop")
    entry = read_log(tmp_path / "log.jsonl")["call_1"]
    assert entry.prompt_ids.tolist() == PROMPT.tolist()
    assert entry.logprobs.tolist() == reply.logprobs.tolist()


async def test_every_sampling_field_is_sent(tiny: Path) -> None:
    fake = FakeSglang()
    async with engine_at(fake, tiny) as engine:
        await ask(engine, PROMPT, "call_1", (7,), max_tokens=9, temperature=0.5, seed=4, stop=("x",))
    [body] = fake.requests
    assert (body["rid"], body["input_ids"], body["lora_path"]) == ("call_1", PROMPT.tolist(), None)
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, -1)
    assert body["sampling_params"] == {
        "n": 1,
        "max_new_tokens": 9,
        "min_new_tokens": 0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": 4,
    }


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("null_logprob", "sent None as a logprob"),
        ("no_logprobs", "sent no logprobs"),
        ("lost", "lost tokens"),
        ("abort", "aborted the reply"),
        ("error_event", "the scheduler died"),
        ("longer_prompt", "given 5 prompt ids and sampled from 6"),
    ],
)
async def test_what_cannot_be_trained_on_fails_the_reply_and_is_aborted(tiny: Path, fault: str, message: str) -> None:
    fake = FakeSglang()
    async with engine_at(fake, tiny) as engine:
        fake.faults = [fault]
        with pytest.raises(EngineError, match=message):
            await ask(engine, PROMPT, "call_1", max_tokens=10)
        assert fake.calls == [("/abort_request", {"rid": "call_1"})]


async def test_original_logprobs_stop_a_run_at_another_temperature(tiny: Path) -> None:
    with pytest.raises(EngineError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        async with engine_at(FakeSglang(original=True), tiny, temperature=0.7):
            pass
    async with engine_at(FakeSglang(original=True), tiny, temperature=1.0) as engine:
        assert (await ask(engine, PROMPT)).ids.size == 16


async def test_filters_are_refused_since_their_logprobs_are_not_reported(tiny: Path) -> None:
    async with engine_at(FakeSglang(), tiny) as engine:
        for shaped in ({"top_p": 0.9}, {"top_k": 5}):
            with pytest.raises(EngineError, match="before top-p and top-k"):
                await ask(engine, PROMPT, **shaped)


async def test_a_score_is_that_of_the_prompt_at_temperature_1(tiny: Path) -> None:
    async with engine_at(FakeSglang(), tiny) as engine:
        assert np.array_equal(await engine.score(PROMPT, 2, 1.0), expected(PROMPT[2:]))
        assert np.array_equal(await engine.score(PROMPT, 1, 1.0), expected(PROMPT[1:]))
        with pytest.raises(CannotScore):
            await engine.score(PROMPT, 2, 0.7)


async def test_an_adapter_is_served_by_its_name_and_unloaded_after_the_next(tiny: Path) -> None:
    fake = FakeSglang()
    async with engine_at(fake, tiny) as engine:
        await engine.publish(policy(0.4), 1)
        reply = await ask(engine, PROMPT, max_tokens=6)
        assert reply.versions.tolist() == [1] * 6
        assert np.array_equal(reply.logprobs, expected(reply.ids, shift=0.4))
        assert str(fake.requests[-1]["lora_path"]).endswith("-v1")
        await engine.publish(policy(0.2), 2)
        assert len(fake.shifts) == 2
    assert list(fake.shifts) == [None]


async def test_whole_weights_are_loaded_under_their_version_while_nothing_is_on_its_way(tiny: Path) -> None:
    fake = FakeSglang()
    async with engine_at(fake, tiny) as engine:
        fake.gate.clear()
        parts: list[Chunk] = []
        first = asyncio.Event()

        async def read() -> None:
            async for chunk in engine.generate(GenerateRequest("call_1", PROMPT, Sampling(max_tokens=12))):
                parts.append(chunk)
                first.set()

        running = asyncio.create_task(read())
        await asyncio.wait_for(first.wait(), 10)
        await engine.publish(policy(0.5, adapter=False), 4)
        fake.gate.set()
        await running
        ids, logprobs, versions = (
            np.concatenate([getattr(c, f) for c in parts]) for f in ("ids", "logprobs", "versions")
        )
        assert ids.tolist() == list(range(5, 17))
        assert versions.tolist() == [0] * 4 + [4] * 8
        assert np.array_equal(logprobs[4:], expected(ids[4:], shift=0.5))
        [update] = [body for path, body in fake.calls if path == "/update_weights_from_disk"]
        assert (update["flush_cache"], update["weight_version"]) == (True, "4")
        fake.faults = ["other_version"]
        with pytest.raises(EngineError, match="given policy version 4 and answered with '77'"):
            await ask(engine, PROMPT)


async def test_weights_that_the_server_does_not_take_are_an_error_with_what_it_needs(tiny: Path) -> None:
    fake = FakeSglang()
    async with engine_at(fake, tiny) as engine:
        fake.success = False
        for adapter in (True, False):
            with pytest.raises(EngineError, match=r"not today.*--enable-lora"):
                await engine.publish(policy(0.5, adapter=adapter), 1)
        fake.success = True
        assert (await ask(engine, PROMPT, max_tokens=3)).versions.tolist() == [0, 0, 0]
