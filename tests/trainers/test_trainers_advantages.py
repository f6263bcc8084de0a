"""Advantages against values worked out by hand."""

import math

import numpy as np
import pytest

from trainers.advantages import ESTIMATORS, GroupKind, dr_grpo, group_kind, grpo, per_agent, rloo, standardise

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


def agents(rewards: list[float], counts: list[int], **options: object) -> list[float]:
    return per_agent(np.array(rewards), np.array(counts), **options).tolist()  # type: ignore[arg-type]


PUBLISHED = {"singleton": "raw", "eps": 1e-6}


def test_per_agent_in_its_published_form_counts_every_call() -> None:
    # t1 (R = 1) calls S three times and V once, t2 (R = 0) S once and V twice.
    # S: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4. V: mean 1/3, variance (4/9 + 2/9) / 2 = 1/3.
    np.testing.assert_allclose(agents([1, 0], [3, 1], **PUBLISHED), [0.5, -1.5], rtol=1e-5)
    np.testing.assert_allclose(agents([1, 0], [1, 2], **PUBLISHED), [2 / 3 * 3**0.5, -(3**0.5) / 3], rtol=1e-5)


def test_a_padding_copy_shifts_the_published_statistics() -> None:
    # S with one copy of a row of t1: mean 4/5, variance (4/25 + 16/25) / 4 = 1/5.
    np.testing.assert_allclose(agents([1, 0], [4, 1], **PUBLISHED), [0.2**0.5, -4 * 0.2**0.5], rtol=1e-5)


def test_per_agent_by_trajectory_counts_a_role_once_a_rollout() -> None:
    # As above, with what counts once being a rollout: 1 and 0 for both roles, std sqrt(1/2).
    expected = 0.5 / (0.5**0.5 + 1e-4)
    np.testing.assert_allclose(agents([1, 0], [1, 1]), [expected, -expected], rtol=1e-12)


def test_roles_that_spoke_in_different_rollouts_have_different_statistics() -> None:
    # R = 1, 0, 0.5: S spoke in all (mean 1/2, std 1/2), V in the first and the last (mean 3/4, std sqrt(1/8)).
    np.testing.assert_allclose(agents([1, 0, 0.5], [1, 1, 1]), [0.5 / 0.5001, -0.5 / 0.5001, 0], atol=1e-15)
    expected = 0.25 / (0.125**0.5 + 1e-4)
    both = agents([1, 0, 0.5], [1, 0, 1])
    np.testing.assert_allclose([both[0], both[2]], [expected, -expected], rtol=1e-12)


def test_per_agent_by_token_weighs_long_rollouts_more() -> None:
    # Six tokens at 1 and two at 0: mean 3/4, variance (6/16 + 18/16) / 7 = 3/14.
    std = (3 / 14) ** 0.5
    np.testing.assert_allclose(agents([1, 0], [6, 2], eps=1e-6), [0.25 / std, -0.75 / std], rtol=1e-5)


@pytest.mark.parametrize(("singleton", "expected"), [("zero", 0.0), ("raw", 0.7)])
def test_a_role_that_appears_once_in_a_group_gets_zero_or_its_raw_reward(singleton: str, expected: float) -> None:
    assert agents([0.2, 0.7, 0.1], [0, 1, 0], singleton=singleton)[1] == expected


@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_equal_rewards_of_a_role_or_several_calls_in_one_rollout_give_zero(singleton: str) -> None:
    assert agents([1, 1, 0], [2, 1, 0], singleton=singleton)[:2] == [0.0, 0.0]
    assert agents([1, 0], [3, 0], singleton=singleton)[0] == 0.0


def test_standardised_values_have_mean_zero_and_equal_ones_are_zero() -> None:
    # mean 2, squares 4 + 0 + 4 over 2: std 2
    np.testing.assert_allclose(standardise(np.array([0.0, 2.0, 4.0])), [-2 / 2.0001, 0, 2 / 2.0001], atol=1e-15)
    assert standardise(np.array([0.3, 0.3])).tolist() == [0.0, 0.0]
    assert standardise(np.array([0.3])).tolist() == [0.0]
