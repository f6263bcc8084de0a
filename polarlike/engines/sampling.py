"""From logits to sampled tokens and the logprobs of what was sampled. Knows tensors and `Sampling`, no model.

What holds: the logprob of a token is its log-probability in the distribution it was drawn from: penalties, then
temperature, then top-k, then top-p, as vLLM orders them. At temperature 0 the token is the most likely one and its
logprob is that of temperature 1 without top-k and top-p (a greedy token's own would always be 0).

A draw uses one uniform number of the request's own generator, turned into a token by the inverse of the cumulative
distribution. So the same seed gives the same tokens whatever else is in the batch, but for a draw that falls within
rounding (about 1e-6) of the border between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from polarlike.records import Ids, Logprobs, Sampling


class Uniforms:
    """Numbers in [0, 1) from one seeded torch generator, drawn in blocks because a single draw costs as much."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._block: list[float] = []

    def next(self) -> float:
        if not self._block:
            block = torch.rand(64, generator=self._generator, dtype=torch.float64)
            self._block = block.flip(0).tolist()
        return self._block.pop()


def derived_seed(seed: int, ordinal: int) -> int:
    """A request's own seed where it names none: from the engine's seed and how many requests came before."""
    return int(np.random.SeedSequence([abs(seed), ordinal]).generate_state(1, np.uint64)[0] >> 1)


class History:
    """What penalties look at: the tokens of prompt and reply (repetition), and of the reply alone (the other two)."""

    def __init__(self, prompt_ids: Ids, vocab: int):
        self.seen = torch.zeros(vocab, dtype=torch.bool)
        self.seen[torch.from_numpy(prompt_ids.astype(np.int64))] = True
        self.counts = torch.zeros(vocab, dtype=torch.float32)

    def add(self, token: int) -> None:
        self.seen[token] = True
        self.counts[token] += 1

    def penalise(self, logits: torch.Tensor, s: Sampling) -> None:
        """Changes one row of logits, float32 [vocab], in place."""
        r = s.repetition_penalty
        if r != 1.0:
            seen = self.seen.to(logits.device)
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits))
        counts = self.counts.to(logits.device)
        logits -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)


def needs_history(s: Sampling) -> bool:
    return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1.0, 0.0, 0.0)


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float], histories: Sequence[History | None]
) -> tuple[npt.NDArray[np.int64], Logprobs]:
    """One token a row. logits: float32 [rows, vocab], changed in place. uniforms: one number in [0, 1) a row, unused
    where the temperature is 0. Returns tokens int64 [rows] and logprobs float32 [rows]."""
    for row, (s, history) in enumerate(zip(samplings, histories, strict=True)):
        if history is not None:
            history.penalise(logits[row], s)
    greedy = [s.temperature == 0 for s in samplings]
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        divisor = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device)
        logits /= divisor[:, None]
    for row, s in enumerate(samplings):
        if not greedy[row] and (s.top_k or s.top_p < 1):
            _filter(logits[row], s.top_k, s.top_p)
    logprobs = torch.log_softmax(logits, dim=-1)
    if all(greedy):
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = logprobs.double().exp_().cumsum_(dim=-1)
        target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
        # The first token whose cumulative probability is above the target: one of probability 0 never is, since the
        # target is kept below the total.
        target = torch.minimum(target, torch.nextafter(cumulative[:, -1:], torch.zeros_like(target)))
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _filter(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    """Sets to -inf, in one row, what top-k and then top-p leave out."""
    if top_k and top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits[logits < least] = float("-inf")
    if top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        logits[order[before >= top_p]] = float("-inf")
