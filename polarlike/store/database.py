"""Connections, the SQL that differs between databases, and their errors as one sentence. Knows no records.

SQLite runs in WAL mode, so that readers (other threads and processes) never wait for the writer, with synchronous=FULL,
so that a commit survives loss of power and not the end of the process alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from polarlike.records import PolarError, UsageError
from polarlike.store import schema

_BUSY_MS = 30_000
_WRITE = "polarlike_write"


class StoreError(PolarError):
    """The store could not read or write. What was not acknowledged is not on disk."""


def open_database(url: str) -> Engine:
    """An engine over a database that has the current schema. Raises UsageError for a URL that cannot be used."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError as e:
        raise UsageError(f"{url!r} is not a database URL; use sqlite:///FILE or postgresql+psycopg://...") from e
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UsageError(f"The store cannot use {backend}; use sqlite:///FILE or postgresql+psycopg://...")
    if backend == "sqlite" and (not parsed.database or parsed.database == ":memory:"):
        raise UsageError("The store needs a file; use sqlite:///FILE.")
    if backend == "sqlite" and not Path(str(parsed.database)).parent.is_dir():
        raise UsageError(f"There is no folder {Path(str(parsed.database)).parent} for the store; make it first.")
    where = parsed.render_as_string(hide_password=True)
    try:
        engine = sa.create_engine(parsed)
    except (NoSuchModuleError, ModuleNotFoundError) as e:
        raise UsageError(
            f"The database driver for {where} is missing; install it with: pip install 'psycopg[binary]'."
        ) from e
    if backend == "sqlite":
        _configure_sqlite(engine)
    try:
        _bring_up_to_date(engine, where)
    except DBAPIError as e:
        engine.dispose()
        raise StoreError(sentence(e, where)) from e
    except BaseException:
        engine.dispose()
        raise
    return engine


def _configure_sqlite(engine: Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver's own transactions leave DDL outside; we begin them ourselves
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_MS}", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE: a transaction that starts by reading cannot become a writer while another process writes.
        writes = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _bring_up_to_date(engine: Engine, where: str) -> None:
    with engine.connect() as connection:
        found = schema.version_of(connection)
    schema.check_not_newer(found, where)
    if found < len(schema.MIGRATIONS):
        with writing(engine) as connection, connection.begin():
            schema.migrate(connection, where)


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take the write lock when they begin."""
    return engine.connect().execution_options(**{_WRITE: True})


def insert_if_absent(engine: Engine, table: Table) -> sa.Executable:
    return _insert(engine, table).on_conflict_do_nothing()


def insert_or_replace(engine: Engine, table: Table) -> sa.Executable:
    """By the primary key."""
    insert = _insert(engine, table)
    key = [c.name for c in table.primary_key.columns]
    changed = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in key}
    return insert.on_conflict_do_update(index_elements=key, set_=changed)


def _insert(engine: Engine, table: Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if engine.dialect.name == "sqlite" else postgresql.insert(table)


def sentence(error: DBAPIError, where: str) -> str:
    """What a database error means, for the user."""
    text = str(error.orig).splitlines()[0] if str(error.orig) else type(error.orig).__name__
    if "full" in text or "No space left" in text:
        return f"The disk that holds the store {where} is full; free space and go on ({text})."
    if "readonly" in text or "read-only" in text:
        return f"The store {where} cannot be written; check its permissions ({text})."
    if "locked" in text:
        return f"Another process has held the store {where} for too long; end it and go on ({text})."
    if "unable to open" in text:
        return f"The store {where} cannot be opened; check its path and permissions ({text})."
    if "malformed" in text or "not a database" in text:
        return f"The store {where} is damaged or not a store; restore it or use another file ({text})."
    return f"The store {where} failed: {text}; check the disk or the database server."
