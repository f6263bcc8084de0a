"""What a rollout's record can and cannot be trusted for, as data and as a page of text. Pure.

What holds: sampled = trained + excluded, by reason; nothing that was dropped, joined, edited or rewritten is left out.
Comparison with the engine's own log is in `reconstruct.evidence`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polarlike.records import Call, Cause, Delivery
from reconstruct.builders import Built
from reconstruct.evidence import compare_with_engine_log
from reconstruct.tokens import logprob_anomalies

__all__ = ["compare_with_engine_log", "page", "report"]


def report(calls: Sequence[Call], states: Mapping[str, Delivery], built: Built) -> dict[str, Any]:
    """JSON-able: counts by name, and one entry for each segment that departs from an earlier prompt."""
    excluded: Counter[str] = Counter()
    for exclusion in built.exclusions:
        excluded[exclusion.reason] += exclusion.tokens
    by_id = {c.call_id: c for c in calls}
    heads = [by_id[s.spans[0].call_id] for s in built.segments]
    return {
        "calls": len(calls),
        "text_only_calls": sum(c.text_only for c in calls),
        "delivery": _counted(states[c.call_id].value for c in calls),
        "tokens": {
            "prompt": sum(int(c.suffix_ids.size) for c in calls),
            "sampled": sum(int(c.completion_ids.size) for c in calls),
            "trained": sum(s.trainable for s in built.segments),
            "excluded": dict(sorted(excluded.items())),
        },
        "segments": len(built.segments),
        "starts": _counted(_start(head, by_id) for head in heads),
        "first_differences": [
            {"call_id": h.call_id, "cause": h.cause.value, "difference": h.first_difference}
            for h in heads
            if h.first_difference is not None
        ],
        "retries_joined": sum(c.retries for c in calls),
        "echo_edits": _counted(edit for c in calls for edit in c.echo_edits),
        "rewrites": _summed(c.rewrites for c in calls),
        "malformed_calls": sum(c.malformed_calls for c in calls),
        "dropped_fields": _counted(name for c in calls for name in c.dropped),
        "logprob_anomalies": _summed(
            {kind: int(hit.sum()) for kind, hit in logprob_anomalies(c.logprobs).items() if hit.any()} for c in calls
        ),
        "finish_reasons": _counted(c.finish_reason for c in calls),
        "versions": _versions(calls),
        "temperatures": _counted(f"{c.sampling.temperature:g}" for c in calls),
    }


def _start(head: Call, by_id: Mapping[str, Call]) -> str:
    """Why a segment starts at this call; a call that continues its parent starts one where it could not extend it."""
    parent = by_id.get(head.parent_id or "")
    if head.cause is not Cause.CONTINUES or parent is None:
        return head.cause.value
    if head.sampling.temperature != parent.sampling.temperature:
        return "temperature_changed"
    return "role_changed" if head.model != parent.model else "forked"


def _counted(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _summed(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _versions(calls: Sequence[Call]) -> dict[str, int]:
    """Policy version to sampled tokens."""
    sampled = [c.versions for c in calls if c.versions.size]
    if not sampled:
        return {}
    values, counts = np.unique(np.concatenate(sampled), return_counts=True)
    return {str(int(v)): int(n) for v, n in zip(values, counts, strict=True)}


# ---------------------------------------------------------------- as text

_LINES = (
    ("retries joined", "retries_joined"),
    ("edited echoes", "echo_edits"),
    ("rewrites", "rewrites"),
    ("malformed tool calls", "malformed_calls"),
    ("request fields dropped", "dropped_fields"),
    ("logprob anomalies", "logprob_anomalies"),
    ("finish reasons", "finish_reasons"),
    ("policy versions", "versions"),
    ("temperatures", "temperatures"),
)


def page(report: Mapping[str, Any]) -> str:
    """The report for a reader, a line a fact."""
    tokens = report["tokens"]
    share = f" ({tokens['trained'] / tokens['sampled']:.1%})" if tokens["sampled"] else ""
    rows = [
        ("calls", f"{report['calls']}: {_said(report['delivery'])}"),
        ("text-only calls", _said(report["text_only_calls"])),
        ("tokens sampled", f"{tokens['sampled']:,}"),
        ("tokens trained", f"{tokens['trained']:,}{share}"),
        ("tokens excluded", _said(tokens["excluded"])),
        ("segments", f"{report['segments']}: {_said(report['starts'])}"),
        *((title, _said(report[key])) for title, key in _LINES),
    ]
    lines = [f"{title:<24}{text}" for title, text in rows]
    for one in report["first_differences"]:
        where = ", ".join(f"{k} {v}" for k, v in one["difference"].items())
        lines.append(f"{'departs':<24}{one['call_id']} ({one['cause']}): {where}")
    return "\n".join(lines) + "\n"


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count:,}" for name, count in value.items()) or "none"
    return f"{value:,}" if value else "none"
