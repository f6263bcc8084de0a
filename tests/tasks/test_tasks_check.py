"""The proof that a task grades as it should."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarlike.records import Environment, Limits, Task
from polarlike.tasks.check import TaskCheck, check_tasks
from sandbox.local_box import LocalProvider

GRADE = 'mkdir -p "$POLAR_LOGS/verifier"; {} > "$POLAR_LOGS/verifier/reward.txt"'
HONEST = GRADE.format("if [ -e out.txt ]; then echo 1; else echo 0; fi")


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "boxes", "test")
    yield provider
    assert list((tmp_path / "boxes").glob("local/*/*")) == []
    await provider.close()


def make(folder: Path, test: str = HONEST, solve: str | None = "touch out.txt", agent_s: float = 20) -> Task:
    for path, text in {"tests/test.sh": test, "solution/solve.sh": solve or ""}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    verifier = {"type": "harbor", "tests": str(folder / "tests")}
    solution = str(folder / "solution") if solve is not None else None
    return Task(folder.name, "i", Environment(), verifier, Limits(agent_s, 20), solution)


async def test_a_good_task_has_no_problem_and_shows_both_scores(provider: LocalProvider, tmp_path: Path) -> None:
    seen: list[TaskCheck] = []
    tasks = [make(tmp_path / "b"), make(tmp_path / "a")]
    checks = await check_tasks(tasks, provider, on_done=seen.append)
    assert [c.task_id for c in checks] == ["b", "a"]
    assert {c.task_id for c in seen} == {"a", "b"}
    for check in checks:
        assert check.ok and check.problems == [] and check.seconds > 0
        assert check.nothing is not None and check.nothing.value == 0.0
        assert check.oracle is not None and check.oracle.value == 1.0


@pytest.mark.parametrize(
    ("test", "solve", "problems"),
    [
        (GRADE.format("echo 1"), "true", ["Doing nothing scores 1 and should score 0."]),
        (GRADE.format("echo 0"), "true", ["The solution scores 0 and should score 1."]),
        (GRADE.format("echo 0.5"), "true", ["Doing nothing scores 0.5", "The solution scores 0.5"]),
        (HONEST, None, ["There is no solution/solve.sh"]),
        ("true", "true", ["Doing nothing is unscored: The verifier wrote no reward", "The solution is unscored"]),
        (HONEST, "touch out.txt; echo oh no >&2; exit 3", ["The solution ended with code 3: oh no."]),
        (HONEST, "exit 3", ["The solution ended with code 3: no message.", "The solution scores 0"]),
    ],
)
async def test_what_is_wrong_with_a_task_is_said(
    provider: LocalProvider, tmp_path: Path, test: str, solve: str | None, problems: list[str]
) -> None:
    (check,) = await check_tasks([make(tmp_path / "t", test, solve)], provider)
    assert not check.ok and len(check.problems) == len(problems)
    for said, expected in zip(check.problems, problems, strict=True):
        assert said.startswith(expected)


async def test_a_solution_that_does_not_end_is_cut(provider: LocalProvider, tmp_path: Path) -> None:
    (check,) = await check_tasks([make(tmp_path / "t", solve="sleep 60", agent_s=0.5)], provider)
    assert check.problems[0] == "The solution did not end within its 0.5 seconds." and check.seconds < 30


async def test_a_solution_sees_its_own_variables_and_not_the_tests(provider: LocalProvider, tmp_path: Path) -> None:
    task = make(tmp_path / "t", solve='[ "$A" = 1 ] && [ ! -e "$POLAR_TESTS/test.sh" ] && touch out.txt')
    task.metadata["solution_env"] = {"A": "1"}
    (check,) = await check_tasks([task], provider)
    assert check.ok


async def test_a_box_that_does_not_start_is_a_problem_and_no_exception(provider: LocalProvider, tmp_path: Path) -> None:
    task = make(tmp_path / "t")
    task.environment.base_image = "org/image"
    (check,) = await check_tasks([task], provider)
    assert check.nothing is None and check.oracle is None
    assert len(check.problems) == 2 and check.problems[0].startswith("The box failed: ")
