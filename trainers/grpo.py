"""The GRPO trainer over any causal model of transformers: scored groups in, new weights out.

It knows advantages, batches, the forward and the loss, and nothing of rollouts, engines or files of a run. The "old"
logprobs of the ratio are the ones the engine recorded when it sampled: the ratio is against the behaviour policy, so it
corrects for stale tokens and for numerical differences between engine and trainer alike, within the clip.

What holds:
- Only scored rollouts enter; a rollout without a score is an error, never a zero.
- The policy version is raised exactly when weights changed: a step in which no group's rewards differ, or whose every
  gradient was not finite, leaves both as they were.
- Given the seed and the groups, a step is a function: resuming from a checkpoint gives the bits it would have given.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polarlike.engines.base import PolicyWeights
from polarlike.records import Group, Ids, Logprobs, PolarError, UsageError
from trainers import checkpoints
from trainers.base import TrainerOptions
from trainers.batch import MicroBatch, micro_batches
from trainers.credit import rows_with_advantages
from trainers.forward import prepare, recompute_layers, tensor, token_logprobs
from trainers.honours import parse
from trainers.losses import TokenSums, aggregation_weights, clipped_ratio, is_clipped, k3
from trainers.metrics import Tally, reward_metrics
from trainers.rows import Row, scoring_row, token_index
from trainers.settings import GrpoSettings

TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates", "generation_config.json",
)  # fmt: skip
"""What is copied beside the weights, so that an engine can serve a saved folder as it served the first one."""


def create(options: TrainerOptions) -> Grpo:
    """The entry point. Raises UsageError on a wrong setting or a model that cannot be trained here."""
    return Grpo(options)


class Grpo:
    """See the module; `settings.GrpoSettings` says what can be set. Parameters and optimizer state are float32."""

    def __init__(self, options: TrainerOptions) -> None:
        self.settings = parse("grpo", GrpoSettings, options.settings)
        self.policy_version = 0
        self._start = options.model
        self._device = _device(self.settings.device)
        self._model = self._load_model(options.model)
        if self.settings.recompute_layers:
            recompute_layers(self._model)
        self._reference = self._load_model(options.model).requires_grad_(False) if self.settings.kl_coef else None
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self.settings.lr, weight_decay=self.settings.weight_decay
        )
        self._rng = np.random.default_rng(options.seed)

    def _load_model(self, folder: Path) -> Any:
        model = _from_folder(folder).to(self._device)
        # Without dropout, as the engine samples: a fresh policy's ratio is then exactly its numerical mismatch.
        model.eval()
        prepare(model, share_prefixes=self.settings.share_prefixes)
        return model

    # ------------------------------------------------------------ a step

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Trains on the groups whose rewards differ; the keys are explained in `metrics`."""
        started = time.monotonic()
        credit = rows_with_advantages(groups, self.settings)
        tally = Tally(self.policy_version, credit.rows)
        for _ in range(self.settings.epochs):
            for rows in self._minibatches(credit.rows):
                self._optimize(rows, tally)
        if tally.optimizer_steps:
            self.policy_version += 1
        return {
            **reward_metrics(groups, credit),
            **tally.metrics(),
            "policy_version": float(self.policy_version),
            "seconds": time.monotonic() - started,
        }

    def _minibatches(self, rollouts: list[list[list[Row]]]) -> list[list[Row]]:
        """One pass in random order, split evenly. A group stays together: its rollouts share the longest prefixes."""
        order: list[list[Row]] = []
        for g in self._rng.permutation(len(rollouts)):
            order += [rollouts[g][i] for i in self._rng.permutation(len(rollouts[g]))]
        parts = math.ceil(len(order) / self.settings.minibatch_rollouts)
        cuts = np.array_split(np.arange(len(order)), parts) if parts else []
        return [[row for i in cut for row in order[i]] for cut in cuts]

    def _optimize(self, rows: list[Row], tally: Tally) -> None:
        """One optimizer step on one minibatch; a loss or gradient that is not finite leaves the weights untouched."""
        settings = self.settings
        weights = aggregation_weights(settings.effective_aggregation, *token_index(rows), settings.constant_tokens)
        self._optimizer.zero_grad(set_to_none=True)
        sums = TokenSums()
        loss = 0.0
        batches = micro_batches(rows, weights, settings.micro_batch_tokens, share_prefixes=settings.share_prefixes)
        for batch in batches:
            part = self._loss(batch, sums)
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            tally.add_batch(batch)
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tally.add_minibatch(sums, loss, norm, finite)

    def _loss(self, batch: MicroBatch, sums: TokenSums) -> Tensor:
        settings = self.settings
        logprobs, entropy = token_logprobs(self._model, batch, tree=settings.share_prefixes)
        old, advantages, weights = (
            tensor(array, self._device) for array in (batch.old_logprobs, batch.advantages, batch.weights)
        )
        clip = (settings.clip_low, settings.clip_high)
        losses = clipped_ratio(logprobs, old, advantages, *clip)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(self._reference, batch, tree=settings.share_prefixes)
            losses = losses + settings.kl_coef * k3(reference, logprobs)
        with torch.no_grad():
            sums.add(logprobs, old, is_clipped(logprobs, old, advantages, *clip), entropy)
        return (losses * weights).sum()

    # ------------------------------------------------------------ weights and checkpoints

    def weights(self) -> PolicyWeights:
        """The tensors are the live parameters: copy them before the next step begins."""
        return PolicyWeights(self._model.state_dict, self.save_model)

    def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start], through the same packed forward as a step."""
        row = scoring_row(ids, start, temperature)
        share = self.settings.share_prefixes
        weights = np.zeros(row.targets.size, np.float32)
        [batch] = micro_batches([row], weights, self.settings.micro_batch_tokens, share_prefixes=share)
        with torch.no_grad():
            logprobs, _ = token_logprobs(self._model, batch, tree=share)
        scores: Logprobs = logprobs.float().cpu().numpy()
        return scores

    def save_model(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in float32, with the tokenizer and chat template it started with."""
        with checkpoints.saving(folder), _no_progress_bars():
            folder.mkdir(parents=True, exist_ok=True)
            self._model.save_pretrained(folder)
            for pattern in TOKENIZER_FILES:
                for path in self._start.glob(pattern):
                    if path.is_dir():
                        shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                    else:
                        shutil.copyfile(path, folder / path.name)

    def save(self, folder: Path) -> None:
        """A checkpoint: model/, optimizer.pt, trainer.json (version, random state, settings) and a manifest."""
        checkpoints.write(folder, self._fill)

    def _fill(self, folder: Path) -> None:
        self.save_model(folder / "model")
        torch.save(self._optimizer.state_dict(), folder / "optimizer.pt")
        state = {
            "policy_version": self.policy_version,
            "rng": self._rng.bit_generator.state,
            "settings": self.settings.model_dump(),
        }
        (folder / "trainer.json").write_text(json.dumps(state, indent=1))

    def load(self, folder: Path) -> None:
        """Takes up a checkpoint; the settings stay those of this trainer. Raises PolarError if it is torn or of another
        model, and then changes nothing."""
        checkpoints.check(folder)
        state = json.loads((folder / "trainer.json").read_text())
        optimizer = torch.load(folder / "optimizer.pt", map_location=self._device, weights_only=True)
        weights = _from_folder(folder / "model").state_dict()
        mine = self._model.state_dict()
        if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in mine.items()}:
            raise PolarError(f"The checkpoint {folder} is of another model than {self._start}; start from that model.")
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer)
        for table in self._optimizer.param_groups:
            table["lr"], table["weight_decay"] = self.settings.lr, self.settings.weight_decay
        self._rng.bit_generator.state = state["rng"]
        self.policy_version = int(state["policy_version"])


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises the latter
        reason = str(error).splitlines()[0]
        raise UsageError(f"The trainer cannot use device {name} ({reason}); set device: cpu or auto.") from None


def _from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder (it has no config.json); name one with --model.")
    with _no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws one for every load and save, across the progress display of the command."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
