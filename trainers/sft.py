"""Supervised fine-tuning on the rollouts that did well, by TRL's SFTTrainer: rejection sampling and, step by step,
expert iteration.

It knows rewards, rows and TRL's collator; no advantage, no ratio. What holds: the loss is the mean cross-entropy of the
trainable tokens of a minibatch and of no other token, whatever the lengths of its segments; logprobs that were recorded
are not used, so neither is the temperature.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from polarlike.records import Group
from trainers import adapter
from trainers.base import TrainerOptions
from trainers.credit import group_rewards
from trainers.honours import parse
from trainers.minibatches import minibatches
from trainers.model_folder import load_model
from trainers.rows import Row, rows_of
from trainers.trl_host import Driven, Host, arguments
from trainers.trl_rows import stream
from trainers.trl_settings import SftSettings

IGNORED = -100
"""The label of a token that is not trained on, in torch and in all that builds on it."""


class ExampleTrainer(Driven, SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that can be driven step by step."""


def example(row: Row) -> dict[str, list[int]]:
    """Token ids, and labels that stand where the ids they name stand; TRL shifts them."""
    whole = stream(row)
    return {"input_ids": whole.ids.tolist(), "labels": np.where(whole.mask, whole.ids, IGNORED).tolist()}


def create(options: TrainerOptions) -> Sft:
    """The entry point. Raises UsageError on a wrong setting or a model that cannot be trained here."""
    return Sft(options)


class Sft(Host):
    """See the module; `trl_settings.SftSettings` says what can be set."""

    def __init__(self, options: TrainerOptions) -> None:
        self.settings = parse("sft", SftSettings, options.settings)
        super().__init__(options, self.settings, lambda: self._build(options))

    def _build(self, options: TrainerOptions) -> ExampleTrainer:
        config = arguments(
            SFTConfig,
            options,
            self.settings,
            max_length=None,  # TRL would cut longer segments
            packing=False,
            per_device_train_batch_size=1,
        )
        return ExampleTrainer(
            model=load_model(options.model),
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[IGNORED, 0]]}),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=adapter.lora_config(self.settings.lora) if self.settings.lora else None,
        )

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Trains on the rollouts whose reward is at least `min_reward`. The metrics are loss, grad_norm, entropy,
        token_accuracy (means over optimizer steps), rollouts, rollouts_kept, reward_mean, trainable_tokens (one pass),
        stepped, optimizer_steps, skipped_nonfinite, policy_version and seconds. Raises PolarError on a rollout without
        a score."""
        started = time.monotonic()
        rewards = [group_rewards(group) for group in groups]
        kept = [
            [
                rows
                for rows, reward in zip(by_rollout, values, strict=True)
                if rows and reward >= self.settings.min_reward
            ]
            for by_rollout, values in zip(rows_of(groups), rewards, strict=True)
        ]
        passes = minibatches(kept, self.settings.minibatch_rollouts, self.rng)
        logs = self._learn(passes) if passes else []
        taken = [log for log in logs if self.finite(log)]
        values = np.concatenate([*rewards, np.zeros(0)])
        return {
            "loss": _mean(taken, "loss"),
            "grad_norm": _mean(taken, "grad_norm"),
            "entropy": _mean(taken, "entropy"),
            "token_accuracy": _mean(taken, "mean_token_accuracy"),
            "rollouts": float(values.size),
            "rollouts_kept": float(sum(len(rollouts) for rollouts in kept)),
            "reward_mean": float(values.mean()) if values.size else 0.0,
            "trainable_tokens": float(sum(row.targets.size for rows in passes for row in rows)),
            "stepped": float(bool(taken)),
            "optimizer_steps": float(len(taken)),
            "skipped_nonfinite": float(len(logs) - len(taken)),
            "policy_version": float(self.policy_version),
            "seconds": time.monotonic() - started,
        }

    def _learn(self, passes: list[list[Row]]) -> list[dict[str, float]]:
        """Every minibatch is cut into the same number of micro-batches, which TRL weighs by their tokens."""
        longest = max(row.ids.size for rows in passes for row in rows) + 1
        size = max(1, self.settings.micro_batch_tokens // longest)
        parts = max(math.ceil(len(rows) / size) for rows in passes)
        feed: list[Any] = []
        for rows in passes:
            cuts = np.array_split(np.array(sorted(range(len(rows)), key=lambda i: rows[i].ids.size)), parts)
            feed += [self.trl.data_collator([example(rows[i]) for i in cut] or [NOTHING]) for cut in cuts]
        self.trl.feed = feed * self.settings.epochs
        return self.train(len(passes) * self.settings.epochs, parts)


NOTHING = {"input_ids": [0, 0], "labels": [IGNORED, IGNORED]}
"""Fills a micro-batch of a minibatch that has fewer rows than another has micro-batches."""


def _mean(logs: list[dict[str, float]], name: str) -> float:
    return float(np.mean([log[name] for log in logs])) if logs else 0.0
