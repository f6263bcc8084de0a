"""Attention of a packed batch over one pool of keys and values, as an attention function that transformers calls.

A forward pass carries the new tokens of many sequences in one row, [1, N]; the model's own modules do all the maths but
attention, which lands here with a `Packed` that says which places of the pool each token may see. Places that several
sequences share (a common prompt) are multiplied once for all of them: that is what makes many rollouts of one long
prompt cheap on a CPU, where reading keys and values is most of a step.

It knows tensors and places, nothing of requests, sampling or the prefix tree. What holds: a token sees exactly its own
sequence's tokens up to and including itself, so results agree with a plain causal forward to rounding.

Source of the grouping: Hydragen (arXiv 2402.05099), without its log-sum-exp merge: scores of all pieces are written
into one buffer, by position, and normalised once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from polarlike.engines.kv_ranges import Runs

NAME = "polarlike_packed"
LONG = 32
"""From this many new tokens on, a sequence goes through fused attention by itself."""


class KVPool:
    """Keys and values of `places` tokens: for each layer [kv heads, places, head dim]."""

    def __init__(self, layers: int, heads: int, head_dim: int, places: int, dtype: torch.dtype, device: torch.device):
        shape = (layers, heads, places, head_dim)
        # Untouched memory is not resident on Linux: an empty pool costs nothing until it fills.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def move(self, source: Runs, target: Runs) -> None:
        """Copies the places of `source` to those of `target`, of one length."""
        rows = torch.cat([torch.arange(s, s + n, device=self.keys.device) for s, n in source])
        at = 0
        for start, n in target:
            self.keys[:, :, start : start + n] = self.keys[:, :, rows[at : at + n]]
            self.values[:, :, start : start + n] = self.values[:, :, rows[at : at + n]]
            at += n


@dataclass(slots=True)
class Span:
    """One sequence's share of a packed batch: `new` tokens that follow `past` cached ones. pieces: (first position,
    start place, length) of everything it sees, its new tokens included, in order."""

    past: int
    new: int
    pieces: list[tuple[int, int, int]]


@dataclass(slots=True)
class Piece:
    """Places [start, start + length) hold positions [position, ...) of rows [first, last)."""

    position: int
    start: int
    length: int
    first: int
    last: int


class Packed:
    """Where the tokens of one forward pass lie. spans: the short ones first, neighbours sharing their leading pieces.
    write: int64 [N], the place of each new token."""

    def __init__(self, pool: KVPool, spans: Sequence[Span], write: torch.Tensor):
        self.pool = pool
        self.write = write
        self.short = [s for s in spans if s.new < LONG]
        self.long = [s for s in spans if s.new >= LONG]
        self.rows = sum(s.new for s in self.short)
        self.width = max((s.past + s.new for s in self.short), default=0)
        self.pieces = _group(self.short)
        self._scores: torch.Tensor | None = None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def scores(self, like: torch.Tensor) -> torch.Tensor:
        """[kv heads, rows * rep, width], -inf wherever no layer writes: past the end of a short span's sequence."""
        if self._scores is None:
            self._scores = like.new_full((*like.shape[:2], self.width), float("-inf"))
        return self._scores

    def mask(self, span: Span) -> torch.Tensor:
        """bool [new, past + new], True where a row of a long span may look."""
        key = (span.new, span.past)
        if key not in self._masks:
            ones = torch.ones(span.new, span.past + span.new, dtype=torch.bool, device=self.pool.keys.device)
            self._masks[key] = ones.tril(span.past)
        return self._masks[key]


def _group(spans: Sequence[Span]) -> list[Piece]:
    """The pieces of all spans, those shared by neighbours once."""
    out: list[Piece] = []
    live: list[Piece] = []  # pieces of the span before, by depth
    row = 0
    for span in spans:
        last = row + span.new
        depth = 0
        for position, start, length in span.pieces:
            old = live[depth] if depth < len(live) else None
            if old is not None and (old.position, old.start, old.length) == (position, start, length):
                old.last = last
            else:
                del live[depth:]
                live.append(Piece(position, start, length, row, last))
                out.append(live[-1])
            depth += 1
        del live[depth:]
        row = last
    return _merge(out)


def _merge(pieces: list[Piece]) -> list[Piece]:
    """Pieces of the same rows that touch in the pool become one."""
    out: list[Piece] = []
    for p in pieces:
        q = out[-1] if out else None
        if (
            q is not None
            and (q.first, q.last) == (p.first, p.last)
            and q.start + q.length == p.start
            and q.position + q.length == p.position
        ):
            q.length += p.length
        else:
            out.append(p)
    return out


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, H, N, D]; key, value: [1, H_kv, N, D], rotated. Returns [1, N, H, D]. transformers' own signature."""
    if packed is None:
        raise RuntimeError("packed attention needs a Packed; this model does not hand keyword arguments on")
    for feature in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise RuntimeError(f"packed attention does not compute {feature}, which this model's attention has")
    layer = module.layer_idx
    keys, values = packed.pool.keys[layer], packed.pool.values[layer]
    keys.index_copy_(1, packed.write, key[0])
    values.index_copy_(1, packed.write, value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _, heads, n, dim = query.shape
    out = query.new_empty(1, n, heads, dim)
    if packed.rows:
        out[0, : packed.rows] = _short(query[0, :, : packed.rows], keys, values, scale, packed)
    row = packed.rows
    for span in packed.long:
        q = query[:, :, row : row + span.new]
        out[0, row : row + span.new] = _long(q, keys, values, scale, packed, span)
        row += span.new
    return out, None


def _short(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, packed: Packed) -> torch.Tensor:
    """q: [H, R, D]. Returns [R, H, D]."""
    heads, rows, dim = q.shape
    kv = keys.shape[0]
    rep = heads // kv
    # [kv, rows * rep, D]: the query heads of one key head side by side, row by row.
    q = (q * scale).view(kv, rep, rows, dim).transpose(1, 2).reshape(kv, rows * rep, dim)
    scores = packed.scores(q)
    for p in packed.pieces:
        a, b = p.first * rep, p.last * rep
        k = keys[:, p.start : p.start + p.length]
        scores[:, a:b, p.position : p.position + p.length] = torch.bmm(q[:, a:b], k.transpose(1, 2))
    _hide_later(scores.view(kv, rows, rep, packed.width), packed)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = q.new_zeros(kv, rows * rep, dim)
    for p in packed.pieces:
        a, b = p.first * rep, p.last * rep
        w = weights[:, a:b, p.position : p.position + p.length]
        out[:, a:b] += torch.bmm(w, values[:, p.start : p.start + p.length])
    return out.view(kv, rows, rep, dim).transpose(0, 1).reshape(rows, heads, dim)


def _hide_later(scores: torch.Tensor, packed: Packed) -> None:
    """Keeps the rows of one span from seeing those after them. scores: [kv, rows, rep, width]."""
    row = 0
    for span in packed.short:
        if span.new > 1:
            block = scores[:, row : row + span.new, :, span.past : span.past + span.new]
            block.masked_fill_(~packed.mask(span)[:, None, span.past :], float("-inf"))
        row += span.new


def _long(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, packed: Packed, span: Span
) -> torch.Tensor:
    """q: [1, H, N, D]. Returns [N, H, D]."""
    k = torch.cat([keys[:, s : s + n] for _, s, n in span.pieces], dim=1)
    v = torch.cat([values[:, s : s + n] for _, s, n in span.pieces], dim=1)
    rep = q.shape[1] // k.shape[0]
    if rep > 1:
        k, v = k.repeat_interleave(rep, dim=0), v.repeat_interleave(rep, dim=0)
    if span.past:
        out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=packed.mask(span), scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k[None], v[None], is_causal=True, scale=scale)
    return out[0].transpose(0, 1)
