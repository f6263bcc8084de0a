"""Agents that start by a fork: our side of `forkserver`, for boxes that are containers of this machine's engine.

Knows: how a server is started, how its child gets into a box's cgroups and under its limits, and its streams. Does not
know which command of which box is to be forked. What holds: where any step is refused nothing of the agent has run, so
the plain way is still open; `NoFork` says why.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox import seccomp
from sandbox.base import Mount, SandboxSpec, Toolbox, ToolboxRecipe
from sandbox.docker_lockdown import KEEP_ALIVE
from sandbox.output import Clip

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("forkserver.py")
LOCALE = "C.UTF-8"  # Python does the same under it whether its files are there or, as for a server, not
FIRST = b"\0".join(os.fsencode(part) for part in KEEP_ALIVE)
READY_S, STEP_S = 60, 20
STARTS = 3
"""How often a toolbox's server is started, where it fails or dies, before the plain way is kept."""


@dataclass(slots=True)
class Streams:
    """What goes into a command, and how much is kept of what comes out."""

    stdin: bytes
    limit: int


class NoFork(Exception):
    """Why an agent is not forked into a box; it is started in the plain way."""


class ForkServer:
    """One server: a toolbox's Python that has imported `modules` under `env`."""

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        self._control, self._process = control, process
        self._filters: list[bytes] | None = None

    @classmethod
    async def start(cls, toolbox: str, root: str, modules: Sequence[str], env: Mapping[str, str]) -> ForkServer:
        """toolbox: its folder on the host; root: where boxes have it mounted."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-I", "-S", str(PROGRAM), "enter", str(theirs.fileno()), toolbox, root, *modules]
        silent = asyncio.subprocess.DEVNULL
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(env),
                stdin=silent,
                stdout=silent,
                stderr=silent,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        made = cls(ours, process)
        try:
            said = await _receive(ours, READY_S)
        except BaseException:
            await made.close()
            raise
        if said != "ready":
            await made.close()
            raise NoFork(said or "the server ended as it started")
        return made

    @property
    def gone(self) -> bool:
        return self._process.returncode is not None

    async def close(self) -> None:
        self._control.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def run(
        self,
        box: int,
        mark: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        more: Streams,
    ) -> ForkedStream:
        """Starts argv (a script and its arguments) in the box whose first process is `box`, as the host numbers it, and
        whose cgroups hold `mark`."""
        if self._filters is None:
            try:
                self._filters = await asyncio.to_thread(seccomp.filters_of, box)
            except OSError as error:
                raise NoFork(f"the box's system call filter cannot be read ({error.strerror})") from error
        request = {
            "pid": box,
            "mark": mark,
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "seccomp": [base64.b64encode(program).decode() for program in self._filters],
        }
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.setblocking(False)
        streams = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = streams
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            os.lseek(body, 0, os.SEEK_SET)
            given = [in_read, out_write, err_write, theirs.fileno(), body]
            try:
                socket.send_fds(self._control, [b"f"], given)
            finally:
                theirs.close()
                for handle in (in_read, out_write, err_write, body):
                    os.close(handle)
            await _admit(report, box)
        except BaseException as error:
            report.close()
            for handle in (in_write, out_read, err_read):
                os.close(handle)
            if isinstance(error, OSError):
                raise NoFork(f"the server is gone ({error.strerror})") from error
            raise
        return await ForkedStream.open(report, in_write, out_read, err_read, more)


async def _receive(packets: socket.socket, timeout: float) -> str:
    """One packet; empty at the end."""
    try:
        data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(packets, 4096), timeout)
    except TimeoutError as error:
        raise NoFork("the server does not answer") from error
    return data.decode(errors="replace")


async def _admit(report: socket.socket, box: int) -> None:
    """Takes the child into the box's cgroups and under its limits, then lets it go on."""
    word, _, rest = (await _receive(report, STEP_S)).partition(" ")
    if word != "pid":
        raise NoFork(rest or "the server ended")
    await asyncio.to_thread(_limit, int(rest), box)
    report.send(b"go")


def _limit(pid: int, box: int) -> None:
    try:
        wanted = Path(f"/proc/{box}/cgroup").read_text()
        for folder in _cgroups(wanted):
            (folder / "cgroup.procs").write_text(str(pid))
        if Path(f"/proc/{pid}/cgroup").read_text() != wanted:
            raise NoFork("the box's cgroups could not be entered")
        score = Path(f"/proc/{box}/oom_score_adj").read_text()
        Path(f"/proc/{pid}/oom_score_adj").write_text(score)
        for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
            number = getattr(resource, name)
            resource.prlimit(pid, number, resource.prlimit(box, number))
    except OSError as error:
        raise NoFork(f"the box's limits could not be set ({error.strerror})") from error


def _cgroups(text: str) -> list[Path]:
    """The folders of the cgroups that /proc/PID/cgroup names, in version 1 one a hierarchy."""
    mounts = _cgroup_mounts()
    folders = []
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        kind = set(names.split(",")) if names else {"cgroup2"}
        mount = next((place for place, options in mounts if kind <= options), None)
        if mount is not None:
            folders.append(mount / path.lstrip("/"))
        elif path != "/":
            raise NoFork(f"the cgroups of {names or 'version 2'} are mounted nowhere")
    return folders


def _cgroup_mounts() -> list[tuple[Path, set[str]]]:
    """(folder, what it serves) of every whole hierarchy that is mounted; see proc_pid_mountinfo(5)."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        _, _, _, root, place, *_ = fields.split(" ")
        if kind in ("cgroup", "cgroup2") and root == "/":
            found.append((Path(place), {"cgroup2"} if kind == "cgroup2" else set(options.split(","))))
    return found


class Forks:
    """The servers of one provider: one a toolbox whose recipe names modules, started when it is first needed."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._recipes: dict[str, tuple[ToolboxRecipe, Mount]] = {}
        self._servers: dict[str, tuple[dict[str, str], asyncio.Task[ForkServer]]] = {}
        self._starts: Counter[str] = Counter()
        self._said: set[str] = set()

    def know(self, recipe: ToolboxRecipe, toolbox: Toolbox) -> None:
        if self._wanted and recipe.preload and toolbox.mount:
            self._recipes[toolbox.root] = (recipe, toolbox.mount)

    async def start(
        self, spec: SandboxSpec, box: int, mark: str, command: list[str], env: dict[str, str], cwd: str, more: Streams
    ) -> ForkedStream | None:
        """None where the command is no start of such a toolbox's Python, or where it must be started the plain way."""
        root = next((r for r in self._recipes if command[:2] == [f"{r}/bin/python", "-I"]), None)
        if root is None or spec.network or len(command) < 3 or not command[2].startswith("/"):
            return None
        recipe, mount = self._recipes[root]
        if mount not in spec.mounts:
            return None
        try:
            whole = {**await asyncio.to_thread(_environment, box), **env}
            if (locale := whole.get("LC_ALL") or whole.get("LC_CTYPE") or whole.get("LANG")) != LOCALE:
                raise NoFork(f"the box's locale is {locale or 'not set'}, not {LOCALE}")
            server = await self._server(root, {name: whole[name] for name in whole if name not in recipe.varying})
            return await server.run(box, mark, command[2:], whole, cwd, more)
        except NoFork as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                log.warning("each start of %s costs its imports again: %s", recipe.name, error)
            return None

    async def _server(self, root: str, env: dict[str, str]) -> ForkServer:
        recipe, mount = self._recipes[root]
        known, server = self._servers.get(root, (env, None))
        if known != env:
            raise NoFork("its environment is not that of the first start")
        dead = _dead(server) if server else None
        if server is None or ((dead or _failed(server)) and self._starts[root] < STARTS):
            self._starts[root] += 1
            server = asyncio.ensure_future(ForkServer.start(mount.host, root, recipe.preload, env))
            self._servers[root] = (env, server)
            if dead:
                await dead.close()
        return await asyncio.shield(server)

    async def close(self) -> None:
        servers, self._servers = self._servers, {}
        for _, server in servers.values():
            server.cancel()
            done = await asyncio.gather(server, return_exceptions=True)
            for found in done:
                if isinstance(found, ForkServer):
                    await found.close()


def _failed(server: asyncio.Task[ForkServer]) -> bool:
    return server.done() and not server.cancelled() and server.exception() is not None


def _dead(server: asyncio.Task[ForkServer]) -> ForkServer | None:
    """The server, where it started and has ended since."""
    if not server.done() or server.cancelled() or server.exception() is not None or not server.result().gone:
        return None
    return server.result()


def _environment(box: int) -> dict[str, str]:
    """What the engine gives every command of a box, its first process included. Waits until that process is the shell:
    the engine says that a box runs a moment before, when its filter and its environment are not there yet."""
    try:
        end = time.monotonic() + STEP_S
        while not Path(f"/proc/{box}/cmdline").read_bytes().startswith(FIRST):
            if time.monotonic() > end:
                raise NoFork("the box's first process is not the shell")
            time.sleep(0.002)
        items = Path(f"/proc/{box}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise NoFork(f"the box's environment cannot be read ({error.strerror})") from error
    pairs = [item.partition(b"=") for item in items if item]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


class ForkedStream:
    """A started child: feeds its stdin and collects its output until it has ended."""

    def __init__(self, report: socket.socket, limit: int) -> None:
        self.stdout, self.stderr = Clip(limit), Clip(limit)
        self.code = 137
        self._report = report
        self._transports: list[asyncio.BaseTransport] = []
        self._readers: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None]

    @classmethod
    async def open(
        cls, report: socket.socket, in_write: int, out_read: int, err_read: int, more: Streams
    ) -> ForkedStream:
        made = cls(report, more.limit)
        await made._collect(out_read, made.stdout)
        await made._collect(err_read, made.stderr)
        await made._feed(in_write, more.stdin)
        made._ending = asyncio.create_task(made._end())
        return made

    async def _collect(self, handle: int, clip: Clip) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(handle, "rb", 0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._transports.append(transport)

        async def collect() -> None:
            while data := await reader.read(65536):
                clip.add(data)

        self._readers.append(asyncio.create_task(collect()))

    async def _feed(self, handle: int, data: bytes) -> None:
        pipe = os.fdopen(handle, "wb", 0)
        transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
        self._transports.append(transport)
        transport.write(data)
        transport.close()  # after what is buffered has gone out

    async def _end(self) -> None:
        """The exit code, then what is still in the pipes; a child that keeps them open is not waited for."""
        data = await asyncio.get_running_loop().sock_recv(self._report, 64)
        word, _, code = data.decode().partition(" ")
        if word == "exit":
            self.code = int(code)
        before = -1
        while before != (before := self.stdout.total + self.stderr.total):
            _, pending = await asyncio.wait(self._readers, timeout=0.1)
            if not pending:
                return

    async def finished(self, timeout: float) -> None:
        """Until it has ended; TimeoutError leaves it running."""
        await asyncio.wait_for(asyncio.shield(self._ending), timeout)

    def close(self) -> None:
        for task in (self._ending, *self._readers):
            task.cancel()
        for transport in self._transports:
            transport.close()
        self._report.close()
