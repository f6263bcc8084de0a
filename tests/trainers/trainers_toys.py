"""A trainer on a model that runs in milliseconds, and rollouts small enough to know what it must do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainers_builders import group, segment, trajectory

from polarlike.records import Group, Segment
from trainers.grpo import Grpo

PROMPT = [11, 12, 13, 14]
GOOD, BAD = [21, 22, 23], [31, 32, 33]
Make = Callable[..., Grpo]


def copy_of(trainer: Grpo) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in trainer.weights().tensors().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def sampled(trainer: Grpo, completion: list[int], temperature: float = 1.0) -> Segment:
    """A completion of PROMPT with the logprobs that the trainer itself has for it."""
    ids = PROMPT + completion
    recorded = trainer.score(np.array(ids, np.int32), len(PROMPT), temperature)
    return segment(
        ids,
        range(len(PROMPT), len(ids)),
        logprobs=[float(x) for x in recorded],
        temperature=temperature,
        version=trainer.policy_version,
    )


def pair(good: Segment, bad: Segment) -> Group:
    return group([trajectory([good], 1.0, name="good"), trajectory([bad], 0.0, name="bad")])


def many(seed: int) -> list[Group]:
    """Three groups of four rollouts with random tokens."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(3):
        made = []
        for i in range(4):
            ids = PROMPT + [int(x) for x in rng.integers(0, 300, 10)]
            made.append(trajectory([segment(ids, range(6, 14), logprobs=-6.0)], float(i % 2), task=f"t{g}"))
        groups.append(group(made, name=f"g{g}", task=f"t{g}"))
    return groups


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    """What two equal steps must report alike."""
    return {k: v for k, v in metrics.items() if k != "seconds"}


def maker(model: Path, out: Path) -> Make:
    from trainers.base import TrainerOptions
    from trainers.grpo import create

    def build(seed: int = 0, **settings: Any) -> Grpo:
        return create(TrainerOptions(model, out, seed, settings))

    return build
