"""LoRA: the adapter's forward against merged weights and against PEFT itself, its files, its resume."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainers_toys import BAD, GOOD, PROMPT, Make, copy_of, maker, many, pair, same, sampled, without_time
from transformers import AutoModelForCausalLM

from polarlike.records import PolarError, UsageError
from trainers.batch import MicroBatch
from trainers.grpo import Grpo
from trainers.policy import Policy
from trainers.settings import GrpoSettings

IDS = np.array([*PROMPT, *GOOD, 5, 6, 7], np.int32)


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    build = maker(tiny_model, tmp_path / "out")
    return lambda seed=0, **settings: build(seed, lora={"rank": 4, "alpha": 8}, lr=1e-2, **settings)


def logprobs(model: torch.nn.Module) -> np.ndarray:
    """Of IDS[3:], by a model that is given everything at once."""
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].float(), -1)
    return np.array([float(logs[i - 1, IDS[i]]) for i in range(3, IDS.size)])


def trained(make: Make, **settings: object) -> Grpo:
    trainer = make(**settings)
    for _ in range(2):
        trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
    return trainer


def test_a_fresh_adapter_changes_no_output_and_equal_seeds_give_equal_ones(make: Make, tiny_model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert same(copy_of(make()), dict(plain.state_dict()))
    a, b, c = (make(seed).policy.parameters() for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a, c, strict=True))


def test_only_the_adapter_is_trained_and_the_layers_own_weights_stay(make: Make) -> None:
    trainer = make()
    own = {n: p.clone() for n, p in trainer.policy.model.named_parameters() if ".lora_" not in n}
    good = sampled(trainer, GOOD)
    metrics = trainer.step([pair(good, sampled(trainer, BAD))])
    assert metrics["stepped"] == 1.0
    assert sampled(trainer, GOOD).logprobs.sum() > good.logprobs.sum() + 0.05
    assert all(torch.equal(own[n], p) for n, p in trainer.policy.model.named_parameters() if n in own)
    # Seven linear layers in each of two blocks; the output head has none.
    assert len(trainer.policy.parameters()) == 2 * 7 * 2


def test_merged_weights_give_the_logprobs_of_the_adapters_forward(make: Make, tiny_model: Path) -> None:
    trainer = trained(make)
    merged = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    start = logprobs(merged)
    assert list(trainer.weights().tensors()) == list(merged.state_dict())
    merged.load_state_dict(trainer.weights().tensors())
    found = trainer.score(IDS, 3, 1.0)
    assert np.abs(found - start).max() > 1e-2
    np.testing.assert_allclose(found, logprobs(merged), atol=1e-5)


def test_a_saved_adapter_is_loaded_by_peft_over_the_first_model_and_gives_the_same_logprobs(
    make: Make, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    trainer = trained(make)
    save_adapter = trainer.weights().save_adapter
    assert save_adapter is not None
    save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    np.testing.assert_allclose(logprobs(loaded), trainer.score(IDS, 3, 1.0), atol=1e-5)


def test_a_saved_adapter_has_the_files_and_names_that_vllm_reads(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make().policy.save_adapter(tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    layers = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert names == {
        f"base_model.model.model.layers.{i}.{layer}.lora_{m}.weight" for i in (0, 1) for layer in layers for m in "AB"
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 8, "none")
    assert config["modules_to_save"] is None
    assert sorted(config["target_modules"]) == sorted(f"model.layers.{i}.{layer}" for i in (0, 1) for layer in layers)


def test_a_saved_model_has_the_adapter_merged_in(make: Make, tmp_path: Path) -> None:
    trainer = trained(make)
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert same(dict(loaded.state_dict()), copy_of(trainer))


@pytest.mark.parametrize("settings", [{"share_prefixes": False}, {"micro_batch_tokens": 1}, {"recompute_layers": True}])
def test_how_a_batch_is_laid_out_does_not_change_the_step_of_an_adapter(make: Make, settings: dict[str, Any]) -> None:
    a, b = make(epochs=2), make(epochs=2, **settings)
    first, second = a.step(many(0)), b.step(many(0))
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    assert first["packed_tokens"] < first["unpacked_tokens"]


def test_without_lora_there_is_no_adapter_to_save(tiny_model: Path, tmp_path: Path) -> None:
    assert maker(tiny_model, tmp_path)().weights().save_adapter is None


def test_the_reference_is_the_model_without_its_adapter_and_the_adapter_comes_back(
    make: Make, tiny_model: Path
) -> None:
    """The KL holds the policy back, and costs no second model."""
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    held, free = make(kl_coef=5.0), make()
    for _ in range(4):
        for trainer in (held, free):
            trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
    moved_held, moved_free = (np.abs(t.score(IDS, 3, 1.0) - logprobs(start)).max() for t in (held, free))
    assert 0 < moved_held < 0.7 * moved_free
    assert held.policy._reference is None


def test_the_kl_of_a_step_is_that_to_the_base(make: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(make, kl_coef=1.0)
    seen: list[Any] = []
    found = Policy.reference_logprobs

    def watched(policy: Policy, batch: MicroBatch) -> torch.Tensor:
        seen.append((batch, found(policy, batch)))
        return seen[-1][1]

    monkeypatch.setattr(Policy, "reference_logprobs", watched)
    trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    batch, reference = seen[0]
    for n, row_index in enumerate(batch.row):
        row = batch.rows[row_index]
        k = n - int(np.flatnonzero(batch.row == row_index)[0])
        with torch.no_grad():
            context = torch.from_numpy(row.ids[: row.sources[k] + 1].astype(np.int64))[None]
            logs = torch.log_softmax(base(context).logits[0, -1], -1)
        assert float(reference[n]) == pytest.approx(float(logs[row.targets[k]]), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_adapter_takes_the_same_next_step_bit_for_bit(make: Make, tmp_path: Path, dtype: str) -> None:
    trainer = make(minibatch_rollouts=5, weight_decay=0.01, dtype=dtype)
    trainer.step(many(0))
    trainer.save(tmp_path / "ck")
    assert not (tmp_path / "ck" / "model").exists()
    resumed = make(seed=99, minibatch_rollouts=5, weight_decay=0.01, dtype=dtype)
    resumed.load(tmp_path / "ck")
    assert resumed.policy_version == 1
    assert same(copy_of(trainer), copy_of(resumed))
    a, b = trainer.step(many(1)), resumed.step(many(1))
    assert same(copy_of(trainer), copy_of(resumed))
    assert without_time(a) == without_time(b)


def test_a_checkpoint_of_another_rank_or_alpha_or_without_an_adapter_is_refused_and_changes_nothing(
    make: Make, tiny_model: Path, tmp_path: Path
) -> None:
    trained(make).save(tmp_path / "ck")
    full = maker(tiny_model, tmp_path / "out")()
    full.save(tmp_path / "full")
    for options in ({"rank": 2, "alpha": 8}, {"rank": 4, "alpha": 16}, {"rank": 4, "alpha": 8, "targets": ["q_proj"]}):
        other = maker(tiny_model, tmp_path / "out")(lora=options)
        before = copy_of(other)
        with pytest.raises(PolarError, match="of other LoRA settings"):
            other.load(tmp_path / "ck")
        assert same(before, copy_of(other))
    with pytest.raises(PolarError, match="has no adapter"):
        make().load(tmp_path / "full")
    with pytest.raises(PolarError, match="has no model"):
        full.load(tmp_path / "ck")


def test_targets_choose_the_layers_and_a_name_that_fits_none_is_a_usage_error(tiny_model: Path, tmp_path: Path) -> None:
    build = maker(tiny_model, tmp_path)
    chosen = build(lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    assert len(chosen.policy.parameters()) == 2 * 2 * 2
    with pytest.raises(UsageError, match=r"'lora\.targets' does not fit this model"):
        build(lora={"targets": ["query"]})


def test_the_adapters_parameters_are_the_whole_of_the_optimizers_state(make: Make, tmp_path: Path) -> None:
    trainer = trained(make)
    trainer.save(tmp_path / "ck")
    state = torch.load(tmp_path / "ck" / "optimizer.pt", weights_only=True)["state"]
    assert len(state) == len(trainer.policy.parameters()) == 28
    assert trainer.settings.lora == GrpoSettings.model_validate({"lora": {"rank": 4, "alpha": 8}}).lora
