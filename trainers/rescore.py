"""Proof that an engine serves what the trainer holds: both score the same tokens after weights were published.

It knows logprobs and limits; nothing of how an engine takes weights. The tokens are those of one recorded segment, or,
before there is any, of a fixed conversation. Both score at temperature 1: it is the weights that are proven here, and
an engine over HTTP has the logprobs of a prompt at no other.

Why it must be done: a server may answer an update with success and have taken half of it (see docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlike.config import RunConfig
from polarlike.engines.base import Engine
from polarlike.records import Group, Ids, Logprobs, PolarError, Segment
from polarlike.templates import ChatTemplate

MOST_TOKENS = 256
"""Tokens compared; a forward over one segment is what it costs."""

FLOAT32_MAX = 1e-3
"""A hundred times what two float32 implementations of one model were measured to differ by (1e-5)."""

BFLOAT16_MEAN = 0.1
"""Three times the mean difference measured between a bfloat16 server and transformers (0.035)."""


@dataclass(slots=True, frozen=True)
class Sample:
    """ids: int32 [T], of which ids[start:] are compared. recorded: float32 [T - start], the engine's own logprobs when
    they were sampled, by older weights; NaN for tokens that were not. None where none was sampled at temperature 1."""

    ids: Ids
    start: int
    recorded: Logprobs | None = None


@dataclass(slots=True, frozen=True)
class Limits:
    """Most that the scores may differ: for any token, and in the mean. None: no limit."""

    largest: float | None
    mean: float | None

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        exact = config.engine.dtype == "float32"
        largest, mean = config.train.rescore_max, config.train.rescore_mean
        if largest is None and exact:
            largest = FLOAT32_MAX
        if mean is None and not exact:
            mean = BFLOAT16_MEAN
        return cls(largest, mean)


def recorded_sample(groups: Sequence[Group], longest: int) -> Sample | None:
    """From the shortest segment with a trainable token: its sampled part, at most `MOST_TOKENS`. longest: most ids that
    the sample may have; None where no token is sampled so early."""
    segments = sorted(_trainable(groups), key=lambda s: s.ids.size)
    starts = ((segment, int(np.flatnonzero(segment.loss_mask)[0])) for segment in segments)
    segment, start = next(((s, start) for s, start in starts if start < longest), (None, 0))
    if segment is None:
        return None
    part = slice(start, min(start + MOST_TOKENS, longest))
    recorded = np.where(segment.loss_mask[part], segment.logprobs[part], np.nan).astype(np.float32)
    return Sample(segment.ids[: part.stop], start, recorded if segment.temperature == 1.0 else None)


def _trainable(groups: Sequence[Group]) -> Iterator[Segment]:
    for group in groups:
        for trajectory in group.trajectories:
            yield from (s for s in trajectory.segments if s.trainable)


def fixed_sample(template: ChatTemplate) -> Sample:
    """The prompt of a short conversation; every token but the first is compared."""
    messages = [
        {"role": "system", "content": "You are a careful assistant. Answer in one short sentence."},
        {"role": "user", "content": "What is left of 100 after 58 is taken away, and how do you know?"},
    ]
    return Sample(template.render(messages, None), 1)


def compare(sample: Sample, ours: Logprobs, theirs: Logprobs) -> dict[str, float]:
    """ours, theirs: float32 of one length, the trainer's scores and the engine's. rescore_moved: how far the new
    weights moved the tokens' logprobs, where that is known; the further, the more the check proves."""
    difference = np.abs(ours.astype(np.float64) - theirs)
    if not np.isfinite(difference).all():
        raise PolarError(
            "The engine or the trainer gives scores that are not finite; look at the last step's gradient."
        )
    values = {
        "rescore_max": float(difference.max()),
        "rescore_mean": float(difference.mean()),
        "rescore_tokens": float(difference.size),
    }
    if sample.recorded is not None:
        values["rescore_moved"] = float(np.nanmax(np.abs(ours.astype(np.float64) - sample.recorded)))
    return values


def check(values: dict[str, float], limits: Limits, engine: Engine) -> None:
    """Raises PolarError where the two disagree."""
    for name, limit in (("rescore_max", limits.largest), ("rescore_mean", limits.mean)):
        if limit is not None and values[name] > limit:
            what = "largest" if name == "rescore_max" else "mean"
            raise PolarError(
                f"The engine {engine.name} does not serve what the trainer holds at policy version "
                f"{engine.policy_version}: on the same {values['rescore_tokens']:.0f} tokens the {what} difference of "
                f"their logprobs is {values[name]:.2g} and may be {limit:.2g} (train.{name}). Usual causes: the server "
                "took the new weights in part or not at all, serves another model or dtype than the trainer has "
                "(engine.dtype), or was changed by another run; restart it on the run's model and repeat the command."
            )
