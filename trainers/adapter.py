"""LoRA on a causal model of transformers, by PEFT. Knows the layers that PEFT puts into a model and how they are named
in a saved adapter; no loss, no optimizer.

What holds: the model that was given is changed in place and stays the model that is forwarded, so whatever works on it
(the shared-prefix attention, recomputed layers) works with the adapter. Its own weights are frozen and never written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polarlike.records import PolarError, UsageError
from trainers.settings import LoraSettings

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of a PEFT folder, by the names that PEFT and vLLM look for."""


def lora_config(settings: LoraSettings) -> Any:
    """PEFT's configuration."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # the engine samples without
        target_modules=settings.targets or "all-linear",
    )


def attach(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Puts a fresh adapter, which changes no output yet, into the model; returns PEFT's wrapper around it. Equal seeds
    give equal adapters. Raises UsageError if no layer has one of the names that were asked for."""
    from peft import get_peft_model

    config = lora_config(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"The trainer's setting 'lora.targets' does not fit this model: {error}") from None


@torch.no_grad()
def merged(model: Any) -> dict[str, Tensor]:
    """The state dict of the model with its adapter multiplied in, by the names the model had without one. Float32 where
    the adapter is; tensors without an adapter are the live ones."""
    from peft.tuners.lora import LoraLayer

    added = {
        f"{name}.base_layer.weight": layer.get_delta_weight("default")  # type: ignore[attr-defined]
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    state: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = weight + added[name] if name in added else weight
    return state


def save(adapted: Any, folder: Path) -> None:
    """A PEFT folder that PEFT and vLLM load over the model that training started from."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    adapted.peft_config["default"].save_pretrained(str(folder))
    save_file(_tensors(adapted), folder / WEIGHTS, metadata={"format": "pt"})


def load(adapted: Any, folder: Path) -> None:
    """Takes up what `save` wrote. Raises PolarError, and changes nothing, if it was another model's or made with other
    LoRA settings."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    saved, mine = load_file(folder / WEIGHTS), _tensors(adapted)
    alpha = json.loads((folder / CONFIG).read_text())["lora_alpha"]
    same = {n: w.shape for n, w in saved.items()} == {n: w.shape for n, w in mine.items()}
    if not same or alpha != adapted.peft_config["default"].lora_alpha:
        raise PolarError(
            f"The adapter {folder} is of another model or of other LoRA settings than this run's; "
            "go on with the model, rank, alpha and targets it was made with."
        )
    set_peft_model_state_dict(adapted, saved)


def _tensors(adapted: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # Asked for embeddings, PEFT would look the model up on the Hub.
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
