"""On one recording, the trainers that run on TRL have the losses and gradients of our own trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl_recording import assert_equal, frozen_heap, gradients, make, recording

from trainers import grpo, trl_async_grpo, trl_grpo
from trainers.model_folder import load_model

__all__ = ["frozen_heap"]

METRICS = ("loss", "grad_norm", "kl_k3", "kl_k3_all", "clip_fraction", "entropy", "trainable_tokens")

BOTH: list[dict[str, Any]] = [
    {},
    {"aggregation": "segment", "clip_low": 0.1, "clip_high": 0.28},
    {"advantage": "dr_grpo", "constant_tokens": 500},
    {"advantage": "per_agent", "standardise_per_task": True},
    {"lora": {"rank": 4}},
    {"minibatch_rollouts": 3, "epochs": 1},
]
STABLE_ONLY: list[dict[str, Any]] = [
    {"kl_coef": 0.1},
    {"kl_coef": 0.1, "lora": {"rank": 4}},
    {"loss": "gspo", "aggregation": "segment"},
    {"loss": "cispo", "clip_low": 1},
    {"dual_clip": 1.5},
    {"correction": {"kind": "tis", "high": 1.1}},
    {"correction": {"kind": "tis", "level": "sequence"}, "kl_coef": 0.1},
    {"correction": {"kind": "mis", "level": "sequence", "low": 0.3}},
    {"correction": {"kind": "icepop", "low": 0.8, "high": 1.2}},
]


def compare(ours: Any, theirs: Any) -> None:
    """The first gradients are compared as they are, later ones by the losses that they led to."""
    (metrics, mine), (measured, yours) = gradients(ours, recording()), gradients(theirs, recording())
    assert len(mine) == len(yours) == metrics["optimizer_steps"] > 0
    assert_equal(mine[0], yours[0])
    for name in METRICS:
        assert measured[name] == pytest.approx(metrics[name], abs=2e-5), name


@pytest.mark.parametrize("settings", BOTH + STABLE_ONLY, ids=str)
def test_trl_grpo_is_grpo(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    compare(*(make(kind.create, tiny_model, tmp_path, **settings) for kind in (grpo, trl_grpo)))


@pytest.mark.parametrize("settings", [*BOTH, {"aggregation": "rollout"}], ids=str)
def test_trl_async_grpo_is_grpo(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    compare(*(make(kind.create, tiny_model, tmp_path, **settings) for kind in (grpo, trl_async_grpo)))


@pytest.mark.parametrize("aggregation", ["token", "segment", "constant"])
@pytest.mark.parametrize("trainer", [trl_grpo, trl_async_grpo])
def test_rows_that_fill_up_micro_batches_change_nothing(
    trainer: Any, aggregation: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    fillers = trainer.fillers

    def counted(number: int) -> Any:
        nonlocal made
        made += number
        return fillers(number)

    monkeypatch.setattr(trainer, "fillers", counted)
    settings: dict[str, Any] = {"aggregation": aggregation, "epochs": 1}
    _, [whole] = gradients(make(trainer.create, tiny_model, tmp_path, **settings), recording())
    assert made == 0
    settings["micro_batch_tokens"] = 100  # two rows of nine, or about a quarter of the tokens
    _, [parts] = gradients(make(trainer.create, tiny_model, tmp_path, **settings), recording())
    assert made > 0
    assert_equal(whole, parts)


def by_hand(model: Any) -> torch.Tensor:
    """The clipped loss of the recording, token by token in float64 from its definition, with grpo's advantages."""
    losses = []
    for group in recording():
        rewards = np.array([t.score.value for t in group.trajectories if t.score and t.score.value is not None])
        variance = ((rewards - rewards.mean()) ** 2).sum() / (rewards.size - 1)
        advantages = (rewards - rewards.mean()) / (np.sqrt(variance) + 1e-4)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for segment in trajectory.segments:
                ids = torch.from_numpy(segment.ids.astype(np.int64))
                logprobs = model(ids[None]).logits[0].log_softmax(-1)
                for t in np.flatnonzero(segment.loss_mask):
                    ratio = torch.exp(logprobs[t - 1, ids[t]] - float(segment.logprobs[t]))
                    losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("trainer", [trl_grpo, trl_async_grpo])
def test_loss_and_gradient_are_those_of_the_definition(trainer: Any, tiny_model: Path, tmp_path: Path) -> None:
    model = load_model(tiny_model).double()
    loss = by_hand(model)
    loss.backward()
    wanted = {name: p.grad.float() for name, p in model.named_parameters()}
    metrics, [gradient] = gradients(make(trainer.create, tiny_model, tmp_path, epochs=1), recording())
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert_equal(wanted, gradient)


@pytest.mark.parametrize("trainer", [trl_grpo, trl_async_grpo])
def test_what_is_recorded_of_masked_tokens_is_not_looked_at(trainer: Any, tiny_model: Path, tmp_path: Path) -> None:
    changed = recording()
    for group in changed:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                segment.logprobs[~segment.loss_mask] = -1.0
    one, other = (make(trainer.create, tiny_model, tmp_path, epochs=1) for _ in range(2))
    (_, [gradient]), (_, [same]) = gradients(one, recording()), gradients(other, changed)
    assert all(torch.equal(gradient[name], same[name]) for name in gradient)


@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_is_attention_over_each_branch_alone(window: int | None) -> None:
    """Two branches, of three and of two tokens, on a trunk of four."""
    torch.manual_seed(0)
    query = torch.randn(1, 4, 9, 8)
    key, value = torch.randn(2, 1, 2, 9, 8)
    branches = [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8]]
    out, _ = trl_async_grpo.tree_attention(
        torch.nn.Module(), query, key, value, None,
        tree_kv_index=torch.tensor([i for branch in branches for i in branch]),
        tree_cu_seqlens_q=torch.tensor([0, 4, 7, 9]),
        tree_cu_seqlens_k=torch.tensor([0, 4, 11, 17]),
        scaling=0.3,
        sliding_window=window,
    )  # fmt: skip
    for branch in branches:
        for place, token in enumerate(branch):
            context = branch[max(0, place + 1 - window) if window else 0 : place + 1]
            for head in range(4):
                scores = 0.3 * (key[0, head // 2, context] @ query[0, head, token])
                wanted = scores.softmax(0) @ value[0, head // 2, context]
                torch.testing.assert_close(out[0, token, head], wanted)
