"""The trainer contract: scored trajectories in groups go in; the trainer computes advantages, steps, reports metrics
and publishes a policy version. Trainers register in the entry-point group `polarlike.trainers`:
name -> create(options: TrainerOptions) -> Trainer. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polarlike.records import Group


@dataclass(slots=True)
class TrainerOptions:
    """model: Hugging Face folder to start from. out: folder for checkpoints. settings: the trainer's own table of the
    config, checked by the trainer (an unknown key is a UsageError with its nearest name)."""

    model: Path
    out: Path
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


class Trainer(Protocol):
    policy_version: int

    def step(self, groups: list[Group]) -> dict[str, float]:
        """One optimisation step over scored groups; raises policy_version by one if the weights changed (metric
        `stepped` is 1), and else leaves it. Blocking: call it in a thread. The metrics are flat floats
        (loss, grad_norm, reward_mean, kl_k3, clip_fraction, entropy, ...)."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The current policy's state dict by Hugging Face parameter name, for the engine."""
        ...

    def save(self, folder: Path) -> None:
        """A checkpoint: model folder, optimizer state, policy version, random state. Written whole or not at all."""
        ...

    def load(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None:
        """The policy alone as a Hugging Face folder (model, tokenizer, chat template)."""
        ...
