"""Weights that correct for what separates the engine's policy from the trainer's at the start of a step. Knows numpy.

The engine samples with other kernels, and perhaps with older weights, than the trainer has: pi_engine (recorded) is not
pi_start (the trainer's own, before the first update). With w = pi_start / pi_engine, the loss of a token sampled by the
engine becomes an estimate of that under pi_start when it is weighted with w; these options bound w in different ways.

What holds: a weight is never negative, so a weighted advantage moves a token in the direction it would have moved.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["none", "tis", "icepop", "mis"]
Level = Literal["token", "sequence", "geometric"]

BOUNDS: dict[Kind, tuple[float, float]] = {"none": (0, 1), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.0, 3.0)}
"""The bounds where none are set."""


def correction_weights(
    log_ratio: npt.NDArray[np.floating], kind: Kind, level: Level, low: float, high: float
) -> npt.NDArray[np.float32]:
    """The weights of one segment's trainable tokens; log_ratio [n] is log pi_start - log pi_engine; float32 [n].

    The ratio is each token's (token), the product over the segment (sequence), or its geometric mean (geometric). tis
    brings it into [low, high]; icepop and mis keep it inside of that band and make it 0 outside.

    Sources: truncated importance sampling (F. Yao et al., "Your efficient RL framework secretly brings you off-policy
    RL training", 2025), IcePop (Ling team, "Small leak can sink a great ship", 2025; tokens), masked importance
    sampling (J. Liu, Y. Li et al., "When speed kills stability", 2025; tokens and sequences).
    """
    if level == "sequence":
        log_ratio = np.full_like(log_ratio, log_ratio.sum())
    elif level == "geometric":
        log_ratio = np.full_like(log_ratio, log_ratio.mean())
    with np.errstate(over="ignore"):  # an infinite ratio is outside of every band
        ratio = np.exp(log_ratio)
    weights = np.clip(ratio, low, high) if kind == "tis" else np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return np.asarray(weights, np.float32)
