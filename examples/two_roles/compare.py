"""Compares `per_agent` with `grpo` on the two-role game: `python -m examples.two_roles.compare --out runs/two_roles`.

Each run is `polar train --config examples/two_roles/train.yaml` with another advantage or seed, in this process; a run
that is done is not made again. With --in-process the games are played against the model without proxy, boxes and
verifier, by the same program and trainer: minutes become seconds, and what is measured is the trainer alone.

Prints for each advantage: reward on held-out tasks before and after (pooled over the seeds, the interval over tasks),
the gradient norm over the steps, and how far the advantages of one role in one group are from mean 0 and deviation 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from examples.two_roles.dialogue import Game, play_games
from examples.two_roles.make_tasks import HERE, Item
from polarlike.commands import train
from polarlike.config import RunConfig, load_config
from polarlike.records import Group, Rollout, RolloutStatus, Score
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stats import Estimate, summarise
from polarlike.store import Store
from polarlike.tasks import load_tasks
from polarlike.templates import load_template
from reconstruct import rebuild
from trainers.base import TrainerOptions
from trainers.credit import Credit, rows_with_advantages
from trainers.grpo import Grpo
from trainers.settings import CreditSettings

CONFIG = HERE / "train.yaml"
ADVANTAGES = ("per_agent", "grpo")


@dataclass
class Result:
    """One run. before, after: the rollouts of its evaluations. norms: gradient norm by step. credits: by step."""

    before: list[Rollout]
    after: list[Rollout]
    norms: list[float] = field(default_factory=list)
    credits: list[Credit] = field(default_factory=list)


def configured(advantage: str, seed: int, out: Path, overrides: dict[str, Any]) -> RunConfig:
    """The example's config with another advantage, seed and folder; what counts in per_agent stays as it is there."""
    config = load_config(CONFIG, {"seed": seed, "out": out / f"{advantage}-{seed}", **overrides})
    settings = {**config.trainer.settings, "advantage": advantage}
    if advantage != "per_agent":
        settings.pop("per_agent", None)
    config.trainer.settings = settings
    return config


# ---------------------------------------------------------------- through the proxy, in boxes


def trained(config: RunConfig, console: Console) -> Result:
    """`polar train`, resumed where it was; then what its folder says."""
    folder = RunFolder(config.out)
    if not (config.out / "model").is_dir():
        asyncio.run(train.run(config, console))
    rollouts = [r for r in Store(folder.store_url).rollouts() if r.status is RolloutStatus.FINISHED]
    last = f"eval{config.train.steps:04d}/"
    steps = [m for m in folder.metrics() if m["kind"] == "step"]
    return Result(
        before=[r for r in rollouts if r.group_id.startswith("eval0000/")],
        after=[r for r in rollouts if r.group_id.startswith(last)],
        norms=[m["grad_norm"] for m in steps],
        credits=[_credit(_groups(config, rollouts, f"step{m['step']:04d}/"), config) for m in steps],
    )


def _groups(config: RunConfig, rollouts: Iterable[Rollout], prefix: str) -> list[Group]:
    """The groups of one step, rebuilt from their calls."""
    store = Store(RunFolder(config.out).store_url)
    groups: dict[str, Group] = {}
    for rollout in rollouts:
        if not rollout.group_id.startswith(prefix):
            continue
        trajectory = rebuild(
            store.calls(rollout.session_id),
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            builder=config.builder,
            harness_ended=True,
        )
        trajectory.score = rollout.score
        group = groups.setdefault(rollout.group_id, Group(rollout.group_id, rollout.task_id, []))
        group.trajectories.append(trajectory)
    return list(groups.values())


# ---------------------------------------------------------------- in this process


def simulated(config: RunConfig) -> Result:
    """The same number of games, tasks in the same number, played against the trainer's own weights."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = config.engine.model_folder
    assert folder is not None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    template = load_template(folder)
    trainer = Grpo(TrainerOptions(folder, config.out, config.seed, config.trainer.settings))
    generator = torch.Generator().manual_seed(config.seed)
    rng = random.Random(config.seed)
    tasks, heldout = _items(config.tasks), _items(config.train.eval_tasks or "")

    def games(items: Sequence[tuple[str, Item]], samples: int) -> list[tuple[str, list[Game]]]:
        model.load_state_dict(trainer.weights().tensors())
        played = play_games(model, template, [item for _, item in items for _ in range(samples)], generator)
        return [(name, played[k * samples : (k + 1) * samples]) for k, (name, _) in enumerate(items)]

    result = Result(_scored(games(heldout, config.train.eval_samples)), [])
    for _ in range(config.train.steps):
        groups = [
            Group(name, name, [game.trajectory(f"{name}/{k}", trainer.policy_version) for k, game in enumerate(group)])
            for name, group in games(rng.sample(tasks, config.train.tasks_per_step), config.samples)
        ]
        result.norms.append(trainer.step(groups)["grad_norm"])
        result.credits.append(_credit(groups, config))
    result.after = _scored(games(heldout, config.train.eval_samples))
    return result


def _items(spec: str) -> list[tuple[str, Item]]:
    return [(task.task_id, Item.of_text(task.instruction)) for task in load_tasks(spec)]


def _scored(groups: Sequence[tuple[str, list[Game]]]) -> list[Rollout]:
    return [
        Rollout(f"{name}/{k}", name, name, k, RolloutStatus.FINISHED, score=Score(game.reward))
        for name, group in groups
        for k, game in enumerate(group)
    ]


# ---------------------------------------------------------------- what is printed


def _credit(groups: Sequence[Group], config: RunConfig) -> Credit:
    wanted = {k: v for k, v in config.trainer.settings.items() if k in CreditSettings.model_fields}
    return rows_with_advantages(groups, CreditSettings.model_validate(wanted))


def scales(credit: Credit) -> Iterator[tuple[str, float, float]]:
    """(role, mean, unbiased deviation) of the advantages of each role in each group, every call counted. Groups of one
    call and of equal rewards are not among the rows."""
    for group in credit.rows:
        for role in sorted({row.role for rows in group for row in rows}):
            values = [
                float(row.advantages[0])
                for rows in group
                for row in rows
                if row.role == role
                for _ in range(int(row.calls[-1]) + 1)
            ]
            if len(values) > 1:
                yield role, float(np.mean(values)), float(np.std(values, ddof=1))


def lines(advantage: str, results: Sequence[Result]) -> Iterator[str]:
    """A table's row for all seeds together, then one a seed."""
    found = [scale for result in results for credit in result.credits for scale in scales(credit)]
    norms = [norm for result in results for norm in result.norms]
    pooled = _reward(r for x in results for r in x.before), _reward(r for x in results for r in x.after)
    mean = max((abs(mean) for _, mean, _ in found), default=0.0)
    low, high = min((std for *_, std in found), default=0.0), max((std for *_, std in found), default=0.0)
    yield (
        f"| {advantage} | {pooled[0]} | {pooled[1]} | {np.mean(norms):.3f} | {np.std(norms, ddof=1):.3f} "
        f"| {mean:.4f} | {low:.3f} to {high:.3f} |"
    )
    for seed, result in enumerate(results):
        one = [float(n) for n in result.norms]
        yield (
            f"| {advantage}, seed {seed} | {_reward(result.before)} | {_reward(result.after)} | {np.mean(one):.3f} "
            f"| {np.std(one, ddof=1):.3f} | | |"
        )


def _reward(rollouts: Iterable[Rollout]) -> Estimate | None:
    return summarise(rollouts).reward


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="per_agent against grpo on the two-role game.")
    parser.add_argument("--out", type=Path, default=Path("runs/two_roles"), help="folder of the run folders")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="training steps; those of the config by default")
    parser.add_argument("--sandbox", default="auto", help="docker, local or auto")
    parser.add_argument("--in-process", action="store_true", help="no proxy, boxes and verifier: the trainer alone")
    args = parser.parse_args(argv)
    overrides = {"sandbox.kind": args.sandbox, "train.steps": args.steps}
    results: dict[str, list[Result]] = {advantage: [] for advantage in ADVANTAGES}
    for seed in range(args.seeds):
        for advantage in ADVANTAGES:
            config = configured(advantage, seed, args.out, overrides)
            result = simulated(config) if args.in_process else trained(config, Console())
            print(f"{advantage}, seed {seed}: {_reward(result.before)} to {_reward(result.after)}", flush=True)
            results[advantage].append(result)
    print("| advantage | held-out before | after | gradient norm | its deviation | role's mean | role's deviation |")
    print("|---|---|---|---|---|---|---|")
    for advantage in ADVANTAGES:
        print("\n".join(lines(advantage, results[advantage])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
