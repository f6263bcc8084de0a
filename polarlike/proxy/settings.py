"""How a session is served: sampling, streaming, time limits. Plain data, set by the run or by `polar serve`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polarlike.records import Sampling


class SamplingSettings(BaseModel):
    """The run's sampling. What is set here wins over what the harness asks; what is not set is the harness's choice."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling. Sessions that train always use 1."""
    top_k: int | None = Field(default=None, ge=0)
    """0 is off. Sessions that train always use 0."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens a reply may have; clamped to the room left in the context."""
    seed: int | None = None
    """Makes every call reproducible."""

    def effective(self, asked: dict[str, Any], room: int, *, train: bool) -> Sampling:
        """Sampling as it is sent to the engine, every field explicit. room: tokens left in the context."""
        values = {**asked, **self.model_dump(exclude_none=True)}
        if train:  # the trainer must be able to score the distribution that was sampled
            values.update(top_p=1.0, top_k=0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
        values["max_tokens"] = max(1, min(values.get("max_tokens", Sampling().max_tokens), room))
        return Sampling(**values)


class Rule(BaseModel):
    """A volatile span: what `pattern` matches becomes `replacement` in every message before the engine sees it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    pattern: str
    replacement: str = ""


class SessionSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sampling: SamplingSettings = SamplingSettings()
    train: bool = True
    """Sampled without top-p, top-k and penalties, so that recorded logprobs are those of the whole distribution."""
    streaming: Literal["whole", "live"] = "whole"
    """whole: sample the reply, then stream it in one go. live: text as it comes, tool calls once they parse."""
    on_edit: Literal["keep", "fork"] = "keep"
    """When the harness sends a sampled turn back changed: keep the sampled tokens and count it, or start a segment."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds a reply is sampled on after its client has gone, so that a retry can join it."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Seconds between keep-alive comments of a stream that waits for the engine."""
    rewrites: list[Rule] = []
    task: dict[str, Any] | None = None
    """What a scripted policy may know of the task."""
