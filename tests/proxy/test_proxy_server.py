"""The proxy as its clients meet it, driven by the OpenAI SDK and by raw HTTP."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from proxy_fakes import BASH, call

from polarlike.proxy.generation import before_stop
from polarlike.proxy.settings import SamplingSettings, SessionSettings
from polarlike.records import Cause, Delivery

USER = {"role": "user", "content": "list the files"}


def client(served: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.base_url + "/v1", api_key=served.session.key, max_retries=0, **options)


async def calls(served: Any) -> list[Any]:
    await asyncio.sleep(0.02)  # the client may have its reply before the server has noted that it went out
    await served.session.settle()
    return await asyncio.to_thread(served.store.calls, served.session.session_id)


async def test_the_sdk_gets_a_plain_answer_and_the_record_holds_its_tokens(serve: Any) -> None:
    served = await serve(lambda r: "hello there")
    got = await client(served).chat.completions.create(model="m", messages=[USER])
    assert got.choices[0].message.content == "hello there"
    assert got.choices[0].finish_reason == "stop"
    [recorded] = await calls(served)
    template = served.engine.template
    assert template.decode(recorded.completion_ids) == "hello there<|im_end|>"
    assert np.array_equal(recorded.suffix_ids, served.engine.requests[0].prompt_ids)
    assert got.usage.prompt_tokens == recorded.suffix_ids.size
    assert got.usage.completion_tokens == recorded.completion_ids.size
    assert recorded.logprobs == pytest.approx([-0.01 * (k + 1) for k in range(recorded.completion_ids.size)])
    assert recorded.versions.tolist() == [3] * recorded.completion_ids.size
    assert recorded.delivery is Delivery.FLUSHED
    assert recorded.cause is Cause.FIRST


async def test_a_tool_turn_continues_its_parent_token_for_token(serve: Any) -> None:
    replies = iter([call("ls -la", "looking"), "done"])
    served = await serve(lambda r: next(replies))
    sdk = client(served)
    first = await sdk.chat.completions.create(model="m", messages=[USER], tools=[BASH])
    turn = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(turn.tool_calls[0].function.arguments) == {"command": "ls -la"}
    echoed = turn.model_dump(exclude_none=True)
    echoed["tool_calls"][0]["function"]["arguments"] = '{"command":"ls -la"}'  # re-serialised, as some harnesses do
    result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "a.txt"}
    await sdk.chat.completions.create(model="m", messages=[USER, echoed, result], tools=[BASH])
    a, b = await calls(served)
    assert (b.cause, b.parent_id, b.echo_edits) == (Cause.CONTINUES, a.call_id, [])
    assert [m["role"] for m in b.new_messages] == ["tool"]
    whole = np.concatenate([a.suffix_ids, a.completion_ids, b.suffix_ids])
    assert np.array_equal(served.engine.requests[1].prompt_ids, whole)


@pytest.mark.parametrize("streaming", ["whole", "live"])
async def test_a_streamed_answer_folds_to_the_plain_one(serve: Any, streaming: str) -> None:
    said = call("cat é.txt", "I look at the file, and then go on ")
    settings = SessionSettings(streaming=streaming)
    served = await serve(lambda r: dict(said), settings, per_chunk=2, delay=0.01)
    stream = await client(served).chat.completions.create(
        model="m", messages=[USER], tools=[BASH], stream=True, stream_options={"include_usage": True}
    )
    content, arguments, finish, usage, pieces = "", "", None, None, 0
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += bool(choice.delta.content)
            content += choice.delta.content or ""
            for c in choice.delta.tool_calls or []:
                arguments += c.function.arguments
            finish = choice.finish_reason or finish
    [recorded] = await calls(served)
    assert content == recorded.reply["content"]
    assert content.strip() == said["content"].strip()
    assert json.loads(arguments) == {"command": "cat é.txt"}
    assert finish == "tool_calls"
    assert usage.completion_tokens == recorded.completion_ids.size
    assert pieces > 1 if streaming == "live" else pieces == 1


async def test_the_call_is_on_disk_before_its_closing_event_leaves(serve: Any) -> None:
    served = await serve(lambda r: "hi")
    held = asyncio.Event()
    put = served.store.put_call

    async def slow(c: Any) -> None:
        await held.wait()
        await put(c)

    served.store.put_call = slow
    async with httpx.AsyncClient(headers=served.headers) as http:
        body = {"model": "m", "messages": [USER], "stream": True}
        async with http.stream("POST", served.base_url + "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            more = asyncio.ensure_future(_rest(lines))
            await asyncio.sleep(0.2)
            assert not more.done()
            held.set()
            seen += await more
    assert "data: [DONE]" in seen


async def _rest(lines: Any) -> list[str]:
    return [line async for line in lines]


async def test_a_client_that_leaves_stops_the_reply_after_the_grace_period(serve: Any) -> None:
    settings = SessionSettings(grace_s=0.2)
    served = await serve(lambda r: "a b c d e f g h i j k l m n o p", settings, per_chunk=1, delay=0.1)
    async with httpx.AsyncClient(headers=served.headers, timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(served.base_url + "/v1/chat/completions", json={"model": "m", "messages": [USER]})
    await asyncio.sleep(0.6)
    assert len(served.engine.stopped) == 1
    [recorded] = await calls(served)
    assert recorded.delivery is Delivery.ABORTED
    assert 0 < recorded.completion_ids.size < 16


async def test_a_retry_after_a_lost_connection_joins_the_reply_under_way(serve: Any) -> None:
    served = await serve(lambda r: "a b c d e f g h", SessionSettings(grace_s=30), per_chunk=1, delay=0.05)
    body = {"model": "m", "messages": [USER]}
    url = served.base_url + "/v1/chat/completions"
    async with httpx.AsyncClient(headers=served.headers, timeout=0.2) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(url, json=body)
        await asyncio.sleep(0.05)
        again = await http.post(url, json=body, timeout=10)
    assert again.json()["choices"][0]["message"]["content"] == "a b c d e f g h"
    [recorded] = await calls(served)
    assert (recorded.retries, recorded.delivery) == (1, Delivery.FLUSHED)
    assert len(served.engine.requests) == 1


async def test_a_marked_retry_gets_the_finished_reply_and_an_unmarked_repeat_is_a_sample(serve: Any) -> None:
    count = iter(range(9))
    served = await serve(lambda r: f"answer {next(count)}")
    url, body = served.base_url + "/v1/chat/completions", {"model": "m", "messages": [USER]}
    async with httpx.AsyncClient(headers=served.headers) as http:
        texts = [
            (await http.post(url, json=body, headers=h)).json()["choices"][0]["message"]["content"]
            for h in ({}, {"x-stainless-retry-count": "1"}, {})
        ]
    assert texts == ["answer 0", "answer 0", "answer 1"]
    first, second = await calls(served)
    assert (first.retries, second.retries) == (1, 0)
    assert second.cause is Cause.REPLY_DROPPED


async def test_two_open_connections_with_one_body_are_two_samples(serve: Any) -> None:
    count = iter(range(9))
    served = await serve(lambda r: f"answer {next(count)}", delay=0.2)
    sdk = client(served)
    got = await asyncio.gather(*(sdk.chat.completions.create(model="m", messages=[USER]) for _ in range(2)))
    assert {g.choices[0].message.content for g in got} == {"answer 0", "answer 1"}
    assert [c.cause for c in await calls(served)] == [Cause.FIRST, Cause.PARALLEL]


async def test_an_engine_that_fails_in_mid_reply_goes_on_from_what_was_sampled(serve: Any) -> None:
    served = await serve(lambda r: "one two three four five six", per_chunk=2)
    served.engine.fail_after = 4
    await client(served).chat.completions.create(model="m", messages=[USER], max_tokens=50)
    first, second = served.engine.requests
    sampled = second.prompt_ids[first.prompt_ids.size :]
    assert np.array_equal(second.prompt_ids[: first.prompt_ids.size], first.prompt_ids)
    assert sampled.size == 4
    [recorded] = await calls(served)
    assert np.array_equal(recorded.completion_ids[:4], sampled)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "m", "n": 2, "messages": [{"role": "user", "content": "x"}]}', "Only n = 1"),
        (b'{"model": "m", "messages": [{"role": "robot", "content": "x"}]}', "role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"model": "m", "tool_choice": "required", "messages": [{"role": "user", "content": "x"}]}', "tool_choice"),
        (b'{"model": "m", "temperature": "hot", "messages": [{"role": "user", "content": "x"}]}', "temperature"),
        (b'{"model": "m", "max_tokens": 0, "messages": [{"role": "user", "content": "x"}]}', "max_tokens"),
    ],
)
async def test_a_bad_request_is_a_400_in_the_clients_format(serve: Any, body: bytes, says: str) -> None:
    served = await serve(lambda r: "hi")
    async with httpx.AsyncClient(headers=served.headers) as http:
        got = await http.post(served.base_url + "/v1/chat/completions", content=body)
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"]
    assert await calls(served) == []


async def test_unknown_routes_are_404_and_wrong_keys_401(serve: Any) -> None:
    served = await serve(lambda r: "hi")
    other = await served.proxy.open_session(SessionSettings())
    body = {"model": "m", "messages": [USER]}
    async with httpx.AsyncClient() as http:
        unknown = await http.post(served.base_url + "/v1/nothing", json=body, headers=served.headers)
        nobody = await http.post(served.base_url + "/v1/chat/completions", json=body)
        foreign = await http.post(
            f"{served.base_url}/s/{other.session_id}/v1/chat/completions", json=body, headers=served.headers
        )
        own = await http.post(
            f"{served.base_url}/s/{served.session.session_id}/v1/chat/completions", json=body, headers=served.headers
        )
        models = await http.get(served.base_url + "/v1/models", headers=served.headers)
        await served.proxy.close_session(served.session)
        revoked = await http.get(served.base_url + "/v1/models", headers=served.headers)
    assert [r.status_code for r in (unknown, nobody, foreign, own, models, revoked)] == [404, 401, 401, 200, 200, 401]
    assert unknown.json()["error"]["message"] and nobody.json()["error"]["code"] == "invalid_api_key"
    assert models.json()["data"][0]["id"] == "tiny"


async def test_a_prompt_that_leaves_no_room_says_so_in_the_words_clients_know(serve: Any) -> None:
    served = await serve(lambda r: "hi", context=40)
    with pytest.raises(openai.BadRequestError) as caught:
        await client(served).chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 200}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 40 tokens" in caught.value.message


async def test_the_token_limit_is_clamped_to_the_room_and_length_is_reported(serve: Any) -> None:
    served = await serve(lambda r: "word " * 100, context=120)
    got = await client(served).chat.completions.create(model="m", messages=[USER], max_tokens=5000)
    [recorded] = await calls(served)
    assert got.choices[0].finish_reason == "length"
    assert recorded.suffix_ids.size + recorded.completion_ids.size == 120
    assert recorded.sampling.max_tokens == 120 - recorded.suffix_ids.size


async def test_the_runs_sampling_wins_and_both_are_on_record(serve: Any) -> None:
    settings = SessionSettings(sampling=SamplingSettings(temperature=0.7))
    served = await serve(lambda r: "hi", settings)
    await client(served).chat.completions.create(
        model="m", messages=[USER], temperature=0.1, top_p=0.5, seed=7, user="someone", presence_penalty=1.5
    )
    [recorded] = await calls(served)
    sent = served.engine.requests[0].sampling
    assert (sent.temperature, sent.top_p, sent.presence_penalty, sent.seed) == (0.7, 1.0, 0.0, 7)
    assert recorded.requested == {"temperature": 0.1, "top_p": 0.5, "seed": 7, "presence_penalty": 1.5}
    assert recorded.dropped == ["user"]


async def test_keep_alive_comments_come_while_the_engine_thinks(serve: Any) -> None:
    served = await serve(lambda r: "hi", SessionSettings(keep_alive_s=0.1), delay=0.5)
    async with httpx.AsyncClient(headers=served.headers) as http:
        body = {"model": "m", "messages": [USER], "stream": True}
        async with http.stream("POST", served.base_url + "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines()]
    assert sum(line == ": keep-alive" for line in lines) >= 3
    assert lines.index(": keep-alive") < lines.index("data: [DONE]")


async def test_a_body_of_tens_of_megabytes_is_taken(serve: Any) -> None:
    served = await serve(lambda r: "hi", context=40)
    body = {"model": "m", "messages": [{"role": "user", "content": " "}], "metadata": {"pad": "x" * 30_000_000}}
    async with httpx.AsyncClient(headers=served.headers, timeout=60) as http:
        got = await http.post(served.base_url + "/v1/chat/completions", json=body)
    assert got.status_code == 200


async def test_an_edited_echo_keeps_the_sampled_tokens_or_forks(serve: Any) -> None:
    for on_edit, cause in (("keep", Cause.CONTINUES), ("fork", Cause.ECHO_EDITED)):
        replies = iter([call("ls"), "done"])
        served = await serve(lambda r, replies=replies: next(replies), SessionSettings(on_edit=on_edit))
        sdk = client(served)
        turn = (await sdk.chat.completions.create(model="m", messages=[USER], tools=[BASH])).choices[0].message
        echoed = turn.model_dump(exclude_none=True)
        echoed["tool_calls"][0]["function"]["arguments"] = '{"command": "rm -rf x"}'
        result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "-"}
        await sdk.chat.completions.create(model="m", messages=[USER, echoed, result], tools=[BASH])
        _, second = await calls(served)
        assert second.cause is cause
        if cause is Cause.CONTINUES:
            assert second.echo_edits == ["tool_calls[0].arguments"]
        else:
            assert "rm -rf x" in served.engine.template.decode(second.suffix_ids)


async def test_rewrites_reach_the_engine_and_are_counted(serve: Any) -> None:
    rule = {"name": "clock", "pattern": r"time \d+", "replacement": "time 0"}
    served = await serve(lambda r: "hi", SessionSettings(rewrites=[rule]))
    await client(served).chat.completions.create(model="m", messages=[{"role": "user", "content": "time 12345"}])
    [recorded] = await calls(served)
    assert recorded.rewrites == {"clock": 1}
    assert "time 0" in served.engine.template.decode(recorded.suffix_ids)


@pytest.mark.parametrize("streaming", ["whole", "live"])
async def test_a_stop_string_ends_the_answer_and_is_not_in_it(serve: Any, streaming: str) -> None:
    served = await serve(lambda r: "one two END", SessionSettings(streaming=streaming), per_chunk=1, delay=0.06)
    sdk = client(served)
    stream = await sdk.chat.completions.create(model="m", messages=[USER], stop=["END"], stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    plain = await sdk.chat.completions.create(model="m", messages=[USER], stop="END")
    assert text == plain.choices[0].message.content == "one two "
    assert all("END" in served.engine.template.decode(c.completion_ids) for c in await calls(served))


@pytest.mark.parametrize(
    ("text", "stops", "more", "answer"),
    [
        ("a END b", ("END",), False, "a "),
        ("a b", ("END",), False, "a b"),
        ("a b END x", ("x", "END"), False, "a b "),
        ("a EN", ("END",), False, "a EN"),
        ("a EN", ("END",), True, "a "),
        ("a", (), True, "a"),
    ],
)
def test_the_answer_ends_before_the_first_stop_string(text: str, stops: tuple, more: bool, answer: str) -> None:
    assert before_stop(text, stops, more=more) == answer
