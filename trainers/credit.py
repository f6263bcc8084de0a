"""From scored groups to rows with an advantage on every trainable token: what all trainers take their rows from.

Knows advantages, rows and the credit settings; no loss, no model. What holds: a row is given out only if it can teach,
and what was left out is counted by role and by why; an unscored rollout is an error, never a zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlike.records import Group, PolarError
from trainers.advantages import ESTIMATORS, GroupKind, Rewards, group_kind, per_agent, standardise
from trainers.rows import Row, rows_of
from trainers.settings import CreditSettings


@dataclass(slots=True)
class Credit:
    """rows: those that can teach, by group, then by rollout, without groups and rollouts that have none. rewards:
    float64 [n] a group, as given. kinds: one a group, SINGLE for an empty one. idle: rollouts left out, wholly or with
    the segments of one role, by that role and by how the rewards it was compared with were equal."""

    rows: list[list[list[Row]]]
    rewards: list[Rewards]
    kinds: list[GroupKind]
    idle: Counter[tuple[str, GroupKind]]


@dataclass(slots=True)
class Graded:
    """A row, its advantage (one, or float64 [n] one a token), and the kind of the rewards that were compared for it."""

    row: Row
    advantage: float | Rewards
    kind: GroupKind

    @property
    def teaches(self) -> bool:
        return self.kind is GroupKind.VARIED or bool(np.any(self.advantage))


Estimator = Callable[[Group, Rewards, list[list[Row]], CreditSettings], Iterator[Graded]]
"""From a group, its rewards (one a rollout) and its rows (by rollout) to an advantage for each of the rows."""


def rows_with_advantages(groups: Sequence[Group], settings: CreditSettings) -> Credit:
    """Raises PolarError on a rollout without a finite score and on a token that cannot be trained on (`rows_of`)."""
    rewards = [group_rewards(group) for group in groups]
    kinds = [group_kind(r) if r.size else GroupKind.SINGLE for r in rewards]
    estimator = _by_role if settings.advantage == "per_agent" else _by_group
    rows: list[list[list[Row]]] = []
    idle: set[tuple[int, str, GroupKind]] = set()
    for group, values, by_rollout in zip(groups, rewards, rows_of(groups), strict=True):
        taught: dict[int, list[Row]] = {}
        for graded in estimator(group, values, by_rollout, settings):
            row = graded.row
            if graded.teaches:
                row.advantages = np.broadcast_to(graded.advantage, row.targets.shape).astype(np.float32)
                taught.setdefault(row.rollout, []).append(row)
            else:
                idle.add((row.rollout, row.role, graded.kind))
        if taught:
            rows.append(list(taught.values()))
    if settings.standardise_per_task:
        _standardise_per_task([row for by_rollout in rows for own in by_rollout for row in own])
    return Credit(rows, rewards, kinds, Counter((role, kind) for _, role, kind in idle))


def group_rewards(group: Group) -> Rewards:
    """float64 [n], one a rollout. Raises PolarError on a rollout that is unscored or whose value is not finite."""
    values = []
    for trajectory in group.trajectories:
        value = trajectory.score.value if trajectory.score is not None else None
        if value is None or not math.isfinite(value):
            raise PolarError(
                f"Rollout {trajectory.rollout_id} of group {group.group_id} has no score; "
                "unscored rollouts must be left out of the groups that are trained on."
            )
        values.append(value)
    return np.array(values, np.float64)


def _by_group(group: Group, rewards: Rewards, rows: list[list[Row]], settings: CreditSettings) -> Iterator[Graded]:
    """One advantage a rollout, the same in all its segments."""
    if not rewards.size:
        return
    kind = group_kind(rewards)
    for own, value in zip(rows, ESTIMATORS[settings.advantage](rewards), strict=True):
        for row in own:
            yield Graded(row, float(value), kind)


def _by_role(group: Group, rewards: Rewards, rows: list[list[Row]], settings: CreditSettings) -> Iterator[Graded]:
    """One advantage a rollout and role: compared is what the rollouts in which that role spoke were given."""
    options = settings.per_agent
    for role in dict.fromkeys(s.role for t in group.trajectories for s in t.segments):
        counts = np.array([_count(group, rows, i, role, options.unit) for i in range(rewards.size)], np.int64)
        if not counts.any():
            continue
        kind = group_kind(rewards[counts > 0])
        values = per_agent(rewards, counts, singleton=options.singleton, eps=options.eps)
        for own, value in zip(rows, values, strict=True):
            for row in own:
                if row.role == role:
                    yield Graded(row, float(value), kind)


def _count(group: Group, rows: list[list[Row]], rollout: int, role: str, unit: str) -> int:
    """How often a rollout's reward counts in a role's statistics. Only calls with something to train are calls here,
    so that one which stands masked in a second segment counts once."""
    if unit == "trajectory":
        return int(any(s.role == role for s in group.trajectories[rollout].segments))
    own = [row for row in rows[rollout] if row.role == role]
    return sum(row.targets.size if unit == "token" else int(row.calls[-1]) + 1 for row in own)


def _standardise_per_task(rows: Sequence[Row]) -> None:
    for task in {row.task_id for row in rows}:
        own = [row for row in rows if row.task_id == task]
        scaled = standardise(np.concatenate([row.advantages for row in own]).astype(np.float64))
        for row, part in zip(own, np.split(scaled, np.cumsum([r.targets.size for r in own])[:-1]), strict=True):
            row.advantages = part.astype(np.float32)
