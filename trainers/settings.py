"""The GRPO trainer's table of the config, checked. Knows pydantic; no torch.

Text that spells a number is taken as one, since YAML 1.1 reads `2e-4` as text; an unknown key never passes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polarlike.records import UsageError
from polarlike.strict import explain


class GrpoSettings(BaseModel):
    """What `polar train` passes as the trainer's settings; the sentence under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How a rollout's reward is compared with those of its group."""
    aggregation: Literal["token", "segment", "rollout", "constant"] | None = None
    """What weighs the same in the loss; unset: `constant` with dr_grpo, else `token`."""
    constant_tokens: float = Field(16384.0, gt=0)
    """What `aggregation: constant` divides the sum over a minibatch's tokens by."""
    lr: float = Field(2e-4, gt=0)
    """AdamW's learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The probability ratio is clipped above 1 + clip_high."""
    epochs: int = Field(2, ge=1)
    """Passes over the rollouts in one step."""
    minibatch_rollouts: int = Field(24, ge=1)
    """Most rollouts an optimizer step sees; a pass is split evenly."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL (k3) to the model that training started from; 0 keeps no copy of it."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens in one forward beyond its first segment, shared prefixes counted once; this bounds memory."""
    recompute_layers: bool = False
    """Keep one activation a layer and token and compute the rest again in backward: less memory, a third more work."""
    share_prefixes: bool = True
    """Forward tokens that segments share only once; false for models whose layers are not all full attention."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1, or auto."""

    @property
    def effective_aggregation(self) -> Literal["token", "segment", "rollout", "constant"]:
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")


def parse_settings(settings: dict[str, Any]) -> GrpoSettings:
    """Raises UsageError with one sentence on the first thing that is wrong."""
    try:
        return GrpoSettings.model_validate(settings)
    except ValidationError as error:
        raise UsageError(f"The trainer's settings: {explain(error, GrpoSettings, 'setting')}") from None
