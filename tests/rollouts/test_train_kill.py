"""`polar train` killed with SIGKILL, in a process of its own, and given again: what was recorded is used once, and
replayed to the same bits.

The unbroken run that it is held to is a trainer in this process, which steps over the recorded groups in order and was
never killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polarlike.config import RunConfig, load_config, to_yaml
from polarlike.records import Call, Group, Rollout, RolloutStatus
from polarlike.rollouts.collect import Wanted, collect
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.store import Store
from polarlike.tasks import load_tasks
from reconstruct import rebuild
from trainers import checkpoints
from trainers.base import TrainerOptions
from trainers.grpo import create

TASKS, SAMPLES, STEPS = 2, 4, 3
CALLS = 2  # a rollout
OPTIMIZER_STEPS = 4  # a training step: two passes over eight rollouts, four at a time

AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for _ in range(2):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
open("said.txt", "w").write(json.dumps(messages))
"""

# One of ten rewards, so that a group of equal ones, which teaches nothing, does not come up.
TEST = """
mkdir -p "$POLAR_LOGS/verifier"
n=$(wc -c < "$POLAR_WORKDIR/said.txt")
echo "0.$((n % 10))" > "$POLAR_LOGS/verifier/reward.txt"
"""

TRAIN = """
from polarlike.__main__ import main
main()
"""

DIE = """
import os, signal
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

AFTER_OPTIMIZER_STEP = """
from torch.optim.optimizer import register_optimizer_step_post_hook
left = COUNT
def count(*_):
    global left
    left -= 1
    left or die()
register_optimizer_step_post_hook(count)
"""

AFTER_CALL = """
from polarlike.store import Store
put, left = Store.put_call, COUNT
async def put_call(self, call):
    global left
    await put(self, call)
    left -= 1
    left or die()
Store.put_call = put_call
"""

BEFORE_PUBLISH = """
from polarlike.engines.embedded import EmbeddedEngine
publish = EmbeddedEngine.publish
async def publish_or_die(self, weights, version):
    version == COUNT and die()
    await publish(self, weights, version)
EmbeddedEngine.publish = publish_or_die
"""


def killed(where: str, count: int) -> str:
    return DIE + where.replace("COUNT", str(count)) + TRAIN


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes of the run: how many threads share a sum decides its last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"task_id": f"t{k}", "instruction": f"say {k}", "files": {}, "test_script": TEST} for k in range(TASKS)]
    tasks.write_text("".join(json.dumps(x) + "\n" for x in lines))
    config = load_config(
        None,
        {
            "tasks": str(tasks),
            "out": tmp_path / "run",
            "samples": SAMPLES,
            "concurrency": 3,
            "engine.spec": f"embedded:{tiny_model}",
            "engine.log": True,
            "harness.name": "shell",
            "harness.options": {"command": f"python3 {tmp_path / 'agent.py'}"},
            "sandbox.kind": "local",
            "sampling.max_tokens": 12,
            "train.steps": STEPS,
            "train.tasks_per_step": TASKS,
            "trainer.settings": {"lr": 1e-3, "minibatch_rollouts": 4, "device": "cpu"},
        },
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return config


def train(config: RunConfig, script: str = TRAIN) -> int:
    command = [sys.executable, "-c", script, "train", "--config", str(config.out.parent / "config.yaml")]
    with (config.out.parent / "printed.txt").open("a") as printed:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, stdout=printed, stderr=printed, env=env, timeout=600).returncode


class Recorded:
    """What the run's folder holds."""

    def __init__(self, config: RunConfig) -> None:
        self.folder, self.seed = RunFolder(config.out), config.seed
        self.store = Store(self.folder.store_url, read_only=True)
        self.rollouts = self.store.rollouts()

    def finished(self, step: int) -> list[Rollout]:
        """In the order in which a step sees them: the tasks in the step's own order, then by sample."""
        order = [f"t{k}" for k in range(TASKS)]
        random.Random(f"{self.seed}:{step}").shuffle(order)  # each step is one pass over all tasks
        done = [r for r in self.rollouts if r.status is RolloutStatus.FINISHED and r.group_id.startswith(prefix(step))]
        return sorted(done, key=lambda r: (order.index(r.task_id), r.sample))

    def groups(self, step: int) -> list[Group]:
        groups: dict[str, Group] = {}
        for rollout in self.finished(step):
            trajectory = rebuild(
                self.calls(rollout), rollout_id=rollout.rollout_id, task_id=rollout.task_id, harness_ended=True
            )
            trajectory.score = rollout.score
            group = groups.setdefault(rollout.group_id, Group(rollout.group_id, rollout.task_id, []))
            group.trajectories.append(trajectory)
        return list(groups.values())

    def calls(self, rollout: Rollout) -> list[Call]:
        return self.store.calls(rollout.session_id)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.folder.metrics() if m["kind"] == kind]

    def checkpoint(self, step: int) -> Path:
        return self.folder.checkpoints / f"step-{step:04d}"


def prefix(step: int) -> str:
    return f"step{step:04d}/"


def places(step: int) -> set[str]:
    return {f"{prefix(step)}t{task}:{sample}" for task in range(TASKS) for sample in range(SAMPLES)}


def check_nothing_is_used_twice(run: Recorded) -> None:
    used: list[str] = []
    for step in range(STEPS):
        assert Counter(r.slot for r in run.finished(step)) == dict.fromkeys(places(step), 1)
        used += [r.session_id for r in run.finished(step)]
    assert len(set(used)) == len(used) == STEPS * TASKS * SAMPLES
    assert {r.status for r in run.rollouts} <= {RolloutStatus.FINISHED, RolloutStatus.INTERRUPTED}
    calls = [call.call_id for r in run.rollouts for call in run.calls(r)]
    assert len(set(calls)) == len(calls)
    for group in (g for step in range(STEPS) for g in run.groups(step)):
        assert len({t.segments[0].ids.tobytes() for t in group.trajectories}) == SAMPLES


def check_versions_are_those_of_the_checkpoint_sampled_under(run: Recorded) -> None:
    for step in range(STEPS):
        file = run.checkpoint(step) / "trainer.json"
        version = json.loads(file.read_text())["policy_version"] if step else 0
        assert version == step
        seen = {v for r in run.finished(step) for call in run.calls(r) for v in call.versions.tolist()}
        assert seen == {version}
    evidence = audit(run.store, run.folder.engine_log)
    assert evidence.trainable == evidence.equal > 0


def check_a_trainer_that_was_never_killed_gets_the_same_bits(run: Recorded, config: RunConfig, model: Path) -> None:
    trainer = create(TrainerOptions(model, config.out, config.seed, config.trainer.settings))
    for step in range(STEPS):
        groups = run.groups(step)
        for segment in (s for g in groups for t in g.trajectories for s in t.segments):
            # The recorded logprobs are those of the weights that the version names, not of others under its number.
            start = segment.spans[0].start
            scored = trainer.score(segment.ids, start, 1.0)
            assert abs(scored - segment.logprobs[start:])[segment.loss_mask[start:]].max() < 1e-4
        before = {name: weights.clone() for name, weights in trainer.policy.model.state_dict().items()}
        assert trainer.step(groups)["optimizer_steps"] == OPTIMIZER_STEPS
        ours, saved = trainer.policy.model.state_dict(), load_file(run.checkpoint(step + 1) / "model/model.safetensors")
        assert any(not torch.equal(ours[name], before[name]) for name in ours)
        assert saved.keys() <= ours.keys() and len(saved) > 10  # tied weights are saved once
        assert all(torch.equal(ours[name], saved[name]) for name in saved)


def check(config: RunConfig, model: Path) -> Recorded:
    run = Recorded(config)
    check_nothing_is_used_twice(run)
    check_versions_are_those_of_the_checkpoint_sampled_under(run)
    check_a_trainer_that_was_never_killed_gets_the_same_bits(run, config, model)
    return run


async def test_a_second_start_draws_other_numbers_than_the_first(config: RunConfig) -> None:
    """Else the rollouts that a killed run still owes would be twins, under other names, of those it has."""
    config = config.model_copy(update={"concurrency": 1})
    task = load_tasks(config.tasks)[0]
    for samples in (1, 2, 3):
        folder = RunFolder(config.out)
        folder.open(config, "train")
        async with open_stage(config, folder) as stage:
            [group] = [group async for group in collect(stage, [Wanted(task, "g", samples)])]
        folder.close()
    first_replies = [t.segments[0].ids[t.segments[0].spans[0].start :][:12].tolist() for t in group.trajectories]
    assert len({tuple(ids) for ids in first_replies}) == 3


@pytest.mark.slow
def test_killed_between_two_optimizer_steps_of_a_training_step(config: RunConfig, tiny_model: Path) -> None:
    assert train(config, killed(AFTER_OPTIMIZER_STEP, OPTIMIZER_STEPS + 2)) == -signal.SIGKILL
    run = Recorded(config)
    assert [m["step"] for m in run.metrics("step")] == [0]
    assert {r.slot for r in run.finished(1)} == places(1)
    assert not run.checkpoint(2).exists()
    before = {r.slot: r.session_id for r in run.rollouts}
    assert train(config) == 0
    run = check(config, tiny_model)
    assert [m["step"] for m in run.metrics("step")] == [0, 1, 2]
    assert len(run.rollouts) == STEPS * TASKS * SAMPLES  # nothing was run again
    assert before.items() <= {r.slot: r.session_id for r in run.rollouts}.items()


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
def test_killed_while_rollouts_run(config: RunConfig, tiny_model: Path, step: int) -> None:
    """Of nine calls, three rollouts that run have at most six: others are done, and others have not begun."""
    assert train(config, killed(AFTER_CALL, step * TASKS * SAMPLES * CALLS + 9)) == -signal.SIGKILL
    run = Recorded(config)
    done = {r.slot: r.session_id for r in run.finished(step)}
    running = {r.session_id for r in run.rollouts if r.status is RolloutStatus.RUNNING}
    assert 2 <= len(done) < TASKS * SAMPLES and running
    assert train(config) == 0
    run = check(config, tiny_model)
    assert [m["step"] for m in run.metrics("step")] == [0, 1, 2]
    assert done.items() <= {r.slot: r.session_id for r in run.finished(step)}.items()
    assert {r.session_id for r in run.rollouts if r.status is RolloutStatus.INTERRUPTED} == running


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_killed_between_checkpoint_and_publish(config: RunConfig, tiny_model: Path, torn: bool) -> None:
    """A checkpoint that the disk did not keep whole is made again from the one before and the recorded rollouts."""
    assert train(config, killed(BEFORE_PUBLISH, 2)) == -signal.SIGKILL
    run = Recorded(config)
    assert run.checkpoint(2).is_dir() and not run.checkpoint(3).exists()
    assert [m["policy_version"] for m in run.metrics("publish")] == [0, 1]
    if torn:
        optimizer = run.checkpoint(2) / "optimizer.pt"
        optimizer.write_bytes(optimizer.read_bytes()[:-100])
    before = {r.slot: r.session_id for r in run.rollouts}
    assert train(config) == 0
    run = check(config, tiny_model)
    published = [m["policy_version"] for m in run.metrics("publish")]
    assert published == ([0, 1, 1, 2, 3] if torn else [0, 1, 2, 3])
    assert [m["steps"] for m in run.metrics("torn")] == ([[2]] if torn else [])
    assert [m["step"] for m in run.metrics("step")] == ([0, 1, 1, 2] if torn else [0, 1, 2])
    assert before.items() <= {r.slot: r.session_id for r in run.rollouts}.items()
    for step in range(1, STEPS + 1):
        checkpoints.check(run.checkpoint(step))
