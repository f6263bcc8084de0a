"""The trainers' tables of the config: how advantages are made, and the options of our own trainer. Knows pydantic; no
torch, no other trainer.

Text that spells a number is taken as one, since YAML 1.1 reads `2e-4` as text; an unknown key never passes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from trainers.correction import BOUNDS, Kind, Level


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


class LoraSettings(Table):
    """Of `lora`."""

    rank: int = Field(default=16, ge=1)
    """The rank of each layer's update."""
    alpha: int = Field(default=32, ge=1)
    """The update is scaled by alpha / rank."""
    targets: list[str] | None = None
    """Names of the layers that get one, for example [q_proj, v_proj]; unset: every linear layer but the output's."""


class CorrectionSettings(Table):
    """Of `correction`: a weight on each token, from w = pi_start / pi_engine."""

    kind: Kind = "none"
    """tis truncates w into [low, high]; icepop and mis make it 0 outside of that band, token by token or by level."""
    level: Level = "token"
    """Of tis and mis: w of each token, the product over a segment (sequence), or its geometric mean."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound; unset: 0.5 with icepop, else 0."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound; unset: 2 with tis, 5 with icepop, 3 with mis."""

    @model_validator(mode="after")
    def _icepop_is_by_token(self) -> CorrectionSettings:
        if self.kind == "icepop" and self.level != "token":
            raise PydanticCustomError("level", "icepop is by token; mis is what masks by sequence")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = BOUNDS[self.kind]
        return (low if self.low is None else self.low, high if self.high is None else self.high)


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
    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    """PPO's clipped ratio by token; by segment (gspo); or the clipped ratio as a fixed weight of log pi (cispo)."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The probability ratio is clipped below 1 - clip_low. GSPO's authors use 3e-4."""
    clip_high: float = Field(0.2, gt=0)
    """The probability ratio is clipped above 1 + clip_high. GSPO's authors use 4e-4."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, no ratio above this counts as more than it."""
    max_ratio: float | None = Field(None, gt=1)
    """A token whose ratio is above this or below its inverse gives no gradient, whatever its advantage."""
    old: Literal["engine", "trainer"] | None = None
    """Whose logprobs the ratio starts from: those the engine recorded, or the trainer's own at the start of the step,
    which cost one more forward. Unset: trainer where there is a correction, else engine."""
    correction: CorrectionSettings = CorrectionSettings()
    """Weighs each token by how the trainer's probability for it at the start of the step differs from the engine's."""
    epochs: int = Field(2, ge=1)
    """Passes over the rollouts in one step."""
    minibatch_rollouts: int = Field(24, ge=1)
    """Most rollouts an optimizer step sees; a pass is split evenly."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL (k3) to the model that training started from; 0 keeps no copy of it."""
    max_mismatch: float | None = Field(None, gt=0)
    """Most KL (k3) between engine and trainer on a step's first minibatch; above it the engine does not serve what the
    trainer holds, or what it sampled is too old."""
    on_mismatch: Literal["stop", "skip"] = "stop"
    """What a step above max_mismatch does: end the run with an error, or leave the weights alone."""
    stop_epochs_kl: float | None = Field(None, gt=0)
    """Once a minibatch after the first pass is further than this from the engine's policy (KL, k3), the step ends."""
    lora: LoraSettings | None = None
    """Train low-rank updates of the linear layers and leave the model's own weights alone; {} takes the defaults."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic; what is trained, and the optimizer's state, are float32 either way."""
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

    @property
    def effective_old(self) -> Literal["engine", "trainer"]:
        return self.old or ("engine" if self.correction.kind == "none" else "trainer")

    @model_validator(mode="after")
    def _a_correction_starts_from_the_trainer(self) -> GrpoSettings:
        if self.old == "engine" and self.correction.kind != "none":
            raise PydanticCustomError("old", "a correction needs old: trainer, since the engine's own are its divisor")
        return self


WITHOUT_EFFECT: dict[str, tuple[str, tuple[str, ...]]] = {
    "per_agent": ("advantage", ("per_agent",)),
    "constant_tokens": ("effective_aggregation", ("constant",)),
    "dual_clip": ("loss", ("clipped", "gspo")),
}
"""An option, and the other option with the values under which alone it does something."""
