"""Teacher dialogues as token streams, with a weight for every token.

Knows the example tasks, the agent's prompts and a chat template; knows no model. A stream is built as the proxy
builds it: the opening is rendered, each reply is what `encode_reply` gives, each tool result is bridged. So the policy
learns on exactly the ids it will be given and will sample.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.check_example import OPERATORS
from examples.make_tasks import ExampleTask, sample_task, teacher_commands
from examples.policy.batches import Example
from examples.policy.prompts import MiniPrompts, reply, sample_uname
from examples.policy.shell import Shell
from polarlike.records import Ids, Message, Tool, no_ids
from polarlike.templates import ChatTemplate

# One for each of the teacher's steps; short, since every token is sampled.
THOUGHTS = ("Look.", "Edit.", "Note.", "Submit.")
NO_CALL = "No tool calls found in the response. Every response MUST include at least one tool call."
KIND_SHARES = {"operator": 0.6, "line": 0.2, "rename": 0.2}


@dataclass(frozen=True)
class Teacher:
    """right: how often the operator it writes is the right one (else another, evenly). slips: how often it first
    names a file that is not there (a format error is a quarter as frequent); slips are shown and not taught, so that
    the policy can go on after its own. operator_weight: what the edit's two operators count in the loss."""

    right: float = 1.0
    slips: float = 0.1
    operator_weight: float = 1.0


@dataclass(frozen=True)
class Turn:
    """taught: whether its tokens count. rivals: the same reply with another operator, to find each operator's token."""

    message: Message
    taught: bool = True
    rivals: tuple[Message, ...] = ()


def draw_task(rng: random.Random, names: Sequence[str]) -> ExampleTask:
    kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
    return sample_task(rng, names, kind)


def teacher_example(
    rng: random.Random,
    task: ExampleTask,
    teacher: Teacher,
    prompts: MiniPrompts,
    template: ChatTemplate,
    *,
    tools: bool = True,
) -> Example:
    """One dialogue. The weight of a token is 0 where it was not the teacher's to say. tools: whether the prompt
    describes the tool, as it always does in truth."""
    instruction = task.instruction + rng.choice(("", "\n"))  # loaders differ in whether they strip the file's end
    heard = prompts.opening(instruction, sample_uname(rng))
    stream = _Stream(template, [prompts.tool] if tools else None)
    shell = Shell(dict(task.files))
    for step, command in enumerate(teacher_commands(task)):
        if rng.random() < teacher.slips / 4:
            heard = [*heard, prompts.format_error(NO_CALL)]
        slip = step < 2 and rng.random() < teacher.slips
        for turn in [_slip(rng, task, step, command)] * slip + [_turn(rng, task, step, command, teacher)]:
            stream.hear(heard)
            stream.say(turn, teacher.operator_weight)
            output, returncode = shell.run(command_of(turn.message))
            heard = [prompts.observation(output, returncode, turn.message["tool_calls"][0]["id"])]
    return stream.example()


def _slip(rng: random.Random, task: ExampleTask, step: int, command: str) -> Turn:
    """The same command with a file that is not there."""
    file = task.case["file"]
    wrong = file[:2] + rng.choice("bdfgk") + rng.choice("aiou") + file[4:]
    return Turn(reply(command.replace(f" {file}", f" {wrong}"), THOUGHTS[step], f"slip_{step}"), taught=False)


def _turn(rng: random.Random, task: ExampleTask, step: int, command: str, teacher: Teacher) -> Turn:
    call_id = f"call_{step}"
    if task.kind == "operator" and step == 1:
        wrong, right = task.case["wrong"], task.case["right"]
        others = [o for o in OPERATORS if o not in (wrong, right)]
        chosen = right if rng.random() < teacher.right else rng.choice(others)
        said = command.replace(f"| {right} |", f"| {chosen} |")
        rivals = (said.replace(f"s| {wrong}", f"s| {others[0]}"), said.replace(f"{chosen} |'", f"{wrong} |'"))
        return Turn(
            reply(said, THOUGHTS[step], call_id),
            rivals=tuple(reply(rival, THOUGHTS[step], call_id) for rival in rivals),
        )
    return Turn(reply(command, THOUGHTS[step], call_id))


def command_of(message: Message) -> str:
    """The command of a well-formed call. Raises ValueError, KeyError or TypeError for any other reply."""
    (call,) = message["tool_calls"]
    if call["function"]["name"] != "bash":
        raise ValueError("no such tool")
    command = json.loads(call["function"]["arguments"])["command"]
    if not isinstance(command, str):
        raise TypeError("the command is not text")
    return command


class _Stream:
    """One conversation becoming ids and weights: hear, say, hear, say."""

    def __init__(self, template: ChatTemplate, tools: list[Tool] | None):
        self._template, self._tools = template, tools
        self._prompt = self._completion = no_ids()
        self._weight: list[np.ndarray[Any, np.dtype[np.float32]]] = []

    def hear(self, messages: list[Message]) -> None:
        if self._completion.size:
            suffix = self._template.bridge(self._prompt, self._completion, messages, self._tools)
            assert suffix is not None, "the qwen3 template bridges every reply that ends its turn"
            self._prompt = np.concatenate([self._prompt, self._completion, suffix])
        else:
            suffix = self._prompt = self._template.render(messages, self._tools)
        self._weight.append(np.zeros(suffix.size, np.float32))

    def say(self, turn: Turn, operator_weight: float) -> None:
        self._completion = self._template.encode_reply(self._prompt, turn.message)
        weight = np.full(self._completion.size, float(turn.taught), np.float32)
        for rival in turn.rivals:
            where = first_difference(self._completion, self._template.encode_reply(self._prompt, rival))
            weight[where] *= operator_weight
        self._weight.append(weight)

    def example(self) -> Example:
        return Example(np.concatenate([self._prompt, self._completion]), np.concatenate(self._weight))


def first_difference(a: Ids, b: Ids) -> int:
    """Where two streams part. Raises ValueError if one is the beginning of the other."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    raise ValueError("the two replies do not differ")
