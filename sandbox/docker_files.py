"""Files of a container, by the engine's archive calls: put in, read back, walked as a tree. Blocking; runs in threads.

The engine reads and writes the container's file system itself, so it works in an image without tar, in a container that
has ended, and whatever the agent did to the programs in it. The engine does not see tmpfs mounts inside a box, which is
why boxes have none.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from sandbox import tree
from sandbox.base import SandboxError
from sandbox.docker_engine import api_error
from sandbox.tree import Item

T = TypeVar("T")

READ_LIMIT = 256 << 20
SPOOL = 32 << 20


class ContainerFiles:
    """The files of one container. All paths are absolute; what is put in belongs to root."""

    def __init__(self, api: Any, container_id: str) -> None:
        self._api = api
        self._id = container_id
        self._api_error = api_error()

    def put(self, host: Path, path: str) -> None:
        """A file to `path`, or a folder's contents into `path`. Modes are kept; symbolic links stay links."""
        if not host.exists():
            raise SandboxError(f"{host} does not exist, so it cannot be copied into the box")
        with tempfile.SpooledTemporaryFile(SPOOL) as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                if host.is_dir():
                    for item in sorted(host.iterdir()):
                        archive.add(item, item.name, filter=_as_root)
                else:
                    archive.add(host.resolve(), path.rpartition("/")[2], filter=_as_root)
            self.unpack(spool, path if host.is_dir() else _parent(path))

    def write(self, path: str, data: bytes, mode: int) -> None:
        spool = io.BytesIO()
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
            info = tarfile.TarInfo(path.rpartition("/")[2])
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
        self.unpack(spool, _parent(path))

    def unpack(self, spool: IO[bytes], folder: str) -> None:
        """Unpacks a tar in a folder of the box, which is made if missing."""
        for attempt in range(2):
            spool.seek(0)
            try:
                self._api.put_archive(self._id, folder, spool)
                return
            except self._api_error as error:
                if attempt or error.status_code != 404:
                    raise SandboxError(f"files could not be put into the box at {folder}: {error}") from error
                self._make(folder)

    def _make(self, folder: str) -> None:
        """By an archive too, unpacked in the deepest parent that exists, so that no existing folder's mode changes."""
        parts = folder.strip("/").split("/")
        known = next(depth for depth in range(len(parts) - 1, -1, -1) if self._exists(parts[:depth]))
        spool = io.BytesIO()
        with tarfile.open(fileobj=spool, mode="w") as archive:
            for depth in range(known + 1, len(parts) + 1):
                info = tarfile.TarInfo("/".join(parts[known:depth]))
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
        self._api.put_archive(self._id, "/" + "/".join(parts[:known]), spool.getvalue())

    def _exists(self, parts: list[str]) -> bool:
        """Asks for the headers of the path's archive alone. The root always exists."""
        if not parts:
            return True
        url = self._api._url("/containers/{0}/archive", self._id)
        return bool(self._api.head(url, params={"path": "/" + "/".join(parts)}).ok)

    def read(self, path: str) -> bytes | None:
        """None where there is no regular file; a symbolic link is not followed."""
        with tempfile.SpooledTemporaryFile(SPOOL) as spool:
            if not self._fetch(path, spool, READ_LIMIT):
                return None
            with tarfile.open(fileobj=spool, mode="r:") as archive:
                first = archive.next()
                handle = archive.extractfile(first) if first is not None and first.isreg() else None
                return handle.read() if handle is not None else None

    def walk(self, folder: str, use: Callable[[Iterator[Item]], T]) -> T:
        """`use` of the items under `folder`, from one archive on the host's disk."""
        with tempfile.SpooledTemporaryFile(SPOOL) as spool:
            if not self._fetch(folder, spool, tree.TREE_LIMIT):
                raise SandboxError(f"the work folder {folder} is gone from the box")
            with tarfile.open(fileobj=spool, mode="r:") as archive:
                return use(tree.walk_tar(archive))

    def _fetch(self, path: str, spool: IO[bytes], limit: int) -> bool:
        """Writes the engine's tar of `path` to `spool`; False where there is no such path."""
        try:
            chunks, _ = self._api.get_archive(self._id, path, chunk_size=1 << 20)
            total = 0
            for chunk in chunks:
                total += len(chunk)
                if total > limit:
                    raise SandboxError(f"{path} in the box holds more than {limit >> 20} MiB; it is not read")
                spool.write(chunk)
        except self._api_error as error:
            if error.status_code == 404:
                return False
            raise SandboxError(f"{path} could not be read from the box: {error}") from error
        spool.seek(0)
        return True


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
