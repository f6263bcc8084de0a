"""Laying a task into a box and grading work, on local boxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarlike.records import Environment, Limits, Score, Task, Unscored, UsageError
from polarlike.tasks.boxes import box_spec, grade, make_verifier, open_task_box
from sandbox.base import Mount, Sandbox, SandboxError, SandboxSpec
from sandbox.local_box import LocalBox, LocalProvider
from sandbox.tree import Entry, TreePatch

TEST_SH = 'grep -q right a.txt && r=1 || r=0; echo $r > "$POLAR_LOGS/verifier/reward.txt"'


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "boxes", "test")
    yield provider
    assert boxes(tmp_path) == []  # whatever happened, no box is left
    await provider.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    for path, text in {"files/a.txt": "wrong\n", "files/b/c.txt": "c\n", "tests/test.sh": TEST_SH}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    environment = Environment(copies=[(str(tmp_path / "files"), "/app")], env={"E": "1"}, memory_mb=64, pids=9)
    return Task("t", "i", environment, {"type": "harbor", "tests": str(tmp_path / "tests")}, Limits(verifier_s=20))


def boxes(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "boxes").glob("local/*/*"))


def test_the_spec_carries_the_environment_and_the_mounts(task: Task) -> None:
    mount = Mount("/host", "/tool")
    spec = box_spec(task, [mount])
    assert spec == SandboxSpec(workdir="/app", env={"E": "1"}, memory_mb=64, pids=9, mounts=[mount])


def test_the_grading_box_may_have_another_network_than_the_agents(task: Task) -> None:
    task.verifier["network"] = True
    assert (box_spec(task).network, box_spec(task, grading=True).network) == (False, True)


async def test_a_box_holds_the_files_and_knows_their_start(provider: LocalProvider, task: Task) -> None:
    box = await open_task_box(provider, task, "one")
    try:
        assert await box.read("/app/b/c.txt") == b"c\n"
        assert (await box.patch()).empty
        await box.write("/app/new.txt", b"n")
        assert list((await box.patch()).files) == ["new.txt"]
    finally:
        await box.stop()


async def test_work_is_graded_over_pristine_files(provider: LocalProvider, task: Task) -> None:
    assert (await grade(provider, task, None)).value == 0.0
    assert (await grade(provider, task, TreePatch())).value == 0.0
    right = TreePatch(files={"a.txt": Entry(0o644, data=b"right\n")}, modified=["a.txt"])
    assert (await grade(provider, task, right)).value == 1.0
    assert (await grade(provider, task, None)).value == 0.0


async def test_tests_that_the_agent_brings_along_are_not_the_ones_that_judge(
    provider: LocalProvider, task: Task
) -> None:
    box = await open_task_box(provider, task, "agent")
    forged = b'mkdir -p "$POLAR_LOGS/verifier"; echo 1 > "$POLAR_LOGS/verifier/reward.txt"'
    await box.write("/app/tests/test.sh", forged)
    await box.write("/tests/test.sh", forged)
    await box.write("/logs/verifier/reward.txt", b"1")
    patch = await box.patch()
    await box.stop()
    assert (await grade(provider, task, patch)).value == 0.0


async def test_files_that_are_gone_from_the_host_are_a_fault_of_ours(provider: LocalProvider, task: Task) -> None:
    task.environment.copies = [("/no/such/folder", "/app")]
    with pytest.raises(SandboxError):
        await open_task_box(provider, task, "one")
    score = await grade(provider, task, None)
    assert (score.value, score.unscored) == (None, Unscored.RETRY)


async def test_a_patch_that_cannot_be_laid_is_unscored(provider: LocalProvider, task: Task) -> None:
    score = await grade(provider, task, TreePatch(files={"../out.txt": Entry(0o644, data=b"x")}))
    assert (score.value, score.unscored) == (None, Unscored.RETRY)
    assert "could not be laid" in score.reason


async def test_an_image_where_there_are_no_images_is_unscored(provider: LocalProvider, task: Task) -> None:
    task.environment.base_image = "org/image"
    score = await grade(provider, task, None)
    assert score.unscored is Unscored.RETRY and "container image" in score.reason


async def test_a_box_that_will_not_stop_does_not_change_the_verdict(
    provider: LocalProvider, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = LocalBox.stop

    async def stuck(self: LocalBox) -> None:
        await stop(self)
        raise SandboxError("still there")

    monkeypatch.setattr(LocalBox, "stop", stuck)
    assert (await grade(provider, task, None)).value == 0.0


async def test_a_given_verifier_judges_in_the_place_of_the_tasks_own(provider: LocalProvider, task: Task) -> None:
    class Half:
        async def verify(self, task: Task, box: Sandbox) -> Score:
            return Score(0.5)

    assert (await grade(provider, task, None, Half())).value == 0.5


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "names no type of verifier"),
        ({"type": "harbour", "tests": "x"}, "did you mean 'harbor'"),
        ({"type": "harbor"}, "'tests' is missing"),
    ],
)
async def test_a_wrong_verifier_table_is_the_users_error(
    provider: LocalProvider, task: Task, table: dict[str, Any], words: str
) -> None:
    task.verifier = table
    with pytest.raises(UsageError, match=words):
        make_verifier(task)
    with pytest.raises(UsageError, match=words):
        await grade(provider, task, None)
