"""vLLM over HTTP: how its server is asked, and what its answers hold. What is done with them is in `served`.

Tokens in, tokens out: `/v1/completions` takes a list of ids and returns ids and logprobs under `return_token_ids` and
`logprobs: 0`. Every sampling field is sent: what a request leaves out the server takes from the model's
generation_config.json, and 16 as the token limit. Figures and traps are in docs/engines.md, measured on vLLM 0.32.

Settings besides those of `served`: stream_interval, tokens in one event of the stream (8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polarlike.engines.base import EngineError, EngineOptions, GenerateRequest
from polarlike.engines.served import Piece, Reader, ServedEngine, Settings
from polarlike.engines.wire import Refused, message_of
from polarlike.records import Ids

COMPLETIONS = "/v1/completions"
LIKELIEST = 5


@dataclass(slots=True)
class VllmSettings(Settings):
    stream_interval: int = 8

    numbers: ClassVar[dict[str, Callable[[Any], Any]]] = Settings.numbers | {"stream_interval": int}


def create(argument: str, options: EngineOptions) -> VllmEngine:
    """argument: the server's URL. options.model: the folder it serves, for the tokenizer. Raises UsageError."""
    return VllmEngine(argument, options, VllmSettings.of(options.extra, "vllm"))


class VllmEngine(ServedEngine):
    name = "vllm"
    title = "vLLM"
    _missing_flag = "start it with --logprobs-mode processed_logprobs"
    _path = COMPLETIONS

    def __init__(self, argument: str, options: EngineOptions, settings: VllmSettings):
        super().__init__(argument, options, settings)
        self._interval = settings.stream_interval

    def _body(self, request: GenerateRequest, wire_id: str, prompt: Ids, limit: int, served: str) -> dict[str, Any]:
        s = request.sampling
        return {
            **self._plain(prompt, served),
            "request_id": wire_id,
            "stream": True,
            "stream_interval": self._interval,
            "logprobs": 0,
            "max_tokens": limit,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "repetition_penalty": s.repetition_penalty,
            "seed": s.seed,
            "stop": list(s.stop),
            "stop_token_ids": list(request.stop_ids),
        }

    def _plain(self, prompt: Ids, served: str) -> dict[str, Any]:
        """What every request says. ignore_eos: the ids that end a turn are the request's, not the folder's."""
        return {
            "model": served,
            "prompt": np.ascontiguousarray(prompt),
            "n": 1,
            "min_p": 0.0,
            "min_tokens": 0,
            "top_p": 1.0,
            "top_k": -1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _reader(self, prompt: Ids) -> Reader:
        return VllmReader()

    async def _score(self, ids: Ids, start: int, served: str) -> list[Any]:
        if ids.size >= self.context_length:
            raise EngineError(f"{ids.size} tokens leave no room in the model's context of {self.context_length}.")
        body = {**self._plain(ids, served), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self.wire.post(COMPLETIONS, body)
        found = answer["choices"][0].get("prompt_logprobs") or []
        if len(found) != ids.size:
            raise EngineError(f"The vLLM server sent the logprobs of {len(found)} of {ids.size} prompt tokens.")
        return [
            (at or {}).get(str(token), {}).get("logprob") for token, at in zip(ids[start:], found[start:], strict=True)
        ]

    async def _likely(self, ids: Ids, temperature: float) -> dict[Any, float]:
        body = {**self._plain(ids, self._base), "max_tokens": 1, "temperature": temperature, "logprobs": LIKELIEST}
        answer = await self.wire.post(COMPLETIONS, body)
        return dict(answer["choices"][0]["logprobs"]["top_logprobs"][0])

    # ------------------------------------------------------------ weights

    async def _load_adapter(self, name: str, folder: Path) -> None:
        try:
            await self.wire.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except Refused as e:
            raise EngineError(
                f"{e} To take adapters a vLLM server needs --enable-lora, --max-lora-rank of at least the adapter's, "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the folder {folder} under the same path."
            ) from e

    async def _unload_adapter(self, name: str) -> None:
        await self.wire.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _replace_weights(self, folder: Path, version: int) -> None:
        """The server may answer 200 and have taken only some of the weights (its CPU build does): whoever publishes
        must score something afterwards."""
        try:
            await self.wire.post("/pause?mode=abort")
            try:
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await self.wire.post("/collective_rpc", call)
                await self.wire.post("/reset_prefix_cache")
                await self.wire.post("/update_weight_version", {"new_version": str(version)})
            finally:
                await self.wire.post("/resume")
        except Refused as e:
            raise EngineError(
                f"{e} To take whole weights a vLLM server needs VLLM_SERVER_DEV_MODE=1 and the folder {folder} under "
                "the same path."
            ) from e


class VllmReader(Reader):
    def read(self, event: dict[str, Any]) -> Piece | None:
        if "error" in event:
            raise EngineError(f"The vLLM server failed in mid-reply: {message_of(event)}")
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        return Piece(
            choice.get("token_ids"),
            (choice.get("logprobs") or {}).get("token_logprobs"),
            choice.get("finish_reason"),
            choice.get("prompt_token_ids"),
            event.get("model"),
        )
