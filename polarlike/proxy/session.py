"""The proxy's side of one rollout: its key, its turns, and the replies being sampled. Knows no HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets

from polarlike.dialects.base import DialectError, ModelRequest
from polarlike.engines.base import Engine
from polarlike.proxy.generation import Generation
from polarlike.proxy.planning import Planner
from polarlike.proxy.settings import SessionSettings
from polarlike.records import Delivery, Message, new_id
from polarlike.store import Store


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Session:
    def __init__(self, engine: Engine, store: Store, settings: SessionSettings, rollout_id: str = ""):
        self.session_id = new_id("sess")
        self.rollout_id = rollout_id
        self.key = "pk-" + secrets.token_urlsafe(24)
        self.engine, self.store, self.settings = engine, store, settings
        self.planner = Planner(engine.template, fork_on_edit=settings.on_edit == "fork")
        self.stop_ids = engine.template.stop_ids if engine.template else ()
        self.failures: list[str] = []  # replies that ended in an error, for the rollout's report
        self.refusals: list[str] = []  # requests answered with 4xx
        self.engine_retries = 0
        self.closed = False
        self._rules = [(r.name, re.compile(r.pattern), r.replacement) for r in settings.rewrites]
        self._by_body: dict[bytes, list[Generation]] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self._count = 0

    def next_index(self) -> int:
        self._count += 1
        return self._count - 1

    @property
    def calls(self) -> int:
        return self._count

    def generation(self, request: ModelRequest, body: bytes, *, dialect: str, marked_retry: bool) -> Generation:
        """The reply to a request: a new one, or for a retry the one that is under way or finished. Two open connections
        with the same body are two samples, and so is an unmarked repeat after a delivered reply.

        Raises TemplateError, or DialectError where the prompt leaves no room.
        """
        body_hash = hashlib.blake2b(body, digest_size=16).digest()
        earlier = self._by_body.setdefault(body_hash, [])
        for known in reversed(earlier):
            failed = known.done.is_set() and known.delivery is Delivery.ABORTED
            if not failed and (marked_retry or known.joinable):
                known.retries += 1
                return known
        generation = self._start(request, body_hash, dialect)
        earlier.append(generation)
        return generation

    def _start(self, request: ModelRequest, body_hash: bytes, dialect: str) -> Generation:
        rewrites = self._rewrite(request.messages)
        plan = self.planner.plan(request.messages, request.tools)
        room = self.engine.context_length - int(plan.prompt_ids.size)
        if room <= 0:
            self.planner.failed(plan)
            raise DialectError(
                400,
                f"This model's maximum context length is {self.engine.context_length} tokens. However, your messages "
                f"resulted in {plan.prompt_ids.size} tokens. Please reduce the length of the messages.",
                kind="invalid_request_error",
                param="messages",
                code="context_length_exceeded",
            )
        sampling = self.settings.sampling.effective(request.sampling, room, train=self.settings.train)
        generation = Generation(self, request, plan, sampling, body_hash)
        generation.rewrites, generation.dialect = rewrites, dialect
        return generation

    def _rewrite(self, messages: list[Message]) -> dict[str, int]:
        """Applies the session's rules to the messages in place; how often each did something."""
        counts: dict[str, int] = {}
        for name, pattern, replacement in self._rules:
            for message in messages:
                text, n = pattern.subn(replacement, message["content"])
                if n and text != message["content"]:
                    message["content"] = text
                    counts[name] = counts.get(name, 0) + n
        return counts

    def delivered(self, generation: Generation, delivery: Delivery) -> None:
        """Notes how far a reply got; the write is awaited by `settle`."""
        generation.delivery = delivery
        write = self.store.update_delivery(generation.call_id, delivery, generation.retries)
        task = asyncio.create_task(write)
        self._writes.add(task)
        task.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.failures.append(f"delivery state not written: {error}")

    async def settle(self) -> None:
        """Waits until every delivery state noted so far is on disk, or its failure is in `failures`."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def close(self) -> None:
        """Stops what is being sampled and records it as aborted."""
        self.closed = True
        for generations in self._by_body.values():
            for generation in generations:
                if not generation.done.is_set():
                    await generation.abort()
        await self.settle()
