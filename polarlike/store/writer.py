"""The one thread that writes: it takes all that waits, commits it together, and tells each waiter. Knows no records.

What holds: a waiter is told of success only after the commit that holds its write; after a failed commit every waiter
of the batch is told of the failure, and nothing of it is on disk. Writes are applied in the order they were asked for.
A write that is wrong in itself (unknown call, a value that is not JSON) fails alone. A batch that two processes' writes
deadlocked is rolled back by PostgreSQL and written again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from polarlike.store import schema
from polarlike.store.codec import compress
from polarlike.store.database import insert_if_absent, writing
from polarlike.store.errors import StoreError, sentence
from polarlike.store.rows import Encoded

_BATCH = 256
_KNOWN_BLOBS = 200_000  # hashes remembered as stored: 16 bytes each
_DEADLOCK, _TRIES = "40P01", 5


@dataclass(slots=True)
class Write:
    """One statement for one row. encode runs in the writer's thread. missing: what to say if no row was there to
    change; duplicate: what to say if the row was there already."""

    statement: sa.Executable
    encode: Callable[[], Encoded]
    missing: str = ""
    duplicate: str = ""
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Ready:
    write: Write
    encoded: Encoded


class _Refused(Exception):
    """A write that found no row to change."""


class Writer:
    def __init__(self, engine: Engine, where: str):
        self._engine = engine
        self._where = where
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._known: set[bytes] = set()
        self._insert_blob = insert_if_absent(engine, schema.blobs)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, write: Write) -> Future[None]:
        with self._lock:
            if self._closed:
                raise StoreError(f"The store {self._where} is closed; nothing more can be written to it.")
            if self._thread is None:  # a store that is only read starts no thread
                self._thread = threading.Thread(target=self._run, name="polarlike-store", daemon=True)
                self._thread.start()
            write.done.set_running_or_notify_cancel()  # from here on nobody can cancel it under the thread's feet
            self._queue.put(write)
        return write.done

    def close(self) -> None:
        """Writes what waits, then ends the thread. Blocking."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            ready = [r for r in map(self._encode, batch) if r is not None]
            if ready:
                self._write(ready)

    def _next_batch(self) -> tuple[list[Write], bool]:
        batch: list[Write] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _BATCH:
                return batch, False
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _encode(self, write: Write) -> _Ready | None:
        try:
            return _Ready(write, write.encode())
        except Exception as e:  # told to the one who asked
            error = StoreError(f"A record cannot be stored: {e}.")
            error.__cause__ = e
            write.done.set_exception(error)
            return None

    def _write(self, ready: list[_Ready]) -> None:
        try:
            self._commit_in_race(ready)
        except (_Refused, IntegrityError, DataError) as e:
            if len(ready) == 1:
                self._fail(ready, self._refusal(ready[0].write, e))
                return
            for one in ready:  # find the one at fault, so that the others do not suffer for it
                self._write([one])
        except DBAPIError as e:
            error = StoreError(sentence(e, self._where))
            error.__cause__ = e
            self._fail(ready, error)
        except Exception as e:  # a waiter must never hang, whatever went wrong
            error = StoreError(f"The store {self._where} failed: {e}.")
            error.__cause__ = e
            self._fail(ready, error)
        else:
            for r in ready:
                r.write.done.set_result(None)

    def _refusal(self, write: Write, cause: Exception) -> StoreError:
        said = write.missing if isinstance(cause, _Refused) else write.duplicate
        error = StoreError(said or f"The store {self._where} refused a record: {cause}.")
        error.__cause__ = cause
        return error

    @staticmethod
    def _fail(ready: list[_Ready], error: StoreError) -> None:
        for r in ready:
            r.write.done.set_exception(error)

    def _commit_in_race(self, ready: list[_Ready]) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return self._commit(ready)
            except DBAPIError as e:
                if not left or getattr(e.orig, "sqlstate", None) != _DEADLOCK:
                    raise

    def _commit(self, ready: list[_Ready]) -> None:
        blobs = {h: data for r in ready for h, data in r.encoded.blobs.items() if h not in self._known}
        # In one order in every process: two that add the same blobs then wait for each other in turn, and not at once.
        rows = [{"hash": h, "data": compress(data)} for h, data in sorted(blobs.items())]
        with writing(self._engine) as connection, connection.begin():
            if rows:
                connection.execute(self._insert_blob, rows)
            for run in _runs(ready):
                _execute(connection, run)
        if len(self._known) > _KNOWN_BLOBS:
            self._known.clear()
        self._known.update(blobs)


def _runs(ready: list[_Ready]) -> list[list[_Ready]]:
    """Neighbours with one statement, in order: each run is one executemany."""
    runs: list[list[_Ready]] = []
    for r in ready:
        if runs and runs[-1][0].write.statement is r.write.statement:
            runs[-1].append(r)
        else:
            runs.append([r])
    return runs


def _execute(connection: Connection, run: list[_Ready]) -> None:
    rows: list[dict[str, Any]] = [r.encoded.row for r in run]
    result = connection.execute(run[0].write.statement, rows)
    if run[0].write.missing and result.rowcount != len(rows):
        raise _Refused
