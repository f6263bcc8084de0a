from itertools import combinations

import pytest

from polarlike.records import Rollout, RolloutStatus, Score, Unscored
from polarlike.rollouts.stats import pass_at_k, summarise


def rollout(task: str, value: float | None) -> Rollout:
    score = Score(value) if value is not None else Score(None, Unscored.DISCARD, "x")
    return Rollout(f"r{id(score)}", task, task, 0, RolloutStatus.FINISHED, score=score)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (5, 2, 3), (4, 4, 1), (6, 3, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, c: int, k: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_unscored_rollouts_count_in_no_rate_and_tasks_weigh_alike() -> None:
    found = summarise([rollout("a", 1.0), rollout("a", 0.5), rollout("a", None), rollout("b", 0.0)], ks=(1, 2))
    assert (found.tasks, found.rollouts, found.unscored) == (2, 4, 1)
    assert found.reward is not None
    assert found.reward.value == pytest.approx((0.75 + 0.0) / 2)
    assert found.pass_at[1].value == pytest.approx((0.5 + 0.0) / 2)
    assert found.pass_at[2].value == pytest.approx(1.0)  # only task a has two scored rollouts
    assert found.pass_at[2].low == found.pass_at[2].high == pytest.approx(1.0)


def test_the_interval_is_that_of_tasks_and_not_of_rollouts() -> None:
    many = [rollout(t, v) for t, v in (("a", 1.0), ("b", 0.0)) for _ in range(500)]
    found = summarise(many)
    assert found.reward is not None
    assert (found.reward.low, found.reward.high) == (0.0, 1.0)


def test_nothing_scored_gives_no_estimate() -> None:
    assert summarise([rollout("a", None)]).reward is None
