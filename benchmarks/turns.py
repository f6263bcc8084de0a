"""What a conversation of 1, 10 and 100 turns costs the proxy: time, memory and disk per call.

One client talks to the proxy over loopback HTTP; the engine is instant (it says a fixed tool call of the given length),
so what is measured is parsing, planning, rendering, parsing the reply and the durable write. The bare engine over the
same HTTP server is measured in the same run.

    python benchmarks/turns.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from polarlike.dialects.openai_chat import OpenAIChat
from polarlike.engines.base import Chunk, GenerateRequest
from polarlike.proxy.server import Proxy, listen
from polarlike.proxy.settings import SessionSettings
from polarlike.store import Store
from polarlike.templates import load_template

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}]


class Instant:
    """Answers at once with one tool call."""

    name, model_name, text_only, context_length, policy_version = "instant", "instant", False, 10_000_000, 0

    def __init__(self, model: Path, words: int):
        self.template = load_template(model)
        function = {"name": "bash", "arguments": json.dumps({"command": "echo " + "ab " * words})}
        reply = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        prompt = self.template.render([{"role": "user", "content": "x"}], None)
        self.ids = self.template.encode_reply(prompt, reply)
        self.logprobs = -np.random.default_rng(0).exponential(1.0, self.ids.size).astype(np.float32)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(self.ids, self.logprobs, np.zeros(self.ids.size, np.int32), "stop")


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def converse(url: str, key: str, turns: int, result: str, session: aiohttp.ClientSession) -> list[float]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s " * 500}, {"role": "user", "content": "go"}]
    seconds = []
    for _ in range(turns):
        body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
        start = time.perf_counter()
        async with session.post(url, data=body, headers={"Authorization": f"Bearer {key}"}) as response:
            reply = (await response.json())["choices"][0]["message"]
        seconds.append(time.perf_counter() - start)
        messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": result}]
    return seconds


async def measure(model: Path, turns: int, words: int, result: str, runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Instant(model, words)
        store = Store(f"sqlite:///{folder}/store.db")
        proxy = Proxy(engine, store, [OpenAIChat()])  # type: ignore[arg-type, list-item]
        runner, port = await listen(proxy.app(), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            warm = await proxy.open_session(SessionSettings())
            await converse(url, warm.key, 3, result, http)
            sizes = disk(folder)
            memory = resident()
            firsts, rest, lasts = [], [], []
            sessions = []
            for _ in range(runs):
                session = await proxy.open_session(SessionSettings())
                sessions.append(session)
                seconds = await converse(url, session.key, turns, result, http)
                firsts.append(seconds[0])
                rest += seconds[1:]
                lasts.append(seconds[-1])
            grown = resident() - memory
        calls = turns * runs
        await proxy.close()
        await runner.cleanup()
        await store.close()
        per_disk = (disk(folder) - sizes) / calls
        tokens = store_tokens(sessions[0].session_id, folder)
        continuing = f"continuing {1e3 * statistics.median(rest):.1f} ms, " if rest else ""
        print(
            f"{turns:>4} turns: first call {1e3 * statistics.median(firsts):.1f} ms, {continuing}"
            f"last {1e3 * statistics.median(lasts):.1f} ms; memory {grown / calls / 1024:.1f} KiB, "
            f"disk {per_disk:.0f} bytes a call "
            f"({tokens / turns:.0f} new tokens a call, {per_disk * turns / tokens:.2f} bytes a new token)"
        )


def store_tokens(session_id: str, folder: str) -> int:
    calls = Store(f"sqlite:///{folder}/store.db").calls(session_id)
    return sum(int(c.suffix_ids.size + c.completion_ids.size) for c in calls)


def disk(folder: str) -> int:
    return sum(p.stat().st_size for p in Path(folder).glob("store.db") if p.is_file())


async def bare(runs: int) -> None:
    """The same server answering a constant, for scale."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "x"}}]})

    app = web.Application()
    app.router.add_post("/", answer)
    runner, port = await listen(app, "127.0.0.1", 0)
    seconds = []
    async with aiohttp.ClientSession() as http:
        for _ in range(runs):
            start = time.perf_counter()
            async with http.post(f"http://127.0.0.1:{port}/", data=b"{}") as response:
                await response.json()
            seconds.append(time.perf_counter() - start)
    await runner.cleanup()
    print(f"bare HTTP server, one call: {1e3 * statistics.median(seconds):.2f} ms")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parent.parent / "examples/policy/model")
    parser.add_argument("--words", type=int, default=60, help="words in each sampled command")
    parser.add_argument("--result", type=int, default=200, help="words in each tool result")
    options = parser.parse_args()
    await bare(300)
    result = "out " * options.result
    for turns, runs in ((1, 100), (10, 20), (100, 5)):
        await measure(options.model, turns, options.words, result, runs)


if __name__ == "__main__":
    asyncio.run(main())
