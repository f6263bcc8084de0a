"""TRL's experimental AsyncGRPOTrainer on our rows: its prefix sharing, its clipped loss and its optimizer.

TRL trains on what a rollout worker puts into a queue, as it comes. Here the worker is our loop: a step fills the queue
with its rows, TRL empties it, and the new weights leave by our own way of publishing. TRL's loss is the mean over the
tokens of a micro-batch, whatever else a minibatch holds; the clipped loss is linear in the advantage, so a factor on
each advantage gives every token the weight that `aggregation` asks for. A stream whose tokens differ in advantage is
queued once for each of them: TRL forwards the tokens that they share once.

Off CUDA two parts of TRL do not run: its attention over shared prefixes is a CUDA kernel, and it asks the CUDA driver
for the device's peak speed. `tree_attention` stands in for the first, and the second is answered with unknown. On CUDA
nothing is replaced.
"""

from __future__ import annotations

import math
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from polarlike.records import Group, Ids, Logprobs, PolarError
from trainers import adapter
from trainers.base import TrainerOptions
from trainers.batch import micro_batches
from trainers.honours import parse
from trainers.losses import TokenSums
from trainers.metrics import Tally
from trainers.model_folder import check_folder
from trainers.rows import Row
from trainers.trl_host import Driven, arguments
from trainers.trl_rows import Stream, by_advantage, fillers, stream
from trainers.trl_settings import TrlAsyncGrpoSettings
from trainers.trl_step import GrpoHost

NEVER = sys.maxsize


class Worker:
    """TRL's RolloutWorkerProtocol. What a step trains on is in the queue before TRL begins."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise PolarError("TRL asked for more rows than the step has; report this.")


class NoTransfer:
    """TRL's WeightTransferProtocol. Weights leave by `Trainer.weights` and the engine's own publishing."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class QueueTrainer(Driven, AsyncGRPOTrainer):  # type: ignore[misc]
    """AsyncGRPOTrainer that can be driven step by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rollout_dataset = async_grpo_trainer.RolloutQueueDataset(
            rollout_queue=self.rollout_queue,
            model_version_fn=lambda: self.model_version,
            check_health_fn=self.rollout_worker.check_health,
            stale_after_s=0.0,
            metrics=self._metrics["train"],
            max_staleness=NEVER,  # what is too old is for the loop to say
            poll_interval_s=0.1,
        )

    def get_train_dataloader(self) -> Any:
        """TRL's own batcher and collator; without accelerate's loader, which looks one micro-batch ahead, into a queue
        that is empty when a step ends."""
        batcher = async_grpo_trainer.FixedCountBatcher(self._rollout_dataset, 1, self.args.per_device_train_batch_size)
        collate = async_grpo_trainer.DataCollatorForRollout(
            self.processing_class.pad_token_id, metrics=self._metrics["train"]
        )
        return DataLoader(batcher, batch_size=1, collate_fn=collate)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What TRL's kernel computes, by torch's own attention: query [1, H, P, D], key and value [1, H_kv, P, D], to
    [1, P, H, D].

    Queries tree_cu_seqlens_q[i]:[i + 1] attend to the keys at tree_kv_index[tree_cu_seqlens_k[i]:[i + 1]], the tokens
    from the root of their prefix tree to themselves; the last query sees all of these, the one before all but the last.
    """
    out = torch.empty_like(query)
    starts_q, starts_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        q = query[:, :, starts_q[i] : starts_q[i + 1]]
        path = tree_kv_index[starts_k[i] : starts_k[i + 1]]
        offset = path.numel() - q.shape[2]
        distance = torch.arange(q.shape[2])[:, None] + offset - torch.arange(path.numel())
        seen = distance >= 0
        if sliding_window:
            seen &= distance < sliding_window
        part = functional.scaled_dot_product_attention(
            q, key[:, :, path], value[:, :, path], seen, scale=scaling, enable_gqa=True
        )
        out[:, :, starts_q[i] : starts_q[i + 1]] = part
    return out.transpose(1, 2), None


def create(options: TrainerOptions) -> TrlAsyncGrpo:
    """The entry point. Raises UsageError on a wrong setting or a model that cannot be trained here."""
    return TrlAsyncGrpo(options)


class TrlAsyncGrpo(GrpoHost):
    """See the module; `trl_settings.TrlAsyncGrpoSettings` says what can be set."""

    name = "trl-async-grpo"
    shares_prefixes = True
    settings: TrlAsyncGrpoSettings

    def __init__(self, options: TrainerOptions) -> None:
        settings = parse("trl-async-grpo", TrlAsyncGrpoSettings, options.settings)
        super().__init__(options, settings, lambda: self._build(options))

    def _build(self, options: TrainerOptions) -> QueueTrainer:
        s = self.settings
        check_folder(options.model)
        config = arguments(
            AsyncGRPOConfig,
            options,
            s,
            epsilon=s.clip_low,
            epsilon_high=s.clip_high,
            temperature=s.temperature,
            dtype="float32",
            token_budget=0,
            weight_sync_steps=NEVER,
            max_inflight_tasks=1,
        )
        on_cuda = config.device.type == "cuda"
        no_peak = mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
        with mock.patch.multiple(async_grpo_trainer) if on_cuda else no_peak:
            trainer = QueueTrainer(
                model=str(options.model),
                args=config,
                train_dataset=Dataset.from_dict({"prompt": [""]}),
                processing_class=AutoTokenizer.from_pretrained(options.model),
                peft_config=adapter.lora_config(s.lora) if s.lora else None,
                rollout_worker=Worker(),
                weight_transfer=NoTransfer(),
            )
        if not on_cuda:
            AttentionInterface.register(TREE_ATTENTION, tree_attention)
        return trainer

    def learn(self, passes: Sequence[list[Row]], tally: Tally) -> tuple[list[dict[str, float]], list[TokenSums]]:
        batches = [self._scaled(rows) for rows in passes]
        fewest = min(len(streams) for streams in batches)
        parts = min(fewest, max(self._parts(rows) for rows in passes))  # TRL cannot take a micro-batch without a token
        rows = max(math.ceil(len(streams) / parts) for streams in batches)
        for streams in batches * self.settings.epochs:
            self._enqueue(streams, parts, rows)
        self.trl.args.per_device_train_batch_size = rows
        self.trl.model_version = self.policy_version
        logs = self.train(len(passes) * self.settings.epochs, parts)
        tokens = [sum(row.targets.size for row in rows) for rows in passes] * self.settings.epochs
        return logs, [_sums(log, n) for log, n in zip(logs, tokens, strict=True)]

    def _parts(self, rows: list[Row]) -> int:
        """Micro-batches that hold the rows within `micro_batch_tokens`, shared prefixes counted once."""
        return len(micro_batches(rows, self.weights_of(rows), self.settings.micro_batch_tokens))

    def _scaled(self, rows: list[Row]) -> list[Stream]:
        """The streams of a minibatch, every advantage times its tokens' weight in the loss. Neighbours share a prefix,
        and a micro-batch is a run of neighbours."""
        weights = np.split(self.weights_of(rows), np.cumsum([row.targets.size for row in rows])[:-1])
        pairs = sorted(zip(rows, weights, strict=True), key=lambda pair: pair[0].ids.astype(">u4").tobytes())
        return [part for row, weight in pairs for part in by_advantage(stream(row, row.advantages * weight))]

    def _enqueue(self, streams: list[Stream], parts: int, rows: int) -> None:
        for part in np.array_split(np.arange(len(streams)), parts):
            chosen = [streams[i] for i in part]
            # TRL divides by the micro-batch's tokens and by the number of micro-batches.
            factor = sum(int(s.mask.sum()) for s in chosen) * parts
            for s in chosen + fillers(rows - len(chosen)):
                self.trl.rollout_queue.put(_sample(s, factor, self.policy_version))

    def step(self, groups: list[Group]) -> dict[str, float]:
        metrics = super().step(groups)
        del metrics["ratio_max"]  # TRL does not tell
        return metrics

    def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start], as a tree of one branch."""
        whole = torch.tensor([0, ids.size], dtype=torch.int32, device=self.device)
        return self.score_with(
            ids,
            start,
            temperature,
            position_ids=torch.arange(ids.size, device=self.device)[None],
            tree_kv_index=torch.arange(ids.size, device=self.device),
            tree_cu_seqlens_q=whole,
            tree_cu_seqlens_k=whole,
            tree_max_seqlen_q=ids.size,
            tree_max_seqlen_k=ids.size,
        )


def _sample(s: Stream, factor: float, version: int) -> RolloutSample:
    advantage = float(s.advantages[s.start]) * factor
    return RolloutSample([], [], s.ids, s.mask.astype(np.int64), s.logprobs, advantage, version, 0, {})


def _sums(log: Mapping[str, float | None], tokens: int) -> TokenSums:
    """What TRL measured of an optimizer step: means over its micro-batches, None where none of them is a number."""
    kl, clipped, entropy = (
        math.nan if value is None else value * tokens
        for value in (log["kl"], log["clip_ratio/region_mean"], log["entropy"])
    )
    return TokenSums(tokens, kl, clipped, entropy, 0.0)
