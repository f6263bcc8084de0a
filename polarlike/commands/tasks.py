"""polar tasks check: doing nothing must score 0 and the solution 1."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polarlike.records import Score
from polarlike.rollouts.stage import make_provider
from polarlike.tasks import load_tasks
from polarlike.tasks.check import check_tasks


async def check(spec: str, sandbox: str, concurrency: int, console: Console) -> bool:
    """Prints a line a task; whether all are as they should be."""
    tasks = load_tasks(spec)
    with tempfile.TemporaryDirectory(prefix="polar-check-") as folder:
        provider = make_provider(sandbox, Path(folder), Path(folder).name, {})
        try:
            found = await check_tasks(tasks, provider, concurrency=concurrency)
        finally:
            await provider.close()
    table = Table()
    for name in ("task", "nothing", "solution", "seconds", "problems"):
        table.add_column(name, justify="left" if name in ("task", "problems") else "right")
    for one in found:
        table.add_row(one.task_id, _said(one.nothing), _said(one.oracle), f"{one.seconds:.1f}", " ".join(one.problems))
    console.print(table)
    good = sum(one.ok for one in found)
    console.print(f"{good} of {len(found)} tasks grade as they should.")
    return good == len(found)


def _said(score: Score | None) -> str:
    if score is None:
        return "-"
    return "unscored" if score.value is None else f"{score.value:g}"
