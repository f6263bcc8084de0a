"""Which of a call's sampled tokens train. Knows one call at a time.

What holds: every sampled token either trains or has exactly one reason why not. The reasons are looked for in this
order: the call's state, arrays that do not fit each other, a forced token, a logprob that cannot be one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlike.records import Call, Delivery, Logprobs, Mask
from reconstruct.delivery import REASONS, TRAINS

FORCED = "forced"
MISFIT = "arrays_differ"
PARENT_TEXT_ONLY = "parent_text_only"
_SENTINEL = -9999.0  # what several engines send for "not computed"


@dataclass(slots=True, frozen=True)
class Exclusion:
    """tokens: how many of the call's sampled tokens do not train for this reason."""

    call_id: str
    reason: str
    tokens: int


def logprob_anomalies(logprobs: Logprobs) -> dict[str, Mask]:
    """What cannot be the logprob of a sampled token, by kind; the kinds do not overlap. bool [n] each.

    A null arrives as NaN. Zero is a probability of one and stays; above zero is none.
    """
    with np.errstate(invalid="ignore"):
        infinite = np.isneginf(logprobs)
        return {
            "logprob_missing": np.isnan(logprobs),
            "logprob_positive": logprobs > 0,
            "logprob_infinite": infinite,
            "logprob_sentinel": (logprobs <= _SENTINEL) & ~infinite,
        }


def judge(call: Call, state: Delivery, *, context_known: bool = True) -> tuple[Mask, list[Exclusion]]:
    """(mask bool [n], True where the token trains; the reasons for all others)."""
    n = int(call.completion_ids.size)
    nothing = np.zeros(n, np.bool_)
    reason = REASONS.get(state) if state not in TRAINS else None
    if reason is None and not context_known:
        reason = PARENT_TEXT_ONLY
    if reason is None and not (call.logprobs.size == call.versions.size == call.forced.size == n):
        reason = MISFIT
    if reason is not None:
        return nothing, [Exclusion(call.call_id, reason, n)] if n else []
    mask, excluded = np.ones(n, np.bool_), []
    for kind, hit in ({FORCED: call.forced} | logprob_anomalies(call.logprobs)).items():
        tokens = int((hit & mask).sum())
        if tokens:
            excluded.append(Exclusion(call.call_id, kind, tokens))
            mask &= ~hit
    return mask, excluded
