"""SQLite's side of the store: one file a run. Knows connections alone.

WAL mode, so that readers (other threads and processes) never wait for the writer, with synchronous=FULL, so that a
commit survives loss of power and not the end of the process alone.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import URL, Connection, Engine

from polarlike.records import UsageError
from polarlike.store.errors import NoRun

_BUSY_MS = 30_000
WRITES = "polarlike_write"
"""The execution option of a connection whose transactions take the write lock when they begin."""


def make_engine(url: URL, *, read_only: bool) -> Engine:
    """Raises UsageError where the URL names no file in an existing folder, and NoRun where there is none to read."""
    if not url.database or url.database == ":memory:":
        raise UsageError("The store needs a file; use sqlite:///FILE.")
    path = Path(url.database)
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent} for the store; make it first.")
    if read_only and not path.is_file():
        raise NoRun.at(str(path))
    engine = sa.create_engine(url, creator=lambda: _connect_read_only(path)) if read_only else sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver's own transactions leave DDL outside; we begin them ourselves
        pragmas = [f"busy_timeout={_BUSY_MS}", "temp_store=MEMORY"]
        for pragma in pragmas if read_only else ("journal_mode=WAL", "synchronous=FULL", *pragmas):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE: a transaction that starts by reading cannot become a writer while another process writes.
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """Where the folder cannot be written, SQLite cannot make its lock file, and reads only what it may take to be
    immutable: which it is, unless a log of newer commits lies beside it."""
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    try:
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(path.name + "-wal")
        if log.is_file() and log.stat().st_size:
            raise
        return sqlite3.connect(uri + "&immutable=1", uri=True, check_same_thread=False)
    return connection
