"""PostgreSQL's side of the store: one database of many runs, each in a schema of its own. Knows connections alone.

The URL's parameter `schema` names the run's schema; without it the database's `public` is used. What holds: tables are
always named with their schema, so no search path, and no pooler between us and the server, can mix two runs.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy import URL, Connection, Engine

from polarlike.records import UsageError

DRIVER = "postgresql+psycopg"
_SCHEMA = re.compile(r"[a-z][a-z0-9_]{0,62}")
_CONNECT_S = "10"
_UNANSWERED_MS = "30000"  # a server that vanished without a word is given up after this, not after the kernel's hours


def make_engine(url: URL) -> Engine:
    """A lost connection is found out and replaced before its next use. Raises UsageError for a wrong schema name."""
    schema = url.query.get("schema", "public")
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        raise UsageError("The schema of a store is small letters, digits and underscores, at most 63.")
    defaults = {"connect_timeout": _CONNECT_S, "tcp_user_timeout": _UNANSWERED_MS, "application_name": "polarlike"}
    engine = sa.create_engine(
        url.difference_update_query(["schema"]),
        connect_args={k: v for k, v in defaults.items() if k not in url.query},
        pool_pre_ping=True,
        execution_options={"schema_translate_map": {None: schema}},
    )

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            # A server set to acknowledge before it has written breaks the store's promise; other modes keep it.
            if cursor.execute("SHOW synchronous_commit").fetchone() == ("off",):
                cursor.execute("SET synchronous_commit TO local")
        connection.commit()

    return engine


def schema_of(connection: Connection) -> str:
    name: str = connection.get_execution_options()["schema_translate_map"][None]
    return name


def prepare(connection: Connection) -> None:
    """Makes the schema where there is none, for the transaction that fills it: no other process does so meanwhile."""
    schema = schema_of(connection)
    lock = sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"polarlike {schema}", 0))
    connection.execute(sa.select(lock))
    if not sa.inspect(connection).has_schema(schema):
        connection.execute(sa.schema.CreateSchema(schema))
    connection.execute(sa.select(sa.func.set_config("search_path", schema, True)))
