"""A run's rollouts as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rich.table import Table

from polarlike.records import Rollout
from polarlike.rollouts.evidence import Evidence
from polarlike.rollouts.stats import summarise


def by_task(rollouts: Iterable[Rollout]) -> Table:
    table = Table(title="Rollouts by task", title_justify="left")
    table.add_column("task")
    for name in ("rollouts", "unscored", "reward", "calls", "tokens", "segments", "versions"):
        table.add_column(name, justify="right")
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.task_id].append(rollout)
    for task_id, members in sorted(groups.items()):
        table.add_row(task_id, *_cells(members))
    everything = [r for members in groups.values() for r in members]
    table.add_section()
    table.add_row("all", *_cells(everything))
    return table


def _cells(rollouts: list[Rollout]) -> list[str]:
    found = summarise(rollouts)
    reports = [r.fidelity for r in rollouts if r.fidelity]
    versions = sorted({int(v) for report in reports for v in report["versions"]})
    return [
        str(len(rollouts)),
        str(found.unscored),
        f"{found.reward.value:.3f}" if found.reward else "-",
        str(sum(report["calls"] for report in reports)),
        str(sum(report["tokens"]["sampled"] for report in reports)),
        str(sum(report["segments"] for report in reports)),
        _spans(versions),
    ]


def _spans(versions: list[int]) -> str:
    if not versions:
        return "-"
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}..{versions[-1]}"


def fidelity_line(evidence: Evidence) -> str:
    """One sentence: how much of what is trained stood in the engine's own log."""
    if evidence.share is None:
        return "Fidelity: no trainable tokens."
    return (
        f"Fidelity: {100 * evidence.share:.2f} % of {evidence.trainable} trainable tokens have the context, id and "
        f"logprob of the engine's own log ({evidence.rollouts} rollouts)."
    )
