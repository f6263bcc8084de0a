"""Makes the game's policy: `python -m examples.two_roles.make_policy` writes examples/two_roles/model.

One Qwen3 model of about a quarter of a million parameters plays both roles. It is warm-started on a scripted teacher's
games: first to copy, then with a teacher that is always right, last with one that is often wrong, so that the policy
is mediocre and reinforcement has something to improve. Where it starts is thus engineered, and recipe.json says how.

Names of the task files, held out or not, are never trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from examples.make_tasks import FIRST, LAST, split_names
from examples.policy.batches import Batch, copy_batch, loss_and_hits, pad
from examples.policy.induction import write_induction_heads
from examples.two_roles.dialogue import Teacher, play_games, teacher_examples
from examples.two_roles.make_tasks import HERE, draw, sample_item
from examples.two_roles.program import VERDICTS
from examples.two_roles.verifier.check import components
from polarlike.engines.tiny import build_tiny_model
from polarlike.templates import ChatTemplate, load_template

VOCABULARY = 448
CONTEXT = 512
COPY_LENGTH = 48


@dataclass(frozen=True)
class Stage:
    """teacher None: random tokens to copy. rate: Adam's, falling by a line to a tenth of it."""

    name: str
    steps: int
    batch: int
    rate: float
    teacher: Teacher | None = None


FULL = (
    Stage("copy", 40, batch=32, rate=4e-3),
    Stage("sure checker", 100, batch=24, rate=3e-3, teacher=Teacher(solver=0.6)),
    Stage("sloppy both", 15, batch=24, rate=1e-3, teacher=Teacher(solver=0.45, checker=0.6)),
)
QUICK = (Stage("copy", 3, batch=8, rate=2e-3), Stage("sure checker", 2, batch=4, rate=2e-3, teacher=Teacher()))


def texts() -> list[str]:
    """What the tokenizer is trained on: every syllable so often that a name after a space is two tokens; no name."""
    words = [*(f"Count 1 {v}" for v in VERDICTS), "It is high.", "It is low.", "It is not a number.", "user assistant"]
    lists = ["In stock: 0 1 2 3, 4 5 6, 7 8 9.\nCount.\nClaim 1"]
    syllables = [*(f" {syllable}" for syllable in FIRST), *FIRST, *LAST]
    return (words + lists) * 50 + syllables * 5_000


def new_policy(out: Path, seed: int) -> tuple[Any, ChatTemplate]:
    """Writes tokenizer, template and config to `out`; the untrained model with its written heads, and the template."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = build_tiny_model(
            Path(scratch), seed=seed, hidden=64, layers=3, heads=4, head_dim=32, ff=128, context=CONTEXT,
            texts=texts(), vocab=VOCABULARY,
        )  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            shutil.copy(file, out / file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    write_induction_heads(model, seed)
    return model, load_template(out)


def training_names() -> list[str]:
    """Names that no task file uses."""
    used = {w for part in ("train", "heldout") for w in re.findall(r"\w+", (HERE / f"{part}.jsonl").read_text())}
    return [name for name in split_names()[0] if name not in used]


def warm_start(model: Any, template: ChatTemplate, stages: Sequence[Stage], seed: int) -> list[dict[str, Any]]:
    """Trains in place; one record a stage, with the loss and hits of its last tenth."""
    rng, names, records = random.Random(seed), training_names(), []
    for stage in stages:
        optimizer = torch.optim.Adam(model.parameters(), lr=stage.rate, betas=(0.9, 0.95))
        wall, cpu = time.monotonic(), time.process_time()
        figures: list[tuple[float, float]] = []
        model.train()
        for step in range(stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * (1 - 0.9 * step / stage.steps)
            loss, hits = loss_and_hits(model, _batch(rng, stage, names, template))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            figures.append((loss.item(), hits))
        model.eval()
        tail = figures[-max(1, stage.steps // 10) :]
        record = {
            **asdict(stage),
            "seconds": {"wall": round(time.monotonic() - wall, 1), "cpu": round(time.process_time() - cpu, 1)},
            "loss": round(fmean(loss for loss, _ in tail), 4),
            "hits": round(fmean(hits for _, hits in tail), 4),
        }
        print(json.dumps(record), flush=True)
        records.append(record)
    return records


def _batch(rng: random.Random, stage: Stage, names: Sequence[str], template: ChatTemplate) -> Batch:
    if stage.teacher is None:
        return copy_batch(rng, stage.batch, COPY_LENGTH, template.vocab_size)
    games = [teacher_examples(rng, sample_item(rng, names), stage.teacher, template) for _ in range(stage.batch)]
    return pad([example for game in games for example in game], template.stop_ids[0])


def measure(model: Any, template: ChatTemplate, names: Sequence[str], *, items: int, samples: int, seed: int) -> Any:
    """Figures of the policy's own games at temperature 1. by_role: the shares of right answers and right verdicts."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw(random.Random(seed), names, items)
    games = play_games(model, template, [item for item in drawn for _ in range(samples)], generator)
    shares: dict[str, list[float]] = {"solver": [], "checker": []}
    for game in games:
        for role, share in components(json.dumps(game.talk), game.item.right).items():
            shares[role].append(share)
    return {
        "games": len(games),
        "reward": round(fmean(game.reward for game in games), 3),
        "calls": round(fmean(len(game.talk) for game in games), 2),
        "by_role": {role: round(fmean(found), 3) for role, found in shares.items() if found},
    }


def make(out: Path, stages: Sequence[Stage], *, seed: int, items: int) -> dict[str, Any]:
    """Builds, trains, measures and writes the policy. Returns the recipe that it also writes as recipe.json."""
    torch.manual_seed(seed)
    model, template = new_policy(out, seed)
    records = warm_start(model, template, stages, seed)
    model.to(torch.bfloat16).save_pretrained(out)  # and rounded in place: what is measured is what was saved
    model.to(torch.float32)
    (out / "model.safetensors").chmod(0o644)
    parts = dict(zip(("train", "heldout"), split_names(), strict=True))
    recipe = {
        "made_by": "python -m examples.two_roles.make_policy",
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": template.vocab_size,
        "torch": torch.__version__,
        "stages": records,
        "played": {
            part: measure(model, template, names, items=items, samples=8, seed=k + 1)
            for k, (part, names) in enumerate(parts.items())
        },
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    return recipe


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds and warm-starts the policy of the two-role game.")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="the model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs, makes no usable policy")
    parser.add_argument("--items", type=int, default=32, help="items of each part to measure on, 8 games each")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    recipe = make(args.out, QUICK if args.quick else FULL, seed=args.seed, items=args.items)
    print(json.dumps(recipe["played"], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
