"""Processes under measurement: started, asked for their memory and CPU time as the kernel counts them, ended."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from benchmarks.machine import ROOT

_TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """One command, its output in a file. `ready`: a pattern that its output shows once it serves."""

    def __init__(self, command: list[str], log: Path, *, ready: str, environment: dict[str, str] | None = None):
        self.log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ
                | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
                | (environment or {}),
            )
        self.said = self._wait(ready)

    def _wait(self, ready: str) -> re.Match[str]:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._popen.poll() is None:
            if found := re.search(ready, self.log.read_text(errors="replace"), re.DOTALL):
                return found
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{self._popen.args!r} did not start:\n{self.log.read_text(errors='replace')[-2000:]}")

    def memory(self) -> int:
        """Bytes: its proportional share of what it maps."""
        rollup = Path(f"/proc/{self._popen.pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        assert found, rollup
        return 1024 * int(found[1])

    def cpu(self) -> float:
        """Seconds of CPU time of all its threads, to one hundredth."""
        fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def stop(self) -> None:
        """Asks it to end and waits until it has."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
