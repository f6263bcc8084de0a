"""TRL's GRPOTrainer on our rows: its losses, its KL and its optimizer; our tokens, logprobs and advantages.

TRL asks for a batch of completions at the start of each optimizer step and cuts it into micro-batches. Here that batch
is what was recorded: completions and logprobs as TRL's sampler would return them, the environment's tokens masked, and
advantages a token. So one minibatch of ours is one generation batch of TRL's, and its normalisers count just our
tokens. Rows that only fill up the last micro-batch have no trainable token; where TRL divides by the number of rows,
`loss_scale` takes them out again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polarlike.records import Logprobs
from trainers import adapter
from trainers.base import TrainerOptions
from trainers.honours import parse
from trainers.losses import Shape, TokenSums, policy_loss
from trainers.metrics import Tally
from trainers.model_folder import load_model
from trainers.rows import Row
from trainers.trl_host import Driven, arguments
from trainers.trl_rows import Stream, fillers, padded, stream
from trainers.trl_settings import TrlGrpoSettings
from trainers.trl_step import GrpoHost

LOSS_TYPES = {"token": "dapo", "segment": "grpo", "constant": "dr_grpo"}
"""TRL's loss by our aggregation."""


class RowTrainer(Driven, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose completions were sampled elsewhere. sums: what was measured, one an optimizer step."""

    streams: Sequence[Stream]
    sums: list[TokenSums]
    parts: int
    shape: Shape

    def prepared(self, streams: Sequence[Stream], loss_scale: float, micro_batch_rows: int) -> dict[str, Tensor]:
        """The generation batch of the streams, with the logprobs of the policy as it is now where a loss needs them."""
        self.streams = streams
        self.num_generations = len(streams)  # TRL compares rewards of so many rows; its advantages are replaced
        self.args.per_device_train_batch_size = micro_batch_rows
        self.model.train()
        batch: dict[str, Tensor] = super()._generate_and_score_completions([{"prompt": ""} for _ in streams])
        advantages = torch.zeros(batch["completion_ids"].shape)
        for row, s in zip(advantages, streams, strict=True):
            row[: s.ids.size - s.start] = torch.from_numpy(s.advantages[s.start :])
        device = self.accelerator.device
        batch |= {"advantages": advantages.to(device), "loss_scale": torch.tensor(loss_scale, device=device)}
        batch.setdefault("old_per_token_logps", batch["sampling_per_token_logps"])
        return batch

    def begin(self, feed: list[dict[str, Tensor]], parts: int) -> None:
        """Takes the micro-batches of the next `train`: each generation batch `parts` times in a row."""
        self.feed, self.parts, self.sums = feed, parts, []
        self.args.steps_per_generation = parts
        self._step = 0

    def _generate_and_score_completions(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs  # prepared before the step began

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids = [(s.ids[: s.start].tolist(), s.ids[s.start :].tolist()) for s in self.streams]
        masks = [s.mask[s.start :].astype(int).tolist() for s in self.streams]
        logprobs = [s.logprobs[s.start :].tolist() for s in self.streams]
        return [p for p, _ in ids], [c for _, c in ids], masks, [""] * len(ids), logprobs, {}, None, []

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self._seen = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._seen

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)
        if self._step % self.parts == 0:
            self.sums.append(TokenSums())
        trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        if trained.any():
            logprobs, entropies = (x.detach()[trained] for x in self._seen[:2])
            engine, old, advantages = (
                inputs[name][trained] for name in ("sampling_per_token_logps", "old_per_token_logps", "advantages")
            )
            if self.use_vllm:  # a token without weight is not clipped
                advantages = advantages * inputs["importance_sampling_ratio"].expand(trained.shape)[trained]
            _, clipped = policy_loss(self.shape, logprobs, old, advantages, trained.nonzero()[:, 0])
            self.sums[-1].add(logprobs, engine, clipped, entropies, old_logprobs=old)
        return loss * inputs["loss_scale"]


def no_reward(prompts: list[Any], **_: Any) -> list[float]:
    """TRL wants a reward function; ours were given by verifiers."""
    return [0.0] * len(prompts)


def create(options: TrainerOptions) -> TrlGrpo:
    """The entry point. Raises UsageError on a wrong setting or a model that cannot be trained here."""
    return TrlGrpo(options)


class TrlGrpo(GrpoHost):
    """See the module; `trl_settings.TrlGrpoSettings` says what can be set."""

    name = "trl-grpo"
    shares_prefixes = False
    settings: TrlGrpoSettings

    def __init__(self, options: TrainerOptions) -> None:
        super().__init__(options, parse("trl-grpo", TrlGrpoSettings, options.settings), lambda: self._build(options))

    def _build(self, options: TrainerOptions) -> RowTrainer:
        s = self.settings
        low, high = s.correction.bounds
        corrects = s.correction.kind != "none"
        cispo = s.loss == "cispo"
        kept = "truncate" if s.correction.kind == "tis" else "mask"
        config = arguments(
            GRPOConfig,
            options,
            s,
            usual={"use_bias_correction_kl": False},
            loss_type="cispo" if cispo else LOSS_TYPES[s.effective_aggregation],
            importance_sampling_level="sequence" if s.loss == "gspo" else "token",
            epsilon=s.clip_low,
            epsilon_high=1 + s.clip_high if cispo else s.clip_high,
            delta=s.dual_clip,
            beta=s.kl_coef,
            temperature=s.temperature,
            vllm_importance_sampling_correction=corrects,
            vllm_importance_sampling_mode=f"{s.correction.level}_{kept}",
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=1,  # dr_grpo divides by it
        )
        trainer = RowTrainer(
            model=load_model(options.model),
            reward_funcs=no_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=adapter.lora_config(s.lora) if s.lora else None,
        )
        trainer.use_vllm = corrects  # only now: no server is started, and recorded logprobs count as vLLM's
        trainer.shape = Shape(s.loss, s.clip_low, s.clip_high, s.dual_clip)
        return trainer

    def learn(self, passes: Sequence[list[Row]], tally: Tally) -> tuple[list[dict[str, float]], list[TokenSums]]:
        trainer: RowTrainer = self.trl
        batches = [[stream(row) for row in rows] for rows in passes]
        sizes = [max(1, self.settings.micro_batch_tokens // _width(streams)) for streams in batches]
        parts = max(math.ceil(len(streams) / size) for streams, size in zip(batches, sizes, strict=True))
        prepared = []
        for streams, size in zip(batches, sizes, strict=True):
            filled = streams + fillers(padded(len(streams), parts) - len(streams))
            prepared.append(trainer.prepared(filled, self._loss_scale(len(streams), len(filled)), size))
            if trainer.use_vllm:
                tally.add_correction(_correction(prepared[-1]))
        steps = len(passes) * self.settings.epochs
        trainer.begin([batch for _ in range(self.settings.epochs) for batch in prepared for _ in range(parts)], parts)
        return self.train(steps, parts), trainer.sums

    def _loss_scale(self, rows: int, filled: int) -> float:
        """Takes rows that fill up out of the number that TRL divides by."""
        if self.settings.effective_aggregation == "token":
            return 1.0
        return filled / (rows if self.settings.effective_aggregation == "segment" else self.settings.constant_tokens)


def _correction(batch: dict[str, Tensor]) -> Logprobs:
    """The weights of the trainable tokens, float32 [N]."""
    weights = batch["importance_sampling_ratio"].expand(batch["completion_ids"].shape)
    trained: Logprobs = weights[(batch["completion_mask"] * batch["tool_mask"]).bool()].cpu().numpy()
    return trained


def _width(streams: Sequence[Stream]) -> int:
    """How wide TRL pads these: the longest prompt and the longest completion."""
    return max(s.start for s in streams) + max(s.ids.size - s.start for s in streams)
