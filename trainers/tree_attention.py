"""Attention of a packed sequence over its prefix tree, as an attention function of transformers. Knows torch, the
blocks of `batch` and the attention interface; no model, no loss.

One softmax runs over a token's whole context, but that context lies in several slices of the packed sequence. Each
block is computed alone with the log of its sum, and the parts are merged by those sums (as flash attention does between
its tiles). Backward needs no merging: given the merged output and sum, a block's gradient kernel already yields that
block's share. So no mask of the size P x P exists, no key is copied, and the work is that of the tree.

What holds: without blocks in the call the function is transformers' own sdpa attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polarlike.records import UsageError
from trainers.batch import Block

NAME = "polar_tree"
"""The name to give `model.set_attn_implementation`, after `register()`."""

QUERY_CHUNK = 1024
"""Queries a time in the plain kernel, which bounds its score matrix."""

UNSUPPORTED = ("softcap", "position_bias", "s_aux")
"""Arguments by which Gemma 2, T5 and gpt-oss change the softmax."""


def register() -> None:
    """Makes `NAME` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    blocks: Sequence[Block] | None = None,
    longest: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, P, D], key and value [1, H_kv, P, D]; returns [1, P, H, D]. longest: the longest stream."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if blocks is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    if sliding_window is not None and longest > sliding_window:
        raise UsageError(
            f"A segment of {longest} tokens exceeds the model's sliding window of {sliding_window}; "
            "set share_prefixes: false in the trainer's settings."
        )
    if any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise UsageError(
            "This model's attention is more than a softmax over scaled scores; "
            "set share_prefixes: false in the trainer's settings."
        )
    # Under autocast the norms of queries and keys leave them wider than the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    repeats = query.shape[1] // key.shape[1]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    merged: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), blocks, scale
    )
    return merged.transpose(1, 2), None


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
        out = torch.empty_like(query, dtype=torch.float32)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for block in blocks:
            (q0, q1), (k0, k1) = block.query, block.key
            part, part_sums = _attend(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], block.causal, scale)
            if block.causal:  # a run's block with itself comes first, and every token is in exactly one
                out[:, :, q0:q1], sums[:, :, q0:q1] = part, part_sums
                continue
            before = sums[:, :, q0:q1].clone()
            total = torch.logaddexp(before, part_sums)
            out[:, :, q0:q1].mul_(torch.exp(before - total).unsqueeze(-1))
            out[:, :, q0:q1].addcmul_(part, torch.exp(part_sums - total).unsqueeze(-1))
            sums[:, :, q0:q1] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
        for block in ctx.blocks:
            q, k = slice(*block.query), slice(*block.key)
            parts = _attend_backward(
                grad[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], sums[:, :, q],
                block.causal, ctx.scale,
            )  # fmt: skip
            for whole, part, where in zip((dq, dk, dv), parts, (q, k, k), strict=True):
                whole[:, :, where] += part
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention within one block: the output [1, H, Q, D] and the log of the softmax's sum [1, H, Q]."""
    if q.device.type == "cpu":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, sums
    return plain_attend(q, k, v, causal, scale)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of q, k and v, given the output and sums over the whole context."""
    if q.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    return plain_attend_backward(grad, q, k, v, out, sums, causal, scale)


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    """Scaled scores, float32, of queries that stand at start, start + 1, ... of the block; if causal, -inf on keys
    behind them."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if causal:
        rows = torch.arange(start, start + q.shape[2], device=q.device)
        scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > rows[:, None], -torch.inf)
    return scores


def plain_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`_attend` in public torch operations, for devices other than the CPU."""
    outs, sums = [], []
    for start in range(0, q.shape[2], QUERY_CHUNK):
        scores = _scores(q[:, :, start : start + QUERY_CHUNK], k, start, causal, scale)
        sums.append(scores.logsumexp(-1))
        outs.append(torch.exp(scores - sums[-1].unsqueeze(-1)).to(v.dtype) @ v)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def plain_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_attend_backward` in public torch operations, for devices other than the CPU."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        weights = torch.exp(_scores(q[:, :, rows], k, start, causal, scale) - sums[:, :, rows].unsqueeze(-1))
        delta = (grad[:, :, rows].float() * out[:, :, rows]).sum(-1, keepdim=True)
        d_scores = (weights * (grad[:, :, rows] @ v.transpose(-1, -2) - delta) * scale).to(q.dtype)
        dv += weights.to(v.dtype).transpose(-1, -2) @ grad[:, :, rows]
        dk += d_scores.transpose(-1, -2) @ q[:, :, rows]
        dq[:, :, rows] = d_scores @ k
    return dq, dk, dv
