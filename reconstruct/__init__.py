"""Calls to trajectories: lineage, delivery, segments, roles, fidelity. Pure functions over records; no torch, no I/O.

`rebuild` is the whole of it. What holds: the promises of exact context and of once, see `reconstruct.builders`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from polarlike.records import Call, Message, Segment, Trajectory, UsageError
from reconstruct import builders, delivery, fidelity, lineage, roles
from reconstruct.lineage import ReconstructError

__all__ = ["ReconstructError", "rebuild"]

_OURS: dict[str, builders.Builder] = {"exact": builders.exact, "per_request": builders.per_request}


def rebuild(
    calls: Sequence[Call],
    *,
    rollout_id: str,
    task_id: str,
    builder: str | builders.Builder = "exact",
    harness_ended: bool,
) -> Trajectory:
    """A rollout's segments, links and fidelity report from the calls of its session, in any order.

    builder: a name in the entry-point group polarlike.builders, or the function. harness_ended: it ended cleanly or by
    our own time or turn limit. messages is the conversation of the main lane, its last reply included. Raises
    ReconstructError for calls that cannot belong to one session and UsageError for an unknown builder.
    """
    by_id = lineage.index(calls)
    ordered = list(by_id.values())
    states = delivery.final_states(ordered, harness_ended=harness_ended)
    build = _builder(builder) if isinstance(builder, str) else builder
    built = build(ordered, states, roles.assign(ordered))
    return Trajectory(
        rollout_id=rollout_id,
        task_id=task_id,
        segments=built.segments,
        links=built.links,
        fidelity=fidelity.report(ordered, states, built),
        messages=_conversation(ordered, built.segments),
    )


def _builder(name: str) -> builders.Builder:
    if name in _OURS:
        return _OURS[name]
    others = {e.name: e for e in entry_points(group="polarlike.builders")}
    if name not in others:
        known = ", ".join(sorted({*_OURS, *others}))
        raise UsageError(f"There is no builder {name!r}; use one of: {known}.")
    found: builders.Builder = others[name].load()
    return found


def _conversation(calls: Sequence[Call], segments: Sequence[Segment]) -> list[Message]:
    """The main lane's messages: the segment of the most calls, the first role first. Without segments (text-only
    sessions) the deepest chain of calls."""
    if not calls:
        return []
    by_id = {c.call_id: c for c in calls}
    if segments:
        longest = max(segments, key=lambda s: (s.role == segments[0].role, len(s.spans), s.ids.size))
        last = by_id[longest.spans[-1].call_id]
    else:
        depths: dict[str, int] = {}
        for call in calls:
            depths[call.call_id] = 0 if call.parent_id is None else depths[call.parent_id] + 1
        last = max(calls, key=lambda c: depths[c.call_id])
    return [*lineage.history(last, by_id), last.reply]
