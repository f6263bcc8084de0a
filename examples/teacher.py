"""A scripted policy that solves the example tasks: `--engine scripted:examples/teacher.py`.

Knows the words of the example issues and the bash tool of mini-swe-agent. It works as a policy must: the right answer
comes from the issue's words, what to replace from the file it has looked at; it is told no solution.

What holds: the reply is a function of the conversation alone: any number of turns may have gone before, its own or not.
"""

import json
import re
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

# What an issue says, and the operator that does it.
OPERATORS = (
    (r"\bsum of\b|\badd \w+ to\b", "+"),
    (r"\bdifference of\b|\btake \w+ away from\b", "-"),
    (r"\bproduct of\b|\bmultiply \w+ by\b", "*"),
    (r"\bhow many whole times\b|\bround down\b", "//"),
    (r"\bremainder of\b|\bleft over\b", "%"),
)


def policy(conversation: Any) -> dict[str, Any]:
    """The next reply: a short thought and one call of bash. conversation: has `messages` and `task` (may be None)."""
    thought, command = next_step(_issue(conversation), _commands(conversation.messages))
    call = {"type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}


def next_step(issue: str, done: dict[str, str]) -> tuple[str, str]:
    """(thought, command), given the issue's text and the commands that were run, each with what it printed."""
    file = re.search(r"\b\w+\.(?:py|cfg)\b", issue)
    if not file:
        return "I see no task.", SUBMIT
    look = f"cat {file[0]}"
    if look not in done:
        return "Look.", look
    steps = [("Edit.", _edit(issue, file[0], done[look]))]
    word = re.search(r"write the word (\w+) to (\S+)", issue)
    if word:
        steps.append(("Note.", f"echo {word[1]} > {word[2]}"))
    for thought, command in steps:
        if command and command not in done:
            return thought, command
    return "Submit.", SUBMIT


def _edit(issue: str, file: str, text: str) -> str | None:
    """The command that mends the file, whose text is what the look printed; None where nothing fits."""
    if line := re.search(r"Add the line (\w+ = \d+)", issue):
        return f"echo {line[1]} >> {file}"
    if names := re.search(r"Rename the function (\w+) to (\w+)", issue):
        return f"sed -i 's| {names[1]}| {names[2]}|' {file}"
    wrong = re.search(r"return \w+ (\S+) \w+", text)
    # The first that is said: the harness's own words come after the issue and may sound like one.
    right = sorted((found.start(), operator) for words, operator in OPERATORS if (found := re.search(words, issue)))
    return f"sed -i 's| {wrong[1]} | {right[0][1]} |' {file}" if wrong and right else None


def _issue(conversation: Any) -> str:
    """The task's instruction, or the first user message, which holds it within the harness's own words."""
    if conversation.task and conversation.task.get("instruction"):
        return str(conversation.task["instruction"])
    return next((m["content"] for m in conversation.messages if m["role"] == "user"), "")


def _commands(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Every command that was run and answered, with what it printed. A call that did not parse ran nothing."""
    asked: list[tuple[str, str]] = []
    done: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            asked = [(str(call.get("id", "")), _command(call)) for call in message.get("tool_calls", [])]
        elif message["role"] == "tool" and asked:
            wanted = message.get("tool_call_id", "")
            at = next((k for k, (call_id, _) in enumerate(asked) if call_id == wanted), 0)
            done[asked.pop(at)[1]] = _output(message["content"])
    return done


def _command(call: dict[str, Any]) -> str:
    try:
        return str(json.loads(call["function"]["arguments"])["command"])
    except (ValueError, KeyError, TypeError):
        return ""


def _output(content: str) -> str:
    """mini-swe-agent answers with JSON: {"returncode": 0, "output": "..."}. Other harnesses answer with plain text."""
    try:
        return str(json.loads(content)["output"])
    except (ValueError, KeyError, TypeError):
        return content
