"""Whole rollouts in local boxes: run, record, verify, rebuild, resume."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlike.config import RunConfig
from polarlike.records import Cause, Group, RolloutStatus, Unscored, UsageError
from polarlike.rollouts.collect import Wanted, collect
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import make_provider, open_stage
from polarlike.store import Store
from polarlike.tasks import load_tasks

RIGHT = ["cat note.txt", "echo 42 > answer.txt"]


async def gather(config: RunConfig) -> list[Group]:
    folder = RunFolder(config.out)
    folder.open(config, "collect")
    try:
        async with open_stage(config, folder) as stage:
            wanted = [Wanted(t, t.task_id, config.samples) for t in load_tasks(config.tasks)]
            return [group async for group in collect(stage, wanted)]
    finally:
        folder.close()


def stored(config: RunConfig) -> Store:
    return Store(RunFolder(config.out).store_url)


async def test_a_run_is_recorded_verified_and_rebuilt(task_file: Callable[..., Path], run_config: Any) -> None:
    config = run_config(task_file(2), RIGHT)
    groups = await gather(config)
    assert sorted(g.task_id for g in groups) == ["t0", "t1"]
    for trajectory in (t for g in groups for t in g.trajectories):
        assert trajectory.score is not None and trajectory.score.value == 1.0
        [segment] = trajectory.segments  # a run of three turns is one segment
        assert len(segment.spans) == 3
        assert segment.cause is Cause.FIRST
        assert segment.trainable == sum(s.end - s.start for s in segment.spans)
    evidence = audit(stored(config), RunFolder(config.out).engine_log)
    assert evidence.rollouts == 4
    assert evidence.trainable == evidence.equal > 0


async def test_an_agent_that_fails_scores_zero(task_file: Callable[..., Path], run_config: Any) -> None:
    [group] = await gather(run_config(task_file(), ["echo 41 > answer.txt"]))
    assert [t.score.value for t in group.trajectories] == [0.0, 0.0]


async def test_a_verifier_without_a_verdict_is_unscored_and_kept_out(
    task_file: Callable[..., Path], run_config: Any
) -> None:
    config = run_config(task_file(test="exit 3"), RIGHT)
    [group] = await gather(config)
    assert group.trajectories == []
    rollouts = stored(config).rollouts()
    assert [r.status for r in rollouts] == [RolloutStatus.UNSCORED] * 2
    assert all(r.score.value is None and r.score.unscored is Unscored.DISCARD for r in rollouts)


async def test_a_second_run_repeats_nothing_that_is_done(task_file: Callable[..., Path], run_config: Any) -> None:
    config = run_config(task_file(), RIGHT)
    first = await gather(config)
    before = {r.rollout_id for r in stored(config).rollouts()}
    second = await gather(config)
    assert {r.rollout_id for r in stored(config).rollouts()} == before
    ids = [[s.ids.tolist() for t in g[0].trajectories for s in t.segments] for g in (first, second)]
    assert ids[0] == ids[1]


async def test_an_interrupted_run_leaves_no_box_and_resumes(
    task_file: Callable[..., Path], run_config: Any, tmp_path: Path
) -> None:
    slow = run_config(task_file(), ["sleep 30"])
    running = asyncio.create_task(gather(slow))
    for _ in range(200):
        await asyncio.sleep(0.05)
        if (slow.out / "store.db").is_file() and any(c for r in stored(slow).rollouts() for c in [r.session_id]):
            break
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [r.status for r in stored(slow).rollouts()] == [RolloutStatus.INTERRUPTED] * 2
    assert not [p for p in (slow.out / "boxes").rglob("*") if p.name == "note.txt"]
    [group] = await gather(run_config(task_file(), RIGHT))
    assert [t.score.value for t in group.trajectories] == [1.0, 1.0]
    statuses = [r.status for r in stored(slow).rollouts()]
    assert statuses.count(RolloutStatus.FINISHED) == statuses.count(RolloutStatus.INTERRUPTED) == 2


async def test_an_agent_out_of_time_is_graded_or_discarded_as_asked(
    task_file: Callable[..., Path], run_config: Any, tmp_path: Path
) -> None:
    commands = ["echo 42 > answer.txt", "sleep 60"]
    graded = run_config(task_file(), commands, samples=1, limits__agent_s=4, out=tmp_path / "a")
    [group] = await gather(graded)
    assert [t.score.value for t in group.trajectories] == [1.0]
    [rollout] = stored(graded).rollouts()
    assert rollout.harness_exit["reason"] == "time_limit"
    discarded = run_config(
        task_file(), commands, samples=1, limits__agent_s=4, limits__on_time_limit="discard", out=tmp_path / "b"
    )
    [group] = await gather(discarded)
    assert group.trajectories == []
    assert stored(discarded).rollouts()[0].score.unscored is Unscored.GRADE_ANYWAY


async def test_an_engine_that_fails_is_a_fault_of_ours_and_not_a_zero(
    task_file: Callable[..., Path], run_config: Any
) -> None:
    config = run_config(task_file(), RIGHT, samples=1, limits__retries=1)
    Path(config.engine.spec.partition(":")[2]).write_text("def policy(conversation):\n    raise ValueError('broken')\n")
    [group] = await gather(config)
    assert group.trajectories == []
    rollouts = stored(config).rollouts()
    assert [r.status for r in rollouts] == [RolloutStatus.INTERRUPTED, RolloutStatus.UNSCORED]
    assert rollouts[-1].score.unscored is Unscored.RETRY
    assert "broken" in rollouts[-1].score.reason


async def test_an_agent_that_never_starts_says_nothing_about_the_policy(
    task_file: Callable[..., Path], run_config: Any
) -> None:
    config = run_config(task_file(), RIGHT, samples=1)
    config.harness.options = {"command": "no-such-agent --now"}
    config.limits.retries = 0
    [group] = await gather(config)
    assert group.trajectories == []
    [rollout] = stored(config).rollouts()
    assert rollout.score.unscored is Unscored.RETRY
    assert "without a model call: exit code 127" in rollout.score.reason and "no-such-agent" in rollout.score.reason
    config.harness.options = {"command": "true"}  # mended: the place is run again, and counts once
    [group] = await gather(config)
    assert [t.score.value for t in group.trajectories] == [0.0]
    assert [r.status for r in stored(config).rollouts()] == [RolloutStatus.INTERRUPTED, RolloutStatus.FINISHED]


def test_a_sandbox_s_unknown_option_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="local sandbox has no option 'reech'; it has none"):
        make_provider("local", tmp_path, "x", {"reech": 1})


async def test_a_run_folder_belongs_to_one_process_and_one_run(task_file: Callable[..., Path], run_config: Any) -> None:
    config = run_config(task_file(), RIGHT)
    folder = RunFolder(config.out)
    folder.open(config, "collect")
    with pytest.raises(UsageError, match="Another process is running"):
        RunFolder(config.out).open(config, "collect")
    folder.close()
    await gather(config)
    config.seed = 7
    with pytest.raises(UsageError, match="made with other settings: seed"):
        RunFolder(config.out).open(config, "collect")


async def test_a_run_is_not_resumed_with_other_weights(
    task_file: Callable[..., Path], run_config: Any, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = run_config(task_file(), RIGHT, samples=1, engine__model=model)
    await gather(config)
    weights = next(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UsageError, match="weights of the model"):
        await gather(config)
