"""Makes the example tasks: `python examples/make_tasks.py` writes examples/tasks/train and examples/tasks/heldout.

Knows the tasks (their words, files, right answers and scripted solution) and the Harbor folder they are written to;
knows no sandbox and no policy. Thousands of tasks can be drawn as objects with `sample_task`, without any file.

What holds:
- The same seed writes the same folders, byte for byte.
- No made-up name of a held-out task occurs in a training task: the names are split before a task is drawn.
- A task says in words which answer is right; the file shows what is there now. Neither alone is enough for the edit.
- Words that must be copied (file names, names in code) stand after a space in the instruction, in the file and in the
  command, so that a small byte-level BPE vocabulary splits them alike everywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
NOTE = "done.txt"
KINDS = ("operator", "line", "rename")

CONSONANTS = "bdfgklmnprtz"
# A name never ends in e, so that it is no English word that the prompts use as well (done, file, name, like).
FIRST = [c + v for c in CONSONANTS for v in "aeiou"]
LAST = [c + v for c in CONSONANTS for v in "aiou"]

# Ten phrasings, two for each operator. {a} and {b} are the function's arguments, in order.
CUES: dict[str, tuple[str, str]] = {
    "+": ("return the sum of {a} and {b}", "add {b} to {a}"),
    "-": ("return the difference of {a} and {b}", "take {b} away from {a}"),
    "*": ("return the product of {a} and {b}", "multiply {a} by {b}"),
    "//": ("return how many whole times {b} fits in {a}", "divide {a} by {b} and round down"),
    "%": ("return the remainder of {a} by {b}", "return what is left over when {a} is shared among {b}"),
}
# A star would need an escape in the pattern of sed, so it is never what stands in the file.
WRONG = ("+", "-", "//", "%")

ISSUES = (
    "The function {function} in {module}.py is wrong: it should {cue}. ",
    "Open {module}.py and repair the function {function} there, which has to {cue}. ",
    "A user says that {function} fails. It must {cue}. The code is in {module}.py in this folder. ",
)
LAST_STEP = "When it is fixed, write the word {word} to done.txt and submit."


@dataclass(frozen=True)
class ExampleTask:
    """One task. files: path in the work folder -> text. case: what tests/check.py judges by. edit: the sed command."""

    name: str
    kind: str
    instruction: str
    files: dict[str, str]
    case: dict[str, Any]
    edit: str
    keywords: list[str] = field(default_factory=list)


def split_names(seed: int = 0) -> tuple[list[str], list[str]]:
    """All names, four fifths for training and one fifth held out, in a seeded order."""
    names = [first + last for first in FIRST for last in LAST if first != last]
    random.Random(seed).shuffle(names)
    cut = len(names) * 4 // 5
    return names[:cut], names[cut:]


def sample_task(rng: random.Random, names: Sequence[str], kind: str = "operator") -> ExampleTask:
    """Draws a task of a kind of KINDS, with four different names out of `names`."""
    module, function, a, b = rng.sample(names, 4)
    if kind == "operator":
        right = rng.choice(list(CUES))
        return operator_task(
            module, function, a, b,
            wrong=rng.choice([w for w in WRONG if w != right]),
            right=right, phrasing=rng.randrange(2), issue=rng.randrange(len(ISSUES)),
        )  # fmt: skip
    if kind == "line":
        return line_task(module, old=(function, rng.randint(1, 9)), new=(a, rng.randint(1, 9)))
    if kind == "rename":
        return rename_task(module, old=function, new=a, argument=b, factor=rng.randint(2, 9))
    raise ValueError(f"kind is one of {KINDS}, not {kind!r}")


def operator_task(
    module: str, function: str, a: str, b: str, *, wrong: str, right: str, phrasing: int, issue: int
) -> ExampleTask:
    """A function of one line with the wrong operator, and an issue that says what it should do."""
    cue = CUES[right][phrasing].format(a=a, b=b)
    text = ISSUES[issue].format(function=function, module=module, cue=cue)
    file = f"{module}.py"
    return ExampleTask(
        name=f"operator-{module}",
        kind="operator",
        instruction=text + LAST_STEP.format(word=module),
        files={file: f"def {function}({a}, {b}):\n    return {a} {wrong} {b}\n"},
        case={"kind": "operator", "file": file, "function": function, "word": module, "wrong": wrong, "right": right},
        edit=f"sed -i 's| {wrong} | {right} |' {file}",
        keywords=["python", "bugfix"],
    )


def line_task(module: str, *, old: tuple[str, int], new: tuple[str, int]) -> ExampleTask:
    """A settings file that needs one more line at its end."""
    file, line = f"{module}.cfg", f"{new[0]} = {new[1]}"
    before = f"# settings\n{old[0]} = {old[1]}\n"
    text = f"The settings in {module}.cfg lack a value. Add the line {line} at the end of the file. "
    return ExampleTask(
        name=f"line-{module}",
        kind="line",
        instruction=text + LAST_STEP.format(word=module),
        files={file: before},
        case={"kind": "line", "file": file, "word": module, "before": before, "line": line},
        edit=f"echo {line} >> {file}",
        keywords=["settings"],
    )


def rename_task(module: str, *, old: str, new: str, argument: str, factor: int) -> ExampleTask:
    """A function that must have another name and do what it did."""
    file = f"{module}.py"
    text = f"Rename the function {old} to {new} in {module}.py and change nothing else. "
    return ExampleTask(
        name=f"rename-{module}",
        kind="rename",
        instruction=text + LAST_STEP.format(word=module),
        files={file: f"def {old}({argument}):\n    return {argument} * {factor}\n"},
        case={"kind": "rename", "file": file, "word": module, "old": old, "new": new, "factor": factor},
        edit=f"sed -i 's| {old}| {new}|' {file}",
        keywords=["python", "refactoring"],
    )


def teacher_commands(task: ExampleTask) -> list[str]:
    """The bash commands that solve it: look, edit, leave the word, submit."""
    return [f"cat {task.case['file']}", task.edit, f"echo {task.case['word']} > {NOTE}", SUBMIT]


# ---------------------------------------------------------------- Harbor folders

TASK_TOML = """\
schema_version = "1.4"

[task]
name = {name}
keywords = {keywords}

[metadata]
kind = {kind}

[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0
"""
DOCKERFILE = """\
FROM polarlike/base
WORKDIR /app
COPY files/ /app/
"""
TEST_SH = """\
#!/bin/bash
# -I: nothing in the work folder can stand in for a module of the checker.
python3 -I "${POLAR_TESTS:-/tests}/check.py"
"""


def harbor_files(task: ExampleTask) -> dict[str, str]:
    """The task as a Harbor folder: path -> text."""
    commands = "\n".join(c for c in teacher_commands(task) if c != SUBMIT)
    return {
        "task.toml": TASK_TOML.format(
            name=json.dumps(f"polarlike/{task.name}"), keywords=json.dumps(task.keywords), kind=json.dumps(task.kind)
        ),
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        **{f"environment/files/{path}": text for path, text in task.files.items()},
        "tests/test.sh": TEST_SH,
        "tests/check.py": (HERE / "check_example.py").read_text(),
        "tests/case.json": json.dumps(task.case, indent=2) + "\n",
        "solution/solve.sh": f'#!/bin/bash\nset -e\ncd "${{POLAR_WORKDIR:-/app}}"\n{commands}\n',
    }


def write_task(task: ExampleTask, folder: Path) -> Path:
    """Writes it to folder/NAME and returns that."""
    root = folder / task.name
    for path, text in harbor_files(task).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def draw(rng: random.Random, names: Sequence[str], count: int) -> list[ExampleTask]:
    """`count` tasks that share no name: a twelfth of each rare kind, the rest `operator`, with their operators,
    phrasings and issues in turn."""
    others = [kind for kind in KINDS[1:] for _ in range(count // 12)]
    pool = rng.sample(list(names), 4 * count)
    tasks = []
    cases = [(right, phrasing) for phrasing in range(2) for right in CUES]
    for k in range(count):
        four = pool[4 * k : 4 * k + 4]
        if k >= count - len(others):
            tasks.append(sample_task(rng, four, others[count - 1 - k]))
            continue
        right, phrasing = cases[k % len(cases)]
        wrong = rng.choice([w for w in WRONG if w != right])
        module, function, a, b = four
        tasks.append(
            operator_task(module, function, a, b, wrong=wrong, right=right, phrasing=phrasing, issue=k % len(ISSUES))
        )
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the example tasks as Harbor folders.")
    parser.add_argument("--out", type=Path, default=HERE / "tasks", help="folder for train/ and heldout/")
    parser.add_argument("--train", type=int, default=24, help="how many training tasks")
    parser.add_argument("--heldout", type=int, default=40, help="how many held-out tasks")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, heldout = split_names()
    for k, (part, names, count) in enumerate((("train", train, args.train), ("heldout", heldout, args.heldout))):
        folder = args.out / part
        if folder.exists():
            shutil.rmtree(folder)
        for task in draw(random.Random(args.seed * 2 + k), names, count):
            write_task(task, folder)
        print(f"{count} tasks in {shlex.quote(str(folder))}")


if __name__ == "__main__":
    main()
