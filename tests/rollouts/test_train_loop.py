"""The training loop over a random tiny policy: steps, versions, checkpoints, and going on after a kill."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polarlike.config import RunConfig, load_config
from polarlike.engines.base import CannotScore, PolicyWeights
from polarlike.engines.embedded import EmbeddedEngine
from polarlike.records import Group, PolarError, Rollout, Score, Trajectory
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.store import Store
from polarlike.tasks import load_tasks
from reconstruct import rebuild
from trainers.base import TrainerOptions
from trainers.grpo import create
from trainers.loop import Loop, shuffled

# Writes what the policy said to a file; the verifier's reward is a bit of its length, so that groups vary.
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
TEST = """
mkdir -p "$POLAR_LOGS/verifier"
n=$(wc -c < "$POLAR_WORKDIR/said.txt")
echo $((n % 2)) > "$POLAR_LOGS/verifier/reward.txt"
"""


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"task_id": f"t{k}", "instruction": f"say {k}", "files": {}, "test_script": TEST} for k in range(3)]
    tasks.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return load_config(
        None,
        {
            "tasks": str(tasks),
            "out": tmp_path / "run",
            "samples": 4,
            "engine.spec": f"embedded:{tiny_model}",
            "engine.log": True,
            "harness.name": "shell",
            "harness.options": {"command": f"python3 {tmp_path / 'agent.py'}"},
            "sandbox.kind": "local",
            "sampling.max_tokens": 12,
            "train.steps": 2,
            "train.tasks_per_step": 2,
            "trainer.settings": {"lr": 1e-3},
        },
    )


async def run(config: RunConfig, on_rollout: Callable[[Rollout], None] | None = None) -> list[tuple[str, dict]]:
    told: list[tuple[str, dict]] = []
    folder = RunFolder(config.out)
    folder.open(config, "train")
    tasks = load_tasks(config.tasks)
    model = Path(config.engine.spec.partition(":")[2])
    try:
        trainer = create(TrainerOptions(model, config.out, config.seed, config.trainer.settings))
        async with open_stage(config, folder) as stage:
            loop = Loop(
                stage,
                trainer,
                folder,
                tasks=tasks[:2],
                eval_tasks=tasks[2:],
                report=lambda kind, values: told.append((kind, values)),
                on_rollout=on_rollout,
            )
            await loop.run()
    finally:
        folder.close()
    return told


@pytest.mark.slow
async def test_two_steps_move_the_policy_and_every_token_knows_its_version(config: RunConfig) -> None:
    told = await run(config)
    assert [(kind, v["step"]) for kind, v in told] == [("eval", 0), ("step", 0), ("step", 1), ("eval", 2)]
    steps = [v for kind, v in told if kind == "step"]
    assert [v["policy_version"] for v in steps] == [1, 2]
    assert all(v["grad_norm"] > 0 for v in steps)
    folder = RunFolder(config.out)
    store = Store(folder.store_url)
    seen: dict[str, set[int]] = {}
    for rollout in store.rollouts():
        for call in store.calls(rollout.session_id):
            seen.setdefault(rollout.group_id.split("/")[0], set()).update(call.versions.tolist())
    assert seen == {"eval0000": {0}, "step0000": {0}, "step0001": {1}, "eval0002": {2}}
    evidence = audit(store, folder.engine_log)
    assert evidence.trainable == evidence.equal > 0


@pytest.mark.slow
async def test_recorded_logprobs_are_those_of_a_plain_forward_of_their_version(
    config: RunConfig, tiny_model: Path
) -> None:
    await run(config)
    folder = RunFolder(config.out)
    store = Store(folder.store_url)
    models: dict[int, Any] = {0: AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)}
    models[2] = AutoModelForCausalLM.from_pretrained(folder.path / "model", dtype=torch.float32)
    worst = 0.0
    checked = 0
    for rollout in store.rollouts():
        calls = store.calls(rollout.session_id)
        trajectory = rebuild(calls, rollout_id="r", task_id="t", harness_ended=True)
        for segment in trajectory.segments:
            [version] = set(segment.versions[segment.loss_mask].tolist())
            if version not in models:
                continue
            with torch.no_grad():
                logits = models[version](torch.from_numpy(segment.ids.astype(np.int64))[None]).logits[0].float()
            logprobs = (
                logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(segment.ids[1:].astype(np.int64))[:, None])
            )
            difference = np.abs(logprobs[:, 0].numpy() - segment.logprobs[1:])[segment.loss_mask[1:]]
            worst, checked = max(worst, float(difference.max())), checked + difference.size
    assert checked > 100
    assert worst < 1e-4


@pytest.mark.slow
async def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(config: RunConfig) -> None:
    whole = config.model_copy(update={"out": config.out.parent / "whole"})
    await run(whole)

    class Stopped(Exception):
        pass

    count = 0

    def stop(rollout: Rollout) -> None:
        nonlocal count
        count += 1
        if count == 1 + 8 + 3:  # one evaluation, the first step's eight, three of the second step
            raise Stopped

    with pytest.raises(Stopped):
        await run(config, stop)
    done = {r.slot: r.rollout_id for r in Store(RunFolder(config.out).store_url).rollouts() if r.score}
    told = await run(config)
    assert [(kind, v["step"]) for kind, v in told] == [("step", 1), ("eval", 2)]
    after = {r.slot: r.rollout_id for r in Store(RunFolder(config.out).store_url).rollouts() if r.score}
    assert {slot: after[slot] for slot in done} == done
    assert told[0][1]["policy_version"] == 2


def published(folder: RunFolder) -> list[dict[str, Any]]:
    return [m for m in folder.metrics() if m["kind"] == "publish"]


@pytest.mark.slow
async def test_each_version_is_proven_to_be_served_before_anything_is_sampled_from_it(config: RunConfig) -> None:
    await run(config)
    lines = published(RunFolder(config.out))
    assert [(m["step"], m["policy_version"]) for m in lines] == [(0, 0), (1, 1), (2, 2)]
    assert all(m["rescore_max"] < 1e-4 for m in lines)
    # The lines after a step compare sampled tokens, and those the step moved by more than the limit of 1e-3.
    assert all(m["rescore_tokens"] > 12 for m in lines[1:])
    assert all(m["rescore_moved"] > 2e-3 for m in lines[1:])


@pytest.mark.slow
async def test_an_engine_that_keeps_old_weights_stops_the_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pretend(self: EmbeddedEngine, weights: PolicyWeights, version: int) -> None:
        self.policy_version = version

    monkeypatch.setattr(EmbeddedEngine, "publish", pretend)
    with pytest.raises(PolarError, match="does not serve what the trainer holds at policy version 1"):
        await run(config)
    # The checkpoint was written first: the same command goes on from it, and the step has its line.
    folder = RunFolder(config.out)
    assert (folder.checkpoints / "step-0001").is_dir()
    assert [m["step"] for m in folder.metrics() if m["kind"] == "step"] == [0]


@pytest.mark.slow
async def test_an_engine_that_cannot_score_says_so_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cannot(self: EmbeddedEngine, *_: Any) -> None:
        raise CannotScore("this server gives no logprobs of a prompt")

    monkeypatch.setattr(EmbeddedEngine, "score", cannot)
    await run(config)
    folder = RunFolder(config.out)
    said = [m for m in folder.metrics() if m["kind"] == "rescore"]
    assert [(m["possible"], m["reason"]) for m in said] == [(False, "this server gives no logprobs of a prompt")]
    assert not any("rescore_max" in m for m in published(folder))


def test_the_control_deals_the_same_rewards_to_other_rollouts_of_the_group() -> None:
    made = [Trajectory(str(k), "t", [], [], {}, Score(float(k))) for k in range(20)]
    [dealt] = shuffled([Group("g", "t", made)], random.Random(0))
    assert [t.rollout_id for t in dealt.trajectories] == [str(k) for k in range(20)]
    values = [t.score.value for t in dealt.trajectories]
    assert sorted(values) == [float(k) for k in range(20)] and values != sorted(values)
    assert [t.score.value for t in made] == [float(k) for k in range(20)]


@pytest.mark.slow
async def test_an_evaluation_also_measures_the_greedy_policy(config: RunConfig) -> None:
    config.train = config.train.model_copy(update={"eval_greedy": True, "steps": 1, "eval_samples": 2})
    told = await run(config)
    evaluations = [v for kind, v in told if kind == "eval"]
    assert [v["greedy_tasks"] for v in evaluations] == [1, 1]
    store = Store(RunFolder(config.out).store_url)
    temperatures: dict[str, set[float]] = {}
    for rollout in store.rollouts():
        for call in store.calls(rollout.session_id):
            temperatures.setdefault(rollout.group_id.split("/")[0], set()).add(call.sampling.temperature)
    assert temperatures == {
        "eval0000": {1.0}, "greedy0000": {0.0}, "step0000": {1.0}, "eval0001": {1.0}, "greedy0001": {0.0},
    }  # fmt: skip
