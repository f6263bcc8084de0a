"""A training run as a picture, curve.png. Knows metrics.jsonl and matplotlib; measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(metrics: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Writes the figure to `file`, a PNG."""
    plot(metrics, title).savefig(file)


def plot(metrics: Sequence[dict[str, Any]], title: str) -> Any:
    """A matplotlib Figure: held-out reward, sampled and greedy, with 95 % intervals over tasks, and the reward of each
    step's own rollouts, against the rollouts trained on so far."""
    from matplotlib.figure import Figure  # used without pyplot, so that no window system is asked for

    # The last line of each: a step is taken again where its checkpoint was found torn.
    steps = sorted({m["step"]: m for m in metrics if m["kind"] == "step"}.values(), key=lambda m: m["step"])
    evaluations = [m for m in metrics if m["kind"] == "eval"]

    def seen(step: int) -> int:
        """Rollouts trained on before it. A step's line is missing where the run was killed before it was written."""
        return sum(int(m["rollouts"]) for m in steps if m["step"] < step)

    figure = Figure(figsize=(7.2, 4.2), dpi=130)
    axes = figure.subplots()
    own = [m for m in steps if m.get("reward_mean") is not None]  # a trainer reports what it likes
    axes.plot([seen(m["step"]) for m in own], [m["reward_mean"] for m in own], color="0.65", marker=".",
              label="the step's own rollouts")  # fmt: skip
    for prefix, colour, name in (("", "tab:blue", "held out, sampled"), ("greedy_", "tab:orange", "held out, greedy")):
        points = [m for m in evaluations if f"{prefix}reward" in m]
        if not points:
            continue
        value = [m[f"{prefix}reward"] for m in points]
        below = [v - m[f"{prefix}low"] for v, m in zip(value, points, strict=True)]
        above = [m[f"{prefix}high"] - v for v, m in zip(value, points, strict=True)]
        axes.errorbar([seen(m["step"]) for m in points], value, yerr=[below, above], color=colour, marker="o",
                      capsize=4, label=f"{name} ({points[-1][f'{prefix}tasks']} tasks, 95 %)")  # fmt: skip
    axes.set(xlabel="rollouts trained on", ylabel="reward", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    return figure
