"""What the store costs: bytes a call at 1, 10 and 100 turns, calls a second, and the encodings that were chosen among.

    python benchmarks/store_size.py [--turns 100] [--calls 2000] [--folder DIR] [--postgres URL]

Turns are cut from Python's own library: each adds a file's piece of 400 tokens as tool output and samples 150 tokens.
Ids are ranks of word pieces by frequency, as byte-pair vocabularies are ordered; logprobs are those of a softmax over
noisy logits in float32. The folder decides which disk is synced to. With a PostgreSQL URL, both databases are measured;
the run's schema there is dropped at the end. CPU seconds are this process's own, the server's are not in them. Knows
the store's surface and codec.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from polarlike.records import Call, Cause, Delivery, Ids, Logprobs, Message, Sampling, Tool, new_id
from polarlike.store import Store
from polarlike.store.codec import compress, pack_tokens, varints
from polarlike.store.url import parse
from reconstruct import rebuild

ADDED, SAMPLED = 400, 150
SYSTEM: Message = {"role": "system", "content": "You are a careful software engineer in a shell. " * 200}
TOOLS: list[Tool] = [
    {"type": "function", "function": {"name": f"tool_{k}", "description": "What it does. " * 60, "parameters": {}}}
    for k in range(12)
]


def corpus() -> tuple[list[list[str]], dict[str, int]]:
    """Files as word pieces, and each piece's id."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    pieces = [re.findall(r" ?\w{1,6}|\s+|[^\w\s]", f.read_text(errors="ignore")) for f in files]
    counts = Counter(p for file in pieces for p in file)
    return pieces, {piece: rank for rank, (piece, _) in enumerate(counts.most_common())}


def cuts(files: list[list[str]], length: int) -> Iterator[list[str]]:
    while True:
        for start in range(0, 4000, length):
            for file in files:
                if len(file) >= start + length:
                    yield file[start : start + length]


def sampled_logprobs(n: int, rng: np.random.Generator) -> Logprobs:
    logits = rng.normal(0, 2.5, (n, 2000)).astype(np.float32)
    logits[:, 0] += rng.choice(np.asarray([8, 14, 20, 30], np.float32), n)
    top = logits.max(1, keepdims=True)
    normal = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return np.asarray(np.minimum(normal[:, 0], 0), np.float32)


class Conversation:
    """Makes the calls of one session after another."""

    def __init__(self, seed: int = 0):
        self.files, self.rank = corpus()
        self.rng = np.random.default_rng(seed)
        self.outside, self.inside = cuts(self.files, ADDED), cuts(self.files[::-1], SAMPLED)

    def ids(self, pieces: list[str]) -> Ids:
        return np.asarray([self.rank[p] for p in pieces], np.int32)

    def calls(self, turns: int) -> list[Call]:
        session, out = new_id("session"), []
        for k in range(turns):
            added, said = next(self.outside), next(self.inside)
            new: list[Message] = [{"role": "tool", "tool_call_id": new_id("call"), "content": "".join(added)}]
            out.append(
                Call(
                    call_id=new_id("call"),
                    session_id=session,
                    index=k,
                    parent_id=out[-1].call_id if out else None,
                    cause=Cause.CONTINUES if out else Cause.FIRST,
                    new_messages=new if k else [SYSTEM, *new],
                    tools=TOOLS,
                    suffix_ids=self.ids(added),
                    completion_ids=self.ids(said),
                    logprobs=sampled_logprobs(SAMPLED, self.rng),
                    versions=np.full(SAMPLED, 7, np.int32),
                    forced=np.zeros(SAMPLED, np.bool_),
                    reply={"role": "assistant", "content": "".join(said)},
                    finish_reason="stop",
                    sampling=Sampling(max_tokens=32_000 - 550 * k),
                    requested={"temperature": 0, "max_tokens": 32_000},
                    model="policy",
                    started=time.time(),
                    finished=time.time(),
                )
            )
        return out


class Place:
    """Where stores are made: SQLite files in a folder, or schemas of a PostgreSQL database."""

    def __init__(self, folder: Path, postgres: str = ""):
        self.folder, self.postgres = folder, postgres
        self.mark = new_id("bench")[:14]

    def url(self, name: str) -> str:
        if not self.postgres:
            return f"sqlite:///{self.folder / name}.db"
        return f"{self.postgres}{'&' if '?' in self.postgres else '?'}schema={self.mark}_{name.lower()}"

    def size(self, name: str) -> int:
        """Bytes on disk: the file and its log, or the schema's tables with their indexes and large values."""
        if not self.postgres:
            return sum(f.stat().st_size for f in self.folder.glob(f"{name}.db*"))
        found = self._ask(
            "select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint from pg_class c join pg_namespace n "
            f"on n.oid = relnamespace where nspname = '{self.mark}_{name}' and relkind = 'r'"
        )
        return int(found)

    def drop(self, name: str) -> None:
        if self.postgres:
            self._ask(f"drop schema {self.mark}_{name.lower()} cascade; select 0")

    def _ask(self, query: str) -> Any:
        engine = sa.create_engine(parse(self.postgres), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            found = None
            for part in query.split("; "):
                result = connection.exec_driver_sql(part)
                found = result.scalar() if result.returns_rows else None
        engine.dispose()
        return found


async def sizes(conversation: Conversation, place: Place, most: int) -> None:
    print(f"{'turns':>8}{'bytes':>14}{'bytes a call':>14}{'and a session more':>20}")
    for turns in sorted({1, 10, 100, most}):
        name = f"size{turns}"
        growth = []
        for session in range(2):  # the second session shares the system prompt and tools of the first
            before = place.size(name) if session else 0
            store = Store(place.url(name))
            await asyncio.gather(*map(store.put_call, conversation.calls(turns)))
            await store.close()
            growth.append(place.size(name) - before)
        place.drop(name)
        print(f"{turns:>8}{growth[0]:>14,}{growth[0] / turns:>14,.0f}{growth[1] / turns:>15,.0f} a call")


async def speed(conversation: Conversation, place: Place, count: int, synchronous: str) -> None:
    name = f"speed_{synchronous}"
    store = Store(place.url(name))
    set_to = f"pragma synchronous={synchronous}" if not place.postgres else f"set synchronous_commit to {synchronous}"

    @sa.event.listens_for(store._engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.execute(set_to)
        connection.commit()

    store._engine.dispose()
    single = []
    for call in conversation.calls(min(200, count)):
        start = time.perf_counter()
        await store.put_call(call)
        single.append(1000 * (time.perf_counter() - start))
    lanes = [conversation.calls(count // 16) for _ in range(16)]

    async def lane(calls: list[Call]) -> None:
        for call in calls:
            await store.put_call(call)
            await store.update_delivery(call.call_id, Delivery.FLUSHED, 0)

    start, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(lane, lanes))
    took, busy = time.perf_counter() - start, time.process_time() - busy
    written = sum(map(len, lanes))
    print(
        f"synchronous={synchronous:<7} one in flight: {np.median(single):.2f} ms (p95 {np.percentile(single, 95):.2f});"
        f" 16 in flight, call and delivery: {written / took:,.0f} calls/s, {1000 * busy / written:.2f} CPU ms a call"
    )
    await store.close()
    place.drop(name)


async def reading(conversation: Conversation, place: Place) -> None:
    store = Store(place.url("reading"))
    calls = conversation.calls(1000)
    await asyncio.gather(*map(store.put_call, calls))
    start = time.process_time()
    got = store.calls(calls[0].session_id)
    read = time.process_time() - start
    start = time.process_time()
    trajectory = rebuild(got, rollout_id="r", task_id="t", harness_ended=True)
    took = time.process_time() - start
    tokens = sum(s.ids.size for s in trajectory.segments)
    print(f"a session of 1,000 turns: read {read:.3f} CPU s, rebuilt {took:.3f} CPU s into {tokens:,} tokens")
    await store.close()
    place.drop("reading")


def encodings(conversation: Conversation) -> None:
    calls = conversation.calls(100)
    ids = [c.completion_ids for c in calls]
    probs = [c.logprobs for c in calls]

    def planes(a: Any) -> bytes:
        return np.ascontiguousarray(a.view(np.uint8).reshape(-1, 4).T).tobytes()

    def zigzag(a: Ids) -> Ids:
        d = np.diff(a, prepend=np.int32(0))
        return ((d << 1) ^ (d >> 31)).astype(np.int32)

    def mean(encode: Callable[[Any], bytes], arrays: list[Any]) -> str:
        return f"{np.mean([len(compress(encode(a))) / a.size for a in arrays]):.2f}"

    print("bytes an id, after zstd:      ", end="")
    print("int32", mean(lambda a: a.tobytes(), ids), "| byte planes", mean(planes, ids), end=" | ")
    print(
        "delta",
        mean(lambda a: zigzag(a).tobytes(), ids),
        "| delta varint",
        mean(lambda a: varints(zigzag(a)), ids),
        end=" | ",
    )
    print("varint (chosen)", mean(varints, ids))
    split = np.mean(
        [(len(compress(planes(p)[-p.size :])) + len(compress(planes(p)[: -p.size]))) / p.size for p in probs]
    )
    print("bytes a logprob, after zstd:  ", end="")
    print(
        "float32",
        mean(lambda a: a.tobytes(), probs),
        "| byte planes",
        mean(planes, probs),
        f"| split (chosen) {split:.2f}",
    )
    packed = np.mean(
        [len(pack_tokens(c.suffix_ids, c.completion_ids, c.logprobs, c.versions, c.forced)) for c in calls]
    )
    print(f"all arrays of a call of {ADDED} + {SAMPLED} tokens: {packed:,.0f} bytes of {4 * (ADDED + 3 * SAMPLED):,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=100, help="the longest conversation")
    parser.add_argument("--calls", type=int, default=2000, help="calls written to measure speed")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go; a temporary folder by default")
    parser.add_argument("--postgres", default="", help="postgresql://USER@HOST/DATABASE, to measure that too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for postgres in sorted({"", args.postgres}):
            print("PostgreSQL" if postgres else "SQLite")
            conversation, place = Conversation(), Place(Path(name), postgres)
            asyncio.run(sizes(conversation, place, args.turns))
            for synchronous in ("ON", "OFF") if postgres else ("FULL", "NORMAL"):
                asyncio.run(speed(conversation, place, args.calls, synchronous))
            asyncio.run(reading(conversation, place))
    encodings(Conversation())


if __name__ == "__main__":
    main()
