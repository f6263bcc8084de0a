"""An engine for unit tests that says what it is told to, token by token, over a real template."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import numpy as np

from polarlike.engines.base import CannotScore, Chunk, EngineError, GenerateRequest, PolicyWeights
from polarlike.records import Ids, Logprobs, Message
from polarlike.templates import ChatTemplate, load_template

Say = Callable[[GenerateRequest], Message | str]


class SayingEngine:
    """`say` maps a request to a reply; its ids are sent `per_chunk` at a time, `delay` seconds apart. `fail_after`
    makes the engine fail once after so many tokens."""

    name = "saying"
    model_name = "tiny"
    text_only = False
    policy_version = 3

    def __init__(self, model: Path, say: Say, *, per_chunk: int = 1000, delay: float = 0.0, context: int = 32768):
        self.template: ChatTemplate | None = load_template(model)
        self.say, self.per_chunk, self.delay, self.context_length = say, per_chunk, delay, context
        self.requests: list[GenerateRequest] = []
        self.asked = asyncio.Semaphore(0)  # released by each request: tests wait for it instead of guessing a time
        self.stopped: list[str] = []  # request ids whose generator was closed before its end
        self.fail_after: int | None = None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        self.policy_version = version

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        raise CannotScore("no scores")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        self.asked.release()
        assert self.template is not None
        reply = self.say(request)
        message: Message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        ids = self.template.encode_reply(request.prompt_ids, message)
        if request.conversation and request.request_id.endswith(".1"):  # the rest of a reply that was broken off
            ids = ids[len(ids) - request.sampling.max_tokens :] if request.sampling.max_tokens < len(ids) else ids
        finish = "stop"
        if ids.size > request.sampling.max_tokens:
            ids, finish = ids[: request.sampling.max_tokens], "length"
        ended = False
        try:
            for at in range(0, ids.size, self.per_chunk):
                await asyncio.sleep(self.delay)
                piece = ids[at : at + self.per_chunk]
                last = at + self.per_chunk >= ids.size
                if self.fail_after is not None and at >= self.fail_after:
                    self.fail_after = None
                    raise EngineError("the worker went away")
                logprobs = -np.arange(at + 1, at + 1 + piece.size, dtype=np.float32) / 100
                yield Chunk(piece, logprobs, np.full(piece.size, 3, np.int32), finish if last else None)
            ended = True
        finally:
            if not ended:
                self.stopped.append(request.request_id)


def call(command: str, content: str = "") -> Message:
    import json

    arguments = json.dumps({"command": command})
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
