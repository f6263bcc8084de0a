"""The warm start: a list of stages, each a kind of batch, a number of steps and a rate.

Knows batches and a model; writes no files. The order matters: first to copy at all, then the dialogue without the
agent's fixed advice (a quarter of the tokens), then with some of it, then in full, and last with a teacher that is
often wrong. The cue that tells the right operator is taught before it is blurred: a noisy teacher never teaches it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.policy.batches import Batch, Example, copy_batch, loss_and_hits, pad
from examples.policy.dialogue import Teacher, draw_task, teacher_example
from examples.policy.prompts import MiniPrompts
from polarlike.templates import ChatTemplate


@dataclass(frozen=True)
class Stage:
    """batch: dialogues in a step, or copy sequences of 64 tokens where `teacher` is None. advice: the share of the
    lines of the agent's fixed advice that the prompt shows; without any, the tool's description is left out as well.
    rate: Adam's, falling to a third of it by a line if `cools`."""

    name: str
    steps: int
    batch: int
    rate: float
    teacher: Teacher | None = None
    advice: float = 0.0
    cools: bool = False


@dataclass(frozen=True)
class Lesson:
    """What the stages draw from."""

    prompts: MiniPrompts
    template: ChatTemplate
    names: Sequence[str]
    vocabulary: int
    filler: int


COPY_LENGTH = 64
Report = Callable[[dict[str, Any]], None]


def run_stage(model: Any, stage: Stage, lesson: Lesson, *, seed: int, report: Report) -> dict[str, Any]:
    """Trains in place and returns the stage's record: name, steps, seconds (of wall time, and of CPU time of all
    threads), and the mean loss and hits (share of counted tokens that greedy choice gets right) of its last tenth.
    `report` is called ten times. Each stage has an optimizer and a random stream of its own, so that it can be run
    again from its start."""
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=stage.rate, betas=(0.9, 0.95))
    wall, cpu, tail = time.monotonic(), time.process_time(), max(1, stage.steps // 10)
    figures: list[tuple[float, float]] = []
    model.train()
    for step, batch in enumerate(_batches(rng, stage, lesson)):
        for group in optimizer.param_groups:
            group["lr"] = _rate(stage, step)
        loss, hits = loss_and_hits(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures.append((loss.item(), hits))
        if (step + 1) % tail == 0:
            report({"stage": stage.name, "step": step + 1, **_mean(figures[-tail:])})
    model.eval()
    seconds = {"wall": round(time.monotonic() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}
    return {"stage": stage.name, "steps": stage.steps, "seconds": seconds, **_mean(figures[-tail:])}


def _batches(rng: random.Random, stage: Stage, lesson: Lesson) -> Iterator[Batch]:
    for _ in range(stage.steps):
        if stage.teacher is None:
            yield copy_batch(rng, stage.batch, COPY_LENGTH, lesson.vocabulary)
        else:
            yield pad([_dialogue(rng, stage, stage.teacher, lesson) for _ in range(stage.batch)], lesson.filler)


def _dialogue(rng: random.Random, stage: Stage, teacher: Teacher, lesson: Lesson) -> Example:
    # The whole prompt is left as it is: thinning it would drop a blank line that jinja's own tag takes away.
    prompts = lesson.prompts if stage.advice >= 1 else lesson.prompts.thinned(rng, stage.advice)
    task = draw_task(rng, lesson.names)
    return teacher_example(rng, task, teacher, prompts, lesson.template, tools=stage.advice > 0)


def _rate(stage: Stage, step: int) -> float:
    return stage.rate * (1 - 2 / 3 * step / stage.steps) if stage.cools else stage.rate


def _mean(figures: Sequence[tuple[float, float]]) -> dict[str, float]:
    losses, hits = zip(*figures, strict=True)
    return {"loss": round(sum(losses) / len(losses), 4), "hits": round(sum(hits) / len(hits), 4)}
