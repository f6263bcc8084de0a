"""polar train: the loop, and what is printed of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polarlike import plugins
from polarlike.commands import curve, tables
from polarlike.commands.progress import RolloutProgress
from polarlike.config import RunConfig
from polarlike.records import UsageError
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.tasks import load_tasks
from trainers.base import TrainerOptions
from trainers.loop import Loop


async def run(config: RunConfig, console: Console) -> None:
    tasks = load_tasks(config.tasks)[: config.limit or None]
    eval_tasks = load_tasks(config.train.eval_tasks) if config.train.eval_tasks else []
    options = TrainerOptions(_model_folder(config), config.out, config.seed, config.trainer.settings)
    folder = RunFolder(config.out)
    folder.open(config, "train")
    try:
        trainer = plugins.load("trainers", config.trainer.name)(options)
        async with open_stage(config, folder) as stage:
            console.print(tables.sandbox_line(stage.provider.name, config.sandbox.kind), highlight=False)
            if stage.proxy.engine.text_only:
                raise UsageError("This engine returns no token ids, so there is nothing to train on; give it --model.")

            def report(kind: str, values: dict[str, Any]) -> None:
                console.print(_line(kind, values))

            with RolloutProgress(console, "train", rollouts(config, len(tasks), len(eval_tasks))) as progress:
                loop = Loop(
                    stage,
                    trainer,
                    folder,
                    tasks=tasks,
                    eval_tasks=eval_tasks,
                    report=report,
                    on_rollout=progress.rollout,
                )
                await loop.run()
            print_run(folder, console)
            console.print(tables.by_phase(tables.counted(stage.store.rollouts())))
            if folder.engine_log.is_file():
                console.print(tables.fidelity_line(audit(stage.store, folder.engine_log)))
        curve.draw(folder.metrics(), f"{config.trainer.name} through {config.harness.name}", config.out / "curve.png")
        console.print(f"Run folder: {config.out} (its curve: curve.png)")
    finally:
        folder.close()


def rollouts(config: RunConfig, tasks: int, eval_tasks: int) -> int:
    """How many a whole run makes."""
    train = config.train
    between = (train.steps - 1) // train.eval_every if train.eval_every else 0
    evaluated = (2 + between) * eval_tasks * (train.eval_samples + train.eval_greedy)
    return config.samples * min(train.tasks_per_step, tasks) * train.steps + evaluated


def print_run(folder: RunFolder, console: Console) -> None:
    """The run's steps and evaluations as one table, from metrics.jsonl; the last line of one that was taken again."""
    table = Table(title="Training", title_justify="left")
    for name in ("", "version", "rollouts", "reward", "grad norm", "KL (k3)", "clipped", "trained tokens", "seconds"):
        table.add_column(name, justify="right")
    metrics = [m for m in folder.metrics() if m["kind"] in ("eval", "step")]
    for m in {(m["kind"], m["step"]): m for m in metrics}.values():
        if m["kind"] == "eval":
            for prefix, name in (("", "eval"), ("greedy_", "greedy")):
                if f"{prefix}tasks" in m:
                    table.add_row(f"{name} {m['step']}", str(m["policy_version"]), "", _interval(m, prefix))
        else:
            table.add_row(
                f"step {m['step']}",
                str(m["policy_version"]),
                str(m["rollouts"]),
                _number(m.get("reward_mean")),
                _number(m.get("grad_norm")),
                _number(m.get("kl_k3"), "{:.1e}"),
                _number(m.get("clip_fraction")),
                _number(m.get("trainable_tokens"), "{:.0f}"),
                f"{m['rollout_s']:.0f} + {m['train_s']:.0f}",
            )
    console.print(table)


def _interval(m: dict[str, Any], prefix: str) -> str:
    if f"{prefix}reward" not in m:
        return "-"
    return f"{m[f'{prefix}reward']:.3f} [{m[f'{prefix}low']:.3f}, {m[f'{prefix}high']:.3f}]"


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _line(kind: str, values: dict[str, Any]) -> str:
    if kind == "eval":
        reward = _interval(values, "") if "reward" in values else "none scored"
        greedy = f", greedy {_interval(values, 'greedy_')}" if "greedy_tasks" in values else ""
        version = values["policy_version"]
        return f"evaluation of policy version {version}: reward {reward}{greedy} on {values['tasks']} held-out tasks"
    return (
        f"step {values['step']}: reward {_number(values.get('reward_mean'))}, grad norm "
        f"{_number(values.get('grad_norm'))}, policy version {values['policy_version']}"
    )


def _model_folder(config: RunConfig) -> Path:
    folder = config.engine.model_folder
    if folder is None:
        raise UsageError(
            "Training needs a model folder: use --engine embedded:MODEL_DIR, or name a server's with --model."
        )
    return folder
