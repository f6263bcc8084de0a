"""Judges by a script, as Harbor does: lays a task's tests into the box, runs tests/test.sh, reads the reward it wrote.

Knows the layout of Harbor (/tests, /logs/verifier/reward.txt or reward.json); does not know where the box or the work
in it came from. Source: https://www.harborframework.com/docs/tasks.

What holds: only a finite number that the script wrote becomes a value. No reward, a garbled one, a timeout or a fault
of the box is unscored, with its class: run it again where the fault may pass, discard where the script is at fault.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import Field

from polarlike.records import Score, Task, Unscored
from polarlike.strict import Strict, check
from sandbox.base import RunResult, Sandbox, SandboxError

TESTS = "/tests"
REWARD_TXT = "/logs/verifier/reward.txt"
REWARD_JSON = "/logs/verifier/reward.json"
TAIL_CHARS = 4000

# Local boxes have no /tests: every box says in POLAR_TESTS and POLAR_LOGS where its own lie.
_RUN = 'mkdir -p "${POLAR_LOGS:-/logs}/verifier" && exec bash "${POLAR_TESTS:-/tests}/test.sh"'


class HarborSettings(Strict):
    """tests: host path of a folder with test.sh. env: variables for it."""

    tests: str
    env: dict[str, str] = Field(default_factory=dict)


class GarbledReward(ValueError):
    """The script left something that is no reward."""


class HarborVerifier:
    """Runs tests/test.sh in the box's work folder and reads the reward."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = check(HarborSettings, settings, "verifier")

    async def verify(self, task: Task, box: Sandbox) -> Score:
        try:
            await box.put(Path(self._settings.tests), TESTS)
            result = await box.run(["bash", "-c", _RUN], timeout=task.limits.verifier_s, env=self._settings.env)
            text, table = await box.read(REWARD_TXT), await box.read(REWARD_JSON)
        except (SandboxError, OSError) as e:
            return Score(None, Unscored.RETRY, f"The verifier's box failed: {e}")
        return _score(result, text, table, task.limits.verifier_s)


def _score(result: RunResult, text: bytes | None, table: bytes | None, limit: float) -> Score:
    evidence = {
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 3),
        "stdout": _tail(result.stdout),
        "stderr": _tail(result.stderr),
    }
    if result.timed_out:  # whatever it wrote before is not its verdict
        reason = f"The verifier took longer than its {limit:g} seconds."
        return Score(None, Unscored.RETRY, reason, evidence=evidence)
    try:
        value, components = read_reward(text, table)
    except GarbledReward as e:
        reason = f"{e} (test.sh ended with code {result.exit_code})."
        return Score(None, Unscored.DISCARD, reason, evidence=evidence)
    return Score(value, components=components, evidence=evidence)


def read_reward(text: bytes | None, table: bytes | None) -> tuple[float, dict[str, float]]:
    """(value, components) from the contents of reward.txt and reward.json, None where there is no such file.

    reward.txt holds one number and goes first. reward.json holds numbers by name: "reward" is the value, the others are
    its components; without "reward" the value is the mean of all. Raises GarbledReward.
    """
    components: dict[str, float] = {}
    if table is not None:
        components = _numbers(table)
    if text is not None:
        return _number(text.decode(errors="replace").strip(), "reward.txt"), components
    if table is None:
        raise GarbledReward("The verifier wrote no reward")
    value = components.pop("reward", None)
    return sum(components.values()) / len(components) if value is None else value, components


def _numbers(data: bytes) -> dict[str, float]:
    try:
        table = json.loads(data)
    except ValueError:
        raise GarbledReward("reward.json is not JSON") from None
    if not isinstance(table, dict) or not table:
        raise GarbledReward("reward.json is no table of numbers")
    return {name: _number(value, f"reward.json's {name!r}") for name, value in table.items()}


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        if isinstance(value, str) and what != "reward.txt":
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise GarbledReward(f"{what} is no number: {str(value)[:80]!r}") from None
    if not math.isfinite(number):
        raise GarbledReward(f"{what} is {number}, which is no reward")
    return number


def _tail(data: bytes) -> str:
    return data.decode(errors="replace")[-TAIL_CHARS:]
