"""Files below another root folder, reached from outside by descriptors: put in, read back, walked as a tree. Blocking.

Knows: Linux paths, and that whatever lies below the root may be hostile and may change at any moment. Does not know
containers. Needs the right to enter the root (for a container's: to be root on the host).

What holds: no path leads out. Absolute links and `..` are resolved below the root by the kernel (`openat2`, Linux 5.6);
in a tree that is walked, laid or copied no link is followed at all, and other mounts are left out. Only a regular file
is ever opened for its content. Nothing is loaded or run from below the root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from sandbox.base import SandboxError
from sandbox.tree import Entry, Item, TreeError, TreePatch, checked_path, skipped

T = TypeVar("T")

READ_LIMIT = 256 << 20
_OPENAT2 = 437  # the same number on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
_SCOPED = _IN_ROOT | _NO_MAGICLINKS
_PLAIN = _BENEATH | _NO_SYMLINKS | _NO_XDEV
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)


class _How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


_libc = ctypes.CDLL(None, use_errno=True)


def _open(at: int, path: str, flags: int, resolve: int) -> int:
    how = _How(flags | os.O_CLOEXEC, 0, resolve)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    handle: int = _libc.syscall(_OPENAT2, at, os.fsencode(path), ctypes.byref(how), size)
    if handle < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return handle


@contextlib.contextmanager
def _opened(at: int, path: str, flags: int, resolve: int) -> Iterator[int]:
    handle = _open(at, path, flags, resolve)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """A refusal of the system as a fault of the box, but a name that is too long: that is whoever made the tree."""
    try:
        yield
    except OSError as error:
        kind = TreeError if error.errno == errno.ENAMETOOLONG else SandboxError
        raise kind(f"{what}: {error.strerror or error}") from error


class RootedFiles:
    """The files below one root. All paths are absolute; what is put in belongs to the caller (root)."""

    def __init__(self, root: str) -> None:
        """OSError where the root cannot be entered or the kernel has no `openat2`."""
        self._lock = threading.Lock()
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(_open(self._root, ".", os.O_PATH, _SCOPED))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """What still runs in another thread goes on with a descriptor of its own; what comes later is a fault."""
        with self._lock:
            if self._root >= 0:
                os.close(self._root)
            self._root = -1

    @contextlib.contextmanager
    def _entered(self) -> Iterator[int]:
        with self._lock:
            if self._root < 0:
                raise SandboxError("the box has been stopped; its files are gone")
            root = os.dup(self._root)
        try:
            yield root
        finally:
            os.close(root)

    def put(self, host: Path, path: str) -> None:
        """A file to `path`, or a folder's contents into `path`. Modes are kept; symbolic links stay links."""
        if not host.exists():
            raise SandboxError(f"{host} does not exist, so it cannot be copied into the box")
        with _faults(f"{host} could not be copied into the box at {path}"):
            if host.is_dir():
                with self._folder(path) as place:
                    _put_folder(host, place)
            else:
                with self._folder(_parent(path)) as place:
                    _put_file(host.resolve(), place, _name(path))

    def write(self, path: str, data: bytes, mode: int) -> None:
        with _faults(f"{path} could not be written in the box"), self._folder(_parent(path)) as place:
            _lay_file(place, _name(path), io.BytesIO(data), mode)

    def read(self, path: str) -> bytes | None:
        """None where there is no regular file; a symbolic link is not followed."""
        with _faults(f"{path} could not be read from the box"), self._entered() as root:
            handle = _regular(root, path, _SCOPED)
            if handle is None:
                return None
            with handle:
                data = handle.read(READ_LIMIT + 1)
        if len(data) > READ_LIMIT:
            raise SandboxError(f"{path} in the box holds more than {READ_LIMIT >> 20} MiB; it is not read")
        return data

    def walk(self, folder: str, use: Callable[[Iterator[Item]], T]) -> T:
        """`use` of the items under `folder`, which lives while they are used. Nothing where a link or a file stands in
        the folder's place."""
        with _faults(f"the work folder {folder} could not be read from the box"), self._entered() as root:
            try:
                top = _open(root, folder, os.O_PATH | os.O_NOFOLLOW, _SCOPED)
            except OSError as error:
                if error.errno in _ABSENT:
                    raise SandboxError(f"the work folder {folder} is gone from the box") from error
                raise
            try:
                return use(_items(top))
            finally:
                os.close(top)

    def lay(self, patch: TreePatch, folder: str) -> None:
        """Lays the patch over a folder. Never writes through a symbolic link: one in the way is replaced."""
        with _faults("the captured changes could not be laid over the work folder"), self._folder(folder) as top:
            for path in patch.stale_paths():
                _remove_below(top, path)
            paths = sorted(checked_path(path) for path in patch.files)
            for path in paths:
                _lay(top, path, patch.files[path])
            # Folders get their modes last and from the bottom up, as whoever packed them left them.
            for path in reversed(paths):
                if patch.files[path].kind == "folder":
                    with _opened(top, path, _FOLDER, _PLAIN) as place:
                        os.fchmod(place, patch.files[path].mode)

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """A descriptor of a folder, which is made if missing; links on the way are followed below the root."""
        parts = [part for part in path.split("/") if part]
        with self._entered() as root:
            handle = _open(root, ".", _FOLDER, _SCOPED)
            try:
                for depth, part in enumerate(parts, 1):
                    below = _below(root, handle, "/".join(parts[:depth]), part)
                    os.close(handle)
                    handle = below
                yield handle
            finally:
                os.close(handle)


def _below(root: int, parent: int, path: str, name: str) -> int:
    try:
        return _open(root, path, _FOLDER, _SCOPED)
    except FileNotFoundError:
        return _real_folder(parent, name)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


# ---------------------------------------------------------------- reading


def _regular(at: int, path: str, resolve: int) -> IO[bytes] | None:
    """A file opened for reading; None where there is no regular one. It is looked at before it is opened, so that a
    pipe cannot hold us and a device does not see us."""
    try:
        found = _open(at, path, os.O_PATH | os.O_NOFOLLOW, resolve)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        return os.fdopen(os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC), "rb")
    finally:
        os.close(found)


def _items(top: int) -> Iterator[Item]:
    """Items below an open folder, parents first. What vanishes meanwhile is left out."""
    pending = ["."]
    while pending:
        folder = pending.pop()
        try:
            handle = _open(top, folder, _FOLDER | os.O_NOFOLLOW, _PLAIN)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise
        try:
            for name in sorted(os.listdir(handle)):  # noqa: PTH208 - of a descriptor
                path = name if folder == "." else f"{folder}/{name}"
                item = None if skipped(path) else _item(top, handle, name, path)
                if item is not None:
                    yield item
                    if item.kind == "folder":
                        pending.append(path)
        finally:
            os.close(handle)


def _item(top: int, folder: int, name: str, path: str) -> Item | None:
    """None for what is gone, and for devices, sockets and pipes."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            return Item(path, "link", 0o777, 0, os.readlink(name, dir_fd=folder), io.BytesIO)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        return Item(path, "folder", info.st_mode & 0o777, 0, None, io.BytesIO)
    if stat.S_ISREG(info.st_mode):
        return Item(path, "file", info.st_mode & 0o777, info.st_size, None, _opener(top, path, info.st_size))
    return None


def _opener(top: int, path: str, size: int) -> Callable[[], IO[bytes]]:
    def opener() -> IO[bytes]:
        handle = _regular(top, path, _PLAIN)
        return io.BytesIO() if handle is None else io.BufferedReader(_Most(handle, size))

    return opener


class _Most(io.RawIOBase):
    """A file's first `size` bytes: one that grows while it is read holds what it held when it was counted."""

    def __init__(self, handle: IO[bytes], size: int) -> None:
        self._handle, self._left = handle, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._handle.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._handle.close()
        super().close()


# ---------------------------------------------------------------- writing


def _real_folder(parent: int, name: str) -> int:
    """A folder of that name, open, whatever else stood there; a new one has mode 755."""
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
            with _opened(parent, name, _FOLDER, _PLAIN) as made:
                os.fchmod(made, 0o755)
        try:
            return _open(parent, name, _FOLDER | os.O_NOFOLLOW, _BENEATH | _NO_SYMLINKS)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=parent)
    raise OSError(errno.EAGAIN, "it changes while it is written", name)


def _remove(parent: int, name: str) -> None:
    try:
        kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def _remove_below(top: int, path: str) -> None:
    """Nothing where a parent is missing or is no real folder."""
    try:
        with _opened(top, path.rpartition("/")[0] or ".", _FOLDER, _PLAIN) as parent:
            _remove(parent, _name(path))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def _lay_file(parent: int, name: str, source: IO[bytes], mode: int) -> None:
    _remove(parent, name)
    made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    with os.fdopen(made, "wb") as handle:
        shutil.copyfileobj(source, handle, 1 << 20)
        os.fchmod(made, mode)


def _lay_link(parent: int, name: str, target: str) -> None:
    _remove(parent, name)
    os.symlink(target, name, dir_fd=parent)


def _lay(top: int, path: str, entry: Entry) -> None:
    *parents, name = path.split("/")
    handle = os.dup(top)
    try:
        for part in parents:
            below = _real_folder(handle, part)
            os.close(handle)
            handle = below
        if entry.data is not None:
            _lay_file(handle, name, io.BytesIO(entry.data), entry.mode)
        elif entry.link is not None:
            _lay_link(handle, name, entry.link)
        else:
            os.close(_real_folder(handle, name))
    finally:
        os.close(handle)


def _put_file(host: Path, parent: int, name: str) -> None:
    info = host.stat()
    with host.open("rb") as source:
        _lay_file(parent, name, source, info.st_mode & 0o7777)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=parent, follow_symlinks=False)


def _put_folder(host: Path, place: int) -> None:
    """The contents of a host folder into an open one."""
    for found in sorted(host.iterdir()):
        if found.is_symlink():
            _lay_link(place, found.name, str(found.readlink()))
        elif found.is_dir():
            below = _real_folder(place, found.name)
            try:
                _put_folder(found, below)
                os.fchmod(below, found.stat().st_mode & 0o7777)
            finally:
                os.close(below)
        elif found.is_file():
            _put_file(found, place, found.name)
