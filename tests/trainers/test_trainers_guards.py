"""What keeps a step from doing harm, and what the ratio starts from, in the whole trainer."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from trainers_builders import group, segment, trajectory
from trainers_toys import BAD, GOOD, PROMPT, Make, copy_of, maker, pair, same, sampled

from polarlike.records import Group, PolarError
from trainers.grpo import Grpo


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    return maker(tiny_model, tmp_path / "out")


def shifted(trainer: Grpo, by: float) -> Group:
    """Engine logprobs lower than the trainer's by so much on the good completion: pi_trainer / pi_engine = e^by."""
    made = pair(sampled(trainer, GOOD), sampled(trainer, BAD))
    good = made.trajectories[0].segments[0]
    good.logprobs[good.loss_mask] -= by
    return made


K3 = (math.exp(0.5) - 0.5 - 1) / 2  # of half of the tokens, at a shift of 0.5


def test_a_mismatch_above_the_bound_stops_the_run_and_changes_nothing(make: Make) -> None:
    trainer = make(max_mismatch=0.9 * K3)
    before = copy_of(trainer)
    with pytest.raises(PolarError, match=r"KL of 0\.074 where max_mismatch allows 0\.067: it serves other weights"):
        trainer.step([shifted(trainer, 0.5)])
    assert same(before, copy_of(trainer))
    assert trainer.policy_version == 0
    assert all(p.grad is None for p in trainer.policy.parameters())


def test_a_mismatch_above_the_bound_can_skip_the_step_instead_and_is_counted(make: Make) -> None:
    trainer = make(max_mismatch=0.9 * K3, on_mismatch="skip")
    before = copy_of(trainer)
    metrics = trainer.step([shifted(trainer, 0.5)])
    assert same(before, copy_of(trainer))
    assert (metrics["stepped"], metrics["stopped_mismatch"], trainer.policy_version) == (0.0, 1.0, 0)
    assert metrics["kl_k3"] == pytest.approx(K3, rel=1e-3)


def test_a_mismatch_within_the_bound_steps(make: Make) -> None:
    trainer = make(max_mismatch=1.1 * K3)
    metrics = trainer.step([shifted(trainer, 0.5)])
    assert (metrics["stepped"], metrics["stopped_mismatch"]) == (1.0, 0.0)


def test_the_mismatch_is_measured_before_the_step_moved_anything(make: Make) -> None:
    trainer = make(max_mismatch=1e-6, lr=1e-2, epochs=6)
    metrics = trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
    assert metrics["optimizer_steps"] == 6
    assert metrics["kl_k3_all"] > 1e-4


def test_passes_end_once_the_policy_went_too_far_from_the_engines(make: Make) -> None:
    steps = {}
    for bound in (None, 1e-4, 1e9):
        trainer = make(lr=1e-2, epochs=6, stop_epochs_kl=bound)
        metrics = trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
        steps[bound] = (metrics["optimizer_steps"], metrics["stopped_epochs_kl"])
    assert steps[None] == steps[1e9] == (6.0, 0.0)
    assert steps[1e-4] == (1.0, 1.0)  # the first pass always counts; the second finds it too far


def test_a_first_pass_on_stale_tokens_is_not_ended(make: Make) -> None:
    trainer = make(stop_epochs_kl=0.1 * K3, epochs=3)
    assert trainer.step([shifted(trainer, 0.5)])["optimizer_steps"] == 1


def test_a_token_past_max_ratio_does_not_train(make: Make) -> None:
    for bound, share in ((1.5, 0.5), (1.7, 0.0)):  # e^0.5 = 1.65
        trainer = make(epochs=1, max_ratio=bound, clip_high=1.0)
        assert trainer.step([shifted(trainer, 0.5)])["clip_fraction"] == pytest.approx(share)


def gradient(trainer: Grpo, groups: list[Group], folder: Path) -> torch.Tensor:
    trainer.step(groups)
    trainer.save(folder)
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return torch.cat([entry["exp_avg"].flatten() / 0.1 for _, entry in sorted(state.items())])


FREE = {"epochs": 1, "max_grad_norm": 1e9}


def test_from_the_trainers_own_logprobs_the_first_ratio_is_one_whatever_the_engine_recorded(
    make: Make, tmp_path: Path
) -> None:
    trainer = make(old="trainer", **FREE)
    metrics = trainer.step([shifted(trainer, 0.5)])
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["kl_k3"] == pytest.approx(K3, rel=1e-3)  # of the engine still
    a = gradient(make(old="trainer", **FREE), [shifted(trainer, 0.0)], tmp_path / "a")
    b = gradient(make(old="trainer", **FREE), [shifted(trainer, 0.5)], tmp_path / "b")
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ({"kind": "tis", "high": 1.2}, 1.2),
        ({"kind": "tis", "high": 5.0}, math.exp(0.5)),
        ({"kind": "icepop", "low": 0.5, "high": 1.2}, 0.0),
        ({"kind": "mis", "level": "sequence", "high": 5.0}, math.exp(1.5)),
        ({"kind": "mis", "level": "geometric", "high": 2.0}, math.exp(0.5)),
    ],
    ids=str,
)
def test_a_correction_weighs_each_tokens_gradient_by_the_bounded_ratio(
    make: Make, tmp_path: Path, correction: dict[str, object], weight: float
) -> None:
    """Good alone is shifted: with w on its tokens the gradient is w g_good + g_bad."""
    trainer = make()
    plain = pair(sampled(trainer, GOOD), sampled(trainer, BAD))
    both = gradient(make(**FREE), [plain], tmp_path / "both")
    good = plain.trajectories[0]
    good.segments[0].loss_mask, kept = np.zeros_like(good.segments[0].loss_mask), good.segments[0].loss_mask
    only_bad = gradient(make(**FREE), [plain], tmp_path / "bad") / 2  # three of six tokens: half the denominator
    good.segments[0].loss_mask = kept
    corrected = make(correction=correction, **FREE)
    found = gradient(corrected, [shifted(trainer, 0.5)], tmp_path / "found")
    wanted = weight * (both - only_bad) + only_bad
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=2e-4)


def test_what_a_correction_did_is_reported(make: Make) -> None:
    trainer = make(correction={"kind": "icepop", "high": 1.2})
    metrics = trainer.step([shifted(trainer, 0.5)])
    assert metrics["correction_zero"] == pytest.approx(0.5)
    assert metrics["correction_mean"] == pytest.approx(0.5, abs=1e-4)
    plain = make().step([shifted(trainer, 0.5)])
    assert (plain["correction_mean"], plain["correction_zero"]) == (1.0, 0.0)


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_other_losses_learn_too(make: Make, loss: str) -> None:
    trainer = make(loss=loss, lr=1e-3)
    first = sampled(trainer, GOOD).logprobs.sum()
    trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
    assert sampled(trainer, GOOD).logprobs.sum() > first + 0.05


def test_roles_that_learn_nothing_and_the_mass_of_roles_and_tasks_are_reported(make: Make) -> None:
    made = group(
        [
            trajectory([segment(PROMPT + GOOD, [4, 5], role="main"), segment(PROMPT + BAD, [4], role="helper")], 1.0),
            trajectory([segment(PROMPT + BAD, [4, 5], role="main")], 0.0),
        ],
        task="t1",
    )
    metrics = make(advantage="per_agent", epochs=1).step([made])
    assert metrics["idle/helper/single"] == 1.0
    assert metrics["trainable_tokens"] == 4.0
    assert (metrics["mass/main"], metrics["mass_task/t1"], metrics["mass_task_max"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_step_that_can_teach_nothing_has_nothing_to_score_at_its_start(make: Make, share_prefixes: bool) -> None:
    trainer = make(old="trainer", share_prefixes=share_prefixes)
    equal = [trajectory([segment(PROMPT + GOOD, range(4, 7))], 1.0, name=f"r{i}") for i in range(2)]
    metrics = trainer.step([group(equal)])
    assert (metrics["stepped"], metrics["zero_variance_all_pass"], trainer.policy_version) == (0.0, 1.0, 0)
