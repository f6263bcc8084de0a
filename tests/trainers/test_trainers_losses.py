"""Losses against plain float64 arithmetic, token by token."""

import math

import numpy as np
import pytest
import torch

from trainers.losses import TokenSums, aggregation_weights, clipped_ratio, is_clipped, k3

NOW = [-1.0, -1.0, -0.5, -2.0, -0.1, -3.0]
OLD = [-1.0, -1.5, -1.5, -1.0, -0.3, -2.0]
ADVANTAGES = [1.0, 0.5, -2.0, -1.0, 0.0, 3.0]


def reference_loss(now: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(now - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, bounded * advantage)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.5, 3.0)])
def test_clipped_ratio_equals_its_definition_token_by_token(low: float, high: float) -> None:
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD, ADVANTAGES)]
    expected = [reference_loss(*x, low, high) for x in zip(NOW, OLD, ADVANTAGES, strict=True)]
    np.testing.assert_allclose(clipped_ratio(*tensors, low, high).numpy(), expected, rtol=1e-12)


def test_clipped_tokens_are_exactly_those_without_a_gradient() -> None:
    now, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD, ADVANTAGES))
    now.requires_grad_()
    clipped_ratio(now, old, advantages, 0.2, 0.2).sum().backward()
    flagged = is_clipped(now.detach(), old, advantages, 0.2, 0.2)
    # Token 1: u = e^0.5 and A > 0; token 3: u = e^-1 and A < 0. Tokens 2 and 5 lie on the other sides and push back.
    assert flagged.tolist() == [False, True, False, True, False, False]
    assert now.grad is not None
    assert (now.grad == 0).tolist() == [False, True, False, True, True, False]  # token 4 has advantage 0


def test_the_gradient_at_the_behaviour_policy_is_minus_the_advantage() -> None:
    now = torch.tensor(OLD, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    clipped_ratio(now, now.detach().clone(), advantages, 0.2, 0.2).sum().backward()
    assert now.grad is not None
    np.testing.assert_allclose(now.grad.numpy(), [-a for a in ADVANTAGES], rtol=1e-12)


def test_k3_equals_r_minus_log_r_minus_one() -> None:
    now, old = (torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD))
    expected = [math.exp(a - b) - (a - b) - 1 for a, b in zip(NOW, OLD, strict=True)]
    np.testing.assert_allclose(k3(now, old).numpy(), expected, rtol=1e-9, atol=1e-15)
    assert float(k3(now, now).abs().max()) == 0.0


def test_k3_keeps_its_digits_where_the_two_nearly_agree() -> None:
    # r = e^d with d = 1e-4: d^2/2 + d^3/6 = 5.0001667e-9, which float32 loses in exp(d) - d - 1
    value = float(k3(torch.tensor([1e-4]), torch.tensor([0.0])))
    assert value == pytest.approx(5.0e-9, rel=0.05)


SEGMENT = np.array([0, 0, 0, 1, 2, 2])
ROLLOUT = np.array([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", [1 / 6] * 6),
        ("segment", [1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 6, 1 / 6]),
        ("rollout", [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4]),
        ("constant", [1 / 50] * 6),
    ],
)
def test_aggregations_weigh_tokens_as_they_say(name: str, expected: list[float]) -> None:
    weights = aggregation_weights(name, SEGMENT, ROLLOUT, 50.0)  # type: ignore[arg-type]
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_token_and_rollout_weights_do_not_see_where_a_rollout_was_cut() -> None:
    uncut = np.array([0, 0, 0, 0, 1, 1])
    for name in ("token", "rollout"):
        cut_weights = aggregation_weights(name, SEGMENT, ROLLOUT, 1.0)  # type: ignore[arg-type]
        assert (cut_weights == aggregation_weights(name, uncut, ROLLOUT, 1.0)).all()  # type: ignore[arg-type]


def test_sums_over_micro_batches_give_the_means_over_all_tokens() -> None:
    now, old = torch.tensor(NOW), torch.tensor(OLD)
    entropy = torch.arange(6.0)
    clipped = torch.tensor([True, False, False, True, False, False])
    sums, other = TokenSums(), TokenSums()
    sums.add(now[:2], old[:2], clipped[:2], entropy[:2])
    other.add(now[2:], old[2:], clipped[2:], entropy[2:])
    sums.merge(other)
    means = sums.means()
    assert means["clip_fraction"] == pytest.approx(2 / 6)
    assert means["entropy"] == pytest.approx(15 / 6)
    k3_sum = sum(math.exp(a - b) - (a - b) - 1 for a, b in zip(NOW, OLD, strict=True))
    assert means["kl_k3"] == pytest.approx(k3_sum / 6, rel=1e-5)
    assert means["ratio_max"] == pytest.approx(math.e)
