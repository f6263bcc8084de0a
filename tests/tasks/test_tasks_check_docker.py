"""The example tasks in real containers, where the paths are /app, /tests, /logs and /solution."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlike.plugins import load
from polarlike.tasks import load_tasks
from polarlike.tasks.check import check_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.docker
async def test_one_task_of_each_kind_grades_as_it_should_in_containers(tmp_path: Path) -> None:
    tasks = {t.metadata["kind"]: t for t in load_tasks(str(EXAMPLES / "tasks/heldout"))}
    assert set(tasks) == {"operator", "line", "rename"}
    provider = load("sandboxes", "docker")(state_dir=tmp_path, run_label="task-checks")
    try:
        checks = await check_tasks(list(tasks.values()), provider)
    finally:
        await provider.close()
    assert {c.task_id: c.problems for c in checks} == {t.task_id: [] for t in tasks.values()}
