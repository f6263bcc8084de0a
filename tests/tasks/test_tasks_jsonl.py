"""Tasks written as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarlike.records import UsageError
from polarlike.tasks import load_tasks

GOOD: dict[str, Any] = {"task_id": "t", "instruction": "Do it.", "test_script": "echo 1"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "polarlike" / "tasks"


def write(tmp_path: Path, *lines: str | dict[str, Any]) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_line_becomes_a_task_with_its_files_on_disk(tmp_path: Path) -> None:
    row = GOOD | {
        "files": {"a.txt": "A\n", "src/b.py": "b = 1\n"},
        "solution_script": "true",
        "limits": {"agent_s": 30, "max_calls": 4},
        "workdir": "/w",
        "env": {"E": "1"},
        "memory_mb": 256,
        "metadata": {"kind": "x"},
    }
    (task,) = load_tasks(str(write(tmp_path, row)))
    assert (task.task_id, task.instruction, task.metadata) == ("t", "Do it.", {"kind": "x"})
    ((host, inside),) = task.environment.copies
    assert inside == task.environment.workdir == "/w"
    assert (Path(host) / "a.txt").read_text() == "A\n"
    assert (Path(host) / "src/b.py").read_text() == "b = 1\n"
    assert task.verifier["type"] == "harbor"
    assert (Path(task.verifier["tests"]) / "test.sh").read_text() == "echo 1"
    assert task.solution is not None and (Path(task.solution) / "solve.sh").read_text() == "true"
    assert (task.limits.agent_s, task.limits.verifier_s, task.limits.max_calls) == (30.0, 600.0, 4)
    assert (task.environment.env, task.environment.memory_mb, task.environment.network) == ({"E": "1"}, 256, False)


def test_the_same_line_gives_the_same_paths_and_another_text_gives_others(tmp_path: Path, cache: Path) -> None:
    first = load_tasks(str(write(tmp_path, GOOD)))
    assert load_tasks(str(write(tmp_path, GOOD))) == first
    assert len(list(cache.iterdir())) == 1
    other = load_tasks(str(write(tmp_path, GOOD | {"test_script": "echo 0"})))
    assert other[0].verifier["tests"] != first[0].verifier["tests"]


def test_a_verifier_table_is_taken_as_it_is_with_tests_beside_the_file(tmp_path: Path) -> None:
    row = {"task_id": "t", "instruction": "i", "verifier": {"type": "harbor", "tests": "checks", "env": {"A": "1"}}}
    (task,) = load_tasks(str(write(tmp_path, row)))
    assert task.verifier == {"type": "harbor", "tests": str(tmp_path / "checks"), "env": {"A": "1"}}


def test_tasks_keep_the_order_of_the_file_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD | {"task_id": "b"}, "", GOOD | {"task_id": "a"})
    assert [t.task_id for t in load_tasks(str(path))] == ["b", "a"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", [":2: the line is not JSON"]),
        ("[1]", [":2: the line is no JSON object"]),
        (GOOD | {"instructions": "x"}, [":2: there is no key 'instructions'", "did you mean 'instruction'?"]),
        (GOOD | {"limits": {"agent": 1}}, [":2: there is no key 'limits.agent'", "'agent_s'"]),
        ({"task_id": "x", "test_script": "y"}, [":2: the key 'instruction' is missing"]),
        (GOOD | {"memory_mb": "1G"}, [":2: the key 'memory_mb' is wrong"]),
        (GOOD | {"verifier": {"type": "harbor"}}, [":2: give exactly one of"]),
        ({"task_id": "x", "instruction": "y"}, [":2: give exactly one of"]),
        ({"task_id": "x", "instruction": "y", "verifier": {}}, [":2: the verifier has no 'type'"]),
        (GOOD | {"files": {"../x": ""}}, [":2: the file '../x' must be a plain path"]),
        (GOOD | {"files": {"/etc/x": ""}}, ["must be a plain path"]),
        (GOOD | {"task_id": "first"}, ["Two tasks", "'first'"]),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_tasks(str(write(tmp_path, GOOD | {"task_id": "first"}, line)))
    for word in words:
        assert word in str(error.value)


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no task"):
        load_tasks(str(write(tmp_path, "")))
