"""From scored groups to the rows that a trainer eats, one a segment. Knows numpy and records; no estimator, no layout.

What holds: a row is a segment with at least one trainable token, and each of its trainable tokens has a context, a
finite recorded logprob and a temperature above 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polarlike.records import Group, Ids, Logprobs, PolarError, Segment, Trajectory

Index = npt.NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """One segment with something to learn.

    ids: int32 [T], cut before its last trainable token (nothing is conditioned on that one). sources: int64 [n], where
    in ids the token before each trainable token stands. targets: int64 [n], the trainable tokens. engine_logprobs:
    float32 [n], as recorded. old_logprobs: float32 [n], what the loss's ratio starts from: the same, until a trainer
    puts its own there. advantages: float32 [n]. calls: int64 [n], which of the segment's trainable calls a token was
    sampled by: 0, 1, ...
    segment and rollout: indices unique in the step. oldest: the lowest policy version of its tokens.
    """

    ids: Ids
    sources: Index
    targets: Index
    engine_logprobs: Logprobs
    old_logprobs: Logprobs
    advantages: Logprobs
    calls: Index
    temperature: float
    segment: int
    rollout: int
    task_id: str
    role: str
    oldest: int


def rows_of(groups: Sequence[Group]) -> list[list[list[Row]]]:
    """Rows by group, then by rollout (of which some may have none), in order; their advantages are 0 still.

    Raises PolarError on a trainable token that cannot be trained on: a first token (it has no context), a logprob that
    is not finite, a segment sampled at temperature 0.
    """
    by_group: list[list[list[Row]]] = []
    segments = rollouts = 0
    for group in groups:
        by_group.append([])
        for trajectory in group.trajectories:
            rows = list(_rows(trajectory, group.task_id, segments, rollouts))
            segments += len(rows)
            rollouts += 1
            by_group[-1].append(rows)
    return by_group


def _rows(trajectory: Trajectory, task_id: str, first_segment: int, rollout: int) -> Iterator[Row]:
    index = first_segment
    for segment in trajectory.segments:
        where = np.flatnonzero(segment.loss_mask)
        if where.size == 0:
            continue
        recorded = segment.logprobs[where].astype(np.float32)
        name = f"Segment {segment.segment_id} of rollout {trajectory.rollout_id}"
        if where[0] == 0:
            raise PolarError(
                f"{name} has a trainable first token, which has no context; rebuild the run's trajectories."
            )
        if not np.isfinite(recorded).all():
            raise PolarError(f"{name} has a trainable token without a finite logprob; leave it out of training.")
        if segment.temperature <= 0:
            raise PolarError(f"{name} was sampled at temperature 0, where no gradient exists; sample above 0 to train.")
        yield Row(
            ids=segment.ids[: where[-1]],
            sources=where - 1,
            targets=segment.ids[where].astype(np.int64),
            engine_logprobs=recorded,
            old_logprobs=recorded,
            advantages=np.zeros(where.size, np.float32),
            calls=_calls(segment, where),
            temperature=segment.temperature,
            segment=index,
            rollout=rollout,
            task_id=task_id,
            role=segment.role,
            oldest=int(segment.versions[where].min()),
        )
        index += 1


def _calls(segment: Segment, where: Index) -> Index:
    """By the segment's spans. A segment without any says no more than its mask: each run of trainable tokens is one."""
    if segment.spans:
        owner = np.searchsorted([span.start for span in segment.spans], where, side="right")
    else:
        owner = np.cumsum(np.diff(where, prepend=where[0]) > 1)
    return np.unique(owner, return_inverse=True)[1].reshape(-1).astype(np.int64)


def token_index(rows: Sequence[Row]) -> tuple[Index, Index]:
    """The segment and the rollout of each trainable token of the rows, in order; both int64 [N]."""
    counts = [row.targets.size for row in rows]
    segment = np.repeat(np.array([row.segment for row in rows], np.int64), counts)
    return segment, np.repeat(np.array([row.rollout for row in rows], np.int64), counts)


def scoring_row(ids: Ids, start: int, temperature: float) -> Row:
    """A row that asks for the logprobs of ids[start:] and teaches nothing; start is at least 1."""
    where = np.arange(start, ids.size, dtype=np.int64)
    zeros = np.zeros(where.size, np.float32)
    return Row(
        ids=ids[:-1],
        sources=where - 1,
        targets=ids[start:].astype(np.int64),
        engine_logprobs=zeros,
        old_logprobs=zeros,
        advantages=zeros,
        calls=np.zeros(where.size, np.int64),
        temperature=temperature,
        segment=0,
        rollout=0,
        task_id="",
        role="",
        oldest=0,
    )
