"""From scores to an advantage on every token, against values worked out by hand."""

from typing import Any

import numpy as np
import pytest
from trainers_builders import group, segment, trajectory

from polarlike.records import Group, Segment
from trainers.advantages import GroupKind
from trainers.credit import Credit, rows_with_advantages
from trainers.settings import CreditSettings

S, V = "solver", "verifier"


def calls(role: str, *tokens: int) -> list[Segment]:
    """One segment a call, of so many trainable tokens."""
    return [segment([1, *range(2, 2 + n)], range(1, n + 1), role=role) for n in tokens]


def two_roles() -> Group:
    """t1 (R = 1): S three times and V once; t2 (R = 0): S once and V twice; one token each."""
    return group([trajectory(calls(S, 1, 1, 1) + calls(V, 1), 1.0), trajectory(calls(S, 1) + calls(V, 1, 1), 0.0)])


def credited(groups: list[Group], **settings: Any) -> Credit:
    return rows_with_advantages(groups, CreditSettings(**settings))


def advantages(credit: Credit) -> list[float]:
    """Of each row's first token."""
    return [float(row.advantages[0]) for by_rollout in credit.rows for rows in by_rollout for row in rows]


def test_the_published_form_of_per_agent_on_its_vector() -> None:
    credit = credited([two_roles()], advantage="per_agent", per_agent={"unit": "call", "singleton": "raw", "eps": 1e-6})
    expected = [0.5, 0.5, 0.5, 1.1547, -1.5, -0.5773, -0.5773]
    np.testing.assert_allclose(advantages(credit), expected, atol=1e-4)


def test_statistics_without_roles_count_a_rollout_once() -> None:
    np.testing.assert_allclose(advantages(credited([two_roles()])), [0.7071] * 4 + [-0.7071] * 3, atol=2e-4)


def test_per_agent_by_default_counts_rollouts() -> None:
    third = trajectory(calls(S, 1), 0.5)
    made = group([*two_roles().trajectories, third])
    # S in all three: mean 1/2, std 1/2. V in t1 and t2: mean 1/2, std sqrt(1/2).
    s, v = 0.5 / 0.5001, 0.5 / (0.5**0.5 + 1e-4)
    np.testing.assert_allclose(
        advantages(credited([made], advantage="per_agent")), [s, s, s, v, -s, -v, -v, 0], rtol=1e-6
    )


def test_calls_within_one_segment_count_as_those_in_segments_of_their_own() -> None:
    merged = segment(range(9), [2, 4, 5, 8], role=S, calls=[(2, 3), (4, 6), (8, 9)])  # three calls of t1
    made = group([trajectory([merged, *calls(V, 1)], 1.0), two_roles().trajectories[1]])
    options = {"unit": "call", "singleton": "raw", "eps": 1e-6}
    credit = credited([made], advantage="per_agent", per_agent=options)
    np.testing.assert_allclose(advantages(credit), [0.5, 1.1547, -1.5, -0.5773, -0.5773], atol=1e-4)


def test_by_token_each_trainable_token_counts() -> None:
    made = group([trajectory(calls(S, 1, 2, 3), 1.0), trajectory(calls(S, 2), 0.0)])
    credit = credited([made], advantage="per_agent", per_agent={"unit": "token", "eps": 1e-6})
    std = (3 / 14) ** 0.5  # six tokens at 1, two at 0
    np.testing.assert_allclose(advantages(credit), [0.25 / std] * 3 + [-0.75 / std], rtol=1e-5)


def test_a_role_that_cannot_teach_is_left_out_and_counted_by_role_and_kind() -> None:
    made = group(
        [
            trajectory(calls(S, 1) + calls("planner", 1, 2), 1.0),
            trajectory(calls(S, 1) + calls(V, 1), 0.0),
            trajectory(calls(S, 1) + calls(V, 1), 0.0),
        ]
    )
    credit = credited([made], advantage="per_agent")
    assert {row.role for by_rollout in credit.rows for rows in by_rollout for row in rows} == {S}
    assert credit.idle == {("planner", GroupKind.SINGLE): 1, (V, GroupKind.ALL_FAIL): 2}
    raw = credited([made], advantage="per_agent", per_agent={"singleton": "raw"})
    assert {row.role: row.advantages.tolist() for row in raw.rows[0][0]}["planner"] == [1.0, 1.0]


def test_a_group_without_variance_is_left_out_whole() -> None:
    same = group([trajectory(calls(S, 1) + calls(V, 1), 1.0) for _ in range(3)])
    credit = credited([same, two_roles()])
    assert credit.kinds == [GroupKind.ALL_PASS, GroupKind.VARIED]
    assert len(credit.rows) == 1
    assert credit.idle == {(S, GroupKind.ALL_PASS): 3, (V, GroupKind.ALL_PASS): 3}


def test_a_rollout_at_the_mean_of_its_group_stays_with_advantage_zero() -> None:
    """It is part of the batch: its tokens count in the loss's denominator, as they would an inch off the mean."""
    credit = credited([group([trajectory(calls(S, 1), r) for r in (0.0, 0.5, 1.0)])])
    assert [len(rows) for rows in credit.rows[0]] == [1, 1, 1]


def test_advantages_of_a_task_are_standardised_over_its_tokens_in_the_step() -> None:
    one = group([trajectory(calls(S, 3), 1.0), trajectory(calls(S, 1), 0.0)], name="a", task="a")
    other = group([trajectory(calls(S, 1), 10.0), trajectory(calls(S, 1), 0.0)], name="b", task="b")
    credit = credited([one, other], advantage="dr_grpo", standardise_per_task=True)
    found = [row.advantages.tolist() for by_rollout in credit.rows for rows in by_rollout for row in rows]
    # a: 1/2 three times and -1/2 once: mean 1/4, variance (3/16 + 9/16) / 3 = 1/4. b: 5 and -5: std sqrt(50).
    a, b = 0.25 / 0.5001, 5 / (50**0.5 + 1e-4)
    np.testing.assert_allclose(np.concatenate(found), [a, a, a, -0.75 / 0.5001, b, -b], rtol=1e-6)


def test_a_group_without_rollouts_is_single_and_empty() -> None:
    credit = credited([group([])])
    assert (credit.rows, credit.kinds) == ([], [GroupKind.SINGLE])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "per_agent"])
def test_no_estimator_depends_on_how_a_rollout_was_cut(name: str) -> None:
    whole = group([trajectory([segment(range(9), [2, 3, 6])], 1.0), trajectory(calls("main", 2), 0.0)])
    cut = group([trajectory([segment(range(9), [2, 3]), segment(range(9), [6])], 1.0), whole.trajectories[1]])
    assert set(advantages(credited([whole], advantage=name))) == set(advantages(credited([cut], advantage=name)))
