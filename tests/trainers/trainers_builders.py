"""Small records for the trainers' tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlike.records import Cause, Group, Score, Segment, Span, Trajectory


def segment(
    ids: Sequence[int],
    trainable: Sequence[int],
    *,
    logprobs: Sequence[float] | float = -6.0,
    temperature: float = 1.0,
    version: int = 0,
    name: str = "s",
    role: str = "main",
    calls: Sequence[tuple[int, int]] = (),
) -> Segment:
    """trainable: positions in ids; logprobs: one value for all of them, or one each; calls: where each call's lie."""
    mask = np.zeros(len(ids), np.bool_)
    mask[list(trainable)] = True
    recorded = np.zeros(len(ids), np.float32)
    recorded[list(trainable)] = logprobs
    versions = np.where(mask, version, -1).astype(np.int32)
    spans = [Span(f"call_{i}", start, end) for i, (start, end) in enumerate(calls)]
    return Segment(name, role, Cause.FIRST, np.array(ids, np.int32), mask, recorded, versions, temperature, spans)


def trajectory(segments: Sequence[Segment], reward: float | None, *, name: str = "r", task: str = "t") -> Trajectory:
    return Trajectory(name, task, list(segments), [], {}, None if reward is None else Score(reward))


def group(trajectories: Sequence[Trajectory], *, name: str = "g", task: str = "t") -> Group:
    return Group(name, task, list(trajectories))
