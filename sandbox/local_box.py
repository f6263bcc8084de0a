"""Boxes that are folders on the host: for development only.

Nothing is shut in here. A program in such a box runs as the user, sees the host's files and network, and has no limits
on memory or processes; use it with agents you trust, to try a pipeline where there is no Docker.

A temporary folder stands for the root of each box: a task's /app is <box>/app. Programs name host paths, so scripts
that must run in every kind of box use POLAR_WORKDIR, POLAR_TESTS and POLAR_LOGS instead of /app, /tests and /logs;
every provider sets the three. What holds all the same: at a timeout, at `stop`, and when our own process dies,
everything the box started is killed (see `supervise`), and a program's environment is built from nothing, never
inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import sys
import time
import uuid
from pathlib import Path

from sandbox import owner, tree, venv_toolbox
from sandbox.base import Check, Mount, RunResult, SandboxError, SandboxSpec, Toolbox, ToolboxRecipe
from sandbox.output import Clip
from sandbox.tree import Manifest, TreePatch

SUPERVISE = Path(__file__).with_name("supervise.py")
OWNER_FILE = ".polarlike-owner"


class _Command:
    """One supervised command: its streams, its exit code, and the switch that kills all it started."""

    def __init__(self, max_output: int) -> None:
        self.stdout, self.stderr = Clip(max_output), Clip(max_output)
        self.control, self._theirs = socket.socketpair()
        self.control.setblocking(False)
        self._transports: list[asyncio.BaseTransport] = []
        self._readers: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: list[str], env: dict[str, str], cwd: str, stdin: bytes) -> None:
        pipes = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        supervised = [sys.executable, "-I", "-S", str(SUPERVISE), str(self._theirs.fileno()), *command]
        self._process = await asyncio.create_subprocess_exec(
            *supervised,
            stdin=in_read,
            stdout=out_write,
            stderr=err_write,
            env=env,
            cwd=cwd,
            pass_fds=[self._theirs.fileno()],
            start_new_session=True,
        )
        for handle in (in_read, out_write, err_write):
            os.close(handle)
        self._theirs.close()
        await self._collect(out_read, self.stdout)
        await self._collect(err_read, self.stderr)
        await self._feed(in_write, stdin)

    async def _collect(self, handle: int, clip: Clip) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe = os.fdopen(handle, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
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

    async def exit_code(self) -> int:
        """Waits for the command itself, not for what it left running."""
        data = b""
        while not data.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(self.control, 64)
            if not more:
                raise SandboxError("the supervisor of a local box died; run the rollout again")
            data += more
        return int(data)

    async def drain(self) -> None:
        """Takes what is still in the pipes; a child that keeps them open is not waited for."""
        before = -1
        while before != (before := self.stdout.total + self.stderr.total) or before < 0:
            _, pending = await asyncio.wait(self._readers, timeout=0.1)
            if not pending:
                return

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.control.send(b"k")

    def let_go(self) -> None:
        for task in self._readers:
            task.cancel()
        for transport in self._transports:
            transport.close()

    async def close(self) -> None:
        """Kills what is left of the command and waits until it is gone."""
        self.let_go()
        self.control.close()
        if self._process is not None:
            await self._process.wait()


class LocalBox:
    """One folder that stands for a box, and the commands started in it."""

    def __init__(self, root: Path, spec: SandboxSpec) -> None:
        self.box_id = root.name
        self.root = root
        self.spec = spec
        self.workdir = Path(self.path(spec.workdir))
        self._commands: list[_Command] = []
        self._sockets: dict[int, socket.socket] = {}
        self._start: Manifest | None = None

    def path(self, path: str) -> str:
        """A task's path as a host path in the box's folder; a host path that is already there stays as it is."""
        if path == str(self.root) or path.startswith(f"{self.root}/"):
            return path
        if path.startswith("/"):
            return str(self.root / path.lstrip("/"))
        return str(self.workdir / path)

    def _env(self, env: dict[str, str] | None) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.path("/root"),
            "TMPDIR": self.path("/tmp"),
            "LANG": "C.UTF-8",
            "POLAR_WORKDIR": str(self.workdir),
            "POLAR_TESTS": self.path("/tests"),
            "POLAR_LOGS": self.path("/logs"),
            **self.spec.env,
            **(env or {}),
        }

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
        """As `Sandbox.run`. Children that outlive the command run on until `stop`; at a timeout they are killed too."""
        started, timed_out, code = time.monotonic(), False, 137
        running = _Command(max_output)
        self._commands.append(running)
        try:
            folder = self.path(cwd) if cwd else str(self.workdir)
            await running.start(command, self._env(env), folder, stdin)
            try:
                code = await asyncio.wait_for(running.exit_code(), timeout)
            except TimeoutError:
                timed_out = True
                running.kill()
                await running.exit_code()
            await running.drain()
        except BaseException:
            await running.close()
            raise
        finally:
            running.let_go()
        seconds = time.monotonic() - started
        return RunResult(code, running.stdout.value(), running.stderr.value(), timed_out, seconds)

    async def put(self, host: Path, path: str) -> None:
        await asyncio.to_thread(_copy, host, Path(self.path(path)))

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        place = Path(self.path(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(mode)

    async def read(self, path: str) -> bytes | None:
        """None also for a folder or a symbolic link: what is read back is what stands at this very path."""
        place = Path(self.path(path))
        try:
            if not stat.S_ISREG(place.lstat().st_mode):
                return None
            return await asyncio.to_thread(place.read_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def listen(self, port: int) -> socket.socket:
        """A loopback socket. The port is a wish that cannot be kept: boxes share the host's ports, so a free one is
        taken, and `address` tells which."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        self._sockets[port] = listener
        return listener

    def address(self, port: int) -> str:
        if port not in self._sockets:
            raise SandboxError(f"nothing listens on port {port} of this box; call listen first")
        return f"127.0.0.1:{self._sockets[port].getsockname()[1]}"

    async def mark_start(self) -> None:
        self._start = await asyncio.to_thread(tree.manifest_of, tree.walk_folder(self.workdir))

    async def patch(self) -> TreePatch:
        if self._start is None:
            raise SandboxError("the work tree was not marked before the agent ran; call mark_start first")
        return await asyncio.to_thread(tree.compare, self._start, tree.walk_folder(self.workdir))

    async def apply(self, patch: TreePatch) -> None:
        await asyncio.to_thread(patch.apply_to, self.workdir)

    async def stop(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            await command.close()
        for listener in self._sockets.values():
            listener.close()
        await asyncio.to_thread(_remove, self.root)


class LocalProvider:
    """Makes local boxes under <state_dir>/local/<run label>. Development only: nothing is isolated."""

    name = "local"

    def __init__(self, state_dir: Path, run_label: str) -> None:
        self._folder = state_dir.resolve() / "local" / run_label

    async def prepare(self, spec: SandboxSpec) -> None:
        if spec.image or spec.dockerfile:
            raise SandboxError("this task needs a container image, which a local box cannot be; use --sandbox docker")

    async def toolbox(self, recipe: ToolboxRecipe) -> Toolbox:
        return Toolbox(root=str(await asyncio.to_thread(venv_toolbox.install, recipe)))

    async def start(self, spec: SandboxSpec, name: str) -> LocalBox:
        root = self._folder / f"{name}-{uuid.uuid4().hex[:8]}"
        await asyncio.to_thread(_make, root, spec)
        return LocalBox(root, spec)

    async def reap(self) -> int:
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> int:
        gone = [root for root in self._folder.glob("*") if owner.left_behind(_owner_of(root))]
        for root in gone:
            _remove(root)
        return len(gone)

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # only where no box is left in it

    @classmethod
    def checks(cls) -> list[Check]:
        linux = sys.platform == "linux"
        return [
            Check(
                "local boxes",
                linux,
                "development only: agents see this machine's files and network, and nothing limits them",
                "" if linux else "use --sandbox docker: local boxes need Linux",
            )
        ]


def _make(root: Path, spec: SandboxSpec) -> None:
    for folder in ("root", "tmp", "tests", "logs", spec.workdir.lstrip("/")):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / OWNER_FILE).write_text(owner.our_mark())
    for mount in spec.mounts:
        _link(root, mount)


def _link(root: Path, mount: Mount) -> None:
    place = root / mount.path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(mount.host)


def _owner_of(root: Path) -> str:
    try:
        return (root / OWNER_FILE).read_text()
    except OSError:
        return ""


def _copy(host: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if host.is_dir():
        shutil.copytree(host, place, symlinks=True, dirs_exist_ok=True)
    elif host.exists():
        shutil.copy(host, place)
    else:
        raise SandboxError(f"{host} does not exist, so it cannot be copied into the box")


def _remove(root: Path) -> None:
    """Removes a tree even where a program in it took away its own folders' write permission."""
    for folder, _, _ in os.walk(root):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)
