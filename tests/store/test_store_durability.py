"""kill -9, full disks, files that cannot be written, damage: what was acknowledged is there, and nothing hangs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from polarlike.store import Store, StoreError, rows, schema, writer
from polarlike.store.database import open_database, writing
from polarlike.store.postgres import schema_of

ROOT = Path(__file__).resolve().parents[2]

WRITER = textwrap.dedent(
    """
    import asyncio, sys
    import numpy as np
    from polarlike.records import Call, Cause, Sampling
    from polarlike.store import Store

    url, name = sys.argv[1:]

    def call(i):
        rng = np.random.default_rng(i)
        ids = rng.integers(0, 150_000, 50, dtype=np.int32)
        return Call(f"{name}_{i}", name, i, None, Cause.FIRST, [{"role": "user", "content": str(i)}], None, ids, ids,
                    ids.astype(np.float32), ids, ids > 9, {"role": "assistant"}, "stop", Sampling())

    async def lane(store, k):
        for i in range(k, 10**9, 4):
            await store.put_call(call(i))
            sys.stdout.write(f"{i}\\n")
            sys.stdout.flush()

    async def main():
        store = Store(url)
        await asyncio.gather(*(lane(store, k) for k in range(4)))

    asyncio.run(main())
    """
)


def run_and_kill(url: str, name: str, after_s: float) -> list[int]:
    """Indices of the calls that the writers of one process, four at once, said were durable before it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, name],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    killer = threading.Timer(after_s, process.send_signal, [signal.SIGKILL])
    killer.start()
    said = [first, *process.stdout]
    process.wait()
    killer.join()
    return [int(line) for line in said if line.endswith("\n")]


async def test_every_acknowledged_call_of_two_processes_survives_kill_9(new_url):
    moments = random.Random(5)
    for _ in range(2):
        url = new_url()
        killed = [asyncio.to_thread(run_and_kill, url, name, moments.uniform(0.01, 0.5)) for name in ("one", "two")]
        acknowledged = dict(zip(("one", "two"), await asyncio.gather(*killed), strict=True))
        store = Store(url)
        for name, indices in acknowledged.items():
            kept = {c.index: c for c in store.calls(name)}
            assert indices and set(indices) <= kept.keys()
            for i in indices:
                assert kept[i].new_messages == [{"role": "user", "content": str(i)}]
                assert kept[i].completion_ids.size == 50
        await store.put_meta("after", {"works": True})
        await store.close()
        if url.startswith("sqlite"):
            with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
                assert connection.execute("pragma integrity_check").fetchone() == ("ok",)


@pytest.fixture
async def sqlite_store(sqlite_url: str) -> AsyncIterator[Store]:
    store = Store(sqlite_url)
    yield store
    await store.close()


def limit_pages(store: Store, pages: int) -> None:
    """SQLite's own limit gives the error of a full disk. It is set on the connections that the store opens from now."""
    store._engine.dispose()

    @sa.event.listens_for(store._engine, "connect")
    def connect(connection, _):
        connection.execute(f"pragma max_page_count={pages}")


async def test_a_full_disk_fails_every_waiter_with_one_sentence_and_nothing_of_the_batch_is_kept(sqlite_store, call):
    store = sqlite_store
    await store.put_call(call(0))
    limit_pages(store, 40)
    big = [{"role": "user", "content": random.Random(1).randbytes(200_000).hex()}]
    results = await asyncio.wait_for(
        asyncio.gather(
            store.put_call(call(1, new_messages=big)), store.put_call(call(2, new_messages=big)), return_exceptions=True
        ),
        20,
    )
    for result in results:
        assert isinstance(result, StoreError)
        assert "full; free space" in str(result)
        assert "\n" not in str(result)
    assert [c.call_id for c in store.calls("s")] == ["call_0"]


async def test_the_store_goes_on_when_space_returns(sqlite_store, call):
    store = sqlite_store
    await store.put_call(call(0))
    limit_pages(store, 40)
    big = [{"role": "user", "content": random.Random(1).randbytes(200_000).hex()}]
    with pytest.raises(StoreError):
        await store.put_call(call(1, new_messages=big))
    limit_pages(store, 1_000_000)
    await store.put_call(call(1, new_messages=big))
    assert [c.new_messages for c in store.calls("s")][1] == big


async def test_a_file_that_cannot_be_written_says_so(sqlite_store, call):
    store = sqlite_store

    @sa.event.listens_for(store._engine, "connect")
    def connect(connection, _):
        connection.execute("pragma query_only=1")

    store._engine.dispose()
    with pytest.raises(StoreError, match="cannot be written"):
        await asyncio.wait_for(store.put_call(call(0)), 20)


async def test_a_lock_that_another_process_holds_is_waited_for(store, call, url):
    engine = open_database(url)
    holder = writing(engine)
    held = holder.begin()
    if engine.dialect.name == "postgresql":
        holder.execute(sa.text(f"lock table {schema_of(holder)}.calls in exclusive mode"))
    waiting = asyncio.create_task(store.put_call(call(0)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    held.rollback()
    await asyncio.wait_for(waiting, 20)
    holder.close()
    engine.dispose()


async def test_a_damaged_record_is_an_error_and_not_other_tokens(store, call, execute):
    await store.put_call(call(0, suffix=300))
    [(tokens,)] = execute(sa.select(schema.calls.c.tokens))
    flipped = bytearray(tokens)
    flipped[150] ^= 0x10
    execute(sa.update(schema.calls).values(tokens=bytes(flipped)))
    with pytest.raises(StoreError, match="damaged"):
        store.calls("s")


async def test_encoding_and_compressing_happen_off_the_event_loop(store, call, monkeypatch):
    threads: set[int] = set()

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watched(*args: Any) -> Any:
            threads.add(threading.get_ident())
            return real(*args)

        monkeypatch.setattr(module, name, watched)

    for module, name in ((rows, "pack_tokens"), (rows, "dump_json"), (writer, "compress")):
        watch(module, name)
    await store.put_call(call(0))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.root
async def test_a_disk_that_is_really_full_fails_clearly_and_space_given_back_mends_it(small_disk, call):
    store = Store(f"sqlite:///{small_disk / 'store.db'}")
    await store.put_call(call(0))
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as f:
        while True:
            f.write(bytes(4096))
    results = await asyncio.gather(
        *(store.put_call(call(i, suffix=5000)) for i in range(1, 20)), return_exceptions=True
    )
    acknowledged = {0} | {i for i, r in enumerate(results, 1) if r is None}
    failed = [r for r in results if r is not None]
    assert failed
    assert all(isinstance(r, StoreError) and "is full" in str(r) for r in failed)
    ballast.unlink()
    await store.put_call(call(100))
    assert {c.index for c in store.calls("s")} == acknowledged | {100}
    await store.close()


def lengths(*columns: sa.Column[bytes]) -> sa.Select[tuple[int]]:
    return sa.select(sa.func.sum(sum(sa.func.length(c) for c in columns)))


async def test_disk_per_call_does_not_grow_with_the_turns_before_it(store, call, execute):
    """A conversation of 100 turns that all add the same amount: the last ten cost what the first ten did."""
    tools = [{"type": "function", "function": {"name": "bash", "description": "x " * 2000, "parameters": {}}}]
    sizes = {}
    parent = None
    for i in range(100):
        words = random.Random(i)
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(200))
        c = call(i, suffix=300, sampled=100, tools=tools, new_messages=[{"role": "tool", "content": text}])
        c.parent_id, parent = parent, c.call_id
        await store.put_call(c)
        if i in (9, 19, 89, 99):
            calls, blobs = schema.calls.c, schema.blobs.c
            [(in_calls,)] = execute(lengths(calls.messages, calls.fields, calls.tokens))
            [(in_blobs,)] = execute(lengths(blobs.data))
            sizes[i] = in_calls + in_blobs
    early, late = sizes[19] - sizes[9], sizes[99] - sizes[89]
    assert late == pytest.approx(early, rel=0.03)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own, which may be made read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


@pytest.mark.root
async def test_a_store_on_a_read_only_disk_is_read(disk, call):
    url = f"sqlite:///{disk / 'a #1?.db'}"
    store = Store(url)
    await store.put_call(call(0))
    await store.close()
    make_read_only(disk)
    reader = Store(url, read_only=True)
    assert [c.index for c in reader.calls("s")] == [0]
    with pytest.raises(StoreError, match="cannot be written"):
        await reader.put_call(call(1))
    await reader.close()
    with pytest.raises(StoreError, match=r"cannot be (opened|written)"):
        Store(url)


@pytest.mark.root
@pytest.mark.parametrize("index", [True, False])
async def test_a_killed_store_on_a_read_only_disk_loses_no_call_in_silence(disk, tmp_path, call, index):
    """Its newest calls are in the log beside it. Without the log's index SQLite cannot read them there."""
    original = Store(f"sqlite:///{tmp_path / 'store.db'}")
    await original.put_call(call(0))
    for name in ("store.db", "store.db-wal", "store.db-shm") if index else ("store.db", "store.db-wal"):
        shutil.copy(tmp_path / name, disk / name)
    make_read_only(disk)
    url = f"sqlite:///{disk / 'store.db'}"
    if index:
        reader = Store(url, read_only=True)
        assert [c.index for c in reader.calls("s")] == [0]
        await reader.close()
    else:
        with pytest.raises(StoreError, match="copy its folder to a disk that can be written"):
            Store(url, read_only=True)
    await original.close()
