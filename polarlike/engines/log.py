"""An engine's own evidence: what it was given and what it returned, one JSON line a request.

It knows nothing of the proxy's record; tests and the end of a run compare the two. What holds: a line is written to
the operating system before `write` returns, so a killed process loses no request that was answered; lines
stand in the order in which requests ended; a torn last line is left where it is and skipped on reading.

`write` blocks for as long as the disk takes: call it from a worker thread, never from the event loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polarlike.engines.base import EngineError
from polarlike.records import Ids, Logprobs, UsageError


@dataclass(slots=True)
class LogEntry:
    """One request as the engine saw it. prompt_ids: int32 [P]. completion_ids, logprobs, versions: int32, float32,
    int32 [C]. finish_reason: stop | length | abort | error. temperature: what was really sampled at."""

    request_id: str
    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids
    finish_reason: str
    temperature: float


class EngineLog:
    """Appends entries to one file; any thread may write. Without a path it does nothing."""

    def __init__(self, path: Path | None):
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            _end_torn_line(self._file)
        except OSError as e:
            raise UsageError(f"The engine's log {path} cannot be written ({e}); give another file.") from e

    def write(self, entry: LogEntry) -> None:
        """Raises EngineError where the disk does not take it."""
        if self._file is None:
            return
        line = orjson.dumps(
            {name: getattr(entry, name) for name in LogEntry.__slots__},
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
        )
        with self._lock:
            if self._file is None:
                raise RuntimeError("the engine's log is closed")
            try:
                _append_whole(self._file, line)
            except OSError as e:
                raise EngineError(
                    f"The engine's log {self._file.name} cannot be written ({e.strerror}); free space and go on."
                ) from e

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _append_whole(file: FileIO, line: bytes) -> None:
    """The whole line or, where the disk is full, nothing of it: half a line would spoil the next one too."""
    start, rest = file.seek(0, 2), line
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def _end_torn_line(file: FileIO) -> None:
    """A line that a killed process left half written gets an end, so that the next one starts on its own."""
    if file.seek(0, 2) == 0:
        return
    file.seek(-1, 2)
    if file.read(1) != b"\n":
        file.write(b"\n")


def read_log(path: Path) -> dict[str, LogEntry]:
    """Every entry by request id, the last one where an id occurs twice. Lines that are no whole JSON object (torn by a
    kill) are skipped. Raises UsageError if there is no such file."""
    entries: dict[str, LogEntry] = {}
    try:
        file = path.open("rb")
    except OSError as e:
        raise UsageError(f"The engine's log {path} cannot be read ({e}).") from e
    with file:
        for line in file:
            try:
                raw = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            entries[raw["request_id"]] = _entry(raw)
    return entries


def _entry(raw: dict[str, Any]) -> LogEntry:
    return LogEntry(
        request_id=raw["request_id"],
        prompt_ids=np.asarray(raw["prompt_ids"], np.int32),
        completion_ids=np.asarray(raw["completion_ids"], np.int32),
        logprobs=np.asarray(raw["logprobs"], np.float32),
        versions=np.asarray(raw["versions"], np.int32),
        finish_reason=raw["finish_reason"],
        temperature=raw["temperature"],
    )
