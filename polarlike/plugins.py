"""Extensions by name. Harnesses, sandboxes, verifiers, engines, trainers, dialects and builders register through entry
points; ours use the same door as a stranger's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from polarlike.records import UsageError

_ONE = {"harnesses": "harness", "sandboxes": "sandbox"}


def names(kind: str) -> list[str]:
    """What is registered under polarlike.KIND, for example `harnesses`."""
    return sorted({e.name for e in entry_points(group=f"polarlike.{kind}")})


def load(kind: str, name: str) -> Any:
    """The object registered as `name`. Raises UsageError with the nearest name, or with what must be installed."""
    for entry in entry_points(group=f"polarlike.{kind}"):
        if entry.name == name:
            try:
                return entry.load()
            except ModuleNotFoundError as e:
                raise UsageError(f"{name} needs the Python package {e.name}; install it with pip.") from e
    raise UsageError(f"There is no {_ONE.get(kind, kind.removesuffix('s'))} named {name!r}{nearest(name, names(kind))}")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence, its full stop included: the nearest known name, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}."
