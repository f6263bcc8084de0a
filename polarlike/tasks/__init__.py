"""Where tasks come from: `load_tasks` reads what the user named; each format has its own module.

Loaders read files and start nothing. `boxes` lays a task into a sandbox and grades work done there, `check` proves that
tasks grade as they should.
"""

from __future__ import annotations

from pathlib import Path

from polarlike.records import Task, UsageError
from polarlike.tasks.harbor import load_harbor
from polarlike.tasks.jsonl import load_jsonl

__all__ = ["load_tasks"]


def load_tasks(spec: str) -> list[Task]:
    """The tasks that `spec` names: a Harbor task folder, a folder of them, harbor:FOLDER, or a .jsonl file.

    In the order of the file, or by folder name. Raises UsageError in one sentence that says what to do.
    """
    if not spec:
        raise UsageError("Name the tasks: a Harbor task folder, a folder of them or a .jsonl file.")
    kind, _, rest = spec.partition(":")
    path = Path(rest if kind == "harbor" and rest else spec)
    if not path.exists():
        if rest and kind != "harbor" and kind.isalpha() and len(kind) > 1:
            raise UsageError(f"There is no kind of tasks {kind!r}; give a folder, a .jsonl file or harbor:FOLDER.")
        raise UsageError(f"There are no tasks at {path}; give a Harbor task folder, a folder of them or a .jsonl file.")
    if path.is_dir():
        tasks = load_harbor(path)
    elif path.suffix == ".jsonl" and kind != "harbor":
        tasks = load_jsonl(path)
    else:
        raise UsageError(f"{path} is no task file; give a Harbor task folder, a folder of them or a .jsonl file.")
    _check_unique(tasks, spec)
    return tasks


def _check_unique(tasks: list[Task], spec: str) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise UsageError(f"Two tasks in {spec} are called {task.task_id!r}; give each its own task_id.")
        seen.add(task.task_id)
