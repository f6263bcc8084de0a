"""A run's record held against the engine's own log: the only evidence that does not compare a record with itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlike.engines.log import read_log
from polarlike.records import RolloutStatus
from polarlike.store import Store
from reconstruct.evidence import compare_with_engine_log


@dataclass(slots=True)
class Evidence:
    """Token counts over all finished rollouts. equal: trainable tokens whose context, id and logprob are the log's."""

    rollouts: int = 0
    trainable: int = 0
    equal: int = 0
    first_mismatch: dict[str, Any] | None = None

    @property
    def share(self) -> float | None:
        """None where nothing was trainable."""
        return self.equal / self.trainable if self.trainable else None


def audit(store: Store, engine_log: Path) -> Evidence:
    log = read_log(engine_log)
    found = Evidence()
    for rollout in store.rollouts():
        if rollout.status not in (RolloutStatus.FINISHED, RolloutStatus.UNSCORED):
            continue
        result = compare_with_engine_log(store.calls(rollout.session_id), log)
        found.rollouts += 1
        found.trainable += result["trainable"]
        found.equal += result["equal"]
        found.first_mismatch = found.first_mismatch or result["first_mismatch"]
    return found
