"""How much is asked of each gateway, and how what is measured is started. Measures nothing."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway import agents
from benchmarks.gateway.processes import Process
from benchmarks.gateway.setups import PEER, Bare, Peer, Polar, Setup
from polarlike.templates import load_template


@dataclass(slots=True)
class Workload:
    """sessions: concurrency to how many conversations are held at it."""

    turns: int = 10
    sessions: dict[int, int] = field(default_factory=lambda: {1: 12, 8: 32, 32: 64})
    warm: int = 32
    repeats: int = 3
    words: int = 100
    delay: float = 0.0
    kill_after: int = 60

    @classmethod
    def quick(cls) -> Workload:
        return cls(turns=3, sessions={1: 1, 4: 4}, warm=4, repeats=1, kill_after=6)


@dataclass(slots=True)
class Bench:
    """Starts what is measured. peer: a Python that has rllm-model-gateway; None leaves it out."""

    folder: Path
    model: Path
    workload: Workload
    peer: Path | None = None
    started: int = 0

    def upstream(self, *, evidence: bool) -> Process:
        command = [sys.executable, "-m", "benchmarks.gateway.upstream", "--model", str(self.model)]
        command += ["--words", str(self.workload.words), "--bytes-per-token", str(self._bytes_per_token())]
        command += ["--evidence"] if evidence else ["--delay", str(self.workload.delay)]
        return Process(command, self.folder / "upstream.log", ready=r"listening on (\S+)\s")

    def setups(self, upstream: str) -> dict[str, Callable[[], Setup]]:
        """Each starts its process when called."""
        made: dict[str, Callable[[], Setup]] = {
            Bare.name: lambda: Bare(upstream),
            Polar.name: lambda: Polar(upstream, self._place(), self.model),
        }
        if self.peer is not None:
            python = self.peer
            made[PEER] = lambda: Peer(upstream, self._place(), python, free_port())
        return made

    def _place(self) -> Path:
        self.started += 1
        place = self.folder / str(self.started)
        place.mkdir()
        return place

    def _bytes_per_token(self) -> float:
        """Of a conversation half through, so that made-up prompts have the length of rendered ones."""
        [script] = agents.scripts(1, self.workload.turns, seed=0)
        results = [{"role": "user", "content": r} for r in script.results[: self.workload.turns // 2]]
        messages = [*agents.opening(script), *results]
        ids = load_template(self.model).render(messages, agents.TOOLS)
        return len(agents.body(messages)) / int(ids.size)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
