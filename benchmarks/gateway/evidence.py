"""What a gateway keeps, against the upstream's own evidence: ids, logprobs, exact context, and calls over a kill.

Knows setups and the upstream's /evidence; measures no time. Two questions, each to every gateway: after conversations
held one after another, does the record say what the upstream was given and said, and did each prompt begin with the
exact ids of the turn before; and after SIGKILL while it answers, which replies that clients hold are not on disk?
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from benchmarks.gateway import agents
from benchmarks.gateway.agents import Timings
from benchmarks.gateway.setups import Bare, Kept, Setup, on_disk

if TYPE_CHECKING:
    from benchmarks.gateway.workload import Bench

_KILLED_WITH = 16  # conversations held at once when the gateway is killed


async def what_is_kept(bench: Bench, seed: int) -> dict[str, dict[str, int]]:
    """setup to counts; see `faithful` and `killed`. The upstream alone has the context's counts only."""
    upstream = bench.upstream(evidence=True)
    try:
        out = {}
        for name, start in bench.setups(upstream.said[1]).items():
            setup = start()
            try:
                out[name] = await faithful(setup, upstream.said[1], bench.workload.turns, seed)
                if name != Bare.name:
                    out[name] |= await killed(setup, bench.workload.kill_after, bench.workload.turns, seed)
            finally:
                if setup.process:
                    setup.process.kill()
        return out
    finally:
        upstream.stop()


async def faithful(setup: Setup, upstream: str, turns: int, seed: int) -> dict[str, int]:
    """calls; with prompt_ids, completion_ids and logprobs: how many the gateway kept just as the upstream has them;
    continuing and continuing_odd: calls after a turn spelled as a tokenizer spells it, and after one that is not;
    exact and exact_odd: those whose prompt began with that turn's prompt and sampled ids."""
    skip = len(await evidence(upstream))
    timings = Timings()
    conversations = 4
    for script in agents.scripts(conversations, turns, seed):
        await agents.drive(setup.session, [script], 1, timings)
    asked = (await evidence(upstream))[skip:]
    assert len(asked) == timings.calls == conversations * turns, (len(asked), timings.calls)
    out = {"calls": len(asked), **context(asked, turns)}
    if setup.database is not None:
        await on_disk(setup, timings.calls)
        out |= agreement(setup.kept(), asked)
    return out


def context(asked: list[dict[str, Any]], turns: int) -> dict[str, int]:
    """asked: the upstream's evidence of conversations of `turns` calls, one after another."""
    out = dict.fromkeys(("continuing", "exact", "continuing_odd", "exact_odd"), 0)
    for k, call in enumerate(asked):
        if k % turns == 0:
            continue
        before = asked[k - 1]
        kind = "_odd" if before["odd"] else ""
        whole = before["prompt_ids"] + before["completion_ids"]
        out["continuing" + kind] += 1
        out["exact" + kind] += call["prompt_ids"][: len(whole)] == whole
    return out


def agreement(kept: list[Kept], asked: list[dict[str, Any]]) -> dict[str, int]:
    out = dict.fromkeys(("prompt_ids", "completion_ids", "logprobs"), 0)
    for record, truth in zip(kept, asked, strict=True):
        for name in out:
            got = getattr(record, name)
            out[name] += bool(np.array_equal(got, np.asarray(truth[name], got.dtype)))
    return out


async def killed(setup: Setup, after: int, turns: int, seed: int) -> dict[str, int]:
    """received: replies that clients had read in full when the gateway was killed, at the earliest after `after`;
    lost: those that are not on disk."""
    assert setup.process is not None
    timings = Timings()
    conversations = agents.scripts(2 * _KILLED_WITH, turns, seed + 1)
    driving = asyncio.create_task(agents.drive(setup.session, conversations, _KILLED_WITH, timings))
    while timings.calls < after and not driving.done():
        await asyncio.wait([driving], timeout=0.001)
    setup.process.kill()
    await asyncio.wait([driving])
    driving.exception()  # the connections broke, as they were to
    on_disk = {k.reply_id for k in setup.kept()}
    return {"received": len(timings.ids), "lost": sum(i not in on_disk for i in timings.ids)}


async def evidence(upstream: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(f"{upstream}/evidence") as response:
        found: list[dict[str, Any]] = await response.json()
        return found
