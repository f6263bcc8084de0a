"""The GRPO trainer on problems small enough to know the answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainers_builders import group, segment, trajectory
from trainers_toys import BAD, GOOD, PROMPT, Make, copy_of, maker, many, same, without_time
from transformers import AutoModelForCausalLM

from polarlike.records import Group, PolarError, Segment, UsageError
from trainers.base import TrainerOptions
from trainers.grpo import Grpo, create


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    return maker(tiny_model, tmp_path / "out")


def logprobs_under(trainer: Grpo, tiny_model: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Logprob of each token but the first by a plain model with the trainer's weights: what an engine would record."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.load_state_dict(trainer.weights().tensors())
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)
    return [float(logs[i - 1, ids[i]]) for i in range(1, len(ids))]


def sampled(trainer: Grpo, tiny_model: Path, completion: list[int], temperature: float = 1.0) -> Segment:
    ids = PROMPT + completion
    recorded = logprobs_under(trainer, tiny_model, ids, temperature)[len(PROMPT) - 1 :]
    where = range(len(PROMPT), len(ids))
    return segment(ids, where, logprobs=recorded, temperature=temperature, version=trainer.policy_version)


def toy(reward_good: float = 1.0, reward_bad: float = 0.0, **extra: Any) -> Group:
    made = [
        segment(PROMPT + (GOOD if i % 2 else BAD), range(len(PROMPT), len(PROMPT) + 3), logprobs=-6.2, **extra)
        for i in range(4)
    ]
    return group([trajectory([s], reward_good if i % 2 else reward_bad, name=f"r{i}") for i, s in enumerate(made)])


def test_a_rewarded_sequence_becomes_likelier_step_by_step_and_the_other_less(make: Make, tiny_model: Path) -> None:
    trainer = make(lr=1e-3)
    good, bad = [], []
    for step in range(5):
        segments = [sampled(trainer, tiny_model, c, 0.8) for c in (GOOD, BAD, GOOD, BAD)]
        good.append(float(segments[0].logprobs.sum()))
        bad.append(float(segments[1].logprobs.sum()))
        metrics = trainer.step([group([trajectory([s], float(i % 2 == 0)) for i, s in enumerate(segments)])])
        assert metrics["kl_k3"] < 1e-9  # the recorded logprobs are those of the weights it starts from
        assert trainer.policy_version == step + 1 == metrics["policy_version"]
    assert good == sorted(good) and good[-1] > good[0] + 1.0
    assert bad == sorted(bad, reverse=True) and bad[-1] < bad[0] - 1.0


def test_the_first_update_follows_the_policy_gradient_worked_out_with_a_plain_model(
    make: Make, tiny_model: Path
) -> None:
    """One Adam step from zero moments moves a weight by lr * g / (|g| + eps), g the clipped gradient."""
    trainer = make(lr=1e-3, epochs=1, max_grad_norm=0.5)
    start = copy_of(trainer)
    completions, rewards = [GOOD, BAD, [21, 40, 41]], [1.0, 0.0, 0.25]
    trainer.step(
        [group([trajectory([sampled(trainer, tiny_model, c)], r) for c, r in zip(completions, rewards, strict=True)])]
    )
    advantages = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loss = torch.zeros(())
    for completion, advantage in zip(completions, advantages, strict=True):
        logs = torch.log_softmax(model(torch.tensor([PROMPT + completion])).logits[0], -1)
        for k, token in enumerate(completion):  # at the behaviour policy the gradient of the ratio is that of logp
            loss = loss - float(advantage) * logs[len(PROMPT) - 1 + k, token] / 9
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        g = p.grad * min(1.0, 0.5 / float(norm))
        wanted = start[name] - 1e-3 * g / (g.abs() + 1e-8)
        clear = g.abs() > 1e-5  # where rounding cannot turn a sign
        torch.testing.assert_close(trainer.weights().tensors()[name][clear], wanted[clear], rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("reward", "kind"), [(0.0, "all_fail"), (1.0, "all_pass"), (0.5, "all_equal")], ids=["fail", "pass", "equal"]
)
def test_a_group_of_equal_rewards_moves_nothing_and_is_counted(make: Make, reward: float, kind: str) -> None:
    trainer = make(weight_decay=0.1)
    before = copy_of(trainer)
    metrics = trainer.step([toy(reward, reward)])
    assert same(before, copy_of(trainer))
    assert trainer.policy_version == 0
    assert (metrics["stepped"], metrics["optimizer_steps"], metrics["policy_version"]) == (0.0, 0.0, 0.0)
    assert (metrics["zero_variance"], metrics[f"zero_variance_{kind}"]) == (1.0, 1.0)
    assert metrics["reward_mean"] == reward


def test_no_groups_at_all_are_no_step(make: Make) -> None:
    metrics = make().step([])
    assert (metrics["stepped"], metrics["groups"], metrics["rollouts"]) == (0.0, 0.0, 0.0)


def test_opposite_rewards_on_the_same_tokens_cancel_to_the_last_bit(make: Make, tiny_model: Path) -> None:
    trainer = make()
    before = copy_of(trainer)
    twins = [sampled(trainer, tiny_model, GOOD) for _ in range(2)]  # within the clip, which is not symmetric
    metrics = trainer.step([group([trajectory([twins[0]], 1.0), trajectory([twins[1]], 0.0)])])
    assert metrics["grad_norm"] == 0.0
    assert same(before, copy_of(trainer))


def test_masked_tokens_give_no_gradient_whatever_was_recorded_for_them(make: Make) -> None:
    plain, noisy = toy(), toy()
    for t in noisy.trajectories:
        masked = ~t.segments[0].loss_mask
        t.segments[0].logprobs[masked] = -3.0
        t.segments[0].versions[masked] = 99
    a, b = make(), make()
    a.step([plain])
    b.step([noisy])
    assert same(copy_of(a), copy_of(b))


def test_a_prompt_token_predicts_nothing_that_is_trained(make: Make) -> None:
    """Tool output between two sampled spans, and text after the last: only as context, or not at all."""
    trainer = make(epochs=1)
    tail = [[50, 51], [60, 61]]
    spans = [segment([*PROMPT, c, *tail[i], 70, *extra], [4, 7], logprobs=-6.0) for i, (c, extra) in
             enumerate([(21, []), (31, [80, 81, 82])])]  # fmt: skip
    metrics = trainer.step([group([trajectory([spans[0]], 1.0), trajectory([spans[1]], 0.0)])])
    assert metrics["trainable_tokens"] == 4
    assert metrics["unpacked_tokens"] == 2 * 7  # up to the token before the last trainable one
    assert metrics["packed_tokens"] == 4 + 2 * 3


def cut(ids: list[int], spans: list[list[int]], reward: float, *, pieces: bool) -> Any:
    """A rollout of several sampled spans as one segment, or as one segment a span, each with its whole context."""
    if not pieces:
        return trajectory([segment(ids, [i for span in spans for i in span])], reward)
    return trajectory([segment(ids[: span[-1] + 1], span) for span in spans], reward)


def first_gradient(trainer: Grpo, folder: Path) -> list[torch.Tensor]:
    """What Adam remembers of its first step: a tenth of the gradient."""
    trainer.save(folder)
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return [entry["exp_avg"] / 0.1 for _, entry in sorted(state.items())]


@pytest.mark.parametrize("aggregation", ["token", "rollout", "constant"])
def test_a_rollout_cut_into_segments_has_the_gradient_of_the_uncut_one(
    make: Make, tmp_path: Path, aggregation: str
) -> None:
    found = []
    for pieces in (False, True):
        trainer = make(aggregation=aggregation, epochs=1, max_grad_norm=1e9)
        made = [
            cut([*PROMPT, 21, 22, 50, 51, 23, 52, 24], [[4, 5], [8], [10]], 1.0, pieces=pieces),
            cut([*PROMPT, 31, 32], [[4, 5]], 0.0, pieces=False),
            cut([*PROMPT, 33], [[4]], 0.0, pieces=False),
        ]
        metrics = trainer.step([group(made)])
        # A rollout counts once in its group's statistics: (1 - 1/3) over the std sqrt(1/3).
        assert metrics["advantage_max_abs"] == pytest.approx((2 / 3) / (3**-0.5 + 1e-4))
        found.append(first_gradient(trainer, tmp_path / f"{pieces}"))
    scale = max(float(g.abs().max()) for g in found[0])
    assert scale > 1e-4
    for whole, pieces_gradient in zip(*found, strict=True):
        torch.testing.assert_close(pieces_gradient / scale, whole / scale, rtol=0, atol=1e-6)


def test_under_segment_aggregation_a_cut_rollout_weighs_more(make: Make) -> None:
    metrics = {}
    for pieces in (False, True):
        made = [
            cut([*PROMPT, 21, 22, 50, 51, 23], [[4, 5], [8]], 1.0, pieces=pieces),
            cut([*PROMPT, 31, 32], [[4, 5]], 0.0, pieces=False),
        ]
        made[0].segments[0].role = "explorer"
        metrics[pieces] = make(aggregation="segment", epochs=1).step([group(made)])
    assert metrics[False]["mass/explorer"] == pytest.approx(1 / 2)
    assert metrics[True]["mass/explorer"] == pytest.approx(1 / 3)
    assert metrics[True]["mass/main"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("settings", [{"share_prefixes": False}, {"micro_batch_tokens": 1}, {"recompute_layers": True}])
def test_how_a_batch_is_laid_out_does_not_change_the_step(make: Make, settings: dict[str, Any]) -> None:
    a, b = make(epochs=1), make(epochs=1, **settings)
    first, second = a.step([toy()]), b.step([toy()])
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert first["packed_tokens"] <= second["packed_tokens"] <= second["unpacked_tokens"] == first["unpacked_tokens"]


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_an_unscored_rollout_is_an_error_and_never_a_zero(make: Make, reward: float | None) -> None:
    trainer = make()
    bad = toy()
    bad.trajectories[2] = trajectory(bad.trajectories[2].segments, reward, name="r2")
    before = copy_of(trainer)
    with pytest.raises(PolarError, match="Rollout r2 of group g has no score"):
        trainer.step([bad])
    assert same(before, copy_of(trainer))


def poisoned() -> Group:
    """A recorded logprob so low that the ratio overflows: an infinite loss for the rollout that failed."""
    bad = toy()
    for t in bad.trajectories:
        t.segments[0].logprobs[t.segments[0].loss_mask] = -1e30
    return bad


def test_a_loss_that_is_not_finite_leaves_weights_version_and_optimizer_untouched(make: Make) -> None:
    trainer, control = make(), make()
    before = copy_of(trainer)
    metrics = trainer.step([poisoned()])
    assert same(before, copy_of(trainer))
    assert (metrics["stepped"], metrics["skipped_nonfinite"], trainer.policy_version) == (0.0, 2.0, 0)
    trainer.step([toy()])
    control.step([toy(0.0, 0.0)])  # nothing happened to it either
    control.step([toy()])
    assert all(torch.isfinite(w).all() for w in trainer.weights().tensors().values())


def test_one_poisoned_minibatch_is_skipped_and_the_others_train(make: Make) -> None:
    trainer = make(minibatch_rollouts=4, epochs=1)
    metrics = trainer.step([toy(), poisoned()])
    assert (metrics["optimizer_steps"], metrics["skipped_nonfinite"], metrics["stepped"]) == (1.0, 1.0, 1.0)
    assert trainer.policy_version == 1


def test_what_is_dropped_or_unusable_is_counted(make: Make) -> None:
    untrainable = group([trajectory([segment(PROMPT, [])], r) for r in (0.0, 1.0)], name="u")
    half = group([trajectory([segment(PROMPT + GOOD, [4])], 1.0), trajectory([segment(PROMPT, [])], 0.0)], name="h")
    single = group([trajectory([segment(PROMPT + GOOD, [4])], 1.0)], name="s")
    metrics = make().step([toy(), toy(0.0, 0.0), toy(1.0, 1.0), single, half, untrainable])
    assert metrics["groups"] == 6
    assert metrics["rollouts"] == 4 * 3 + 1 + 2 + 2
    assert metrics["zero_variance"] == pytest.approx(3 / 6)
    assert metrics["zero_variance_single"] == pytest.approx(1 / 6)
    assert metrics["zero_variance_all_fail"] == pytest.approx(1 / 6)
    assert metrics["zero_variance_all_pass"] == pytest.approx(1 / 6)
    assert (metrics["groups_unusable"], metrics["rollouts_untrainable"]) == (1.0, 3.0)
    # half's one row keeps the advantage its whole group gives it: (1 - 1/2) / (sqrt(1/2) + eps)
    assert metrics["advantage_max_abs"] == pytest.approx(max(0.5 / (3**-0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)), rel=1e-6)


def test_staleness_is_the_version_now_minus_the_oldest_token_of_each_rollout(make: Make) -> None:
    trainer = make()
    trainer.policy_version = 5
    made = toy(version=4)
    made.trajectories[0].segments[0].versions[5] = 2
    made.trajectories[1].segments.append(segment(PROMPT + BAD, [4], logprobs=-6.2, version=5))
    metrics = trainer.step([made])
    assert metrics["staleness_max"] == 3.0
    assert metrics["staleness_mean"] == pytest.approx((3 + 1 + 1 + 1) / 4)


def test_clip_fraction_and_k3_are_those_of_the_recorded_logprobs(make: Make, tiny_model: Path) -> None:
    trainer = make(epochs=1)
    segments = [sampled(trainer, tiny_model, c) for c in (GOOD, BAD)]
    segments[0].logprobs[segments[0].loss_mask] -= 0.5  # the policy has moved up by e^0.5 since: clipped where A > 0
    metrics = trainer.step([group([trajectory([segments[0]], 1.0), trajectory([segments[1]], 0.0)])])
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert metrics["kl_k3"] == pytest.approx((np.exp(0.5) - 0.5 - 1) / 2, rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-4)


def test_the_kl_term_holds_the_policy_to_where_it_started(make: Make, tiny_model: Path) -> None:
    def moved(kl_coef: float) -> list[float]:
        """How far the logprobs of both completions went, good first."""
        trainer = make(lr=3e-4, kl_coef=kl_coef)
        trail = []
        for _ in range(9):
            segments = [sampled(trainer, tiny_model, c) for c in (GOOD, BAD)]
            trail.append([float(s.logprobs.sum()) for s in segments])
            trainer.step([group([trajectory([segments[0]], 1.0), trajectory([segments[1]], 0.0)])])
        return [trail[-1][0] - trail[0][0], trail[0][1] - trail[-1][1]]

    free, held = moved(0.0), moved(2.0)
    assert 0 < held[0] < 0.5 * free[0]
    assert 0 < held[1] < 0.5 * free[1]


def test_equal_seeds_give_equal_bits_and_another_seed_another_order(make: Make) -> None:
    a, b, c = (make(seed, minibatch_rollouts=5) for seed in (3, 3, 4))
    for trainer in (a, b, c):
        trainer.step(many(0))
    assert same(copy_of(a), copy_of(b))
    assert not same(copy_of(a), copy_of(c))


def test_a_pass_is_split_evenly(make: Make) -> None:
    assert make(minibatch_rollouts=5, epochs=2).step(many(0))["optimizer_steps"] == 2 * 3  # 12 rollouts as 4, 4, 4


def test_a_resumed_trainer_takes_the_same_next_step_bit_for_bit(make: Make, tmp_path: Path) -> None:
    trainer = make(minibatch_rollouts=5, weight_decay=0.01)
    trainer.step(many(0))
    trainer.save(tmp_path / "ck")
    resumed = make(seed=99, minibatch_rollouts=5, weight_decay=0.01)
    resumed.load(tmp_path / "ck")
    assert resumed.policy_version == 1
    assert same(copy_of(trainer), copy_of(resumed))
    a, b = trainer.step(many(1)), resumed.step(many(1))
    assert same(copy_of(trainer), copy_of(resumed))
    assert without_time(a) == without_time(b)


def test_settings_of_the_resuming_run_win_over_those_of_the_checkpoint(make: Make, tmp_path: Path) -> None:
    trainer = make(lr=1e-3, epochs=1)
    trainer.step([toy()])
    trainer.save(tmp_path / "ck")
    resumed = make(lr=1e-9, epochs=1)
    resumed.load(tmp_path / "ck")
    before = copy_of(resumed)
    resumed.step([toy()])
    after = resumed.weights().tensors()
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-7


def test_a_torn_checkpoint_changes_nothing(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer.step([toy()])
    trainer.save(tmp_path / "ck")
    weights = tmp_path / "ck" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    fresh = make()
    before = copy_of(fresh)
    with pytest.raises(PolarError, match=r"model\.safetensors .* torn"):
        fresh.load(tmp_path / "ck")
    assert same(before, copy_of(fresh))
    assert fresh.policy_version == 0


def test_a_checkpoint_of_another_model_is_refused(make: Make, tmp_path: Path) -> None:
    from polarlike.engines.tiny import build_tiny_model

    other = create(TrainerOptions(build_tiny_model(tmp_path / "other", hidden=32), tmp_path / "out"))
    other.save(tmp_path / "ck")
    with pytest.raises(PolarError, match="of another model"):
        make().load(tmp_path / "ck")


def test_a_saved_model_is_a_folder_that_serves_as_the_first_one_did(
    make: Make, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = make()
    trainer.step([toy()])
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert same(dict(loaded.state_dict()), copy_of(trainer))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (tiny_model / name).read_bytes()
    assert create(TrainerOptions(tmp_path / "saved", tmp_path / "out")).policy_version == 0


def test_weights_carry_the_names_of_the_model_folder(make: Make, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert list(make().weights().tensors()) == list(model.state_dict())


def test_a_folder_that_is_no_model_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        create(TrainerOptions(tmp_path, tmp_path / "out"))


def test_a_device_that_is_not_there_is_a_usage_error(make: Make) -> None:
    with pytest.raises(UsageError, match="cannot use device cuda:99"):
        make(device="cuda:99")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_scores_tokens_as_a_plain_model_with_its_weights_does(
    make: Make, tiny_model: Path, share: bool, temperature: float
) -> None:
    trainer = make(share_prefixes=share)
    trainer.step([toy()])
    ids = [*PROMPT, *GOOD, 5, 6, 7]
    got = trainer.score(np.array(ids, np.int32), 3, temperature)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, logprobs_under(trainer, tiny_model, ids, temperature)[2:], atol=1e-5)
