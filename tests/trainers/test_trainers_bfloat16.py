"""bfloat16 arithmetic over float32 weights, against float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trainers_toys import BAD, GOOD, PROMPT, Make, copy_of, maker, many, pair, sampled

from trainers import tree_attention


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    return maker(tiny_model, tmp_path / "out")


IDS = np.array([*PROMPT, *GOOD, 5, 6, 7], np.int32)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_logprobs_are_close_to_those_of_float32_and_not_the_same(make: Make, share: bool, lora: object) -> None:
    wide = make(share_prefixes=share, lora=lora).score(IDS, 1, 1.0)
    narrow = make(share_prefixes=share, lora=lora, dtype="bfloat16").score(IDS, 1, 1.0)
    assert narrow.dtype == np.float32
    assert 0 < np.abs(wide - narrow).max() < 0.1  # bf16 keeps 8 bits; engines differ by as much


@pytest.mark.parametrize("settings", [{}, {"share_prefixes": False}, {"recompute_layers": True}])
def test_the_gradient_points_where_float32s_does(make: Make, tmp_path: Path, settings: dict[str, bool]) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        trainer = make(epochs=1, max_grad_norm=1e9, dtype=dtype, **settings)
        trainer.step(many(0))
        trainer.save(tmp_path / dtype)
        state = torch.load(tmp_path / dtype / "optimizer.pt", weights_only=True)["state"]
        found.append(torch.cat([entry["exp_avg"].flatten() for _, entry in sorted(state.items())]))
    assert float(torch.nn.functional.cosine_similarity(*found, dim=0)) > 0.99


def test_weights_and_optimizer_state_stay_float32_and_keep_updates_that_bfloat16_would_lose(
    make: Make, tmp_path: Path
) -> None:
    trainer = make(dtype="bfloat16", lr=1e-6, epochs=1)
    before = copy_of(trainer)
    trainer.step(many(0))
    after = copy_of(trainer)
    assert {w.dtype for w in after.values()} == {torch.float32}
    trainer.save(tmp_path / "ck")
    state = torch.load(tmp_path / "ck" / "optimizer.pt", weights_only=True)["state"]
    assert {entry[key].dtype for entry in state.values() for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert float((before[name] - after[name]).abs().max()) < 2e-6


def test_under_lora_the_frozen_weights_are_held_in_bfloat16_and_the_adapter_is_not(make: Make) -> None:
    trainer = make(dtype="bfloat16", lora={"rank": 4}, kl_coef=0.1)
    kinds = {(p.requires_grad, p.dtype) for p in trainer.policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    good = sampled(trainer, GOOD)
    trainer.step([pair(good, sampled(trainer, BAD))])
    assert trainer.weights().tensors()["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_a_sequence_becomes_likelier_in_bfloat16(make: Make) -> None:
    trainer = make(dtype="bfloat16", lr=1e-3)
    first = sampled(trainer, GOOD).logprobs.sum()
    for _ in range(3):
        metrics = trainer.step([pair(sampled(trainer, GOOD), sampled(trainer, BAD))])
        assert metrics["kl_k3"] < 1e-3  # scored alone and packed: the same arithmetic but for the tree
    assert sampled(trainer, GOOD).logprobs.sum() > first + 0.5


def test_the_tree_attention_of_narrow_tensors_is_near_that_of_wide_ones_by_both_kernels(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.batch import Block

    torch.manual_seed(0)
    blocks = [Block((0, 9), (0, 9), True), Block((9, 20), (9, 20), True), Block((9, 20), (0, 5), False)]
    wide = [torch.randn(1, 2, 20, 16) for _ in range(3)]

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = tree_attention._TreeAttention.apply(*leaves, blocks, 0.25)
        (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]  # type: ignore[misc]

    exact = run(wide)
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(tree_attention, "_attend", tree_attention.plain_attend)
            monkeypatch.setattr(tree_attention, "_attend_backward", tree_attention.plain_attend_backward)
        for a, b in zip(exact, run([t.bfloat16() for t in wide]), strict=True):
            assert b.dtype == torch.bfloat16
            torch.testing.assert_close(b.float(), a, rtol=0.05, atol=0.03)
