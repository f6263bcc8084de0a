"""What a sandbox is, and nothing about any one kind of it.

A `SandboxProvider` makes sandboxes of one kind; a `Sandbox` is one box. Providers register in the entry-point group
`polarlike.sandboxes`: name -> class, constructed as cls(state_dir: Path, run_label: str). Every box carries
`run_label`, so that `reap` finds what a killed process left behind.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polarlike.records import PolarError

if TYPE_CHECKING:
    from sandbox.tree import TreePatch


class SandboxError(PolarError):
    """A fault of the sandbox, not of the agent: a rollout that meets it is unscored, never 0."""


@dataclass(slots=True)
class Mount:
    host: str
    path: str
    read_only: bool = True


@dataclass(slots=True)
class SandboxSpec:
    """What a box must be. image None is the provider's own base image. workdir is made if missing. Limits: memory in
    MiB, cpus as a share of cores, pids a count. network False leaves loopback alone."""

    image: str | None = None
    dockerfile: str | None = None
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    memory_mb: int = 1024
    cpus: float = 1.0
    pids: int = 256
    network: bool = False
    mounts: list[Mount] = field(default_factory=list)


@dataclass(slots=True)
class RunResult:
    """stdout and stderr are bytes, each cut to the first and last half of `max_output`. timed_out: we killed it."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float


@dataclass(slots=True)
class Check:
    """One line of `polar doctor`: what was looked at, whether it works, and the command that mends it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(slots=True)
class ToolboxRecipe:
    """How a harness is installed: Python packages (pinned, `name==version`) under a name that says harness and
    version.

    preload: modules of others that its program imports; where it can, a sandbox imports them once and forks each start
    of `root/bin/python -I SCRIPT` from there. They may read the launch's environment, less the names in `varying`.
    """

    name: str
    pip: list[str]
    preload: list[str] = field(default_factory=list)
    varying: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Toolbox:
    """An installed harness: `mount` is None where the box sees the host's files; `root` is its path as seen inside.
    root/bin/python runs with its packages."""

    root: str
    mount: Mount | None = None


class Sandbox(Protocol):
    box_id: str

    def path(self, path: str) -> str:
        """`path` of a task (/app, /tests/run.sh) as programs in the box name it; the same, but for local boxes. `run`
        (cwd), `put`, `write` and `read` take either form."""
        ...

    async def run(
        self,
        command: list[str],
        *,
        timeout: float,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        max_output: int = 1_000_000,
    ) -> RunResult:
        """Runs a command in the box. At `timeout` seconds everything it started inside is killed."""
        ...

    async def put(self, host: Path, path: str) -> None:
        """Copies a file or the contents of a folder to `path` in the box."""
        ...

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...

    async def read(self, path: str) -> bytes | None:
        """None where there is no such file."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A listening socket of ours that the box reaches as http://127.0.0.1:PORT, and nobody else's box does."""
        ...

    def address(self, port: int) -> str:
        """host:port under which programs in the box reach the socket of `listen(port)`."""
        ...

    async def mark_start(self) -> None:
        """Remembers the work tree as it is now."""
        ...

    async def patch(self) -> TreePatch:
        """The work tree against `mark_start`: committed, staged, unstaged and untracked changes alike."""
        ...

    async def apply(self, patch: TreePatch) -> None: ...

    async def stop(self) -> None:
        """Ends every process of the box and removes it. Safe to call twice."""
        ...


class SandboxProvider(Protocol):
    name: str

    async def prepare(self, spec: SandboxSpec) -> None:
        """Makes what starts need (images); idempotent and quick the second time."""
        ...

    async def toolbox(self, recipe: ToolboxRecipe) -> Toolbox:
        """Installs a harness once; quick the second time."""
        ...

    async def start(self, spec: SandboxSpec, name: str) -> Sandbox: ...

    async def reap(self) -> int:
        """Removes boxes with this run's label that an earlier process left; how many."""
        ...

    async def close(self) -> None: ...

    @classmethod
    def checks(cls) -> list[Check]:
        """What `polar doctor` prints; the provider serves when all are ok."""
        ...
