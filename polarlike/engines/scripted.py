"""A policy written as a Python function: from a conversation to a reply.

The file defines `policy(conversation: Conversation) -> Message | str`, plain or async; `conversation.task` is the task
when the session has one, so that one file serves a whole task set. It knows nothing of HTTP dialects.

What holds: with a model folder (`EngineOptions.model`) a reply is that model's tokens, and its logprobs are that
model's own, scored on those tokens at the request's temperature. Without one the engine is text-only and says so; it
makes up no ids and no numbers.

Settings (`EngineOptions.extra`): delay_s, how long a reply takes, spread evenly over its chunks (0); stream, tokens
a chunk (0: the whole reply in one). Others go to the embedded engine that scores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
from polarlike.records import Ids, Logprobs, Message, UsageError, new_id, no_ids
from polarlike.templates import ChatTemplate

if TYPE_CHECKING:
    from polarlike.engines.embedded import EmbeddedEngine

TEXT_ONLY_CONTEXT = 1 << 20


def create(argument: str, options: EngineOptions) -> ScriptedEngine:
    """argument: a Python file. Raises UsageError where it is missing, does not import or defines no `policy`."""
    return ScriptedEngine(Path(argument), options)


class ScriptedEngine:
    """An `Engine` over a user's `policy` function."""

    name = "scripted"

    def __init__(self, file: Path, options: EngineOptions):
        extra = dict(options.extra)
        self._delay = float(extra.pop("delay_s", 0.0))
        self._stream = int(extra.pop("stream", 0))
        self._file = file
        self._policy = load_policy(file)
        self._log = EngineLog(options.log)
        self._model = _scorer(options, extra)
        self.model_name = file.stem
        self.text_only = self._model is None
        self.template: ChatTemplate | None = self._model.template if self._model else None
        self.context_length = self._model.context_length if self._model else TEXT_ONLY_CONTEXT

    @property
    def policy_version(self) -> int:
        return self._model.policy_version if self._model else 0

    async def start(self) -> None:
        if self._model:
            await self._model.start()

    async def close(self) -> None:
        if self._model:
            await self._model.close()
        await asyncio.to_thread(self._log.close)

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        if not self._model:
            raise CannotScore("A scripted engine without a model cannot score; give its options a model folder.")
        return await self._model.score(ids, start, temperature)

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        """New weights change the logprobs, not the replies: those are the script's."""
        if not self._model:
            raise EngineError("A scripted engine without a model has no weights; give its options a model folder.")
        await self._model.publish(weights, version)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        sent = no_chunk()
        reason = "abort"
        try:
            reply = await self._reply(request)
            whole = await self._encode(request, reply)
            reason_at_end = whole.finish_reason or "stop"
            step = self._stream or max(1, whole.ids.size)
            pieces = [slice(a, a + step) for a in range(0, max(1, whole.ids.size), step)]
            for k, piece in enumerate(pieces):
                await asyncio.sleep(self._delay / len(pieces))
                last = k == len(pieces) - 1
                if last:
                    sent, reason = whole, reason_at_end
                    await self._write(request, sent, reason)
                else:
                    sent = _part(whole, slice(0, piece.stop))
                yield dataclasses.replace(_part(whole, piece), finish_reason=reason_at_end if last else None)
        finally:
            if reason == "abort":
                # Shielded: the task that reads may be cancelled, and what was sampled is logged all the same.
                await asyncio.shield(self._write(request, sent, reason))

    # ------------------------------------------------------------ inside

    async def _reply(self, request: GenerateRequest) -> Message:
        if request.conversation is None:
            raise EngineError("A scripted engine needs the conversation of a request, not its tokens alone.")
        try:
            # In a thread: the user's function may take its time.
            reply = await asyncio.to_thread(self._policy, _copy(request.conversation))
            if inspect.isawaitable(reply):
                reply = await reply
        except Exception as e:
            raise EngineError(f"The scripted policy failed: {describe(e, self._file)}") from e
        if isinstance(reply, str):
            return {"role": "assistant", "content": reply}
        if not isinstance(reply, dict):
            kind = type(reply).__name__
            raise EngineError(f"The scripted policy {self._file.name} returned a {kind}; return a message or a string.")
        try:
            return canonical(reply)
        except (KeyError, TypeError, AttributeError) as e:
            raise EngineError(
                f"The scripted policy {self._file.name} returned a tool call that is not "
                f'{{"function": {{"name", "arguments"}}}}: {e!r}'
            ) from e

    async def _encode(self, request: GenerateRequest, reply: Message) -> Chunk:
        """The whole reply as one chunk, cut at the request's token limit."""
        if self._model is None or self.template is None:
            return dataclasses.replace(no_chunk(), finish_reason="stop", reply=reply)
        prompt = request.prompt_ids
        ids = await asyncio.to_thread(self.template.encode_reply, prompt, reply)
        room = self.context_length - int(prompt.size)
        if room <= 0:
            raise EngineError(f"The prompt of {prompt.size} tokens leaves no room in {self.context_length}.")
        limit = min(request.sampling.max_tokens, room)
        reason = "length" if ids.size > limit else "stop"
        ids = ids[:limit]
        for _ in range(3):
            version = self._model.policy_version
            temperature = request.sampling.temperature
            logprobs = await self._model.score(np.concatenate([prompt, ids]), int(prompt.size), temperature)
            if version == self._model.policy_version:
                return Chunk(ids, logprobs, np.full(ids.size, version, np.int32), reason)
        raise EngineError("The weights changed faster than a scripted reply could be scored.")

    async def _write(self, request: GenerateRequest, sent: Chunk, reason: str) -> None:
        entry = LogEntry(
            request.request_id,
            request.prompt_ids,
            sent.ids,
            sent.logprobs,
            sent.versions,
            reason,
            request.sampling.temperature,
        )
        await asyncio.to_thread(self._log.write, entry)


def no_chunk() -> Chunk:
    return Chunk(no_ids(), np.zeros(0, np.float32), no_ids())


def _part(whole: Chunk, piece: slice) -> Chunk:
    return dataclasses.replace(
        whole, ids=whole.ids[piece], logprobs=whole.logprobs[piece], versions=whole.versions[piece]
    )


def _copy(conversation: Conversation) -> Conversation:
    """The user's function may change its lists; ours stay as they are."""
    return dataclasses.replace(conversation, messages=[dict(m) for m in conversation.messages])


def canonical(reply: Message) -> Message:
    """A user's reply with what they may leave out filled in: role, content, ids and types of tool calls. Arguments
    given as a dict become JSON text."""
    import orjson

    message: Message = {**reply, "role": "assistant", "content": reply.get("content") or ""}
    calls = []
    for call in reply.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        calls.append(
            {
                "id": call.get("id") or new_id("call"),
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    return message


def load_policy(file: Path) -> Callable[[Conversation], Any]:
    """The `policy` function of a Python file, which may import its neighbours."""
    if not file.is_file():
        raise UsageError(
            f"There is no scripted policy at {file}; give a Python file that defines policy(conversation)."
        )
    name = f"polarlike_scripted_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"The scripted policy {file} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    _run(spec.loader, module, file)
    policy = getattr(module, "policy", None)
    if not callable(policy):
        raise UsageError(f"The scripted policy {file} defines no function policy(conversation).")
    function: Callable[[Conversation], Any] = policy
    return function


def _run(loader: Any, module: ModuleType, file: Path) -> None:
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        loader.exec_module(module)
    except Exception as e:
        raise UsageError(f"The scripted policy {file} does not import: {describe(e, file)}") from e
    finally:
        sys.path.remove(folder)


def describe(e: BaseException, file: Path) -> str:
    """The error with the file and line it came from: the innermost line of the user's own file."""
    if isinstance(e, SyntaxError) and e.filename:
        return f"{type(e).__name__}: {e.msg} (file {Path(e.filename).name}, line {e.lineno})"
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == file.resolve()]
    where = f" (file {file.name}, line {own[-1].lineno})" if own else ""
    return f"{type(e).__name__}: {e}{where}"


def _scorer(options: EngineOptions, extra: dict[str, Any]) -> EmbeddedEngine | None:
    if options.model is None:
        if extra:
            raise UsageError(f"The scripted engine has no setting {min(extra)!r}; there are delay_s and stream.")
        return None
    from polarlike.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(options.model, dataclasses.replace(options, log=None, model=None, extra=extra))
