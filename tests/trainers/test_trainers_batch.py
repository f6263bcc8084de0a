"""The layout of shared prefixes, against a prefix tree built the plain way."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers_builders import group, segment, trajectory

from trainers.batch import MicroBatch, micro_batches
from trainers.rows import Row, rows_of, token_index


def rows_from(streams: list[tuple[list[int], list[int]]]) -> list[Row]:
    """One rollout a stream; a stream is ids and trainable positions."""
    [by_rollout] = rows_of([group([trajectory([segment(ids, where)], 0.0) for ids, where in streams])])
    return [row for rows in by_rollout for row in rows]


def visible(batch: MicroBatch) -> npt.NDArray[np.bool_]:
    """[P, P]: which laid-out token sees which."""
    mask = np.zeros((batch.packed_tokens, batch.packed_tokens), np.bool_)
    for block in batch.blocks:
        for query in range(*block.query):
            end = query + 1 if block.causal else block.key[1]
            assert not mask[query, block.key[0] : end].any(), "a key is attended to twice"
            mask[query, block.key[0] : end] = True
    return mask


def assert_every_token_sees_its_own_past(batch: MicroBatch) -> None:
    mask = visible(batch)
    nth: dict[int, int] = {}
    for n, row_index in enumerate(batch.row):
        row = batch.rows[row_index]
        k = nth[row_index] = nth.get(row_index, -1) + 1
        past = np.flatnonzero(mask[batch.sources[batch.place[n]]])
        past = past[np.argsort(batch.positions[past])]
        wanted = row.ids[: row.sources[k] + 1]
        assert batch.positions[past].tolist() == list(range(wanted.size))
        assert batch.ids[past].tolist() == wanted.tolist()
        assert batch.targets[n] == row.targets[k]
        assert batch.temperatures[batch.place[n]] == np.float32(row.temperature)


streams = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=12).flatmap(
        lambda ids: st.tuples(st.just(ids), st.lists(st.integers(1, len(ids) - 1), min_size=1, unique=True).map(sorted))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(streams, st.integers(1, 40))
def test_any_rows_are_laid_out_so_that_each_token_sees_its_own_past_once(
    made: list[tuple[list[int], list[int]]], max_tokens: int
) -> None:
    rows = rows_from(made)
    total = sum(row.targets.size for row in rows)
    weights = np.arange(1, total + 1, dtype=np.float32)
    batches = micro_batches(rows, weights, max_tokens)
    for batch in batches:
        assert_every_token_sees_its_own_past(batch)
        assert batch.packed_tokens <= batch.rows[0].ids.size + max_tokens
        prefixes = {tuple(row.ids[: n + 1]) for row in batch.rows for n in range(row.ids.size)}
        assert batch.packed_tokens == len(prefixes)
    segment_of, _ = token_index(rows)
    wanted = sorted(zip(segment_of, np.concatenate([row.targets for row in rows]), weights, strict=True))
    seen = sorted(
        (b.rows[b.row[n]].segment, b.targets[n], b.weights[n]) for b in batches for n in range(b.targets.size)
    )
    assert seen == wanted


def test_eight_rollouts_on_a_prompt_of_1500_tokens_cost_the_prompt_once() -> None:
    prompt = [int(x) for x in np.random.default_rng(0).integers(3, 500, 1500)]
    made = [([*prompt, i, *([1] * 100)], list(range(1500, 1601))) for i in range(8)]
    rows = rows_from(made)
    [batch] = micro_batches(rows, np.ones(8 * 101, np.float32), 8192)
    # each stream is forwarded up to its last token but one: 1500 + 100
    assert batch.packed_tokens == 1500 + 8 * 100
    assert batch.unpacked_tokens == 8 * 1600
    # one block a run with itself, and one in which all seven later runs see the prompt
    assert len(batch.blocks) == 8 + 1


def test_a_prompt_longer_than_a_micro_batch_is_still_shared() -> None:
    prompt = list(range(3, 103))
    rows = rows_from([([*prompt, i, 1, 1, 1, 1], [104]) for i in range(6)])
    batches = micro_batches(rows, np.ones(6, np.float32), 12)
    # Four tokens of each stream are its own: three rows of them fit beyond the first.
    assert [b.packed_tokens for b in batches] == [100 + 4 * 4, 100 + 2 * 4]


def test_tokens_sampled_from_one_place_share_its_logits_unless_temperatures_differ() -> None:
    streams = [segment([5, 6, 7], [2]), segment([5, 6, 8], [2]), segment([5, 6, 9], [2], temperature=0.5)]
    [by_rollout] = rows_of([group([trajectory([s], 0.0) for s in streams])])
    [batch] = micro_batches([row for rows in by_rollout for row in rows], np.ones(3, np.float32), 100)
    assert batch.ids.tolist() == [5, 6]
    assert batch.sources.tolist() == [1, 1]
    assert sorted(batch.temperatures.tolist()) == [0.5, 1.0]


def test_without_sharing_every_row_is_alone() -> None:
    rows = rows_from([([1, 2, 3], [2]), ([1, 2, 4], [1, 2])])
    batches = micro_batches(rows, np.array([0.5, 1.0, 2.0], np.float32), 100, share_prefixes=False)
    assert [b.ids.tolist() for b in batches] == [[1, 2], [1, 2]]
    assert [b.weights.tolist() for b in batches] == [[0.5], [1.0, 2.0]]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_no_rows_make_no_batches(share_prefixes: bool) -> None:
    assert micro_batches([], np.zeros(0, np.float32), 40, share_prefixes=share_prefixes) == []


def test_tokens_behind_the_last_trainable_one_are_not_laid_out() -> None:
    [row] = rows_from([([1, 2, 3, 4, 5, 6], [2])])
    assert row.ids.tolist() == [1, 2]
