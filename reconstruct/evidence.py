"""Our record against the engine's own log. Pure; reads no file.

What holds: the two sides come from different places. A log entry that shares memory with the record, or is the record,
is refused: comparing a record with itself proves nothing. What is compared is what a trainer eats (segments), not the
calls they were made from, so that a fault in rebuilding shows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from polarlike.records import Call, Ids, Logprobs, Segment, Span, UsageError
from reconstruct import builders, delivery, lineage, roles


class LogEntry(Protocol):
    """One request as the engine saw it: int32 [P], int32 [n], float32 [n], int32 [n]."""

    @property
    def prompt_ids(self) -> Ids: ...
    @property
    def completion_ids(self) -> Ids: ...
    @property
    def logprobs(self) -> Logprobs: ...
    @property
    def versions(self) -> Ids: ...


@dataclass(slots=True)
class Logged:
    """A `LogEntry` put together from several."""

    prompt_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids


def joined(log: Mapping[str, LogEntry], call_id: str) -> LogEntry | None:
    """The entry of a call. Where an engine failed in mid-reply, the proxy asked again from the prompt and what it had
    by then, as call_id.1 and so on: those entries are put together, each cut where the next one's prompt goes on. None
    where the first is missing or the next one's prompt is not what went before."""
    whole = log.get(call_id)
    for attempt in count(1):
        more = log.get(f"{call_id}.{attempt}")
        if whole is None or more is None:
            return whole
        start = whole.prompt_ids.size
        kept = more.prompt_ids.size - start
        before = np.concatenate((whole.prompt_ids, whole.completion_ids))
        if kept < 0 or not np.array_equal(before[: more.prompt_ids.size], more.prompt_ids):
            return None
        whole = Logged(
            whole.prompt_ids,
            np.concatenate((whole.completion_ids[:kept], more.completion_ids)),
            np.concatenate((whole.logprobs[:kept], more.logprobs)),
            np.concatenate((whole.versions[:kept], more.versions)),
        )
    return whole


def compare_with_engine_log(
    calls: Sequence[Call],
    log: Mapping[str, LogEntry],
    *,
    segments: Sequence[Segment] | None = None,
    decode: Callable[[Ids], str] | None = None,
) -> dict[str, Any]:
    """The share of trainable tokens whose context, id, logprob and version are the engine's own, bit for bit.

    log: request id, which is the call id, to its entry. segments: what was trained; by default the exact builder's, of
    a harness that ended. decode: ids to text, for the first mismatch. Returns trainable, equal (tokens), share (None
    without trainable tokens), mismatches (field to number of calls) and first_mismatch. Raises UsageError where a log
    entry is the record itself.
    """
    by_id = lineage.index(calls)
    _refuse_own_record(by_id, log)
    if segments is None:
        ordered = list(by_id.values())
        states = delivery.final_states(ordered, harness_ended=True)
        segments = builders.exact(ordered, states, roles.assign(ordered)).segments
    trainable = equal = 0
    mismatches: dict[str, int] = {}
    first: dict[str, Any] | None = None
    for segment in segments:
        for span in segment.spans:
            tokens = int(segment.loss_mask[span.start : span.end].sum())
            trainable += tokens
            if not tokens:
                continue
            wrong = _mismatch(segment, span, joined(log, span.call_id), decode)
            if wrong is None:
                equal += tokens
                continue
            mismatches[wrong["field"]] = mismatches.get(wrong["field"], 0) + 1
            first = first or wrong
    return {
        "trainable": trainable,
        "equal": equal,
        "share": equal / trainable if trainable else None,
        "mismatches": mismatches,
        "first_mismatch": first,
    }


def _refuse_own_record(by_id: Mapping[str, Call], log: Mapping[str, LogEntry]) -> None:
    for call_id, call in by_id.items():
        entry = log.get(call_id)
        if entry is None:
            continue
        if isinstance(entry, Call) or any(
            np.shares_memory(ours, theirs)
            for ours, theirs in (
                (call.completion_ids, entry.completion_ids),
                (call.logprobs, entry.logprobs),
                (call.suffix_ids, entry.prompt_ids),
            )
        ):
            raise UsageError(f"The engine log's entry for {call_id} is the record itself; give the engine's own log.")


def _mismatch(
    segment: Segment, span: Span, entry: LogEntry | None, decode: Callable[[Ids], str] | None
) -> dict[str, Any] | None:
    if entry is None:
        return {"call_id": span.call_id, "field": "not_in_log"}
    mask = segment.loss_mask[span.start : span.end]
    pairs: list[tuple[str, npt.NDArray[Any], npt.NDArray[Any]]] = [
        ("prompt_ids", segment.ids[: span.start], entry.prompt_ids),
        ("completion_ids", segment.ids[span.start : span.end], entry.completion_ids),
    ]
    for name, ours, theirs in (
        ("logprobs", segment.logprobs, entry.logprobs),
        ("versions", segment.versions, entry.versions),
    ):
        whole = ours[span.start : span.end]
        pairs.append((name, whole[mask], theirs[mask] if theirs.size == mask.size else theirs))
    for name, ours, theirs in pairs:
        if not np.array_equal(ours, theirs):
            return {"call_id": span.call_id, "field": name} | _where(ours, theirs, decode if "ids" in name else None)
    return None


def _where(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], decode: Callable[[Ids], str] | None) -> dict[str, Any]:
    """The first position that differs, with a few values, or their text, from there on."""
    shared = min(ours.size, theirs.size)
    differ = np.flatnonzero(ours[:shared] != theirs[:shared])
    at = int(differ[0]) if differ.size else shared
    out: dict[str, Any] = {"position": at, "lengths": [int(ours.size), int(theirs.size)]}
    for name, values in (("recorded", ours[at : at + 8]), ("engine", theirs[at : at + 8])):
        out[name] = values.tolist()
        if decode is not None:
            out[f"{name}_text"] = decode(values)
    return out
