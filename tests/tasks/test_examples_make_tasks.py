"""The example tasks: what the generator promises, and what their checker pays for."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.make_tasks import (
    CUES,
    ISSUES,
    KINDS,
    LAST_STEP,
    SUBMIT,
    ExampleTask,
    harbor_files,
    line_task,
    operator_task,
    rename_task,
    sample_task,
    split_names,
    teacher_commands,
)
from polarlike.records import Task
from polarlike.tasks import load_tasks
from polarlike.tasks.check import check_tasks
from sandbox.local_box import LocalProvider

EXAMPLES = Path(__file__).parents[2] / "examples"
OPERATOR = operator_task("mod", "fun", "aa", "bb", wrong="-", right="*", phrasing=0, issue=0)
LINE = line_task("mod", old=("aa", 1), new=("bb", 2))
RENAME = rename_task("mod", old="fun", new="new", argument="aa", factor=3)
NOTED = "echo mod > done.txt; "


def words(folder: Path) -> set[str]:
    text = " ".join(path.name + " " + path.read_text() for path in folder.rglob("*") if path.is_file())
    return set(re.findall(r"[a-z]+", text))


def test_names_are_split_and_are_no_words_of_the_prompts() -> None:
    train, heldout = split_names()
    assert len(train) > 2000 and len(heldout) > 500
    assert set(train).isdisjoint(heldout) and len(set(train)) == len(train)
    prompts = " ".join([*ISSUES, LAST_STEP, *(cue for pair in CUES.values() for cue in pair), SUBMIT])
    assert set(train + heldout).isdisjoint(re.findall(r"[a-z]+", prompts))


def test_no_heldout_name_is_seen_in_training() -> None:
    train, heldout = split_names()
    assert words(EXAMPLES / "tasks/train").isdisjoint(heldout)
    assert words(EXAMPLES / "tasks/heldout").isdisjoint(train)


def test_the_committed_tasks_are_what_the_generator_writes(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "make_tasks.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    made = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    committed = EXAMPLES / "tasks"
    assert made == {str(p.relative_to(committed)): p.read_text() for p in committed.rglob("*") if p.is_file()}


def test_there_are_tasks_of_every_kind_operator_phrasing_and_issue() -> None:
    tasks = load_tasks(str(EXAMPLES / "tasks/train"))
    assert Counter(t.metadata["kind"] for t in tasks) == {"operator": 20, "line": 2, "rename": 2}
    cases = [json.loads((Path(t.path) / "tests/case.json").read_text()) for t in tasks]
    assert Counter(c["right"] for c in cases if c["kind"] == "operator") == dict.fromkeys(CUES, 4)
    heldout = load_tasks(str(EXAMPLES / "tasks/heldout"))
    assert Counter(t.metadata["kind"] for t in heldout) == {"operator": 34, "line": 3, "rename": 3}
    assert all(t.environment.dockerfile is None and not t.environment.network for t in tasks + heldout)


def test_the_same_seed_draws_the_same_task_and_every_draw_differs_in_what_must_be_mended() -> None:
    train, _ = split_names()
    draws = [sample_task(random.Random(seed), train, KINDS[seed % 3]) for seed in range(300)]
    assert draws == [sample_task(random.Random(seed), train, KINDS[seed % 3]) for seed in range(300)]
    for task in draws:
        assert task.case.get("wrong") != task.case.get("right") or task.kind != "operator"
        assert len(teacher_commands(task)) == 4
        assert not re.search(r"[`|]", task.instruction)
        for copied in (task.case["file"], task.case["word"]):  # spelt alike: after a space, wherever it stands
            assert f" {copied}" in task.instruction and f" {copied}" in "\n".join(teacher_commands(task))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'riddle'"):
        sample_task(random.Random(0), split_names()[0], "riddle")


def reward(task: ExampleTask, folder: Path, script: str) -> dict[str, float]:
    """What the task's own test.sh pays after `script` ran in a work folder with the task's files."""
    for path, text in harbor_files(task).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    env = {
        "PATH": os.environ["PATH"],
        "POLAR_WORKDIR": str(folder / "environment/files"),
        "POLAR_TESTS": str(folder / "tests"),
        "POLAR_LOGS": str(folder / "logs"),
    }
    subprocess.run(["bash", "-c", script], cwd=env["POLAR_WORKDIR"], env=env, capture_output=True)
    subprocess.run(["bash", str(folder / "tests/test.sh")], cwd=env["POLAR_WORKDIR"], env=env, check=True)
    return dict(json.loads((folder / "logs/verifier/reward.json").read_text()))


def body(line: str) -> str:
    return f"printf 'def fun(aa, bb):\\n    {line}\\n' > mod.py; "


@pytest.mark.parametrize(
    ("task", "script", "expected"),
    [
        (OPERATOR, "true", 0.0),
        (OPERATOR, NOTED, 0.0),
        (OPERATOR, "echo wrong > done.txt", 0.0),
        (OPERATOR, "echo mod mod > done.txt", 0.0),
        (OPERATOR, body("return aa + bb"), 0.0),  # another operator, not the right one
        (OPERATOR, NOTED + body("return aa + bb"), 0.0),
        (OPERATOR, body("return aa * bb"), 0.0),
        (OPERATOR, NOTED + body("return aa * bb"), 1.0),
        (OPERATOR, NOTED + body("return bb * aa"), 1.0),
        (OPERATOR, NOTED + body("print(5); return bb * aa") + "echo 'print(6)' >> mod.py", 1.0),
        (OPERATOR, NOTED + body("import operator; return operator.mul(aa, bb)"), 1.0),
        (LINE, "true", 0.0),
        (LINE, NOTED, 0.0),
        (LINE, "echo bb = 3 >> mod.cfg", 0.0),
        (LINE, "sed -i '1i bb = 2' mod.cfg", 0.0),  # there, and not at the end
        (LINE, "echo bb = 2 >> mod.cfg", 0.0),
        (LINE, NOTED + "echo bb = 2 > mod.cfg", 0.0),  # the rest is gone
        (LINE, NOTED + "echo bb = 2 >> mod.cfg", 1.0),
        (RENAME, "true", 0.0),
        (RENAME, NOTED, 0.0),
        (RENAME, "printf '\\nnew = fun\\n' >> mod.py", 0.0),  # the old name is still there
        (RENAME, "sed -i 's| fun| new|' mod.py", 0.0),
        (RENAME, NOTED + "sed -i 's| fun| new|' mod.py", 1.0),
        (RENAME, "sed -i 's| fun| new|; s|[*] 3|* 4|' mod.py", 0.0),  # another behaviour
    ],
)
def test_only_the_whole_work_is_paid(tmp_path: Path, task: ExampleTask, script: str, expected: float) -> None:
    assert reward(task, tmp_path, script)["reward"] == expected


@pytest.mark.parametrize(
    "script",
    [
        "rm mod.py",
        "mkdir other; mv mod.py other",
        "rm mod.py; mkdir mod.py",
        "rm mod.py; mkfifo mod.py",
        "echo nonsense >> mod.py",
        body("return 7"),
        body("return"),
        body("raise SystemExit(0)"),
        body("while True: pass"),
        "echo 'import os; os._exit(0)' >> mod.py",
        "echo 'print({}); raise SystemExit(0)' >> mod.py",
        """echo 'print("{\\"other\\": [1]}", flush=True); import os; os._exit(0)' >> mod.py""",
        "echo 'print(chr(91) * 60000, flush=True); import os; os._exit(0)' >> mod.py",
        "echo 'while True: print(chr(120) * 9999)' >> mod.py",
        'echo "print(\'{\\"fun\\": 1}\')" > mod.py',
        "mkdir tests; cp $POLAR_TESTS/* tests; echo exit > tests/test.sh",
        "echo 'raise SystemExit(0)' > json.py; echo 'raise SystemExit(0)' > sitecustomize.py",
        "echo \"open('$POLAR_LOGS/verifier/reward.txt', 'w').write('1')\" >> mod.py",
    ],
)
def test_damage_and_tricks_are_paid_nothing(tmp_path: Path, script: str) -> None:
    assert reward(OPERATOR, tmp_path, script)["reward"] == 0.0
    assert not (tmp_path / "logs/verifier/reward.txt").exists()


def test_damage_is_paid_nothing_even_with_the_word(tmp_path: Path) -> None:
    got = reward(OPERATOR, tmp_path, NOTED + "rm mod.py")
    assert got == {"reward": 0.0, "word": 0.0, "edited": 0.0, "right": 0.0}


async def test_one_task_of_each_kind_grades_as_it_should(tmp_path: Path) -> None:
    tasks = {t.metadata["kind"]: t for t in load_tasks(str(EXAMPLES / "tasks/heldout"))}
    assert set(tasks) == set(KINDS)
    await every_check_is_good(list(tasks.values()), tmp_path)


async def every_check_is_good(tasks: list[Task], tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path, "examples")
    checks = await check_tasks(tasks, provider)
    await provider.close()
    assert {c.task_id: c.problems for c in checks} == {t.task_id: [] for t in tasks}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "heldout"])
async def test_all_tasks_grade_as_they_should(part: str, tmp_path: Path) -> None:
    await every_check_is_good(load_tasks(str(EXAMPLES / "tasks" / part)), tmp_path)
