"""Who a box belongs to: which process of which boot made it, so that what a killed process left can be told apart.

A process id alone comes round again; with the kernel's boot id and the process's start time it does not.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def _start_time(pid: int) -> str | None:
    """Clock ticks after boot at which the process started; None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat.rpartition(b")")[2].split()[19].decode()


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]


def our_mark() -> str:
    """A label for what this process makes: boot:pid:start."""
    pid = os.getpid()
    return f"{_boot()}:{pid}:{_start_time(pid)}"


def left_behind(mark: str) -> bool:
    """Whether the process that made this is gone. A label that is not ours to read counts as gone."""
    boot, _, rest = mark.partition(":")
    pid, _, start = rest.partition(":")
    return not (boot == _boot() and pid.isdigit() and _start_time(int(pid)) == start)
