"""Proves that tasks grade as they should: doing nothing scores 0, the task's own solution scores 1.

Knows tasks and sandboxes; knows no harness and no policy. What holds: both are graded on the very path of a rollout
(the work tree is captured in one box and laid over pristine files in another), so a task that passes here can be
learned from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polarlike.records import Score, Task
from polarlike.tasks.boxes import grade, open_task_box
from sandbox.base import RunResult, Sandbox, SandboxError, SandboxProvider

_SOLVE = 'exec bash "$(dirname "${POLAR_TESTS:-/tests}")/solution/solve.sh"'


@dataclass(slots=True)
class TaskCheck:
    """What became of one task. nothing, oracle: scores, None where it did not come to that. problems: sentences."""

    task_id: str
    nothing: Score | None = None
    oracle: Score | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


async def check_tasks(
    tasks: Sequence[Task],
    provider: SandboxProvider,
    *,
    concurrency: int = 2,
    on_done: Callable[[TaskCheck], None] = lambda check: None,
) -> list[TaskCheck]:
    """Checks each task, `concurrency` of them at a time; in the order given. `on_done` is called as each ends."""
    places = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> TaskCheck:
        async with places:
            check = await check_task(task, provider)
        on_done(check)
        return check

    return list(await asyncio.gather(*(one(task) for task in tasks)))


async def check_task(task: Task, provider: SandboxProvider) -> TaskCheck:
    """Doing nothing and the oracle, each in boxes of its own."""
    started = time.monotonic()
    check = TaskCheck(task.task_id)
    check.nothing = await _attempt(task, provider, check, solve=False)
    if task.solution is None:
        check.problems.append("There is no solution/solve.sh, so nothing shows that the task can be solved.")
    else:
        check.oracle = await _attempt(task, provider, check, solve=True)
    _expect(check, "Doing nothing", check.nothing, 0.0)
    _expect(check, "The solution", check.oracle, 1.0)
    check.seconds = time.monotonic() - started
    return check


async def _attempt(task: Task, provider: SandboxProvider, check: TaskCheck, *, solve: bool) -> Score | None:
    label = "oracle" if solve else "nothing"
    try:
        box = await open_task_box(provider, task, f"{task.task_id}-{label}")
        try:
            if solve:
                _expect_ended(check, task, await _solve(task, box))
            patch = await box.patch()
        finally:
            await asyncio.shield(box.stop())
    except SandboxError as e:
        check.problems.append(f"The box failed: {e}")
        return None
    return await grade(provider, task, patch, name=f"{task.task_id}-{label}-grade")


async def _solve(task: Task, box: Sandbox) -> RunResult:
    assert task.solution is not None
    await box.put(Path(task.solution), "/solution")
    env = task.metadata.get("solution_env", {})
    return await box.run(["bash", "-c", _SOLVE], timeout=task.limits.agent_s, env=env)


def _expect_ended(check: TaskCheck, task: Task, result: RunResult) -> None:
    if result.timed_out:
        check.problems.append(f"The solution did not end within its {task.limits.agent_s:g} seconds.")
    elif result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        check.problems.append(f"The solution ended with code {result.exit_code}: {said[-1] if said else 'no message'}.")


def _expect(check: TaskCheck, who: str, score: Score | None, value: float) -> None:
    if score is None:
        return
    if score.value is None:
        check.problems.append(f"{who} is unscored: {score.reason}")
    elif score.value != value:
        check.problems.append(f"{who} scores {score.value:g} and should score {value:g}.")
