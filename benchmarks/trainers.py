"""What a training step costs: our own trainer, with and without shared prefixes, and TRL's, on the same segments.

The recording is made here: rollouts of one harness, which share its long prompt and then go their own ways through
several turns. Every trainer takes one pass over all of them in one optimizer step, in a process of its own, after a
step that is not measured (first calls load kernels). Repeats are interleaved, so that a machine that gets busier slows
all of them. CPU seconds are those of the process; memory is the most it ever held, libraries and model included.

    python -m benchmarks.trainers [--json FILE]

The JSON has `rows`, one a trainer: trainer, "CPU s a step", "wall s a step" and "peak MiB" (each with median, min and
max over the repeats), "tokens forwarded"; `notes`; `workload`; and `machine`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from polarlike import plugins
from polarlike.engines.tiny import build_tiny_model
from polarlike.records import Cause, Group, Score, Segment, Trajectory
from trainers.base import TrainerOptions

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, prefixes not shared": ("grpo", {"share_prefixes": False}),
    "trl-grpo": ("trl-grpo", {}),
    "trl-async-grpo": ("trl-async-grpo", {}),
}
FULL = {"rollouts": 32, "group": 8, "prompt": 1500, "turns": 5, "turn": 200, "repeats": 3}
QUICK = {"rollouts": 4, "group": 2, "prompt": 60, "turns": 2, "turn": 20, "repeats": 3}
"""turn: tokens of a turn, of which the policy sampled the first half and the environment said the rest."""


def recording(workload: dict[str, int], vocabulary: int) -> list[Group]:
    """Token ids at random; every other rollout of a group passed."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, workload["prompt"])
    size = workload["turns"] * workload["turn"]
    sampled = np.arange(size) % workload["turn"] < workload["turn"] // 2
    mask = np.concatenate([np.zeros(prompt.size, np.bool_), sampled])
    logprobs = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)

    def rollout(number: int) -> Trajectory:
        ids = np.concatenate([prompt, rng.integers(0, vocabulary, size)]).astype(np.int32)
        segment = Segment(f"s{number}", "main", Cause.FIRST, ids, mask, logprobs, versions, 1.0, [])
        return Trajectory(f"r{number}", "task", [segment], [], {}, Score(float(number % 2)))

    groups = range(0, workload["rollouts"], workload["group"])
    return [Group(f"g{g}", f"t{g}", [rollout(n) for n in range(g, g + workload["group"])]) for g in groups]


def step(setup: str, model: Path, workload: dict[str, int]) -> dict[str, float]:
    """In a process of its own: one step that is not measured, and one that is."""
    name, settings = SETUPS[setup]
    settings = {"epochs": 1, "minibatch_rollouts": workload["rollouts"], "device": "cpu", **settings}
    with tempfile.TemporaryDirectory() as out:
        trainer = plugins.load("trainers", name)(TrainerOptions(model, Path(out), 0, settings))
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        groups = recording(workload, vocabulary)
        trainer.step(groups)
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = trainer.step(groups)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu": cpu, "wall": wall, "peak": peak, "tokens": metrics["packed_tokens"]}


def measure(model: Path, workload: dict[str, int]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {setup: [] for setup in SETUPS}
    for _ in range(workload["repeats"]):
        for setup in SETUPS:
            order = json.dumps([setup, str(model), workload])
            command = [sys.executable, "-m", "benchmarks.trainers", "--child", order]
            done = subprocess.run(command, cwd=machine.ROOT, check=True, capture_output=True, text=True)
            found[setup].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def spread(runs: list[dict[str, float]], name: str) -> dict[str, float]:
    values = [run[name] for run in runs]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(found: dict[str, list[dict[str, float]]], workload: dict[str, int], folder: Path) -> dict[str, Any]:
    rows = [
        {
            "trainer": setup,
            "CPU s a step": spread(runs, "cpu"),
            "wall s a step": spread(runs, "wall"),
            "peak MiB": spread(runs, "peak"),
            "tokens forwarded": runs[0]["tokens"],
        }
        for setup, runs in found.items()
    ]
    shared, alone = (statistics.median(run["cpu"] for run in found[name]) for name in list(SETUPS)[:2])
    w = workload
    notes = [
        f"{w['rollouts']} rollouts in groups of {w['group']}: {w['prompt']} prompt tokens that all share, and each "
        f"its own {w['turns']} turns of {w['turn']} tokens, half of them sampled; one pass, one optimizer step; "
        f"{w['repeats']} interleaved repeats, a process each.",
        f"Shared prefixes make a step of grpo {alone / shared:.1f} times cheaper in CPU seconds.",
        "Tokens forwarded are without padding; trl-grpo pads each micro-batch besides.",
        "TRL's loop collects garbage whenever it starts, once a step: part of a second whatever the step holds.",
    ]
    return {"rows": rows, "notes": notes, "workload": workload, "machine": machine.machine(folder)}


def text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training step costs: our trainer and TRL's")
    parser.add_argument("--quick", action="store_true", help="a small recording, to see that all of it works")
    parser.add_argument("--model", type=Path, help="a model folder in place of the tiny model")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        setup, model, workload = json.loads(options.child)
        print(json.dumps(step(setup, Path(model), workload)))
        return
    workload = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model.resolve() if options.model else build_tiny_model(Path(scratch) / "tiny")
        found = report(measure(model, workload), workload, Path(scratch))
    columns = list(found["rows"][0])
    table = [columns] + [[text(row[name]) for name in columns] for row in found["rows"]]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for note in found["notes"]:
        print(note)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
