"""The store's face: writes that return when they are durable, reads that any thread or process may make meanwhile.

Knows records and the room's parts; knows no HTTP and no trajectories. What holds: when an awaited write returns, it has
been committed; when it raises StoreError, it has not. Cancelling the task that awaits a write does not take it back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from zstandard import ZstdError

from polarlike.records import Call, Delivery, Rollout, RolloutStatus
from polarlike.store import rows, schema
from polarlike.store.codec import decompress
from polarlike.store.database import insert_or_replace, open_database
from polarlike.store.errors import StoreError, sentence
from polarlike.store.url import parse, public
from polarlike.store.writer import Write, Writer

T = TypeVar("T")

_IN_CHUNK = 500  # values in one IN (...), below every database's limit


@dataclass(slots=True)
class SessionRecord:
    """A session as the store keeps it. settings: the proxy's own, JSON. created: unix seconds."""

    session_id: str
    rollout_id: str
    settings: dict[str, Any]
    created: float


class Store:
    """Durable calls, sessions, rollouts and run facts.

    url: sqlite:///FILE (its folder must exist), or postgresql://USER@HOST/DATABASE?schema=NAME, where each run has a
    schema of its own. read_only: nothing is made or written, and a disk that cannot be written will do. Raises
    UsageError for a URL or a schema that cannot be used, NoRun where there is nothing to read, and StoreError where the
    database cannot be opened.
    """

    def __init__(self, url: str, *, read_only: bool = False):
        self._engine = open_database(url, read_only=read_only)
        self._where = public(parse(url))
        self._writer = Writer(self._engine, self._where)
        calls = schema.calls
        self._insert_call = sa.insert(calls)
        self._update_call = (
            sa.update(calls)
            .where(calls.c.call_id == sa.bindparam("of"))
            .values(delivery=sa.bindparam("new_delivery"), retries=sa.bindparam("new_retries"))
        )
        self._put_session = insert_or_replace(self._engine, schema.sessions)
        self._put_rollout = insert_or_replace(self._engine, schema.rollouts)
        self._put_meta = insert_or_replace(self._engine, schema.meta)

    # ------------------------------------------------------------ writing

    async def put_call(self, call: Call) -> None:
        """Returns when the call is durable. The call must not change meanwhile. A call_id is stored once."""
        duplicate = f"The call {call.call_id} is in the store already; a call is written once."
        await self._submit(self._insert_call, lambda: rows.encode_call(call), duplicate=duplicate)

    async def update_delivery(self, call_id: str, delivery: Delivery, retries: int) -> None:
        row = {"of": call_id, "new_delivery": delivery.value, "new_retries": retries}
        missing = f"There is no call {call_id} in the store, so its delivery cannot be recorded."
        await self._submit(self._update_call, lambda: rows.Encoded(row), missing=missing)

    async def put_session(self, session_id: str, rollout_id: str, settings: dict[str, Any]) -> None:
        """Inserts or replaces."""
        created = time.time()

        def encode() -> rows.Encoded:
            row = {"session_id": session_id, "rollout_id": rollout_id, "created": created}
            return rows.Encoded(row | {"settings": rows.encode_value(settings)})

        await self._submit(self._put_session, encode)

    async def put_rollout(self, rollout: Rollout) -> None:
        """Inserts or replaces by rollout_id."""
        await self._submit(self._put_rollout, lambda: rows.encode_rollout(rollout))

    async def put_meta(self, key: str, value: dict[str, Any]) -> None:
        """Inserts or replaces."""
        await self._submit(self._put_meta, lambda: rows.Encoded({"key": key, "value": rows.encode_value(value)}))

    async def close(self) -> None:
        """Writes what waits and lets go of the database. May be called again."""
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """The same, where there is no event loop."""
        self._writer.close()
        self._engine.dispose()

    async def _submit(
        self,
        statement: sa.Executable,
        encode: Callable[[], rows.Encoded],
        *,
        missing: str = "",
        duplicate: str = "",
    ) -> None:
        done = self._writer.submit(Write(statement, encode, missing, duplicate))
        await asyncio.shield(asyncio.wrap_future(done))

    # ------------------------------------------------------------ reading

    def calls(self, session_id: str) -> list[Call]:
        """The session's calls by index."""
        table = schema.calls
        found = self._read(
            sa.select(table).where(table.c.session_id == session_id).order_by(table.c.position, table.c.call_id)
        )
        blobs = self._blobs({name for row in found for name in rows.blobs_of(row)})
        return self._decoded(lambda row: rows.decode_call(row, blobs), found)

    def sessions(self, rollout_id: str | None = None) -> list[SessionRecord]:
        """All sessions, or those of a rollout, oldest first."""
        table = schema.sessions
        query = sa.select(table).order_by(table.c.created, table.c.session_id)
        if rollout_id is not None:
            query = query.where(table.c.rollout_id == rollout_id)
        return self._decoded(
            lambda r: SessionRecord(r["session_id"], r["rollout_id"], rows.decode_value(r["settings"]), r["created"]),
            self._read(query),
        )

    def rollouts(
        self, status: RolloutStatus | None = None, *, task_id: str | None = None, group_id: str | None = None
    ) -> list[Rollout]:
        """Rollouts in the order they started, narrowed by what is given."""
        table = schema.rollouts
        query = sa.select(table).order_by(table.c.started, table.c.rollout_id)
        if status is not None:
            query = query.where(table.c.status == status.value)
        if task_id is not None:
            query = query.where(table.c.task_id == task_id)
        if group_id is not None:
            query = query.where(table.c.group_id == group_id)
        return self._decoded(rows.decode_rollout, self._read(query))

    def rollout(self, rollout_id: str) -> Rollout | None:
        found = self._read(sa.select(schema.rollouts).where(schema.rollouts.c.rollout_id == rollout_id))
        return next(iter(self._decoded(rows.decode_rollout, found)), None)

    def meta(self, key: str) -> dict[str, Any] | None:
        found = self._read(sa.select(schema.meta).where(schema.meta.c.key == key))
        return next(iter(self._decoded(lambda row: rows.decode_value(row["value"]), found)), None)

    def _blobs(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """hash to uncompressed JSON."""
        wanted = sorted(names)
        out: dict[bytes, bytes] = {}
        for k in range(0, len(wanted), _IN_CHUNK):
            query = sa.select(schema.blobs).where(schema.blobs.c.hash.in_(wanted[k : k + _IN_CHUNK]))
            read = self._read(query)
            plain = self._decoded(lambda row: decompress(row["data"]), read)
            out |= {row["hash"]: data for row, data in zip(read, plain, strict=True)}
        return out

    def _decoded(self, decode: Callable[[dict[str, Any]], T], found: Iterable[dict[str, Any]]) -> list[T]:
        try:
            return [decode(row) for row in found]
        except (ZstdError, ValueError, KeyError, TypeError) as e:
            raise StoreError(f"The store {self._where} holds a damaged record; restore it from a copy ({e}).") from e

    def _read(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        try:
            with self._engine.connect() as connection:
                return [dict(row) for row in connection.execute(query).mappings()]
        except DBAPIError as e:
            raise StoreError(sentence(e, self._where)) from e
