"""The proxy's side of one rollout: its key, its turns, and the replies being sampled. Knows no HTTP.

What holds: long requests are parsed, rewritten and rendered in threads of the proxy's own (a long prompt keeps no other
session waiting, and a scripted policy that sleeps keeps no prompt waiting); a session plans one request at a time, and
between a plan and its generation nothing else happens, so two requests are always told apart the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from polarlike.dialects.base import DialectError, ModelRequest
from polarlike.engines.base import Engine
from polarlike.proxy.generation import Generation
from polarlike.proxy.planning import Plan, Planner
from polarlike.proxy.settings import SessionSettings
from polarlike.records import Delivery, Message, new_id
from polarlike.store import Store

T = TypeVar("T")

_AT_ONCE = 32 * 1024  # bytes of a request that are rendered in some 20 ms, if all of them are new
_threads = ThreadPoolExecutor(4, thread_name_prefix="polarlike-proxy")


async def off_loop(size: int, function: Callable[..., T], *arguments: object) -> T:
    """function(*arguments), in a thread of the proxy's own where a request of `size` bytes could hold up the event loop
    for long. What is small is done at once: where both are busy, handing it to a thread and back takes 10 ms."""
    if size <= _AT_ONCE:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)


def key_digest(key: str) -> bytes:
    # surrogateescape: a header's bytes need not be UTF-8
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


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
        self._planning = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._count = 0

    def next_index(self) -> int:
        self._count += 1
        return self._count - 1

    @property
    def calls(self) -> int:
        return self._count

    async def generation(self, request: ModelRequest, body: bytes, *, dialect: str, marked_retry: bool) -> Generation:
        """The reply to a request, connected (the caller disconnects it): a new one, or for a retry the one that is
        under way or finished. Two open connections with the same body are two samples, and so is an unmarked repeat
        after a delivered reply.

        Raises TemplateError, or DialectError where the prompt leaves no room or the session was closed meanwhile.
        """
        body_hash = await off_loop(len(body), _hash, body)
        async with self._planning:
            generation = self._known(body_hash, marked_retry)
            if generation is not None:
                generation.retries += 1
            else:
                rewrites, plan = await off_loop(len(body), self._plan, request)
                if self.closed:
                    raise DialectError(401, "This session has been closed.", code="invalid_api_key")
                generation = self._start(request, plan)
                generation.rewrites, generation.dialect = rewrites, dialect
                self._by_body.setdefault(body_hash, []).append(generation)
            generation.connect()
            return generation

    def _known(self, body_hash: bytes, marked_retry: bool) -> Generation | None:
        """The generation that a request with this body retries: before all one whose own connection is gone."""
        whole = [g for g in self._by_body.get(body_hash, ()) if not g.failed]
        orphans = [g for g in whole if g.joinable]
        if orphans:
            return orphans[-1]
        return whole[-1] if whole and marked_retry else None

    def _plan(self, request: ModelRequest) -> tuple[dict[str, int], Plan]:
        """In a thread. Changes nothing but the request, so that a client that leaves meanwhile leaves no trace."""
        rewrites = self._rewrite(request.messages)
        if self.engine.template is not None:
            least = self.engine.template.least_tokens(request.messages)
            if least > self.engine.context_length:
                raise self._no_room(f"at least {least}")
        return rewrites, self.planner.plan(request.messages, request.tools)

    def _start(self, request: ModelRequest, plan: Plan) -> Generation:
        room = self.engine.context_length - int(plan.prompt_ids.size)
        if room <= 0:
            raise self._no_room(str(plan.prompt_ids.size))
        sampling = self.settings.sampling.effective(request.sampling, room, train=self.settings.train)
        self.planner.opened(plan)
        return Generation(self, request, plan, sampling)

    def _no_room(self, tokens: str) -> DialectError:
        return DialectError(
            400,
            f"This model's maximum context length is {self.engine.context_length} tokens. However, your messages "
            f"resulted in {tokens} tokens. Please reduce the length of the messages.",
            kind="invalid_request_error",
            param="messages",
            code="context_length_exceeded",
        )

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
        """Stops what is being sampled and records it as aborted. Nothing can be retried any more: replies are let go
        of, which hold their session as it holds them."""
        self.closed = True
        for generations in self._by_body.values():
            for generation in generations:
                if not generation.done.is_set():
                    await generation.abort()
        self._by_body.clear()
        await self.settle()


def _hash(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
