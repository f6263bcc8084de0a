"""The thread that owns torch: takes jobs from the event loop, steps the batch, hands chunks back.

It knows requests, stopping and the evidence log; how tokens are computed is `Batch`'s. What holds: jobs are taken
between steps, so an abort or new weights act at the next token; a request's log line is on its way to disk before its
last chunk is; after a fault every request, present and future, gets it as an EngineError.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from polarlike.engines.base import Chunk, EngineError, GenerateRequest
from polarlike.engines.batch import Batch, Sampled, Sequence
from polarlike.engines.log import EngineLog, LogEntry
from polarlike.records import Ids

T = TypeVar("T")
Decode = Callable[[Ids], str]


@dataclass(eq=False)
class Running:
    """A request in the worker's hands. chunks: read on `loop`, the event loop of the caller."""

    request: GenerateRequest
    sequence: Sequence
    loop: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk | EngineError]
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sent: int = 0
    sent_at: float = 0.0

    def chunk(self, finish_reason: str | None) -> Chunk:
        """What was sampled since the last chunk."""
        a, self.sent = self.sent, len(self.ids)
        return Chunk(
            np.asarray(self.ids[a:], np.int32),
            np.asarray(self.logprobs[a:], np.float32),
            np.asarray(self.versions[a:], np.int32),
            finish_reason,
        )

    def entry(self, finish_reason: str) -> LogEntry:
        return LogEntry(
            self.request.request_id,
            self.request.prompt_ids,
            np.asarray(self.ids, np.int32),
            np.asarray(self.logprobs, np.float32),
            np.asarray(self.versions, np.int32),
            finish_reason,
            self.request.sampling.temperature,
        )


def _running_future() -> Future[Any]:
    """A future that its waiter cannot cancel: setting the result of a cancelled one would raise on the engine's
    thread, and one client's leaving would end the engine for all."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Worker:
    """One thread around one `Batch`, made by `build` on that thread."""

    def __init__(self, build: Callable[[], Batch], log: EngineLog, decode: Decode, interval: float):
        self._log, self._decode, self._interval = log, decode, interval
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._fault: EngineError | None = None
        self._requests: dict[Sequence, Running] = {}
        self._scores: dict[Sequence, Future[Any]] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Running, Chunk | EngineError]]] = {}
        self.ready: Future[None] = _running_future()
        self.batch: Batch | None = None
        self._thread = threading.Thread(target=self._run, args=(build,), name="polarlike-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from the event loop

    def start_request(self, running: Running) -> None:
        self._put(lambda: self._begin(running))

    def abort(self, running: Running) -> None:
        self._put(lambda: self._abort(running))

    def score(self, sequence: Sequence) -> Future[Any]:
        """float32 logprobs of the sequence's tokens after `keep`."""
        future: Future[Any] = _running_future()

        def begin() -> None:
            if self._fault is not None:
                future.set_exception(self._fault)
                return
            self._scores[sequence] = future
            self._the_batch().add(sequence)

        self._put(begin)
        return future

    def call(self, function: Callable[[Batch], T]) -> Future[T]:
        """Runs a function over the batch between two steps."""
        future: Future[T] = _running_future()

        def job() -> None:
            try:
                if self._fault is not None:
                    raise self._fault
                future.set_result(function(self._the_batch()))
            except Exception as e:
                future.set_exception(e)

        self._put(job)
        return future

    def close(self) -> None:
        """Ends what is running with an EngineError and joins the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _put(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    # ------------------------------------------------------------ on the thread

    def _the_batch(self) -> Batch:
        assert self.batch is not None
        return self.batch

    def _run(self, build: Callable[[], Batch]) -> None:
        with torch.inference_mode():
            try:
                self.batch = build()
            except Exception as e:
                self._fault = _as_engine_error(e)
                self.ready.set_exception(self._fault)
            else:
                self.ready.set_result(None)
            while self._take_jobs():
                try:
                    if self._fault is None:
                        self._step()
                except Exception as e:
                    self._fail(_as_engine_error(e))
                self._send()
        self._fail(EngineError("The engine was closed while this request was running."))
        self._send()

    def _take_jobs(self) -> bool:
        """Does what was asked for, waiting for it if there is nothing else to do; False when closing."""
        with self._wake:
            while not (self._jobs or self._closing or (self._fault is None and self._the_batch().busy)):
                self._wake.wait()
            jobs, self._jobs = self._jobs, deque()
            closing = self._closing
        for job in jobs:
            job()
        return not closing

    def _step(self) -> None:
        batch = self._the_batch()
        sampled = batch.step()
        now = time.monotonic()
        for one in sampled:
            self._token(one, now)
        if self._scores:
            for sequence in [s for s in self._scores if s.missing == 0]:
                batch.remove(sequence)
                self._scores.pop(sequence).set_result(np.concatenate(sequence.scores))

    def _begin(self, running: Running) -> None:
        if self._fault is not None:
            self._post(running, self._fault)
            return
        self._requests[running.sequence] = running
        self._the_batch().add(running.sequence)

    def _token(self, one: Sampled, now: float) -> None:
        running = self._requests[one.sequence]
        running.ids.append(one.token)
        running.logprobs.append(one.logprob)
        running.versions.append(one.version)
        reason = self._finish_reason(running)
        if reason is not None:
            error = self._finish(running, reason)
            self._post(running, error or running.chunk(reason))
        elif now - running.sent_at >= self._interval:
            running.sent_at = now
            self._post(running, running.chunk(None))

    def _finish_reason(self, running: Running) -> str | None:
        if running.ids[-1] in running.request.stop_ids:
            return "stop"
        for stop in running.request.sampling.stop:
            # A token is at least one byte, so the string lies within this many; four for a character cut at the edge.
            tail = np.asarray(running.ids[-len(stop.encode()) - 4 :], np.int32)
            if stop in self._decode(tail):
                return "stop"
        return "length" if len(running.ids) >= running.limit else None

    def _finish(self, running: Running, reason: str) -> EngineError | None:
        del self._requests[running.sequence]
        self._the_batch().remove(running.sequence)
        return self._write(running, reason)

    def _write(self, running: Running, reason: str) -> EngineError | None:
        """A log that cannot be written fails the one request, which has no reply without its evidence; others go on."""
        try:
            self._log.write(running.entry(reason))
        except EngineError as e:
            return e
        return None

    def _abort(self, running: Running) -> None:
        if running.sequence in self._requests:
            self._finish(running, "abort")

    def _fail(self, error: EngineError) -> None:
        self._fault = error
        for running in list(self._requests.values()):
            self._write(running, "abort")
            self._post(running, error)
        self._requests.clear()
        for future in self._scores.values():
            future.set_exception(error)
        self._scores.clear()

    def _post(self, running: Running, item: Chunk | EngineError) -> None:
        self._outbox.setdefault(running.loop, []).append((running, item))

    def _send(self) -> None:
        """One wake-up of the event loop for everything a step produced."""
        outbox, self._outbox = self._outbox, {}
        for loop, items in outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # that loop is closed: nobody reads any more
                for running, _ in items:
                    self._abort(running)


def _deliver(items: list[tuple[Running, Chunk | EngineError]]) -> None:
    for running, item in items:
        running.chunks.put_nowait(item)


def _as_engine_error(e: Exception) -> EngineError:
    if isinstance(e, EngineError):
        return e
    error = EngineError(f"The embedded engine failed: {type(e).__name__}: {e}")
    error.__cause__ = e
    return error
