"""Logprobs of the trainable tokens of a micro-batch under a model. Knows torch, transformers' causal models and
`batch.MicroBatch`; no loss, no optimizer.

What holds: logits exist only at places that a trainable token is sampled from, a chunk of them at a time, and are not
kept for the backward pass but computed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polarlike.records import UsageError
from trainers import tree_attention
from trainers.batch import Block, MicroBatch

CHUNK_ELEMENTS = 1 << 24
"""Most logits (places x vocabulary) held at once: 64 MB in float32."""

PROBE_TOLERANCE = 1e-3


def tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def hidden_states(
    model: Any, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], blocks: list[Block] | None
) -> Tensor:
    """The last hidden states, [P, H]. blocks None: ids is one plain sequence, under the model's own attention."""
    tree: dict[str, Any] = {}
    if blocks is not None:
        tree = {"position_ids": tensor(positions, model.device)[None], "blocks": blocks}
        tree["longest"] = int(positions.max()) + 1
    out = model.get_decoder()(input_ids=tensor(ids, model.device)[None], use_cache=False, **tree)
    states: Tensor = out.last_hidden_state[0]
    return states


def token_logprobs(model: Any, batch: MicroBatch, *, tree: bool) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of each trainable token at its segment's temperature; both float32 [N].

    The entropy (nats) is that of the distribution the token was sampled from, without gradient. tree: the batch has
    more than one row, or its rows share tokens.
    """
    states = hidden_states(model, batch.ids, batch.positions, batch.blocks if tree else None)
    head = model.get_output_embeddings()
    states = states[tensor(batch.sources, model.device)]
    temperatures = tensor(batch.temperatures, model.device)
    # Tokens in the order of their places, so that each chunk of places owns a contiguous run of tokens.
    order = np.argsort(batch.place, kind="stable")
    place = batch.place[order]
    targets = tensor(batch.targets[order], model.device)
    step = max(1, CHUNK_ELEMENTS // int(head.weight.shape[0]))
    logprobs, entropies = [], []
    for start in range(0, batch.sources.size, step):
        a, b = np.searchsorted(place, [start, start + step])
        local = tensor(place[a:b] - start, model.device)
        logprob, entropy = checkpoint(
            _score,
            head,
            states[start : start + step],
            temperatures[start : start + step],
            local,
            targets[a:b],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    back = tensor(np.argsort(order, kind="stable"), model.device)
    return torch.cat(logprobs)[back], torch.cat(entropies)[back]


def _score(head: Any, states: Tensor, temperatures: Tensor, place: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: states [R, H], temperatures [R]; place and targets [n]. Returns logprobs and entropies [n]."""
    logits = head(states).float() / temperatures[:, None]
    logs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1)
    return logs[place, targets], entropy[place]


def prepare(model: Any, *, share_prefixes: bool) -> None:
    """Readies a model for `token_logprobs`, and proves on a few tokens that it computes what the model itself computes.

    Raises UsageError for an architecture whose logits are not its output embedding of the last hidden state (softcapped
    or scaled logits), or, with share_prefixes, whose attention does not follow blocks (recurrent or linear layers).
    """
    vocab = int(model.get_output_embeddings().weight.shape[0])
    ids = np.random.default_rng(0).integers(0, vocab, 12).astype(np.int64)
    first, second = np.arange(9), np.concatenate([np.arange(5), np.arange(9, 12)])  # two streams that share five tokens
    with torch.no_grad():
        wanted = [model(tensor(ids[s], model.device)[None], use_cache=False).logits[0] for s in (first, second)]
        head = model.get_output_embeddings()
        plain = head(hidden_states(model, ids[first], np.arange(9), None))
        # Softcapping is the identity near zero: the probe of a small random model would not see it.
        if getattr(model.config, "final_logit_softcapping", None) or not _close(plain, wanted[0]):
            raise UsageError(
                f"The trainer cannot compute the logits of a {model.config.model_type} model; use another."
            )
        if not share_prefixes:
            return
        tree_attention.register()
        model.set_attn_implementation(tree_attention.NAME)
        blocks = [Block((0, 9), (0, 9), True), Block((9, 12), (9, 12), True), Block((9, 12), (0, 5), False)]
        try:
            packed = head(hidden_states(model, ids, np.concatenate([np.arange(9), np.arange(5, 8)]), blocks))
            same = _close(packed[first], wanted[0]) and _close(packed[second], wanted[1])
        except TypeError:  # an architecture whose layers do not pass extra arguments down to attention
            same = False
    if not same:
        raise UsageError(
            f"A {model.config.model_type} model cannot share prefixes between rollouts; "
            "set share_prefixes: false in the trainer's settings."
        )


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing, layer by layer. transformers honours it in training mode alone, which would switch
    dropout on as well: so the layers themselves are put into that mode, and none of the modules in them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # The newer name is that of late transformers 5, which warns of the older one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() < PROBE_TOLERANCE * max(1.0, float(b.float().abs().max())))
