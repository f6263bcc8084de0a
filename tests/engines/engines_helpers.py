"""Helpers over engines in tests: start one, ask it, and what transformers itself says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polarlike.engines.base import Engine, EngineOptions, GenerateRequest, PolicyWeights
from polarlike.engines.embedded import EmbeddedEngine, create
from polarlike.records import Sampling


@dataclass
class Reply:
    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    chunks: int


@asynccontextmanager
async def running(model: Path, log: Path | None = None, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    fields = {k: settings.pop(k) for k in ("seed", "max_batch") if k in settings}
    engine = create(str(model), EngineOptions(log=log, extra=settings, **fields))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: Engine, prompt: np.ndarray, name: str = "r", stop_ids: tuple[int, ...] = (), **s: Any) -> Reply:
    s.setdefault("max_tokens", 16)
    chunks = [c async for c in engine.generate(GenerateRequest(name, prompt, Sampling(**s), stop_ids))]
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    return Reply(
        np.concatenate([c.ids for c in chunks]),
        np.concatenate([c.logprobs for c in chunks]),
        np.concatenate([c.versions for c in chunks]),
        chunks[-1].finish_reason or "",
        len(chunks),
    )


def plain_model(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """transformers' own model, with its own attention: what the engine is compared with."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    if weights:
        model.load_state_dict(weights, strict=False)
    return model.eval()


@torch.no_grad()
def plain_logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return logits


def plain_logprobs(model: Any, prompt: np.ndarray, reply: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    logits = plain_logits(model, np.concatenate([prompt, reply])) / temperature
    logprobs = torch.log_softmax(logits, -1)[prompt.size - 1 : -1]
    return logprobs.gather(1, torch.from_numpy(reply.astype(np.int64))[:, None])[:, 0].numpy()


def published(tensors: Any) -> PolicyWeights:
    """A state dict as a trainer hands it over; the embedded engine asks for nothing else."""

    def no_folder(folder: Path) -> None:
        raise AssertionError(f"{folder} was not to be written")

    return PolicyWeights(lambda: tensors, no_folder)


def other_weights(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: w + 0.05 * torch.randn(w.shape, generator=generator)
        for name, w in model.state_dict().items()
        if name != "lm_head.weight"
    }
