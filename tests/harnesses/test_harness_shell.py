"""The shell harness: what its command is told, and how its end is read."""

from __future__ import annotations

import pytest

from harnesses.base import HarnessContext
from harnesses.shell import Shell
from polarlike.records import UsageError
from sandbox.base import RunResult


def context(instruction: str = "Fix it.") -> HarnessContext:
    return HarnessContext(
        instruction=instruction,
        base_url="http://127.0.0.1:8000/s/one",
        key="secret",
        model="policy",
        workdir="/app",
        home="/root",
        toolbox="",
        timeout_s=60,
        max_calls=7,
    )


def result(code: int, stderr: bytes = b"", timed_out: bool = False) -> RunResult:
    return RunResult(code, b"", stderr, timed_out, 60.0)


def test_the_command_is_run_by_a_shell_and_told_where_the_model_is() -> None:
    launch = Shell({"command": "python agent.py"}).launch(context())
    assert launch.command == ["/bin/sh", "-c", "python agent.py"]
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/s/one/v1"
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000/s/one"
    assert launch.env["OPENAI_API_KEY"] == launch.env["POLAR_API_KEY"] == "secret"
    assert launch.env["OPENAI_MODEL"] == "policy"
    assert launch.env["POLAR_MAX_CALLS"] == "7"
    assert launch.env["POLAR_INSTRUCTION"] == "Fix it."
    assert launch.files[launch.env["POLAR_INSTRUCTION_FILE"]] == b"Fix it."


def test_an_instruction_too_long_for_a_variable_comes_as_a_file_alone() -> None:
    launch = Shell({"command": "agent"}).launch(context("x" * 200_000))
    assert "POLAR_INSTRUCTION" not in launch.env
    assert len(launch.files[launch.env["POLAR_INSTRUCTION_FILE"]]) == 200_000


@pytest.mark.parametrize("options", [{}, {"command": " "}, {"command": 3}, {"command": "x", "comand": "y"}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="command"):
        Shell(options)


@pytest.mark.parametrize(
    ("ended", "ok", "reason", "detail"),
    [
        (result(0), True, "exited", ""),
        (result(2, b"first\nboom\n"), False, "error", "exit code 2: boom"),
        (result(137, timed_out=True), False, "time_limit", "cut after 60 s"),
    ],
)
def test_the_end_is_judged_by_exit_code(ended: RunResult, ok: bool, reason: str, detail: str) -> None:
    verdict = Shell({"command": "agent"}).judge(ended)
    assert (verdict.ok, verdict.reason, verdict.detail) == (ok, reason, detail)


def test_nothing_is_installed() -> None:
    assert Shell({"command": "agent"}).recipe() is None
