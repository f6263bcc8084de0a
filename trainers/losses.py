"""The policy loss over a flat list of trainable tokens, and what is measured on it. Knows torch, no model and no batch.

All tensors are one-dimensional, one entry a trainable token of the batch. "old" logprobs are those the engine recorded
when it sampled, at the segment's temperature (the behaviour policy).

What holds: `aggregation_weights` are computed once over a whole minibatch, and every loss is a weighted sum, so that
cutting the minibatch into micro-batches leaves the gradient as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Aggregation = Literal["token", "segment", "rollout", "constant"]


def aggregation_weights(
    aggregation: Aggregation,
    segment: npt.NDArray[np.int64],
    rollout: npt.NDArray[np.int64],
    constant: float,
) -> npt.NDArray[np.float32]:
    """The weight of each token in the minibatch's loss; segment and rollout are its indices, int64 [N]; float32 [N].

    token: 1 / N, so every token weighs the same. segment: a segment's tokens over their count, then over the number of
    segments. rollout: the same by rollout, so that a rollout cut into several segments weighs as one; dividing by a
    trajectory's own length weakens the gradient of long failures. constant: 1 / constant.
    """
    if aggregation == "token":
        return np.full(segment.size, 1.0 / max(segment.size, 1), np.float32)
    if aggregation == "constant":
        return np.full(segment.size, 1.0 / constant, np.float32)
    _, which, counts = np.unique(
        segment if aggregation == "segment" else rollout, return_inverse=True, return_counts=True
    )
    return (1.0 / (counts[which] * max(counts.size, 1))).astype(np.float32)


def clipped_ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) per token, u = exp(logprob - old logprob).

    Source: PPO (arXiv 1707.06347); two separate bounds as in DAPO (arXiv 2503.14476).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool per token: u is past the bound on its advantage's side, so the token gives no gradient."""
    ratio = torch.exp(logprobs - old_logprobs)
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))


def k3(logprobs: Tensor, sampled_under: Tensor) -> Tensor:
    """r - log r - 1 per token with r = exp(logprobs - sampled_under): an estimate of KL(sampled_under || logprobs) on
    tokens drawn under `sampled_under`, never negative. Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = logprobs - sampled_under
    # expm1 keeps the digits that exp(x) - 1 loses where trainer and engine nearly agree.
    return torch.expm1(log_ratio) - log_ratio


@dataclass(slots=True)
class TokenSums:
    """Sums over tokens, added up micro-batch by micro-batch and divided once at the end."""

    tokens: int = 0
    kl_k3: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    ratio_max: float = 0.0

    def add(self, logprobs: Tensor, old_logprobs: Tensor, clipped: Tensor, entropy: Tensor) -> None:
        """Adds one micro-batch; all tensors [n]."""
        logprobs = logprobs.detach()
        self.tokens += logprobs.numel()
        self.kl_k3 += float(k3(logprobs, old_logprobs).sum())
        self.clipped += float(clipped.sum())
        self.entropy += float(entropy.sum())
        self.ratio_max = max(self.ratio_max, float(torch.exp(logprobs - old_logprobs).max()))

    def merge(self, other: TokenSums) -> None:
        self.tokens += other.tokens
        self.kl_k3 += other.kl_k3
        self.clipped += other.clipped
        self.entropy += other.entropy
        self.ratio_max = max(self.ratio_max, other.ratio_max)

    def means(self) -> dict[str, float]:
        n = max(self.tokens, 1)
        return {
            "kl_k3": self.kl_k3 / n,
            "clip_fraction": self.clipped / n,
            "entropy": self.entropy / n,
            "ratio_max": self.ratio_max,
        }
