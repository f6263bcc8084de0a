"""A store in a fresh folder, and calls of chosen size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlike.records import Call, Cause, Sampling
from polarlike.store import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = Store(url)
    yield opened
    await opened.close()


@pytest.fixture
def call() -> Callable[..., Call]:
    """call(i, ...): call i of session "s", with ids and logprobs that do not compress away."""

    def make(i: int, *, suffix: int = 20, sampled: int = 10, **fields: Any) -> Call:
        rng = np.random.default_rng(i)
        settings: dict[str, Any] = {
            "session_id": "s",
            "new_messages": [{"role": "user", "content": f"question {i}"}],
            "tools": None,
            "reply": {"role": "assistant", "content": f"answer {i}"},
            "finish_reason": "stop",
        }
        return Call(
            call_id=f"call_{i}",
            index=i,
            parent_id=None,
            cause=Cause.FIRST,
            suffix_ids=rng.integers(0, 150_000, suffix, dtype=np.int32),
            completion_ids=rng.integers(0, 150_000, sampled, dtype=np.int32),
            logprobs=-rng.exponential(1, sampled).astype(np.float32),
            versions=np.zeros(sampled, np.int32),
            forced=np.zeros(sampled, np.bool_),
            sampling=Sampling(),
            **(settings | fields),
        )

    return make
