"""Makes the game's tasks: `python -m examples.two_roles.make_tasks` writes train.jsonl and heldout.jsonl.

Knows the items (a list of things and how many there are, and which to count) and the task file; knows no policy.

What holds:
- The same seed writes the same files, byte for byte.
- No made-up name of a held-out item occurs in a training item.
- The program stands in each task's work folder, so that the tasks run in any sandbox.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.make_tasks import split_names

HERE = Path(__file__).resolve().parent
THINGS = 3


@dataclass(frozen=True)
class Item:
    """One game. counts: how many there are of each thing, all different. asked: the thing that is asked for."""

    counts: dict[str, int]
    asked: str

    @property
    def right(self) -> int:
        return self.counts[self.asked]

    @property
    def text(self) -> str:
        listed = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"In stock: {listed}.\nCount {self.asked}."

    @classmethod
    def of_text(cls, text: str) -> Item:
        counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)[,.]", text)}
        return cls(counts, re.findall(r"Count (\w+)\.", text)[0])


def sample_item(rng: random.Random, names: Sequence[str]) -> Item:
    things = rng.sample(names, THINGS)
    counts = dict(zip(things, rng.sample(range(10), THINGS), strict=True))
    return Item(counts, rng.choice(things))


def row(item: Item, task_id: str) -> dict[str, Any]:
    """The item as one line of a task file."""
    return {
        "task_id": task_id,
        "instruction": item.text,
        "files": {"program.py": (HERE / "program.py").read_text()},
        "verifier": {"type": "harbor", "tests": "verifier", "env": {"RIGHT": str(item.right)}},
        "solution_script": f'echo {item.right} > "${{POLAR_WORKDIR:-/app}}/answer.txt"\n',
        "limits": {"agent_s": 60, "verifier_s": 60, "max_calls": 4},
        "memory_mb": 256,
    }


def draw(rng: random.Random, names: Sequence[str], count: int) -> list[Item]:
    return [sample_item(rng, names) for _ in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the tasks of the two-role game.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--train", type=int, default=32, help="how many training tasks")
    parser.add_argument("--heldout", type=int, default=24, help="how many held-out tasks")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    parts = zip(("train", "heldout"), split_names(), (args.train, args.heldout), strict=True)
    for k, (part, names, count) in enumerate(parts):
        items = draw(random.Random(2 * args.seed + k), names, count)
        rows = [row(item, f"{part}-{i:02d}") for i, item in enumerate(items)]
        (args.out / f"{part}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        print(f"{count} tasks in {args.out / part}.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
