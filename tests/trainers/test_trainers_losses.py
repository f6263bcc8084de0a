"""Losses against plain float64 arithmetic, token by token."""

import math

import numpy as np
import pytest
import torch

from trainers.losses import Shape, TokenSums, aggregation_weights, k3, policy_loss

NOW = [-1.0, -1.0, -0.5, -2.0, -0.1, -3.0]
OLD = [-1.0, -1.5, -1.5, -1.0, -0.3, -2.0]
ADVANTAGES = [1.0, 0.5, -2.0, -1.0, 0.0, 3.0]


SEGMENT = np.array([0, 0, 0, 1, 2, 2])


def reference(shape: Shape, now: list[float], old: list[float], advantages: list[float]) -> list[float]:
    """The definitions, in float64 and token by token."""
    losses = []
    for i, advantage in enumerate(advantages):
        ratio = math.exp(now[i] - old[i])
        if shape.loss == "gspo":
            mine = [k for k in range(len(now)) if SEGMENT[k] == SEGMENT[i]]
            ratio = math.exp(sum(now[k] - old[k] for k in mine) / len(mine))
        if shape.max_ratio is not None and not 1 / shape.max_ratio <= ratio <= shape.max_ratio:
            losses.append(0.0)
            continue
        bounded = min(max(ratio, 1 - shape.clip_low), 1 + shape.clip_high)
        if shape.loss == "cispo":
            losses.append(-bounded * advantage * now[i])
            continue
        gain = min(ratio * advantage, bounded * advantage)
        if shape.dual_clip is not None and advantage < 0:
            gain = max(gain, shape.dual_clip * advantage)
        losses.append(-gain)
    return losses


def computed(shape: Shape, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (OLD, ADVANTAGES))
    return policy_loss(shape, now, old, advantages, torch.from_numpy(SEGMENT))


SHAPES = [
    Shape(),
    Shape(clip_high=0.28),
    Shape(clip_low=0.5, clip_high=3.0),
    Shape(dual_clip=2.5),  # token 2: A = -2 and u = e
    Shape(max_ratio=2.0),
    Shape("gspo"),
    Shape("gspo", clip_low=0.05, clip_high=0.06, dual_clip=1.2),
    Shape("gspo", max_ratio=1.5),
    Shape("cispo", clip_low=1.0, clip_high=0.3),
    Shape("cispo", clip_high=3.0, max_ratio=2.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loss_equals_its_definition_token_by_token(shape: Shape) -> None:
    losses, _ = computed(shape, torch.tensor(NOW, dtype=torch.float64))
    np.testing.assert_allclose(losses.numpy(), reference(shape, NOW, OLD, ADVANTAGES), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.loss != "cispo"], ids=str)
def test_its_gradient_equals_the_slope_of_the_definition(shape: Shape) -> None:
    now = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    losses, clipped = computed(shape, now)
    losses.sum().backward()
    h = 1e-6
    for i in range(len(NOW)):
        up, down = ([x + d if k == i else x for k, x in enumerate(NOW)] for d in (h, -h))
        slope = (sum(reference(shape, up, OLD, ADVANTAGES)) - sum(reference(shape, down, OLD, ADVANTAGES))) / (2 * h)
        assert now.grad is not None
        assert float(now.grad[i]) == pytest.approx(slope, abs=1e-7)
        if shape.loss == "clipped":
            assert bool(clipped[i]) == (slope == 0 and ADVANTAGES[i] != 0)


def test_cispo_weighs_the_gradient_of_each_logprob_by_its_bounded_ratio_and_drops_none() -> None:
    now = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    losses, clipped = computed(Shape("cispo", clip_low=1.0, clip_high=0.3), now)
    losses.sum().backward()
    # u = 1, e^.5, e, e^-1, e^.2, e^-1, bounded above at 1.3, times -A
    expected = [-1.0, -0.5 * 1.3, 2 * 1.3, math.exp(-1), 0.0, -3 * math.exp(-1)]
    np.testing.assert_allclose(now.grad.numpy(), expected, rtol=1e-12)  # type: ignore[union-attr]
    assert clipped.tolist() == [False, True, True, False, False, False]


def test_clipped_tokens_are_those_past_the_bound_on_their_advantages_side() -> None:
    _, clipped = computed(Shape(), torch.tensor(NOW, dtype=torch.float64))
    # Token 1: u = e^0.5 and A > 0; token 3: u = e^-1 and A < 0. Tokens 2 and 5 lie on the other sides and push back.
    assert clipped.tolist() == [False, True, False, True, False, False]


def test_a_token_past_max_ratio_gives_no_gradient_even_where_its_ratio_is_infinite() -> None:
    now = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old, segment = torch.tensor([-1e30, -1.0], dtype=torch.float64), torch.tensor([0, 0])
    losses, clipped = policy_loss(Shape(max_ratio=10.0), now, old, torch.tensor([-1.0, -1.0]).double(), segment)
    losses.sum().backward()
    assert now.grad is not None
    assert (now.grad.tolist(), clipped.tolist()) == ([0.0, 1.0], [True, False])


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
def test_the_gradient_at_the_old_policy_is_minus_the_advantage(loss: str) -> None:
    now = torch.tensor(OLD, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 3.0, 3.0], dtype=torch.float64)  # one a segment
    shape = Shape(loss)  # type: ignore[arg-type]
    policy_loss(shape, now, now.detach().clone(), advantages, torch.from_numpy(SEGMENT))[0].sum().backward()
    np.testing.assert_allclose(now.grad.numpy(), -advantages.numpy(), rtol=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_on_the_advantage_is_a_weight_on_the_loss(shape: Shape) -> None:
    now, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD, ADVANTAGES))
    weights = torch.tensor([0.0, 0.5, 2.0, 1.5, 1.0, 0.25], dtype=torch.float64)
    plain, _ = policy_loss(shape, now, old, advantages, torch.from_numpy(SEGMENT))
    weighted, _ = policy_loss(shape, now, old, advantages * weights, torch.from_numpy(SEGMENT))
    np.testing.assert_allclose(weighted.numpy(), (plain * weights).numpy(), rtol=1e-12, atol=1e-15)


def test_k3_equals_r_minus_log_r_minus_one() -> None:
    now, old = (torch.tensor(x, dtype=torch.float64) for x in (NOW, OLD))
    expected = [math.exp(a - b) - (a - b) - 1 for a, b in zip(NOW, OLD, strict=True)]
    np.testing.assert_allclose(k3(now, old).numpy(), expected, rtol=1e-9, atol=1e-15)
    assert float(k3(now, now).abs().max()) == 0.0


def test_k3_keeps_its_digits_where_the_two_nearly_agree() -> None:
    # r = e^d with d = 1e-4: d^2/2 + d^3/6 = 5.0001667e-9, which float32 loses in exp(d) - d - 1
    value = float(k3(torch.tensor([1e-4]), torch.tensor([0.0])))
    assert value == pytest.approx(5.0e-9, rel=0.05)


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
    other.add(now[2:], old[2:], clipped[2:], entropy[2:], now[2:])
    sums.merge(other)
    means = sums.means()
    assert means["clip_fraction"] == pytest.approx(2 / 6)
    assert means["entropy"] == pytest.approx(15 / 6)
    k3_sum = sum(math.exp(a - b) - (a - b) - 1 for a, b in zip(NOW, OLD, strict=True))
    assert means["kl_k3"] == pytest.approx(k3_sum / 6, rel=1e-5)
    assert means["ratio_max"] == pytest.approx(math.exp(0.5))  # the second batch's ratio is to its own logprobs
