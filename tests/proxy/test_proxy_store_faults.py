"""What clients are told when the store cannot take a call, and what is claimed of it: nothing."""

import asyncio
from typing import Any

import httpx

from polarlike.proxy.settings import SessionSettings
from polarlike.records import Cause, Delivery
from polarlike.store import StoreError

USER = {"role": "user", "content": "hi"}


async def post(served: Any, *, stream: bool = False) -> httpx.Response:
    body = {"model": "m", "messages": [USER], "stream": stream}
    async with httpx.AsyncClient(headers=served.headers, timeout=20) as http:
        return await http.post(served.base_url + "/v1/chat/completions", json=body)


async def calls(served: Any) -> list[Any]:
    await asyncio.sleep(0.05)
    await served.session.settle()
    return await asyncio.to_thread(served.store.calls, served.session.session_id)


def readonly(*_: Any) -> Any:
    async def refuse() -> None:
        raise StoreError("The store cannot be written; check its permissions.")

    return refuse()


async def test_a_store_that_refuses_a_call_is_a_500_or_an_error_event_and_nothing_is_on_record(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    put, served.store.put_call = served.store.put_call, readonly
    plain, streamed = await post(served), await post(served, stream=True)
    assert (plain.status_code, plain.json()["error"]["type"]) == (500, "server_error")
    assert "check its permissions" in plain.json()["error"]["message"]
    assert "check its permissions" in streamed.text
    assert "[DONE]" not in streamed.text
    assert "hello" not in streamed.text
    assert len(served.session.failures) == 2
    assert await calls(served) == []
    served.store.put_call = put
    again = await post(served)
    assert again.json()["choices"][0]["message"]["content"] == "hello"
    [recorded] = await calls(served)
    assert (recorded.cause, recorded.delivery) == (Cause.REPLY_DROPPED, Delivery.FLUSHED)


async def test_an_aborted_reply_that_the_store_refuses_is_counted(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", SessionSettings(grace_s=0), per_chunk=1, delay=0.1)
    served.store.put_call = readonly
    request = asyncio.create_task(post(served))
    await served.engine.asked.acquire()
    request.cancel()
    await asyncio.sleep(0.5)
    assert len(served.engine.stopped) == 1
    assert len(served.session.failures) == 1
    assert "check its permissions" in served.session.failures[0]


async def test_a_delivery_that_cannot_be_noted_claims_less_and_is_counted(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    served.store.update_delivery = readonly
    assert (await post(served)).status_code == 200
    [recorded] = await calls(served)
    assert recorded.delivery is Delivery.COMMITTED
    assert len(served.session.failures) == 1
