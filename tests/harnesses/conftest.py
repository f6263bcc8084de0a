"""A scripted OpenAI Chat server on loopback, for harnesses to talk to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

Reply = dict[str, Any] | int
"""A chat message to answer with, or an HTTP status to fail with."""


def bash(command: str, call_id: str = "call_1") -> dict[str, Any]:
    """An assistant message that calls the tool `bash`."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": "Next step.", "tool_calls": calls}


class FakeOpenAI:
    """Answers request after request from `replies` (the last one again and again) and keeps what was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization", ""))
        self.requests.append(await request.json())
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=reply)
        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        choice = {"index": 0, "message": reply, "finish_reason": finish}
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response({**body, "choices": [choice], "usage": usage})


@pytest.fixture
async def fake_openai() -> AsyncIterator[FakeOpenAI]:
    fake = FakeOpenAI()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/s/one/v1/chat/completions", fake.answer)
    async with TestServer(app) as server:
        fake.base_url = str(server.make_url("/s/one"))
        yield fake


@pytest.fixture
def call_bash() -> Callable[..., dict[str, Any]]:
    return bash
