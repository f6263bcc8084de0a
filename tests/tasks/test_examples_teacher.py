"""The scripted teacher solves example tasks from the conversation alone, whatever has been said before."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.make_tasks import KINDS, SUBMIT, ExampleTask, sample_task, split_names, teacher_commands
from polarlike.engines.base import Conversation
from polarlike.records import Message, Task
from polarlike.tasks import load_tasks
from polarlike.tasks.boxes import grade, open_task_box
from sandbox.base import Sandbox
from sandbox.local_box import LocalProvider

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = """Please solve this issue: {}

You can run bash commands. To add to a file, write `echo x >> newfile.py`; to edit, `sed -i 's/sum of/x/' filename.py`.
Multiply your checks by two and return the remainder of your notes to notes.cfg.
"""


def load_by_path() -> ModuleType:
    """As the scripted engine does: from its path, with nothing of examples/ on the import path."""
    spec = importlib.util.spec_from_file_location("scripted_policy", EXAMPLES / "teacher.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


policy = load_by_path().policy


def opening(instruction: str) -> list[Message]:
    return [
        {"role": "system", "content": "You can use a computer."},
        {"role": "user", "content": PROMPT.format(instruction)},
    ]


def command_of(reply: Message) -> str:
    (call,) = reply["tool_calls"]
    assert (reply["role"], call["type"], call["function"]["name"]) == ("assistant", "function", "bash")
    return str(json.loads(call["function"]["arguments"])["command"])


def answered(reply: Message, number: int, code: int, output: str) -> list[Message]:
    call = {**reply["tool_calls"][0], "id": f"call_{number}"}
    content = json.dumps({"returncode": code, "output": output})
    return [{**reply, "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": content}]


def said(example: ExampleTask, told: bool) -> list[str]:
    """The commands of a dialogue in which every command works."""
    messages, commands = opening(example.instruction), list[str]()
    task = {"task_id": "t", "instruction": example.instruction, "metadata": {}} if told else None
    while len(commands) < 9 and SUBMIT not in commands:
        reply = policy(Conversation(messages, task=task))
        commands.append(command_of(reply))
        looked = commands[-1].startswith("cat ")
        output = example.files[example.case["file"]] if looked else ""
        messages += answered(reply, len(commands), 0, output)
    return commands


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_it_says_the_commands_that_solve_every_kind_of_task(kind: str, told: bool) -> None:
    train, heldout = split_names()
    for seed in range(100):
        example = sample_task(random.Random(seed), train if seed % 2 else heldout, kind)
        assert said(example, told) == teacher_commands(example)


def test_a_turn_that_the_harness_dropped_is_said_again() -> None:
    example = sample_task(random.Random(1), split_names()[0])
    messages = [*opening(example.instruction), {"role": "user", "content": "No tool calls found in the response."}]
    assert command_of(policy(Conversation(messages))) == teacher_commands(example)[0]


def test_turns_that_are_not_its_own_are_taken_into_account() -> None:
    example = sample_task(random.Random(2), split_names()[0])
    look, edit, note, submit = teacher_commands(example)
    calls = [
        {"id": name, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        for name, arguments in (
            ("a", json.dumps({"command": note})),
            ("b", "{broken"),
            ("c", json.dumps({"command": look})),
        )
    ]
    text = example.files[example.case["file"]]
    messages: list[Message] = [
        *opening(example.instruction),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": text},  # plain text, and out of order
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    assert command_of(policy(Conversation(messages))) == edit
    messages += answered(policy(Conversation(messages)), 9, 0, "")
    assert command_of(policy(Conversation(messages))) == submit


def test_a_task_it_does_not_know_is_given_up() -> None:
    messages: list[Message] = [{"role": "user", "content": "Prove Goldbach's conjecture."}]
    assert command_of(policy(Conversation(messages))) == SUBMIT


async def solve(task: Task, box: Sandbox) -> None:
    messages: list[Any] = opening(task.instruction)
    for turn in range(9):
        reply = policy(Conversation(messages))
        command = command_of(reply)
        result = await box.run(["bash", "-c", command], timeout=20)
        output = (result.stdout + result.stderr).decode()
        if output.split("\n")[0] == SUBMIT.removeprefix("echo ") and result.exit_code == 0:
            return
        messages += answered(reply, turn, result.exit_code, output)
    raise AssertionError("it did not submit")


async def every_task_is_solved(tasks: list[Task], tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path, "teacher")
    for task in tasks:
        box = await open_task_box(provider, task, "agent")
        try:
            await solve(task, box)
            patch = await box.patch()
        finally:
            await box.stop()
        assert (await grade(provider, task, patch)).value == 1.0, task.task_id
    await provider.close()


async def test_its_commands_really_solve_one_task_of_each_kind(tmp_path: Path) -> None:
    tasks = {t.metadata["kind"]: t for t in load_tasks(str(EXAMPLES / "tasks/heldout"))}
    await every_task_is_solved(list(tasks.values()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "heldout"])
async def test_its_commands_really_solve_every_task(part: str, tmp_path: Path) -> None:
    await every_task_is_solved(load_tasks(str(EXAMPLES / "tasks" / part)), tmp_path)
