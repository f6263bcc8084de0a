"""What later calls prove about a reply: the table of the design, row by row."""

from __future__ import annotations

import pytest

from polarlike.records import Call, Cause, Delivery
from reconstruct.delivery import final_states, identity

USER = {"role": "user", "content": "do it"}


def states(*calls: Call, ended: bool = True) -> list[str]:
    found = final_states(calls, harness_ended=ended)
    return [found[c.call_id].value for c in calls]


@pytest.mark.parametrize("stored", [Delivery.COMMITTED, Delivery.FLUSHED, Delivery.LOST])
def test_an_echo_confirms_whatever_was_stored(make, stored):
    a = make(delivery=stored)
    assert states(a, make(a), ended=False)[0] == "confirmed"


def test_an_aborted_reply_stays_aborted_though_it_is_echoed(make):
    a = make(delivery=Delivery.ABORTED)
    assert states(a, make(a)) == ["aborted", "confirmed"]


@pytest.mark.parametrize("finish_reason", ["abort", "error"])
def test_a_reply_that_sampling_cut_short_is_aborted_though_it_was_flushed(make, finish_reason):
    assert states(make(finish_reason=finish_reason)) == ["aborted"]


@pytest.mark.parametrize("stored", [Delivery.COMMITTED, Delivery.LOST])
def test_what_nobody_saw_stays_as_it_was_stored(make, stored):
    assert states(make(delivery=stored)) == [stored.value]


def test_the_last_flushed_reply_is_confirmed_when_the_harness_ended(make):
    assert states(make()) == ["confirmed"]


def test_the_last_flushed_reply_waits_when_the_harness_did_not_end(make):
    assert states(make(), ended=False) == ["flushed"]


def test_a_reply_asked_for_again_without_it_is_dropped(make):
    a = make()
    b = make(a, says=[USER])
    again = make(a, says=[USER])
    assert states(a, b, again) == ["confirmed", "dropped", "confirmed"]


def test_a_reply_asked_for_again_with_a_complaint_is_dropped(make):
    a = make()
    b = make(a, says=[USER])
    again = make(a, says=[USER, {"role": "user", "content": "no tool call found"}])
    assert states(a, b, again) == ["confirmed", "dropped", "confirmed"]


def test_a_side_call_with_more_messages_is_not_dropped_when_the_lane_goes_on(make):
    a = make()
    compaction = make(a, says=[USER, {"role": "user", "content": "summarise all this"}])
    main = make(a, says=[USER])
    assert states(a, compaction, main) == ["confirmed"] * 3


def test_a_side_call_from_an_older_history_is_not_dropped_by_the_lane(make):
    a = make()
    b = make(a, says=[USER])
    side = make(a, says=[])
    assert states(a, b, side, make(b)) == ["confirmed"] * 4


def test_open_requests_with_one_history_drop_neither(make):
    a = make(says=[USER], started=1.0, finished=9.0)
    b = make(says=[USER], started=2.0, finished=5.0)
    assert states(a, b) == ["confirmed", "confirmed"]


def test_a_full_render_that_contains_the_reply_confirms_it(make):
    a = make(says=[USER])
    b = make(says=[USER, a.reply, {"role": "user", "content": "go on"}], cause=Cause.TOOLS_CHANGED)
    assert states(a, b, ended=False) == ["confirmed", "flushed"]


def test_an_edited_echo_confirms_the_reply_it_stands_for(make):
    a = make(says=[USER])
    edited = {"role": "assistant", "content": "answer, trimmed"}
    b = make(says=[USER, edited, {"role": "user", "content": "go on"}], cause=Cause.ECHO_EDITED)
    assert states(a, b) == ["confirmed", "confirmed"]


def test_a_full_render_that_skips_the_reply_drops_it(make):
    a = make(says=[USER])
    b = make(says=[USER, {"role": "user", "content": "again"}], cause=Cause.REPLY_DROPPED)
    assert states(a, b) == ["dropped", "confirmed"]


def asks(arguments: str, call_id: str = "") -> dict:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call | {"id": call_id} if call_id else call]}


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, {"role": "assistant", "content": "x\n"}),
        ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None, "tool_calls": []}),
        (asks('{"a": 1, "b": 2}'), asks('{"b":2,"a":1}')),
        (asks('{"a": 1', "one"), asks("{}", "one")),
    ],
)
def test_what_harnesses_change_on_the_way_back_is_the_same_message(sent, echoed):
    assert identity(sent) == identity(echoed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        (asks("{"), asks("")),
        (asks('{"a": 1}'), asks('{"a": 2}')),
        (asks("{}", "one"), asks("{}", "other")),
    ],
)
def test_messages_that_mean_different_things_differ(one, other):
    assert identity(one) != identity(other)
