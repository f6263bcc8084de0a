"""The embedded engine against transformers' own forward pass, and against its own promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines_helpers import ask, other_weights, plain_logits, plain_logprobs, plain_model, published, running

from polarlike.engines.base import EngineError, EngineOptions, GenerateRequest
from polarlike.engines.embedded import create
from polarlike.engines.log import read_log
from polarlike.records import Sampling, UsageError

Ids = Callable[[int], np.ndarray]
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize("folder", ["tiny", "grouped"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_the_models_own_in_a_batch_of_differing_lengths(
    folder: str, temperature: float, random_ids: Ids, request: pytest.FixtureRequest
) -> None:
    model_dir: Path = request.getfixturevalue(folder)
    model = plain_model(model_dir)
    prompts = [random_ids(n) for n in (1, 2, 31, 32, 33, 150, 400)]
    async with running(model_dir, prefill_chunk=100) as engine:
        replies = await asyncio.gather(*[ask(engine, p, max_tokens=40, temperature=temperature) for p in prompts])
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.ids.size == 40
        assert reply.finish_reason == "length"
        np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids, temperature), **CLOSE)
        assert (reply.logprobs <= 0).all()
        assert (reply.versions == 0).all()
        assert (reply.ids.dtype, reply.logprobs.dtype, reply.versions.dtype) == (np.int32, np.float32, np.int32)


async def test_a_group_on_one_prompt_computes_it_once(tiny: Path, random_ids: Ids) -> None:
    model, prompt = plain_model(tiny), random_ids(500)
    async with running(tiny) as engine:
        replies = await asyncio.gather(*[ask(engine, prompt, max_tokens=20) for _ in range(8)])
        stats = engine.stats
    assert stats["prompt_tokens"] == 8 * 500
    # Seven find all but the last token, which each computes anew for its logits.
    assert stats["reused_tokens"] == 7 * 499
    # The prompt, seven last tokens, and all but the last token of each reply.
    assert stats["computed_tokens"] == 500 + 7 + 8 * 19
    assert len({tuple(r.ids.tolist()) for r in replies}) == 8
    for r in replies:
        np.testing.assert_allclose(r.logprobs, plain_logprobs(model, prompt, r.ids), **CLOSE)


async def test_turns_of_a_session_compute_only_what_is_new(tiny: Path, random_ids: Ids) -> None:
    model, prompt = plain_model(tiny), random_ids(300)
    async with running(tiny) as engine:
        for turn in range(6):
            before = engine.stats["computed_tokens"]
            reply = await ask(engine, prompt, max_tokens=10)
            new = 300 if turn == 0 else 1 + 25  # the last sampled token has no keys yet
            assert engine.stats["computed_tokens"] - before == new + 9
            np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids), **CLOSE)
            prompt = np.concatenate([prompt, reply.ids, random_ids(25)])


async def test_sessions_that_part_in_mid_prompt_share_what_they_have_in_common(tiny: Path, random_ids: Ids) -> None:
    model, trunk = plain_model(tiny), random_ids(400)
    prompts = [np.concatenate([trunk[:k], np.full(1, 301, np.int32), random_ids(40)]) for k in (400, 250, 399, 100)]
    async with running(tiny) as engine:
        for prompt, reused in zip(prompts, (0, 250, 399, 100), strict=True):
            before = engine.stats["reused_tokens"]
            reply = await ask(engine, prompt, max_tokens=10)
            assert engine.stats["reused_tokens"] - before == reused
            np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids), **CLOSE)


async def test_new_weights_in_mid_reply_give_each_token_its_own_version(tiny: Path, random_ids: Ids) -> None:
    old = plain_model(tiny)
    weights = other_weights(old)
    new = plain_model(tiny, weights)
    prompts = [random_ids(n) for n in (3, 60, 200)]
    async with running(tiny, stream_interval_s=0.0) as engine:
        started = asyncio.Event()

        async def reading(prompt: np.ndarray) -> list[tuple[int, float, int]]:
            tokens: list[tuple[int, float, int]] = []
            sampling = Sampling(max_tokens=200, temperature=0.8)
            async for c in engine.generate(GenerateRequest("r", prompt, sampling)):
                tokens += zip(c.ids.tolist(), c.logprobs.tolist(), c.versions.tolist(), strict=True)
                if len(tokens) > 5:
                    started.set()
            return tokens

        tasks = [asyncio.create_task(reading(p)) for p in prompts]
        await started.wait()
        await engine.publish(published(weights), 7)
        assert engine.policy_version == 7
        replies = await asyncio.gather(*tasks)
        after = await ask(engine, prompts[1], max_tokens=10)
    for prompt, tokens in zip(prompts, replies, strict=True):
        ids = np.array([t[0] for t in tokens], np.int32)
        versions = np.array([t[2] for t in tokens])
        assert ids.size == 200
        assert set(versions.tolist()) == {0, 7}
        assert (np.diff(versions) >= 0).all()
        expected = np.where(versions == 0, plain_logprobs(old, prompt, ids, 0.8), plain_logprobs(new, prompt, ids, 0.8))
        np.testing.assert_allclose([t[1] for t in tokens], expected, **CLOSE)
    np.testing.assert_allclose(after.logprobs, plain_logprobs(new, prompts[1], after.ids), **CLOSE)
    assert (after.versions == 7).all()


async def test_a_version_that_is_not_higher_is_refused_and_changes_nothing(tiny: Path, random_ids: Ids) -> None:
    model, prompt = plain_model(tiny), random_ids(20)
    weights = other_weights(model)
    async with running(tiny) as engine:
        await engine.publish(published(model.state_dict()), 3)
        for version in (3, 2):
            with pytest.raises(EngineError, match=f"version {version} is not above the current one, 3"):
                await engine.publish(published(weights), version)
        reply = await ask(engine, prompt)
    assert (reply.versions == 3).all()
    np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids), **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "lack 'model.norm.weight'"),
        (lambda w: w.update({"model.extra": torch.zeros(1)}), "name 'model.extra'"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\)"),
    ],
)
async def test_weights_of_another_model_are_refused(tiny: Path, change: Callable[..., object], message: str) -> None:
    weights = dict(plain_model(tiny).state_dict())
    change(weights)
    async with running(tiny) as engine:
        with pytest.raises(EngineError, match=message):
            await engine.publish(published(weights), 1)
        assert engine.policy_version == 0


async def test_a_seed_gives_the_same_tokens_alone_and_among_others(tiny: Path, random_ids: Ids) -> None:
    prompt = random_ids(80)
    async with running(tiny) as engine:
        alone = await ask(engine, prompt, seed=11, max_tokens=60)
        crowd = [ask(engine, random_ids(n), max_tokens=60) for n in (10, 90, 170)]
        among, *_ = await asyncio.gather(ask(engine, prompt, seed=11, max_tokens=60), *crowd)
        other = await ask(engine, prompt, seed=12, max_tokens=60)
    assert alone.ids.tolist() == among.ids.tolist()
    assert alone.ids.tolist() != other.ids.tolist()
    np.testing.assert_allclose(alone.logprobs, among.logprobs, **CLOSE)


async def test_two_engines_of_one_seed_sample_alike_and_repeats_differ(tiny: Path, random_ids: Ids) -> None:
    prompt, seen = random_ids(30), []
    for seed in (5, 5, 6):
        async with running(tiny, seed=seed) as engine:
            seen.append([(await ask(engine, prompt)).ids.tolist() for _ in range(2)])
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert seen[0][0] != seen[0][1]


async def test_greedy_takes_the_likeliest_token_and_reports_its_logprob_at_temperature_one(
    tiny: Path, random_ids: Ids
) -> None:
    model, prompt = plain_model(tiny), random_ids(50)
    async with running(tiny) as engine:
        reply = await ask(engine, prompt, temperature=0.0, max_tokens=12)
    logits = plain_logits(model, np.concatenate([prompt, reply.ids]))[prompt.size - 1 : -1]
    assert reply.ids.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids), **CLOSE)


async def test_a_stop_id_ends_the_reply_and_is_part_of_it(tiny: Path, random_ids: Ids) -> None:
    prompt = random_ids(30)
    async with running(tiny) as engine:
        free = await ask(engine, prompt, seed=1, max_tokens=30)
        k = 12
        stop = int(free.ids[k])
        first = free.ids.tolist().index(stop)
        reply = await ask(engine, prompt, seed=1, max_tokens=30, stop_ids=(stop,))
    assert reply.finish_reason == "stop"
    assert reply.ids.tolist() == free.ids[: first + 1].tolist()


async def test_a_stop_string_across_two_tokens_ends_the_reply(tiny: Path, random_ids: Ids) -> None:
    prompt = random_ids(30)
    async with running(tiny) as engine:
        assert engine.template is not None
        free = await ask(engine, prompt, seed=4, max_tokens=60)
        pieces = [engine.template.decode(free.ids[k : k + 1]) for k in range(60)]
        # The last letter of one token and the first of the next, both plain text.
        k = next(k for k in range(20, 59) if pieces[k].isascii() and pieces[k + 1].isascii())
        stop = pieces[k][-1] + pieces[k + 1][0]
        reply = await ask(engine, prompt, seed=4, max_tokens=60, stop=(stop,))
        text = engine.template.decode(reply.ids)
        before = engine.template.decode(reply.ids[:-1])
    assert reply.finish_reason == "stop"
    assert stop in text
    assert stop not in before
    assert reply.ids.tolist() == free.ids[: reply.ids.size].tolist()


async def test_max_tokens_is_cut_to_the_room_left(tiny: Path, random_ids: Ids) -> None:
    async with running(tiny) as engine:
        assert engine.context_length == 2048
        reply = await ask(engine, random_ids(2040), max_tokens=500)
        assert (reply.ids.size, reply.finish_reason) == (8, "length")
        with pytest.raises(EngineError, match="no room for a reply"):
            await ask(engine, random_ids(2048))


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt is empty"),
        ([100000], {}, "outside the model's vocabulary"),
        ([-1], {}, "outside the model's vocabulary"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -3}, "top_k"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_one_sentence(
    tiny: Path, prompt: list[int], settings: dict[str, float], message: str
) -> None:
    async with running(tiny) as engine:
        with pytest.raises(EngineError, match=message):
            await ask(engine, np.array(prompt, np.int32), **settings)
        assert (await ask(engine, np.array([1], np.int32))).finish_reason == "length"


async def test_closing_the_generator_stops_sampling_and_frees_the_slot(
    tiny: Path, tmp_path: Path, random_ids: Ids
) -> None:
    log = tmp_path / "log.jsonl"
    async with running(tiny, log, max_batch=1, stream_interval_s=0.0) as engine:
        reply = engine.generate(GenerateRequest("cut", random_ids(20), Sampling(max_tokens=2000)))
        first = await anext(reply)
        await reply.aclose()
        # With one slot, this can only be answered once the other is gone.
        await asyncio.wait_for(ask(engine, random_ids(20), "next"), 10)
        steps = engine.stats["steps"]
        await asyncio.sleep(0.1)
        assert engine.stats["steps"] == steps
    entries = read_log(log)
    assert entries["cut"].finish_reason == "abort"
    assert 1 <= entries["cut"].completion_ids.size < 2000
    assert entries["cut"].completion_ids[: first.ids.size].tolist() == first.ids.tolist()
    assert entries["next"].finish_reason == "length"


async def test_a_cancelled_reader_stops_sampling(tiny: Path, random_ids: Ids) -> None:
    async with running(tiny, max_batch=1) as engine:
        task = asyncio.create_task(ask(engine, random_ids(20), max_tokens=2000))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ask(engine, random_ids(20)), 10)


async def test_the_engines_log_says_what_was_given_and_returned(tiny: Path, tmp_path: Path, random_ids: Ids) -> None:
    log, prompts = tmp_path / "log.jsonl", [random_ids(n) for n in (5, 50)]
    async with running(tiny, log) as engine:
        replies = await asyncio.gather(*[ask(engine, p, f"r{k}", temperature=0.5) for k, p in enumerate(prompts)])
        entries = read_log(log)  # before close: a line is on disk before the last chunk comes
    for k, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        entry = entries[f"r{k}"]
        assert entry.prompt_ids.tolist() == prompt.tolist()
        assert entry.completion_ids.tolist() == reply.ids.tolist()
        assert entry.logprobs.tobytes() == reply.logprobs.tobytes()
        assert entry.versions.tolist() == reply.versions.tolist()
        assert (entry.finish_reason, entry.temperature) == ("length", 0.5)


async def test_score_gives_the_models_logprobs_from_a_cold_and_a_warm_tree(tiny: Path, random_ids: Ids) -> None:
    model, ids = plain_model(tiny), random_ids(260)
    async with running(tiny, prefill_chunk=64) as engine:
        for start, temperature in ((1, 1.0), (100, 0.7), (100, 0.7), (259, 1.0), (1, 1.3)):
            got = await engine.score(ids, start, temperature)
            assert got.shape == (260 - start,)
            np.testing.assert_allclose(got, plain_logprobs(model, ids[:start], ids[start:], temperature), **CLOSE)
        assert (await engine.score(ids, 260, 1.0)).size == 0
        with pytest.raises(EngineError, match="must have a token before it"):
            await engine.score(ids, 0, 1.0)


async def test_a_score_that_new_weights_interrupt_is_all_of_one_version(tiny: Path, random_ids: Ids) -> None:
    old, ids = plain_model(tiny), random_ids(1500)
    weights = other_weights(old)
    new = plain_model(tiny, weights)
    async with running(tiny, prefill_chunk=20) as engine:
        scoring = asyncio.create_task(engine.score(ids, 1, 1.0))
        await asyncio.sleep(0.05)
        await engine.publish(published(weights), 1)
        got = await scoring
    expected = [plain_logprobs(m, ids[:1], ids[1:]) for m in (old, new)]
    assert got.shape == (1499,)
    assert min(np.abs(got - e).max() for e in expected) < 1e-4


async def test_a_small_pool_evicts_and_preempts_and_stays_exact(tiny: Path, random_ids: Ids) -> None:
    model = plain_model(tiny)
    prompts = [random_ids(n) for n in (500, 700, 600, 400, 650, 300)]
    async with running(tiny, kv_tokens=2048, max_batch=4) as engine:
        replies = await asyncio.gather(*[ask(engine, p, max_tokens=300) for p in prompts])
        stats = engine.stats
    assert stats["evicted_tokens"] > 0
    assert stats["preempted"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        np.testing.assert_allclose(reply.logprobs, plain_logprobs(model, prompt, reply.ids), **CLOSE)


async def test_the_event_loop_stays_free_while_a_long_prompt_is_computed(tiny: Path, random_ids: Ids) -> None:
    async with running(tiny, prefill_chunk=2048) as engine:
        task = asyncio.create_task(ask(engine, random_ids(2000), max_tokens=40))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.002)
            ticks += 1
    assert ticks > 10


async def test_closing_the_engine_ends_running_requests_with_an_error_and_logs_them(
    tiny: Path, tmp_path: Path, random_ids: Ids
) -> None:
    log = tmp_path / "log.jsonl"
    async with running(tiny, log) as engine:
        task = asyncio.create_task(ask(engine, random_ids(20), "last", max_tokens=2000))
        await asyncio.sleep(0.1)
    with pytest.raises(EngineError, match="closed"):
        await task
    assert read_log(log)["last"].finish_reason == "abort"


async def test_a_fault_in_the_model_reaches_every_request(tiny: Path, random_ids: Ids) -> None:
    async with running(tiny) as engine:
        batch = await asyncio.wrap_future(engine._started().call(lambda b: b))

        def broken(**_: object) -> None:
            raise ValueError("out of order")

        batch.model = broken
        for _ in range(2):
            with pytest.raises(EngineError, match="ValueError: out of order"):
                await ask(engine, random_ids(5))
        with pytest.raises(EngineError, match="out of order"):
            await engine.score(random_ids(5), 2, 1.0)


def test_settings_are_checked(tiny: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'kv_tokens'"):
        create(str(tiny), EngineOptions(extra={"kv_token": 5}))
    with pytest.raises(UsageError, match="context length 2048 or more"):
        create(str(tiny), EngineOptions(extra={"kv_tokens": 100}))
    with pytest.raises(UsageError, match="no dtype 'int4'"):
        create(str(tiny), EngineOptions(dtype="int4"))
    with pytest.raises(UsageError, match="no model folder"):
        create(str(tiny / "nowhere"), EngineOptions())
