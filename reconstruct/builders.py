"""From calls to segments. Pure functions over records; knows delivery states, not how they were found.

A builder is `builder(calls, states, roles) -> Built` and registers in the entry-point group `polarlike.builders`.
calls: all calls of one session by index. states: `delivery.final_states`. roles: `roles.assign`.

What holds for `exact`:
- A segment is one chain of calls. Its ids are what the engine was given and returned, id for id; nothing is rendered,
  stitched or repaired here.
- Every sampled token trains in exactly one segment or is excluded with a reason. A reply that cannot train but was
  continued stays where it is, masked, as context of what came after.
- Where two calls continue one parent, the one with the longest lane of trainable calls (then the one confirmed, then
  the earlier) extends its segment. The others start segments of their own, the shared tokens masked.
- A segment has one temperature and one role: where a call changes either, a new segment starts.
- A segment has at least one trainable token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polarlike.records import Call, Cause, Delivery, Ids, Link, Mask, Segment, Span
from reconstruct import lineage
from reconstruct.tokens import Exclusion, judge


class Built(NamedTuple):
    segments: list[Segment]
    links: list[Link]
    exclusions: list[Exclusion]


class Builder(Protocol):
    def __call__(self, calls: Sequence[Call], states: Mapping[str, Delivery], roles: Mapping[str, str]) -> Built: ...


_EXTENDS = (Cause.CONTINUES, Cause.REPLY_DROPPED)
"""Causes whose call, given a parent, may extend its segment. A reply that was asked for again without an earlier one
stands on the same parent as that one."""

_FORKS = (Cause.REPLY_DROPPED, Cause.AMBIGUOUS)
_UNRELATED = (Cause.FIRST, Cause.NEW_CONVERSATION)


def exact(calls: Sequence[Call], states: Mapping[str, Delivery], roles: Mapping[str, str]) -> Built:
    """The default builder: as few segments as the promise of exact context allows."""
    by_id = lineage.index(calls)
    masks, exclusions = _masks(by_id, states)
    onward = _continuations(by_id, masks, states, roles)
    chosen = set(onward.values())
    segments: list[Segment] = []
    for call in by_id.values():
        if call.call_id in chosen:
            continue
        lane = [call]
        while lane[-1].call_id in onward:
            lane.append(by_id[onward[lane[-1].call_id]])
        if any(masks[c.call_id].any() for c in lane):
            segments.append(_segment(lane, by_id, masks, roles))
    return Built(segments, _links(segments, by_id, onward), exclusions)


def per_request(calls: Sequence[Call], states: Mapping[str, Delivery], roles: Mapping[str, str]) -> Built:
    """One segment a call, its whole prompt as masked context: the baseline that `exact` is compared with."""
    by_id = lineage.index(calls)
    masks, exclusions = _masks(by_id, states)
    segments = [_segment([c], by_id, masks, roles) for c in by_id.values() if masks[c.call_id].any()]
    return Built(segments, _links(segments, by_id, {}), exclusions)


def _masks(by_id: Mapping[str, Call], states: Mapping[str, Delivery]) -> tuple[dict[str, Mask], list[Exclusion]]:
    masks: dict[str, Mask] = {}
    exclusions: list[Exclusion] = []
    textual: set[str] = set()  # text-only calls and what hangs on them: their prompts' ids are unknown
    for call in by_id.values():
        known = call.parent_id not in textual
        if call.text_only or not known:
            textual.add(call.call_id)
        masks[call.call_id], excluded = judge(call, states[call.call_id], context_known=known)
        exclusions += excluded
    return masks, exclusions


def _continuations(
    by_id: Mapping[str, Call], masks: Mapping[str, Mask], states: Mapping[str, Delivery], roles: Mapping[str, str]
) -> dict[str, str]:
    """Call id to the id of the call that extends its segment."""
    onward: dict[str, str] = {}
    best: dict[str, tuple[int, bool, int]] = {}
    for call in reversed(list(by_id.values())):  # children before their parents
        below = best[call.call_id][0] if call.call_id in onward else 0
        length = below + int(masks[call.call_id].any())
        parent = by_id.get(call.parent_id or "")
        if not length or parent is None or not _extends(call, parent, roles):
            continue
        merit = (length, states[call.call_id] is Delivery.CONFIRMED, -call.index)
        if parent.call_id not in onward or merit > best[parent.call_id]:
            onward[parent.call_id], best[parent.call_id] = call.call_id, merit
    return onward


def _extends(call: Call, parent: Call, roles: Mapping[str, str]) -> bool:
    return (
        call.cause in _EXTENDS
        and call.sampling.temperature == parent.sampling.temperature
        and roles[call.call_id] == roles[parent.call_id]
    )


def _segment(
    lane: Sequence[Call], by_id: Mapping[str, Call], masks: Mapping[str, Mask], roles: Mapping[str, str]
) -> Segment:
    head = lane[0]
    parts: list[Ids] = [lineage.prompt_ids(head, by_id), head.completion_ids]
    for call in lane[1:]:
        parts += [call.suffix_ids, call.completion_ids]
    ids = np.concatenate(parts).astype(np.int32, copy=False)
    loss_mask, logprobs = np.zeros(ids.size, np.bool_), np.zeros(ids.size, np.float32)
    versions, spans, end = np.full(ids.size, -1, np.int32), [], 0
    for call, prompt, completion in zip(lane, parts[::2], parts[1::2], strict=True):
        start, end = end + prompt.size, end + prompt.size + completion.size
        mask = masks[call.call_id]
        loss_mask[start:end] = mask
        if mask.any():
            logprobs[start:end] = np.where(mask, call.logprobs, 0)
        if call.versions.size == completion.size:
            versions[start:end] = call.versions
        spans.append(Span(call.call_id, start, end))
    return Segment(
        segment_id=f"segment_{head.call_id}",
        role=roles[head.call_id],
        cause=head.cause,
        ids=ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        temperature=head.sampling.temperature,
        spans=spans,
        finish_reason=lane[-1].finish_reason,
    )


def _links(segments: Sequence[Segment], by_id: Mapping[str, Call], onward: Mapping[str, str]) -> list[Link]:
    """Where each segment came from, as far as the calls say."""
    owner = {span.call_id: s.segment_id for s in segments for span in s.spans}
    links = []
    for segment in segments:
        head = by_id[segment.spans[0].call_id]
        source = head.parent_id
        while source is not None and source not in owner:
            source = by_id[source].parent_id
        if source is not None:
            kind = "forked" if onward.get(head.parent_id or "") else "continues"
        elif head.cause not in _UNRELATED:
            source = (head.first_difference or {}).get("call_id")
            kind = "forked" if head.cause in _FORKS else "continues"
        if source is not None and source in owner:
            links.append(Link(owner[source], segment.segment_id, kind, head.cause))
    return links
