"""The policy loss over a flat list of trainable tokens, and what is measured on it. Knows torch, no model and no batch.

All tensors are one-dimensional, one entry a trainable token of the batch. "old" logprobs are what the ratio starts
from: those the engine recorded when it sampled (the behaviour policy), or the trainer's own at the start of the step.

What holds: `aggregation_weights` are computed once over a whole minibatch, and every loss is a weighted sum, so that
cutting the minibatch into micro-batches leaves the gradient as it was.
"""

from __future__ import annotations

import math
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


@dataclass(slots=True, frozen=True)
class Shape:
    """The loss of a token; the settings of the same names say what each does."""

    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    max_ratio: float | None = None


def policy_loss(
    shape: Shape, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, segment: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether it is clipped (bool); segment: int64 [N], which segment a token is of.

    With u = exp(logprob - old logprob):
    clipped: -min(u A, clip(u) A), clip to [1 - clip_low, 1 + clip_high]; PPO (arXiv 1707.06347), separate bounds as in
    DAPO (arXiv 2503.14476). dual_clip c bounds it by -c A where A < 0 (arXiv 1912.09729).
    gspo: the same with u the geometric mean over the token's segment (arXiv 2507.18071).
    cispo: -stop_gradient(clip(u)) A logprob (MiniMax-M1, arXiv 2506.13585).
    max_ratio m: tokens with u outside of [1/m, m] have loss 0 and count as clipped.
    """
    log_ratio = logprobs - old_logprobs
    if shape.loss == "gspo":
        log_ratio = _segment_means(log_ratio, segment)
    outside = torch.zeros_like(log_ratio, dtype=torch.bool)
    if shape.max_ratio is not None:
        outside = log_ratio.detach().abs() > math.log(shape.max_ratio)
        # Not by a factor on the loss: an infinite ratio times 0 is no number.
        log_ratio = torch.where(outside, 0.0, log_ratio)
        advantages = torch.where(outside, 0.0, advantages)
    ratio = torch.exp(log_ratio)
    bounded = ratio.clamp(1.0 - shape.clip_low, 1.0 + shape.clip_high)
    if shape.loss == "cispo":
        return -bounded.detach() * advantages * logprobs, outside | (bounded != ratio)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    past = _past_bound(ratio, advantages, shape.clip_low, shape.clip_high)
    if shape.dual_clip is not None:
        least = shape.dual_clip * advantages
        past = past | ((advantages < 0) & (gain < least))
        gain = torch.where(advantages < 0, torch.maximum(gain, least), gain)
    return -gain, outside | past


def is_clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool per token: u is past the bound on its advantage's side, so the clipped loss gives no gradient."""
    return _past_bound(torch.exp(logprobs - old_logprobs), advantages, clip_low, clip_high)


def _past_bound(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))


def _segment_means(values: Tensor, segment: Tensor) -> Tensor:
    """Each token's segment's mean; a segment's tokens stand together. Not by index_add, whose order of summing varies
    from run to run on CUDA."""
    parts: tuple[Tensor, ...] = values.split(  # type: ignore[no-untyped-call]
        torch.unique_consecutive(segment, return_counts=True)[1].tolist()
    )
    return torch.cat([part.mean().expand(part.numel()) for part in parts])


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

    def add(
        self,
        logprobs: Tensor,
        engine_logprobs: Tensor,
        clipped: Tensor,
        entropy: Tensor,
        old_logprobs: Tensor | None = None,
    ) -> None:
        """Adds one micro-batch; all tensors [n]. old_logprobs: where the ratio does not start from the engine's."""
        logprobs = logprobs.detach()
        old = engine_logprobs if old_logprobs is None else old_logprobs
        self.tokens += logprobs.numel()
        self.kl_k3 += float(k3(logprobs, engine_logprobs).sum())
        self.clipped += float(clipped.sum())
        self.entropy += float(entropy.sum())
        self.ratio_max = max(self.ratio_max, float(torch.exp(logprobs - old).max()))

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
