"""Sampled tokens and logprobs against distributions worked out by hand."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch

from polarlike.engines.sampling import History, Uniforms, derived_seed, needs_history, sample
from polarlike.records import Sampling

PROBS = (0.5, 0.1, 0.3, 0.1)


def draw(uniform: float, history: History | None = None, **s: float) -> tuple[int, float]:
    logits = torch.log(torch.tensor([PROBS]))
    tokens, logprobs = sample(logits, [Sampling(**s)], [uniform], [history])  # type: ignore[arg-type]
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize(
    ("settings", "uniform", "token", "prob"),
    [
        ({}, 0.0, 0, 0.5),
        ({}, 0.49, 0, 0.5),
        ({}, 0.51, 1, 0.1),
        ({}, 0.61, 2, 0.3),
        ({}, 0.999999, 3, 0.1),
        # p^2 renormalised: 0.25, 0.01, 0.09, 0.01 over 0.36
        ({"temperature": 0.5}, 0.7, 1, 0.01 / 0.36),
        ({"temperature": 0.5}, 0.73, 2, 0.09 / 0.36),
        ({"top_k": 2}, 0.9, 2, 0.3 / 0.8),
        ({"top_k": 1}, 0.99, 0, 1.0),
        ({"top_p": 0.79}, 0.7, 2, 0.3 / 0.8),
        ({"top_p": 0.5}, 0.99, 0, 1.0),
        ({"top_p": 1e-9}, 0.99, 0, 1.0),
        # top-k first, then top-p of what is left: 0.625 and 0.375
        ({"top_k": 2, "top_p": 0.6}, 0.99, 0, 1.0),
        ({"temperature": 0.0}, 0.99, 0, 0.5),
        ({"temperature": 0.0, "top_k": 1}, 0.99, 0, 0.5),
    ],
)
def test_the_logprob_is_that_of_the_distribution_drawn_from(
    settings: dict[str, float], uniform: float, token: int, prob: float
) -> None:
    got, logprob = draw(uniform, **settings)
    assert got == token
    assert logprob == pytest.approx(log(prob), abs=1e-5)


def test_penalties_are_vllms() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5]])
    s = Sampling(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    history = History(np.array([0, 1], np.int32), 4)
    history.add(2)
    history.add(2)
    # repetition (prompt and reply): 2 / 2, -1 * 2, 1 / 2; reply alone: 2 * 0.5 + 0.25 off token 2.
    expected = torch.tensor([1.0, -2.0, 0.5 - 1.25, 0.5])
    tokens, logprobs = sample(logits, [s], [0.0], [history])
    assert tokens.tolist() == [0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(expected, -1)[0]), abs=1e-6)
    assert needs_history(s)
    assert not needs_history(Sampling())


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = torch.log(torch.tensor([PROBS] * 3))
    rows = [Sampling(top_k=1), Sampling(temperature=0.5), Sampling()]
    tokens, logprobs = sample(logits, rows, [0.9, 0.73, 0.61], [None] * 3)
    assert tokens.tolist() == [0, 2, 2]
    np.testing.assert_allclose(logprobs, [0.0, log(0.25), log(0.3)], atol=1e-5)


def test_draws_have_the_models_frequencies() -> None:
    uniforms, n = Uniforms(3), 4000
    logits = torch.log(torch.tensor([PROBS] * n))
    tokens, _ = sample(logits, [Sampling()] * n, [uniforms.next() for _ in range(n)], [None] * n)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, PROBS, atol=0.03)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    highest = float(np.nextafter(1.0, 0.0))
    for uniform, token in ((0.0, 1), (0.5, 3), (highest, 3)):
        assert sample(logits.clone(), [Sampling()], [uniform], [None])[0].tolist() == [token]


def test_a_seed_gives_its_numbers_again() -> None:
    a, b, c = Uniforms(1), Uniforms(1), Uniforms(2)
    first = [a.next() for _ in range(100)]
    assert first == [b.next() for _ in range(100)]
    assert first != [c.next() for _ in range(100)]
    assert len({derived_seed(0, k) for k in range(100)} | {derived_seed(1, k) for k in range(100)}) == 200
