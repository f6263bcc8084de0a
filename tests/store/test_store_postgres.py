"""What PostgreSQL alone can do to the store: share a database, go away and come back, refuse a login."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from postgres_server import PostgresServer

from polarlike.records import Rollout, RolloutStatus
from polarlike.store import NoRun, Store, StoreError
from polarlike.store.url import parse, public

pytestmark = pytest.mark.postgres


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """The session's own server, running again after the test."""
    yield postgres
    postgres.start()


def opened(server: PostgresServer, schema: str) -> Store:
    return Store(f"{server.url}?schema={schema}")


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


async def test_runs_in_one_database_do_not_mix(postgres, call):
    one, two = Store(postgres.schema_url("mix_one")), Store(postgres.schema_url("mix_two"))
    await asyncio.gather(one.put_call(call(0)), two.put_call(call(0, suffix=3)), two.put_call(call(1)))
    await one.put_rollout(Rollout("r", "t", "g", 0, RolloutStatus.RUNNING))
    await two.put_session("s", "r", {})
    await one.put_meta("key", {"of": 1})
    assert [c.suffix_ids.size for c in one.calls("s")] == [20]
    assert [c.suffix_ids.size for c in two.calls("s")] == [3, 20]
    assert (len(one.rollouts()), two.rollouts(), one.sessions(), two.meta("key")) == (1, [], [], None)
    await one.close()
    await two.close()


async def test_the_unix_socket_is_the_same_store(server, call):
    store = opened(server, "by_socket")
    await store.put_call(call(0))
    await store.close()
    again = Store(f"{server.socket_url}&schema=by_socket", read_only=True)
    assert [c.index for c in again.calls("s")] == [0]
    await again.close()


async def test_after_a_restart_of_the_server_the_store_goes_on_by_itself(server, call):
    store = opened(server, "restart")
    await store.put_call(call(0))
    server.stop()
    server.start()
    await store.put_call(call(1))
    assert [c.index for c in store.calls("s")] == [0, 1]
    await store.close()


async def test_while_the_server_is_gone_every_write_fails_with_one_sentence(server, call):
    store = opened(server, "gone")
    await store.put_call(call(0))
    server.stop()
    results = await asyncio.gather(*(store.put_call(call(i)) for i in (1, 2)), return_exceptions=True)
    with pytest.raises(StoreError) as read:
        store.calls("s")
    for error in (*results, read.value):
        assert isinstance(error, StoreError)
        assert "cannot be reached; start it" in str(error) and "\n" not in str(error)
        assert server.password not in str(error)
    server.start()
    await store.put_call(call(3))
    assert [c.index for c in store.calls("s")] == [0, 3]
    await store.close()


async def test_a_server_that_is_killed_while_calls_are_written_loses_none_it_acknowledged(server, call):
    store = opened(server, "killed")
    acknowledged: list[int] = []
    errors: list[str] = []

    async def lane(k: int) -> None:
        for i in range(k, 10**6, 4):
            try:
                await store.put_call(call(i))
            except StoreError as e:
                errors.append(str(e))
                return
            acknowledged.append(i)

    lanes = asyncio.gather(*(lane(k) for k in range(4)))
    await until(lambda: len(acknowledged) >= 40)
    await asyncio.to_thread(server.stop, kill=True)
    await lanes
    assert len(errors) == 4
    assert all("went away; start it again" in e or "cannot be reached; start it" in e for e in errors), errors
    await asyncio.to_thread(server.start)
    await store.put_meta("after", {"works": True})
    kept = {c.index: c.completion_ids.tolist() for c in store.calls("s")}
    assert len(acknowledged) >= 40
    assert {i: kept[i] for i in acknowledged} == {i: call(i).completion_ids.tolist() for i in acknowledged}
    await store.close()


async def test_a_batch_that_loses_a_deadlock_is_written_again(server):
    """The store waits for row a with row b written; another session, more patient, waits the other way round."""
    store = Store(f"{server.url}?schema=deadlock&options=-c%20deadlock_timeout=300ms")
    for name in "abc":
        await store.put_rollout(Rollout(name, "t", "g", 0, RolloutStatus.RUNNING))
    touch = "update deadlock.rollouts set sample = 1 where rollout_id = %s"
    waiting = (
        "select count(*) = 1 from pg_stat_activity where application_name = 'polarlike' and wait_event_type = 'Lock'"
    )
    with (
        psycopg.connect(server.url, autocommit=True) as watch,
        psycopg.connect(server.url, options="-c deadlock_timeout=60s") as other,
        psycopg.connect(server.url) as gate,
    ):

        def store_waits() -> bool:
            return watch.execute(waiting).fetchone() == (True,)

        gate.execute(touch, ["c"])
        other.execute(touch, ["a"])
        puts = [asyncio.create_task(store.put_rollout(Rollout("c", "t", "g", 2, RolloutStatus.FINISHED)))]
        await until(store_waits)
        for name in "ba":  # while the writer waits, so that they are one batch
            puts.append(asyncio.create_task(store.put_rollout(Rollout(name, "t", "g", 2, RolloutStatus.FINISHED))))
        await asyncio.sleep(0)
        gate.rollback()
        await asyncio.wait_for(puts[0], 20)
        await until(store_waits)
        await asyncio.to_thread(other.execute, touch, ["b"])
        other.commit()
        await asyncio.wait_for(asyncio.gather(*puts), 20)
    assert [r.rollout_id for r in store.rollouts() if r.sample == 2] == ["a", "b", "c"]
    await store.close()


async def test_a_connection_that_an_administrator_ends_is_replaced(server, call):
    store = opened(server, "ended")
    await store.put_call(call(0))
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'polarlike'")
    await store.put_call(call(1))
    assert [c.index for c in store.calls("s")] == [0, 1]
    await store.close()


async def test_a_commit_is_on_disk_even_where_the_server_is_set_to_answer_before(server):
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("alter role polar set synchronous_commit to off")
    try:
        store = opened(server, "synced")
        with store._engine.connect() as connection:
            assert connection.exec_driver_sql("show synchronous_commit").scalar() == "local"
        await store.close()
    finally:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("alter role polar reset synchronous_commit")


def changed(old: Callable[[PostgresServer], Any], new: str) -> Callable[[PostgresServer], str]:
    return lambda server: server.url.replace(str(old(server)), new)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (changed(lambda s: s.password, "wr0ngw0rd"), "does not let us in"),
        (changed(lambda s: f":{s.password}", ""), "give the password as PGPASSWORD"),
        (changed(lambda s: "polar:", "nobody:"), "does not let us in"),
        (changed(lambda s: "/postgres", "/nothing"), "no such database; make it with createdb"),
        (changed(lambda s: s.port, "1"), "cannot be reached; start it"),
        (changed(lambda s: "127.0.0.1", "nowhere.invalid"), "cannot be reached; start it"),
    ],
    ids=["password", "no password", "user", "database", "port", "host"],
)
def test_a_server_that_cannot_be_used_says_why_in_one_sentence(server, monkeypatch, url, says):
    monkeypatch.delenv("PGPASSWORD", raising=False)
    with pytest.raises(StoreError, match=says) as e:
        Store(url(server))
    assert "\n" not in str(e.value)
    assert server.password not in str(e.value) and "wr0ngw0rd" not in str(e.value)


def test_the_password_may_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", server.password)
    Store(public(parse(f"{server.url}?schema=from_environment"))).close_blocking()


def test_a_user_who_may_not_make_a_schema_is_told_what_to_ask_for(server):
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("create role guest login password 'guest'")
    url = server.url.replace(f"polar:{server.password}", "guest:guest") + "?schema=of_guest"
    with pytest.raises(StoreError, match="grant it CREATE on the database"):
        Store(url)
    with pytest.raises(NoRun):
        Store(url, read_only=True)
