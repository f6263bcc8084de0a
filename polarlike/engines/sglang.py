"""SGLang over HTTP: how its server is asked, and what its answers hold. What is done with them is in `served`.

Written from SGLang's sources and documentation of November 2026 (`/generate`, `io_struct.GenerateReqInput`) and tested
against a server that speaks that JSON; it has not met a real one. What differs from vLLM:
- Logprobs are those of the sampling temperature as they come, unless the server has SGLANG_RETURN_ORIGINAL_LOGPROB set;
  top-p and top-k are never in them.
- A stream's events repeat what went before, or do not (a flag of the server's): `output_token_logprobs_length` tells.
- A reply says no name of the weights that gave it, but the version that weights were loaded under.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from polarlike.engines.base import EngineError, EngineOptions, GenerateRequest
from polarlike.engines.served import Piece, Reader, ServedEngine, Settings
from polarlike.engines.wire import Refused, message_of
from polarlike.records import Ids

LIKELIEST = 5


def create(argument: str, options: EngineOptions) -> SglangEngine:
    """argument: the server's URL. options.model: the folder it serves, for the tokenizer. Raises UsageError."""
    return SglangEngine(argument, options, Settings.of(options.extra, "sglang"))


class SglangEngine(ServedEngine):
    name = "sglang"
    title = "SGLang"
    _missing_flag = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    _reports_filters = False
    _path = "/generate"
    _loaded: str | None = None
    """The version that the server's own weights were loaded under by this run."""

    def _body(self, request: GenerateRequest, wire_id: str, prompt: Ids, limit: int, served: str) -> dict[str, Any]:
        s = request.sampling
        sampling: dict[str, Any] = {
            **_sampling(limit, s.temperature),
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "repetition_penalty": s.repetition_penalty,
            "stop": list(s.stop),
            "stop_token_ids": list(request.stop_ids),
        }
        if s.seed is not None:
            sampling["sampling_seed"] = s.seed
        return {**self._ask(prompt, sampling, served), "rid": wire_id, "stream": True}

    def _ask(self, prompt: Ids, sampling: dict[str, Any], served: str) -> dict[str, Any]:
        return {
            "input_ids": np.ascontiguousarray(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            "lora_path": None if served == self._base else served,
        }

    def _reader(self, prompt: Ids) -> Reader:
        return SglangReader(int(prompt.size), self._loaded)

    async def _score(self, ids: Ids, start: int, served: str) -> list[Any]:
        body = {**self._ask(ids, _sampling(1, 1.0), served), "logprob_start_len": start - 1}
        answer = await self.wire.post(self._path, body)
        found = (answer["meta_info"].get("input_token_logprobs") or [])[start - ids.size :]
        if [int(entry[1]) for entry in found] != ids[start:].tolist():
            raise EngineError("The SGLang server sent the logprobs of other tokens than it was asked for.")
        return [entry[0] for entry in found]

    async def _likely(self, ids: Ids, temperature: float) -> dict[Any, float]:
        body = {**self._ask(ids, _sampling(1, temperature), self._base), "top_logprobs_num": LIKELIEST}
        answer = await self.wire.post(self._path, body)
        return {int(token): float(logprob) for logprob, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}

    async def _abort(self, wire_id: str) -> None:
        try:
            await self.wire.post("/abort_request", {"rid": wire_id})
        except EngineError:  # the connection is closed in any case
            return

    # ------------------------------------------------------------ weights

    async def _load_adapter(self, name: str, folder: Path) -> None:
        await self._told("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, folder)

    async def _unload_adapter(self, name: str) -> None:
        await self.wire.post("/unload_lora_adapter", {"lora_name": name})

    async def _replace_weights(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        await self._told("/update_weights_from_disk", body, folder)
        self._loaded = str(version)

    async def _told(self, path: str, body: dict[str, Any], folder: Path) -> None:
        """A call whose answer says whether it succeeded."""
        needs = (
            f"Adapters need --enable-lora, --max-lora-rank and --lora-target-modules, and the server must see {folder} "
            "under the same path."
        )
        try:
            answer = await self.wire.post(path, body)
        except Refused as e:
            raise EngineError(f"{e} {needs}") from e
        if not isinstance(answer, dict) or not answer.get("success"):
            said = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
            raise EngineError(f"The SGLang server did not take new weights: {said} {needs}")


class SglangReader(Reader):
    """prompt_size: tokens of the prompt. loaded: the weights' version the server must name, where one is known."""

    def __init__(self, prompt_size: int, loaded: str | None):
        self._prompt_size, self._loaded = prompt_size, loaded
        self._seen = 0

    def read(self, event: dict[str, Any]) -> Piece | None:
        if "error" in event:
            raise EngineError(f"The SGLang server failed in mid-reply: {message_of(event)}")
        meta = event.get("meta_info") or {}
        if meta.get("prompt_tokens", self._prompt_size) != self._prompt_size:
            raise EngineError(
                f"The SGLang server was given {self._prompt_size} prompt ids and sampled from "
                f"{meta['prompt_tokens']}; turn off what changes prompts there."
            )
        if self._loaded is not None and meta.get("weight_version", self._loaded) != self._loaded:
            raise EngineError(
                f"The SGLang server was given policy version {self._loaded} and answered with "
                f"{meta['weight_version']!r}; let one run publish to it."
            )
        reason = meta.get("finish_reason")
        pairs = meta.get("output_token_logprobs")
        if pairs is None:
            return Piece(event.get("output_ids"), None, _type(reason))
        total = meta.get("output_token_logprobs_length", len(pairs))
        new = total - self._seen
        if not 0 <= new <= len(pairs):
            raise EngineError(f"The SGLang server's stream lost tokens: it sent {len(pairs)}, of {new} new ones.")
        fresh = pairs[len(pairs) - new :]
        self._seen = total
        return Piece([pair[1] for pair in fresh], [pair[0] for pair in fresh], _type(reason))


def _type(reason: Any) -> str | None:
    """SGLang's {"type": "stop", "matched": ...} as one word."""
    return None if reason is None else str(reason.get("type")) if isinstance(reason, dict) else str(reason)


def _sampling(limit: int, temperature: float) -> dict[str, Any]:
    """What every request says. ignore_eos: the ids that end a turn are the request's, not the folder's."""
    return {
        "n": 1,
        "max_new_tokens": limit,
        "min_new_tokens": 0,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
