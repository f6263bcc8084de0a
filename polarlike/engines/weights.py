"""New weights into a model that is being sampled from. Knows parameter names and shapes, nothing of versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from polarlike.engines.base import EngineError


def load_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Copies `weights` into the model. Raises EngineError, before anything is changed, for names or shapes that are not
    the model's; a tied parameter may be left out."""
    own: dict[str, torch.Tensor] = model.state_dict()
    tensors = Counter(t.data_ptr() for t in own.values())
    tied = {name for name, t in own.items() if tensors[t.data_ptr()] > 1}
    new = {name: w if isinstance(w, torch.Tensor) else torch.as_tensor(w) for name, w in weights.items()}
    unknown = sorted(set(new) - set(own))
    if unknown:
        raise EngineError(f"The published weights name {unknown[0]!r}, which this model does not have.")
    missing = sorted(set(own) - set(new) - tied)
    if missing:
        raise EngineError(f"The published weights lack {missing[0]!r}.")
    for name, w in new.items():
        if w.shape != own[name].shape:
            raise EngineError(
                f"The published weights' {name} has shape {tuple(w.shape)}, the model's {tuple(own[name].shape)}."
            )
    with torch.no_grad():
        for name, w in new.items():
            own[name].copy_(w)
