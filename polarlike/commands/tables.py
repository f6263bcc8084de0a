"""A run's rollouts as a table: by task, or by phase where the run trains; a served run's sessions as another."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from rich.table import Table

from polarlike.records import Call, Rollout, RolloutStatus
from polarlike.rollouts.evidence import Evidence
from polarlike.rollouts.stats import summarise
from polarlike.store import SessionRecord


def counted(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Those that ended, scored or not."""
    return [r for r in rollouts if r.status in (RolloutStatus.FINISHED, RolloutStatus.UNSCORED)]


def by_task(rollouts: Iterable[Rollout]) -> Table:
    return _table("task", rollouts, lambda r: r.task_id)


def by_phase(rollouts: Iterable[Rollout]) -> Table:
    """A training run's: one row a step and an evaluation."""
    return _table("phase", rollouts, lambda r: r.group_id.partition("/")[0])


def by_session(served: Iterable[tuple[SessionRecord, list[Call]]]) -> Table:
    """What `polar serve` recorded: a row a session, with how far its replies got."""
    table = Table(title="Sessions", title_justify="left")
    table.add_column("session", no_wrap=True)
    for column in ("opened", "calls", "tokens", "versions", "replies"):
        table.add_column(column, justify="right")
    for session, calls in served:
        states = Counter(call.delivery.value for call in calls)
        table.add_row(
            session.session_id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.created)),
            str(len(calls)),
            str(sum(call.completion_ids.size for call in calls)),
            _spans(sorted({int(v) for call in calls for v in call.versions})),
            ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "-",
        )
    return table


def _table(name: str, rollouts: Iterable[Rollout], key: Callable[[Rollout], str]) -> Table:
    table = Table(title=f"Rollouts by {name}", title_justify="left")
    table.add_column(name)
    for column in ("rollouts", "unscored", "reward", "calls", "tokens", "segments", "versions"):
        table.add_column(column, justify="right")
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[key(rollout)].append(rollout)
    for title, members in sorted(groups.items()):
        table.add_row(title, *_cells(members))
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


def sandbox_line(kind: str, asked: str) -> str:
    """Which sandbox serves, said before the first agent starts."""
    why = "; Docker does not work here, and polar doctor tells why" if asked == "auto" and kind == "local" else ""
    return f"Sandbox: {kind}" + (f" (nothing is isolated{why})" if kind == "local" else "")
