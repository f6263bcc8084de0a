"""The remote engine through litellm itself, against a server on this machine that speaks OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polarlike.engines.base import (
    CannotScore,
    Chunk,
    Conversation,
    EngineError,
    EngineOptions,
    GenerateRequest,
    PolicyWeights,
)
from polarlike.engines.log import read_log
from polarlike.engines.remote import RemoteEngine, create
from polarlike.records import Sampling, UsageError, no_ids

TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}
CALL = {"id": "call_9", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


class FakeOpenAI:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.message: dict[str, Any] = {"role": "assistant", "content": "The answer is 42."}
        self.finish_reason = "stop"
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        if self.status != 200:
            error = {"message": "Your quota is used up.", "type": "insufficient_quota", "code": "x"}
            return web.json_response({"error": error}, status=self.status)
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        return web.json_response(
            {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeOpenAI:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-provider")
    return FakeOpenAI()


@asynccontextmanager
async def engine_at(fake: FakeOpenAI, log: Path | None = None) -> AsyncIterator[RemoteEngine]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    server = TestServer(app)
    await server.start_server()
    extra = {"api_base": str(server.make_url("/v1")), "timeout_s": 20}
    engine = create("openai/teacher", EngineOptions(log=log, extra=extra))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        await server.close()


async def ask(engine: RemoteEngine, messages: list[dict[str, Any]], **sampling: Any) -> Chunk:
    request = GenerateRequest(
        "call_1", no_ids(), Sampling(**sampling), conversation=Conversation(messages, [TOOL], model="asked-for")
    )
    [chunk] = [c async for c in engine.generate(request)]
    return chunk


async def test_a_reply_is_text_alone_and_no_number_is_made_up(fake: FakeOpenAI, tmp_path: Path) -> None:
    async with engine_at(fake, tmp_path / "log.jsonl") as engine:
        assert engine.text_only
        chunk = await ask(engine, [{"role": "user", "content": "Say it."}])
    assert chunk.reply == {"role": "assistant", "content": "The answer is 42."}
    assert (chunk.ids.size, chunk.logprobs.size, chunk.versions.size, chunk.finish_reason) == (0, 0, 0, "stop")
    entry = read_log(tmp_path / "log.jsonl")["call_1"]
    assert (entry.completion_ids.size, entry.finish_reason) == (0, "stop")


async def test_messages_tools_and_what_is_not_neutral_of_the_sampling_are_sent(fake: FakeOpenAI) -> None:
    history = [
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_9", "content": "a.txt"},
    ]
    async with engine_at(fake) as engine:
        await ask(engine, history, temperature=0.5, max_tokens=77, stop=("END",))
        await ask(engine, history)
    first, second = fake.requests
    assert first["model"] == "teacher"
    assert first["tools"] == [TOOL]
    assert first["messages"][1]["tool_calls"] == [CALL]
    assert "reasoning_content" not in first["messages"][1]
    assert first["messages"][2] == history[2]
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.5, 77, ["END"])
    assert not {"temperature", "top_p", "top_k", "stop", "seed", "presence_penalty"} & set(second)
    assert first["authorization"] == "Bearer sk-of-the-provider"


async def test_tool_calls_and_reasoning_come_back_in_the_canonical_form(fake: FakeOpenAI) -> None:
    fake.message = {"role": "assistant", "content": None, "reasoning_content": "I list.", "tool_calls": [CALL]}
    fake.finish_reason = "tool_calls"
    async with engine_at(fake) as engine:
        chunk = await ask(engine, [{"role": "user", "content": "List."}])
    assert chunk.reply == {"role": "assistant", "content": "", "reasoning_content": "I list.", "tool_calls": [CALL]}
    assert chunk.finish_reason == "stop"  # the proxy names the reason of a reply with calls


async def test_a_reply_that_was_cut_says_so_and_one_that_was_filtered_is_none(fake: FakeOpenAI) -> None:
    async with engine_at(fake) as engine:
        fake.finish_reason = "length"
        assert (await ask(engine, [{"role": "user", "content": "x"}])).finish_reason == "length"
        fake.finish_reason = "content_filter"
        with pytest.raises(EngineError, match="content_filter"):
            await ask(engine, [{"role": "user", "content": "x"}])


async def test_a_provider_that_refuses_is_one_sentence_without_the_key(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.status = 400
    async with engine_at(fake, tmp_path / "log.jsonl") as engine:
        with pytest.raises(EngineError, match=r"remote model openai/teacher did not answer: .*quota is used up") as e:
            await ask(engine, [{"role": "user", "content": "x"}])
    assert "sk-of-the-provider" not in str(e.value)
    assert "\n" not in str(e.value)
    assert read_log(tmp_path / "log.jsonl")["call_1"].finish_reason == "error"


async def test_it_has_no_scores_and_takes_no_weights(fake: FakeOpenAI) -> None:
    async with engine_at(fake) as engine:
        with pytest.raises(CannotScore):
            await engine.score(np.ones(3, np.int32), 1, 1.0)
        with pytest.raises(EngineError, match="takes no weights"):
            await engine.publish(PolicyWeights(dict, lambda folder: None), 1)


def test_an_unknown_setting_is_named_with_its_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'api_base'"):
        create("openai/m", EngineOptions(extra={"api_bas": "x"}))


async def test_without_litellm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("polarlike.engines.remote.importlib.import_module", missing)
    with pytest.raises(UsageError, match=r"polarlike\[teachers\]"):
        await create("openai/m", EngineOptions()).start()


def test_a_time_limit_that_is_no_number_is_said_so() -> None:
    with pytest.raises(UsageError, match="timeout_s is 'soon'; it must be a number"):
        create("openai/m", EngineOptions(extra={"timeout_s": "soon"}))
