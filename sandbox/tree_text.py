"""One changed path of a work tree as text for people: unified lines, modes, link targets; binary content by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.tree import Entry


def difference(path: str, old: Entry | None, new: Entry | None) -> str:
    """`old` None: the path is new; `new` None: it is gone."""
    head = f"diff {path}\n"
    if old is not None and new is not None and old.mode != new.mode:
        head += f"mode {old.mode:o} -> {new.mode:o}\n"
    if old is None and new is not None:
        head += f"new {new.kind} mode {new.mode:o}\n"
    if new is None:
        head += f"deleted {old.kind if old else 'path'}\n"
    before, after = _lines(old), _lines(new)
    if before is None or after is None:
        same = old is not None and new is not None and old.data == new.data
        return head + ("" if same else "binary content differs\n")
    names = (f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null")
    body = difflib.unified_diff(before, after, *names, lineterm="")
    return head + "".join(f"{line}\n" for line in body)


def _lines(entry: Entry | None) -> list[str] | None:
    """Text lines; None for binary content. A link reads as one line that shows its target."""
    if entry is None or entry.kind == "folder":
        return []
    if entry.link is not None:
        return [f"-> {entry.link}"]
    data = entry.data or b""
    if b"\0" in data:
        return None
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError:
        return None
