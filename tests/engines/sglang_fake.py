"""A server that speaks SGLang's native JSON over the model of `vllm_fake`."""

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
from vllm_fake import LENGTH, VOCAB, logprobs_of

STEP = 4


class FakeSglang:
    """cumulative: every event repeats what went before. original: SGLANG_RETURN_ORIGINAL_LOGPROB. faults: one is taken
    by each streamed request: null_logprob, no_logprobs, lost, abort, error_event, other_version, longer_prompt. gate:
    tokens after the first event wait for it."""

    def __init__(self, *, cumulative: bool = True, original: bool = False) -> None:
        self.cumulative, self.original = cumulative, original
        self.shifts: dict[str | None, float] = {None: 0.0}
        self.version = "default"
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        self.success = True
        self.gate = asyncio.Event()
        self.gate.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{path:.*}", self._other)
        server = TestServer(app)
        await server.start_server()
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            self.gate.set()
            await server.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "served/model", "max_model_len": LENGTH}]})

    async def _other(self, request: web.Request) -> web.Response:
        path, body = "/" + request.match_info["path"], await request.json()
        self.calls.append((path, body))
        if not self.success:
            return web.json_response({"success": False, "message": "not today"}, status=400)
        if path == "/load_lora_adapter":
            self.shifts[body["lora_name"]] = float((Path(body["lora_path"]) / "shift").read_text())
        if path == "/unload_lora_adapter":
            del self.shifts[body["lora_name"]]
        if path == "/update_weights_from_disk":
            self.shifts[None] = float((Path(body["model_path"]) / "shift").read_text())
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        temperature = 1.0 if self.original else body["sampling_params"]["temperature"]
        table = logprobs_of(self.shifts[body["lora_path"]], temperature)
        if body.get("stream"):
            return await self._stream(request, body, table)
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 1}}
        if body["logprob_start_len"] >= 0:
            raw = logprobs_of(self.shifts[body["lora_path"]], 1.0)
            ids = body["input_ids"][body["logprob_start_len"] :]
            meta["input_token_logprobs"] = [[None, ids[0], None]] + [[float(raw[i]), i, None] for i in ids[1:]]
        if body.get("top_logprobs_num"):
            best = np.argsort(-table)[: body["top_logprobs_num"]]
            meta["output_top_logprobs"] = [[[float(table[i]), int(i), None] for i in best]]
        return web.json_response({"text": "", "output_ids": [0], "meta_info": meta})

    async def _stream(self, request: web.Request, body: dict[str, Any], table: np.ndarray) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else ""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for k, data in enumerate(self._events(body, table, fault)):
            if k:
                await self.gate.wait()
            await response.write(b"data: " + orjson.dumps(data) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _events(self, body: dict[str, Any], table: np.ndarray, fault: str) -> list[dict[str, Any]]:
        sampling, prompt = body["sampling_params"], body["input_ids"]
        ids = [(len(prompt) + k) % VOCAB for k in range(sampling["max_new_tokens"])]
        reason: dict[str, Any] = {"type": "length", "length": len(ids)}
        for k, token in enumerate(ids):
            if token in sampling["stop_token_ids"]:
                ids, reason = ids[: k + 1], {"type": "stop", "matched": token}
                break
        pairs: list[list[Any]] = [[float(table[i]), i, None] for i in ids]
        events = []
        for end in [*range(STEP, len(ids), STEP), len(ids)]:
            start = 0 if self.cumulative else max(0, end - STEP) // STEP * STEP
            if not self.cumulative and end == len(ids):
                start = (len(ids) - 1) // STEP * STEP
            meta: dict[str, Any] = {
                "id": body["rid"],
                "finish_reason": reason if end == len(ids) else None,
                "prompt_tokens": len(prompt),
                "weight_version": self.version,
                "output_token_logprobs": pairs[start:end],
                "output_token_logprobs_length": end,
            }
            data: dict[str, Any] = {"text": "", "output_ids": ids[start:end], "meta_info": meta}
            match fault:
                case "null_logprob":
                    meta["output_token_logprobs"] = [[None, i, None] for i in ids[start:end]]
                case "no_logprobs":
                    del meta["output_token_logprobs"]
                case "lost":
                    meta["output_token_logprobs"] = pairs[end - 1 : end]
                case "abort" if end == len(ids):
                    meta["finish_reason"] = {"type": "abort", "message": "Aborted"}
                case "other_version":
                    meta["weight_version"] = "77"
                case "longer_prompt":
                    meta["prompt_tokens"] += 1
                case "error_event" if end > STEP:
                    data = {"error": {"message": "the scheduler died"}}
            events.append(data)
        return events
