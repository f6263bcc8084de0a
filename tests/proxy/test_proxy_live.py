"""Live streams: what was shown never changes, whatever the policy samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_fakes import BASH
from tokenizers import Tokenizer

from polarlike.dialects.base import ReplyMeta, Usage
from polarlike.dialects.openai_chat import OpenAIChat
from polarlike.templates import ChatTemplate, load_template

DIALECT = OpenAIChat()
META = ReplyMeta("chatcmpl-1", "m", 1700000000)
CONTROLS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")

# What a policy may sample: controls, text (also such that spells a control), bytes of characters that are not whole.
PIECES = st.one_of(
    st.sampled_from(CONTROLS),
    st.sampled_from(
        [
            "assistant\n",
            "\n",
            " ",
            "\u3000",
            "\ufffd",
            '{"name": "bash", "arguments": {"command": "ls"}}',
            '{"name": "bash", "argum',
            " </think>",
        ]
    ),
    st.text(max_size=6),
    st.integers(0, 255),
)


class Model:
    def __init__(self, folder: Path, *, thinking: bool):
        self.template: ChatTemplate = load_template(folder, thinking=thinking)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.prompt = self.template.render([{"role": "user", "content": "hi"}], [BASH])
        self.bytes = [self.tokenizer.encode(chr(k), add_special_tokens=False).ids[-1] for k in range(256)]

    def ids(self, pieces: list[str | int]) -> Any:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(self.bytes[piece])
            elif piece in CONTROLS:
                ids.append(self.tokenizer.token_to_id(piece))
            else:
                # Split, so that text which spells a control does not become one.
                ids += [i for c in piece for i in self.tokenizer.encode(c, add_special_tokens=False).ids]
        return np.asarray(ids, np.int32)


@pytest.fixture(scope="module", params=[True, False], ids=["thinking", "plain"])
def model(tiny_model: Path, request: pytest.FixtureRequest) -> Model:
    return Model(tiny_model, thinking=request.param)


def folded(events: list[bytes]) -> tuple[str, str]:
    reasoning = content = ""
    for event in events:
        if event != b"data: [DONE]\n\n":
            delta = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content", "")
    return reasoning, content


def check(model: Model, ids: Any) -> None:
    """Streams the reply token by token as the proxy does and folds the events."""
    template, prompt = model.template, model.prompt
    reply = template.parse(prompt, ids, [BASH]).message
    events, sent = [DIALECT.opening(META)], ("", "")
    for n in range(1, ids.size + 1):
        now = template.live_text(prompt, ids[:n])
        if now[0].startswith(sent[0]) and now[1].startswith(sent[1]) and now != sent:
            events.append(DIALECT.delta(META, reasoning=now[0][len(sent[0]) :], content=now[1][len(sent[1]) :]))
            sent = now
    events += DIALECT.closing(META, reply, "stop", Usage(1, 1), sent=sent)
    assert folded(events) == (reply.get("reasoning_content", ""), reply["content"])


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12))
def test_what_was_shown_is_extended_only_and_folds_to_the_recorded_reply(model: Model, pieces: list[str | int]) -> None:
    check(model, model.ids(pieces))


@pytest.mark.parametrize(
    "pieces",
    [
        ["<think>", "\nI look.\n", "</think>", "\n\nDone. ", "<|im_end|>"],
        ["<think>", "\nI look and am cut "],
        ["<think>", " a ", "<tool_call>", "{}", "</tool_call>", " b ", "</think>", "c"],
        ["\n", "<think>", "a", "</think>", "b", "<think>", "c", "</think>", "d"],
        ["<|im_start|>", "assistant\n", "<think>", "a", "</think>", "b"],
        ["a ", 0xE3, 0x80, 0x80],
        ["a", "<tool_call>", '{"name": "f", "arguments": ' + "[" * 1100, "</tool_call>"],
    ],
)
def test_replies_that_once_changed_under_what_was_shown(model: Model, pieces: list[str | int]) -> None:
    check(model, model.ids(pieces))


async def test_a_thinking_reply_streams_live_over_http(serve: Any, tiny_model: Path) -> None:
    import httpx

    from polarlike.proxy.settings import SessionSettings

    said = "<think>\nThe user wants a list, so I list it.\n</think>\n\nHere it is, a list of things.<|im_end|>"
    served = await serve(lambda r: "", SessionSettings(streaming="live"), per_chunk=2, delay=0.03)
    thinking = Model(tiny_model, thinking=True)
    ids = np.asarray(thinking.tokenizer.encode(said, add_special_tokens=False).ids, np.int32)
    served.engine.template = served.session.planner._template = thinking.template
    thinking.template.encode_reply = lambda prompt_ids, reply: ids  # type: ignore[method-assign]
    events = []
    async with httpx.AsyncClient(headers=served.headers) as http:
        request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with http.stream("POST", served.base_url + "/v1/chat/completions", json=request) as response:
            events = [line.encode() + b"\n\n" async for line in response.aiter_lines() if line]
    assert folded(events) == ("The user wants a list, so I list it.", "Here it is, a list of things.")
    assert sum(b"reasoning_content" in e for e in events) > 2
