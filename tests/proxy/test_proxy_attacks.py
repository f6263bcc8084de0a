"""Bodies, headers and connections that no well-meaning client sends: each gets a clear status in the client's form."""

import asyncio
import gzip
import json
import re
import time
from typing import Any

import httpx
import numpy as np
import pytest
from proxy_fakes import BASH, call

from polarlike.proxy import server
from polarlike.proxy.settings import SessionSettings
from polarlike.records import Cause, Delivery

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def messages(*given: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(given)}).encode()


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def tool_call(**fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}, **fields}


def turn(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "out"}


async def post(served: Any, content: bytes, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(headers=served.headers, timeout=20) as http:
        return await http.post(served.base_url + CHAT, content=content, headers=headers)


async def post_and_leave(served: Any, content: bytes) -> None:
    """A client that goes as soon as the engine has its request."""
    request = asyncio.create_task(post(served, content))
    await served.engine.asked.acquire()
    request.cancel()
    await asyncio.wait([request])


async def calls(served: Any) -> list[Any]:
    await asyncio.sleep(0.05)
    await served.session.settle()
    return await asyncio.to_thread(served.store.calls, served.session.session_id)


REFUSED = {
    "invalid UTF-8": b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate pair": b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    "1e400": b'{"model": "m", "temperature": 1e400, "messages": [{"role": "user", "content": "x"}]}',
    "NaN": b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    "a fractional limit": body(max_tokens=1.5),
    "a number of 5,000 digits": b'{"model": "m", "seed": ' + b"9" * 5000 + b', "messages": []}',
    "JSON past the parser's depth": b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep tools": body(tools=[{"type": "function", "function": {"name": "f", "parameters": deep(300)}}]),
    "deep metadata": body(metadata=deep(900)),
    "deep arguments as an object": messages(
        USER, turn(tool_call(function={"name": "f", "arguments": deep(400)})), RESULT
    ),
    "messages that are null": body(messages=None),
    "a message that is null": messages(USER, None),
    "a message that is a list": messages([USER]),
    "content that is a number": messages({"role": "user", "content": 5}),
    "content that is null": messages({"role": "user", "content": None}),
    "a part of unknown type": messages({"role": "user", "content": [{"type": "video", "video": "x"}]}),
    "a part that is null": messages({"role": "user", "content": [None]}),
    "a role of a million letters": messages({"role": "r" * 1_000_000, "content": "x"}),
    "a role that is null": messages({"role": None, "content": "x"}),
    "tool_calls that are a number": messages(USER, {"role": "assistant", "tool_calls": 5}),
    "tool_calls that are an object": messages(USER, {"role": "assistant", "tool_calls": {"id": "c"}}),
    "tool_calls that are a string": messages(USER, {"role": "assistant", "tool_calls": "none"}),
    "a tool call without a function": messages(USER, turn({"id": "c1"})),
    "a tool call whose name is null": messages(USER, turn(tool_call(function={"name": None, "arguments": ""}))),
    "a tool message with a null id": messages(USER, {"role": "tool", "tool_call_id": None, "content": "x"}),
    "tools that are an object": body(tools={"name": "f"}),
    "a tool that is null": body(tools=[None]),
    "stream as a word": body(stream="false"),
    "stream as a number": body(stream=1),
    "stream_options as a list": body(stream_options=[1]),
    "n = 0": body(n=0),
    "n as a list": body(n=[1]),
    "stop as an object": body(stop={"a": 1}),
    "a model that is a number": body(model=5),
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED.keys())
async def test_what_cannot_be_honoured_is_a_short_400_and_leaves_no_call(serve: Any, content: bytes) -> None:
    served = await serve(lambda r: "hello")
    got = await post(served, content)
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) < 600
    assert await calls(served) == []
    assert (await post(served, body())).status_code == 200


TAKEN = {
    "null in every optional field": body(
        **dict.fromkeys(
            (
                "tools",
                "stream",
                "stream_options",
                "tool_choice",
                "n",
                "temperature",
                "top_p",
                "max_tokens",
                "stop",
                "seed",
                "response_format",
                "logit_bias",
                "functions",
                "user",
                "metadata",
                "logprobs",
            )
        )
    ),
    "an empty list of parts": messages({"role": "user", "content": []}),
    "a tool result that answers no call": messages(USER, RESULT),
    "a first message from the assistant": messages({"role": "assistant", "content": "hello"}),
    "a last message from the assistant": messages(USER, {"role": "assistant", "content": "The answer is"}),
    "a system message in the middle": messages(USER, {"role": "system", "content": "be brief"}, USER),
    "only a system message": messages({"role": "system", "content": "be brief"}),
    "a tool call with a null id": messages(USER, turn(tool_call(id=None)), RESULT),
    "an assistant turn with nothing in it": messages(USER, {"role": "assistant", "content": None}, USER),
    "duplicate keys": b'{"model": "a", "model": "m", "messages": [], "messages": [{"role": "user", "content": "x"}]}',
    "arguments nested 400 deep, as text": messages(
        USER, turn(tool_call(id=None, function={"name": "f", "arguments": nested(400)})), RESULT
    ),
    "arguments that are no JSON": messages(
        USER, turn(tool_call(id=None, function={"name": "f", "arguments": '{"a": '})), RESULT
    ),
    "a thousand tools": body(tools=[{**BASH, "function": {**BASH["function"], "name": f"f{k}"}} for k in range(1000)]),
    "NUL and other controls": messages({"role": "user", "content": "\x00\x01\x1b[31m\u202e\ufeff\ue000\ue001"}),
}


@pytest.mark.parametrize("content", TAKEN.values(), ids=TAKEN.keys())
async def test_what_is_odd_but_clear_is_answered_and_recorded_as_the_engine_saw_it(serve: Any, content: bytes) -> None:
    served = await serve(lambda r: "hello", context=1_000_000)
    got = await post(served, content)
    assert got.status_code == 200, got.text
    assert got.json()["choices"][0]["message"]["content"] == "hello"
    [recorded] = await calls(served)
    assert np.array_equal(recorded.suffix_ids, served.engine.requests[0].prompt_ids)
    assert recorded.delivery is Delivery.FLUSHED


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
async def test_another_method_is_a_405_that_names_the_right_one(serve: Any, method: str) -> None:
    served = await serve(lambda r: "hello")
    async with httpx.AsyncClient(headers=served.headers) as http:
        got = await http.request(method, served.base_url + CHAT)
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert got.headers["content-type"].startswith("application/json")
    if method != "HEAD":
        assert "POST" in got.json()["error"]["message"]


async def test_a_compressed_body_is_read_and_a_broken_one_refused(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    packed = gzip.compress(body())
    encoding = {"Content-Encoding": "gzip"}
    assert (await post(served, packed, **encoding)).status_code == 200
    for broken in (body(), packed[:-12]):
        got = await post(served, broken, **encoding)
        assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_that_unpacks_past_the_limit_is_a_413(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 2**20)
    served = await serve(lambda r: "hello")
    for content, headers in (
        (body(metadata={"pad": "x" * 2**20}), {}),
        (gzip.compress(body(metadata={"pad": "x" * 2**24})), {"Content-Encoding": "gzip"}),
    ):
        got = await post(served, content, **headers)
        assert got.status_code == 413
        assert "1 MB" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", [b"Bearer \xff\xfe", b"Bearer", b"Basic abc", "Bearer kéy".encode(), b"Bearer a b c", b"\xe2\x98\x83"]
)
async def test_a_key_of_any_bytes_is_a_401(serve: Any, header: bytes) -> None:
    served = await serve(lambda r: "hello")
    async with httpx.AsyncClient() as http:
        got = await http.post(served.base_url + CHAT, content=body(), headers=[(b"Authorization", header)])
        foreign = await http.post(f"{served.base_url}/s/s%C3%A9ss{CHAT}", content=body(), headers=served.headers)
    assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("count", ["²", "-1", "1.5", "x", "", "9" * 5000])
async def test_a_retry_header_that_is_no_number_is_no_retry(serve: Any, count: str) -> None:
    served = await serve(lambda r: "hello")
    header = count.encode()[:4000]
    async with httpx.AsyncClient(headers=served.headers) as http:
        got = await http.post(served.base_url + CHAT, content=body(), headers=[(b"x-stainless-retry-count", header)])
    assert got.status_code == 200


async def raw(
    served: Any, head: str, content: bytes, *, half_close: asyncio.Semaphore | None = None, wait: float = 5
) -> bytes:
    """What the server sends back on one connection until it closes it, or until `wait` seconds are over. half_close:
    our half is closed once this can be acquired."""
    port = int(served.base_url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace("\n", "\r\n").encode() + content)
    if half_close:
        await half_close.acquire()
        writer.write_eof()
    got = b""
    try:
        async with asyncio.timeout(wait):
            while piece := await reader.read(65536):
                got += piece
    except TimeoutError:
        pass
    finally:
        writer.close()
    return got


def head(served: Any, length: int, extra: str = "") -> str:
    return (
        f"POST {CHAT} HTTP/1.1\nHost: x\nAuthorization: Bearer {served.session.key}\n"
        f"Content-Length: {length}\n{extra}\n"
    )


async def test_requests_on_one_connection_are_answered_in_order_after_an_error_too(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    bad, good = b"{", body()
    first, second = head(served, len(bad)), head(served, len(good), "Connection: close\n")
    got = await raw(served, first, bad + second.replace("\n", "\r\n").encode() + good)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"400", b"200"]
    assert [c.delivery for c in await calls(served)] == [Delivery.FLUSHED]


async def test_a_body_that_does_not_arrive_is_a_408(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BODY_S", 0.2)
    served = await serve(lambda r: "hello")
    got = await raw(served, head(served, 1000, "Connection: close\n"), b'{"model"', wait=3)
    assert got.startswith(b"HTTP/1.1 408")
    assert b"did not arrive" in got
    assert (await post(served, body())).status_code == 200


async def test_a_client_that_leaves_in_mid_body_leaves_nothing(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    await raw(served, head(served, 1000), b'{"model"', wait=0.1)
    await raw(served, head(served, 1000), b'{"model"', half_close=asyncio.Semaphore(1), wait=1)
    assert await calls(served) == []
    assert (await post(served, body())).status_code == 200


async def test_a_client_that_closes_its_half_counts_as_gone(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", SessionSettings(grace_s=0.1), per_chunk=1, delay=0.1)
    await raw(served, head(served, len(body())), body(), half_close=served.engine.asked, wait=2)
    await asyncio.sleep(0.5)
    [recorded] = await calls(served)
    assert recorded.delivery is Delivery.ABORTED
    assert len(served.engine.stopped) == 1


async def test_a_reply_to_one_body_from_two_sessions_is_two_replies(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    other = await served.proxy.open_session(SessionSettings())
    for key in (served.session.key, other.key):
        got = await post(served, body(), Authorization=f"Bearer {key}", **{"x-stainless-retry-count": "2"})
        assert got.status_code == 200
    assert len(served.engine.requests) == 2
    [own] = await calls(served)
    [theirs] = await asyncio.to_thread(served.store.calls, other.session_id)
    assert own.call_id != theirs.call_id
    assert (own.retries, theirs.retries) == (0, 0)


async def test_each_of_two_equal_samples_is_retried_by_its_own_client(serve: Any) -> None:
    """The older sample's connection breaks while the newer one's is open: the retry takes the orphan."""
    count = iter(range(9))
    served = await serve(lambda r: f"answer {next(count)}", per_chunk=1, delay=0.3)
    first = asyncio.create_task(post(served, body()))
    await served.engine.asked.acquire()
    second = asyncio.create_task(post(served, body()))
    await served.engine.asked.acquire()
    first.cancel()
    await asyncio.sleep(0.3)
    again = await post(served, body(), **{"x-stainless-retry-count": "1"})
    texts = [r.json()["choices"][0]["message"]["content"] for r in (again, await second)]
    assert texts == ["answer 0", "answer 1"]
    assert [(c.retries, c.delivery) for c in await calls(served)] == [(1, Delivery.FLUSHED), (0, Delivery.FLUSHED)]


async def test_two_clients_on_one_reply_and_one_of_them_leaves(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", SessionSettings(grace_s=0), per_chunk=1, delay=0.1)
    stays = asyncio.create_task(post(served, body()))
    await served.engine.asked.acquire()
    leaves = asyncio.create_task(post(served, body(), **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.5)
    leaves.cancel()
    assert (await stays).json()["choices"][0]["message"]["content"] == "a b c d e f g h"
    [recorded] = await calls(served)
    assert (recorded.retries, recorded.delivery) == (1, Delivery.FLUSHED)
    assert served.engine.stopped == []


async def test_a_retry_that_comes_while_a_reply_is_being_stopped_is_a_new_sample(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", SessionSettings(grace_s=0), per_chunk=1, delay=0.05)
    held = asyncio.Event()
    put = served.store.put_call

    async def slow(c: Any) -> None:
        await held.wait()
        await put(c)

    served.store.put_call = slow
    await post_and_leave(served, body())
    await asyncio.sleep(0.3)  # stopped by now, and waiting for the store
    again = asyncio.create_task(post(served, body(), **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.1)
    held.set()
    assert (await again).status_code == 200
    assert [c.delivery for c in await calls(served)] == [Delivery.ABORTED, Delivery.FLUSHED]


async def test_a_long_prompt_keeps_no_other_session_waiting(serve: Any) -> None:
    served = await serve(lambda r: "hello", context=5_000_000)
    other = await served.proxy.open_session(SessionSettings())
    long = asyncio.create_task(post(served, messages({"role": "user", "content": "some words of a file " * 150_000})))
    waits, start = [], time.monotonic()
    while not long.done():
        began = time.monotonic()
        assert (await post(served, body(), Authorization=f"Bearer {other.key}")).status_code == 200
        waits.append(time.monotonic() - began)
    assert (await long).status_code == 200
    assert len(waits) > 3  # the long prompt did take its time
    assert max(waits) < (time.monotonic() - start) / 2


async def test_a_prompt_far_past_the_context_is_refused_before_it_is_encoded(serve: Any) -> None:
    served = await serve(lambda r: "hello", context=4096)
    began = time.monotonic()
    got = await post(served, messages({"role": "user", "content": "word " * 10_000_000}))
    assert (got.status_code, got.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert time.monotonic() - began < 10


async def test_a_session_that_closes_while_its_clients_wait_answers_each(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", per_chunk=1, delay=0.2)
    waiting = [asyncio.create_task(post(served, body(stream=k % 2 == 0))) for k in range(4)]
    for _ in waiting:
        await served.engine.asked.acquire()
    await served.proxy.close_session(served.session)
    got = [await w for w in waiting]
    for k, response in enumerate(got):
        if k % 2:
            assert response.status_code == 500
        assert "stopped" in response.text
    assert [c.delivery for c in await calls(served)] == [Delivery.ABORTED] * 4


async def test_a_reply_started_and_aborted_in_one_breath_ends(serve: Any) -> None:
    served = await serve(lambda r: "hello", delay=5)
    request = served.proxy.dialects[0].parse(body())
    generation = await served.session.generation(request, body(), dialect="openai-chat", marked_retry=False)
    await generation.abort()
    assert generation.done.is_set()
    [recorded] = await calls(served)
    assert recorded.delivery is Delivery.ABORTED


async def test_a_fault_of_ours_is_a_500_in_the_clients_format(serve: Any) -> None:
    served = await serve(lambda r: "hello")
    served.session.planner.plan = lambda messages, tools: 1 // 0
    got = await post(served, body())
    assert (got.status_code, got.json()["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("said", "text", "malformed"),
    [
        ('<tool_call>\n{"name": "f", "arguments": ' + nested(3000) + "}\n</tool_call>", "[[[", 1),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>", "999", 1),
        ('<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>', "ud83d", 0),
        ('<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>', '"name": 5', 0),
        ("<tool_call>\n[1, 2]\n</tool_call>", "[1, 2]", 1),
    ],
)
async def test_a_sampled_call_that_nobody_can_read_reaches_the_client_as_text(
    serve: Any, said: str, text: str, malformed: int
) -> None:
    served = await serve(lambda r: said)
    template = served.engine.template
    tokens = template._tokenizer.encode(said + "<|im_end|>", add_special_tokens=False).ids  # its markup as a policy's
    template.encode_reply = lambda prompt_ids, reply: np.asarray(tokens, np.int32)
    got = await post(served, body(tools=[BASH], max_tokens=20_000))
    assert got.status_code == 200, got.text
    message = got.json()["choices"][0]["message"]
    assert text in message["content"]
    [recorded] = await calls(served)
    assert recorded.malformed_calls == malformed
    echoed = await post(served, messages(USER, message, USER))
    assert echoed.status_code == 200, echoed.text


async def test_arguments_that_a_strict_parser_refuses_are_counted_and_sent_as_sampled(serve: Any) -> None:
    served = await serve(lambda r: call("x") | {"tool_calls": [_raw_call('{"a": NaN}')]})
    got = (await post(served, body(tools=[BASH]))).json()["choices"][0]["message"]
    assert got["tool_calls"][0]["function"]["arguments"] == '{"a": NaN}'
    [recorded] = await calls(served)
    assert recorded.malformed_calls == 1
    again = json.dumps({"model": "m", "messages": [USER, got, RESULT], "tools": [BASH]}).encode()
    assert (await post(served, again)).status_code == 200
    assert [c.cause for c in await calls(served)] == [Cause.FIRST, Cause.CONTINUES]


def _raw_call(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}
