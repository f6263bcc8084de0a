"""Boxes that are Docker containers: the provider and one box.

Knows: how commands get in and end, and what is kept of a box. Does not know: how a container is locked down
(`docker_lockdown`), how its files are read (`rooted` where we are root, else `docker_files`), how images and toolboxes
are built (`docker_images`, `docker_toolbox`), or how a socket gets into a box (`docker_reach`).

What holds: at a timeout nothing in the box runs on, and a process of ours that was killed leaves only what `reap`
finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sandbox import docker_images, docker_lockdown, docker_toolbox, owner, tree
from sandbox.base import Check, RunResult, SandboxError, SandboxSpec, Toolbox, ToolboxRecipe
from sandbox.docker_engine import ExecStream, api_error, connect, engine_errors, sentence, socket_path
from sandbox.docker_files import ContainerFiles
from sandbox.docker_fork import ForkedStream, Forks, Streams
from sandbox.docker_reach import NamespaceReach, Reach, SocketReach
from sandbox.rooted import RootedFiles
from sandbox.tree import Manifest, TreePatch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

SWEEP = ["/bin/sh", "-c", "kill -9 -1"]
IDLE_PROCESSES = 2  # process 1 and its sleep
LABEL_RUN, LABEL_PID, LABEL_OWNER = "polarlike.run", "polarlike.pid", "polarlike.owner"
LABEL_FOLDER = "polarlike.folder"


class DockerBox:
    """One running container."""

    def __init__(self, provider: DockerProvider, container_id: str, pid: int, spec: SandboxSpec, reach: Reach) -> None:
        self.box_id = container_id[:12]
        self.workdir = spec.workdir
        self.pid = pid  # of process 1, as the host sees it
        self._id = container_id
        self._spec = spec
        self._provider = provider
        self._reach = reach
        # The engine starts a process of its own for each archive, 60 ms of processor time; as root we need none.
        self._archives = ContainerFiles(provider.api, container_id)
        self._rooted = open_root(container_id, pid) if provider.reach == "namespace" else None
        self._files = self._rooted or self._archives
        self._start: Manifest | None = None
        self._stopped = False

    def path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}"

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self._provider.call(function, *args, **kwargs)

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
        """As `Sandbox.run`. At a timeout, or when the call is cancelled, every process of the box is killed, also what
        earlier commands left running: run one command at a time in a box."""
        started, timed_out = time.monotonic(), False
        stream: ExecStream | ForkedStream | None
        stream = await self._fork(command, env or {}, cwd, Streams(stdin, max_output))
        exec_id = ""
        if stream is None:
            exec_id, stream = await self._exec(command, env=env, cwd=cwd, stdin=stdin, max_output=max_output)
        try:
            try:
                await stream.finished(timeout)
            except TimeoutError:
                timed_out = True
                await self._sweep()
                await stream.finished(10)
            code = stream.code if isinstance(stream, ForkedStream) else await self._exit_code(exec_id)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(self._sweep()))
            raise
        finally:
            stream.close()
        seconds = time.monotonic() - started
        return RunResult(code, stream.stdout.value(), stream.stderr.value(), timed_out, seconds)

    async def _fork(
        self, command: list[str], env: dict[str, str], cwd: str | None, streams: Streams
    ) -> ForkedStream | None:
        folder = self.path(cwd) if cwd else self.workdir
        return await self._provider.forks.start(self._spec, self.pid, self._id, command, env, folder, streams)

    async def launch(self, command: list[str]) -> None:
        """Starts a program that stays, and waits for its first output."""
        _, stream = await self._exec(command, cwd="/")
        try:
            await stream.spoke(30)
        except TimeoutError as error:
            raise SandboxError(f"{command[0]} did not start in the box; is its file system whole?") from error
        finally:
            stream.close()

    async def _exec(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        max_output: int = 10_000,
    ) -> tuple[str, ExecStream]:
        api = self._provider.api
        made = await self._call(
            api.exec_create,
            self._id,
            command,
            stdin=True,
            environment=env or {},
            workdir=self.path(cwd) if cwd else self.workdir,
            user="0:0",
        )
        return made["Id"], await ExecStream.open(self._provider.socket_path, made["Id"], stdin, max_output)

    async def _exit_code(self, exec_id: str) -> int:
        """The engine closes the streams a moment before it knows the code."""
        for pause in (0.0, 0.01, 0.05, 0.2, 1.0, 3.0):
            await asyncio.sleep(pause)
            state = await self._call(self._provider.api.exec_inspect, exec_id)
            if not state["Running"] and state["ExitCode"] is not None:
                return int(state["ExitCode"])
        return 137  # killed, and the engine has not noticed

    async def _sweep(self) -> None:
        """Kills everything in the box. Whether that worked is asked of the engine, since the agent may have put
        another program in place of the box's shell; if it did not, the container ends, and only its files are left."""
        with contextlib.suppress(SandboxError, TimeoutError):
            _, stream = await self._exec(SWEEP, cwd="/")
            try:
                await stream.finished(5)
            finally:
                stream.close()
        if await self._call(self._busy):
            await self._call(self._provider.api.kill, self._id)
        else:
            await self._reach.again(self)

    def _busy(self) -> bool:
        try:
            return len(self._provider.api.top(self._id)["Processes"]) > IDLE_PROCESSES
        except self._provider.api_error:
            return True

    async def put(self, host: Path, path: str) -> None:
        await self._call(self._files.put, host, self.path(path))

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._call(self._files.write, self.path(path), data, mode)

    async def read(self, path: str) -> bytes | None:
        """None also for a folder or a symbolic link: what is read back is what stands at this very path."""
        return await self._call(self._files.read, self.path(path))

    async def listen(self, port: int) -> socket.socket:
        return await self._reach.listen(self, port)

    def address(self, port: int) -> str:
        return f"127.0.0.1:{port}"

    async def mark_start(self) -> None:
        self._start = await self._call(self._files.walk, self.workdir, tree.manifest_of)

    async def patch(self) -> TreePatch:
        start = self._start
        if start is None:
            raise SandboxError("the work tree was not marked before the agent ran; call mark_start first")
        return await self._call(self._files.walk, self.workdir, lambda items: tree.compare(start, items))

    async def apply(self, patch: TreePatch) -> None:
        """Over the work folder as it is. What is in the way goes first, so nothing is written through a link."""
        if self._rooted:
            return await self._call(self._rooted.lay, patch, self.workdir)
        await self._unpack(patch)

    async def _unpack(self, patch: TreePatch) -> None:
        folders = [path for path, entry in patch.files.items() if entry.kind == "folder"]
        await self._each(patch.stale_paths(), 'rm -rf -- "$@"')
        await self._each(folders, 'for p; do [ -d "$p" ] && [ ! -L "$p" ] || rm -rf -- "$p"; done')
        if patch.files:
            await self._call(self._archives.unpack, io.BytesIO(patch.tar()), self.workdir)

    async def _each(self, paths: list[str], script: str) -> None:
        if not paths:
            return
        stdin = b"".join(os.fsencode(path) + b"\0" for path in paths)
        result = await self.run(["xargs", "-0", "/bin/sh", "-c", script, "sh"], timeout=120, stdin=stdin)
        if result.exit_code != 0:
            text = result.stderr.decode(errors="replace").strip()
            raise SandboxError(f"the captured changes could not be laid over the work folder: {text}")

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._rooted:
            self._rooted.close()
        await self._reach.close()
        await self._call(self._provider.remove, self._id)


class DockerProvider:
    """Makes Docker boxes. `reach` says how sockets get into them: `namespace` (root), `socket`, or `auto`. `fork` lets
    an agent whose toolbox can be preloaded start by a fork where that works (as root): see `docker_fork`."""

    name = "docker"

    def __init__(self, state_dir: Path, run_label: str, reach: str = "auto", fork: bool = True) -> None:
        if reach not in ("auto", "namespace", "socket"):
            raise SandboxError(f"reach is {reach!r}; it must be auto, namespace or socket")
        self.run_label = run_label
        self.reach = ("namespace" if os.geteuid() == 0 else "socket") if reach == "auto" else reach
        self.socket_path = socket_path()
        self._client = connect()
        # The SDK's types leave much of the low-level API out.
        self.api: Any = self._client.api
        self.api_error = api_error()
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="docker")
        self.forks = Forks(wanted=fork)
        self._prepared: dict[str, asyncio.Task[str]] = {}
        self._toolboxes: dict[str, asyncio.Task[Toolbox]] = {}

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a blocking SDK call in a thread; the engine's own errors come as SandboxError."""

        def work() -> T:
            try:
                return function(*args, **kwargs)
            except engine_errors() as error:
                raise SandboxError(sentence(error)) from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._image(spec)

    async def _image(self, spec: SandboxSpec) -> str:
        """The image's tag, made once even when many boxes of a task start at the same time."""
        key = f"{spec.image}|{spec.dockerfile}|{spec.workdir}"
        if key not in self._prepared or _failed(self._prepared[key]):
            image = self.call(docker_images.ensure, self._client, spec.image, spec.dockerfile, spec.workdir)
            self._prepared[key] = asyncio.ensure_future(image)
        return await asyncio.shield(self._prepared[key])

    async def toolbox(self, recipe: ToolboxRecipe) -> Toolbox:
        if recipe.name not in self._toolboxes or _failed(self._toolboxes[recipe.name]):
            made = self.call(docker_toolbox.ensure, self._client, recipe)
            self._toolboxes[recipe.name] = asyncio.ensure_future(made)
        toolbox = await asyncio.shield(self._toolboxes[recipe.name])
        if self.reach == "namespace":  # we are root: the same right opens sockets in a box
            self.forks.know(recipe, toolbox)
        return toolbox

    async def start(self, spec: SandboxSpec, name: str) -> DockerBox:
        image = await self._image(spec)
        reach: Reach = NamespaceReach()
        if self.reach == "socket":
            reach = SocketReach(await self.toolbox(docker_toolbox.BARE_PYTHON))
        try:
            container_id, pid = await self.call(self._start, spec, image, name, reach)
        except BaseException:
            await reach.close()
            raise
        return DockerBox(self, container_id, pid, spec, reach)

    def _start(self, spec: SandboxSpec, image: str, name: str, reach: Reach) -> tuple[str, int]:
        made = self.api.create_container(
            image,
            **docker_lockdown.settings(self.api, spec, reach.mounts()),
            labels=self._labels(reach),
            name=f"polarlike-{name}-{uuid.uuid4().hex[:8]}",
        )
        try:
            self.api.start(made["Id"])
            pid = int(self.api.inspect_container(made["Id"])["State"]["Pid"])
            if pid == 0:
                raise SandboxError(f"a box of the image {image} ended at once; does it hold /bin/sh and sleep?")
        except BaseException:
            self.remove(made["Id"])
            raise
        return made["Id"], pid

    def _labels(self, reach: Reach) -> dict[str, str]:
        labels = {LABEL_RUN: self.run_label, LABEL_PID: str(os.getpid()), LABEL_OWNER: owner.our_mark()}
        return {**labels, LABEL_FOLDER: str(reach.folder or "")}

    def remove(self, container_id: str) -> None:
        try:
            self.api.remove_container(container_id, force=True, v=True)
        except self.api_error as error:
            if error.status_code not in (404, 409):  # gone, or being removed by someone else
                raise

    def _ours(self) -> list[dict[str, Any]]:
        filters = {"label": [f"{LABEL_RUN}={self.run_label}"]}
        return list(self.api.containers(all=True, filters=filters))

    async def reap(self) -> int:
        return await self.call(self._reap)

    def _reap(self) -> int:
        lost = [found for found in self._ours() if owner.left_behind(found["Labels"].get(LABEL_OWNER, ""))]
        for found in lost:
            self.remove(found["Id"])
            SocketReach.remove_folder(found["Labels"].get(LABEL_FOLDER, ""))
        return len(lost)

    async def close(self) -> None:
        """Removes the boxes of this process that were not stopped, and ends its builds: a thread waits for each."""
        await self.forks.close()
        await self.call(self._close)
        self._threads.shutdown(wait=False)

    def _close(self) -> None:
        docker_toolbox.remove_builds(self._client, of_dead=False)
        for found in self._ours():
            if found["Labels"].get(LABEL_OWNER) == owner.our_mark():
                self.remove(found["Id"])
                SocketReach.remove_folder(found["Labels"].get(LABEL_FOLDER, ""))
        self._client.close()

    @classmethod
    def checks(cls) -> list[Check]:
        return docker_images.checks()


def open_root(container_id: str, pid: int) -> RootedFiles | None:
    """The files of a container by its first process; None where that process is not seen from here under that id (as
    when we are in a container ourselves) or its root cannot be entered."""
    try:
        files = RootedFiles(f"/proc/{pid}/root")
        # Asked after it was opened: the number may have been given to another process meanwhile.
        if container_id in Path(f"/proc/{pid}/cgroup").read_text():
            return files
        files.close()
    except OSError:
        pass
    return None


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
