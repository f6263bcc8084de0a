"""A run in local boxes: the `shell` harness runs a small agent script that speaks HTTP to the proxy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlike.config import RunConfig, load_config

# Asks the policy up to four times, runs each command it gets, stops when none comes. Standard library only.
AGENT = """
import json, os, subprocess, urllib.request
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
for _ in range(4):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(reply)
    if not reply.get("tool_calls"):
        break
    for call in reply["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""

POLICY = """
import json

def policy(conversation):
    turn = sum(m["role"] == "assistant" for m in conversation.messages)
    commands = COMMANDS
    if turn >= len(commands):
        return "done"
    function = {"name": "bash", "arguments": json.dumps({"command": commands[turn]})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
"""

TEST_SH = """
mkdir -p "$POLAR_LOGS/verifier"
reward=0
[ "$(cat "$POLAR_WORKDIR/answer.txt" 2>/dev/null)" = 42 ] && reward=1
echo "$reward" > "$POLAR_LOGS/verifier/reward.txt"
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    """task_file(n, test=...) writes n JSONL tasks that want 42 in answer.txt."""
    import json

    def write(n: int = 1, test: str = TEST_SH) -> Path:
        file = tmp_path / "tasks.jsonl"
        lines = [
            json.dumps({"task_id": f"t{k}", "instruction": "write 42", "files": {"note.txt": "x"}, "test_script": test})
            for k in range(n)
        ]
        file.write_text("\n".join(lines) + "\n")
        return file

    return write


@pytest.fixture
def run_config(tmp_path: Path, tiny_model: Path) -> Callable[..., RunConfig]:
    """run_config(commands, **dotted overrides): the scripted policy gives those commands, one a turn."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)

    def make(tasks: Path, commands: list[str], **overrides: Any) -> RunConfig:
        policy = tmp_path / "policy.py"
        policy.write_text(POLICY.replace("COMMANDS", repr(commands)))
        values = {
            "tasks": str(tasks),
            "out": tmp_path / "run",
            "samples": 2,
            "engine.spec": f"scripted:{policy}",
            "engine.model": tiny_model,
            "engine.log": True,
            "harness.name": "shell",
            "harness.options": {"command": f"python3 {agent}"},
            "sandbox.kind": "local",
        }
        return load_config(None, {**values, **{k.replace("__", "."): v for k, v in overrides.items()}})

    return make
