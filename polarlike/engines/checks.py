"""What every engine checks before a token or a sampling parameter counts. Knows numbers alone: no torch, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlike.engines.base import EngineError
from polarlike.records import Ids, Logprobs, Sampling

SENTINEL = -9000.0
"""Logprobs from here down are no numbers but stand for one: vLLM writes minus infinity as -9999."""

ROUNDING = 1e-5
"""A logprob above 0 by no more than this is a rounded 0."""


def check_sampling(s: Sampling) -> None:
    """Raises EngineError where a parameter has no meaning."""
    problems = (
        ("max_tokens", s.max_tokens, s.max_tokens >= 1, "at least 1"),
        ("temperature", s.temperature, s.temperature >= 0, "0 or more"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", s.top_k, s.top_k >= 0, "0 (off) or more"),
        ("repetition_penalty", s.repetition_penalty, s.repetition_penalty > 0, "above 0"),
        ("presence_penalty", s.presence_penalty, -2 <= s.presence_penalty <= 2, "from -2 to 2"),
        ("frequency_penalty", s.frequency_penalty, -2 <= s.frequency_penalty <= 2, "from -2 to 2"),
    )
    for name, value, good, rule in problems:
        if not good:
            raise EngineError(f"The sampling parameter {name} is {value}; it must be {rule}.")


def room_left(prompt_tokens: int, context: int, max_tokens: int) -> int:
    """Tokens that a reply may have. Raises EngineError where there is no room for one."""
    if prompt_tokens == 0:
        raise EngineError("The prompt is empty; send at least one token.")
    if prompt_tokens >= context:
        raise EngineError(
            f"The prompt has {prompt_tokens} tokens and the model's context holds {context}; "
            "there is no room for a reply."
        )
    return min(max_tokens, context - prompt_tokens)


def is_whole_distribution(s: Sampling) -> bool:
    """Whether what is sampled is the softmax of the model's own logits. Temperature 0 counts as such: its tokens carry
    the logprobs of temperature 1."""
    shaped = s.top_p < 1 or s.top_k > 0 or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1
    return s.temperature in (0.0, 1.0) and not shaped


def checked_tokens(ids: Any, logprobs: Any, server: str) -> tuple[Ids, Logprobs]:
    """What a server sent, as int32 [n] and float32 [n]. server: its kind, for the sentence. Raises EngineError unless
    there is one id and one logprob for every token, and every logprob is a finite number of at most 0."""
    if not isinstance(ids, Sequence) or not isinstance(logprobs, Sequence):
        lack = "logprobs" if isinstance(ids, Sequence) else "token ids"
        raise EngineError(f"The {server} server sent no {lack}; what it returned cannot be trained on.")
    if len(ids) != len(logprobs):
        raise EngineError(
            f"The {server} server sent {len(ids)} token ids and {len(logprobs)} logprobs; there must be one each."
        )
    for value in logprobs:
        if isinstance(value, bool) or not isinstance(value, int | float) or not SENTINEL < value <= ROUNDING:
            raise EngineError(f"The {server} server sent {value!r} as a logprob; what it returned is no record.")
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise EngineError(f"The {server} server sent a token id that is no number.")
    return np.asarray(ids, np.int32), np.minimum(np.asarray(logprobs, np.float32), np.float32(0))
