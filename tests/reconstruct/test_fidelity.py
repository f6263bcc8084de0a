"""The report's counts and its page, and the comparison with an engine's own log."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import orjson
import pytest

from polarlike.records import Call, UsageError
from reconstruct import rebuild
from reconstruct.evidence import Logged, compare_with_engine_log
from reconstruct.fidelity import page


def report(*calls: Call) -> dict:
    return rebuild(calls, rollout_id="r", task_id="t", harness_ended=True).fidelity


def test_everything_that_happened_on_the_way_is_counted(make):
    a = make(retries=2, rewrites={"billing header": 1}, dropped=["logit_bias"])
    b = make(
        a,
        retries=1,
        rewrites={"billing header": 2, "date": 1},
        dropped=["logit_bias", "top_k"],
        malformed_calls=3,
        echo_edits=["arguments"],
    )
    r = report(a, b)
    assert r["retries_joined"] == 3
    assert r["rewrites"] == {"billing header": 3, "date": 1}
    assert r["dropped_fields"] == {"logit_bias": 2, "top_k": 1}
    assert r["malformed_calls"] == 3
    assert r["echo_edits"] == {"arguments": 1}
    assert r["finish_reasons"] == {"stop": 2}
    assert r["temperatures"] == {"1": 2}
    assert r["tokens"] == {"prompt": 6, "sampled": 4, "trained": 4, "excluded": {}}


def test_the_report_is_json(make):
    a = make(sampled=2, logprobs=np.asarray([np.nan, -1], np.float32))
    r = report(a, make(a))
    assert json.loads(orjson.dumps(r)) == r


def test_the_page_says_each_fact_on_a_line(make):
    a = make(retries=2, sampled=4, logprobs=np.asarray([np.nan, -1, -1, -1], np.float32))
    lines = page(report(a)).splitlines()
    assert "calls                   1: confirmed 1" in lines
    assert "tokens sampled          4" in lines
    assert "tokens trained          3 (75.0%)" in lines
    assert "tokens excluded         logprob_missing 1" in lines
    assert "retries joined          2" in lines
    assert "edited echoes           none" in lines


def engine_log(*calls: Call) -> dict[str, Logged]:
    """What an engine would have written about a chain of calls: its own copies."""
    prompt: list[int] = []
    log = {}
    for c in calls:
        prompt = prompt + c.suffix_ids.tolist()
        log[c.call_id] = Logged(
            np.asarray(prompt, np.int32), c.completion_ids.copy(), c.logprobs.copy(), c.versions.copy()
        )
        prompt = prompt + c.completion_ids.tolist()
    return log


def test_a_reply_that_two_workers_sampled_is_put_together_from_both_entries(make):
    a = make(sampled=5, logprobs=np.asarray([-1, -2, -3, -4, -5], np.float32))
    whole = engine_log(a)["call_1"]
    more_than_arrived = np.append(whole.completion_ids[:2], np.int32(9))  # the worker died with one token on its way
    log = {
        "call_1": Logged(
            whole.prompt_ids, more_than_arrived, np.asarray([-1, -2, -9], np.float32), np.zeros(3, np.int32)
        ),
        "call_1.1": Logged(
            np.concatenate((whole.prompt_ids, whole.completion_ids[:2])),
            whole.completion_ids[2:],
            whole.logprobs[2:],
            whole.versions[2:],
        ),
    }
    assert compare_with_engine_log([a], log)["share"] == 1.0
    assert compare_with_engine_log([a], {"call_1.1": log["call_1.1"]})["mismatches"] == {"not_in_log": 1}
    log["call_1.1"].prompt_ids[-1] += 1
    assert compare_with_engine_log([a], log)["share"] == 0.0


def test_a_faithful_record_equals_the_engine_log(make):
    a = make(logprobs=np.asarray([-0.1, -1 / 3], np.float32))
    b = make(a)
    got = compare_with_engine_log([a, b], engine_log(a, b))
    assert got == {"trainable": 4, "equal": 4, "share": 1.0, "mismatches": {}, "first_mismatch": None}


def test_a_changed_context_is_found_where_it_differs_and_decoded(make):
    a = make()
    b = make(a)
    log = engine_log(a, b)
    changed = replace(b, suffix_ids=b.suffix_ids + np.asarray([0, 1, 0], np.int32))
    got = compare_with_engine_log([a, changed], log, decode=lambda ids: " ".join(f"t{i}" for i in ids))
    assert (got["trainable"], got["equal"], got["share"]) == (4, 2, 0.5)
    assert got["mismatches"] == {"prompt_ids": 1}
    first = got["first_mismatch"]
    assert (first["call_id"], first["field"], first["position"]) == ("call_2", "prompt_ids", 6)
    assert first["recorded_text"].split()[0] == f"t{b.suffix_ids[1] + 1}"
    assert first["engine_text"].split()[0] == f"t{b.suffix_ids[1]}"


@pytest.mark.parametrize("field", ["completion_ids", "logprobs", "versions"])
def test_a_change_in_any_array_is_named(make, field):
    a = make()
    log = engine_log(a)
    array = getattr(a, field)
    changed = replace(a, **{field: array - array.dtype.type(1)})
    got = compare_with_engine_log([changed], log)
    assert got["share"] == 0.0
    assert (got["first_mismatch"]["field"], got["first_mismatch"]["position"]) == (field, 0)


def test_a_call_that_the_engine_never_saw_is_a_mismatch(make):
    got = compare_with_engine_log([make()], {})
    assert got["mismatches"] == {"not_in_log": 1}
    assert got["share"] == 0.0


def test_tokens_that_do_not_train_are_not_compared(make):
    a = make(sampled=2, logprobs=np.asarray([np.nan, -1], np.float32))
    got = compare_with_engine_log([a], engine_log(a))
    assert (got["trainable"], got["share"]) == (1, 1.0)


def test_nothing_trainable_has_no_share(make):
    assert compare_with_engine_log([], {})["share"] is None


def test_a_record_is_never_compared_with_itself(make):
    a = make()
    with pytest.raises(UsageError, match="itself"):
        compare_with_engine_log([a], {"call_1": Logged(a.suffix_ids, a.completion_ids, a.logprobs, a.versions)})
