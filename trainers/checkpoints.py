"""Checkpoint folders that are whole or not there. Knows files alone: no torch, no model.

A folder is filled under a hidden name, its files are listed with size and SHA-256 in `manifest.json`, all is synced,
and only then is it renamed. What holds: a folder that `check` accepts has every byte that was written to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polarlike.records import PolarError

MANIFEST = "manifest.json"


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """What fails inside, a full disk above all, becomes one sentence: safetensors and torch raise their own errors."""
    try:
        yield
    except PolarError:
        raise
    except Exception as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise PolarError(f"{folder} could not be saved ({reason}); mend that, and the same command goes on.") from e


def write(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes `folder` with what `fill` writes into the path it is given; a folder of that name is replaced.

    If the process dies in between, the old folder stands, or (between two renames) lies beside it as `.NAME.replaced`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing, replaced = folder.parent / f".{folder.name}.writing", folder.parent / f".{folder.name}.replaced"
    for left in (writing, replaced):
        shutil.rmtree(left, ignore_errors=True)  # of a process that died here
    with saving(folder):
        writing.mkdir()
        fill(writing)
        listing = {str(path.relative_to(writing)): _fingerprint(path) for path in _files(writing)}
        (writing / MANIFEST).write_text(json.dumps(listing, indent=1, sort_keys=True))
    for path in (*_files(writing), writing):
        _sync(path)
    if folder.exists():
        folder.rename(replaced)
    writing.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def check(folder: Path) -> None:
    """Raises PolarError unless every file that was written is there, byte for byte."""
    if not (folder / MANIFEST).is_file():
        raise PolarError(f"{folder} is not a whole checkpoint: it has no {MANIFEST}; resume from an earlier one.")
    try:
        listing: dict[str, list[str | int]] = json.loads((folder / MANIFEST).read_text())
    except ValueError:
        raise PolarError(f"The {MANIFEST} of checkpoint {folder} is torn; resume from an earlier one.") from None
    for name, wanted in listing.items():
        if not (folder / name).is_file() or _fingerprint(folder / name) != wanted:
            raise PolarError(f"The file {name} of checkpoint {folder} is torn; resume from an earlier one.")


def newest(parent: Path, pattern: str = "*") -> Path | None:
    """The whole checkpoint in `parent` whose name sorts last (names should be zero-padded), or None. A hidden folder is
    none, even if it is whole: the process died before it was renamed."""
    for folder in sorted((p for p in parent.glob(pattern) if not p.name.startswith(".")), reverse=True):
        try:
            check(folder)
        except PolarError:
            continue
        return folder
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> list[str | int]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
