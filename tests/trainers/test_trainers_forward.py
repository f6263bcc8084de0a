"""The packed forward against one plain forward a segment, by a model that never saw our attention."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainers_builders import group, segment, trajectory
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, Qwen3Config

from polarlike.records import Segment, UsageError
from trainers import forward, tree_attention
from trainers.batch import micro_batches
from trainers.forward import prepare, recompute_layers, token_logprobs
from trainers.rows import Row, rows_of


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tree_of_segments(prompt: int, seed: int = 0) -> list[Segment]:
    """Eight segments on one prompt that part at several depths, one of them a prefix of another, one on its own."""
    rng = np.random.default_rng(seed)
    draw = lambda n: [int(x) for x in rng.integers(0, 300, n)]  # noqa: E731
    start, middle, deep = draw(prompt), draw(9), draw(7)
    streams = [
        start + draw(20),
        start + draw(3),
        start + middle + draw(11),
        start + middle + deep + draw(5),
        start + middle + deep + draw(25),
        start + middle + deep,
        start[: prompt // 2] + draw(13),
        draw(17),
    ]
    made = []
    for i, ids in enumerate(streams):
        own = np.sort(rng.choice(np.arange(1, len(ids)), size=min(9, len(ids) - 1), replace=False))
        made.append(segment(ids, [int(x) for x in own], temperature=0.7 if i % 2 else 1.0))
    return made


def rows(segments: list[Segment]) -> list[Row]:
    [by_rollout] = rows_of([group([trajectory([s], 0.0) for s in segments])])
    return [row for rollout in by_rollout for row in rollout]


def plain(model: Any, segments: list[Segment]) -> list[torch.Tensor]:
    """Each segment alone through the whole model, all its logits."""
    result = []
    for s in segments:
        ids = torch.from_numpy(s.ids.astype(np.int64))
        logs = torch.log_softmax(model(ids[None], use_cache=False).logits[0].float() / s.temperature, -1)
        where = np.flatnonzero(s.loss_mask)
        result.append(logs[where - 1, ids[where]])
    return result


def packed(model: Any, segments: list[Segment], max_tokens: int, *, share: bool = True) -> list[torch.Tensor]:
    """The same numbers through micro-batches."""
    made = rows(segments)
    numbers = np.arange(
        sum(r.targets.size for r in made), dtype=np.float32
    )  # in place of weights: where each came from
    found: list[torch.Tensor] = [torch.zeros(())] * numbers.size
    for batch in micro_batches(made, numbers, max_tokens, share_prefixes=share):
        logprobs, _ = token_logprobs(model, batch, tree=share)
        for n, value in zip(batch.weights, logprobs, strict=True):
            found[int(n)] = value
    sizes = [r.targets.size for r in made]
    return list(torch.split(torch.stack(found), sizes))


def gradients(model: Any, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum in which every token has a weight of its own."""
    model.zero_grad()
    flat = torch.cat(logprobs)
    (flat * torch.linspace(-1, 1, flat.numel())).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_to_plain(tiny_model: Path, segments: list[Segment], max_tokens: int, model: Any, share: bool) -> None:
    reference = load(tiny_model)
    wanted, found = plain(reference, segments), packed(model, segments, max_tokens, share=share)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5)
    wanted_grads, found_grads = gradients(reference, wanted), gradients(model, found)
    assert wanted_grads.keys() == found_grads.keys()
    for name, grad in wanted_grads.items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(found_grads[name] / scale, grad / scale, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("max_tokens", [10_000, 60])
def test_packed_logprobs_and_gradients_equal_those_of_separate_forwards(tiny_model: Path, max_tokens: int) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    assert_equal_to_plain(tiny_model, tree_of_segments(40), max_tokens, model, True)


def test_they_are_equal_on_a_shared_prompt_of_1500_tokens(tiny_model: Path) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    assert_equal_to_plain(tiny_model, tree_of_segments(1500), 8192, model, True)


def test_they_are_equal_without_sharing(tiny_model: Path) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=False)
    assert_equal_to_plain(tiny_model, tree_of_segments(30), 10_000, model, False)


def test_they_are_equal_when_layers_are_recomputed(tiny_model: Path) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    recompute_layers(model)
    assert not any(m.training for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert_equal_to_plain(tiny_model, tree_of_segments(30), 10_000, model, True)


def test_they_are_equal_with_the_kernel_for_other_devices(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "QUERY_CHUNK", 7)
    monkeypatch.setattr(tree_attention, "_attend", tree_attention.plain_attend)
    monkeypatch.setattr(tree_attention, "_attend_backward", tree_attention.plain_attend_backward)
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    assert_equal_to_plain(tiny_model, tree_of_segments(30), 10_000, model, True)


def test_they_are_equal_when_logits_come_in_small_chunks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 3 * 512)
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    assert_equal_to_plain(tiny_model, tree_of_segments(30), 10_000, model, True)


def test_logits_are_made_only_where_a_trainable_token_was_sampled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    [batch] = micro_batches(rows([segment(range(1, 200), [150, 151])]), np.ones(2, np.float32), 1000)
    with torch.no_grad():
        token_logprobs(model, batch, tree=True)
    assert seen == [2]


def test_entropy_is_that_of_the_tempered_distribution(tiny_model: Path) -> None:
    model = load(tiny_model)
    prepare(model, share_prefixes=True)
    [batch] = micro_batches(rows([segment([5, 6, 7, 8], [3], temperature=0.5)]), np.ones(1, np.float32), 10)
    _, entropy = token_logprobs(model, batch, tree=True)
    with torch.no_grad():
        logits = load(tiny_model)(torch.tensor([[5, 6, 7]])).logits[0, -1].double() / 0.5
    p = torch.exp(logits) / torch.exp(logits).sum()
    assert float(entropy[0]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
    assert not entropy.requires_grad


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_another_architecture_of_full_attention_can_share_prefixes() -> None:
    prepare(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval(), share_prefixes=True)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2),
        Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0),
    ],
    ids=["recurrent", "sliding"],
)
def test_a_model_that_cannot_share_prefixes_is_refused_with_the_way_out_and_trains_without(config: Any) -> None:
    with pytest.raises(UsageError, match="share_prefixes: false"):
        prepare(AutoModelForCausalLM.from_config(config).eval(), share_prefixes=True)
    prepare(AutoModelForCausalLM.from_config(config).eval(), share_prefixes=False)


def test_a_model_that_caps_its_logits_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UsageError, match="cannot compute the logits"):
        prepare(model, share_prefixes=True)
