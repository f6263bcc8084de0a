"""What a session holds in memory: finished replies without what is on disk, and nothing once it is closed."""

import gc
import sys
import weakref
from typing import Any

import httpx
import numpy as np

from polarlike.records import Cause

CHAT = "/v1/chat/completions"


def reachable(start: object) -> list[Any]:
    """Every object that `start` alone keeps: through attributes and containers, not through the session's own parts."""
    seen: dict[int, Any] = {}
    waiting = [start]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type) or type(one).__name__ in ("Session", "Turn", "module", "function"):
            continue
        seen[id(one)] = one
        waiting += gc.get_referents(one)
    return list(seen.values())


async def converse(served: Any, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin" + " word" * 300}]
    got = []
    async with httpx.AsyncClient(headers=served.headers) as http:
        for turn in range(turns):
            reply = (await http.post(served.base_url + CHAT, json={"model": "m", "messages": messages})).json()
            got.append(reply)
            messages += [reply["choices"][0]["message"], {"role": "user", "content": f"{turn}" + " more" * 300}]
    return got


async def test_a_finished_reply_holds_neither_token_arrays_nor_the_messages_that_asked_for_it(serve: Any) -> None:
    served = await serve(lambda r: "an answer", per_chunk=1)
    await converse(served, 3)
    [one] = [g for gs in served.session._by_body.values() for g in gs if g.plan.cause is Cause.FIRST]
    held = reachable(one.plan) + reachable(one._chunks) + reachable(one.request)
    assert sum(o.nbytes for o in held if isinstance(o, np.ndarray)) == 0
    assert not [o for o in held if isinstance(o, str) and len(o) > 1000]


async def test_a_retry_of_a_finished_reply_gets_its_text_and_its_usage(serve: Any) -> None:
    served = await serve(lambda r: "an answer", per_chunk=1)
    [first] = await converse(served, 1)
    body = {"model": "m", "messages": [{"role": "user", "content": "begin" + " word" * 300}]}
    async with httpx.AsyncClient(headers=served.headers) as http:
        again = (await http.post(served.base_url + CHAT, json=body, headers={"x-stainless-retry-count": "1"})).json()
    assert len(served.engine.requests) == 1
    assert again == first
    assert first["usage"]["completion_tokens"] > 1


async def test_a_closed_session_is_gone_at_once_and_waits_for_no_collector(serve: Any) -> None:
    served = await serve(lambda r: "an answer")
    await converse(served, 3)
    session, served.session = served.session, None
    await served.proxy.close_session(session)
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None, sys.getrefcount(gone())
    finally:
        gc.enable()
