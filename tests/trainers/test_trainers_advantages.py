"""Advantages against values worked out by hand."""

import math

import numpy as np
import pytest

from trainers.advantages import ESTIMATORS, GroupKind, dr_grpo, group_kind, grpo, rloo

HALF_STD = math.sqrt(4 * 0.25 / 3)  # of [1, 0, 0, 1]: four squares of a half over n - 1 = 3


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.5 / (HALF_STD + 1e-4) * sign for sign in (1, -1, -1, 1)]),
        # mean 1/4, squares 9/16 + 3 * 1/16 = 3/4, over 3: std 1/2
        ([1.0, 0.0, 0.0, 0.0], [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        # mean 1/2, squares 1/4 + 1/4, over 1: std sqrt(1/2)
        ([0.0, 1.0], [-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)]),
    ],
)
def test_grpo_divides_by_the_unbiased_std_of_the_group(rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(grpo(np.array(rewards)), expected, rtol=1e-12)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([1.0, 0.0, 0.0, 0.0])), [0.75, -0.25, -0.25, -0.25])


def test_rloo_compares_each_rollout_with_the_mean_of_the_others() -> None:
    # others of the first: (0 + 0.5) / 2 = 0.25; of the second: (1 + 0.5) / 2 = 0.75; of the third: (1 + 0) / 2 = 0.5
    np.testing.assert_allclose(rloo(np.array([1.0, 0.0, 0.5])), [0.75, -0.75, 0.0], atol=1e-15)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0, 0.0], [0.3, 0.3], [1.0, 1.0]])
def test_one_rollout_or_equal_rewards_give_advantage_zero(name: str, rewards: list[float]) -> None:
    assert (ESTIMATORS[name](np.array(rewards)) == 0).all()


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.0, 1.0], GroupKind.VARIED),
        ([1.0], GroupKind.SINGLE),
        ([0.0, 0.0], GroupKind.ALL_FAIL),
        ([-1.0, -1.0], GroupKind.ALL_FAIL),
        ([1.0, 1.0], GroupKind.ALL_PASS),
        ([0.4, 0.4], GroupKind.ALL_EQUAL),
    ],
)
def test_a_group_is_classed_by_how_its_rewards_are_equal(rewards: list[float], kind: GroupKind) -> None:
    assert group_kind(np.array(rewards)) is kind


def test_a_group_without_rollouts_has_no_kind() -> None:
    with pytest.raises(ValueError, match="without scored rollouts"):
        group_kind(np.zeros(0))
