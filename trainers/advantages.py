"""Advantage estimators: pure functions over arrays of rewards. Knows numpy alone; `credit` brings them to tokens.

What holds: nothing is padded before statistics are taken. For the estimators over groups a rollout counts once,
however many segments it was cut into and whether or not any of its tokens is trainable; `per_agent` is told what
counts. A group that cannot teach (one rollout, or equal rewards) gets advantage 0, save where `per_agent` is asked for
the raw reward of a singleton, and `group_kind` says which it was so that it can be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

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
"""Estimators over the rewards of one group, by the name used in the config."""

Singleton = Literal["zero", "raw"]


def per_agent(rewards: Rewards, counts: Counts, *, singleton: Singleton = "zero", eps: float = STD_EPS) -> Rewards:
    """(R - mean) / (std + eps) over what one role did in one group, the unbiased std; float64 [n] to float64 [n].

    One entry a rollout in which the role spoke. counts: int64 [n], how often that rollout's reward enters the
    statistics: 1 throughout, or its number of calls or of tokens. If all that counts is one, the advantage is 0, or
    with singleton "raw" the reward as it is.

    Source: Dr. MAS, statistics per agent. Its published code counts every call, takes a singleton's raw reward and an
    eps of 1e-6 (and, unlike this function, counts the copies a batch was padded with).
    """
    if counts.sum() == 1 and singleton == "raw":
        return np.where(counts > 0, rewards, 0.0)
    seen = rewards[counts > 0]
    if seen.size == 0 or group_kind(seen) is not GroupKind.VARIED:
        return np.zeros_like(rewards)
    mean = np.average(rewards, weights=counts)
    variance = np.sum(counts * (rewards - mean) ** 2) / (counts.sum() - 1)
    advantages: Rewards = (rewards - mean) / (np.sqrt(variance) + eps)
    return advantages


def standardise(values: Rewards, eps: float = STD_EPS) -> Rewards:
    """(A - mean) / (std + eps) over tokens, the unbiased std; float64 [n] to float64 [n]. Equal values give 0.

    Source: AgentRL (arXiv 2510.04206), which does so for the token-level advantages of each task of a batch.
    """
    if values.size < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    scaled: Rewards = (values - values.mean()) / (values.std(ddof=1) + eps)
    return scaled
