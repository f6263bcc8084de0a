"""The Docker engine: how it is reached, and commands in a container whose streams are read without a thread each.

Knows the engine's HTTP API as far as the SDK does not serve: the SDK hands out the raw socket of an exec's upgraded
connection and loses what its own buffer had already read, so the upgrade is done here, on asyncio streams. Everything
else goes through the SDK in threads. Only Unix sockets: mounts and namespaces need an engine on this machine anyway.

Frames on an exec connection (Docker Engine API, "Attach to a container"): one byte stream number (1 stdout, 2 stderr),
three zero bytes, four bytes big-endian length, then the data.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.base import SandboxError
from sandbox.output import Clip

if TYPE_CHECKING:
    import docker

DEFAULT_HOST = "unix:///var/run/docker.sock"
START = "sudo systemctl start docker (or, in a container: dockerd &)"
JOIN = "sudo usermod -aG docker $USER, then log in again"


class NoEngine(SandboxError):
    """No use of an engine here. problem: what is missing; mend: the command that mends it."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(f"{problem}; to mend it: {mend}")
        self.problem, self.mend = problem, mend


def socket_path() -> str:
    """The engine's Unix socket, from DOCKER_HOST or the usual place. NoEngine where that is no socket."""
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if not host.startswith("unix://"):
        raise NoEngine(f"DOCKER_HOST is {host}, not a Unix socket", f"export DOCKER_HOST={DEFAULT_HOST}")
    return host.removeprefix("unix://")


def connect() -> docker.DockerClient:
    """A client that has spoken with the engine; NoEngine says what is missing and what mends it."""
    try:
        import docker
    except ImportError as error:
        raise NoEngine("the Docker SDK is not installed", "pip install 'polarlike[docker]'") from error
    path = socket_path()
    try:
        client = docker.DockerClient(base_url=f"unix://{path}", max_pool_size=64, timeout=600)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise _unreachable(path) from error
    return client


def _unreachable(path: str) -> NoEngine:
    if not Path(path).exists():
        return NoEngine(f"there is no Docker engine at {path}", START)
    if not os.access(path, os.W_OK):
        return NoEngine(f"you may not use the Docker engine at {path}", JOIN)
    return NoEngine(f"the Docker engine at {path} does not answer", START)


def api_error() -> type[docker.errors.APIError]:
    """The SDK's error for an answer with a status; looked up late, so that this module loads without the SDK."""
    from docker.errors import APIError

    return APIError


def engine_errors() -> tuple[type[Exception], ...]:
    """All that a call of the SDK may raise for the engine's sake, lost connections included."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return (DockerException, RequestException)


def sentence(error: Exception) -> str:
    from requests.exceptions import ConnectionError as NoConnection

    if isinstance(error, NoConnection):
        return f"the Docker engine at {socket_path()} does not answer any more; to mend it: {START}"
    return f"Docker refused: {str(getattr(error, 'explanation', None) or error).strip()}"


class ExecStream:
    """The connection of one started exec: feeds stdin and collects output, in tasks of its own, until it is closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stdin: bytes, limit: int) -> None:
        self._reader, self._writer = reader, writer
        self.stdout, self.stderr = Clip(limit), Clip(limit)
        self._spoke = asyncio.Event()
        self._feeding = asyncio.create_task(self._feed(stdin))
        self._collecting = asyncio.create_task(self._collect())

    @classmethod
    async def open(cls, path: str, exec_id: str, stdin: bytes, limit: int) -> ExecStream:
        """Starts the exec. SandboxError where the engine refuses, as when the container has ended."""
        reader, writer = await asyncio.open_unix_connection(path)
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        head = (
            f"POST /exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            writer.close()
            raise SandboxError("the Docker engine closed the connection; look at its log and run again") from error
        if b" 101 " not in answer.split(b"\r\n", 1)[0]:
            text = (await reader.read(2000)).decode(errors="replace").strip()
            writer.close()
            raise SandboxError(f"Docker would not run a command in the box ({text}); run the rollout again")
        return cls(reader, writer, stdin, limit)

    async def finished(self, timeout: float) -> None:
        """Until the engine closes the stream; TimeoutError leaves it open and whole."""
        await asyncio.wait_for(asyncio.shield(self._collecting), timeout)

    async def spoke(self, timeout: float) -> None:
        """Until the first byte of output."""
        await asyncio.wait_for(self._spoke.wait(), timeout)

    async def _collect(self) -> None:
        while True:
            try:
                stream, length = struct.unpack(">BxxxL", await self._reader.readexactly(8))
                clip = self.stderr if stream == 2 else self.stdout
                while length:
                    data = await self._reader.read(min(length, 65536))
                    if not data:
                        return
                    clip.add(data)
                    self._spoke.set()
                    length -= len(data)
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def _feed(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
            self._writer.write_eof()
        except OSError:
            return  # the command ended without reading its input

    def close(self) -> None:
        self._feeding.cancel()
        self._collecting.cancel()
        self._writer.close()
