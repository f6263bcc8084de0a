"""Any command line as a harness: your own script or agent, told where the model is by environment variables.

Options: command (str, required): run by `sh -c` in the task's work folder. Every SDK's usual variables are set, and
POLAR_* ones that name the rest. Nothing is installed; the command must exist in the box.
"""

from __future__ import annotations

from typing import Any

from harnesses.base import HarnessContext, HarnessExit, Launch, Rewrite
from polarlike.records import UsageError
from sandbox.base import RunResult, ToolboxRecipe


class Shell:
    name = "shell"
    version = "1"
    streaming = "whole"
    rewrites: tuple[Rewrite, ...] = ()

    def __init__(self, options: dict[str, Any]) -> None:
        command = options.get("command")
        if not isinstance(command, str) or not command.strip():
            raise UsageError('the shell harness needs a command: give it the option {"command": "python agent.py"}')
        unknown = sorted(set(options) - {"command"})
        if unknown:
            raise UsageError(f"the shell harness knows no option {unknown[0]!r}; its only one is 'command'")
        self.command = command

    def recipe(self) -> ToolboxRecipe | None:
        return None

    def launch(self, context: HarnessContext) -> Launch:
        """The instruction comes as POLAR_INSTRUCTION and, since a variable ends at 128 KiB, as a file too."""
        instruction_file = f"{context.home}/instruction.md"
        env = {
            "HOME": context.home,
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_BASE": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.key,
            "OPENAI_MODEL": context.model,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.key,
            "ANTHROPIC_MODEL": context.model,
            "GOOGLE_GEMINI_BASE_URL": context.base_url,
            "GEMINI_API_KEY": context.key,
            "POLAR_BASE_URL": context.base_url,
            "POLAR_API_KEY": context.key,
            "POLAR_MODEL": context.model,
            "POLAR_INSTRUCTION_FILE": instruction_file,
            "POLAR_TIMEOUT": f"{context.timeout_s:g}",
            "POLAR_MAX_CALLS": str(context.max_calls),
        }
        if len(context.instruction.encode()) < 100_000:
            env["POLAR_INSTRUCTION"] = context.instruction
        files = {instruction_file: context.instruction.encode()}
        return Launch(command=["/bin/sh", "-c", self.command], env=env, files=files)

    def judge(self, result: RunResult) -> HarnessExit:
        """Exit code 0 is an end as meant; others are errors, with the last line of stderr."""
        if result.timed_out:
            return HarnessExit(False, "time_limit", f"cut after {result.seconds:.0f} s")
        if result.exit_code == 0:
            return HarnessExit(True, "exited")
        lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return HarnessExit(False, "error", f"exit code {result.exit_code}: {lines[-1][:500]}")

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "options": {"command": self.command}}
