"""The GRPO trainer over any causal model of transformers: scored groups in, new weights out.

It knows credit, batches, losses and guards, and nothing of rollouts, engines or files of a run; `policy` has the model.
Three policies meet in a step: pi_engine, which sampled and whose logprobs were recorded; pi_start, the trainer's own at
the start of the step; and pi, being trained. The ratio is pi / pi_engine by default, so that the clip bounds what is
stale and what differs in numerics alike; with `old: trainer` it is pi / pi_start, and a `correction` weighs each token
by a bounded pi_start / pi_engine.

What holds:
- Only scored rollouts enter; a rollout without a score is an error, never a zero.
- The policy version is raised exactly when weights changed: a step in which nothing can teach, or whose every gradient
  was not finite, leaves both as they were.
- Given the seed and the groups, a step is a function: resuming from a checkpoint gives the bits it would have given.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polarlike.engines.base import PolicyWeights
from polarlike.records import Group, Ids, Logprobs, PolarError
from trainers import checkpoints
from trainers.base import TrainerOptions
from trainers.batch import MicroBatch, micro_batches
from trainers.correction import correction_weights
from trainers.credit import rows_with_advantages
from trainers.forward import tensor
from trainers.honours import parse
from trainers.losses import Shape, TokenSums, aggregation_weights, k3, policy_loss
from trainers.metrics import Tally, reward_metrics
from trainers.minibatches import minibatches
from trainers.policy import Policy
from trainers.rows import Row, scoring_row, token_index
from trainers.settings import GrpoSettings


def create(options: TrainerOptions) -> Grpo:
    """The entry point. Raises UsageError on a wrong setting or a model that cannot be trained here."""
    return Grpo(options)


class Grpo:
    """See the module; `settings.GrpoSettings` says what can be set."""

    def __init__(self, options: TrainerOptions) -> None:
        self.settings = parse("grpo", GrpoSettings, options.settings)
        self.policy_version = 0
        self.policy = Policy(options.model, self.settings, options.seed)
        self._shape = Shape(**{name: getattr(self.settings, name) for name in Shape.__slots__})
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.settings.lr, weight_decay=self.settings.weight_decay
        )
        self._rng = np.random.default_rng(options.seed)

    # ------------------------------------------------------------ a step

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Trains on what can teach; the keys are explained in `metrics`. Raises PolarError on a rollout that cannot be
        trained on, and above max_mismatch where that stops the run; the weights are then what they were."""
        started = time.monotonic()
        credit = rows_with_advantages(groups, self.settings)
        tally = Tally(self.policy_version, credit.rows)
        if self.settings.effective_old == "trainer":
            self._take_start([row for group in credit.rows for rows in group for row in rows], tally)
        for epoch, rows in self._passes(credit.rows):
            if not self._optimize(rows, epoch, tally):
                break
        if tally.optimizer_steps:
            self.policy_version += 1
        return {
            **reward_metrics(groups, credit),
            **tally.metrics(),
            "policy_version": float(self.policy_version),
            "seconds": time.monotonic() - started,
        }

    def _passes(self, rollouts: list[list[list[Row]]]) -> Iterator[tuple[int, list[Row]]]:
        """Which pass it is, and the rows of one optimizer step."""
        for epoch in range(self.settings.epochs):
            for rows in minibatches(rollouts, self.settings.minibatch_rollouts, self._rng):
                yield epoch, rows

    def _take_start(self, rows: list[Row], tally: Tally) -> None:
        """Makes the trainer's own logprobs what ratios start from, and weighs advantages by the correction. (Every loss
        is homogeneous in the advantage, so a weight on it is a weight on the loss.)"""
        correction = self.settings.correction
        for row, logprobs in self._score(rows):
            row.old_logprobs = logprobs
            if correction.kind == "none":
                continue
            log_ratio = (logprobs - row.engine_logprobs).astype(np.float64)
            weights = correction_weights(log_ratio, correction.kind, correction.level, *correction.bounds)
            row.advantages = row.advantages * weights
            tally.add_correction(weights)

    def _optimize(self, rows: list[Row], epoch: int, tally: Tally) -> bool:
        """One optimizer step on one minibatch; False ends the training step. A loss or gradient that is not finite
        leaves the weights untouched, and so does a guard."""
        settings = self.settings
        weights = aggregation_weights(settings.effective_aggregation, *token_index(rows), settings.constant_tokens)
        self._optimizer.zero_grad(set_to_none=True)
        sums = TokenSums()
        loss = 0.0
        for batch in self._batches(rows, weights):
            part = self._loss(batch, sums)
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            tally.add_batch(batch)
        try:
            if not self._within_bounds(sums, epoch, tally):
                return False
            norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm))
            finite = math.isfinite(loss) and math.isfinite(norm)
            if finite:
                self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        tally.add_minibatch(sums, loss, norm, finite)
        return True

    def _within_bounds(self, sums: TokenSums, epoch: int, tally: Tally) -> bool:
        kl, bounds = sums.means()["kl_k3"], self.settings
        if tally.first is None and bounds.max_mismatch is not None and not kl <= bounds.max_mismatch:
            if bounds.on_mismatch == "stop":
                raise PolarError(
                    f"The engine's logprobs differ from the trainer's by a KL of {kl:.2g} where "
                    f"max_mismatch allows {bounds.max_mismatch:.2g}: it serves other weights, another dtype or another "
                    "logprob mode than the trainer has, or the rollouts are too old; mend that, or raise max_mismatch."
                )
            tally.end("mismatch", sums)
            return False
        if epoch and bounds.stop_epochs_kl is not None and not kl <= bounds.stop_epochs_kl:
            tally.end("epochs_kl", sums)
            return False
        return True

    def _loss(self, batch: MicroBatch, sums: TokenSums) -> Tensor:
        logprobs, entropy = self.policy.logprobs(batch)
        engine, old, advantages, weights, segment = (
            tensor(array, self.policy.device)
            for array in (batch.engine_logprobs, batch.old_logprobs, batch.advantages, batch.weights, batch.row)
        )
        losses, clipped = policy_loss(self._shape, logprobs, old, advantages, segment)
        if self.settings.kl_coef:
            losses = losses + self.settings.kl_coef * k3(self.policy.reference_logprobs(batch), logprobs)
        with torch.no_grad():
            sums.add(logprobs, engine, clipped, entropy, old)
        return (losses * weights).sum()

    # ------------------------------------------------------------ scoring

    def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start], through the same packed forward as a step."""
        [(_, logprobs)] = self._score([scoring_row(ids, start, temperature)])
        return logprobs

    @torch.no_grad()
    def _score(self, rows: list[Row]) -> Iterator[tuple[Row, Logprobs]]:
        """Each row with the logprobs of its trainable tokens as the policy stands."""
        for batch in self._batches(rows, np.zeros(sum(row.targets.size for row in rows), np.float32)):
            logprobs: Logprobs = self.policy.logprobs(batch)[0].cpu().numpy()
            cuts = np.cumsum([row.targets.size for row in batch.rows])[:-1]
            yield from zip(batch.rows, np.split(logprobs, cuts), strict=True)

    def _batches(self, rows: list[Row], weights: Logprobs) -> list[MicroBatch]:
        settings = self.settings
        return micro_batches(rows, weights, settings.micro_batch_tokens, share_prefixes=settings.share_prefixes)

    # ------------------------------------------------------------ weights and checkpoints

    def weights(self) -> PolicyWeights:
        return self.policy.weights()

    def save_model(self, folder: Path) -> None:
        self.policy.save_model(folder)

    def save(self, folder: Path) -> None:
        """Writes model/ or adapter/, optimizer.pt, trainer.json (version, random state, settings), manifest."""
        checkpoints.write(folder, self._fill)

    def _fill(self, folder: Path) -> None:
        self.policy.fill(folder)
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
        optimizer = torch.load(folder / "optimizer.pt", map_location=self.policy.device, weights_only=True)
        self.policy.load(folder)
        self._optimizer.load_state_dict(optimizer)
        for table in self._optimizer.param_groups:
            table["lr"], table["weight_decay"] = self.settings.lr, self.settings.weight_decay
        self._rng.bit_generator.state = state["rng"]
        self.policy_version = int(state["policy_version"])
