"""The proxy over the vLLM engine, with faults and publishes in mid-reply: the record is what was on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from vllm_fake import FakeVllm, expected, policy

from polarlike.dialects.openai_chat import OpenAIChat
from polarlike.engines.base import EngineOptions
from polarlike.engines.log import read_log
from polarlike.engines.vllm import VllmEngine, create
from polarlike.proxy.server import Proxy, listen
from polarlike.proxy.settings import SessionSettings
from polarlike.store import Store
from reconstruct.evidence import compare_with_engine_log


@asynccontextmanager
async def serving(fake: FakeVllm, tiny: Path, tmp_path: Path) -> AsyncIterator[tuple[VllmEngine, Any, Any]]:
    """The engine, a function that asks the proxy, and one that ends the session and returns (calls, evidence)."""
    async with fake.serving() as url:
        options = EngineOptions(model=tiny, log=tmp_path / "engine.jsonl", extra={"stream_interval": 4})
        engine = create(url, options)
        await engine.start()
        store = Store(f"sqlite:///{tmp_path / 'store.db'}")
        proxy = Proxy(engine, store, [OpenAIChat()])
        session = await proxy.open_session(SessionSettings())
        runner, port = await listen(proxy.app(), "127.0.0.1", 0)

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}, timeout=30) as client:
                body = {"model": "m", "messages": messages, "max_tokens": 12}
                answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
                answer.raise_for_status()
                message: dict[str, Any] = answer.json()["choices"][0]["message"]
                return message

        async def recorded() -> tuple[list[Any], dict[str, Any]]:
            await proxy.close_session(session)  # by then every reply's delivery is in the store
            calls = store.calls(session.session_id)
            return calls, compare_with_engine_log(calls, read_log(tmp_path / "engine.jsonl"))

        try:
            yield engine, ask, recorded
        finally:
            await proxy.close()
            await runner.cleanup()
            await engine.close()
            await store.close()


async def test_a_connection_that_breaks_in_mid_reply_loses_no_token(tiny: Path, tmp_path: Path) -> None:
    fake = FakeVllm()
    async with serving(fake, tiny, tmp_path) as (_, ask, recorded):
        first = {"role": "user", "content": "one"}
        fake.faults = ["reset_late"]
        reply = await ask([first])
        await ask([first, reply, {"role": "user", "content": "two"}])
        calls, evidence = await recorded()
    assert [c.completion_ids.size for c in calls] == [12, 12]
    assert (evidence["trainable"], evidence["equal"]) == (24, 24)
    broken, rest = [r for r in fake.requests if r.get("stream")][:2]
    assert rest["prompt"] == [*broken["prompt"], *calls[0].completion_ids[: 12 - rest["max_tokens"]].tolist()]


async def test_whole_weights_in_mid_reply_give_each_token_its_version(tiny: Path, tmp_path: Path) -> None:
    fake = FakeVllm()
    async with serving(fake, tiny, tmp_path) as (engine, ask, recorded):
        while fake.arrived.locked() is False:  # those of the probe
            await fake.arrived.acquire()
        fake.gate.clear()
        fake.tokens_before_gate = 4
        asking = asyncio.create_task(ask([{"role": "user", "content": "one"}]))
        await fake.arrived.acquire()
        await engine.publish(policy(0.5, adapter=False), 1)
        fake.gate.set()
        await asking
        [call], evidence = await recorded()
    assert call.completion_ids.size == 12
    assert (evidence["trainable"], evidence["equal"]) == (12, 12)
    assert call.versions[-1] == 1
    for version, shift in ((0, 0.0), (1, 0.5)):
        of_it = call.versions == version
        assert np.array_equal(call.logprobs[of_it], expected(call.completion_ids[of_it], shift))
