"""The store's surface: ordering, narrowing, sharing of blobs, what one wrong write does to its neighbours."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa

from polarlike.records import Delivery, Rollout, RolloutStatus, Score, UsageError
from polarlike.store import NoRun, Store, StoreError, schema

BLOBS = sa.select(sa.func.count()).select_from(schema.blobs)


async def test_calls_are_read_in_the_order_of_their_index(store, call):
    await asyncio.gather(*(store.put_call(call(i)) for i in (2, 0, 1)))
    await store.put_call(call(7, session_id="other"))
    assert [c.call_id for c in store.calls("s")] == ["call_0", "call_1", "call_2"]


async def test_an_unknown_session_has_no_calls(store):
    assert store.calls("nobody") == []


async def test_delivery_is_updated_in_the_order_it_was_asked_for(store, call):
    await asyncio.gather(
        store.put_call(call(0)),
        store.update_delivery("call_0", Delivery.FLUSHED, 1),
        store.update_delivery("call_0", Delivery.LOST, 2),
    )
    (got,) = store.calls("s")
    assert (got.delivery, got.retries) == (Delivery.LOST, 2)


async def test_delivery_of_an_unknown_call_is_an_error_for_that_write_alone(store, call):
    results = await asyncio.gather(
        store.put_call(call(0)),
        store.update_delivery("nobody", Delivery.FLUSHED, 0),
        store.put_call(call(1)),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [type(None), StoreError, type(None)]
    assert "nobody" in str(results[1])
    assert len(store.calls("s")) == 2


async def test_a_call_is_written_once(store, call):
    first = call(0)
    await store.put_call(first)
    with pytest.raises(StoreError, match="call_0"):
        await store.put_call(call(0, finish_reason="length"))
    assert store.calls("s")[0].finish_reason == "stop"


async def test_a_record_that_is_not_json_fails_alone(store, call):
    results = await asyncio.gather(
        store.put_call(call(0, requested={"x": b"bytes"})), store.put_call(call(1)), return_exceptions=True
    )
    assert isinstance(results[0], StoreError)
    assert [c.call_id for c in store.calls("s")] == ["call_1"]


async def test_one_prompt_in_a_thousand_sessions_is_stored_once(store, call, execute):
    system = {"role": "system", "content": "You are an agent. " * 200}
    tools = [{"type": "function", "function": {"name": "bash", "description": "Runs it. " * 200, "parameters": {}}}]
    await asyncio.gather(
        *(
            store.put_call(call(i, session_id=f"s{i}", new_messages=[system], tools=tools, reply={"role": "assistant"}))
            for i in range(1000)
        )
    )
    assert execute(BLOBS) == [(4,)]  # message, tools, reply, settings
    assert store.calls("s999")[0].new_messages == [system]
    assert store.calls("s999")[0].tools == tools


async def test_blobs_are_shared_with_an_earlier_run_over_the_same_file(url, call, execute):
    for i in range(2):
        store = Store(url)
        await store.put_call(call(i, new_messages=[{"role": "user"}], reply={"role": "assistant"}))
        await store.close()
    assert execute(BLOBS) == [(3,)]


async def test_a_clamped_token_limit_or_a_seed_makes_no_new_settings(store, call, execute):
    for i in range(5):
        c = call(i, new_messages=[], reply={})
        c.sampling = replace(c.sampling, max_tokens=100 - i, seed=i)
        await store.put_call(c)
    assert execute(BLOBS) == [(2,)]
    assert [(c.sampling.max_tokens, c.sampling.seed) for c in store.calls("s")] == [(100 - i, i) for i in range(5)]


async def test_rollouts_are_narrowed_by_what_is_given(store):
    for k, (task, group, status) in enumerate(
        [
            ("t1", "g1", RolloutStatus.FINISHED),
            ("t1", "g2", RolloutStatus.RUNNING),
            ("t2", "g3", RolloutStatus.FINISHED),
        ]
    ):
        await store.put_rollout(Rollout(f"r{k}", task, group, 0, status, started=10.0 - k))

    def found(*args, **narrow):
        return [r.rollout_id for r in store.rollouts(*args, **narrow)]

    assert found() == ["r2", "r1", "r0"]
    assert found(RolloutStatus.FINISHED) == ["r2", "r0"]
    assert found(RolloutStatus.FINISHED, task_id="t1") == ["r0"]
    assert found(group_id="g2") == ["r1"]


async def test_a_rollout_is_replaced_by_its_id(store):
    await store.put_rollout(Rollout("r", "t", "g", 0, RolloutStatus.RUNNING))
    done = Rollout("r", "t", "g", 0, RolloutStatus.FINISHED, score=Score(0.5), patch=b"\x00\xff diff")
    await store.put_rollout(done)
    assert store.rollouts() == [done]
    assert store.rollout("r") == done
    assert store.rollout("none") is None


async def test_sessions_and_facts_are_kept(store):
    await store.put_session("s1", "r1", {"temperature": 1.0})
    await store.put_session("s2", "r2", {})
    await store.put_session("s1", "r1", {"temperature": 0.5})
    assert [(s.session_id, s.rollout_id, s.settings) for s in store.sessions("r1")] == [
        ("s1", "r1", {"temperature": 0.5})
    ]
    assert {s.session_id for s in store.sessions()} == {"s1", "s2"}
    await store.put_meta("versions", {"polarlike": "0.1.0"})
    assert store.meta("versions") == {"polarlike": "0.1.0"}
    assert store.meta("none") is None


async def test_reading_in_threads_goes_on_while_calls_are_written(store, call):
    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.append(len(store.calls("s")))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for r in readers:
        r.start()
    await asyncio.gather(*(store.put_call(call(i)) for i in range(60)))
    await asyncio.to_thread(store.calls, "s")
    stop.set()
    for r in readers:
        await asyncio.to_thread(r.join)
    assert len(store.calls("s")) == 60
    assert seen


async def test_a_second_reader_of_the_file_sees_what_was_acknowledged(store, call, url):
    other = Store(url)
    await store.put_call(call(0))
    assert [c.call_id for c in other.calls("s")] == ["call_0"]
    await other.close()


async def test_two_writers_of_one_file_both_get_through(url, call):
    one, two = Store(url), Store(url)
    await asyncio.gather(*((one if i % 2 else two).put_call(call(i)) for i in range(40)))
    assert len(one.calls("s")) == 40
    await one.close()
    await two.close()


async def test_cancelling_the_waiter_does_not_take_the_write_back(store, call):
    waiting = asyncio.create_task(store.put_call(call(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    await store.put_call(call(1))
    assert [c.call_id for c in store.calls("s")] == ["call_0", "call_1"]


async def test_closing_writes_what_waits_and_then_refuses(url, call):
    store = Store(url)
    waiting = [asyncio.create_task(store.put_call(call(i))) for i in range(20)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*waiting)
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.put_call(call(99))
    again = Store(url)
    assert len(again.calls("s")) == 20
    await again.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("store.db", "not a database URL"),
        ("mysql://host/db", "cannot use mysql"),
        ("postgresql+psycopg2://host/db", r"cannot use postgresql\+psycopg2"),
        ("postgresql://host/db?schema=Mine", "small letters"),
        ("sqlite://", "needs a file"),
        ("sqlite:///no/such/folder/store.db", "no folder no/such/folder"),
    ],
)
def test_a_url_that_cannot_be_used_says_what_to_give(url, says):
    with pytest.raises(UsageError, match=says):
        Store(url)


def test_a_store_that_is_only_read_is_not_made(url):
    for _ in range(2):
        with pytest.raises(NoRun, match="no run in the store"):
            Store(url, read_only=True)
    Store(url).close_blocking()
    store = Store(url, read_only=True)
    assert store.sessions() == []
    store.close_blocking()


async def test_a_store_that_is_only_read_reads_while_another_writes(store, call, url):
    await store.put_call(call(0))
    reader = Store(url, read_only=True)
    assert [c.index for c in reader.calls("s")] == [0]
    await store.put_call(call(1))
    assert [c.index for c in reader.calls("s")] == [0, 1]
    await reader.close()
