"""Harbor folders: what loads, as what, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlike.records import Task, UsageError
from polarlike.tasks import load_tasks
from polarlike.tasks.harbor_schema import size_mb

PLAIN = "FROM polarlike/base\nWORKDIR /app\nCOPY files/ /app/\n"


def make(folder: Path, toml: str = "", dockerfile: str | None = PLAIN, **files: str) -> Path:
    """A good task folder; `files` maps a path with __ for / and _dot_ for . to its text."""
    parts = {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "tests/test.sh": "echo 1",
        "environment/files/a.txt": "a\n",
    }
    if dockerfile is not None:
        parts["environment/Dockerfile"] = dockerfile
    parts |= {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for path, text in parts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def load_one(folder: Path) -> Task:
    (task,) = load_tasks(str(folder))
    return task


def test_a_plain_folder_becomes_a_task_that_needs_no_image(tmp_path: Path) -> None:
    folder = make(tmp_path / "fix-it", solution__solve_dot_sh="true")
    task = load_one(folder)
    assert task.task_id == "fix-it"
    assert task.instruction == "Do it."
    assert task.environment.base_image is None and task.environment.dockerfile is None
    assert task.environment.copies == [(str(folder / "environment/files"), "/app")]
    assert task.environment.workdir == "/app"
    assert task.verifier == {"type": "harbor", "tests": str(folder / "tests")}
    assert (task.limits.agent_s, task.limits.verifier_s, task.limits.max_calls) == (600.0, 600.0, 0)
    assert task.solution == str(folder / "solution")
    assert task.environment.network is False


def test_every_setting_that_can_be_honoured_arrives(tmp_path: Path) -> None:
    toml = """
schema_version = "1.4"
source = "somewhere"
[task]
name = "org/fix"
version = "2"
description = "d"
authors = [{ name = "A", email = "a@example.org" }]
keywords = ["k"]
[metadata]
difficulty = "easy"
[environment]
build_timeout_sec = 60.0
cpus = 2
memory_mb = 2048
storage_mb = 10240
gpus = 0
env = { A = "1" }
workdir = "/work"
network_mode = "public"
allowed_hosts = []
[agent]
timeout_sec = 30
user = "root"
[verifier]
timeout_sec = 45.5
env = { B = "2" }
environment_mode = "separate"
network_mode = "no-network"
[solution]
env = { C = "3" }
"""
    task = load_one(make(tmp_path / "t", toml, "FROM polarlike/base:2\nENV Z=9 A=0\nWORKDIR /app\n"))
    environment = task.environment
    assert (environment.cpus, environment.memory_mb, environment.workdir) == (2.0, 2048, "/work")
    assert environment.env == {"Z": "9", "A": "1"}  # the table goes before the Dockerfile
    assert environment.network is True
    assert task.verifier["network"] is False
    assert task.verifier["env"] == {"B": "2"}
    assert (task.limits.agent_s, task.limits.verifier_s) == (30.0, 45.5)
    assert task.solution is None
    assert task.metadata == {
        "difficulty": "easy",
        "harbor_name": "org/fix",
        "keywords": ["k"],
        "solution_env": {"C": "3"},
        "not_enforced": ["storage_mb", "build_timeout_sec"],
    }


@pytest.mark.parametrize(
    ("toml", "network"),
    [
        ("", False),  # Harbor would open it; here a box has no network unless the task says so
        ('[environment]\nnetwork_mode = "public"', True),
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"', False),
        ('[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork = "public"', True),
        ("[environment]\nallow_internet = true", True),
    ],
)
def test_the_network_is_open_only_where_the_task_says_so(tmp_path: Path, toml: str, network: bool) -> None:
    assert load_one(make(tmp_path / "t", toml)).environment.network is network


def test_a_prebuilt_image_is_used_as_it_is(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "org/image:1"\nworkdir = "/w"'
    task = load_one(make(tmp_path / "t", toml, dockerfile=None))
    assert task.environment.base_image == "org/image:1"
    assert task.environment.copies == [] and task.environment.dockerfile is None


def test_another_dockerfile_is_left_to_be_built(tmp_path: Path) -> None:
    folder = make(tmp_path / "t", dockerfile="FROM ubuntu:24.04\nRUN apt-get update\nWORKDIR /srv\n")
    environment = load_one(folder).environment
    assert environment.dockerfile == str(folder / "environment")
    assert environment.workdir == "/srv"
    assert environment.copies == []


@pytest.mark.parametrize(("text", "mib"), [("2G", 2048), ("512M", 512), ("1.5g", 1536), ("many", None)])
def test_old_sizes_are_read(text: str, mib: int | None) -> None:
    assert size_mb(text) == mib


def test_an_old_size_reaches_the_task(tmp_path: Path) -> None:
    assert load_one(make(tmp_path / "t", '[environment]\nmemory = "4G"')).environment.memory_mb == 4096


def test_a_folder_of_folders_comes_by_name_and_other_folders_are_passed_over(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        make(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [t.task_id for t in load_tasks(str(tmp_path))] == ["a", "b", "c"]
    assert [t.task_id for t in load_tasks(f"harbor:{tmp_path}")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[verifer]\n", ["no key 'verifer'", "did you mean 'verifier'?"]),
        ("[environment]\nmemory_gb = 2", ["'environment.memory_gb'", "'memory_mb'"]),
        ("[verifier]\ntimeout = 2.0", ["'verifier.timeout'", "'timeout_sec'"]),
        ("[environment.healthcheck]\ncommand = 'x'\nretry = 1", ["'environment.healthcheck.retry'", "'retries'"]),
        ("[task]\nkeywords = []", ["the key 'task.name' is missing"]),
        ("[environment]\ncpus = 'two'", ["'environment.cpus' is wrong", "number"]),
        ("[agent]\ntimeout_sec = 0", ["'agent.timeout_sec' is wrong", "greater than 0"]),
        ("[environment]\nnetwork_mode = 'open'", ["'environment.network_mode' is wrong", "'no-network'"]),
        ("a = 1\nb = = 2\n", ["is not TOML", "line 2"]),
        ("schema_version = '2.0'", ["'2.0' is not one we know"]),
        ("[environment]\ngpus = 1", ["environment.gpus: boxes have no accelerator"]),
        ("[[steps]]\nname = 'one'", ["steps: a task of several steps"]),
        ("artifacts = ['/app/out']", ["artifacts: only the work folder"]),
        ("[environment]\nos = 'windows'", ["environment.os is 'windows'"]),
        ("[environment.healthcheck]\ncommand = 'true'", ["environment.healthcheck is not run"]),
        ("[[environment.mcp_servers]]\nname = 'x'", ["environment.mcp_servers"]),
        ("[environment]\nskills_dir = '/s'", ["environment.skills_dir"]),
        ("[environment]\nallowed_hosts = ['a.org']", ["environment.allowed_hosts", "network_mode"]),
        ("[agent]\nnetwork_mode = 'allowlist'", ["agent.allowed_hosts"]),
        ("[agent]\nuser = 'bob'", ["agent.user is 'bob'"]),
        ("[verifier.environment]\ncpus = 1", ["verifier.environment: grading runs in a fresh box"]),
        ("[[verifier.collect]]\ncommand = 'x'", ["verifier.collect"]),
        ("[verifier]\nenv = { KEY = '${KEY}' }", ["verifier.env.KEY", "write the value itself"]),
        ("[environment]\nmemory = 'lots'", ["environment.memory is 'lots'", "memory_mb"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words(tmp_path: Path, toml: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_tasks(str(make(tmp_path / "t", toml)))
    text = str(error.value)
    assert "task.toml" in text and "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("task.toml", "no task.toml; add a task.toml"),
        ("instruction.md", "no instruction.md"),
        ("tests/test.sh", "no tests/test.sh"),
        ("environment/Dockerfile", "no environment/Dockerfile"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, gone: str, words: str) -> None:
    folder = make(tmp_path / "t")
    (folder / gone).unlink()
    with pytest.raises(UsageError, match=words):
        load_tasks(str(folder))
    with pytest.raises(UsageError, match=words):  # also among other folders
        make(tmp_path / "good")
        load_tasks(str(tmp_path))


def test_a_task_that_does_not_say_where_the_agent_works_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set workdir"):
        load_tasks(str(make(tmp_path / "t", dockerfile="FROM ubuntu\n")))


def test_several_containers_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "t")
    (folder / "environment/docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(UsageError, match="one box"):
        load_tasks(str(folder))


def test_a_verifier_with_an_image_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="remove it"):
        load_tasks(str(make(tmp_path / "t", tests__Dockerfile="FROM x\n")))


def test_paths_that_hold_no_task_say_where_one_might_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There are no tasks at"):
        load_tasks(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"give a folder with a task\.toml"):
        load_tasks(str(tmp_path))
    make(tmp_path / "train" / "a")
    with pytest.raises(UsageError, match="name one of its folders that hold tasks: train"):
        load_tasks(str(tmp_path))
    (tmp_path / "tasks.txt").write_text("")
    with pytest.raises(UsageError, match="is no task file"):
        load_tasks(str(tmp_path / "tasks.txt"))
    with pytest.raises(UsageError, match="no kind of tasks 'gsm'"):
        load_tasks("gsm:somewhere")
