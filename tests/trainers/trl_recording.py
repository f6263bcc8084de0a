"""One recording for the trainers that run on TRL, and a way to see the gradients of any trainer's optimizer steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainers_builders import group, segment, trajectory

from polarlike.records import Group, Segment, Trajectory
from trainers.base import TrainerOptions


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Every run of TRL's loop collects garbage; what the imports left behind is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def recording() -> list[Group]:
    """Two groups, of three rollouts and of two; one to three segments a rollout; two roles; a shared prefix of ten
    tokens; about half of the other tokens sampled, at logprobs that differ from the tiny model's by up to 1."""
    rng = np.random.default_rng(0)

    def part(name: str, role: str) -> Segment:
        ids = np.concatenate([np.arange(10, 20), rng.integers(5, 400, int(rng.integers(8, 30)))])
        trained = np.sort(rng.choice(np.arange(11, ids.size), size=ids.size // 2 - 3, replace=False))
        recorded = -6 + 0.3 * rng.standard_normal(trained.size)
        return segment(ids.tolist(), trained.tolist(), logprobs=recorded.tolist(), name=name, role=role)

    def rollout(name: str, reward: float, roles: str) -> Trajectory:
        names = {"m": "main", "h": "helper"}
        return trajectory([part(f"{name}{k}", names[role]) for k, role in enumerate(roles)], reward, name=name)

    first = group([rollout("a", 1.0, "mh"), rollout("b", 0.0, "m"), rollout("c", 0.0, "mhm")], name="first")
    second = group([rollout("d", 1.0, "mh"), rollout("e", 0.5, "m")], name="second", task="u")
    return [first, second]


def make(create: Any, model: Path, out: Path, **settings: Any) -> Any:
    """A trainer that scales no gradient down."""
    return create(TrainerOptions(model, out, 0, {"lr": 1e-3, "max_grad_norm": 1e9, **settings}))


def gradients(trainer: Any, groups: list[Group]) -> tuple[dict[str, float], list[dict[str, torch.Tensor]]]:
    """The metrics of a step, and what its optimizer steps were given, by parameter."""
    model = trainer.policy.model if hasattr(trainer, "policy") else trainer.model
    named = {id(p): name.removeprefix("base_model.model.") for name, p in model.named_parameters()}
    seen: list[dict[str, torch.Tensor]] = []

    def look(optimizer: Any, *_: Any) -> None:
        parameters = [p for table in optimizer.param_groups for p in table["params"] if p.grad is not None]
        if parameters and not hasattr(optimizer, "optimizer"):  # accelerate wraps the one that steps
            seen.append({named[id(p)]: p.grad.clone() for p in parameters})

    hook = register_optimizer_step_pre_hook(look)
    try:
        metrics = trainer.step(groups)
    finally:
        hook.remove()
    return metrics, seen


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in mine.values())
    for name, gradient in mine.items():
        assert float((gradient - theirs[name]).abs().max()) < within * max(largest, 1.0), name
