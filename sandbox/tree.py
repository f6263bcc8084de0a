"""Work trees and the difference between two of them.

Knows: files, folders and symbolic links under one root, as a tar archive or a host folder shows them. Does not know:
git, Docker, or what a change means. The agent's own repository state is left out on purpose: every `.git` and
`__pycache__` is skipped at any depth, so committed, staged, unstaged and untracked changes are the same thing here, and
a hook or a bytecode file planted by the agent never reaches the box where its work is judged.

What holds: a path is relative, has no `..` and no empty part; a symbolic link is kept as its target text and never
followed; contents are bytes; modes are the nine permission bits (setuid and setgid are dropped).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zstandard

from sandbox.base import SandboxError
from sandbox.tree_text import difference

SKIPPED = frozenset({".git", "__pycache__"})
TREE_LIMIT = 4 << 30
PATCH_LIMIT = 64 << 20
_PERMISSIONS = 0o777
_FORMAT = 1


class TreeError(SandboxError):
    """A tree that cannot be taken or applied: too large, or with paths that leave it."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One path of a tree. A file has data, a symbolic link has link, a folder has neither."""

    mode: int
    data: bytes | None = None
    link: str | None = None

    @property
    def kind(self) -> str:
        return "file" if self.data is not None else "link" if self.link is not None else "folder"


@dataclass(slots=True, frozen=True)
class Stamp:
    """What a path was, without its content: digest is the SHA-256 of the data or of the link target, size in bytes."""

    kind: str
    mode: int
    digest: bytes
    size: int


Manifest = dict[str, Stamp]


@dataclass(slots=True, frozen=True)
class Item:
    """One path while a tree is walked; `open` gives a file's content once."""

    path: str
    kind: str
    mode: int
    size: int
    link: str | None
    open: Callable[[], IO[bytes]]


def checked_path(path: str) -> str:
    """The path itself, or TreeError where it is absolute, empty, or steps out with `..`."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise TreeError(f"the tree holds the path {path!r}, which leaves its folder; the patch is refused")
    return path


def skipped(path: str) -> bool:
    return not SKIPPED.isdisjoint(path.split("/"))


# ---------------------------------------------------------------- walking


def walk_tar(archive: tarfile.TarFile) -> Iterator[Item]:
    """Items of a tar archive whose single top folder is the root, as Docker's archive call makes it.

    Hard links come as files with the content of what they link to. Devices, sockets and pipes are left out.
    """
    for member in archive:
        _, _, path = member.name.strip("/").partition("/")
        if not path or skipped(path):
            continue
        checked_path(path)
        mode = member.mode & _PERMISSIONS
        if member.isdir():
            yield Item(path, "folder", mode, 0, None, io.BytesIO)
        elif member.issym():
            yield Item(path, "link", _PERMISSIONS, 0, member.linkname, io.BytesIO)
        elif member.isreg() or member.islnk():
            target = _link_target(archive, member) if member.islnk() else member
            yield Item(path, "file", mode, target.size, None, _tar_opener(archive, target))


def _link_target(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tarfile.TarInfo:
    try:
        return archive.getmember(member.linkname)
    except KeyError:
        raise TreeError(f"the archive's hard link {member.name!r} points at nothing in it") from None


def _tar_opener(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    def opener() -> IO[bytes]:
        handle = archive.extractfile(member)
        if handle is None:
            raise TreeError(f"the archive holds no content for {member.name!r}")
        return handle

    return opener


def walk_folder(root: Path) -> Iterator[Item]:
    """Items of a host folder, parents first; links to folders are links."""
    pending = [root]
    while pending:
        folder = pending.pop()
        for found in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = os.path.relpath(found.path, root)
            if skipped(path):
                continue
            info = found.stat(follow_symlinks=False)
            mode = stat.S_IMODE(info.st_mode) & _PERMISSIONS
            if stat.S_ISDIR(info.st_mode):
                yield Item(path, "folder", mode, 0, None, io.BytesIO)
                pending.append(Path(found.path))
            elif stat.S_ISLNK(info.st_mode):
                target = Path(found.path).readlink()
                yield Item(path, "link", _PERMISSIONS, 0, str(target), io.BytesIO)
            elif stat.S_ISREG(info.st_mode):
                yield Item(path, "file", mode, info.st_size, None, _file_opener(Path(found.path)))


def _file_opener(path: Path) -> Callable[[], IO[bytes]]:
    def opener() -> IO[bytes]:
        # O_NOFOLLOW: the path may have become a link since it was listed.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")

    return opener


# ---------------------------------------------------------------- comparing


def manifest_of(items: Iterable[Item], limit: int = TREE_LIMIT) -> Manifest:
    """Stamps of all items; TreeError where files add up to more than `limit` bytes."""
    return {item.path: stamp for item, stamp in _stamped(items, limit)}


def tree_of(items: Iterable[Item], limit: int = PATCH_LIMIT) -> dict[str, Entry]:
    """All items with their content, in memory."""
    total = 0
    tree: dict[str, Entry] = {}
    for item in items:
        tree[item.path] = entry = _entry(item)
        total = _bounded(total + len(entry.data or b""), limit, "a work tree")
    return tree


def compare(start: Mapping[str, Stamp], items: Iterable[Item], limit: int = PATCH_LIMIT) -> TreePatch:
    """What turns the tree of `start` into the tree of `items`; changed files may hold `limit` bytes together."""
    patch, seen, total = TreePatch(), set[str](), 0
    for item, stamp in _stamped(items, TREE_LIMIT):
        seen.add(item.path)
        if start.get(item.path) == stamp:
            continue
        total = _bounded(total + stamp.size, limit, "the changed files")
        entry = _entry(item)
        patch.files[item.path] = entry
        if item.path in start:
            patch.modified.append(item.path)
    patch.deleted = sorted(path for path in start if path not in seen)
    patch.modified.sort()
    return patch


def _stamped(items: Iterable[Item], limit: int) -> Iterator[tuple[Item, Stamp]]:
    total = 0
    for item in items:
        total = _bounded(total + item.size, limit, "a work tree")
        yield item, _stamp(item)


def _stamp(item: Item) -> Stamp:
    if item.kind == "file":
        digest = hashlib.sha256()
        with item.open() as handle:
            while data := handle.read(1 << 20):
                digest.update(data)
        return Stamp("file", item.mode, digest.digest(), item.size)
    text = os.fsencode(item.link) if item.link is not None else b""
    return Stamp(item.kind, item.mode, hashlib.sha256(text).digest(), len(text))


def _entry(item: Item) -> Entry:
    if item.kind == "file":
        with item.open() as handle:
            return Entry(item.mode, data=handle.read())
    return Entry(item.mode, link=item.link)


def _bounded(total: int, limit: int, what: str) -> int:
    if total > limit:
        raise TreeError(f"{what} hold more than {limit >> 20} MiB; delete build products there or raise the limit")
    return total


# ---------------------------------------------------------------- the patch


@dataclass(slots=True)
class TreePatch:
    """A work tree against an earlier state of it.

    files: path -> entry of every added or changed path. deleted: paths that are gone, sorted. modified: those of
    `files` that existed before, sorted; a path whose kind changed is among them.
    """

    files: dict[str, Entry] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    modified: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.files and not self.deleted

    def summary(self) -> dict[str, Any]:
        """added, modified, deleted: sorted paths; counts: how many of each; bytes: of all files together."""
        known = set(self.modified)
        paths = {
            "added": sorted(path for path in self.files if path not in known),
            "modified": list(self.modified),
            "deleted": list(self.deleted),
        }
        size = sum(len(entry.data or b"") for entry in self.files.values())
        return {**paths, "counts": {name: len(found) for name, found in paths.items()}, "bytes": size}

    def to_bytes(self) -> bytes:
        """zstd over a tar: a manifest first, then one member a path. Equal patches give equal bytes."""
        head = json.dumps({"format": _FORMAT, "deleted": self.deleted, "modified": self.modified}).encode()
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
            _add(archive, "manifest.json", Entry(0o644, data=head))
            for path in sorted(self.files):
                _add(archive, f"tree/{path}", self.files[path])
        return zstandard.ZstdCompressor(level=9).compress(raw.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes, limit: int = 4 * PATCH_LIMIT) -> TreePatch:
        """The inverse of `to_bytes`; TreeError for other bytes, unsafe paths, or more than `limit` bytes unpacked."""
        try:
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                raw = reader.read(limit + 1)
            _bounded(len(raw), limit, "the stored changes")
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
                head = json.loads(_tar_opener(archive, archive.getmember("manifest.json"))().read())
                files = {item.path: _entry(item) for item in walk_tar(archive)}
            if head["format"] != _FORMAT:
                raise TreeError(f"this patch has format {head['format']}; update polarlike to read it")
            paths = [checked_path(path) for path in head["deleted"]]
            return cls(files, paths, [checked_path(path) for path in head["modified"]])
        except (zstandard.ZstdError, tarfile.TarError, KeyError, ValueError) as error:
            raise TreeError(f"these bytes are not a stored patch ({error}); collect the rollout again") from error

    def tar(self) -> bytes:
        """The entries as a plain tar owned by root, for unpacking over a tree once `stale_paths` are gone."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(self.files):
                _add(archive, checked_path(path), self.files[path])
        return raw.getvalue()

    def stale_paths(self) -> list[str]:
        """What must go before the entries are laid down: deleted paths, and what a file or link takes the place of."""
        stale = [*self.deleted, *(path for path, entry in self.files.items() if entry.kind != "folder")]
        return sorted(checked_path(path) for path in stale)

    def apply_to(self, root: Path) -> None:
        """Lays the patch over a host folder. Never writes through a symbolic link: one in the way is replaced."""
        for path in self.stale_paths():
            _remove(root, path)
        paths = sorted(checked_path(path) for path in self.files)
        for path in paths:
            _lay(root, path, self.files[path])
        # Folders get their modes last and from the bottom up: one of them may forbid writing into it.
        for path in reversed(paths):
            if self.files[path].kind == "folder":
                (root / path).chmod(self.files[path].mode)

    def diff(self, start: Mapping[str, Entry]) -> str:
        """Unified text for people, against the start tree (see `tree_of`). Binary content and modes are named only."""
        parts = [difference(path, start.get(path), None) for path in self.deleted]
        parts += [difference(path, start.get(path), entry) for path, entry in sorted(self.files.items())]
        return "".join(parts)


def _add(archive: tarfile.TarFile, name: str, entry: Entry) -> None:
    info = tarfile.TarInfo(name)
    info.mode = entry.mode
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    elif entry.data is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = len(entry.data)
    archive.addfile(info, io.BytesIO(entry.data) if entry.data else None)


def _inside(root: Path, path: str) -> Path | None:
    """The place of `path`, or None where a parent is missing or is no real folder (a link is not)."""
    place = root
    for part in path.split("/")[:-1]:
        place = place / part
        if place.is_symlink() or not place.is_dir():
            return None
    return root / path


def _remove(root: Path, path: str) -> None:
    place = _inside(root, path)
    if place is None:
        return
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _lay(root: Path, path: str, entry: Entry) -> None:
    parts = path.split("/")
    for depth in range(1, len(parts)):
        _folder(root.joinpath(*parts[:depth]))
    place = root / path
    if entry.data is not None:
        place.write_bytes(entry.data)
        place.chmod(entry.mode)
    elif entry.link is not None:
        place.symlink_to(entry.link)
    else:
        _folder(place)


def _folder(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()
    place.mkdir(exist_ok=True)
