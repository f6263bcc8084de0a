"""A model behind somebody's API, through litellm: a teacher whose transcripts are collected, or a rival to evaluate.

Text only. Such an API takes messages and returns messages: there are no token ids, no logprobs and no weights, so its
calls are recorded as text-only, nothing of them is trained on, and nothing is made up in their place. The provider's
key is read by litellm from the environment (OPENAI_API_KEY, ANTHROPIC_API_KEY, ...) and is never in a record.

What is sent: the canonical messages without reasoning (providers take their own form of it, or refuse it), the tools,
and those sampling fields that are not neutral. What a provider refuses is an error that names it.

Settings: api_base, the URL of a server with an API of OpenAI's kind; timeout_s, most seconds for one reply (600).
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from polarlike.engines.base import (
    CannotScore,
    Chunk,
    Conversation,
    EngineError,
    EngineOptions,
    GenerateRequest,
    PolicyWeights,
)
from polarlike.engines.log import EngineLog, LogEntry
from polarlike.plugins import nearest
from polarlike.records import Ids, Logprobs, Message, Sampling, UsageError, no_ids
from polarlike.templates import ChatTemplate

SETTINGS = ("api_base", "timeout_s")
CONTEXT = 1 << 20
"""The provider knows its model's length, and says so where a prompt exceeds it."""


def create(argument: str, options: EngineOptions) -> RemoteEngine:
    """argument: a model as litellm names it, for example anthropic/claude-sonnet-4-5. Raises UsageError."""
    for key in options.extra:
        if key not in SETTINGS:
            raise UsageError(f"The remote engine has no setting {key!r}{nearest(key, SETTINGS)}")
    return RemoteEngine(argument, options)


class RemoteEngine:
    """An `Engine` without tokens."""

    name = "remote"
    text_only = True
    policy_version = 0
    context_length = CONTEXT
    template: ChatTemplate | None = None

    def __init__(self, model: str, options: EngineOptions):
        self.model_name = model
        self._model = model
        self._api_base = options.extra.get("api_base")
        self._timeout_s = _seconds(options.extra.get("timeout_s", 600.0))
        self._log = EngineLog(options.log)
        self._litellm: Any = None

    async def start(self) -> None:
        if self._litellm is None:
            self._litellm = await asyncio.to_thread(_import_litellm)

    async def close(self) -> None:
        await asyncio.to_thread(self._log.close)

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        raise CannotScore("A remote model's API gives no logprobs of given tokens.")

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        raise EngineError("A remote model takes no weights; train on an embedded, vLLM or SGLang engine.")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """One chunk with the whole reply."""
        if request.conversation is None:
            raise EngineError("A remote engine needs the conversation of a request, not its tokens alone.")
        reason = "abort"
        try:
            reply, reason = await self._ask(request.conversation, request.sampling)
        except EngineError:
            reason = "error"
            raise
        finally:
            # Shielded: the task that reads may be cancelled, and that it was asked is logged all the same.
            await asyncio.shield(self._write(request, reason))
        yield Chunk(no_ids(), np.zeros(0, np.float32), no_ids(), reason, reply)

    async def _ask(self, conversation: Conversation, sampling: Sampling) -> tuple[Message, str]:
        if self._litellm is None:
            raise EngineError("The remote engine has not been started; await its start() first.")
        try:
            answer = await self._litellm.acompletion(
                model=self._model,
                messages=[_sent(m) for m in conversation.messages],
                tools=conversation.tools or None,
                api_base=self._api_base,
                timeout=self._timeout_s,
                **_sampling(sampling),
            )
            choice = answer.choices[0]
            return _message(choice.message), _reason(choice.finish_reason)
        except EngineError:
            raise
        except Exception as e:  # litellm's own classes, one a provider's fault, and what is under them
            said = (str(e).splitlines() or [type(e).__name__])[0]
            raise EngineError(f"The remote model {self._model} did not answer: {said}") from e

    async def _write(self, request: GenerateRequest, reason: str) -> None:
        empty = np.zeros(0, np.float32)
        entry = LogEntry(request.request_id, no_ids(), no_ids(), empty, no_ids(), reason, request.sampling.temperature)
        await asyncio.to_thread(self._log.write, entry)


def _seconds(value: Any) -> float:
    """YAML 1.1 reads 6e2 as text. Raises UsageError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"The remote engine's setting timeout_s is {value!r}; it must be a number.") from None


def _import_litellm() -> Any:
    # Without it the import fetches a price list from the internet.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        litellm: Any = importlib.import_module("litellm")
    except ModuleNotFoundError as e:
        raise UsageError(f"remote:MODEL needs the Python package {e.name}; pip install 'polarlike[teachers]'.") from e
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def _sent(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _sampling(s: Sampling) -> dict[str, Any]:
    """The fields that say something: a provider that fixes a field refuses even its neutral value."""
    values = {
        "temperature": (s.temperature, 1.0),
        "top_p": (s.top_p, 1.0),
        "top_k": (s.top_k, 0),
        "presence_penalty": (s.presence_penalty, 0.0),
        "frequency_penalty": (s.frequency_penalty, 0.0),
        "repetition_penalty": (s.repetition_penalty, 1.0),
        "stop": (list(s.stop), []),
        "seed": (s.seed, None),
    }
    return {"max_tokens": s.max_tokens} | {k: value for k, (value, neutral) in values.items() if value != neutral}


def _message(said: Any) -> Message:
    """litellm's message in the canonical form."""
    message: Message = {"role": "assistant", "content": said.content or ""}
    if reasoning := getattr(said, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments or "{}"},
        }
        for call in said.tool_calls or []
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _reason(reason: str | None) -> str:
    if reason in ("stop", "tool_calls", "function_call"):
        return "stop"
    if reason == "length":
        return "length"
    raise EngineError(f"The provider ended the reply with {reason!r}; it is no answer of the model's.")
