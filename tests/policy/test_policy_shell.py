import random

import pytest

from examples.make_tasks import (
    SUBMIT,
    line_task,
    operator_task,
    rename_task,
    sample_task,
    split_names,
    teacher_commands,
)
from examples.policy.shell import Shell, judge, reward

OPERATOR = operator_task("dazu", "nebi", "boza", "lebu", wrong="//", right="%", phrasing=0, issue=0)
RENAME = rename_task("tizi", old="babi", new="lefi", argument="zibi", factor=7)
LINE = line_task("dalo", old=("tuga", 9), new=("kilu", 7))


@pytest.mark.parametrize(
    ("command", "output", "returncode"),
    [
        ("cat a.py", "x + y\n", 0),
        ("cat b.py", "cat: b.py: No such file or directory\n", 1),
        ("sed -i 's|q|r|' b.py", "sed: can't read b.py: No such file or directory\n", 2),
        ("echo hi > done.txt", "", 0),
        (SUBMIT, "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n", 0),
        ("frob a.py", "/bin/sh: 1: frob: not found\n", 127),
    ],
)
def test_each_command_answers_as_a_shell_does(command: str, output: str, returncode: int) -> None:
    assert Shell({"a.py": "x + y\n"}).run(command) == (output, returncode)


def test_sed_changes_the_first_match_of_each_line() -> None:
    shell = Shell({"a": "x x\nx\n"})
    shell.run("sed -i 's|x|y|' a")
    assert shell.files["a"] == "y x\ny\n"


def test_echo_replaces_or_appends() -> None:
    shell = Shell({"a": "1\n"})
    shell.run("echo k = 2 >> a")
    assert shell.files["a"] == "1\nk = 2\n"
    shell.run("echo z > a")
    assert shell.files["a"] == "z\n"


@pytest.mark.parametrize("task", [OPERATOR, RENAME, LINE], ids=lambda t: t.kind)
def test_the_teacher_earns_everything_and_submits(task) -> None:
    shell = Shell(dict(task.files))
    for command in teacher_commands(task):
        shell.run(command)
    assert (reward(task, shell.files), shell.submitted) == (1.0, True)


@pytest.mark.parametrize(
    ("text", "word", "value"),
    [
        ("def nebi(boza, lebu):\n    return boza + lebu\n", "dazu", 0.0),  # another operator, the word
        ("def nebi(boza, lebu):\n    return boza + lebu\n", "dazo", 0.0),
        ("def nebi(boza, lebu):\n    return boza % lebu\n", "", 0.0),
        ("def nebi(boza, lebu):\n    return boza // lebu\n", "dazu", 0.0),  # untouched
        ("def nebi(boza, lebu):\n    return boza lebu\n", "dazu", 0.0),  # broken: damage never pays
    ],
)
def test_the_reward_is_the_verifier_s(text: str, word: str, value: float) -> None:
    assert reward(OPERATOR, {"dazu.py": text, "done.txt": word}) == value


def test_a_lost_file_earns_nothing() -> None:
    assert not any(judge(OPERATOR, {"done.txt": "dazu\n"}).values())


def test_untouched_tasks_earn_nothing() -> None:
    rng, (names, _) = random.Random(0), split_names()
    assert {reward(t, t.files) for t in (sample_task(rng, names, k) for k in ("operator", "line", "rename"))} == {0.0}
