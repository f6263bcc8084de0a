"""One pass over a step's rollouts, cut into what one optimizer step sees. Knows rows and numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainers.rows import Row


def minibatches(rollouts: Sequence[Sequence[Sequence[Row]]], most: int, rng: np.random.Generator) -> list[list[Row]]:
    """rollouts: rows by group, then by rollout. In random order, split evenly into parts of at most `most` rollouts.
    A group stays together: its rollouts share the longest prefixes."""
    order: list[Sequence[Row]] = []
    for g in rng.permutation(len(rollouts)):
        order += [rollouts[g][i] for i in rng.permutation(len(rollouts[g]))]
    parts = math.ceil(len(order) / most)
    cuts = np.array_split(np.arange(len(order)), parts) if parts else []
    return [[row for i in cut for row in order[i]] for cut in cuts]
