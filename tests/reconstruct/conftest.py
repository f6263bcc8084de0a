"""A small session writer for the tests of reconstruct: calls with ids that are all different, so that a misplaced token
shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polarlike.records import Call, Cause, Delivery, Message, Sampling

Make = Callable[..., Call]


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


@pytest.fixture
def make() -> Make:
    """make(parent, ...): the next call of a session. Each call takes one second, one after the other."""
    fresh = itertools.count(1)
    numbers = itertools.count(1000)

    def ids(n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.fromiter(itertools.islice(numbers, n), np.int32, n)

    def build(
        parent: Call | None = None,
        *,
        says: list[Message] | None = None,
        reply: str | None = None,
        suffix: int = 3,
        sampled: int = 2,
        cause: Cause | None = None,
        delivery: Delivery = Delivery.FLUSHED,
        temperature: float = 1.0,
        **fields: Any,
    ) -> Call:
        i = next(fresh)
        settings: dict[str, Any] = {
            "logprobs": np.full(sampled, -0.5, np.float32),
            "versions": np.zeros(sampled, np.int32),
            "forced": np.zeros(sampled, np.bool_),
            "finish_reason": "stop",
            "model": "policy",
            "started": float(i),
            "finished": i + 0.9,
            "suffix_ids": ids(suffix),
            "completion_ids": ids(sampled),
        }
        return Call(
            call_id=f"call_{i}",
            session_id="session",
            index=i - 1,
            parent_id=parent.call_id if parent else None,
            cause=cause or (Cause.CONTINUES if parent else Cause.FIRST if i == 1 else Cause.NEW_CONVERSATION),
            new_messages=[_message("user", f"question {i}")] if says is None else says,
            tools=None,
            reply=_message("assistant", reply or f"answer {i}"),
            sampling=Sampling(temperature=temperature),
            delivery=delivery,
            **(settings | fields),
        )

    return build
