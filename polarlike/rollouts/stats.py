"""Success rates with intervals that respect tasks: rollouts of one task are not independent, so tasks are resampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import comb

import numpy as np

from polarlike.records import Rollout


@dataclass(slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval from a bootstrap over tasks (10,000 resamples, fixed seed)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(slots=True)
class Summary:
    tasks: int
    rollouts: int
    unscored: int
    reward: Estimate | None
    pass_at: dict[int, Estimate]  # k -> estimate; a rollout passes with a score of 1


def summarise(rollouts: Iterable[Rollout], ks: Iterable[int] = (1,)) -> Summary:
    """Unscored rollouts count in none of the rates. pass@k is Chen et al.'s unbiased estimator (arXiv 2107.03374)."""
    rollouts = list(rollouts)
    scores: dict[str, list[float]] = defaultdict(list)
    unscored = 0
    for rollout in rollouts:
        if rollout.score is None or rollout.score.value is None:
            unscored += 1
        else:
            scores[rollout.task_id].append(rollout.score.value)
    tasks = list(scores.values())
    reward = _estimate(tasks, lambda s: float(np.mean(s)))
    pass_at = {}
    for k in ks:
        enough = [s for s in tasks if len(s) >= k]
        estimate = _estimate(enough, lambda s, k=k: pass_at_k(len(s), sum(v >= 1.0 for v in s), k))  # type: ignore[misc]
        if estimate:
            pass_at[k] = estimate
    return Summary(len(tasks), len(rollouts), unscored, reward, pass_at)


def why_unscored(rollouts: Iterable[Rollout]) -> str:
    """The commonest reason of those that are unscored, and how many there are; empty where there is none."""
    reasons = Counter(r.score.reason for r in rollouts if r.score and r.score.value is None)
    if not reasons:
        return ""
    [(reason, count)] = reasons.most_common(1)
    total = reasons.total()
    return f"{total} unscored, {'always' if count == total else 'most often'} because of: {reason}"


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The chance that k of n rollouts, drawn without replacement, hold a success."""
    return 1.0 - comb(n - successes, k) / comb(n, k)


def _estimate(tasks: list[list[float]], of: Callable[[list[float]], float]) -> Estimate | None:
    if not tasks:
        return None
    values = np.array([of(s) for s in tasks])
    picks = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))
