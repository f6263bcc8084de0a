"""From rows to batches that one forward can take. Knows numpy and rows; no torch, no model.

A rollout's segments, and the rollouts of one harness, share long prefixes. Here every shared token is laid out once:
the rows of a batch are sorted by their ids, each row keeps only the tokens in which it leaves the row before it, and
`Block`s say which of the laid-out tokens attend to which. Sorting makes this exact: the longest prefix a row shares
with any earlier row is the one it shares with its predecessor, so the layout is the prefix tree of the rows without
its nodes ever being built.

What holds:
- A token's logprob is conditioned on its own segment's ids before it, and on nothing else.
- Tokens behind the last token that conditions a trainable one are not laid out.
- One micro-batch has at most `max_tokens` laid-out tokens beyond its first row. (Were the first row counted, rows on a
  prompt longer than `max_tokens` could never share it, though each of them must fit into memory anyway.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlike.records import Ids, Logprobs
from trainers.rows import Index, Row

Slice = tuple[int, int]


@dataclass(slots=True, frozen=True)
class Block:
    """Laid-out tokens query[0]:query[1] attend to key[0]:key[1]: to all of them, or, where the two are the same slice
    (`causal`), each to itself and those before it."""

    query: Slice
    key: Slice
    causal: bool


@dataclass(slots=True)
class MicroBatch:
    """Rows laid out for one forward. P laid-out tokens, R places where logits are needed, N trainable tokens.

    ids, positions: int64 [P]. sources: int64 [R] into ids, each with its temperature, float32 [R]. place: int64 [N]
    into sources. targets: int64 [N]. engine_logprobs, old_logprobs, advantages, weights: float32 [N]. row: int64 [N]
    into rows, a row's tokens together. unpacked_tokens: what the same rows cost when each is forwarded alone.
    """

    rows: list[Row]
    ids: Index
    positions: Index
    blocks: list[Block]
    sources: Index
    temperatures: Logprobs
    place: Index
    targets: Index
    engine_logprobs: Logprobs
    old_logprobs: Logprobs
    advantages: Logprobs
    weights: Logprobs
    row: Index
    unpacked_tokens: int

    @property
    def packed_tokens(self) -> int:
        return int(self.ids.size)


def micro_batches(
    rows: Sequence[Row], weights: Logprobs, max_tokens: int, *, share_prefixes: bool = True
) -> list[MicroBatch]:
    """Lays rows out in as few micro-batches as a walk in sorted order finds.

    weights: float32 [N], the loss weight of each trainable token in the order of `rows`. share_prefixes False gives
    every row a micro-batch of its own, for models whose attention cannot follow a tree.
    """
    if not rows:
        return []
    splits = np.split(weights, np.cumsum([row.targets.size for row in rows])[:-1])
    if not share_prefixes:
        return [_lay_out([row], [0], [part]) for row, part in zip(rows, splits, strict=True)]
    # Big-endian bytes compare as the ids themselves do; the sort is stable, so equal streams keep their order.
    order = sorted(range(len(rows)), key=lambda i: rows[i].ids.astype(">u4").tobytes())
    batches: list[MicroBatch] = []
    taken: list[int] = []
    shared: list[int] = []
    beyond_first = 0
    for i in order:
        common = _common_prefix(rows[taken[-1]].ids, rows[i].ids) if taken else 0
        if taken and beyond_first + rows[i].ids.size - common > max_tokens:
            batches.append(_lay_out([rows[j] for j in taken], shared, [splits[j] for j in taken]))
            taken, shared, beyond_first, common = [], [], 0, 0
        beyond_first += rows[i].ids.size - common if taken else 0
        taken.append(i)
        shared.append(common)
    batches.append(_lay_out([rows[j] for j in taken], shared, [splits[j] for j in taken]))
    return batches


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _cut(path: list[Slice], length: int) -> list[Slice]:
    """The first `length` tokens of a path of slices."""
    kept: list[Slice] = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return kept


def _lay_out(rows: list[Row], shared: Sequence[int], weights: list[Logprobs]) -> MicroBatch:
    """shared[i]: how many leading tokens row i has in common with row i - 1 (0 for the first)."""
    path: list[Slice] = []
    own: list[Block] = []
    across: dict[Slice, Slice] = {}
    sources: list[Index] = []
    size = 0
    for row, common in zip(rows, shared, strict=True):
        path = _cut(path, common)
        new = row.ids.size - common
        if new:
            run = (size, size + new)
            own.append(Block(run, run, causal=True))
            # Sorted rows that share a slice follow one another, so that their queries join into one larger block.
            for key in path:
                across[key] = (across.get(key, run)[0], run[1])
            path = [*path, run]
            size += new
        where = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in path])
        sources.append(where[row.sources])
    counts = [row.targets.size for row in rows]
    source = np.concatenate(sources)
    temperature = np.repeat(np.array([row.temperature for row in rows], np.float32), counts)
    # Rows that sampled the same tokens from the same place share the logits there, unless they differ in temperature.
    keys, place = np.unique(np.stack([source.astype(np.float64), temperature]), axis=1, return_inverse=True)
    return MicroBatch(
        rows=rows,
        ids=np.concatenate([row.ids[n:] for row, n in zip(rows, shared, strict=True)]).astype(np.int64),
        positions=np.concatenate(
            [np.arange(n, row.ids.size, dtype=np.int64) for row, n in zip(rows, shared, strict=True)]
        ),
        blocks=own + [Block(query, key, causal=False) for key, query in across.items()],
        sources=keys[0].astype(np.int64),
        temperatures=keys[1].astype(np.float32),
        place=place.reshape(-1),
        targets=np.concatenate([row.targets for row in rows]),
        engine_logprobs=np.concatenate([row.engine_logprobs for row in rows]),
        old_logprobs=np.concatenate([row.old_logprobs for row in rows]),
        advantages=np.concatenate([row.advantages for row in rows]),
        weights=np.concatenate(weights),
        row=np.repeat(np.arange(len(rows), dtype=np.int64), counts),
        unpacked_tokens=sum(row.ids.size for row in rows),
    )
