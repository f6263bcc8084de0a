"""The store's tables and how an older file becomes a current one.

Knows tables alone: no record types, no connection handling. `MIGRATIONS[n]` takes a database from version n to n + 1,
in one transaction with the version it reaches; steps are only ever added. A new file runs them all.

Layout: `calls` holds what one call adds. Messages, tools, replies and the settings that calls share are in `blobs`,
once each, under the hash of their bytes; a call row holds those hashes, 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

from polarlike.records import UsageError

HASH_BYTES = 16

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

blobs = Table(
    "blobs",
    metadata,
    Column("hash", LargeBinary(HASH_BYTES), primary_key=True),
    Column("data", LargeBinary, nullable=False),  # zstd of JSON
)

calls = Table(
    "calls",
    metadata,
    Column("call_id", String(64), primary_key=True),
    Column("session_id", String(64), nullable=False),
    Column("position", Integer, nullable=False),  # Call.index
    Column("delivery", String(16), nullable=False),
    Column("retries", Integer, nullable=False),
    Column("messages", LargeBinary, nullable=False),  # hashes of new_messages, end to end
    Column("tools", LargeBinary(HASH_BYTES)),
    Column("reply", LargeBinary(HASH_BYTES), nullable=False),
    Column("settings", LargeBinary(HASH_BYTES), nullable=False),  # what the calls of a session mostly share
    Column("fields", LargeBinary, nullable=False),  # JSON of the rest
    Column("tokens", LargeBinary, nullable=False),  # see codec.pack_tokens
    Index("calls_by_session", "session_id", "position"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("rollout_id", String(64), nullable=False),
    Column("settings", LargeBinary, nullable=False),
    Column("created", Float, nullable=False),  # unix seconds
    Index("sessions_by_rollout", "rollout_id"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", String(64), primary_key=True),
    Column("task_id", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("sample", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("started", Float, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("patch", LargeBinary, nullable=False),
    Index("rollouts_by_status", "status"),
    Index("rollouts_by_group", "group_id"),
)

meta = Table(
    "meta",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)


def _create_all(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)


MIGRATIONS: list[Callable[[Connection], None]] = [_create_all]


def version_of(connection: Connection) -> int:
    """0 for an empty database."""
    names = connection.get_execution_options().get("schema_translate_map") or {}
    if not sa.inspect(connection).has_table(schema_version.name, schema=names.get(None)):
        return 0
    return int(connection.execute(sa.select(schema_version.c.version)).scalar_one())


def migrate(connection: Connection, where: str) -> None:
    """Brings the database up to date; runs inside the caller's write transaction.

    Raises UsageError where a newer polarlike wrote it.
    """
    found, ours = version_of(connection), len(MIGRATIONS)
    check_not_newer(found, where)
    for version in range(found, ours):
        MIGRATIONS[version](connection)
        connection.execute(sa.delete(schema_version))
        connection.execute(sa.insert(schema_version).values(version=version + 1))


def check_not_newer(found: int, where: str) -> None:
    if found > len(MIGRATIONS):
        raise UsageError(
            f"The store {where} has schema version {found} and this polarlike knows {len(MIGRATIONS)}; "
            "upgrade polarlike to read it."
        )
