"""The vLLM engine on vLLM itself, over a tiny model that transformers computes as well. One server for all tests but
the last, started from examples/vllm/serve.sh, so that what the documents tell a user to run is what is tested."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines_helpers import ask, other_weights, plain_logprobs, plain_model
from peft import LoraConfig, get_peft_model
from rich.console import Console

from polarlike.commands import train
from polarlike.config import load_config
from polarlike.engines.base import EngineError, EngineOptions, GenerateRequest, PolicyWeights
from polarlike.engines.log import read_log
from polarlike.engines.vllm import VllmEngine, create
from polarlike.records import PolarError, Sampling
from polarlike.rollouts.folder import RunFolder
from trainers import rescore

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm"
PROMPT = np.arange(5, 60, dtype=np.int32)
CLOSE = {"atol": 1e-4, "rtol": 0}


@contextmanager
def server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """A server on a free port; its processes are one group, which is ended with it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(EXAMPLE / "serve.sh"), str(model), str(port), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            _kill(process.pid)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tiny, tmp_path_factory.mktemp("vllm") / "server.log") as found:
        yield found


@asynccontextmanager
async def engine_at(url: str, tiny: Path, **fields: Any) -> AsyncIterator[VllmEngine]:
    engine = create(url, EngineOptions(model=tiny, **fields))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def lora_of(tiny: Path, seed: int) -> Any:
    """A LoRA over the tiny model, far from its start."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain_model(tiny), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def no_folder(folder: Path) -> None:
    raise AssertionError("a LoRA needs no whole folder")


def adapter(model: Any) -> PolicyWeights:
    return PolicyWeights(dict, no_folder, model.save_pretrained)


def whole(model: Any) -> PolicyWeights:
    return PolicyWeights(model.state_dict, model.save_pretrained)


async def test_ids_and_logprobs_are_those_of_a_plain_forward_and_of_the_log(
    url: str, tiny: Path, tmp_path: Path
) -> None:
    model = plain_model(tiny)
    async with engine_at(url, tiny, log=tmp_path / "log.jsonl", temperature=0.6) as engine:
        assert (engine.context_length, engine.reports_sampled) == (2048, True)
        asked = [("a", 1.0, 60), ("b", 0.6, 60), ("c", 1.4, 60), ("d", 0.0, 20)]
        replies = await asyncio.gather(*[ask(engine, PROMPT, n, max_tokens=k, temperature=t) for n, t, k in asked])
    log = read_log(tmp_path / "log.jsonl")
    for (name, temperature, size), reply in zip(asked, replies, strict=True):
        assert (reply.ids.size, reply.finish_reason, set(reply.versions.tolist())) == (size, "length", {0})
        np.testing.assert_allclose(
            reply.logprobs, plain_logprobs(model, PROMPT, reply.ids, temperature or 1.0), **CLOSE
        )
        entry = log[name]
        assert entry.prompt_ids.tolist() == PROMPT.tolist()
        assert entry.completion_ids.tolist() == reply.ids.tolist()
        assert entry.logprobs.tolist() == reply.logprobs.tolist()


async def test_a_stop_id_and_a_stop_string_end_a_reply_and_are_part_of_it(url: str, tiny: Path) -> None:
    async with engine_at(url, tiny) as engine:
        free = await ask(engine, PROMPT, max_tokens=30, seed=7)
        assert engine.template is not None
        stop = int(free.ids[9])
        first = free.ids.tolist().index(stop)
        stopped = await ask(engine, PROMPT, "r", (stop,), max_tokens=30, seed=7)
        assert (stopped.ids.tolist(), stopped.finish_reason) == (free.ids[: first + 1].tolist(), "stop")
        text = next(engine.template.decode(free.ids[k : k + 1]) for k in range(5, 30) if _is_text(engine, free.ids[k]))
        said = await ask(engine, PROMPT, max_tokens=30, seed=7, stop=(text,))
        assert said.finish_reason == "stop"
        assert text in engine.template.decode(said.ids)
        assert text not in engine.template.decode(said.ids[:-1])


def _is_text(engine: VllmEngine, token: int) -> bool:
    assert engine.template is not None
    return engine.template.decode(np.array([token], np.int32)).strip().isalnum()


async def test_scores_are_those_of_a_plain_forward(url: str, tiny: Path) -> None:
    model = plain_model(tiny)
    async with engine_at(url, tiny) as engine:
        np.testing.assert_allclose(
            await engine.score(PROMPT, 20, 1.0), plain_logprobs(model, PROMPT[:20], PROMPT[20:]), **CLOSE
        )


async def test_each_adapter_is_that_of_peft_and_its_tokens_carry_its_version(url: str, tiny: Path) -> None:
    first, second = lora_of(tiny, 1), lora_of(tiny, 2)
    async with engine_at(url, tiny) as engine:
        base = await ask(engine, PROMPT, max_tokens=20)
        running = asyncio.create_task(_read(engine, 1500))
        await engine.publish(adapter(first), 1)
        one = await ask(engine, PROMPT, max_tokens=40, temperature=0.7)
        await engine.publish(adapter(second), 2)
        two = await ask(engine, PROMPT, max_tokens=40)
        across = await running
        scores = await engine.score(np.concatenate([PROMPT, two.ids]), PROMPT.size, 1.0)
    assert [set(r.versions.tolist()) for r in (base, one, two)] == [{0}, {1}, {2}]
    np.testing.assert_allclose(one.logprobs, plain_logprobs(first, PROMPT, one.ids, 0.7), **CLOSE)
    np.testing.assert_allclose(two.logprobs, plain_logprobs(second, PROMPT, two.ids), **CLOSE)
    np.testing.assert_allclose(scores, two.logprobs, **CLOSE)
    ids, logprobs, versions = across
    assert set(versions.tolist()) == {0}  # a reply stays with the policy it began with
    np.testing.assert_allclose(logprobs, plain_logprobs(plain_model(tiny), PROMPT, ids), **CLOSE)
    assert np.abs(plain_logprobs(first, PROMPT, ids) - logprobs).max() > 0.1


async def _read(engine: VllmEngine, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    chunks = [c async for c in engine.generate(GenerateRequest("long", PROMPT, Sampling(max_tokens=size)))]
    ids, logprobs, versions = (
        np.concatenate([getattr(c, name) for c in chunks]) for name in ("ids", "logprobs", "versions")
    )
    return ids, logprobs, versions


async def test_leaving_a_reply_frees_the_server(url: str, tiny: Path) -> None:
    async with engine_at(url, tiny) as engine:
        async with aclosing(engine.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=1900)))) as chunks:
            async for chunk in chunks:
                assert chunk.ids.size
                break
        for _ in range(200):
            if not await _running(engine):
                return
            await asyncio.sleep(0.05)
    raise AssertionError("the server still samples a reply that nobody reads")


async def _running(engine: VllmEngine) -> int:
    metrics = str(await engine.wire.get("/metrics"))
    [line] = [x for x in metrics.splitlines() if x.startswith("vllm:num_requests_running")]
    return int(float(line.split()[-1]))


async def test_weights_that_the_server_took_in_part_are_caught_by_the_rescore(url: str, tiny: Path) -> None:
    """The CPU build answers 200 to reload_weights and keeps its linear layers."""
    model = plain_model(tiny)
    moved = plain_model(tiny, other_weights(model))
    async with engine_at(url, tiny) as engine:
        assert engine.template is not None
        sample = rescore.fixed_sample(engine.template)
        limits = rescore.Limits(rescore.FLOAT32_MAX, None)

        async def compare(held: Any) -> dict[str, float]:
            ours = plain_logprobs(held, sample.ids[:1], sample.ids[1:])
            return rescore.compare(sample, ours, await engine.score(sample.ids, 1, 1.0))

        rescore.check(await compare(model), limits, engine)
        running = asyncio.create_task(_read(engine, 1000))
        await asyncio.sleep(0.3)
        await engine.publish(whole(moved), 1)
        with pytest.raises(PolarError, match="vllm does not serve what the trainer holds at policy version 1"):
            rescore.check(await compare(moved), limits, engine)
        assert (await ask(engine, PROMPT, max_tokens=4)).versions.tolist() == [1] * 4
        _, _, versions = await running  # as the score did
        assert versions.size == 1000
        assert (np.diff(versions) >= 0).all()
        await engine.publish(whole(model), 2)  # the next test's server is whole again
        rescore.check(await compare(model), limits, engine)


async def test_a_prompt_beyond_the_context_and_an_adapter_that_is_not_there_are_one_sentence(
    url: str, tiny: Path, tmp_path: Path
) -> None:
    async with engine_at(url, tiny) as engine:
        with pytest.raises(EngineError, match="no room for a reply"):
            await ask(engine, np.full(2048, 7, np.int32))
        with pytest.raises(EngineError, match="--enable-lora"):
            await engine.publish(PolicyWeights(dict, no_folder, lambda folder: folder.mkdir()), 1)
        assert (await ask(engine, PROMPT, max_tokens=4)).versions.tolist() == [0] * 4


async def test_a_lora_policy_trains_on_the_server_and_holds_what_the_example_checks(
    url: str, tiny: Path, tmp_path: Path
) -> None:
    make_tasks, check = (_example(name) for name in ("make_tasks", "check"))
    make_tasks.main(tmp_path / "tasks.jsonl")
    config = load_config(
        EXAMPLE / "train.yaml",
        {
            "tasks": str(tmp_path / "tasks.jsonl"),
            "out": tmp_path / "run",
            "engine.spec": f"vllm:{url}",
            "engine.model": tiny,
            "sampling.max_tokens": 16,
            "samples": 3,
            "train.steps": 2,
            "train.tasks_per_step": 2,
        },
    )
    await train.run(config, Console(file=io.StringIO()))
    folder = RunFolder(tmp_path / "run")
    published = [m for m in folder.metrics() if m["kind"] == "publish"]
    assert [m["policy_version"] for m in published] == [0, 1, 2]
    assert all(m["rescore_max"] < 1e-4 for m in published)
    assert all(m["rescore_moved"] > 10 * m["rescore_max"] for m in published[1:])
    assert check.main(tmp_path / "run") == 0


def _example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"vllm_example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_server_without_the_flag_is_found_out(tiny: Path, tmp_path: Path) -> None:
    with server(tiny, tmp_path / "server.log", "--logprobs-mode", "raw_logprobs") as raw:
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            async with engine_at(raw, tiny, temperature=0.7):
                pass
        async with engine_at(raw, tiny, temperature=1.0) as engine:
            reply = await ask(engine, PROMPT, max_tokens=20)
    np.testing.assert_allclose(reply.logprobs, plain_logprobs(plain_model(tiny), PROMPT, reply.ids), **CLOSE)
