"""mini-swe-agent 2.4.6: one tool (bash), OpenAI Chat, no streaming.

Knows its flags, its environment variables and what it prints when it ends. Its own prompt file (mini.yaml) is used as
it is. The sampling temperature is the run's business and is not set here. Started in the task's work folder.

What it does on the wire: a turn it cannot parse (no call, malformed JSON, unknown tool) is left out of its history and
answered by a user message; after three in a row it ends. Two layers retry a failed request: the OpenAI SDK inside
litellm, which marks its retries, and the agent itself, which does not.
"""

from __future__ import annotations

from typing import Any

from harnesses.base import HarnessContext, HarnessExit, Launch, Rewrite
from polarlike.records import UsageError
from sandbox.base import RunResult, ToolboxRecipe

VERSION = "2.4.6"
# Allowed by the agent's metadata, and quick to import: half of what litellm 1.110.2 and openai 3.57 take, which is most
# of what a short rollout costs. A run of four turns: 1.4 CPU seconds, 0.25 where it starts by a fork.
LITELLM = "1.75.9"
OPENAI = "1.99.9"
# What the agent imports of others, nine tenths of its start. Its own modules are loaded at each start.
LIBRARIES = [
    "litellm", "openai.resources.chat.completions", "typer", "rich.console", "rich.logging", "rich.rule", "rich.status",
    "jinja2", "yaml", "prompt_toolkit.shortcuts", "tenacity", "dotenv", "platformdirs", "pydantic",
]  # fmt: skip
# Named by way of its own package, or a mini.yaml in the task's work folder would be taken before the agent's.
CONFIG = "../../minisweagent/config/mini.yaml"
# Attempts of the agent, each of up to three requests: a dead proxy costs some 10 s, not the default's 5 minutes.
ATTEMPTS = 3


class MiniSweAgent:
    """The agent has no options here beyond the run's own."""

    name = "mini-swe-agent"
    version = VERSION
    streaming = "whole"
    rewrites: tuple[Rewrite, ...] = ()

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        if options:
            name = next(iter(options))
            hint = "; a command line of your own runs with --harness shell" if name == "command" else ""
            raise UsageError(f"mini-swe-agent has no option {name!r}{hint}.")

    def recipe(self) -> ToolboxRecipe:
        return ToolboxRecipe(
            name=f"mini-swe-agent-{VERSION}",
            pip=[f"mini-swe-agent=={VERSION}", f"litellm=={LITELLM}", f"openai=={OPENAI}"],
            preload=LIBRARIES,
            varying=["OPENAI_API_KEY"],
        )

    def launch(self, context: HarnessContext) -> Launch:
        settings = {
            "model.model_kwargs.api_base": f"{context.base_url}/v1",
            # A reply may take as long as the run may: the run's own limit is the one that cuts.
            "model.model_kwargs.timeout": f"{max(context.timeout_s, 1.0):g}",
        }
        if context.max_calls:
            settings["agent.step_limit"] = str(context.max_calls)
        overrides = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        # -I: a PYTHONPATH of the task, or a module in its work folder, is not for the agent's own Python.
        program = [f"{context.toolbox}/bin/python", "-I", f"{context.toolbox}/bin/mini"]
        flags = ["--yolo", "--exit-immediately", "--cost-limit=0", f"--model=openai/{context.model}"]
        flags += [f"--output={context.home}/trajectory.json", f"--task={context.instruction}"]
        return Launch(command=[*program, *flags, "-c", CONFIG, *overrides], env=self._env(context))

    def _env(self, context: HarnessContext) -> dict[str, str]:
        return {
            "HOME": context.home,
            "OPENAI_API_KEY": context.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.mini-swe-agent",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(ATTEMPTS),
            "MSWEA_SILENT_STARTUP": "1",
            # Else it asks a public host for prices at every start, and waits 5 s where there is no network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def judge(self, result: RunResult) -> HarnessExit:
        """From the exit code and the last thing printed: the agent names the reason of its end under `Exit:`."""
        if result.timed_out:
            return HarnessExit(False, "time_limit", f"cut after {result.seconds:.0f} s")
        if result.exit_code != 0:
            return HarnessExit(False, "error", _last_line(result.stderr or result.stdout, result.exit_code))
        _, found, last = result.stdout.decode(errors="replace").rpartition("\nExit:\n")
        ending = next((line.strip() for line in last.splitlines() if line.strip()), "") if found else ""
        if ending == "LimitsExceeded":
            return HarnessExit(False, "call_limit", "the agent's step limit was reached")
        if ending == "RepeatedFormatError":
            return HarnessExit(True, "exited", "three replies in a row held no usable tool call")
        if not found:
            return HarnessExit(False, "error", _last_line(result.stdout, result.exit_code))
        return HarnessExit(True, "submitted")

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "litellm": LITELLM,
            "openai": OPENAI,
            "options": {},
        }


def _last_line(output: bytes, code: int) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip(" │╰╯─╭╮")]
    return f"exit code {code}: {lines[-1][:500] if lines else 'no output'}"
