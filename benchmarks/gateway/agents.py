"""The clients of the gateway benchmark: conversations as coding agents hold them, and how long each reply took.

They know OpenAI Chat and nothing of what answers. What holds: two conversations share the system prompt and the tools
and no other text; a conversation of n turns makes n calls, each with the whole history, the assistant's turns as they
were received and one tool result a turn; the same seed makes the same texts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

Target = tuple[str, dict[str, str]]  # where a conversation's requests go: URL and headers

SYSTEM_WORDS, TASK_WORDS, RESULT_WORDS = 700, 120, 250
_SYLLABLES = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "or", "ut")]
_PARAMETERS = {
    "bash": ["command", "timeout"],
    "read": ["path", "offset", "limit"],
    "write": ["path", "content"],
    "edit": ["path", "old", "new"],
    "search": ["pattern", "path", "glob"],
    "finish": ["summary"],
}


class Words:
    """Text that nobody wrote: words of two or three syllables out of some 20,000, which zstd packs about as real text
    and code."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        lexicon = random.Random(0)
        self._words = ["".join(lexicon.choices(_SYLLABLES, k=lexicon.choice((2, 3)))) for _ in range(20_000)]

    def text(self, words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=words))


def tools() -> list[dict[str, Any]]:
    words = Words(1)
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": words.text(40),
                "parameters": {
                    "type": "object",
                    "properties": {p: {"type": "string", "description": words.text(12)} for p in parameters},
                    "required": parameters[:1],
                },
            },
        }
        for name, parameters in _PARAMETERS.items()
    ]


SYSTEM = Words(2).text(SYSTEM_WORDS)
TOOLS = tools()


@dataclass(slots=True)
class Script:
    """What one conversation's user and tools say. results: one a turn after the first."""

    task: str
    results: list[str]

    @property
    def turns(self) -> int:
        return 1 + len(self.results)


def scripts(count: int, turns: int, seed: int) -> list[Script]:
    words = Words(seed)
    return [Script(words.text(TASK_WORDS), [words.text(RESULT_WORDS) for _ in range(turns - 1)]) for _ in range(count)]


@dataclass(slots=True)
class Timings:
    """Seconds from a request's first byte out to its reply read, apart for calls that open a conversation and calls
    that continue one. ids: of the replies, in the order they came."""

    first: list[float] = field(default_factory=list)
    continuing: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.first) + len(self.continuing)


def body(messages: list[dict[str, Any]]) -> bytes:
    asked = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 1.0, "max_tokens": 2048}
    return orjson.dumps(asked)


def opening(script: Script) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": script.task}]


async def converse(http: aiohttp.ClientSession, target: Target, script: Script, timings: Timings) -> None:
    """Raises RuntimeError for a reply that is no tool call."""
    url, headers = target
    headers = {"Content-Type": "application/json", **headers}
    messages = opening(script)
    for turn in range(script.turns):
        data = body(messages)
        start = time.perf_counter()
        async with http.post(url, data=data, headers=headers) as response:
            raw = await response.read()
        took = time.perf_counter() - start
        reply = orjson.loads(raw) if response.status == 200 else {}
        message = (reply.get("choices") or [{}])[0].get("message") or {}
        if not message.get("tool_calls"):
            raise RuntimeError(f"{url} answered {response.status}: {raw[:300]!r}")
        (timings.continuing if turn else timings.first).append(took)
        timings.ids.append(reply["id"])
        if turn < script.turns - 1:
            call_id = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call_id, "content": script.results[turn]}]


async def drive(
    open_session: Callable[[], Awaitable[Target]], waiting: list[Script], concurrency: int, timings: Timings
) -> float:
    """Holds the conversations, `concurrency` at once, each over a session opened before the clock starts. Seconds."""
    work = [(await open_session(), script) for script in waiting][::-1]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def lane() -> None:
            while work:
                target, script = work.pop()
                await converse(http, target, script, timings)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as lanes:
            for _ in range(concurrency):
                lanes.create_task(lane())
        return time.perf_counter() - start
