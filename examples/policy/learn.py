"""GRPO in the pretended shell: `python -m examples.policy.learn` shows in minutes that the policy learns.

Knows simulated rollouts and a trainer; no proxy, no agent, no sandbox. The steps are those of `polar train`: the same
trainer is given groups of the same form, so settings that work here are worth trying there. With --shuffle the rewards
of each group are dealt out anew before a step: a control that must not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from examples.make_tasks import draw, split_names
from examples.policy.evaluation import SimulatedRollout, SimulatedTurn, figures, rollouts
from examples.policy.make_policy import HERE
from examples.policy.prompts import find_package, load_prompts
from polarlike.engines.base import EngineOptions
from polarlike.engines.embedded import EmbeddedEngine
from polarlike.records import Cause, Group, Score, Segment, Trajectory
from trainers.base import TrainerOptions
from trainers.grpo import Grpo
from trainers.loop import shuffled


def trajectory(rollout: SimulatedRollout, name: str, temperature: float) -> Trajectory:
    """Its turns as segments: a turn whose prompt is not the stream so far opens a new one."""
    streams: list[list[SimulatedTurn]] = []
    for turn in rollout.turns:
        if streams and _continues(streams[-1][-1], turn):
            streams[-1].append(turn)
        else:
            streams.append([turn])
    segments = [_segment(f"{name}/{k}", turns, temperature) for k, turns in enumerate(streams)]
    return Trajectory(name, rollout.task.name, segments, [], {}, Score(rollout.reward))


def _continues(before: SimulatedTurn, turn: SimulatedTurn) -> bool:
    so_far = np.concatenate([before.prompt, before.completion])
    return np.array_equal(turn.prompt[: so_far.size], so_far)


def _segment(name: str, turns: Sequence[SimulatedTurn], temperature: float) -> Segment:
    ids = np.concatenate([turns[-1].prompt, turns[-1].completion])
    mask, logprobs = np.zeros(ids.size, bool), np.zeros(ids.size, np.float32)
    versions = np.full(ids.size, -1, np.int32)
    for turn in turns:
        where = slice(turn.prompt.size, turn.prompt.size + turn.completion.size)
        mask[where], logprobs[where], versions[where] = True, turn.logprobs, turn.versions
    return Segment(
        segment_id=name, role="main", cause=Cause.FIRST, ids=ids, loss_mask=mask, logprobs=logprobs, versions=versions,
        temperature=temperature, spans=[],
    )  # fmt: skip


async def learn(args: argparse.Namespace) -> None:
    """Prints one JSON line a step and an evaluation."""
    prompts = load_prompts(find_package())
    trainer = Grpo(TrainerOptions(args.model, Path(), args.seed, dict(item.split("=", 1) for item in args.set)))
    engine = EmbeddedEngine(args.model, EngineOptions(extra={"threads": args.threads}))
    await engine.start()
    names, unseen = split_names()
    trained, heldout = draw(random.Random(0), names, args.train), draw(random.Random(1), unseen, args.heldout)
    rng = random.Random(args.seed)

    async def measure(step: int) -> None:
        greedy = figures(await rollouts(engine, prompts, heldout, samples=1, temperature=0.0))
        sampled = figures(
            await rollouts(engine, prompts, heldout, samples=4, temperature=args.temperature, seed=args.seed)
        )
        keys = ("reward", "solved", "operator", "copied", "well_formed", "turns")
        print(json.dumps({"eval": step, "greedy": greedy["reward"], **{k: sampled[k] for k in keys}}), flush=True)

    await measure(0)
    for step in range(args.steps):
        start = time.monotonic()
        tasks = rng.sample(trained, args.tasks)
        tried = await rollouts(
            engine, prompts, tasks, samples=args.samples, temperature=args.temperature, seed=1000 * args.seed + step
        )
        groups = [
            Group(task.name, task.name, [trajectory(r, f"{task.name}/{k}", args.temperature) for k, r in enumerate(g)])
            for task, g in zip(tasks, tried, strict=True)
        ]
        sampled = time.monotonic()
        metrics = trainer.step(shuffled(groups, rng) if args.shuffle else groups)
        if metrics["stepped"]:
            await engine.publish(trainer.weights(), trainer.policy_version)
        line = {"step": step, "reward": round(metrics["reward_mean"], 3)}
        line |= {k: round(metrics[k], 4) for k in ("grad_norm", "kl_k3", "clip_fraction", "entropy")}
        line |= {"sample_s": round(sampled - start, 1), "train_s": round(time.monotonic() - sampled, 1)}
        print(json.dumps(line), flush=True)
        if step + 1 == args.steps or (args.every and (step + 1) % args.every == 0):
            await measure(step + 1)
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on simulated dialogues.")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--train", type=int, default=24, help="training tasks to choose from: those of the folder")
    parser.add_argument("--heldout", type=int, default=40, help="held-out tasks measured on: those of the folder")
    parser.add_argument("--every", type=int, default=0, help="also measure every so many steps")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shuffle", action="store_true", help="the control: rewards shuffled within each group")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    asyncio.run(learn(args))


if __name__ == "__main__":
    main()
