"""The cases that make or break training data, one by one, with the segments written out."""

from __future__ import annotations

import numpy as np
import pytest

from polarlike.records import Call, Cause, Delivery, Segment, Trajectory, UsageError
from reconstruct import ReconstructError, rebuild


def built(*calls: Call, ended: bool = True, builder: str = "exact") -> Trajectory:
    return rebuild(calls, rollout_id="r", task_id="t", builder=builder, harness_ended=ended)


def ids(*parts: np.ndarray) -> list[int]:
    return np.concatenate(parts).tolist()


def trained(segment: Segment) -> list[int]:
    return segment.ids[segment.loss_mask].tolist()


def owners(segment: Segment) -> list[str]:
    return [s.call_id for s in segment.spans]


def test_k_turns_become_one_segment(make):
    a = make()
    b = make(a)
    c = make(b)
    t = built(a, b, c)
    (segment,) = t.segments
    assert segment.ids.tolist() == ids(
        a.suffix_ids, a.completion_ids, b.suffix_ids, b.completion_ids, c.suffix_ids, c.completion_ids
    )
    assert segment.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2
    assert segment.logprobs.tolist() == [0.0] * 3 + [-0.5] * 2 + [0.0] * 3 + [-0.5] * 2 + [0.0] * 3 + [-0.5] * 2
    assert segment.versions.tolist() == [-1, -1, -1, 0, 0] * 3
    assert [(s.start, s.end) for s in segment.spans] == [(3, 5), (8, 10), (13, 15)]
    assert t.links == []
    assert [m["content"] for m in t.messages] == [
        "question 1", "answer 1", "question 2", "answer 2", "question 3", "answer 3",
    ]  # fmt: skip


def test_calls_may_come_in_any_order(make):
    a = make()
    b = make(a)
    assert owners(built(b, a).segments[0]) == ["call_1", "call_2"]


def test_a_dropped_reply_is_a_leaf_of_its_own_and_still_trains(make):
    a = make()
    dropped = make(a)
    again = make(a, says=[*dropped.new_messages, {"role": "user", "content": "format error"}])
    t = built(a, dropped, again, make(again))
    main, leaf = t.segments
    assert owners(main) == ["call_1", "call_3", "call_4"]
    assert leaf.ids.tolist() == ids(a.suffix_ids, a.completion_ids, dropped.suffix_ids, dropped.completion_ids)
    assert trained(leaf) == dropped.completion_ids.tolist()
    assert t.fidelity["delivery"] == {"confirmed": 3, "dropped": 1}
    (link,) = t.links
    assert (link.source, link.target, link.kind) == (main.segment_id, leaf.segment_id, "forked")


def test_a_dropped_last_reply_leaves_the_lane_to_the_reply_that_was_kept(make):
    a = make()
    dropped = make(a)
    kept = make(a, says=dropped.new_messages)
    main, leaf = built(a, dropped, kept).segments
    assert (owners(main), owners(leaf)) == (["call_1", "call_3"], ["call_2"])


def test_a_dropped_first_reply_is_a_leaf_and_the_second_asking_starts_a_segment(make):
    dropped = make()
    again = make(says=dropped.new_messages, cause=Cause.REPLY_DROPPED, first_difference={"call_id": "call_1"})
    t = built(dropped, again)
    assert [owners(s) for s in t.segments] == [["call_1"], ["call_2"]]
    assert t.fidelity["delivery"] == {"confirmed": 1, "dropped": 1}
    assert [(x.kind, x.cause) for x in t.links] == [("forked", Cause.REPLY_DROPPED)]


def test_a_call_between_two_turns_leaves_both_lanes_whole(make):
    a = make()
    helper = make(says=[{"role": "system", "content": "summarise"}])
    b = make(a)
    helper_on = make(helper)
    c = make(b)
    main, sub = built(a, helper, b, helper_on, c).segments
    assert owners(main) == ["call_1", "call_3", "call_5"]
    assert owners(sub) == ["call_2", "call_4"]
    assert trained(main) == ids(a.completion_ids, b.completion_ids, c.completion_ids)
    assert trained(sub) == ids(helper.completion_ids, helper_on.completion_ids)


def test_two_identical_parallel_prompts_stay_separate_samples(make):
    prompt = [{"role": "user", "content": "same"}]
    a = make(says=prompt, started=1.0, finished=5.0)
    b = make(says=prompt, started=1.0, finished=5.0, suffix_ids=a.suffix_ids)
    t = built(a, b)
    assert [trained(s) for s in t.segments] == [a.completion_ids.tolist(), b.completion_ids.tolist()]
    assert t.fidelity["delivery"] == {"confirmed": 2}


def test_an_aborted_call_is_excluded_and_its_tokens_are_counted(make):
    a = make()
    aborted = make(a, delivery=Delivery.ABORTED, finish_reason="abort", sampled=7)
    t = built(a, aborted)
    assert [owners(s) for s in t.segments] == [["call_1"]]
    assert t.fidelity["tokens"] == {"prompt": 6, "sampled": 9, "trained": 2, "excluded": {"aborted": 7}}


def test_an_aborted_reply_that_was_continued_is_masked_context(make):
    a = make(delivery=Delivery.ABORTED)
    b = make(a)
    (segment,) = built(a, b).segments
    assert segment.ids.tolist() == ids(a.suffix_ids, a.completion_ids, b.suffix_ids, b.completion_ids)
    assert trained(segment) == b.completion_ids.tolist()


def test_a_bridged_close_after_a_length_stop_is_masked(make):
    cut = make(finish_reason="length")
    end_of_turn = np.asarray([151645, 198, 7, 8], np.int32)  # the bridge closes the turn before it opens the next
    b = make(cut, suffix_ids=end_of_turn)
    (segment,) = built(cut, b).segments
    assert segment.ids[5:9].tolist() == [151645, 198, 7, 8]
    assert not segment.loss_mask[5:9].any()
    assert trained(segment) == ids(cut.completion_ids, b.completion_ids)


def test_a_mixed_version_segment_carries_the_version_of_each_token(make):
    a = make(sampled=3, versions=np.asarray([4, 4, 5], np.int32))
    b = make(a, versions=np.asarray([6, 6], np.int32))
    t = built(a, b)
    assert t.segments[0].versions.tolist() == [-1, -1, -1, 4, 4, 5, -1, -1, -1, 6, 6]
    assert t.fidelity["versions"] == {"4": 2, "5": 1, "6": 2}


def test_forced_tokens_are_masked_with_their_reason(make):
    a = make(sampled=3, forced=np.asarray([True, False, False]))
    t = built(a)
    assert trained(t.segments[0]) == a.completion_ids[1:].tolist()
    assert t.fidelity["tokens"]["excluded"] == {"forced": 1}


def test_impossible_logprobs_exclude_their_tokens_alone(make):
    a = make(sampled=6, logprobs=np.asarray([-0.1, np.nan, 0.2, -np.inf, -9999.0, 0.0], np.float32))
    t = built(a)
    (segment,) = t.segments
    assert segment.loss_mask[3:].tolist() == [True, False, False, False, False, True]
    assert np.isfinite(segment.logprobs).all()
    counts = {"logprob_infinite": 1, "logprob_missing": 1, "logprob_positive": 1, "logprob_sentinel": 1}
    assert t.fidelity["tokens"]["excluded"] == counts
    assert t.fidelity["logprob_anomalies"] == counts


def test_a_call_whose_arrays_do_not_fit_each_other_is_excluded_whole(make):
    a = make(sampled=3, logprobs=np.asarray([-1.0, -1.0], np.float32))
    t = built(a)
    assert t.segments == []
    assert t.fidelity["tokens"]["excluded"] == {"arrays_differ": 3}


def test_a_change_of_temperature_starts_a_segment_that_continues(make):
    a = make(temperature=1.0)
    b = make(a, temperature=0.5)
    t = built(a, b)
    assert [s.temperature for s in t.segments] == [1.0, 0.5]
    assert t.segments[1].ids[:5].tolist() == ids(a.suffix_ids, a.completion_ids)
    assert trained(t.segments[1]) == b.completion_ids.tolist()
    assert [x.kind for x in t.links] == ["continues"]
    assert t.fidelity["starts"] == {"first": 1, "temperature_changed": 1}


def test_text_only_calls_are_counted_and_give_no_segment(make):
    a = make(text_only=True, sampled=0, suffix=0)
    b = make(a, text_only=True, sampled=0, suffix=0)
    t = built(a, b)
    assert t.segments == []
    assert t.fidelity["text_only_calls"] == 2
    assert [m["role"] for m in t.messages] == ["user", "assistant"] * 2


def test_a_call_on_a_text_only_parent_has_no_known_context(make):
    a = make(text_only=True, sampled=0, suffix=0)
    t = built(a, make(a, sampled=4))
    assert t.segments == []
    assert t.fidelity["tokens"]["excluded"] == {"parent_text_only": 4}


def test_a_rewritten_history_starts_a_segment_linked_to_what_it_was(make):
    a = make()
    b = make(a)
    c = make(cause=Cause.HISTORY_CHANGED, first_difference={"call_id": "call_2", "position": 4})
    t = built(a, b, c)
    assert [owners(s) for s in t.segments] == [["call_1", "call_2"], ["call_3"]]
    (link,) = t.links
    assert (link.source, link.kind, link.cause) == (t.segments[0].segment_id, "continues", Cause.HISTORY_CHANGED)
    assert t.fidelity["first_differences"] == [
        {"call_id": "call_3", "cause": "history_changed", "difference": {"call_id": "call_2", "position": 4}}
    ]


def test_the_longest_lane_keeps_the_segment_when_two_continue_one_parent(make):
    a = make()
    short = make(a)
    long = make(a)
    main, fork = built(a, short, long, make(long)).segments
    assert (owners(main), owners(fork)) == (["call_1", "call_3", "call_4"], ["call_2"])


def test_the_first_keeps_the_segment_when_two_lanes_are_alike(make):
    a = make()
    main, fork = built(a, make(a), make(a)).segments
    assert (owners(main), owners(fork)) == (["call_1", "call_2"], ["call_3"])


def test_a_second_asking_that_stands_on_the_same_parent_extends_its_segment(make):
    a = make()
    dropped = make(a)
    again = make(a, says=dropped.new_messages, cause=Cause.REPLY_DROPPED)
    main, leaf = built(a, dropped, again).segments
    assert (owners(main), owners(leaf)) == (["call_1", "call_3"], ["call_2"])


@pytest.mark.parametrize("cause", [Cause.HISTORY_CHANGED, Cause.TOOLS_CHANGED, Cause.AMBIGUOUS, Cause.ECHO_EDITED])
def test_any_other_cause_starts_a_segment_though_a_parent_is_named(make, cause):
    a = make()
    b = make(a, cause=cause)
    t = built(a, b)
    assert [owners(s) for s in t.segments] == [["call_1"], ["call_2"]]
    assert t.segments[1].ids[:5].tolist() == ids(a.suffix_ids, a.completion_ids)


def test_two_aliases_are_two_roles_in_two_segments(make):
    a = make(model="planner")
    b = make(a, model="coder")
    t = built(a, b)
    assert [s.role for s in t.segments] == ["planner", "coder"]
    assert t.fidelity["starts"] == {"first": 1, "role_changed": 1}


def test_per_request_gives_one_segment_a_call_with_its_whole_prompt(make):
    a = make()
    b = make(a)
    t = built(a, b, builder="per_request")
    assert [trained(s) for s in t.segments] == [a.completion_ids.tolist(), b.completion_ids.tolist()]
    assert t.segments[1].ids.tolist() == ids(a.suffix_ids, a.completion_ids, b.suffix_ids, b.completion_ids)


def test_an_unknown_builder_is_a_usage_error_that_names_the_known(make):
    with pytest.raises(UsageError, match=r"exact.*per_request"):
        built(make(), builder="exakt")


def test_a_missing_parent_is_refused(make):
    a = make()
    with pytest.raises(ReconstructError, match="call_1"):
        built(make(a))


def test_a_call_given_twice_is_refused(make):
    a = make()
    with pytest.raises(ReconstructError, match="twice"):
        built(a, a)


def test_a_session_without_calls_is_an_empty_trajectory():
    t = built()
    assert (t.segments, t.links, t.messages, t.fidelity["calls"]) == ([], [], [], 0)
