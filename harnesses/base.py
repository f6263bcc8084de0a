"""What a harness is: an agent program as a black box. How to install it, point it at the proxy, start it, and judge
how it ended. A harness module knows its program's flags and files; it knows no sandbox, no proxy code and no engine.

Harnesses register in the entry-point group `polarlike.harnesses`: name -> class, constructed as cls(options: dict).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.base import RunResult, ToolboxRecipe


@dataclass(slots=True)
class HarnessContext:
    """What a harness is told. base_url has no trailing slash and no /v1. All paths are as seen inside the box."""

    instruction: str
    base_url: str
    key: str
    model: str
    workdir: str
    home: str
    toolbox: str
    timeout_s: float
    max_calls: int = 0


@dataclass(slots=True)
class Launch:
    """How to start it: files to write first (path in the box -> bytes), then the command."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(slots=True)
class HarnessExit:
    """ok: ended by itself as its makers mean it to. reason is one word: submitted, exited, time_limit, call_limit
    or error."""

    ok: bool
    reason: str
    detail: str = ""


@dataclass(slots=True, frozen=True)
class Rewrite:
    """A volatile span: `pattern` (regular expression) becomes `replacement` in every message before the
    engine sees it."""

    name: str
    pattern: str
    replacement: str


class Harness(Protocol):
    name: str
    version: str
    streaming: str  # whole | live: how replies are streamed to it
    rewrites: tuple[Rewrite, ...]

    def recipe(self) -> ToolboxRecipe | None:
        """None: nothing to install."""
        ...

    def launch(self, context: HarnessContext) -> Launch: ...

    def judge(self, result: RunResult) -> HarnessExit: ...

    def describe(self) -> dict[str, Any]:
        """For the run folder: version and options."""
        ...
