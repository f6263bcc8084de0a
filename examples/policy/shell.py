"""A pretended shell over a few files in memory, and the reward of what it leaves behind.

Knows the four kinds of command that the example tasks need (cat, sed -i, echo into a file, submit) and answers others
as a shell answers an unknown command. Nothing is executed, so a policy may say anything to it. What it answers to those
four is what dash, GNU sed and coreutils answer in the tasks' image.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from examples.check_example import OPERATORS, PARTS
from examples.make_tasks import NOTE, ExampleTask
from examples.policy.prompts import SUBMIT

_CAT = re.compile(r"cat ([\w./-]+)")
_SED = re.compile(r"sed -i 's\|([^|']*)\|([^|']*)\|(g?)' ([\w./-]+)")
_ECHO = re.compile(r"echo ([\w .=+%-]*?) (>>?) ([\w.-]+)")


@dataclass
class Shell:
    """files: name -> text, changed in place. submitted: the agent has ended its run."""

    files: dict[str, str]
    submitted: bool = False

    def run(self, command: str) -> tuple[str, int]:
        """What the command prints (both streams) and its exit status."""
        if command.strip() == SUBMIT:
            self.submitted = True
            return SUBMIT.removeprefix("echo ") + "\n", 0
        if found := _CAT.fullmatch(command):
            return self._cat(found[1])
        if found := _SED.fullmatch(command):
            return self._sed(found[1], found[2], bool(found[3]), found[4])
        if found := _ECHO.fullmatch(command):
            before = self.files.get(found[3], "") if found[2] == ">>" else ""
            self.files[found[3]] = before + " ".join(found[1].split()) + "\n"
            return "", 0
        word = (command.split() or [""])[0]
        return f"/bin/sh: 1: {word}: not found\n", 127

    def _cat(self, name: str) -> tuple[str, int]:
        if name not in self.files:
            return f"cat: {name}: No such file or directory\n", 1
        return self.files[name], 0

    def _sed(self, old: str, new: str, everywhere: bool, name: str) -> tuple[str, int]:
        if name not in self.files:
            return f"sed: can't read {name}: No such file or directory\n", 2
        if old:  # an empty pattern means the last one used, and there is none: nothing is replaced here
            lines = self.files[name].splitlines(keepends=True)
            count = -1 if everywhere else 1
            self.files[name] = "".join(line.replace(old, new, count) for line in lines)
        return "", 0


def judge(task: ExampleTask, files: dict[str, str]) -> dict[str, bool]:
    """The parts of the reward, as in examples/check_example.py but by text: code is compared, not run, so an unusual
    answer that the real verifier would take counts as wrong here."""
    case = task.case
    text, start = files.get(case["file"]), task.files[case["file"]]
    if text is None:
        return dict.fromkeys(PARTS, False)
    right, others = _answers(task, start)
    if text not in (start, right, *others):
        return dict.fromkeys(PARTS, False)
    word = files.get(NOTE, "").split() == [case["word"]]
    return {"word": word, "edited": text == right or text in others, "right": text == right}


def reward(task: ExampleTask, files: dict[str, str]) -> float:
    return float(all(judge(task, files).values()))


def _answers(task: ExampleTask, start: str) -> tuple[str, list[str]]:
    """The right text of the file, and the texts that count as an edit of the right kind."""
    case = task.case
    if case["kind"] == "line":
        return start + case["line"] + "\n", [case["line"] + "\n" + start]
    if case["kind"] == "rename":
        return start.replace(f" {case['old']}", f" {case['new']}", 1), []
    wrong = f" {case['wrong']} "
    return start.replace(wrong, f" {case['right']} "), [
        start.replace(wrong, f" {operator} ") for operator in OPERATORS if operator != case["wrong"]
    ]
