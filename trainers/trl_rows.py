"""Rows as TRL's trainers take them: whole token streams with a value a token. Knows numpy and rows; no torch, no TRL.

TRL splits a stream into a prompt, on which nothing is trained, and a completion with a mask: the prompt is all that
stands before the first trainable token, so that what a harness sent later is masked inside the completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from polarlike.records import Ids, Logprobs, Mask, UsageError
from trainers.rows import Row

Kind = TypeVar("Kind", bound=np.generic)


@dataclass(slots=True)
class Stream:
    """ids: int32 [T]. mask: bool [T], True on trainable tokens. logprobs, advantages: float32 [T], 0 where mask is
    False. start: the first trainable token, or where a completion begins that has none."""

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    advantages: Logprobs
    start: int


def stream(row: Row, advantages: Logprobs | None = None) -> Stream:
    """The row's whole stream, its last trainable token included. advantages: float32 [n], in place of the row's own."""
    size = row.ids.size + 1
    where = row.sources + 1
    return Stream(
        ids=np.append(row.ids, row.targets[-1:].astype(np.int32)),
        mask=_spread(where, np.ones(where.size, np.bool_), size),
        logprobs=_spread(where, row.engine_logprobs, size),
        advantages=_spread(where, row.advantages if advantages is None else advantages, size),
        start=int(where[0]),
    )


def fillers(number: int) -> list[Stream]:
    """Streams that fill up a batch: of two tokens, none of them trainable."""
    ids, no = np.zeros(2, np.int32), np.zeros(2, np.float32)
    return [Stream(ids, np.zeros(2, np.bool_), no, no, 1) for _ in range(number)]


def by_advantage(whole: Stream) -> list[Stream]:
    """The stream once for every advantage in it, each with the mask of the tokens that have it: for trainers that know
    one advantage a stream."""
    parts = []
    for value in np.unique(whole.advantages[whole.mask]):
        mask = whole.mask & (whole.advantages == value)
        parts.append(
            Stream(whole.ids, mask, whole.logprobs * mask, whole.advantages * mask, int(np.flatnonzero(mask)[0]))
        )
    return parts


def padded(size: int, parts: int) -> int:
    """The least multiple of `parts` that holds `size`."""
    return -(-size // parts) * parts


def same_temperature(rows: Sequence[Row], temperature: float, trainer: str) -> None:
    """Raises UsageError on a row of another temperature: TRL scores all rows at one, fixed when it starts."""
    for row in rows:
        if row.temperature != temperature:
            raise UsageError(
                f"A segment was sampled at temperature {row.temperature:g}, and {trainer} scores all of them at "
                f"{temperature:g}; set temperature: {row.temperature:g} in the trainer's settings, or train with grpo "
                "if temperatures differ."
            )


def _spread(where: npt.NDArray[np.int64], values: npt.NDArray[Kind], size: int) -> npt.NDArray[Kind]:
    out = np.zeros(size, values.dtype)
    out[where] = values
    return out
