"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from polarlike.records import Rollout


class RolloutProgress:
    def __init__(self, console: Console, title: str, total: int):
        self._console, self._title, self._total = console, title, total
        self._done, self._sum, self._scored, self._start = 0, 0.0, 0, time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> RolloutProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def rollout(self, rollout: Rollout) -> None:
        self._done += 1
        if rollout.score and rollout.score.value is not None:
            self._scored += 1
            self._sum += rollout.score.value
        mean = f"mean reward {self._sum / self._scored:.2f}" if self._scored else "none scored"
        if self._bar:
            self._bar.update(self._task, advance=1, description=f"{self._title} ({mean})")
        elif self._done == self._total or self._done % max(1, self._total // 10) == 0:
            seconds = time.monotonic() - self._start
            self._console.print(f"{self._title}: {self._done} of {self._total}, {mean}, {seconds:.0f} s")
