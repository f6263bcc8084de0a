"""What the trainers that run on TRL promise as trainers: options, versions, weights, checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainers_builders import group, segment, trajectory
from trl_recording import frozen_heap, gradients, make, recording

from polarlike.records import PolarError, UsageError
from trainers import sft, trl_async_grpo, trl_grpo
from trainers.base import TrainerOptions
from trainers.model_folder import load_model

__all__ = ["frozen_heap"]

KINDS = [trl_grpo, trl_async_grpo, sft]


def state(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().tensors().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (trl_grpo, {"share_prefixes": True}, ["trl-grpo does not honour 'share_prefixes", "grpo does"]),
        (trl_grpo, {"aggregation": "rollout"}, ["'aggregation: rollout'", "grpo and trl-async-grpo do"]),
        (trl_grpo, {"loss": "cispo"}, ["clip_low: 1"]),
        (trl_grpo, {"dual_clip": 1.1}, ["at least 1 + clip_high"]),
        (trl_async_grpo, {"kl_coef": 0.1}, ["trl-async-grpo does not honour 'kl_coef", "grpo and trl-grpo do"]),
        (trl_async_grpo, {"correction": {"kind": "tis"}}, ["does not honour 'correction"]),
        (sft, {"advantage": "rloo"}, ["sft does not honour 'advantage: rloo'"]),
        (trl_grpo, {"lrr": 1}, ["there is no setting 'lrr'; did you mean 'lr'?"]),
        (trl_grpo, {"trl": {"adm_beta1": 0.9}}, ["no argument 'adm_beta1'; did you mean 'adam_beta1'?"]),
        (trl_grpo, {"trl": {"learning_rate": 1}}, ["set 'lr' in place of 'learning_rate'"]),
        (trl_grpo, {"trl": {"max_steps": 4}}, ["'max_steps' in the table 'trl' is set by the trainer"]),
        (trl_async_grpo, {"trl": {"dtype": "bfloat16"}}, ["'dtype' in the table 'trl' is set by the trainer"]),
    ],
)
def test_an_option_that_a_trainer_cannot_honour_is_an_error(
    kind: Any, settings: dict[str, Any], words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        make(kind.create, tiny_model, tmp_path, **settings)
    assert all(word in str(error.value) for word in words), error.value


def test_an_argument_of_trl_gets_through(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make(trl_grpo.create, tiny_model, tmp_path, trl={"adam_beta1": 0.5})
    assert trainer.trl.optimizer.param_groups[0]["betas"][0] == 0.5


def test_a_release_of_trl_that_was_not_tried_is_an_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.__version__", "1.17.0")
    with pytest.raises(UsageError, match=r"written for TRL 1\.16 and 1\.17\.0 is installed; run: pip install"):
        make(sft.create, tiny_model, tmp_path)


@pytest.mark.parametrize("kind", [trl_grpo, trl_async_grpo])
def test_a_segment_of_another_temperature_is_an_error(kind: Any, tiny_model: Path, tmp_path: Path) -> None:
    warm = [trajectory([segment([1, 2, 3], [2], temperature=0.7)], r, name=str(r)) for r in (0.0, 1.0)]
    trainer = make(kind.create, tiny_model, tmp_path)
    with pytest.raises(UsageError, match=r"set temperature: 0\.7"):
        trainer.step([group(warm)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_teaches_nothing_changes_nothing(kind: Any, tiny_model: Path, tmp_path: Path) -> None:
    trainer = make(kind.create, tiny_model, tmp_path)
    before = state(trainer)
    failed = [trajectory([segment([1, 2, 3], [2])], 0.0, name=name) for name in "ab"]
    for groups in ([group(failed)], []):
        metrics = trainer.step(groups)
        assert (metrics["stepped"], metrics["optimizer_steps"], trainer.policy_version) == (0, 0, 0)
    assert equal(before, state(trainer))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: Any, tiny_model: Path, tmp_path: Path) -> None:
    trainer = make(kind.create, tiny_model, tmp_path, epochs=1)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight[3, 0] = torch.inf
    before = state(trainer)
    metrics = trainer.step(recording())
    assert (metrics["stepped"], metrics["skipped_nonfinite"], trainer.policy_version) == (0, 1, 0)
    assert equal(before, state(trainer))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unscored_rollout_is_an_error(kind: Any, tiny_model: Path, tmp_path: Path) -> None:
    groups = recording()
    groups[0].trajectories[1].score = None
    with pytest.raises(PolarError, match="Rollout b of group first has no score"):
        make(kind.create, tiny_model, tmp_path).step(groups)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_trainer_goes_on_as_the_one_that_was_saved(
    kind: Any, lora: dict[str, int] | None, tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"lora": lora, "epochs": 1, "minibatch_rollouts": 3}
    whole, resumed = (make(kind.create, tiny_model, tmp_path, **settings) for _ in range(2))
    whole.step(recording())
    whole.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    assert resumed.policy_version == 1
    assert equal(state(whole), state(resumed))
    for trainer in (whole, resumed):
        trainer.step(recording())
    assert resumed.policy_version == 2
    one, other = state(whole), state(resumed)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6  # a step moves them by 1e-3


def test_a_checkpoint_of_a_whole_model_is_not_one_of_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    make(sft.create, tiny_model, tmp_path).save(tmp_path / "checkpoint")
    with pytest.raises(PolarError, match="has no adapter; go on with or without lora"):
        make(sft.create, tiny_model, tmp_path, lora={}).load(tmp_path / "checkpoint")


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_is_what_is_saved_and_what_scores(
    kind: Any, lora: dict[str, int] | None, tiny_model: Path, tmp_path: Path
) -> None:
    trainer = make(kind.create, tiny_model, tmp_path, lora=lora, epochs=1)
    trainer.step(recording())
    published = state(trainer)
    assert (trainer.weights().save_adapter is None) == (lora is None)
    trainer.save_model(tmp_path / "model")
    model = load_model(tmp_path / "model").eval()
    saved = model.state_dict()
    assert published.keys() == saved.keys() == load_model(tiny_model).state_dict().keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    ids = np.arange(10, 40, dtype=np.int32)
    with torch.no_grad():
        logs = (model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 4:-1] / 0.7).log_softmax(-1)
    wanted = logs[torch.arange(25), torch.from_numpy(ids[5:].astype(np.int64))].numpy()
    np.testing.assert_allclose(trainer.score(ids, 5, 0.7), wanted, atol=2e-5)


def test_an_adapter_is_saved_as_peft_saves_it(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = make(trl_grpo.create, tiny_model, tmp_path, lora={"rank": 2}, epochs=1)
    trainer.step(recording())
    save_adapter = trainer.weights().save_adapter
    assert save_adapter is not None
    save_adapter(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load_model(tiny_model), str(tmp_path / "adapter")).merge_and_unload()
    published = state(trainer)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(published[name], tensor, atol=1e-6, rtol=0)
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")


def test_only_the_adapter_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    _, [gradient] = gradients(make(sft.create, tiny_model, tmp_path, lora={"rank": 2}, epochs=1), recording())
    assert gradient
    assert all(".lora_" in name for name in gradient)


def test_bfloat16_is_close_and_keeps_float32_weights(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make(trl_grpo.create, tiny_model, tmp_path, dtype="bfloat16", epochs=1)
    metrics = trainer.step(recording())
    exact = make(trl_grpo.create, tiny_model, tmp_path, epochs=1).step(recording())
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=0.02)
    assert metrics["loss"] != exact["loss"]
    assert {tensor.dtype for tensor in state(trainer).values()} == {torch.float32}


def test_recomputed_layers_give_the_same_gradient(tiny_model: Path, tmp_path: Path) -> None:
    one, other = (make(trl_grpo.create, tiny_model, tmp_path, epochs=1, recompute_layers=r) for r in (False, True))
    (_, [gradient]), (_, [again]) = gradients(one, recording()), gradients(other, recording())
    for name, values in gradient.items():
        torch.testing.assert_close(values, again[name], atol=1e-6, rtol=1e-5)


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(UsageError, match="not a Hugging Face model folder"):
            kind.create(TrainerOptions(tmp_path, tmp_path))
