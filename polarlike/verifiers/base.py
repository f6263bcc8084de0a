"""What judges a rollout. A verifier gets a fresh box in which the agent never was, with the captured work tree laid
over the task's pristine files; it says a value, or why there is none. Verifiers register in the entry-point group
`polarlike.verifiers`: name -> class, constructed as cls(settings: dict) with the rest of the task's verifier table.
"""

from __future__ import annotations

from typing import Protocol

from polarlike.records import Score, Task
from sandbox.base import Sandbox


class Verifier(Protocol):
    async def verify(self, task: Task, box: Sandbox) -> Score:
        """A fault of the verifier or the box is an unscored Score with its class, never 0 and never an exception."""
        ...
