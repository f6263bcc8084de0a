"""A GRPO step on TRL: groups in, rows and minibatches as our own trainer has them, metrics out. Knows credit, rows and
the host; no loss and no data format of TRL's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from polarlike.records import Group
from trainers.base import TrainerOptions
from trainers.batch import micro_batches
from trainers.credit import rows_with_advantages
from trainers.losses import TokenSums, aggregation_weights
from trainers.metrics import Tally, reward_metrics
from trainers.minibatches import minibatches
from trainers.rows import Row, token_index
from trainers.trl_host import Host, quiet
from trainers.trl_rows import same_temperature
from trainers.trl_settings import TrlAsyncGrpoSettings, TrlGrpoSettings


class GrpoHost(Host):
    """A Host whose step is GRPO's. shares_prefixes: whether tokens that rows share are forwarded once."""

    name: str
    shares_prefixes: bool

    def __init__(
        self, options: TrainerOptions, settings: TrlGrpoSettings | TrlAsyncGrpoSettings, build: Callable[[], Any]
    ) -> None:
        self.settings = settings
        super().__init__(options, settings, build)

    def learn(self, passes: Sequence[list[Row]], tally: Tally) -> tuple[list[dict[str, float]], list[TokenSums]]:
        """Goes through the minibatches `epochs` times; what TRL logged, and sums over tokens, a optimizer step each."""
        raise NotImplementedError

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Trains on the groups whose rewards differ; the keys are explained in `metrics`."""
        started = time.monotonic()
        credit = rows_with_advantages(groups, self.settings)
        same_temperature(
            [row for rollouts in credit.rows for own in rollouts for row in own], self.settings.temperature, self.name
        )
        tally = Tally(self.policy_version, credit.rows)
        passes = minibatches(credit.rows, self.settings.minibatch_rollouts, self.rng)
        if passes:
            self._count(passes, tally)
            with quiet():
                logs, sums_of = self.learn(passes, tally)
            for log, sums in zip(logs, sums_of, strict=True):
                tally.add_minibatch(sums, log["loss"], log["grad_norm"], self.finite(log))
        return {
            **reward_metrics(groups, credit),
            **tally.metrics(),
            "policy_version": float(self.policy_version),
            "seconds": time.monotonic() - started,
        }

    def weights_of(self, rows: Sequence[Row]) -> Any:
        """The weight of each trainable token of a minibatch in its loss, float32 [N]."""
        return aggregation_weights(
            self.settings.effective_aggregation, *token_index(rows), self.settings.constant_tokens
        )

    def _count(self, passes: Sequence[list[Row]], tally: Tally) -> None:
        for rows in passes:
            whole = sum(row.ids.size for row in rows)
            for batch in micro_batches(rows, self.weights_of(rows), whole, share_prefixes=self.shares_prefixes):
                for _ in range(self.settings.epochs):
                    tally.add_batch(batch)
