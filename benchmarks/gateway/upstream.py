"""A stand-in for a vLLM server, in a process of its own: vLLM's JSON on both routes, and no model.

It knows how vLLM spells its answers and nothing of gateways. Every reply is another: one tool call whose command is
random words, as token ids of a real tokenizer, with a logprob for each. What holds: /v1/completions answers a list of
ids, /v1/chat/completions answers messages, both from one source of replies, at once or after a fixed delay; /log counts
what was answered. With --evidence the chat route renders and tokenises as vLLM does, /evidence tells the ids of every
call in order, and every second reply spells a word letter by letter, as a policy may sample it and no tokenizer would
spell it. Without it the chat route makes up prompt ids of about the right number, so that what is measured is the
gateway in front and not a tokenizer here.

    python -m benchmarks.gateway.upstream --model examples/policy/model --port 8100
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

from polarlike.proxy.server import listen
from polarlike.templates import ChatTemplate, load_template

MODEL_NAME = "policy"
CONTEXT = 32_768


@dataclass(slots=True)
class Reply:
    """What a policy says. ids: with the end of turn. tokens: each id's text. odd: a word is spelled as no tokenizer
    would."""

    number: int
    ids: list[int]
    tokens: list[str]
    command: str
    logprobs: list[float]
    odd: bool
    finish_reason: str = "stop"

    def cut(self, limit: int) -> Reply:
        """At most `limit` tokens of it."""
        if len(self.ids) <= limit:
            return self
        arrays = {name: getattr(self, name)[:limit] for name in ("ids", "tokens", "logprobs")}
        return replace(self, finish_reason="length", **arrays)


class Policy:
    """Replies of `words` words, another each time. letters: every second one spells a word letter by letter."""

    def __init__(self, model: Path, words: int, *, letters: bool):
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
        self.template: ChatTemplate = load_template(model)
        self._words = sorted((w[1:], i) for w, i in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", w))
        self._vocabulary, self._count, self._letters = vocabulary, words, letters
        self._head, self._tail = self._frame()
        self._text = {i: self.template.decode(np.asarray([i], np.int32)) for i in vocabulary.values()}
        self._rng = random.Random(0)
        self._numbers = itertools.count()

    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids around the words of a call."""
        word, word_id = self._words[0]
        function = {"name": "bash", "arguments": json.dumps({"command": f"echo {word}"})}
        prompt = self.template.render([{"role": "user", "content": "x"}], None)
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        ids = self.template.encode_reply(prompt, call).tolist()
        at = ids.index(word_id)
        return ids[:at], ids[at + 1 :]

    def reply(self) -> Reply:
        number = next(self._numbers)
        chosen = self._rng.choices(self._words, k=self._count)
        inner = [[i] for _, i in chosen]
        odd = self._letters and number % 2 == 1
        if odd:
            inner[0] = [self._vocabulary[c] for c in "Ġ" + chosen[0][0]]
        ids = [*self._head, *itertools.chain.from_iterable(inner), *self._tail]
        logprobs = [-round(self._rng.expovariate(2.0), 6) for _ in ids]
        command = "echo " + " ".join(word for word, _ in chosen)
        return Reply(number, ids, [self._text.get(i, "") for i in ids], command, logprobs, odd)


class Upstream:
    def __init__(self, policy: Policy, *, delay: float, bytes_per_token: float, evidence: bool):
        self._policy, self._delay, self._bytes_per_token = policy, delay, bytes_per_token
        self._evidence: list[dict[str, Any]] | None = [] if evidence else None
        self._filler = np.random.default_rng(0).integers(0, policy.template.vocab_size, 4 * CONTEXT).astype(np.int32)
        self.calls = {"chat": 0, "completions": 0}
        self.prompt_tokens = {"chat": 0, "completions": 0}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/log", self._log)
        app.router.add_get("/evidence", self._tell)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return answer({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL_NAME, "object": "model", "owned_by": "vllm", "max_model_len": CONTEXT}
        return answer({"object": "list", "data": [model]})

    async def _log(self, _: web.Request) -> web.Response:
        return answer({"calls": self.calls, "prompt_tokens": self.prompt_tokens})

    async def _tell(self, _: web.Request) -> web.Response:
        return answer(self._evidence)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        reply, prompt = await self._sample("completions", asked, asked["prompt"])
        step = asked.get("stream_interval", 1) if asked.get("stream") else len(reply.ids)
        parts = [self._part(asked, reply, start, step) for start in range(0, len(reply.ids), step)]
        if asked.get("return_token_ids"):
            parts[0]["choices"][0]["prompt_token_ids"] = prompt
        if not asked.get("stream"):
            return answer({**parts[0], "usage": usage(prompt, reply)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _part(self, asked: dict[str, Any], reply: Reply, start: int, size: int) -> dict[str, Any]:
        """Tokens start to start + size of a completion."""
        piece = slice(start, start + size)
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(reply.tokens[piece]),
            "finish_reason": reply.finish_reason if start + size >= len(reply.ids) else None,
            "stop_reason": None,
            "logprobs": completion_logprobs(asked, reply, piece) if asked.get("logprobs") is not None else None,
        }
        if asked.get("return_token_ids"):
            choice["token_ids"] = reply.ids[piece]
        head = {"id": f"cmpl-{reply.number}", "object": "text_completion", "created": 0, "model": MODEL_NAME}
        return {**head, "choices": [choice]}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = orjson.loads(body)
        reply, prompt = await self._sample("chat", asked, self._prompt(asked, len(body)))
        call = {"name": "bash", "arguments": json.dumps({"command": reply.command})}
        message = {
            "role": "assistant",
            "content": None,
            "reasoning": None,
            "tool_calls": [{"id": f"chatcmpl-tool-{reply.number:016x}", "type": "function", "function": call}],
        }
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "logprobs": {"content": chat_logprobs(reply)} if asked.get("logprobs") else None,
        }
        head = {"id": f"chatcmpl-{reply.number}", "object": "chat.completion", "created": 0, "model": MODEL_NAME}
        whole: dict[str, Any] = {**head, "choices": [choice], "usage": usage(prompt, reply), "prompt_logprobs": None}
        if asked.get("return_token_ids"):
            choice["token_ids"] = reply.ids
            whole["prompt_token_ids"] = prompt
        if asked.get("stream"):
            raise web.HTTPBadRequest(text="the chat route of this stand-in answers whole replies alone")
        return answer(whole)

    def _prompt(self, asked: dict[str, Any], size: int) -> list[int]:
        if self._evidence is not None:
            messages = [{**m, "content": m.get("content") or ""} for m in asked["messages"]]
            return self._policy.template.render(messages, asked.get("tools")).tolist()  # type: ignore[no-any-return]
        start = self.calls["chat"] % CONTEXT
        return self._filler[start : start + int(size / self._bytes_per_token)].tolist()  # type: ignore[no-any-return]

    async def _sample(self, route: str, asked: dict[str, Any], prompt: list[int]) -> tuple[Reply, list[int]]:
        reply = self._policy.reply().cut(asked.get("max_tokens") or (16 if route == "completions" else CONTEXT))
        self.calls[route] += 1
        self.prompt_tokens[route] += len(prompt)
        if self._evidence is not None:
            ids = {"prompt_ids": prompt, "completion_ids": reply.ids}
            self._evidence.append({**ids, "logprobs": reply.logprobs, "odd": reply.odd})
        if self._delay:
            await asyncio.sleep(self._delay)
        return reply, prompt


def completion_logprobs(asked: dict[str, Any], reply: Reply, piece: slice) -> dict[str, Any]:
    ids, logprobs = reply.ids[piece], reply.logprobs[piece]
    tokens = [f"token_id:{i}" for i in ids] if asked.get("return_tokens_as_token_ids") else reply.tokens[piece]
    others = likely(asked["logprobs"], asked.get("temperature", 1.0))
    return {
        "text_offset": list(itertools.accumulate(map(len, reply.tokens[piece]), initial=0))[:-1],
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": [{**others, token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
    }


def likely(count: int, temperature: float) -> dict[str, float]:
    """Made-up likeliest tokens of which each is e times as likely as the next, at temperature 1: enough for a client
    that asks at two temperatures whether what is reported is what was sampled."""
    logits = -np.arange(count) / (temperature or 1.0)
    total = float(np.log(np.exp(logits).sum())) if count else 0.0
    return {f"token_id:{k}": float(logit) - total for k, logit in enumerate(logits)}


def chat_logprobs(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
        for t, p in zip(reply.tokens, reply.logprobs, strict=True)
    ]


def usage(prompt: list[int], reply: Reply) -> dict[str, int]:
    sizes = {"prompt_tokens": len(prompt), "completion_tokens": len(reply.ids)}
    return sizes | {"total_tokens": len(prompt) + len(reply.ids)}


def answer(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


async def serve(options: argparse.Namespace) -> None:
    policy = Policy(options.model, options.words, letters=options.evidence)
    upstream = Upstream(policy, delay=options.delay, bytes_per_token=options.bytes_per_token, evidence=options.evidence)
    _, port = await listen(upstream.app(), "127.0.0.1", options.port)
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for a vLLM server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--words", type=int, default=100, help="words in each sampled command")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--bytes-per-token", type=float, default=3.0, help="of a chat request's body")
    parser.add_argument("--evidence", action="store_true", help="render chats, keep all ids, spell some words oddly")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
