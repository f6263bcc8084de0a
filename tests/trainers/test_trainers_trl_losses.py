"""Our losses against TRL's, on the same logprobs, advantages and masks: TRL's own code computes the expected value.

Its loss is a method of a trainer; it is called with an object that has the few attributes it reads, and with a function
in place of the model's forward, so that the test compares arithmetic and nothing else.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainers.correction import correction_weights
from trainers.losses import Shape, aggregation_weights, k3, policy_loss

LENGTHS = [5, 3, 1]  # three completions, of one rollout each, padded to five
RNG = np.random.default_rng(0)
NOW, OLD, REFERENCE, ENGINE = (torch.from_numpy(-RNG.uniform(0.1, 2.5, (3, 5))) for _ in range(4))
ADVANTAGES = torch.tensor([-1.2, 0.7, 0.4], dtype=torch.float64)
MASK = torch.tensor([[t < n for t in range(5)] for n in LENGTHS])


def trl_loss(loss_type: str, **options: Any) -> float:
    from trl import GRPOTrainer

    args = SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (NOW, torch.zeros_like(NOW), None),
        aux_loss_enabled=False, _entropy_bonus_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, args=args,
        importance_sampling_level=options.get("level", "token"), beta=options.get("beta", 0.0), loss_type=loss_type,
        epsilon_low=options.get("low", 0.2), epsilon_high=options.get("high", 0.28), max_completion_length=7,
        use_vllm="weights" in options, vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **k: x),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(3, 2, dtype=torch.long), "prompt_mask": torch.ones(3, 2, dtype=torch.long),
        "completion_ids": torch.ones(3, 5, dtype=torch.long), "completion_mask": MASK.long(),
        "advantages": ADVANTAGES, "old_per_token_logps": OLD, "ref_per_token_logps": REFERENCE,
        "importance_sampling_ratio": options.get("weights"), "num_items_in_batch": MASK.sum(),
    }  # fmt: skip
    return float(GRPOTrainer._compute_loss(fake, None, inputs))


def our_loss(shape: Shape, aggregation: str, beta: float = 0.0, weights: torch.Tensor | None = None) -> float:
    rows = np.repeat(np.arange(3), LENGTHS)
    now, old, reference = NOW[MASK], OLD[MASK], REFERENCE[MASK]
    advantages = ADVANTAGES[torch.from_numpy(rows)]
    if weights is not None:
        advantages = advantages * weights[MASK]
    losses, _ = policy_loss(shape, now, old, advantages, torch.from_numpy(rows))
    share = aggregation_weights(aggregation, rows, rows, 3 * 7)  # type: ignore[arg-type]
    return float(((losses + beta * k3(reference, now)) * torch.from_numpy(share.astype(np.float64))).sum())


CLIP = Shape(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "rollout"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")]
)
def test_the_clipped_loss_under_each_aggregation_is_that_of_trl(loss_type: str, aggregation: str) -> None:
    assert our_loss(CLIP, aggregation) == pytest.approx(trl_loss(loss_type), rel=1e-6)
    assert our_loss(CLIP, aggregation, beta=0.3) == pytest.approx(trl_loss(loss_type, beta=0.3), rel=1e-6)


def test_dual_clip_is_trls_delta() -> None:
    shape = Shape(clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    assert our_loss(shape, "token") == pytest.approx(trl_loss("dapo", delta=1.5), rel=1e-6)
    assert our_loss(shape, "token") != pytest.approx(our_loss(CLIP, "token"), rel=1e-3)


def test_gspo_is_trls_sequence_level_ratio() -> None:
    shape = Shape("gspo", clip_low=0.2, clip_high=0.28)
    assert our_loss(shape, "segment") == pytest.approx(trl_loss("grpo", level="sequence"), rel=1e-6)


def test_cispo_is_trls_whose_bound_is_the_ratio_itself() -> None:
    shape = Shape("cispo", clip_low=1.0, clip_high=0.5)
    assert our_loss(shape, "token") == pytest.approx(trl_loss("cispo", high=1.5), rel=1e-6)


def test_corrected_losses_are_trls_with_its_importance_sampling_ratio() -> None:
    """The weight on the advantage against TRL's weight on the loss."""
    log_ratio = (OLD - ENGINE).numpy()
    weights = torch.ones_like(OLD)
    for i, n in enumerate(LENGTHS):
        weights[i, :n] = torch.from_numpy(correction_weights(log_ratio[i, :n], "tis", "token", 0.0, 2.0))
    assert our_loss(CLIP, "token", 0.3, weights) == pytest.approx(trl_loss("dapo", beta=0.3, weights=weights), rel=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_one_row_cut_in_two_keeps_its_loss(aggregation: str) -> None:
    rows, cut = np.repeat(np.arange(3), LENGTHS), np.array([0, 0, 9, 9, 9, 1, 1, 1, 2])
    shares = [aggregation_weights(aggregation, segments, rows, 1.0) for segments in (rows, cut)]  # type: ignore[arg-type]
    assert (shares[0] == shares[1]).all()
