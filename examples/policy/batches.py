"""Batches to train on: random spans that come again, and dialogues padded to one length.

Knows token ids alone. A batch is two tensors of one shape [B, T]: `ids` (int64) and `weight` (float32: what a token's
own loss counts, 0 where it is context or padding). It needs no attention mask, since the padding stands on the right,
where causal attention never looks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polarlike.records import Ids


@dataclass
class Batch:
    ids: Tensor
    weight: Tensor


@dataclass
class Example:
    """One token stream: int32 [T], and float32 [T] of what each token counts in the loss."""

    ids: Ids
    weight: np.ndarray[Any, np.dtype[np.float32]]


def pad(examples: Sequence[Example], filler: int) -> Batch:
    """Examples side by side, padded on the right with `filler` of weight 0."""
    length = max(len(e.ids) for e in examples)
    ids = np.full((len(examples), length), filler, np.int64)
    weight = np.zeros((len(examples), length), np.float32)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        weight[row, : len(example.ids)] = example.weight
    return Batch(torch.from_numpy(ids), torch.from_numpy(weight))


def copy_batch(rng: random.Random, size: int, length: int, vocabulary: int) -> Batch:
    """Two to four random spans of 3 to 10 tokens in any order, again and again, with some noise between them. A token
    counts if its span was seen before and it is not the span's first: it can be known only by looking back."""
    return pad([_copy_example(rng, length, vocabulary) for _ in range(size)], 0)


def _copy_example(rng: random.Random, length: int, vocabulary: int) -> Example:
    spans = [[rng.randrange(vocabulary) for _ in range(rng.randint(3, 10))] for _ in range(rng.randint(2, 4))]
    seen = [False] * len(spans)
    ids: list[int] = []
    weight: list[float] = []
    while len(ids) < length:
        if rng.random() < 0.15:
            ids += [rng.randrange(vocabulary) for _ in range(2)]
            weight += [0.0, 0.0]
            continue
        k = rng.randrange(len(spans))
        ids += spans[k]
        weight += [0.0] + [float(seen[k])] * (len(spans[k]) - 1)
        seen[k] = True
    return Example(np.asarray(ids[:length], np.int32), np.asarray(weight[:length], np.float32))


def loss_and_hits(model: Any, batch: Batch) -> tuple[Tensor, float]:
    """The weighted mean cross-entropy of the tokens that count, and the share of them that greedy choice gets right.

    Only positions that count go through the output projection: it is the dearest matrix of a model this small."""
    counts = batch.weight[:, 1:] > 0
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1][counts]
    logits = model.lm_head(hidden).float()
    target, weight = batch.ids[:, 1:][counts], batch.weight[:, 1:][counts]
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    hits = (logits.detach().argmax(-1) == target).float().mean().item()
    return loss, hits
