"""The tables of the config of the trainers that run on TRL. Knows pydantic; no torch, no TRL.

A trainer honours what its table has and nothing else. What TRL has beyond it goes through the table `trl`, whose keys
are checked against TRL's own when the trainer starts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainers.settings import CorrectionSettings, CreditSettings, LoraSettings, Table


class TrlSettings(Table):
    """What the three have in common."""

    lr: float = Field(default=2e-4, gt=0)
    """AdamW's learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay; norms and biases have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the rollouts in one step."""
    minibatch_rollouts: int = Field(default=24, ge=1)
    """Most rollouts an optimizer step sees; a pass is split evenly."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one forward, if no segment is longer; this bounds memory."""
    recompute_layers: bool = False
    """Keep one activation a layer and token and compute the rest again in backward: less memory, a third more work."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the arithmetic; parameters and the optimizer's state are float32 either way."""
    lora: LoraSettings | None = None
    """Train low-rank updates of the linear layers and leave the model's own weights alone; {} takes the defaults."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    trl: dict[str, Any] = Field(default={})
    """Arguments of TRL's own configuration, by its names; those that an option above stands for are refused."""


class ClipSettings(CreditSettings):
    """The clipped ratio, in both GRPO trainers of TRL."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped above 1 + clip_high."""
    constant_tokens: float = Field(default=16384.0, gt=0)
    """What `aggregation: constant` divides the sum over a minibatch's tokens by."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature that all segments were sampled at."""


class TrlCorrectionSettings(CorrectionSettings):
    """Of `correction`."""

    level: Literal["token", "sequence"] = "token"
    """Of tis and mis: the ratio of each token, or its product over a segment."""


class TrlGrpoSettings(TrlSettings, ClipSettings):
    """TRL's GRPOTrainer."""

    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    """PPO's clipped ratio by token; by segment (gspo); or the clipped ratio as a fixed weight of log pi (cispo, which
    TRL bounds above only: it needs clip_low 1)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, no ratio above this counts as more than it (TRL: delta)."""
    correction: TrlCorrectionSettings = TrlCorrectionSettings()
    """Weighs each token by how the trainer's probability for it at the start of the step differs from the engine's; the
    ratio then starts from the trainer's."""
    aggregation: Literal["token", "segment", "constant"] | None = None
    """What weighs the same in the loss (TRL: dapo, grpo, dr_grpo); unset: `constant` with dr_grpo, else `token`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL (k3) to the model that training started from; 0 keeps no copy of it."""

    @property
    def effective_aggregation(self) -> Literal["token", "segment", "constant"]:
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")

    @model_validator(mode="after")
    def _what_trl_computes(self) -> TrlGrpoSettings:
        if self.loss == "cispo" and (self.clip_low != 1 or self.effective_aggregation != "token"):
            raise PydanticCustomError("cispo", "TRL's cispo needs clip_low: 1 and aggregation: token; grpo takes any")
        if self.dual_clip is not None and self.dual_clip < 1 + self.clip_high:
            raise PydanticCustomError("dual_clip", "TRL's dual_clip must be at least 1 + clip_high; grpo takes any")
        return self


class TrlAsyncGrpoSettings(TrlSettings, ClipSettings):
    """TRL's experimental AsyncGRPOTrainer."""

    aggregation: Literal["token", "segment", "rollout", "constant"] | None = None
    """What weighs the same in the loss; unset: `constant` with dr_grpo, else `token`."""

    @property
    def effective_aggregation(self) -> Literal["token", "segment", "rollout", "constant"]:
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")


class SftSettings(TrlSettings):
    """TRL's SFTTrainer on the rollouts that did well."""

    min_reward: float = 1.0
    """Rollouts with a lower reward are left out."""
