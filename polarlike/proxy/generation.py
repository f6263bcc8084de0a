"""One reply being sampled: from a plan to a committed `Call`. Runs as a task of its own, so that a client may go and
come back; whoever delivers it waits on `changed` and reads what is there.

What holds: `done` is set after the call is on disk, never before, and a call is written exactly once, whole or aborted.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarlike.dialects.base import ModelRequest, Usage
from polarlike.engines.base import Chunk, Conversation, EngineError, GenerateRequest
from polarlike.proxy.planning import Plan, Turn
from polarlike.records import Call, Delivery, Ids, Message, Sampling, new_id, no_ids
from polarlike.store import StoreError

if TYPE_CHECKING:
    from polarlike.proxy.session import Session


class Generation:
    def __init__(self, session: Session, request: ModelRequest, plan: Plan, sampling: Sampling):
        self.session, self.request, self.plan, self.sampling = session, request, plan, sampling
        self.call_id = new_id("call")
        self.index = session.next_index()
        self.rewrites: dict[str, int] = {}
        self.dialect = ""
        self.created = time.time()
        self.connections = 0
        self.retries = 0
        self.delivery = Delivery.COMMITTED
        self.done = asyncio.Event()
        self.error: str | None = None
        self.reply: Message = {"role": "assistant", "content": ""}
        self.finish_reason = ""
        self.malformed = 0
        self._prompt_tokens = int(plan.prompt_ids.size)
        self._completion_tokens = 0
        self._chunks: list[Chunk] = []
        self._settled = False  # nothing may stop it any more
        self._changed = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run(), name=self.call_id)

    # ------------------------------------------------------------ for whoever delivers it

    @property
    def usage(self) -> Usage | None:
        if self.session.engine.text_only:
            return None
        return Usage(self._prompt_tokens, self._completion_tokens)

    def completion_ids(self) -> Ids:
        return _joined([c.ids for c in self._chunks], np.int32)

    async def changed(self, timeout: float) -> bool:
        """Waits for news; False after `timeout` seconds without any."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def connect(self) -> None:
        self.connections += 1
        if self._grace:
            self._grace.cancel()
            self._grace = None

    def disconnect(self) -> None:
        """A connection that carried this reply has ended. The last one's end starts the grace period of a reply that is
        still being sampled."""
        self.connections -= 1
        if self.connections == 0 and not self.done.is_set():
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self.session.settings.grace_s, self._stop)

    @property
    def joinable(self) -> bool:
        """Its connection closed before the closing event was flushed: the same body again is a retry."""
        return self.connections == 0 and self.delivery in (Delivery.COMMITTED, Delivery.LOST)

    @property
    def failed(self) -> bool:
        """It ended without a whole reply on disk, or is about to."""
        return self.error is not None

    async def abort(self) -> None:
        await asyncio.sleep(0)  # a task that is cancelled before its first step would run no line of `_run`
        self._stop()
        await asyncio.wait([self._task])

    def _stop(self) -> None:
        if not self._settled:  # a reply that is whole is written, not torn; and what was stopped is stopped once
            self._settled = True
            self.error = "The reply was stopped."
            self._task.cancel()

    # ------------------------------------------------------------ sampling

    async def _run(self) -> None:
        try:
            await self._sample()
            self._settled = True
            await self._commit(self._finish())
        except asyncio.CancelledError:
            await self._give_up("abort", self.error or "The proxy was stopped.")
        except Exception as e:
            # Whatever went wrong is the client's answer (a 5xx) and is counted; nothing of it may hang a harness.
            self._settled = True
            self.session.failures.append(f"{self.call_id}: {type(e).__name__}: {e}")
            await self._give_up("error", str(e) or type(e).__name__, on_disk=not isinstance(e, StoreError))
        finally:
            self._release()
            self.done.set()
            self._changed.set()

    async def _give_up(self, finish_reason: str, error: str, *, on_disk: bool = True) -> None:
        """Ends without a whole reply. What was sampled is kept; where the store does not take it, that is counted."""
        self.delivery, self.finish_reason, self.error = Delivery.ABORTED, finish_reason, error
        self.session.planner.failed(self.plan)
        if not on_disk or (finish_reason == "error" and not self._chunks):
            return
        try:
            await self.session.store.put_call(self._call())
        except StoreError as e:
            self.session.failures.append(f"{self.call_id}: {type(e).__name__}: {e}")

    def _release(self) -> None:
        """Lets go of all that is on disk or in the session's turns. A finished reply is kept for retries, which need
        its text and its usage; with its whole prompt, or with the tools that came with it, it would make memory grow
        with history times turns."""
        self.request = replace(self.request, messages=[], tools=None)
        self.plan = replace(self.plan, prompt_ids=no_ids(), suffix_ids=no_ids(), new_messages=[], digests=[])
        self._chunks.clear()

    async def _sample(self) -> None:
        """Reads the engine. If it fails in mid-reply, it is asked once more, from the prompt and what was sampled."""
        for attempt in (0, 1):
            sampled = self.completion_ids()
            left = self.sampling.max_tokens - int(sampled.size)
            if left <= 0:
                self.finish_reason = "length"
                return
            request = GenerateRequest(
                request_id=self.call_id if attempt == 0 else f"{self.call_id}.{attempt}",
                prompt_ids=np.concatenate([self.plan.prompt_ids, sampled]),
                sampling=replace(self.sampling, max_tokens=left),
                stop_ids=self.session.stop_ids,
                cache_key=self.session.session_id,
                conversation=Conversation(
                    self.request.messages, self.request.tools, self.session.settings.task, self.request.model
                ),
            )
            try:
                async with aclosing(self.session.engine.generate(request)) as chunks:
                    async for chunk in chunks:
                        self._take(chunk)
                return
            except EngineError:
                if attempt or self.session.engine.text_only:
                    raise
                self.session.engine_retries += 1

    def _take(self, chunk: Chunk) -> None:
        if not self.session.engine.text_only and not chunk.ids.size == chunk.logprobs.size == chunk.versions.size:
            raise EngineError(
                f"The engine {self.session.engine.name} returned {chunk.ids.size} token ids, {chunk.logprobs.size} "
                f"logprobs and {chunk.versions.size} versions; it must return one of each for every token."
            )
        self._chunks.append(chunk)
        self._completion_tokens += int(chunk.ids.size)
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
        if chunk.reply is not None:
            self.reply = chunk.reply
        self._changed.set()

    def _finish(self) -> Call:
        template = self.session.engine.template
        if not self.session.engine.text_only and template is not None:
            parsed = template.parse(self.plan.prompt_ids, self.completion_ids(), self.request.tools)
            self.reply, self.malformed = parsed.message, parsed.malformed
            self.reply["content"] = before_stop(self.reply["content"], self.sampling.stop)
        for call in self.reply.get("tool_calls", []):
            call.setdefault("id", new_id("call"))
            call.setdefault("type", "function")
        if self.finish_reason == "stop" and self.reply.get("tool_calls"):
            self.finish_reason = "tool_calls"
        return self._call()

    def _call(self) -> Call:
        ids = self.completion_ids()
        return Call(
            call_id=self.call_id,
            session_id=self.session.session_id,
            index=self.index,
            parent_id=self.plan.parent.call_id if self.plan.parent else None,
            cause=self.plan.cause,
            new_messages=self.plan.new_messages,
            tools=self.request.tools,
            suffix_ids=self.plan.suffix_ids,
            completion_ids=ids,
            logprobs=_joined([c.logprobs for c in self._chunks], np.float32),
            versions=_joined([c.versions for c in self._chunks], np.int32),
            forced=np.zeros(ids.size, np.bool_),
            reply=self.reply,
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            requested=self.request.sampling,
            dropped=self.request.dropped,
            model=self.request.model,
            dialect=self.dialect,
            stream=self.request.stream,
            delivery=self.delivery,
            retries=self.retries,
            echo_edits=self.plan.echo_edits,
            rewrites=self.rewrites,
            malformed_calls=self.malformed,
            text_only=self.session.engine.text_only,
            started=self.created,
            finished=time.time(),
            first_difference=self.plan.first_difference,
        )

    async def _commit(self, call: Call) -> None:
        await self.session.store.put_call(call)
        turn = Turn(self.call_id, self.plan.parent, self.plan.suffix_ids, call.completion_ids, self.reply)
        self.session.planner.finished(self.plan, turn)


def _joined(pieces: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype)


def before_stop(text: str, stops: tuple[str, ...], *, more: bool = False) -> str:
    """Text up to the first stop string, which was sampled but is not part of the answer. more: further text may come,
    so an ending that may become a stop string is held back too."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)]
    held = max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0) if more else 0
    return text[: len(text) - held]
