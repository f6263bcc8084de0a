"""Supervised fine-tuning trains the tokens of the mask, of the rollouts that did well, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trl_recording import assert_equal, frozen_heap, gradients, make, recording

from trainers import sft
from trainers.model_folder import load_model

__all__ = ["frozen_heap"]


def cross_entropy(model_folder: Path, rollouts: str) -> tuple[float, dict[str, torch.Tensor], int]:
    """By hand: the mean over the trainable tokens of the rollouts named, its gradient, and how many they are."""
    model = load_model(model_folder)
    losses = []
    for group in recording():
        for trajectory in group.trajectories:
            for segment in trajectory.segments if trajectory.rollout_id in rollouts else []:
                ids = torch.from_numpy(segment.ids.astype(np.int64))
                logprobs = model(ids[None]).logits[0].log_softmax(-1)
                losses += [-logprobs[t - 1, ids[t]] for t in np.flatnonzero(segment.loss_mask)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}, len(losses)


@pytest.mark.parametrize("micro_batch_tokens", [8192, 100, 1])
@pytest.mark.parametrize(("min_reward", "rollouts"), [(1.0, "ad"), (0.5, "ade")])
def test_the_loss_is_the_cross_entropy_of_the_masks_tokens(
    min_reward: float, rollouts: str, micro_batch_tokens: int, tiny_model: Path, tmp_path: Path
) -> None:
    settings = {"min_reward": min_reward, "micro_batch_tokens": micro_batch_tokens, "epochs": 1}
    metrics, [gradient] = gradients(make(sft.create, tiny_model, tmp_path, **settings), recording())
    loss, wanted, tokens = cross_entropy(tiny_model, rollouts)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert_equal(wanted, gradient)
    assert (metrics["trainable_tokens"], metrics["rollouts_kept"]) == (tokens, len(rollouts))
    assert (metrics["rollouts"], metrics["reward_mean"]) == (5, 0.5)


def test_minibatches_are_steps_of_their_own_and_every_pass_takes_all(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make(sft.create, tiny_model, tmp_path, minibatch_rollouts=1, epochs=2, micro_batch_tokens=60)
    metrics = trainer.step(recording())
    assert (metrics["optimizer_steps"], trainer.policy_version) == (4, 1)
    assert trainer.step(recording())["loss"] < metrics["loss"]
