"""The command `polar`: flags to a config, a command to its module, and every error to one sentence.

Exit codes: 0 done, 1 the run failed, 2 bad usage. A traceback is a bug.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polarlike.config import RunConfig, load_config, parse_settings
from polarlike.records import PolarError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning on any agent, unopened.",
)
tasks_app = typer.Typer(no_args_is_help=True, help="Check task sets.")
app.add_typer(tasks_app, name="tasks")
# Where output is no terminal (a log), lines are not folded at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 140)

Tasks = Annotated[str | None, typer.Argument(help="A task folder, a folder of them, or a JSONL file.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with any of the settings.")]
Engine = Annotated[
    str | None, typer.Option(help="embedded:MODEL_DIR, vllm:URL, sglang:URL, scripted:FILE or remote:MODEL.")
]
Model = Annotated[
    Path | None, typer.Option(help="Model folder that a server serves, or that gives a scripted engine tokens.")
]
Renderer = Annotated[str | None, typer.Option(help="Chat-template family, if the model folder does not tell.")]
HarnessName = Annotated[str | None, typer.Option("--harness", help="The agent program, for example mini-swe-agent.")]
Command = Annotated[str | None, typer.Option("--command", help="The command line, with --harness shell.")]
Sandbox = Annotated[str | None, typer.Option(help="docker, local (no isolation), or auto: the best that works here.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many tasks.")]
Samples = Annotated[int | None, typer.Option(help="Rollouts a task.")]
Concurrency = Annotated[int | None, typer.Option(help="Rollouts at once.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; the same command again resumes it.")]
StoreUrl = Annotated[str | None, typer.Option("--store", help="postgresql://USER@HOST/DATABASE in place of a file.")]
Seed = Annotated[int | None, typer.Option(help="Seed of task order and sampling.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; wins over the harness's.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens a reply may have.")]
MaxCalls = Annotated[int | None, typer.Option(help="Model calls a rollout may make.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its dotted name; again for more."),
]
EngineLog = Annotated[bool | None, typer.Option("--engine-log", help="Keep the engine's own log as evidence.")]


def _config(file: Path | None, flags: dict[str, Any]) -> RunConfig:
    names = {
        "engine": "engine.spec",
        "model": "engine.model",
        "renderer": "engine.renderer",
        "engine_log": "engine.log",
        "harness": "harness.name",
        "command": "harness.options.command",
        "sandbox": "sandbox.kind",
        "temperature": "sampling.temperature",
        "max_tokens": "sampling.max_tokens",
        "max_calls": "limits.max_calls",
        "trainer": "trainer.name",
        "steps": "train.steps",
        "tasks_per_step": "train.tasks_per_step",
        "eval_tasks": "train.eval_tasks",
        "eval_samples": "train.eval_samples",
    }
    named = parse_settings(flags.pop("settings", None) or [])
    return load_config(file, {names.get(flag, flag): value for flag, value in flags.items()} | named)


def _version(asked: bool) -> None:
    if asked:
        console.print(version("polarlike"), highlight=False)
        raise typer.Exit


@app.callback()
def polar(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Reinforcement learning on any agent, unopened."""


@app.command("collect", help="Run rollouts and keep them on disk, scored.")
@app.command("eval", help="Measure pass@1 and pass@k with confidence intervals.")
def collect(
    context: typer.Context,
    tasks: Tasks = None,
    config: ConfigFile = None,
    engine: Engine = None,
    model: Model = None,
    renderer: Renderer = None,
    harness: HarnessName = None,
    command: Command = None,
    sandbox: Sandbox = None,
    limit: Limit = None,
    samples: Samples = None,
    concurrency: Concurrency = None,
    out: Out = None,
    store: StoreUrl = None,
    seed: Seed = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    max_calls: MaxCalls = None,
    engine_log: EngineLog = None,
    settings: Set = None,
) -> None:
    from polarlike.commands import collect as work

    _run(work.run(_config(config, _flags(locals())), context.info_name or "collect", console))


@app.command()
def train(
    tasks: Tasks = None,
    config: ConfigFile = None,
    engine: Engine = None,
    model: Model = None,
    renderer: Renderer = None,
    harness: HarnessName = None,
    command: Command = None,
    sandbox: Sandbox = None,
    trainer: Annotated[str | None, typer.Option(help="A registered trainer, for example grpo.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    tasks_per_step: Annotated[int | None, typer.Option(help="Groups a step.")] = None,
    limit: Limit = None,
    samples: Samples = None,
    eval_tasks: Annotated[str | None, typer.Option(help="Held-out tasks, evaluated before and after.")] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Rollouts a held-out task.")] = None,
    concurrency: Concurrency = None,
    out: Out = None,
    store: StoreUrl = None,
    seed: Seed = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    max_calls: MaxCalls = None,
    engine_log: EngineLog = None,
    settings: Set = None,
) -> None:
    """Train the policy through the agent: collect, step, publish, again."""
    from polarlike.commands import train as work

    _run(work.run(_config(config, _flags(locals())), console))


@app.command()
def serve(
    config: ConfigFile = None,
    engine: Engine = None,
    model: Model = None,
    renderer: Renderer = None,
    out: Out = None,
    store: StoreUrl = None,
    seed: Seed = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    engine_log: EngineLog = None,
    settings: Set = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(max=65535, help="Port of the model routes; 0 is any free one.")] = 8000,
    admin_port: Annotated[
        int, typer.Option(max=65535, help="Port of the control API on loopback; 0 is any free one.")
    ] = 8001,
) -> None:
    """Serve the proxy alone, for agents started by hand."""
    from polarlike.commands import serve as work

    flags = _flags(locals(), "host", "port", "admin_port")
    _run(work.run(_config(config, flags), host, port, admin_port, console))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    rollout: Annotated[str | None, typer.Argument(help="A rollout id, or a place such as TASK:0.")] = None,
) -> None:
    """Print a run, or one trajectory turn by turn."""
    from polarlike.commands import show as work

    if rollout is None:
        work.show_run(run, console)
    else:
        work.show_rollout(run, rollout, console)


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option(help="Also check this model folder.")] = None, engine: Engine = None
) -> None:
    """Say what works on this machine, and the command that mends what does not."""
    from polarlike.commands import doctor as work

    if not work.run(model, console, engine):
        raise typer.Exit(1)


@tasks_app.command("check")
def tasks_check(
    tasks: Annotated[str, typer.Argument(help="A task folder, a folder of them, or a JSONL file.")],
    sandbox: Annotated[str, typer.Option(help="docker, or local (no isolation).")] = "docker",
    concurrency: Annotated[int, typer.Option(help="Tasks at once.")] = 2,
) -> None:
    """Prove that each task's solution scores 1 and doing nothing scores 0."""
    from polarlike.commands import tasks as work

    if not _run(work.check(tasks, sandbox, concurrency, console)):
        raise typer.Exit(1)


def _flags(given: dict[str, Any], *not_settings: str) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k not in ("config", "context", "work", *not_settings)}


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a command's coroutine on uvloop. An order to end (SIGTERM) is as good as a Ctrl-C: boxes are removed."""
    import uvloop

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # A script's `polar ... &` starts with Ctrl-C ignored, and would ignore the order to end as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    except (KeyboardInterrupt, RuntimeError) as e:
        # A second Ctrl-C, or one while the loop closes, stops uvloop's loop, which then complains of that.
        if isinstance(e, RuntimeError) and not isinstance(e.__context__, KeyboardInterrupt):
            raise
        raise PolarError("stopped; the same command resumes the run.") from e


# The base of typer's errors of usage: click's class, or that of the copy of click inside newer releases of typer.
_BadUsage: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    # Before torch is imported: OpenMP threads that spin while they wait starve agents that share the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; we show our own progress
    errors = Console(stderr=True)
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    try:
        code = app(standalone_mode=False)
    except PolarError as e:
        errors.print(f"polar: {e}", **plain)
        sys.exit(e.exit_code)
    except OSError as e:  # the machine's, not ours: a full disk, a folder that is shut
        where = f" ({e.filename})" if e.filename else ""
        errors.print(f"polar: {e.strerror or e}{where}; mend that and run the same command again.", **plain)
        sys.exit(1)
    except _BadUsage as e:
        # Which option, and the nearest name, are in this form alone. A command without arguments printed its help.
        if said := e.format_message():  # type: ignore[attr-defined]
            errors.print(f"polar: {said}", **plain)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
