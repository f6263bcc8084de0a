"""How a box reaches a socket of ours: two ways, one choice a provider.

`NamespaceReach` opens the socket inside the box's network namespace (root on the host). `SocketReach` puts a Unix
socket into a folder that is mounted in the box, and starts a small forwarder there; it needs no more than the use of
Docker. In both, the box sees http://127.0.0.1:PORT, and nobody else's box reaches the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sandbox import netns
from sandbox.base import Mount, Toolbox

if TYPE_CHECKING:
    from sandbox.docker_box import DockerBox

INSIDE = "/run/polarlike"
FORWARDER = Path(__file__).with_name("forwarder.py")
FOLDER_PREFIX = "polarlike-sock-"


class Reach(Protocol):
    folder: Path | None

    def mounts(self) -> list[Mount]:
        """What the box must have mounted, known before it is made."""
        ...

    async def listen(self, box: DockerBox, port: int) -> socket.socket: ...

    async def again(self, box: DockerBox) -> None:
        """After every process of the box was killed: whatever this way needs inside is started again."""
        ...

    async def close(self) -> None: ...


class NamespaceReach:
    """Sockets in the box's own namespace; nothing runs in the box for them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._sockets: list[socket.socket] = []

    def mounts(self) -> list[Mount]:
        return []

    async def listen(self, box: DockerBox, port: int) -> socket.socket:
        listener = await asyncio.to_thread(netns.listen_in, box.pid, port)
        self._sockets.append(listener)
        return listener

    async def again(self, box: DockerBox) -> None:
        return None

    async def close(self) -> None:
        for listener in self._sockets:
            listener.close()


class SocketReach:
    """Unix sockets in a temporary folder of this box alone, and one forwarder a port inside."""

    def __init__(self, python: Toolbox) -> None:
        self._python = python
        # Not in the run's folder: a Unix socket's path may have 107 bytes.
        top = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.folder: Path | None = top
        self._shared = top / "in"
        # Only the inner folder is mounted. It is open to the box's root, who has no capability to pass by modes; the
        # outer one is shut to the host's other users.
        self._shared.mkdir()
        self._shared.chmod(0o755)
        shutil.copy(FORWARDER, self._shared / FORWARDER.name)
        self._sockets: dict[int, socket.socket] = {}

    def mounts(self) -> list[Mount]:
        python = [self._python.mount] if self._python.mount else []
        return [Mount(str(self._shared), INSIDE), *python]

    async def listen(self, box: DockerBox, port: int) -> socket.socket:
        path = self._shared / f"{port}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(128)
        listener.setblocking(False)
        self._sockets[port] = listener
        await self._forward(box, port)
        return listener

    async def _forward(self, box: DockerBox, port: int) -> None:
        python = f"{self._python.root}/bin/python"
        await box.launch([python, "-I", f"{INSIDE}/{FORWARDER.name}", str(port), f"{INSIDE}/{port}.sock"])

    async def again(self, box: DockerBox) -> None:
        for port in self._sockets:
            await self._forward(box, port)

    async def close(self) -> None:
        for listener in self._sockets.values():
            listener.close()
        self.remove_folder(str(self.folder))

    @staticmethod
    def remove_folder(folder: str) -> None:
        """Removes a folder that this class made; anything else that a label may say is left alone."""
        place = Path(folder)
        if place.parent == Path(tempfile.gettempdir()) and place.name.startswith(FOLDER_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(place)
