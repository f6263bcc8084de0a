"""The command as a user types it: exit codes, one sentence an error, and output that names what it did."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMANDS = ("collect", "eval", "train", "serve", "show", "doctor", "tasks")


def polar(*args: str | Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polarlike", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env})


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "t", "instruction": "do", "files": {}, "test_script": "true"}\n')
    return file


def test_help_names_every_command() -> None:
    text = polar("--help").stdout
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["collect", "nowhere"], "There are no tasks at nowhere"),
        (["collect", "{tasks}"], "Name an engine with --engine"),
        (["collect", "{tasks}", "--engine", "embeded:x"], "did you mean 'embedded'"),
        (["collect", "{tasks}", "--engine", "embedded:nowhere"], "no model folder at nowhere"),
        (["collect", "{tasks}", "--engine", "scripted:nowhere.py"], "nowhere.py"),
        (["collect", "{tasks}", "--engine", "scripted:x", "--harness", "mini"], "There is no harness"),
        (["collect", "{tasks}", "--sandbox", "dokcer"], "did you mean 'docker'"),
        (["collect", "{tasks}", "--samples", "0"], "The setting 'samples' is wrong"),
        (["collect", "{tasks}", "--engine", "models/mine"], "'models/mine' names a kind or a folder alone"),
        (["collect", "--engine", "scripted:x"], "Name the tasks"),
        (["collect", "--samples", "many"], "Invalid value for '--samples'"),
        (["collect", "--nope"], "No such option"),
        (["collect", "--sampels", "2"], "--samples"),
        (["collect", "--config", "nowhere.yaml"], "Cannot read the config"),
        (["train", "{tasks}", "--engine", "scripted:x"], "Training needs a model folder"),
        (["show", "nowhere"], "There is no run at nowhere"),
        (["tasks", "check", "nowhere"], "There are no tasks at nowhere"),
        (["frobnicate"], "No such command"),
        (["serve", "--engine", "scripted:x", "--port", "99999"], "Invalid value for '--port'"),
    ],
)
def test_bad_usage_is_exit_code_2_and_one_sentence(args: list[str], says: str, tasks: Path, tmp_path: Path) -> None:
    given = [a.format(tasks=tasks) for a in args]
    if given[0] in ("collect", "train"):
        given += ["--out", str(tmp_path / "run")]
        if "--sandbox" not in given:
            given += ["--sandbox", "local"]
    got = polar(*given)
    assert got.returncode == 2, got.stderr
    assert says in got.stderr
    assert len(got.stderr.strip().splitlines()) == 1
    assert got.stderr.startswith("polar: ")


def test_a_command_without_arguments_prints_its_help_and_nothing_else() -> None:
    got = polar("tasks")
    assert got.returncode == 2
    assert "check" in got.stdout and got.stderr == ""


def test_the_version_is_the_distribution_s() -> None:
    assert polar("--version").stdout.strip() == version("polarlike")


def test_a_mended_command_takes_the_folder_of_the_one_that_failed(tasks: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.py"
    policy.write_text("def policy(conversation):\n    return 'x'\n")
    rest = [
        "--harness",
        "shell",
        "--command",
        "true",
        "--sandbox",
        "local",
        "--samples",
        "1",
        "--out",
        tmp_path / "run",
    ]
    assert polar("collect", tasks, "--engine", "scripted:nowhere.py", *rest).returncode == 2
    got = polar("collect", tasks, "--engine", f"scripted:{policy}", *rest)
    assert "made with other settings" not in got.stderr
    # The task's verifier gives no verdict: nothing is scored, so the run failed, and the reason is on the screen.
    assert got.returncode == 1
    assert "No rollout was scored" in got.stderr
    assert "Of 1 rollouts 1 unscored, always because of: " in got.stdout
    again = polar("collect", tasks, "--engine", "scripted:other.py", *rest)
    assert again.returncode == 2 and "made with other settings: engine" in again.stderr


def test_a_model_without_a_chat_template_is_named(tiny_model: Path, tasks: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    got = polar("collect", tasks, "--engine", f"embedded:{folder}", "--sandbox", "local", "--out", tmp_path / "run")
    assert got.returncode == 2
    assert "has no chat template" in got.stderr


def test_without_docker_the_sentence_has_the_command_that_mends_it(tasks: Path, tmp_path: Path) -> None:
    got = polar(
        "collect",
        tasks,
        "--engine",
        "scripted:x.py",
        "--sandbox",
        "docker",
        "--out",
        tmp_path / "run",
        DOCKER_HOST=f"unix://{tmp_path}/none.sock",
    )
    assert got.returncode == 2
    assert "docker" in got.stderr.lower()
    assert "to mend it:" in got.stderr


def test_auto_without_docker_takes_local_boxes_and_says_so(tasks: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.py"
    policy.write_text("def policy(conversation):\n    return 'x'\n")
    agent = [
        "--harness",
        "shell",
        "--command",
        "true",
        "--sandbox",
        "auto",
        "--samples",
        "1",
        "--out",
        tmp_path / "run",
    ]
    none = f"unix://{tmp_path}/none.sock"
    got = polar("collect", tasks, "--engine", f"scripted:{policy}", *agent, DOCKER_HOST=none)
    assert "Sandbox: local (nothing is isolated; Docker does not work here" in got.stdout
    told = polar("doctor", DOCKER_HOST=none)
    assert told.returncode == 0
    assert "to mend it: sudo systemctl start docker" in told.stdout


class Serving:
    def __init__(self, *args: str | Path):
        command = [sys.executable, "-u", "-m", "polarlike", "serve", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "stop with Ctrl-C" in line:
                break

    @property
    def exports(self) -> dict[str, str]:
        line = next(x for x in self.lines if x.startswith("export OPENAI_BASE_URL"))
        return dict(pair.split("=", 1) for pair in line.removeprefix("export ").split())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)


def test_serve_prints_what_to_export_and_it_works_as_printed(tmp_path: Path) -> None:
    import openai

    policy = tmp_path / "policy.py"
    policy.write_text("def policy(conversation):\n    return 'hello from the script'\n")
    run = tmp_path / "run"
    serving = Serving("--engine", f"scripted:{policy}", "--out", run, "--port", "0", "--admin-port", "0")
    try:
        env = serving.exports
        client = openai.OpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"])
        got = client.chat.completions.create(model=env["OPENAI_MODEL"], messages=[{"role": "user", "content": "hi"}])
        assert got.choices[0].message.content == "hello from the script"
        control = next(x for x in serving.lines if x.startswith("Control API"))
        url, key = control.split()[2], control.split()[-1]
        admin = {"Authorization": f"Bearer {key}"}
        made = httpx.post(url, headers=admin, json={"streaming": "live"}).json()
        again = openai.OpenAI(base_url=made["base_url"], api_key=made["key"])
        again.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
        calls = httpx.get(f"{url}/{made['session_id']}/calls", headers=admin).json()
        assert [c["reply"]["content"] for c in calls] == ["hello from the script"]
        assert httpx.get(url, headers={"Authorization": f"Bearer {made['key']}"}).status_code == 401
        assert httpx.post(url, headers=admin, json={"streeming": 1}).status_code == 400
        assert httpx.delete(f"{url}/{made['session_id']}", headers=admin).json()["calls"] == 1
        with pytest.raises(openai.AuthenticationError):
            again.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
    finally:
        assert serving.stop() == 0


def test_serve_on_a_port_in_use_says_so(tmp_path: Path) -> None:
    import socket

    policy = tmp_path / "policy.py"
    policy.write_text("def policy(conversation):\n    return 'x'\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        got = polar(
            "serve", "--engine", f"scripted:{policy}", "--out", tmp_path / "run", "--port", taken.getsockname()[1]
        )
    assert got.returncode == 2
    assert "choose another port" in got.stderr


def test_a_fault_of_the_machine_is_one_sentence(tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    got = polar("collect", tasks, "--engine", "scripted:x", "--sandbox", "local", "--out", tmp_path)
    assert got.returncode == 1
    where = tmp_path / "config.yaml"
    assert got.stderr == f"polar: Is a directory ({where}); mend that and run the same command again.\n"


def test_ctrl_c_while_the_modules_load_is_one_sentence() -> None:
    interrupted = """
import sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "polarlike.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from polarlike.__main__ import main
main()
"""
    got = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=60)
    assert (got.returncode, got.stderr) == (1, "polar: stopped.\n")


def test_ctrl_c_again_and_again_is_one_sentence(tmp_path: Path) -> None:
    stubborn = """
import asyncio, os, signal
from polarlike import cli
async def work():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(30)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
cli._run(work())
"""
    got = subprocess.run([sys.executable, "-c", stubborn], capture_output=True, text=True, timeout=60)
    assert "PolarError: stopped; the same command resumes the run." in got.stderr.splitlines()[-1]


def test_a_run_that_a_script_put_in_the_background_ends_when_told_to() -> None:
    background = """
import asyncio, os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts `polar ... &`
from polarlike import cli
async def work():
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(30)
cli._run(work())
"""
    got = subprocess.run([sys.executable, "-c", background], capture_output=True, text=True, timeout=20)
    assert "PolarError: stopped; the same command resumes the run." in got.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_a_stopped_run_leaves_no_box_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    tasks = tmp_path / "tasks.jsonl"
    test = 'mkdir -p "$POLAR_LOGS/verifier"; echo 0.5 > "$POLAR_LOGS/verifier/reward.txt"'
    import json

    tasks.write_text(json.dumps({"task_id": "t", "instruction": "do", "files": {}, "test_script": test}) + "\n")
    policy = tmp_path / "policy.py"
    policy.write_text("def policy(conversation):\n    return 'x'\n")
    run = tmp_path / "run"

    def command(agent: str) -> list[Any]:
        return [
            *("collect", tasks, "--engine", f"scripted:{policy}", "--harness", "shell", "--command", agent),
            *("--sandbox", "local", "--samples", "2", "--out", run),
        ]

    process = subprocess.Popen(
        [sys.executable, "-m", "polarlike", *map(str, command("sleep 60"))],
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(200):
        time.sleep(0.1)
        if list((run / "boxes").rglob("tests")):
            break
    time.sleep(1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the same command resumes the run" in errors
    assert "Traceback" not in errors
    assert not list((run / "boxes").rglob("tests"))
    got = polar(*command("true"))
    assert got.returncode == 0, got.stderr
    assert "0.500" in got.stdout and f"Run folder: {run}" in got.stdout.replace("\n", "")
    shown = polar("show", run)
    assert shown.returncode == 0 and "score 0.5" in shown.stdout
    one = polar("show", run, "t:0")
    assert one.returncode == 0 and "score 0.5" in one.stdout
    assert polar("show", run, "zzz").returncode == 2
