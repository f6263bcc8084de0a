"""The promises over random sessions: exact context, once, sums. The prompts are worked out here by plain recursion."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlike.records import Call, Cause, Delivery, Sampling
from reconstruct import rebuild

ASKED = [{"role": "user", "content": text} for text in "ab"]
STORED = (Delivery.COMMITTED, Delivery.FLUSHED, Delivery.LOST, Delivery.ABORTED)


@st.composite
def sessions(draw: st.DrawFn) -> list[Call]:
    """A random forest of calls. Ids count up through the session, so that no two tokens are alike."""
    calls: list[Call] = []
    number = 0
    for i in range(draw(st.integers(0, 14))):
        parent = draw(st.none() | st.sampled_from(calls)) if calls else None
        suffix, sampled = draw(st.integers(0, 3)), draw(st.integers(0, 4))
        logprobs = draw(
            st.lists(st.sampled_from([-0.5, -1.5, -3.0, 0.0, np.nan, 0.5, -np.inf]), min_size=sampled, max_size=sampled)
        )
        started = float(draw(st.integers(0, 5)))
        calls.append(
            Call(
                call_id=f"c{i}",
                session_id="s",
                index=i,
                parent_id=parent.call_id if parent else None,
                cause=draw(st.sampled_from(list(Cause))),
                new_messages=draw(st.lists(st.sampled_from(ASKED), max_size=2)),
                tools=None,
                suffix_ids=np.arange(number, number + suffix, dtype=np.int32),
                completion_ids=np.arange(number + suffix, number + suffix + sampled, dtype=np.int32),
                logprobs=np.asarray(logprobs, np.float32),
                versions=np.full(sampled, i, np.int32),
                forced=np.asarray(draw(st.lists(st.booleans(), min_size=sampled, max_size=sampled)), np.bool_),
                reply={"role": "assistant", "content": draw(st.sampled_from("xy"))},
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                sampling=Sampling(temperature=draw(st.sampled_from([1.0, 0.5]))),
                model=draw(st.sampled_from(["one", "two"])),
                delivery=draw(st.sampled_from(STORED)),
                text_only=draw(st.booleans()) and sampled == 0,
                started=started,
                finished=started + draw(st.integers(0, 2)),
            )
        )  # fmt: skip
        number += suffix + sampled
    return calls


def context(call: Call, calls: dict[str, Call]) -> list[int]:
    before: list[int] = []
    if call.parent_id is not None:
        parent = calls[call.parent_id]
        before = context(parent, calls) + parent.completion_ids.tolist()
    return before + call.suffix_ids.tolist()


@pytest.mark.parametrize("builder", ["exact", "per_request"])
@settings(max_examples=150, deadline=None)
@given(calls=sessions(), ended=st.booleans())
def test_promises_hold_over_random_sessions(builder: str, calls: list[Call], ended: bool) -> None:
    by_id = {c.call_id: c for c in calls}
    t = rebuild(calls, rollout_id="r", task_id="t", builder=builder, harness_ended=ended)

    # Once: a token number occurs once in the session, so it may be trainable once in all segments.
    trainable = [token for s in t.segments for token in s.ids[s.loss_mask].tolist()]
    assert len(trainable) == len(set(trainable))
    sampled = {token for c in calls for token in c.completion_ids.tolist()}
    assert set(trainable) <= sampled
    tokens = t.fidelity["tokens"]
    assert tokens["sampled"] == len(sampled)
    assert tokens["trained"] == len(trainable)
    assert tokens["trained"] + sum(tokens["excluded"].values()) == tokens["sampled"]

    for s in t.segments:
        assert s.trainable > 0
        assert s.ids.size == s.loss_mask.size == s.logprobs.size == s.versions.size
        assert (s.ids.dtype, s.loss_mask.dtype, s.logprobs.dtype, s.versions.dtype) == (
            np.int32, np.bool_, np.float32, np.int32,
        )  # fmt: skip
        inside = np.zeros(s.ids.size, np.bool_)
        for span in s.spans:
            call = by_id[span.call_id]
            inside[span.start : span.end] = True
            # Exact context: everything before the sampled tokens is what the engine was given.
            assert s.ids[: span.start].tolist() == context(call, by_id)
            assert s.ids[span.start : span.end].tolist() == call.completion_ids.tolist()
            assert (s.versions[span.start : span.end] == call.versions).all()
            mask = s.loss_mask[span.start : span.end]
            assert (s.logprobs[span.start : span.end][mask] == call.logprobs[mask]).all()
            assert not (mask & call.forced).any()
            if mask.any():
                assert call.sampling.temperature == s.temperature
                assert call.delivery is not Delivery.ABORTED
        assert not s.loss_mask[~inside].any()
        assert (s.versions[~inside] == -1).all()
        assert (s.logprobs[~s.loss_mask] == 0).all()
        assert np.isfinite(s.logprobs).all()
        assert (s.logprobs <= 0).all()

    spans = [span.call_id for s in t.segments for span in s.spans]
    assert len(spans) == len(set(spans))
    names = {s.segment_id for s in t.segments}
    assert all({link.source, link.target} <= names and link.source != link.target for link in t.links)


@settings(max_examples=100, deadline=None)
@given(calls=sessions())
def test_exact_trains_what_per_request_trains_in_no_more_segments(calls: list[Call]) -> None:
    exact, single = (
        rebuild(calls, rollout_id="r", task_id="t", builder=b, harness_ended=True) for b in ("exact", "per_request")
    )
    assert exact.fidelity["tokens"] == single.fidelity["tokens"]
    assert len(exact.segments) <= len(single.segments)


def test_a_thousand_turns_are_rebuilt_in_under_a_second(make) -> None:
    calls: list[Call] = []
    for _ in range(1000):
        calls.append(make(calls[-1] if calls else None, suffix=200, sampled=150))
    start = time.perf_counter()
    t = rebuild(calls, rollout_id="r", task_id="t", harness_ended=True)
    took = time.perf_counter() - start
    assert [s.ids.size for s in t.segments] == [350_000]
    assert took < 1.0
