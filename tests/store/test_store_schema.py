"""Older files are brought up to date, newer ones refused, and no step is left half done."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from polarlike.records import UsageError
from polarlike.store import Store, StoreError, schema


def version(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return connection.execute("select version from schema_version").fetchone()[0]


async def test_a_new_file_has_the_current_version(url, tmp_path):
    await Store(url).close()
    assert version(tmp_path / "store.db") == len(schema.MIGRATIONS) == 1


async def test_an_older_file_is_migrated_and_keeps_its_calls(url, tmp_path, call, monkeypatch):
    store = Store(url)
    await store.put_call(call(0))
    await store.close()

    def add_column(connection: sa.Connection) -> None:
        connection.execute(sa.text("alter table sessions add column note varchar(20)"))

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, add_column])
    store = Store(url)
    assert [c.call_id for c in store.calls("s")] == ["call_0"]
    await store.close()
    assert version(tmp_path / "store.db") == 2


async def test_a_failed_migration_leaves_the_older_file_as_it_was(url, tmp_path, monkeypatch):
    await Store(url).close()

    def half(connection: sa.Connection) -> None:
        connection.execute(sa.text("alter table sessions add column note varchar(20)"))
        connection.execute(sa.text("alter table nothing add column note varchar(20)"))

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, half])
    with pytest.raises(StoreError):
        Store(url)
    assert version(tmp_path / "store.db") == 1
    with sqlite3.connect(tmp_path / "store.db") as connection:
        assert "note" not in [c[1] for c in connection.execute("pragma table_info(sessions)")]


async def test_a_newer_file_is_refused_with_what_to_do(url, tmp_path):
    await Store(url).close()
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("update schema_version set version = 99")
    with pytest.raises(UsageError, match=r"version 99.*upgrade polarlike"):
        Store(url)


def test_a_file_that_is_no_database_is_refused(url, tmp_path):
    (tmp_path / "store.db").write_bytes(b"this is not a database at all, but it is long enough to look at" * 20)
    with pytest.raises(StoreError, match="not a store"):
        Store(url)


async def test_the_file_is_written_ahead_and_synced_at_each_commit(store):
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2  # FULL


@pytest.mark.parametrize("table", schema.metadata.sorted_tables, ids=lambda t: t.name)
def test_every_table_can_be_made_in_postgresql(table):
    text = str(CreateTable(table).compile(dialect=postgresql.dialect()))
    assert text.strip().startswith(f"CREATE TABLE {table.name}")
