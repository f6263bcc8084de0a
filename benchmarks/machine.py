"""What a benchmark ran on: processor, kernel, what a forced write costs, versions."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def machine(folder: Path) -> dict[str, Any]:
    """folder: where the benchmark's files go; its disk is the one described."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fsync_ms": round(1e3 * fsync_seconds(folder), 2),
        "load_at_start": os.getloadavg()[0],
    }


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['date']}, {found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, Linux {found['kernel']}, "
        f"Python {found['python']}, a forced write of 4 KiB {found['fsync_ms']:.2f} ms, "
        f"load {found['load_at_start']:.1f} before the run"
    )


def fsync_seconds(folder: Path) -> float:
    """Median of twenty appends of 4 KiB, each forced to disk."""
    path, seconds = folder / "fsync", []
    with path.open("wb", buffering=0) as file:
        for _ in range(20):
            start = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    path.unlink()
    return statistics.median(seconds)


def versions(*packages: str) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = {package: version(package) for package in packages}
    return found | ({"commit": commit.stdout.strip()} if commit.returncode == 0 else {})
