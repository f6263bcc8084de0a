"""The training loop: collect groups, step, checkpoint, publish, again. Knows no advantage or loss; the trainer does.

What holds: a checkpoint is written before its weights are published, so a killed run resumes at the step it was in,
with the policy that sampled what is already there; rollouts of that step that are done are used, not repeated. Where
the disk did not keep a checkpoint whole, the one before it and the recorded rollouts make it again. Nothing is sampled
before engine and trainer were found to give the same tokens the same logprobs (see `rescore`).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from polarlike.config import RunConfig
from polarlike.engines.base import CannotScore
from polarlike.records import Group, PolarError, Rollout, Task, UsageError
from polarlike.rollouts.collect import Wanted, collect, ended_rollouts
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.rollout import Stage
from polarlike.rollouts.stats import summarise, why_unscored
from trainers import checkpoints, rescore
from trainers.base import Trainer

Report = Callable[[str, dict[str, Any]], None]
"""Called with ("step" | "eval", values) as each ends."""

OnRollout = Callable[[Rollout], None]

_CHECKPOINTS = "step-????"


class Loop:
    def __init__(
        self,
        stage: Stage,
        trainer: Trainer,
        folder: RunFolder,
        *,
        tasks: list[Task],
        eval_tasks: list[Task],
        report: Report,
        on_rollout: OnRollout | None = None,
    ):
        if not tasks:
            raise UsageError("There are no tasks to train on.")
        self.stage, self.trainer, self.folder = stage, trainer, folder
        self.tasks, self.eval_tasks, self.report, self.on_rollout = tasks, eval_tasks, report, on_rollout
        self.config: RunConfig = stage.config
        self._scores = True  # until the engine says that it cannot

    async def run(self) -> None:
        first = await self._resume()
        steps = self.config.train.steps
        for step in range(first, steps):
            if step == 0 or self._evaluates(step):
                await self._evaluate(step)
            await self._step(step)
        await self._evaluate(steps)
        await asyncio.to_thread(self.trainer.save_model, self.folder.path / "model")

    # ------------------------------------------------------------

    async def _step(self, step: int) -> None:
        start = time.perf_counter()
        groups = await self._collect(f"step{step:04d}", self._choose(step), self.config.samples, train=True)
        sampled = time.perf_counter()
        if self.config.train.shuffle_rewards:
            groups = shuffled(groups, random.Random(f"{self.config.seed}:{step}"))
        metrics = await asyncio.to_thread(self.trainer.step, groups)
        stepped = time.perf_counter()
        checkpoint = self._checkpoint(step + 1)
        await asyncio.to_thread(self.trainer.save, checkpoint)
        values: dict[str, Any] = {
            **metrics,
            "step": step,
            "policy_version": self.trainer.policy_version,
            "rollouts": sum(len(g.trajectories) for g in groups),
            "rollout_s": round(sampled - start, 2),
            "train_s": round(stepped - sampled, 2),
        }
        # Before the weights are published, which may fail: a step that has its checkpoint is not taken again.
        self.folder.metric("step", **values)
        self.report("step", values)
        self._drop_old(step + 1)
        await self._publish(step + 1, groups)

    async def _evaluate(self, step: int) -> None:
        if not self.eval_tasks or self._evaluated(step):
            return
        values: dict[str, Any] = {"step": step, "policy_version": self.trainer.policy_version}
        values |= await self._measure(f"eval{step:04d}", self.config.train.eval_samples)
        if self.config.train.eval_greedy:
            self.stage.sampling = self.config.sampling.model_copy(update={"temperature": 0.0})
            greedy = await self._measure(f"greedy{step:04d}", 1)
            self.stage.sampling = None
            values |= {f"greedy_{key}": value for key, value in greedy.items()}
        self.folder.metric("eval", **values)
        self.report("eval", values)

    async def _measure(self, name: str, samples: int) -> dict[str, Any]:
        """Reward and pass@1 on the evaluation's tasks, each with its interval."""
        await self._collect(name, self.eval_tasks, samples, train=False)
        summary = summarise(ended_rollouts(self.stage.store, [f"{name}/{task.task_id}" for task in self.eval_tasks]))
        values: dict[str, Any] = {"tasks": summary.tasks, "unscored": summary.unscored}
        if summary.reward:
            values |= {"reward": summary.reward.value, "low": summary.reward.low, "high": summary.reward.high}
        if passed := summary.pass_at.get(1):
            values |= {"pass_at_1": passed.value, "pass_low": passed.low, "pass_high": passed.high}
        return values

    async def _collect(self, name: str, tasks: list[Task], samples: int, *, train: bool) -> list[Group]:
        self.stage.train = train
        wanted = [Wanted(task, f"{name}/{task.task_id}", samples) for task in tasks]
        groups = [group async for group in collect(self.stage, wanted, self.on_rollout)]
        if not any(group.trajectories for group in groups):  # else every further step would be as empty
            why = why_unscored(ended_rollouts(self.stage.store, [w.group_id for w in wanted]))
            raise PolarError(f"No rollout of {name} was scored ({why}); mend that, and the same command goes on there.")
        # In the order of the tasks, so that a step does not depend on which rollout ended first.
        order = {w.group_id: k for k, w in enumerate(wanted)}
        return sorted(groups, key=lambda g: order[g.group_id])

    def _choose(self, step: int) -> list[Task]:
        """Tasks of a step: the task list in a seeded order, gone through again and again."""
        size = min(self.config.train.tasks_per_step, len(self.tasks))
        chosen: list[Task] = []
        position = step * size
        while len(chosen) < size:
            epoch, at = divmod(position, len(self.tasks))
            order = self.tasks.copy()
            random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
            if order[at] not in chosen:
                chosen.append(order[at])
            position += 1
        return chosen

    def _evaluates(self, step: int) -> bool:
        every = self.config.train.eval_every
        return every > 0 and step % every == 0

    def _evaluated(self, step: int) -> bool:
        return any(m["kind"] == "eval" and m["step"] == step for m in self.folder.metrics())

    # ------------------------------------------------------------ checkpoints

    def _checkpoint(self, step: int) -> Path:
        return self.folder.checkpoints / f"step-{step:04d}"

    def _steps_kept(self) -> list[int]:
        return sorted(_step_of(path) for path in self.folder.checkpoints.glob(_CHECKPOINTS))

    async def _resume(self) -> int:
        """The step to go on with: that of the newest whole checkpoint."""
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        newest = await asyncio.to_thread(checkpoints.newest, self.folder.checkpoints, _CHECKPOINTS)
        first = _step_of(newest) if newest else 0
        if torn := [step for step in self._steps_kept() if step > first]:
            self.folder.metric("torn", steps=torn, resumed=first)
        if newest:
            await asyncio.to_thread(self.trainer.load, newest)
        await self._publish(first, [])
        return first

    async def _publish(self, step: int, groups: list[Group]) -> None:
        """Hands the policy that step `step` samples with to the engine, and proves that it is served."""
        engine = self.stage.proxy.engine
        start = time.perf_counter()
        if self.trainer.policy_version > engine.policy_version:
            await engine.publish(self.trainer.weights(), self.trainer.policy_version)
        published = time.perf_counter()
        proof = await self._prove(groups)
        seconds = {"publish_s": round(published - start, 3), "rescore_s": round(time.perf_counter() - published, 3)}
        self.folder.metric("publish", step=step, policy_version=self.trainer.policy_version, **proof, **seconds)

    async def _prove(self, groups: list[Group]) -> dict[str, float]:
        engine = self.stage.proxy.engine
        if not self._scores or engine.template is None:
            return {}
        longest = engine.context_length - 1  # a server that scores a prompt samples one token after it
        sample = rescore.recorded_sample(groups, longest) or rescore.fixed_sample(engine.template)
        try:
            theirs = await engine.score(sample.ids, sample.start, 1.0)
        except CannotScore as e:
            self._scores = False
            self.folder.metric("rescore", possible=False, reason=str(e))
            return {}
        ours = await asyncio.to_thread(self.trainer.score, sample.ids, sample.start, 1.0)
        proof = rescore.compare(sample, ours, theirs)
        rescore.check(proof, rescore.Limits.of(self.config), engine)
        return proof

    def _drop_old(self, newest: int) -> None:
        keep = self.config.train.keep_checkpoints
        for step in self._steps_kept():
            if keep and step <= newest - keep:
                shutil.rmtree(self._checkpoint(step))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def shuffled(groups: list[Group], rng: random.Random) -> list[Group]:
    """The same groups with the scores inside each dealt out anew: a control. Shuffled across groups as well, rewards
    would teach what tells easy tasks from hard ones."""
    dealt = []
    for group in groups:
        scores = [t.score for t in group.trajectories]
        rng.shuffle(scores)
        trajectories = [replace(t, score=score) for t, score in zip(group.trajectories, scores, strict=True)]
        dealt.append(replace(group, trajectories=trajectories))
    return dealt
