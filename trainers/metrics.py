"""What a training step reports. Knows groups, rows and sums over tokens; no torch, no model.

All values are floats under flat keys:
- groups, rollouts; groups_unusable (no rollout with a trainable token), rollouts_untrainable; reward_mean, reward_std
  (over all rollouts, zero-variance groups too).
- zero_variance, and as disjoint parts of it zero_variance_single, _all_fail, _all_pass, _all_equal: shares of groups.
- idle/ROLE/KIND: rollouts in which the role has something to train, but no lesson to learn from it, since the rewards
  that its advantage compares are of that kind (single, all_fail, all_pass, all_equal).
- advantage_mean, advantage_std, advantage_max_abs over the trainable tokens that are left.
- loss, grad_norm (before clipping): means over the optimizer steps. optimizer_steps, skipped_nonfinite; stepped is 1 if
  weights changed, else 0 (and loss and grad_norm are 0).
- stopped_mismatch, stopped_epochs_kl: 1 if that guard ended the step.
- correction_mean, correction_zero: mean of the tokens' weights under a correction, and the share of them that are 0
  (1 and 0 without one).
- kl_k3: mismatch of trainer and engine, measured before this step changed weights (on its first minibatch); on stale
  tokens it holds the policy's own movement too. kl_k3_all, clip_fraction, entropy (nats) and ratio_max, of the ratio
  in the loss: over all passes.
- staleness_max, staleness_mean: the trainer's version minus the oldest version in a rollout, over rollouts.
- trainable_tokens: one pass. packed_tokens, unpacked_tokens: laid out over all passes, and what they would have been
  with each segment forwarded alone.
- mass/ROLE: the role's share of the sum of |weight x advantage| over tokens; mass_task/TASK that of each task, and
  mass_task_max the largest of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from polarlike.records import Group, Logprobs
from trainers.advantages import GroupKind
from trainers.batch import MicroBatch
from trainers.credit import Credit
from trainers.losses import TokenSums
from trainers.rows import Row


def reward_metrics(groups: Sequence[Group], credit: Credit) -> dict[str, float]:
    """Of the groups as they were given. A group without rollouts counts as unusable and as single."""
    values = np.concatenate([*credit.rewards, np.zeros(0)])
    trainable = [[sum(s.trainable for s in t.segments) for t in group.trajectories] for group in groups]
    n = max(len(groups), 1)
    shares = {f"zero_variance_{k}": credit.kinds.count(k) / n for k in GroupKind if k is not GroupKind.VARIED}
    return {
        "groups": float(len(groups)),
        "rollouts": float(values.size),
        "groups_unusable": float(sum(not any(counts) for counts in trainable)),
        "rollouts_untrainable": float(sum(count == 0 for counts in trainable for count in counts)),
        "reward_mean": float(values.mean()) if values.size else 0.0,
        "reward_std": float(values.std(ddof=1)) if values.size > 1 else 0.0,
        "zero_variance": sum(shares.values()),
        **shares,
        **{f"idle/{role}/{kind}": float(count) for (role, kind), count in sorted(credit.idle.items())},
    }


class Tally:
    """Collects what one step did; rollouts as `credit` gives them."""

    def __init__(self, policy_version: int, rollouts: Sequence[Sequence[Sequence[Row]]]) -> None:
        self.optimizer_steps = 0
        self._skipped = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self.first: TokenSums | None = None
        self._stopped = {"stopped_mismatch": 0.0, "stopped_epochs_kl": 0.0}
        self._corrections: list[Logprobs] = []
        self._all = TokenSums()
        self._packed = self._unpacked = 0
        self._roles: defaultdict[str, float] = defaultdict(float)
        self._tasks: defaultdict[str, float] = defaultdict(float)
        training = [rows for group in rollouts for rows in group]
        self._staleness = [float(policy_version - min(row.oldest for row in rows)) for rows in training]
        self._advantages = np.concatenate(
            [row.advantages.astype(np.float64) for rows in training for row in rows] or [np.zeros(0)]
        )

    def add_batch(self, batch: MicroBatch) -> None:
        self._packed += batch.packed_tokens
        self._unpacked += batch.unpacked_tokens
        mass = np.bincount(batch.row, np.abs(batch.weights * batch.advantages), len(batch.rows))
        for row, share in zip(batch.rows, mass, strict=True):
            self._roles[row.role] += float(share)
            self._tasks[row.task_id] += float(share)

    def add_correction(self, weights: Logprobs) -> None:
        """One segment's, by token."""
        self._corrections.append(weights)

    def end(self, guard: Literal["mismatch", "epochs_kl"], sums: TokenSums) -> None:
        """A guard ended the step at a minibatch on which these were measured."""
        self.first = self.first or sums
        self._stopped[f"stopped_{guard}"] = 1.0

    def add_minibatch(self, sums: TokenSums, loss: float, grad_norm: float, finite: bool) -> None:
        self.first = self.first or sums
        self._all.merge(sums)
        if not finite:
            self._skipped += 1
            return
        self.optimizer_steps += 1
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        whole = sum(self._roles.values()) or 1.0
        corrections = np.concatenate(self._corrections) if self._corrections else np.ones(1, np.float32)
        means = self._all.means()
        return {
            "loss": _mean(self._losses),
            "grad_norm": _mean(self._norms),
            "stepped": float(self.optimizer_steps > 0),
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_nonfinite": float(self._skipped),
            **self._stopped,
            "correction_mean": float(corrections.mean(dtype=np.float64)),
            "correction_zero": float((corrections == 0).mean()),
            "advantage_mean": _mean(self._advantages),
            "advantage_std": float(self._advantages.std(ddof=1)) if self._advantages.size > 1 else 0.0,
            "advantage_max_abs": float(np.abs(self._advantages).max(initial=0.0)),
            "kl_k3": (self.first or self._all).means()["kl_k3"],
            "kl_k3_all": means["kl_k3"],
            "clip_fraction": means["clip_fraction"],
            "entropy": means["entropy"],
            "ratio_max": means["ratio_max"],
            "staleness_max": max(self._staleness, default=0.0),
            "staleness_mean": _mean(self._staleness),
            "trainable_tokens": float(self._advantages.size),
            "packed_tokens": float(self._packed),
            "unpacked_tokens": float(self._unpacked),
            **{f"mass/{role}": mass / whole for role, mass in sorted(self._roles.items())},
            **{f"mass_task/{task}": mass / whole for task, mass in sorted(self._tasks.items())},
            "mass_task_max": max(self._tasks.values(), default=0.0) / whole,
        }


def _mean(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
