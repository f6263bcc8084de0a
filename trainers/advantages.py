"""Advantage estimators: pure functions from the rewards of one group to one advantage a rollout. Knows numpy alone.

What holds: a rollout counts once in its group's statistics, however many segments it was cut into and whether or not
any of its tokens is trainable; nothing is padded before statistics are taken. A group that cannot teach (one rollout,
or equal rewards) gets advantage 0 from every estimator, and `group_kind` says which it was so that it can be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float64]

STD_EPS = 1e-4
"""Added to the standard deviation, so that a nearly equal group does not blow up."""

PASSED = 1.0
"""Rewards from here up are a full pass when a group of equal rewards is classed."""


class GroupKind(StrEnum):
    """Whether a group's rewards differ, and if not, how they are equal."""

    VARIED = "varied"
    SINGLE = "single"  # one rollout: nothing to compare it with
    ALL_FAIL = "all_fail"  # equal, 0 or less
    ALL_PASS = "all_pass"  # equal, 1 or more
    ALL_EQUAL = "all_equal"  # equal, in between: a graded verifier


def group_kind(rewards: Rewards) -> GroupKind:
    """The class of one group's rewards, float64 [n]. n = 0 is a ValueError: such a group has no statistics."""
    if rewards.size == 0:
        raise ValueError("a group without scored rollouts has no kind")
    if rewards.size == 1:
        return GroupKind.SINGLE
    if np.ptp(rewards) > 0:
        return GroupKind.VARIED
    if rewards[0] <= 0:
        return GroupKind.ALL_FAIL
    return GroupKind.ALL_PASS if rewards[0] >= PASSED else GroupKind.ALL_EQUAL


def grpo(rewards: Rewards) -> Rewards:
    """(R - mean) / (std + eps), the unbiased std (ddof 1) over the group; float64 [n] to float64 [n].

    Source: DeepSeekMath (arXiv 2402.03300), with the eps and ddof that are common in open trainers.
    """
    if group_kind(rewards) is not GroupKind.VARIED:
        return np.zeros_like(rewards)
    advantages: Rewards = (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPS)
    return advantages


def dr_grpo(rewards: Rewards) -> Rewards:
    """R - mean; float64 [n] to float64 [n]. Meant for a loss without a length normaliser (`aggregation: constant`).

    Source: Dr. GRPO (arXiv 2503.20783).
    """
    if group_kind(rewards) is not GroupKind.VARIED:
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


def rloo(rewards: Rewards) -> Rewards:
    """R minus the mean of the others, which is n / (n - 1) * (R - mean); float64 [n] to float64 [n].

    Source: RLOO (arXiv 2402.14740).
    """
    if group_kind(rewards) is not GroupKind.VARIED:
        return np.zeros_like(rewards)
    n = rewards.size
    centred: Rewards = rewards - rewards.mean()
    return centred * (n / (n - 1))


ESTIMATORS: dict[str, Callable[[Rewards], Rewards]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Estimators by the name used in the config."""
