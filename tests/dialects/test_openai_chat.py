"""Chat Completions as pure functions: requests in, events out, and the plain answer as the stream folded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from polarlike.dialects.base import DialectError, ReplyMeta, Usage
from polarlike.dialects.openai_chat import OpenAIChat

DIALECT = OpenAIChat()
META = ReplyMeta("chatcmpl-1", "m", 1700000000, include_usage=True)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def chunks(events: list[bytes]) -> list[dict]:
    assert events[-1] == b"data: [DONE]\n\n"
    return [json.loads(e.removeprefix(b"data: ")) for e in events[:-1]]


def test_messages_take_one_canonical_form() -> None:
    got = DIALECT.parse(
        body(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "hi", "name": "ann"},
                {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "out", "cache_control": {"type": "ephemeral"}},
            ]
        )
    )
    assert got.messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
        {"role": "tool", "content": "out", "tool_call_id": "c1"},
    ]


def test_arguments_sent_as_an_object_become_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    got = DIALECT.parse(body(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert json.loads(got.messages[0]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_sampling_fields_and_what_is_dropped() -> None:
    got = DIALECT.parse(
        body(temperature=0.5, max_completion_tokens=9, stop="x", seed=3, user="u", store=False, logprobs=True, n=1)
    )
    assert got.sampling == {"temperature": 0.5, "max_tokens": 9, "stop": ("x",), "seed": 3}
    assert got.dropped == ["logprobs", "store", "user"]


def test_tool_choice_none_hides_the_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert DIALECT.parse(body(tools=[tool], tool_choice="none")).tools is None
    assert DIALECT.parse(body(tools=[tool], tool_choice="auto")).tools == [tool]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.[0]"),
        ({"stop": [1]}, "stop"),
        ({"seed": True}, "seed"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.[0]"),
        ({"messages": [{"role": "user"}]}, "messages.[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.[0].tool_calls.[0]"),
    ],
)
def test_what_would_mislead_is_refused_by_name(fields: dict, param: str) -> None:
    with pytest.raises(DialectError) as caught:
        DIALECT.parse(body(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


REPLIES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(max_size=30)},
    optional={
        "reasoning_content": st.text(min_size=1, max_size=30),
        "tool_calls": st.lists(st.just(CALL), min_size=1, max_size=3),
    },
)


@given(reply=REPLIES, split=st.integers(0, 30))
def test_the_stream_folds_to_the_reply_whatever_was_sent_before(reply: dict, split: int) -> None:
    reasoning, content = reply.get("reasoning_content", ""), reply["content"]
    sent = (reasoning[:split], content[:split])
    events = [DIALECT.opening(META), DIALECT.delta(META, reasoning=sent[0], content=sent[1])]
    events += list(DIALECT.closing(META, reply, "stop", Usage(3, 4), sent=sent))
    got = [ChatCompletionChunk.model_validate(c) for c in chunks(events)]
    deltas = [c.choices[0].delta for c in got if c.choices]
    assert "".join(d.content or "" for d in deltas) == content
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == reasoning
    assert [c.function.arguments for d in deltas for c in d.tool_calls or []] == [
        c["function"]["arguments"] for c in reply.get("tool_calls", [])
    ]
    assert got[-1].usage is not None and got[-1].usage.total_tokens == 7


@given(reply=REPLIES)
def test_the_plain_answer_holds_the_reply(reply: dict) -> None:
    finish = "tool_calls" if "tool_calls" in reply else "stop"
    got = ChatCompletion.model_validate_json(DIALECT.plain(META, reply, finish, Usage(3, 4)))
    message = got.choices[0].message
    assert (message.content or "") == reply["content"]
    assert (message.model_extra or {}).get("reasoning_content", "") == reply.get("reasoning_content", "")
    assert [c.model_dump() for c in message.tool_calls or []] == reply.get("tool_calls", [])
    assert got.choices[0].finish_reason == finish


def test_a_text_only_engine_has_no_usage_to_report() -> None:
    reply = {"role": "assistant", "content": "x"}
    assert json.loads(DIALECT.plain(META, reply, "stop", None))["usage"] is None
