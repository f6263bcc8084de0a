"""Rows: what of a segment is trained, and which tokens cannot be."""

import numpy as np
import pytest
from trainers_builders import group, segment, trajectory

from polarlike.records import PolarError, Segment
from trainers.rows import Row, rows_of


def only(made: Segment) -> Row:
    [[[row]]] = rows_of([group([trajectory([made], 0.0)])])
    return row


def test_a_row_ends_before_its_last_trainable_token() -> None:
    row = only(segment([1, 2, 3, 4, 5, 6], [2, 4], logprobs=[-1.0, -2.0]))
    assert row.ids.tolist() == [1, 2, 3, 4]
    assert (row.sources.tolist(), row.targets.tolist()) == ([1, 3], [3, 5])
    assert row.old_logprobs.tolist() == [-1.0, -2.0]


def test_segments_without_trainable_tokens_give_no_rows_and_rollouts_keep_their_places() -> None:
    empty, full = segment([1, 2, 3], []), segment([1, 2, 3], [1, 2])
    made = [trajectory([empty], 0.0), trajectory([full, empty, full], 1.0), trajectory([full], 0.0)]
    [by_rollout] = rows_of([group(made)])
    assert [[(r.rollout, r.segment) for r in rows] for rows in by_rollout] == [[], [(1, 0), (1, 1)], [(2, 2)]]


def test_a_token_belongs_to_the_call_whose_span_it_lies_in_even_where_calls_touch_or_have_masked_tokens() -> None:
    made = segment(range(10), [2, 3, 4, 6, 9], calls=[(2, 4), (4, 7), (9, 10)])
    assert only(made).calls.tolist() == [0, 0, 1, 1, 2]


def test_a_call_that_is_masked_throughout_is_not_counted() -> None:
    made = segment(range(10), [6, 7], calls=[(2, 4), (6, 8)])
    assert only(made).calls.tolist() == [0, 0]


def test_without_spans_each_run_of_trainable_tokens_is_a_call() -> None:
    assert only(segment(range(10), [2, 3, 5, 8, 9])).calls.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (segment([1, 2], [0]), "no context"),
        (segment([1, 2], [1], logprobs=float("nan")), "finite logprob"),
        (segment([1, 2], [1], logprobs=float("-inf")), "finite logprob"),
        (segment([1, 2], [1], temperature=0.0), "temperature 0"),
    ],
)
def test_a_token_that_cannot_be_trained_on_is_an_error_that_names_its_rollout(bad: Segment, message: str) -> None:
    with pytest.raises(PolarError, match=f"rollout r7.*{message}"):
        rows_of([group([trajectory([bad], 1.0, name="r7")])])


def test_a_row_keeps_the_lowest_version_of_its_trainable_tokens() -> None:
    made = segment([1, 2, 3, 4], [1, 3], version=4)
    made.versions[:] = np.array([-1, 4, 1, 3])
    assert only(made).oldest == 3
