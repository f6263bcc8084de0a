"""An engine over a database that has the current schema, and the SQL that differs between databases. Knows no records.

What differs in how they are opened is in `sqlite_file` and `postgres`; what their errors mean is in `errors`.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, NoSuchModuleError

from polarlike.records import UsageError
from polarlike.store import postgres, schema, sqlite_file
from polarlike.store.errors import NoRun, StoreError, sentence
from polarlike.store.url import parse, public


def open_database(url: str, *, read_only: bool = False) -> Engine:
    """read_only: nothing is written, unless an older polarlike made it and it has to be brought up to date. Raises
    UsageError for a URL that cannot be used, NoRun where there is nothing to read, StoreError for the rest."""
    parsed = parse(url)
    where = public(parsed)
    try:
        if parsed.drivername == "sqlite":
            engine = sqlite_file.make_engine(parsed, read_only=read_only)
        else:
            engine = postgres.make_engine(parsed)
    except (NoSuchModuleError, ModuleNotFoundError) as e:
        raise UsageError(
            f"The driver for {where} is missing; install it with: pip install 'polarlike[postgres]'."
        ) from e
    try:
        found = _version(engine)
        schema.check_not_newer(found, where)
        if read_only and found == 0:
            raise NoRun.at(where)
        if found < len(schema.MIGRATIONS):
            _bring_up_to_date(url if read_only else engine, where)
    except DBAPIError as e:
        engine.dispose()
        raise StoreError(sentence(e, where)) from e
    except BaseException:
        engine.dispose()
        raise
    return engine


def _version(engine: Engine) -> int:
    with engine.connect() as connection:
        return schema.version_of(connection)


def _bring_up_to_date(at: Engine | str, where: str) -> None:
    if isinstance(at, str):  # opened for reading alone
        open_database(at).dispose()
        return
    with writing(at) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            postgres.prepare(connection)
        schema.migrate(connection, where)


def writing(engine: Engine) -> Connection:
    """A connection whose transactions take SQLite's write lock when they begin."""
    return engine.connect().execution_options(**{sqlite_file.WRITES: True})


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
