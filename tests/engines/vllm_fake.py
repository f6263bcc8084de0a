"""A server that speaks vLLM's JSON over a model small enough to know: logits that are a line, shifted by an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

from polarlike.engines.base import PolicyWeights

VOCAB = 40
LENGTH = 2048


def logprobs_of(shift: float, temperature: float) -> np.ndarray:
    """float64 [VOCAB], of any next token: the context does not matter here."""
    logits = np.linspace(0.0, 3.0, VOCAB) + shift * np.sin(np.arange(VOCAB))
    scaled = logits / (temperature or 1.0)
    return scaled - np.log(np.exp(scaled).sum())


def expected(ids: np.ndarray, shift: float = 0.0, temperature: float = 1.0) -> np.ndarray:
    return logprobs_of(shift, temperature)[ids].astype(np.float32)


def policy(shift: float, *, adapter: bool = True) -> PolicyWeights:
    """A policy whose folders hold the one number that the fake reads."""

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shift").write_text(str(shift))

    return PolicyWeights(dict, save, save if adapter else None)


class FakeVllm:
    """faults: one is taken by each streamed request: reset, reset_late, null_logprob, sentinel, no_ids, short,
    no_finish, error_event, abort, other_model, other_prompt, refuse. gate: streamed tokens wait for it."""

    def __init__(self, *, processed: bool = True, flat: bool = False) -> None:
        self.processed, self.flat = processed, flat
        self.shifts: dict[str, float] = {"base-model": 0.0}
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        self.connections: set[Any] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.tokens_before_gate = 0
        self.arrived = asyncio.Semaphore(0)
        self.client_left = asyncio.Event()  # of a stream
        self.refuse_paths: dict[str, int] = {}
        self.partial_reload = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/{path:.*}", self._other)
        server = TestServer(app)
        await server.start_server()
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            self.gate.set()
            await server.close()

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "base-model", "parent": None, "max_model_len": LENGTH}
        adapters = [{"id": n, "parent": "base-model", "max_model_len": None} for n in self.shifts if n != "base-model"]
        return web.json_response({"data": [*adapters, base]})

    async def _other(self, request: web.Request) -> web.Response:
        path = "/" + request.match_info["path"]
        body = await request.json() if request.can_read_body else None
        self.calls.append((path, body))
        if path in self.refuse_paths:
            return web.json_response({"error": {"message": "not today"}}, status=self.refuse_paths[path])
        if path == "/v1/load_lora_adapter":
            self.shifts[body["lora_name"]] = float((Path(body["lora_path"]) / "shift").read_text())
        if path == "/v1/unload_lora_adapter":
            del self.shifts[body["lora_name"]]
        if path == "/collective_rpc" and not self.partial_reload:
            self.shifts["base-model"] = float((Path(body["kwargs"]["weights_path"]) / "shift").read_text())
        return web.json_response({})

    def _table(self, model: str, temperature: float) -> np.ndarray:
        if self.flat:
            return np.full(VOCAB, -np.log(VOCAB))
        return logprobs_of(self.shifts[model], temperature if self.processed else 1.0)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.connections.add(request.transport)
        self.arrived.release()
        if body.get("stream"):
            return await self._stream(request, body)
        table = self._table(body["model"], body["temperature"])
        choice: dict[str, Any] = {"finish_reason": "length", "token_ids": [VOCAB - 1]}
        if body.get("logprobs"):
            best = np.argsort(-table)[: body["logprobs"]]
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{i}": float(table[i]) for i in best}]}
        if body.get("prompt_logprobs") is not None:
            raw = logprobs_of(self.shifts[body["model"]], 1.0)
            choice["prompt_logprobs"] = [None] + [
                {str(i): {"logprob": float(raw[i % VOCAB]), "rank": 1}} for i in body["prompt"][1:]
            ]
        return web.json_response({"model": body["model"], "choices": [choice]})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refuse":
            return web.json_response({"error": {"message": "max_tokens is wrong", "code": 400}}, status=400)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in self._events(body, fault):
                if event["at"] >= self.tokens_before_gate:
                    await self.gate.wait()
                if fault == "reset_late" and event["at"] > 0:
                    assert request.transport is not None
                    request.transport.abort()
                await response.write(b"data: " + orjson.dumps(event["data"]) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.client_left.set()
            raise
        return response

    def _events(self, body: dict[str, Any], fault: str) -> list[dict[str, Any]]:
        table = self._table(body["model"], body["temperature"])
        size, step = body["max_tokens"], body["stream_interval"]
        ids = [(len(body["prompt"]) + k) % VOCAB for k in range(size)]
        reason = "length"
        for k, token in enumerate(ids):
            if token in body["stop_token_ids"]:
                ids, reason = ids[: k + 1], "stop"
                break
        out = []
        for at in range(0, len(ids), step):
            part = ids[at : at + step]
            last = at + step >= len(ids)
            values: list[Any] = [float(table[i]) for i in part]
            choice: dict[str, Any] = {
                "text": "",
                "token_ids": part,
                "logprobs": {"token_logprobs": values},
                "finish_reason": reason if last else None,
            }
            if at == 0:
                choice["prompt_token_ids"] = body["prompt"]
            data: dict[str, Any] = {"model": body["model"], "choices": [choice]}
            match fault:
                case "null_logprob":
                    values[-1] = None
                case "sentinel":
                    values[-1] = -9999.0
                case "positive":
                    values[-1] = 0.5
                case "short":
                    values.pop()
                case "no_ids":
                    choice["token_ids"] = None
                case "no_logprobs":
                    choice["logprobs"] = None
                case "no_finish":
                    choice["finish_reason"] = None
                case "abort":
                    choice["finish_reason"] = "abort" if last else None
                case "other_model":
                    data["model"] = "another"
                case "other_prompt":
                    choice["prompt_token_ids"] = [*body["prompt"][:-1], 0]
                case "error_event" if at > 0:
                    data = {"error": {"message": "the engine died", "code": 500}}
            out.append({"at": at, "data": data})
        return out
