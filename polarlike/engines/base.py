"""What an engine is: token ids in; token ids, their logprobs and the policy version of each out.

The engine knows nothing of conversations, harnesses or HTTP dialects. `GenerateRequest.conversation` is there for the
scripted engine alone, whose policy is a function of it. Engines register in the entry-point group
`polarlike.engines`: name -> factory(argument: str, options: EngineOptions) -> Engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polarlike.records import Ids, Logprobs, Message, PolarError, Sampling, Tool
from polarlike.templates import ChatTemplate


class EngineError(PolarError):
    """The engine failed or returned what cannot be trained on."""


class CannotScore(EngineError):
    """This kind of engine, or its setting, has no logprobs of given tokens; asking again will not help."""


@dataclass(slots=True)
class Conversation:
    """What a scripted policy sees: the canonical messages, the tools, and the task when the session has one."""

    messages: list[Message]
    tools: list[Tool] | None = None
    task: dict[str, Any] | None = None
    model: str = ""


@dataclass(slots=True)
class GenerateRequest:
    """One completion. prompt_ids: int32 [P]. stop_ids end the reply and are part of it. cache_key: sessions that share
    a key stick to one worker; engines without workers ignore it."""

    request_id: str
    prompt_ids: Ids
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    cache_key: str = ""
    conversation: Conversation | None = None


@dataclass(slots=True)
class Chunk:
    """A piece of a reply, in order. ids, logprobs, versions: int32, float32, int32 [n]. The last chunk, and only it,
    has finish_reason: stop (a stop id or stop string), length, abort. A text-only engine sends one last chunk with
    `reply` set and empty arrays."""

    ids: Ids
    logprobs: Logprobs
    versions: Ids
    finish_reason: str | None = None
    reply: Message | None = None


@dataclass(slots=True)
class EngineOptions:
    """log: file the engine writes its own evidence to, one JSON line a request (request_id, prompt_ids, completion_ids,
    logprobs, versions, finish_reason). model: folder whose tokenizer an engine behind a server uses, and whose
    tokenizer and logprobs a scripted engine. temperature: the run's, where it sets one; else each request brings its
    own."""

    log: Path | None = None
    model: Path | None = None
    renderer: str | None = None
    thinking: bool = False
    seed: int = 0
    dtype: str = "float32"
    max_batch: int = 64
    temperature: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PolicyWeights:
    """A policy as a trainer hands it to an engine, in whichever form the engine takes.

    tensors: the full state dict (adapters merged in) by Hugging Face parameter name; the tensors may be the trainer's
    live ones. save_model: writes a whole Hugging Face folder. save_adapter: writes a PEFT LoRA folder over the model
    that the run started from; None where the policy is no LoRA. All three block.
    """

    tensors: Callable[[], Mapping[str, Any]]
    save_model: Callable[[Path], None]
    save_adapter: Callable[[Path], None] | None = None


class Engine(Protocol):
    name: str
    model_name: str
    text_only: bool
    context_length: int
    policy_version: int
    template: ChatTemplate | None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Closing the generator (aclose, or cancelling the task that reads it) stops sampling."""
        ...

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """Logprobs of ids[start:], each given all before it, at that temperature. float32 [len(ids) - start].
        Raises CannotScore where the engine has no such numbers."""
        ...

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        """Replaces the weights and raises policy_version to `version`, which must be higher. Tokens sampled after it
        carry the new version. Raises EngineError where the engine cannot."""
        ...
