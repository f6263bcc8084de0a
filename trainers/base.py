"""The trainer contract: scored trajectories in groups go in; the trainer computes advantages, steps, reports metrics
and publishes a policy version. Trainers register in the entry-point group `polarlike.trainers`:
name -> create(options: TrainerOptions) -> Trainer. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polarlike.engines.base import PolicyWeights
from polarlike.records import Group, Ids, Logprobs


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

    def weights(self) -> PolicyWeights:
        """The current policy for the engine, which is done with it before the next step begins."""
        ...

    def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """Logprobs of ids[start:] under the current policy, each given all before it, at that temperature (above 0), by
        the forward that training uses. float32 [len(ids) - start]; start is at least 1. Blocking."""
        ...

    def save(self, folder: Path) -> None:
        """A checkpoint: model folder, optimizer state, policy version, random state. Written by `checkpoints.write`: a
        run goes on from the last folder that `checkpoints.check` accepts."""
        ...

    def load(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None:
        """The policy alone as a Hugging Face folder (model, tokenizer, chat template)."""
        ...
