"""Makes the example policy: `python -m examples.policy.make_policy`, in the repository, writes examples/policy/model.

A Qwen3 model of about 1.4 million parameters, its tokenizer and chat template, warm-started on dialogues of a scripted
teacher with mini-swe-agent's own prompts (read from an installed copy), in a pretended shell. It is meant to be
mediocre: it speaks the format, copies names fairly well and often chooses the wrong operator, so that reinforcement has
something to improve. Where it starts is thus engineered, and recipe.json says how.

Names of the example task folders are never trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.make_tasks import ExampleTask, draw, split_names
from examples.policy import tokens
from examples.policy.batches import copy_batch, loss_and_hits
from examples.policy.dialogue import Teacher
from examples.policy.evaluation import figures, rollouts
from examples.policy.induction import write_induction_heads
from examples.policy.prompts import MiniPrompts, find_package, load_prompts
from examples.policy.training import COPY_LENGTH, Lesson, Stage, run_stage
from polarlike.engines.base import EngineOptions
from polarlike.engines.embedded import EmbeddedEngine
from polarlike.engines.tiny import build_tiny_model
from polarlike.records import PolarError
from polarlike.templates import ChatTemplate, load_template

HERE = Path(__file__).resolve().parent
TASKS = HERE.parent / "tasks"
SURE, SLOPPY = Teacher(right=1.0, operator_weight=5.0), Teacher(right=0.25)
FULL: tuple[Stage, ...] = (
    Stage("copy", 100, batch=48, rate=2e-3),
    Stage("no advice", 40, batch=16, rate=1.5e-3, teacher=Teacher()),
    Stage("no advice, operators", 140, batch=16, rate=1.2e-3, teacher=SURE),
    Stage("some advice", 40, batch=12, rate=1e-3, teacher=SURE, advice=0.3),
    Stage("all advice", 110, batch=8, rate=1e-3, teacher=SURE, advice=1.0, cools=True),
    Stage("sloppy teacher", 16, batch=8, rate=3e-4, teacher=SLOPPY, advice=1.0),
)
QUICK: tuple[Stage, ...] = (
    Stage("copy", 60, batch=48, rate=2e-3),
    Stage("no advice", 2, batch=4, rate=1e-3, teacher=Teacher()),
    Stage("all advice", 1, batch=2, rate=1e-3, teacher=SURE, advice=1.0),
)


def new_policy(out: Path, prompts: MiniPrompts, seed: int) -> tuple[Any, ChatTemplate]:
    """Writes tokenizer, template and config to `out`; returns the untrained model, induction heads written, and the
    template."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = build_tiny_model(
            Path(scratch), seed=seed, hidden=128, layers=4, heads=4, head_dim=64, ff=384,
            texts=tokens.texts(prompts), vocab=tokens.VOCABULARY,
        )  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            shutil.copy(file, out / file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    write_induction_heads(model, seed)
    return model, load_template(out)


def save(model: Any, out: Path) -> None:
    """The weights in bfloat16, half the size in the repository."""
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # the saver leaves it to its owner alone


def training_names() -> list[str]:
    """Names that no example task folder uses, held out or not."""
    used = {word for file in TASKS.glob("*/*/instruction.md") for word in re.findall(r"\w+", file.read_text())}
    used |= {word for file in TASKS.glob("*/*/environment/files/*") for word in re.findall(r"\w+", file.read_text())}
    return [name for name in split_names()[0] if name not in used]


async def evaluate(model: Path, prompts: MiniPrompts, count: int, samples: int, threads: int) -> dict[str, Any]:
    """Figures at temperature 1 on `count` tasks drawn from the training names and as many from the held-out ones."""
    engine = EmbeddedEngine(model, EngineOptions(extra={"threads": threads}))
    await engine.start()
    found = {}
    for k, (part, names) in enumerate(zip(("train", "heldout"), split_names(), strict=True)):
        tasks: list[ExampleTask] = draw(random.Random(100 + k), names, count)
        found[part] = figures(await rollouts(engine, prompts, tasks, samples=samples, seed=k))
    await engine.close()
    return found


@torch.no_grad()
def copy_accuracy(model: Any, vocabulary: int) -> float:
    """Share of repeated random tokens that the model says greedily; about 0 for a model that cannot look back."""
    return loss_and_hits(model, copy_batch(random.Random(7), 32, COPY_LENGTH, vocabulary))[1]


def make(
    out: Path,
    package: Path,
    *,
    stages: Sequence[Stage],
    seed: int,
    tasks: int,
    samples: int,
    checkpoints: Path | None = None,
) -> dict[str, Any]:
    """Builds, trains, measures and writes the policy. Returns the recipe that it also writes as recipe.json."""
    prompts = load_prompts(package)
    model, template = new_policy(out, prompts, seed)
    vocabulary = template.vocab_size
    lesson = Lesson(prompts, template, training_names(), vocabulary, template.stop_ids[0])
    unable = copy_accuracy(model, vocabulary)
    records = warm_start(model, stages, lesson, seed, checkpoints)
    save(model, out)
    recipe: dict[str, Any] = {
        "made_by": "python -m examples.policy.make_policy",
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": vocabulary,
        "machine": {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "training_seconds": {clock: round(sum(r["seconds"][clock] for r in records), 1) for clock in ("wall", "cpu")},
        "stages": [{**_settings(stage), **record} for stage, record in zip(stages, records, strict=True)],
        "random_copy_accuracy_before": round(unable, 3),  # after it: the hits of the stage named copy
    }
    if tasks:
        recipe["simulated"] = {"temperature": 1.0, "tasks": tasks, "samples": samples}
        recipe["simulated"] |= asyncio.run(evaluate(out, prompts, tasks, samples, torch.get_num_threads()))
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    return recipe


def warm_start(
    model: Any, stages: Sequence[Stage], lesson: Lesson, seed: int, checkpoints: Path | None
) -> list[dict[str, Any]]:
    """Runs the stages; with a folder for checkpoints, those that a broken-off run finished are loaded instead, as
    long as they and all before them have the same settings."""
    records: list[dict[str, Any]] = []
    for index, stage in enumerate(stages):
        saved = checkpoints / f"{index}.pt" if checkpoints else None
        settings = {"seed": seed, "stages": [(s.name, s.steps, _settings(s)) for s in stages[: index + 1]]}
        if saved and saved.is_file() and (kept := torch.load(saved))["settings"] == settings:
            model.load_state_dict(kept["model"])
            records.append(kept["record"])
            continue
        record = run_stage(
            model, stage, lesson, seed=1000 * seed + index, report=lambda r: print(json.dumps(r), flush=True)
        )
        records.append(record)
        if saved:
            saved.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"settings": settings, "record": record, "model": model.state_dict()}, saved)
    return records


def _settings(stage: Stage) -> dict[str, Any]:
    teacher = vars(stage.teacher) if stage.teacher else None
    return {"batch": stage.batch, "rate": stage.rate, "advice": stage.advice, "teacher": teacher}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds and warm-starts the example policy.")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="the model folder to write")
    parser.add_argument("--mini-swe-agent", type=Path, default=None, help="its installed minisweagent folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs, makes no usable policy")
    parser.add_argument("--untrained", action="store_true", help="no training at all: the folder with random weights")
    parser.add_argument(
        "--checkpoints", type=Path, default=None, help="folder to keep finished stages in, to go on from"
    )
    parser.add_argument("--tasks", type=int, default=8, help="tasks of each part to measure on; 0 measures nothing")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each of them")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    stages = () if args.untrained else QUICK if args.quick else FULL
    try:
        package = args.mini_swe_agent or find_package()
        recipe = make(
            args.out,
            package,
            stages=stages,
            seed=args.seed,
            tasks=args.tasks if stages else 0,
            samples=args.samples,
            checkpoints=args.checkpoints,
        )
    except PolarError as error:
        parser.exit(error.exit_code, f"{error}\n")
    print(json.dumps({key: recipe.get(key) for key in ("training_seconds", "simulated")}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
