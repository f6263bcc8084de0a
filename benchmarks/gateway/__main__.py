"""What a gateway between agents and a model server costs, and what it keeps: the upstream alone, polarlike's proxy, and
rllm-model-gateway, in one run over one upstream process with the same clients.

Conversations grow as coding agents' do (agents.py), all texts differ, first and continuing calls are timed apart. Each
repeat starts every gateway afresh, in turn, warms it, runs all concurrencies and ends it; figures are medians over
repeats with the least and the most. `added` is a repeat's percentile less that of the upstream alone in that repeat.
Then, untimed: what stands on disk when a gateway is killed while it answers, and whether prompts keep the exact ids of
the turns before, both against the upstream's own evidence.

    python -m benchmarks.gateway --peer .venv-peer/bin/python --json gateway.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gateway.evidence import what_is_kept
from benchmarks.gateway.setups import PEER, Bare
from benchmarks.gateway.timing import timed
from benchmarks.gateway.workload import Bench, Workload
from benchmarks.table import gateway_table

NOTES = [
    "Unequal work: polarlike's proxy renders and tokenises each conversation and sends ids; the peer passes the chat "
    "on and this upstream makes up its prompt ids for nothing. With a real server that work is the server's.",
    "Unequal durability: polarlike commits a call with a forced write (SQLite, WAL, synchronous=FULL) before the "
    "reply; the peer, by its defaults, writes it after the reply (SQLite, rollback journal, synchronous=NORMAL). "
    "*Until on disk* counts the time until another process can read every call.",
    "Each as its own command starts it: `polar serve` on uvloop; the peer with its access log, and on uvicorn without "
    "uvloop and httptools, which its package does not ask for.",
    "The peer has no way to close a session that keeps its record, so both its memory rows are with sessions open.",
    "The upstream answers at once and shares the cores with client and gateway.",
]


def figures(run: dict[str, Any], bare: dict[str, Any]) -> dict[str, float]:
    """A repeat's figures, flat. bare: the same repeat of the upstream alone."""
    cells = run["cells"]
    out = {f"calls_per_s_{c}": cell["calls"] / cell["seconds"] for c, cell in cells.items()}
    lowest = min(cells)
    for kind in ("first", "continuing"):
        for q in ("p50", "p95"):
            out[f"{kind}_{q}_ms"] = cells[lowest][f"{kind}_ms"][q]
    if run is bare:
        return out
    for c, cell in cells.items():
        out[f"calls_until_on_disk_per_s_{c}"] = cell["calls"] / cell["seconds_until_on_disk"]
    for kind in ("first", "continuing"):
        for q in ("p50", "p95"):
            out[f"added_{kind}_{q}_ms"] = out[f"{kind}_{q}_ms"] - bare["cells"][lowest][f"{kind}_ms"][q]
    return out | {
        "cpu_ms_per_call": 1e3 * run["cpu_s_per_call"],
        "memory_at_rest_mib": run["memory_at_rest"] / 2**20,
        "memory_kib_per_call_open": run["memory_per_call_open"] / 1024,
        "memory_kib_per_call_closed": run["memory_per_call_closed"] / 1024,
        "disk_bytes_per_call": run["disk_per_call"],
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """setup to figure to its median, least and most over repeats."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, repeats in runs.items():
        flat = [figures(run, bare) for run, bare in zip(repeats, runs[Bare.name], strict=True)]
        out[name] = {key: spread([f[key] for f in flat]) for key in flat[0]}
    return out


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


async def run(bench: Bench, seed: int) -> dict[str, Any]:
    found = machine.machine(bench.folder)
    runs = await timed(bench, seed)
    kept = await what_is_kept(bench, seed)
    totals = {
        name: {key: sum(r[key] for r in repeats) for key in ("made", "recorded", "upstream")}
        for name, repeats in runs.items()
    }
    return {
        "benchmark": "gateway",
        "machine": found | {"load_at_end": os.getloadavg()[0]},
        "versions": machine.versions("polarlike", "aiohttp", "uvloop", "renderers") | peer_versions(bench.peer),
        "workload": {
            "turns": bench.workload.turns,
            "sessions": bench.workload.sessions,
            "repeats": bench.workload.repeats,
            "delay_s": bench.workload.delay,
            "prompt_tokens_per_call": {n: round(r[0]["prompt_tokens_per_call"]) for n, r in runs.items()},
        },
        "setups": summary(runs),
        "kept": kept,
        "counts": totals,
        "notes": NOTES if bench.peer else NOTES[-1:],
        "runs": runs,
    }


def peer_versions(python: Path | None) -> dict[str, str]:
    if python is None:
        return {}
    code = "from importlib.metadata import version as v; print(v('rllm-model-gateway'), v('uvicorn'), v('starlette'))"
    got = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip((PEER, "uvicorn", "starlette"), got, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a gateway costs and keeps")
    parser.add_argument("--model", type=Path, default=machine.ROOT / "examples/policy/model")
    parser.add_argument("--peer", type=Path, help="a Python with rllm-model-gateway; left out where not given")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    parser.add_argument(
        "--folder", type=Path, help="where the databases go, which decides the disk; a temporary folder"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds the upstream takes for a reply")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few calls, to see that all of it works")
    options = parser.parse_args()
    workload = Workload.quick() if options.quick else Workload(repeats=options.repeats, delay=options.delay)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        found = asyncio.run(run(Bench(Path(name), options.model, workload, options.peer), options.seed))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(gateway_table(found))


if __name__ == "__main__":
    main()
