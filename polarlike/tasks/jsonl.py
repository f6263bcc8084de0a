"""A file of tasks, one JSON object a line: for tasks small enough to write as text.

    {"task_id": "greet", "instruction": "Write hello to out.txt.", "files": {"notes.txt": "..."},
     "test_script": "grep -q hello out.txt && echo 1 > ${POLAR_LOGS:-/logs}/verifier/reward.txt || ..."}

Knows this format alone. What holds: an unknown key is an error with its line. Files given as text are laid into a cache
folder named by their content, so the same line always gives the same paths, also after a restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field

from polarlike.records import Environment, Limits, Task, UsageError
from polarlike.strict import Strict, check


class LimitsRow(Strict):
    """Seconds, and a count of model calls (0 is no limit)."""

    agent_s: float = Field(default=600.0, gt=0)
    verifier_s: float = Field(default=600.0, gt=0)
    max_calls: int = Field(default=0, ge=0)


class Row(Strict):
    """One line. Exactly one of test_script (bash, leaves a reward as a Harbor test.sh does) and verifier is given."""

    task_id: str = Field(min_length=1)
    instruction: str = Field(min_length=1)
    files: dict[str, str] = Field(default_factory=dict)
    test_script: str | None = None
    verifier: dict[str, Any] | None = None
    solution_script: str | None = None
    limits: LimitsRow = Field(default_factory=LimitsRow)
    image: str | None = None
    workdir: str = "/app"
    env: dict[str, str] = Field(default_factory=dict)
    memory_mb: int = Field(default=1024, gt=0)
    cpus: float = Field(default=1.0, gt=0)
    pids: int = Field(default=256, gt=0)
    network: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)


def load_jsonl(path: Path) -> list[Task]:
    """The file's tasks in order; empty lines are skipped. Raises UsageError with the line."""
    tasks = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            tasks.append(_task(_row(line, f"{path}:{number}"), path, f"{path}:{number}"))
    if not tasks:
        raise UsageError(f"{path} holds no task; write one JSON object a line.")
    return tasks


def _row(line: str, where: str) -> Row:
    try:
        table = json.loads(line)
    except ValueError as e:
        raise UsageError(f"{where}: the line is not JSON: {e}.") from None
    if not isinstance(table, dict):
        raise UsageError(f"{where}: the line is no JSON object; write one task a line in braces.")
    row = check(Row, table, where)
    if (row.test_script is None) == (row.verifier is None):
        raise UsageError(f"{where}: give exactly one of 'test_script' and 'verifier'.")
    if row.verifier is not None and not isinstance(row.verifier.get("type"), str):
        raise UsageError(f"{where}: the verifier has no 'type'; name one, for example \"harbor\".")
    return row


def _task(row: Row, path: Path, where: str) -> Task:
    parts = {f"files/{_relative(name, where)}": text for name, text in row.files.items()}
    if row.test_script is not None:
        parts["tests/test.sh"] = row.test_script
    if row.solution_script is not None:
        parts["solution/solve.sh"] = row.solution_script
    folder = _laid_out(parts)
    if row.verifier is None:
        verifier: dict[str, Any] = {"type": "harbor", "tests": str(folder / "tests")}
    else:
        verifier = dict(row.verifier)
        if isinstance(verifier.get("tests"), str):
            verifier["tests"] = str((path.parent / verifier["tests"]).resolve())
    return Task(
        task_id=row.task_id,
        instruction=row.instruction,
        environment=Environment(
            base_image=row.image,
            copies=[(str(folder / "files"), row.workdir)] if row.files else [],
            workdir=row.workdir,
            env=row.env,
            memory_mb=row.memory_mb,
            cpus=row.cpus,
            pids=row.pids,
            network=row.network,
        ),
        verifier=verifier,
        limits=Limits(row.limits.agent_s, row.limits.verifier_s, row.limits.max_calls),
        solution=str(folder / "solution") if row.solution_script is not None else None,
        metadata=row.metadata,
        path=str(path.resolve()),
    )


def _relative(name: str, where: str) -> str:
    if name.startswith("/") or posixpath.normpath(name) != name or name.split("/")[0] in ("..", "."):
        raise UsageError(f"{where}: the file {name!r} must be a plain path under the work folder.")
    return name


def _laid_out(parts: dict[str, str]) -> Path:
    """A folder with these files, named by their content; made whole or not at all."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polarlike" / "tasks"
    folder = home / digest
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
    for name, text in parts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    made.chmod(0o755)
    try:
        made.rename(folder)
    except OSError:  # another process was quicker, and made the same
        shutil.rmtree(made)
        if not folder.is_dir():
            raise
    return folder
