"""Calls, seconds, memory, CPU time and bytes of every repeat of every setup. Judges nothing: raw figures out.

What holds: all setups of a repeat hold the same conversations over the same upstream process; each gateway is started
for its repeat, warmed, asked at every concurrency, and ended before its files are measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np

from benchmarks.gateway import agents
from benchmarks.gateway.agents import Script, Timings
from benchmarks.gateway.processes import Process
from benchmarks.gateway.setups import Setup, on_disk
from benchmarks.gateway.workload import Bench, Workload


async def measure(setup: Setup, upstream: Process, workload: Workload, seed: int) -> dict[str, Any]:
    """One repeat of one setup: warmed, then every concurrency."""
    address = upstream.said[1]
    before = await answered(address)
    warm = Timings()
    await agents.drive(setup.session, agents.scripts(workload.warm, workload.turns, seed), workload.warm, warm)
    await on_disk(setup, warm.calls)
    made, start = warm.calls, resources(setup)
    cells = {}
    for concurrency, sessions in workload.sessions.items():
        waiting = agents.scripts(sessions, workload.turns, seed + concurrency)
        cells[concurrency] = await cell(setup, upstream, waiting, concurrency, made)
        made += cells[concurrency]["calls"]
    opened = resources(setup)
    await setup.close_sessions()
    closed = resources(setup)
    after = await answered(address)
    calls = made - warm.calls
    return {
        "cells": cells,
        "made": made,
        "recorded": setup.recorded(),
        "upstream": after["calls"] - before["calls"],
        "prompt_tokens_per_call": (after["prompt_tokens"] - before["prompt_tokens"]) / made,
        "memory_at_rest": start["memory"],
        "memory_per_call_open": (opened["memory"] - start["memory"]) / calls,
        "memory_per_call_closed": (closed["memory"] - start["memory"]) / calls,
        "cpu_s_per_call": sum(c["cpu_s"] for c in cells.values()) / calls,
    }


async def cell(setup: Setup, upstream: Process, waiting: list[Script], concurrency: int, before: int) -> dict[str, Any]:
    """before: calls recorded earlier."""
    timings, cpu, upstream_cpu = Timings(), resources(setup)["cpu"], upstream.cpu()
    seconds = await agents.drive(setup.session, waiting, concurrency, timings)
    start = time.perf_counter()
    await on_disk(setup, before + timings.calls)
    return {
        "calls": timings.calls,
        "seconds": seconds,
        "seconds_until_on_disk": seconds + time.perf_counter() - start,
        "cpu_s": resources(setup)["cpu"] - cpu,
        "upstream_cpu_s": upstream.cpu() - upstream_cpu,
        "first_ms": percentiles(timings.first),
        "continuing_ms": percentiles(timings.continuing),
    }


async def answered(address: str) -> dict[str, int]:
    """Calls and prompt tokens that the upstream has counted on both routes."""
    async with aiohttp.ClientSession() as http, http.get(f"{address}/log") as response:
        return {name: sum(by_route.values()) for name, by_route in (await response.json()).items()}


def resources(setup: Setup) -> dict[str, float]:
    process = setup.process
    return {"memory": process.memory(), "cpu": process.cpu()} if process else {"memory": 0.0, "cpu": 0.0}


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": 1e3 * float(np.percentile(seconds, q)) for q in (50, 95)}


def database_bytes(setup: Setup) -> int:
    """Of the database and what stands beside it, once its process has ended."""
    assert setup.database is not None
    return sum(f.stat().st_size for f in setup.database.parent.glob(setup.database.name + "*"))


async def timed(bench: Bench, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Every repeat of every setup, in turn; the order shifts from repeat to repeat."""
    upstream = bench.upstream(evidence=False)
    runs: dict[str, list[dict[str, Any]]] = {}
    try:
        setups = list(bench.setups(upstream.said[1]).items())
        for repeat in range(bench.workload.repeats):
            shift = repeat % len(setups)
            for name, start in setups[shift:] + setups[:shift]:
                runs.setdefault(name, []).append(await one(start, upstream, bench.workload, seed + 1000 * repeat))
                print(f"repeat {repeat + 1} of {bench.workload.repeats}: {name} done", file=sys.stderr, flush=True)
    finally:
        upstream.stop()
    return runs


async def one(start: Callable[[], Setup], upstream: Process, workload: Workload, seed: int) -> dict[str, Any]:
    setup = start()
    try:
        found = await measure(setup, upstream, workload, seed)
    finally:
        if setup.process:
            setup.process.stop()
    if setup.database is not None:
        found["disk_per_call"] = database_bytes(setup) / found["made"]
    return found
