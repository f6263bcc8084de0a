"""polar collect and polar eval: rollouts to disk, scored."""

from __future__ import annotations

from rich.console import Console

from polarlike.commands import tables
from polarlike.commands.progress import RolloutProgress
from polarlike.config import RunConfig
from polarlike.records import PolarError
from polarlike.rollouts.collect import Wanted, collect
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.rollouts.stats import Summary, summarise, why_unscored
from polarlike.tasks import load_tasks


async def run(config: RunConfig, command: str, console: Console) -> Summary:
    """Fills every place of the run that is not filled yet, then prints the whole run. command: collect or eval."""
    tasks = load_tasks(config.tasks)[: config.limit or None]
    folder = RunFolder(config.out)
    folder.open(config, command)
    try:
        async with open_stage(config, folder, train=command != "eval") as stage:
            console.print(tables.sandbox_line(stage.provider.name, config.sandbox.kind), highlight=False)
            wanted = [Wanted(task, task.task_id, config.samples) for task in tasks]
            with RolloutProgress(console, command, config.samples * len(tasks)) as progress:
                async for group in collect(stage, wanted, progress.rollout):
                    folder.metric("group", group=group.group_id, rewards=[_value(t.score) for t in group.trajectories])
            rollouts = tables.counted(stage.store.rollouts())
            console.print(tables.by_task(rollouts))
            if folder.engine_log.is_file() and config.engine.log:
                console.print(tables.fidelity_line(audit(stage.store, folder.engine_log)))
            summary = summarise(rollouts, ks=sorted({1, config.samples}))
            if command == "eval":
                _print_eval(console, summary)
            console.print(f"Run folder: {config.out}")
            if why := why_unscored(rollouts):
                console.print(f"Of {summary.rollouts} rollouts {why}", highlight=False, markup=False, soft_wrap=True)
            if summary.reward is None:
                raise PolarError(f"No rollout was scored; polar show {config.out} ROLLOUT tells what each one met.")
            return summary
    finally:
        folder.close()


def _value(score: object) -> float | None:
    return getattr(score, "value", None)


def _print_eval(console: Console, summary: Summary) -> None:
    for k, estimate in summary.pass_at.items():
        console.print(f"pass@{k}: {estimate} (95 % interval over {summary.tasks} tasks)")
    if summary.reward:
        console.print(f"reward: {summary.reward}")
    if summary.unscored:
        console.print(f"{summary.unscored} of {summary.rollouts} rollouts are unscored and count in none of these.")
