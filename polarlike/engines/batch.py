"""Continuous batching: which tokens go through the model next, and what comes of them.

It owns the model, the pool of keys and values and the prefix tree, and is used by one thread. It knows sequences of
ids, nothing of requests' callers or of time. One `step` is one forward pass: the newest token of every sequence that
is being sampled, and up to `prefill` tokens of prompts.

What holds:
- A token's logprob and version are those of the weights the pass ran with, over keys and values of those same weights:
  `load` forgets every key and value, and running sequences are computed anew before they go on.
- The pool is never exceeded. When it is full, cached prefixes go first, then the youngest running sequence gives up its
  places and is computed anew later; a single sequence always fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polarlike.engines.attention import LONG, KVPool, Packed, Span
from polarlike.engines.base import EngineError
from polarlike.engines.kv_ranges import Allocator, Runs, count, cut, join
from polarlike.engines.kv_tree import Node, PrefixTree, common_prefix
from polarlike.engines.sampling import History, Uniforms, sample
from polarlike.engines.weights import load_weights
from polarlike.records import Ids, Logprobs, Sampling

GROW = 64
"""Places a sampled sequence reserves at a time."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Ids being sampled or scored.

    ids: int32 [capacity], of which `length` are known and `computed` have keys and values. Those of the first
    `node.end` stand in the tree, the others in `own` places. keep: first position whose logits are wanted.
    """

    ids: Ids
    length: int
    keep: int
    sampling: Sampling
    uniforms: Uniforms | None = None  # None: the sequence is scored, not sampled
    history: History | None = None
    computed: int = 0
    node: Node | None = None
    own: Runs = field(default_factory=list)
    shared: bool = False  # its prompt is in the tree
    scores: list[Logprobs] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.length - self.computed

    @property
    def base(self) -> int:
        return self.node.end if self.node is not None else 0


@dataclass(slots=True)
class Sampled:
    sequence: Sequence
    token: int
    logprob: float
    version: int


class Batch:
    def __init__(self, model: Any, *, places: int, prefill: int, limit: int):
        config = model.config.get_text_config()
        self.model = model
        self.vocab = int(config.vocab_size)
        self.version = 0
        self.prefill = prefill
        self.limit = limit
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.pool = KVPool(config.num_hidden_layers, kv_heads, head_dim, places, parameter.dtype, self.device)
        self.allocator = Allocator(places)
        self.tree = PrefixTree(self.allocator)
        self.running: list[Sequence] = []  # oldest first; those with a node or places of their own
        self.waiting: list[Sequence] = []
        self.stats = {"prompt_tokens": 0, "reused_tokens": 0, "computed_tokens": 0, "sampled_tokens": 0, "steps": 0}
        self.stats |= {"recomputed_tokens": 0, "preempted": 0}

    # ------------------------------------------------------------ what a caller does

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.stats["prompt_tokens"] += sequence.length

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands; what it has computed stays in the tree."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._keep(sequence, sequence.computed)
            self.allocator.give_back(sequence.own)
            sequence.own = []
            self._leave(sequence)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Swaps the weights. Raises EngineError, with nothing changed, where they are not this model's."""
        load_weights(self.model, weights)
        for sequence in self.running:
            self._forget(sequence)
        self.waiting = self.running + self.waiting
        self.running = []
        self.tree.clear()
        self.version = version

    def step(self) -> list[Sampled]:
        """One forward pass. Returns the tokens sampled in it; a scored sequence collects its own logprobs."""
        chosen = self._choose()
        if not chosen:
            return []
        logits, rows = self._forward(chosen)
        self.stats["steps"] += 1
        return self._read(chosen, logits, rows)

    # ------------------------------------------------------------ choosing

    def _choose(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next pass and how many new tokens of each, places reserved."""
        chosen: list[tuple[Sequence, int]] = []
        # A long prompt leaves a quarter of each pass to those that wait, so that a short turn need not wait for it.
        room = self.prefill * 3 // 4 if self.waiting and len(self.running) < self.limit else self.prefill
        spare = self.prefill - room
        for sequence in sorted(self.running, key=lambda s: s.missing):
            if sequence not in self.running:  # gave up its places for one before it
                continue
            n = 1 if sequence.missing == 1 else min(sequence.missing, room)
            if n and self._reserve(sequence, sequence.computed + n):
                chosen.append((sequence, n))
                room -= n if n > 1 else 0
        # A sequence may have lost its places to a later reservation.
        chosen = [(s, n) for s, n in chosen if s in self.running]
        room += spare
        for sequence in list(self.waiting):
            if room <= 0 or len(self.running) >= self.limit:
                break
            n = self._admit(sequence, room)
            if n:
                chosen.append((sequence, n))
                room -= n
        return chosen

    def _admit(self, sequence: Sequence, room: int) -> int:
        """Lets a waiting sequence run if it may: how many of its tokens go into this pass, 0 if none."""
        ids = sequence.ids[: sequence.length]
        node = self.tree.match(ids[: min(sequence.keep, sequence.length - 1)])
        # What another sequence is computing now need not be computed twice: wait for it.
        for other in self.running:
            if other.missing > 1 and common_prefix(other.ids[: other.length], ids) > max(node.end, other.computed) + 16:
                return 0
        node, taken = self.tree.claim(node)
        sequence.node, sequence.own = node, self._compact(taken)
        sequence.computed = node.end + count(taken)
        node.pins += 1
        n = min(sequence.missing, room)
        if not self._take(sequence, sequence.computed + n):
            self._drop(sequence)
            return 0
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.stats["reused_tokens"] += sequence.computed
        return n

    def _compact(self, runs: Runs) -> Runs:
        """A session's own history in one run instead of one a turn, where the pool has such a run."""
        runs = join(runs)
        if len(runs) < 2:
            return runs
        target = self.allocator.take(count(runs))
        if target is None or len(target) >= len(runs):
            self.allocator.give_back(target or [])
            return runs
        self.pool.move(runs, target)
        self.allocator.give_back(runs)
        return target

    def _take(self, sequence: Sequence, upto: int) -> bool:
        """Reserves places for tokens up to `upto`, evicting cached prefixes for it."""
        held = sequence.base + count(sequence.own)
        need = upto - held
        if need <= 0:
            return True
        wanted = min(max(upto, sequence.length) + GROW, sequence.ids.size) - held
        if self.allocator.free < wanted:
            self.tree.evict(wanted)
        runs = self.allocator.take(wanted if self.allocator.free >= wanted else need)
        if runs is None:
            return False
        sequence.own = join(sequence.own + runs)
        return True

    def _reserve(self, sequence: Sequence, upto: int) -> bool:
        """As `_take`, and the youngest other sequence gives up its places if need be."""
        while not self._take(sequence, upto):
            victim = self.running[-1]
            if victim is sequence:
                if len(self.running) > 1:
                    self._preempt(sequence)
                    return False
                raise EngineError("The pool of keys and values is too small for one sequence; raise kv_tokens.")
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop(sequence)
        self.waiting.insert(0, sequence)
        self.stats["preempted"] += 1

    # ------------------------------------------------------------ the pass

    def _forward(self, chosen: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, list[int]]:
        """float32 logits [wanted, vocab] and how many of them belong to each of `chosen`, which is put in the order
        of the pass: short ones first, those that share a path side by side."""
        chosen.sort(key=lambda c: (c[1] >= LONG, [n.serial for n in c[0].node.path()] if c[0].node else []))
        ids, positions, write, spans, rows = [], [], [], [], []
        wanted: list[int] = []
        at = 0
        for s, n in chosen:
            end = s.computed + n
            ids.append(s.ids[s.computed : end])
            positions.append(np.arange(s.computed, end))
            spans.append(Span(s.computed, n, _pieces(s, end)))
            write.append(_places(s.own, s.computed - s.base, n))
            first = max(s.keep, s.computed)
            last = min(end, s.length if s.uniforms else s.length - 1)
            wanted.extend(range(at + first - s.computed, at + last - s.computed))
            rows.append(max(0, last - first))
            at += n
        packed = Packed(self.pool, spans, self._tensor(np.concatenate(write)))
        logits = self.model(
            input_ids=self._tensor(np.concatenate(ids).astype(np.int64))[None],
            position_ids=self._tensor(np.concatenate(positions))[None],
            use_cache=False,
            logits_to_keep=self._tensor(np.asarray(wanted, np.int64)),
            packed=packed,
        ).logits[0]
        self.stats["computed_tokens"] += at
        return logits.float(), rows

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _read(self, chosen: list[tuple[Sequence, int]], logits: torch.Tensor, rows: list[int]) -> list[Sampled]:
        sampling: list[tuple[Sequence, int]] = []  # and its row
        at = 0
        for (s, n), wanted in zip(chosen, rows, strict=True):
            if s.uniforms is None and wanted:
                s.scores.append(self._score(s, logits[at : at + wanted]))
            elif wanted:
                sampling.append((s, at))
            s.computed += n
            if s.missing == 0 and not s.shared:
                self._share(s)
            at += wanted
        if not sampling:
            return []
        picked = [row for _, row in sampling]
        tokens, logprobs = sample(
            logits if len(picked) == len(logits) else logits[picked],
            [s.sampling for s, _ in sampling],
            [s.uniforms.next() if s.uniforms and s.sampling.temperature else 0.0 for s, _ in sampling],
            [s.history for s, _ in sampling],
        )
        self.stats["sampled_tokens"] += len(sampling)
        out = []
        for (s, _), token, logprob in zip(sampling, tokens.tolist(), logprobs.tolist(), strict=True):
            if s.history is not None:
                s.history.add(token)
            s.ids[s.length] = token
            s.length += 1
            s.keep = s.length - 1
            out.append(Sampled(s, token, logprob, self.version))
        return out

    def _score(self, s: Sequence, logits: torch.Tensor) -> Logprobs:
        first = max(s.keep, s.computed)
        target = self._tensor(s.ids[first + 1 : first + 1 + len(logits)].astype(np.int64))
        logprobs = torch.log_softmax(logits / (s.sampling.temperature or 1.0), dim=-1)
        chosen: Logprobs = logprobs.gather(1, target[:, None])[:, 0].cpu().numpy()
        return chosen

    # ------------------------------------------------------------ the tree

    def _share(self, s: Sequence) -> None:
        """Puts a computed prompt into the tree while its reply is still being sampled, so that others of its group
        find it; all but the last token, which every request computes anew for its logits."""
        s.shared = True
        self._keep(s, s.length - 1)

    def _keep(self, s: Sequence, upto: int) -> None:
        """Moves the places of tokens [base, upto) into the tree; the sequence stands on the node they end at."""
        if s.node is None or upto <= s.base:
            return
        mine, rest = cut(s.own, upto - s.base)
        node = self.tree.insert(s.node, s.ids[s.base : upto].copy(), mine)
        s.node.pins -= 1
        node.pins += 1
        s.node, s.own = node, rest

    def _leave(self, s: Sequence) -> None:
        if s.node is not None:
            s.node.pins -= 1
            s.node = None
        s.computed = 0
        s.shared = False

    def _drop(self, s: Sequence) -> None:
        self.allocator.give_back(s.own)
        s.own = []
        s.scores = []
        self._leave(s)

    def _forget(self, s: Sequence) -> None:
        self.stats["recomputed_tokens"] += s.computed
        self._drop(s)


def _pieces(s: Sequence, end: int) -> list[tuple[int, int, int]]:
    """(position, start, length) of the places of a sequence's first `end` tokens."""
    runs = [run for node in s.node.path() for run in node.runs] if s.node is not None else []
    own, _ = cut(s.own, end - s.base)
    out, at = [], 0
    for start, n in [*runs, *own]:
        out.append((at, start, n))
        at += n
    return out


def _places(runs: Runs, first: int, n: int) -> Any:
    """int64 [n]: the places of `n` tokens of a sequence's own from its `first` on."""
    part, _ = cut(cut(runs, first)[1], n)
    return np.concatenate([np.arange(start, start + length) for start, length in part])
