"""The weights that are trained, and the ones they are held to: loading, precision, adapter, forwards, files.

Knows torch, transformers and micro-batches; no advantage, no loss, no optimizer. What holds:
- Every forward runs without dropout, as the engine samples: a fresh policy's ratio is exactly its numerical mismatch.
- What is trained, and so the optimizer's state, is float32. `dtype: bfloat16` is the precision of the arithmetic
  (autocast) and of weights that are never trained: the base under an adapter, and the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polarlike.engines.base import PolicyWeights
from polarlike.records import PolarError, UsageError
from trainers import adapter, checkpoints
from trainers.batch import MicroBatch
from trainers.forward import prepare, recompute_layers, token_logprobs
from trainers.model_folder import copy_tokenizer, load_model, no_progress_bars
from trainers.settings import GrpoSettings


class Policy:
    """model: the causal model that is forwarded, with the adapter in it if there is one."""

    def __init__(self, folder: Path, settings: GrpoSettings, seed: int) -> None:
        self.device = _device(settings.device)
        self._folder = folder
        self._settings = settings
        self.model = self._load()
        self._adapted = adapter.attach(self.model, settings.lora, seed) if settings.lora else None
        self._reference = self._load().requires_grad_(False) if settings.kl_coef and not settings.lora else None
        if settings.recompute_layers:
            recompute_layers(self.model)
        if settings.dtype == "bfloat16":
            _narrow_frozen(self.model)
            _narrow_frozen(self._reference)

    def _load(self) -> Any:
        model = load_model(self._folder).to(self.device).eval()
        prepare(model, share_prefixes=self._settings.share_prefixes)
        return model

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained, float32."""
        return [p for p in self.model.parameters() if p.requires_grad]

    # ------------------------------------------------------------ forwards

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each trainable token, float32 [N]; see `forward.token_logprobs`."""
        return self._forward(self.model, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """float32 [N], under the model that training started from: with LoRA the same weights without the adapter."""
        if self._reference is not None:
            return self._forward(self._reference, batch)[0]
        with self._adapted.disable_adapter() if self._adapted is not None else nullcontext():
            return self._forward(self.model, batch)[0]

    def _forward(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        # A context a forward: autocast keeps narrowed weights until it ends, and those of a forward without gradient
        # would serve one with gradient.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._settings.dtype == "bfloat16"):
            return token_logprobs(model, batch, tree=self._settings.share_prefixes)

    # ------------------------------------------------------------ files

    def weights(self) -> PolicyWeights:
        """The tensors are the live parameters, save those an adapter was multiplied into: copy them before a step."""
        return PolicyWeights(self._tensors, self.save_model, self.save_adapter if self._adapted is not None else None)

    def _tensors(self) -> Mapping[str, Tensor]:
        state: Mapping[str, Tensor] = self.model.state_dict()
        return state if self._adapted is None else adapter.merged(self.model)

    def save_adapter(self, folder: Path) -> None:
        with checkpoints.saving(folder):
            adapter.save(self._adapted, folder)

    def save_model(self, folder: Path) -> None:
        """A Hugging Face folder, any adapter merged in, with the tokenizer and chat template it started with."""
        with checkpoints.saving(folder), no_progress_bars():
            folder.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(folder, state_dict=dict(self._tensors()))
            copy_tokenizer(self._folder, folder)

    def fill(self, folder: Path) -> None:
        """What a checkpoint holds of the policy: model/, or with LoRA adapter/ alone."""
        if self._adapted is not None:
            adapter.save(self._adapted, folder / "adapter")
        else:
            self.save_model(folder / "model")

    def load(self, folder: Path) -> None:
        """Takes up what `fill` wrote. Raises PolarError, and changes nothing, if it does not fit."""
        kind = "adapter" if self._adapted is not None else "model"
        if not (folder / kind).is_dir():
            raise PolarError(f"The checkpoint {folder} has no {kind}; go on with or without lora, as it was begun.")
        if self._adapted is not None:
            return adapter.load(self._adapted, folder / kind)
        weights = load_model(folder / kind).state_dict()
        if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in self._tensors().items()}:
            raise PolarError(f"The checkpoint {folder} is of another model than {self._folder}; start from that model.")
        self.model.load_state_dict(weights)


def _narrow_frozen(model: Any) -> None:
    for parameter in model.parameters() if model is not None else ():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        reason = str(error).splitlines()[0]
        raise UsageError(f"The trainer cannot use device {name} ({reason}); set device: cpu or auto.") from None
