"""Older stores are brought up to date, newer ones refused, and no step is left half done."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from polarlike.records import UsageError
from polarlike.store import Store, StoreError, schema

VERSION = sa.select(schema.schema_version.c.version)


async def test_a_new_store_has_the_current_version(url, execute):
    await Store(url).close()
    assert execute(VERSION) == [(len(schema.MIGRATIONS),)] == [(1,)]


async def test_processes_that_open_one_new_store_at_once_make_it_once(url, execute):
    stores = await asyncio.gather(*(asyncio.to_thread(Store, url) for _ in range(6)))
    for store in stores:
        await store.close()
    assert execute(VERSION) == [(1,)]


@pytest.mark.parametrize("read_only", [False, True])
async def test_an_older_store_is_migrated_and_keeps_its_calls(url, execute, call, monkeypatch, read_only):
    store = Store(url)
    await store.put_call(call(0))
    await store.close()

    def add_column(connection: sa.Connection) -> None:
        connection.execute(sa.text("alter table sessions add column note varchar(20)"))

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, add_column])
    store = Store(url, read_only=read_only)
    assert [c.call_id for c in store.calls("s")] == ["call_0"]
    await store.close()
    assert execute(VERSION) == [(2,)]


async def test_a_failed_migration_leaves_the_older_store_as_it_was(url, execute, monkeypatch):
    await Store(url).close()

    def half(connection: sa.Connection) -> None:
        connection.execute(sa.text("alter table sessions add column note varchar(20)"))
        connection.execute(sa.text("alter table nothing add column note varchar(20)"))

    with monkeypatch.context() as patched:
        patched.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, half])
        with pytest.raises(StoreError):
            Store(url)
    assert execute(VERSION) == [(1,)]
    with pytest.raises(sa.exc.DBAPIError, match="note"):
        execute(sa.select(sa.column("note")).select_from(schema.sessions))


async def test_a_newer_store_is_refused_with_what_to_do(url, execute):
    await Store(url).close()
    execute(sa.update(schema.schema_version).values(version=99))
    with pytest.raises(UsageError, match=r"version 99.*upgrade polarlike"):
        Store(url)


def test_a_file_that_is_no_database_is_refused(sqlite_url, tmp_path):
    (tmp_path / "store.db").write_bytes(b"this is not a database at all, but it is long enough to look at" * 20)
    with pytest.raises(StoreError, match="not a store"):
        Store(sqlite_url)


async def test_the_file_is_written_ahead_and_synced_at_each_commit(sqlite_url):
    store = Store(sqlite_url)
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("pragma synchronous").scalar() == 2  # FULL
    await store.close()
