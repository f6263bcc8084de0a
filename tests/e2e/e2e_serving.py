"""`polar serve` as its users start it: a process of its own, its keys and addresses read from what it prints."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlike.engines.log import LogEntry, read_log
from polarlike.records import Call
from polarlike.store import Store
from reconstruct.evidence import compare_with_engine_log


@dataclass
class Serving:
    """A running `polar serve`."""

    process: subprocess.Popen[str]
    base_url: str
    key: str
    admin_url: str
    admin_key: str
    out: Path

    def stop(self) -> None:
        """Ctrl-C, and what it does is waited for."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def calls(self) -> list[Call]:
        """Every call of the run's store, which is opened anew."""
        store = Store(f"sqlite:///{self.out / 'store.db'}")
        return [c for s in store.sessions() for c in store.calls(s.session_id)]

    def log(self) -> dict[str, LogEntry]:
        return read_log(self.out / "engine.jsonl")

    def evidence(self) -> dict[str, Any]:
        """The record against the engine's own log, over all sessions."""
        store, log = Store(f"sqlite:///{self.out / 'store.db'}"), self.log()
        found = [compare_with_engine_log(store.calls(s.session_id), log) for s in store.sessions()]
        return {
            "trainable": sum(f["trainable"] for f in found),
            "equal": sum(f["equal"] for f in found),
            "first_mismatch": next((f["first_mismatch"] for f in found if f["first_mismatch"]), None),
        }


@contextmanager
def serving(out: Path, *flags: str, log: bool = True) -> Iterator[Serving]:
    polar = Path(sys.executable).with_name("polar")
    command = [str(polar), "serve", "--out", str(out), "--port", "0", "--admin-port", "0"]
    command += [*(["--engine-log"] if log else []), *flags]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        yield _started(process, out)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _started(process: subprocess.Popen[str], out: Path) -> Serving:
    assert process.stdout is not None
    said, deadline = "", time.monotonic() + 120
    while "stop with Ctrl-C" not in said:
        line = process.stdout.readline()
        assert line and time.monotonic() < deadline, f"polar serve did not start:\n{said}"
        said += line
    base = re.search(r"OPENAI_BASE_URL=(\S+) .*OPENAI_API_KEY=(\S+)", said)
    admin = re.search(r"Control API: (\S+)/sessions with key (\S+)", said)
    assert base and admin, said
    return Serving(process, base[1], base[2], admin[1], admin[2], out)
