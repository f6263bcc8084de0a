"""Hundreds of sessions whose clients leave at random moments, with an engine that takes its time."""

import asyncio
import random
import tracemalloc
from collections import Counter
from typing import Any

import httpx
import pytest

from polarlike.proxy.settings import SessionSettings
from polarlike.records import Delivery

CHAT = "/v1/chat/completions"
CLIENTS = 200


async def visit(http: httpx.AsyncClient, url: str, key: str, k: int, rng: random.Random) -> str | None:
    """One request that its client may give up at any moment; the reply's id if it came whole."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"request {k}"}], "stream": k % 2 == 0}
    headers = {"Authorization": f"Bearer {key}"}

    async def ask() -> str | None:
        async with http.stream("POST", url, json=body, headers=headers) as response:
            text = (await response.aread()).decode()
        assert response.status_code == 200, text
        if k % 2 == 0 and "[DONE]" not in text:
            return None
        return "call_" + text.split("chatcmpl-call_", 1)[1][:24]

    patience = rng.choice((0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2, 60))
    try:
        return await asyncio.wait_for(ask(), patience)
    except (TimeoutError, httpx.TransportError):
        return None


async def storm(served: Any, sessions: list[Any], seed: int) -> list[str]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        visits = (
            visit(http, served.base_url + CHAT, sessions[k % len(sessions)].key, k + seed * CLIENTS, rng)
            for k in range(CLIENTS)
        )
        return [got for got in await asyncio.gather(*visits) if got]


@pytest.mark.slow
async def test_a_storm_of_disconnects_leaves_nothing_running_and_every_call_on_record_once(serve: Any) -> None:
    settings = SessionSettings(grace_s=0.1, streaming="live", keep_alive_s=0.1)
    served = await serve(lambda r: "one two three four five six", per_chunk=2, delay=0.15)
    sessions = [await served.proxy.open_session(settings) for _ in range(50)]
    held = []
    tracemalloc.start()
    try:
        for seed in range(3):
            received = await storm(served, sessions, seed)
            generations = [g for s in sessions for gs in s._by_body.values() for g in gs]
            await asyncio.wait_for(asyncio.gather(*(g.done.wait() for g in generations)), 30)
            for session in sessions:
                await session.settle()
            records = [c for s in sessions for c in await asyncio.to_thread(served.store.calls, s.session_id)]
            by_id = {c.call_id: c for c in records}
            assert len(by_id) == len(records) == len(generations) == len(served.engine.requests)
            assert {by_id[i].delivery for i in received} == {Delivery.FLUSHED}
            states = Counter(c.delivery for c in records)
            assert states[Delivery.ABORTED] == len(served.engine.stopped) > 0
            for call in records:
                assert (call.finish_reason == "abort") == (call.delivery is Delivery.ABORTED)
            assert all(g.connections == 0 for g in generations)
            del generations, records, by_id
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # What a finished call keeps is its tokens and its reply: kilobytes, not its connection or its prompt.
    assert (held[2] - held[1]) / CLIENTS < 20_000
    assert all(not s.failures for s in sessions)
    async with httpx.AsyncClient(headers=served.headers, timeout=20) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "still there?"}]}
        assert (await http.post(served.base_url + CHAT, json=body)).status_code == 200
