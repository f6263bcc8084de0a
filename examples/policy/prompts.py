"""The conversation that mini-swe-agent has with a model, rebuilt from the prompts of an installed copy.

Knows mini-swe-agent 2.4's package layout (config/mini.yaml, models/utils/actions_toolcall.py); knows no tokens and no
tasks. The prompts are read, never copied into this repository. Nothing of the agent is imported: the tool's definition
is read as a literal, so that its dependencies (litellm above all) are not needed.
"""

from __future__ import annotations

import ast
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template

from polarlike.records import Message, Tool, UsageError

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_TOOL_FILE = Path("models", "utils", "actions_toolcall.py")
_CONFIG_FILE = Path("config", "mini.yaml")


@dataclass(frozen=True)
class Uname:
    """What `uname` says on the machine the agent runs on; the agent's first prompt names it."""

    system: str
    release: str
    version: str
    machine: str


_FLAVOURS = ("generic", "amd64", "cloud-amd64", "aws", "azure", "fc", "linuxkit", "arch1-1")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def sample_uname(rng: random.Random) -> Uname:
    """A kernel such as a container host might have: the prompt differs from host to host, the policy must not care."""
    number = f"{rng.randint(5, 7)}.{rng.randint(0, 19)}.{rng.randint(0, 130)}"
    release = f"{number}-{rng.choice(('', f'{rng.randint(1, 99)}-'))}{rng.choice(_FLAVOURS)}"
    day = f"{rng.choice(_DAYS)} {rng.choice(_MONTHS)} {rng.randint(1, 28)}"
    when = rng.choice(("@0", f"{day} {rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02} UTC 2026"))
    preempt = rng.choice(("PREEMPT_DYNAMIC ", "PREEMPT ", ""))
    return Uname("Linux", release, f"#{rng.randint(1, 99)} SMP {preempt}{when}", rng.choice(("x86_64", "aarch64")))


@dataclass(frozen=True)
class MiniPrompts:
    """The prompts of one installed mini-swe-agent."""

    system_template: str
    instance_template: str
    observation_template: str
    format_error_template: str
    tool: Tool

    def opening(self, task: str, uname: Uname) -> list[Message]:
        """The messages before the first reply."""
        host = {"system": uname.system, "release": uname.release, "version": uname.version, "machine": uname.machine}
        return [
            {"role": "system", "content": _fill(self.system_template, **host)},
            {"role": "user", "content": _fill(self.instance_template, task=task, **host)},
        ]

    def thinned(self, rng: random.Random, keep: float) -> MiniPrompts:
        """The same with each line of the fixed advice after the task kept with a chance of `keep`: fewer tokens to
        learn the first lessons on."""
        head, found, advice = self.instance_template.partition("{{task}}")
        kept = [line for line in advice.splitlines(keepends=True) if "{%" not in line and rng.random() < keep]
        return replace(self, instance_template=head + found + "".join(kept))

    def observation(self, output: str, returncode: int, call_id: str) -> Message:
        """The tool message that answers one command."""
        result = {"output": output, "returncode": returncode, "exception_info": ""}
        content = _fill(self.observation_template, output=result)
        return {"role": "tool", "content": content, "tool_call_id": call_id}

    def format_error(self, error: str) -> Message:
        """The user message after a reply without a usable tool call, which itself is left out of the history."""
        content = _fill(self.format_error_template, error=error, actions=[], has_tool_calls=False)
        return {"role": "user", "content": content}


@lru_cache(maxsize=64)
def _template(text: str) -> Template:
    template: Template = Template(text, undefined=StrictUndefined)
    return template


def _fill(text: str, **values: Any) -> str:
    return _template(text).render(**values)


def reply(command: str, thought: str, call_id: str) -> Message:
    """The assistant's turn: a short thought and one call of the agent's tool."""
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}


def load_prompts(package: Path) -> MiniPrompts:
    """The prompts of the `minisweagent` package folder. Raises UsageError where it is not one."""
    if not (package / _CONFIG_FILE).is_file() or not (package / _TOOL_FILE).is_file():
        raise UsageError(
            f"{package} is not mini-swe-agent's package folder; install mini-swe-agent==2.4.6 and give its "
            "minisweagent folder with --mini-swe-agent."
        )
    config: dict[str, Any] = yaml.safe_load((package / _CONFIG_FILE).read_text())
    return MiniPrompts(
        system_template=config["agent"]["system_template"],
        instance_template=config["agent"]["instance_template"],
        observation_template=config["model"]["observation_template"],
        format_error_template=config["model"]["format_error_template"],
        tool=_literal(package / _TOOL_FILE, "BASH_TOOL"),
    )


def _literal(file: Path, name: str) -> Any:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise UsageError(f"{file} defines no {name}; this script was written for mini-swe-agent 2.4.6.")


def find_package() -> Path:
    """The installed `minisweagent` folder: beside this Python, or in polarlike's toolbox cache."""
    for folder in _places():
        if (folder / _CONFIG_FILE).is_file():
            return folder
    raise UsageError(
        "mini-swe-agent was not found; `pip install mini-swe-agent==2.4.6` into a venv and give its "
        "site-packages/minisweagent folder with --mini-swe-agent."
    )


def _places() -> Iterator[Path]:
    for entry in sys.path:
        yield Path(entry) / "minisweagent"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polarlike"
    if cache.is_dir():
        yield from sorted(cache.glob("*/*/lib/python*/site-packages/minisweagent"))
