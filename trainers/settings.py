"""The trainers' tables of the config: how advantages are made, and the options of our own trainer. Knows pydantic; no
torch, no other trainer.

Text that spells a number is taken as one, since YAML 1.1 reads `2e-4` as text; an unknown key never passes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    """The sentence under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class PerAgentSettings(Table):
    """Of `advantage: per_agent`. The published form is {unit: call, singleton: raw, eps: 1e-6}."""

    unit: Literal["trajectory", "call", "token"] = "trajectory"
    """What counts once in a role's statistics: a rollout in which it spoke, each of its calls, or each token."""
    singleton: Literal["zero", "raw"] = "zero"
    """The advantage where only one unit counts: 0, or its reward as it is."""
    eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation."""


class CreditSettings(Table):
    """From scores to advantages: the options of every trainer that takes its rows from `credit`."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "per_agent"] = "grpo"
    """How a rollout's reward is compared with those of its group; per_agent compares within each role of it."""
    per_agent: PerAgentSettings = PerAgentSettings()
    """How `advantage: per_agent` counts."""
    standardise_per_task: bool = False
    """Then bring the advantages of each task's tokens in the step to mean 0 and standard deviation 1."""


class GrpoSettings(CreditSettings):
    """What `polar train` passes to our own trainer."""

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


WITHOUT_EFFECT: dict[str, tuple[str, tuple[str, ...]]] = {
    "per_agent": ("advantage", ("per_agent",)),
    "constant_tokens": ("effective_aggregation", ("constant",)),
}
"""An option, and the other option with the values under which alone it does something."""
