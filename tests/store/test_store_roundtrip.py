"""What is put into the store comes out equal, field for field and bit for bit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlike.records import (
    Call,
    Cause,
    Delivery,
    Rollout,
    RolloutStatus,
    Sampling,
    Score,
    Unscored,
)
from polarlike.store import Store
from polarlike.store.codec import dump_json, from_varints, load_json, pack_tokens, unpack_tokens, varints
from polarlike.store.rows import blobs_of, decode_call, encode_call

INT32 = st.integers(-(2**31), 2**31 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(), max_size=20)  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
IDS = hnp.arrays(np.int32, st.integers(0, 40), elements=INT32)
NAMES = st.text("abcdef0123456789", min_size=1, max_size=12)

CALLS = st.builds(
    Call,
    call_id=NAMES,
    session_id=st.just("s"),
    index=st.integers(0, 10_000),
    parent_id=st.none() | NAMES,
    cause=st.sampled_from(Cause),
    new_messages=st.lists(OBJECT, max_size=3),
    tools=st.none() | st.lists(OBJECT, max_size=2),
    suffix_ids=IDS,
    completion_ids=IDS,
    logprobs=hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)),
    versions=hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(-1, 2)),
    forced=hnp.arrays(np.bool_, st.integers(0, 40)),
    reply=OBJECT,
    finish_reason=st.sampled_from(["stop", "tool_calls", "length", "abort", "error"]),
    sampling=st.builds(
        Sampling,
        temperature=FINITE,
        top_p=FINITE,
        top_k=INT32,
        max_tokens=INT32,
        stop=st.lists(TEXT, max_size=2).map(tuple),
        seed=st.none() | st.integers(0, 2**64),
        presence_penalty=FINITE,
        frequency_penalty=FINITE,
        repetition_penalty=FINITE,
    ),
    requested=OBJECT,
    dropped=st.lists(TEXT, max_size=2),
    model=TEXT,
    dialect=TEXT,
    stream=st.booleans(),
    delivery=st.sampled_from(Delivery),
    retries=st.integers(0, 9),
    echo_edits=st.lists(TEXT, max_size=2),
    rewrites=st.dictionaries(TEXT, st.integers(0, 9), max_size=2),
    malformed_calls=st.integers(0, 9),
    text_only=st.booleans(),
    started=FINITE,
    finished=FINITE,
    first_difference=st.none() | OBJECT,
)

SCORES = st.builds(
    Score, value=FINITE, reason=TEXT, components=st.dictionaries(TEXT, FINITE, max_size=3), evidence=OBJECT
) | st.builds(Score, value=st.none(), unscored=st.sampled_from(Unscored), reason=TEXT, evidence=OBJECT)

ROLLOUTS = st.builds(
    Rollout,
    rollout_id=NAMES,
    task_id=NAMES,
    group_id=NAMES,
    sample=st.integers(0, 64),
    status=st.sampled_from(RolloutStatus),
    session_id=NAMES,
    attempt=st.integers(0, 3),
    score=st.none() | SCORES,
    fidelity=OBJECT,
    harness=TEXT,
    harness_exit=OBJECT,
    timings=st.dictionaries(TEXT, FINITE, max_size=3),
    patch=st.binary(max_size=300),
    started=FINITE,
    finished=FINITE,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


ON_DISK = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example asks for a new store
)


def in_fresh_store(url: str, use: Callable[[Store], Any]) -> Any:
    async def run() -> Any:
        store = Store(url)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def assert_equal_calls(a: Call, b: Call) -> None:
    for f in fields(Call):
        assert same(getattr(a, f.name), getattr(b, f.name)), f.name


@settings(max_examples=150, deadline=None)
@given(call=CALLS)
def test_a_call_is_equal_after_its_row(call: Call) -> None:
    encoded = encode_call(call)
    assert set(blobs_of(encoded.row)) == encoded.blobs.keys()
    assert_equal_calls(decode_call(encoded.row, encoded.blobs), call)


@ON_DISK
@given(calls=st.lists(CALLS, max_size=4, unique_by=lambda c: c.call_id))
def test_calls_come_back_equal(new_url: Callable[[], str], calls: list[Call]) -> None:
    async def use(store: Store) -> list[Call]:
        await asyncio.gather(*(store.put_call(c) for c in calls))
        return store.calls("s")

    got = {c.call_id: c for c in in_fresh_store(new_url(), use)}
    assert got.keys() == {c.call_id for c in calls}
    for call in calls:
        assert_equal_calls(got[call.call_id], call)


@ON_DISK
@given(rollout=ROLLOUTS, later=ROLLOUTS)
def test_rollouts_come_back_equal_and_the_last_put_wins(
    new_url: Callable[[], str], rollout: Rollout, later: Rollout
) -> None:
    later.rollout_id = rollout.rollout_id

    async def use(store: Store) -> list[Any]:
        await store.put_rollout(rollout)
        first = store.rollout(rollout.rollout_id)
        await store.put_rollout(later)
        return [first, store.rollout(rollout.rollout_id), store.rollouts()]

    assert in_fresh_store(new_url(), use) == [rollout, later, [later]]


@settings(max_examples=300)
@given(value=JSON)
def test_json_comes_back_equal(value: Any) -> None:
    assert same(load_json(dump_json(value)), value)


def test_json_keeps_nan() -> None:
    assert math.isnan(load_json(dump_json({"loss": math.nan, "x": [None, math.inf]}))["loss"])


@pytest.mark.parametrize("value", [{1: "a"}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": Score(1.0)}])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        dump_json(value)


@settings(max_examples=300)
@given(values=IDS)
def test_variable_length_integers_come_back_equal(values: np.ndarray) -> None:
    assert same(from_varints(varints(values)), values)


def test_variable_length_integers_are_base_128() -> None:
    assert varints(np.asarray([0, 127, 128, 300, 151_645], np.int32)) == bytes(
        [0, 127, 0x80, 1, 0xAC, 2, 0xDD, 0xA0, 9]
    )


def test_logprobs_keep_their_bits_whatever_they_are() -> None:
    bits = np.asarray([0x7FC00001, 0xFFC12345, 0x80000000, 0, 0x7F800000, 0xFF800000, 1], np.uint32)
    logprobs = bits.view(np.float32)
    empty = np.zeros(0, np.int32)
    got = unpack_tokens(pack_tokens(empty, empty, logprobs, empty, np.zeros(7, np.bool_)))
    assert got[2].view(np.uint32).tolist() == bits.tolist()


def test_arrays_that_came_back_can_be_written_to() -> None:
    ids = np.arange(3, dtype=np.int32)
    for array in unpack_tokens(pack_tokens(ids, ids, ids.astype(np.float32), ids, np.zeros(3, np.bool_))):
        array[0] = 1
