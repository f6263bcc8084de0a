"""The command as a user types it, with its calls in PostgreSQL: collect, go away, come back, resume, show."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from postgres_server import PostgresServer

from polarlike.commands.show import open_run
from polarlike.engines.log import read_log
from polarlike.records import RolloutStatus
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.store import Store, StoreError

pytestmark = pytest.mark.postgres

RIGHT = ["cat note.txt", "echo 42 > answer.txt"]


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    yield postgres
    postgres.start()


@pytest.fixture
def flags(task_file: Callable[..., Path], run_config: Any) -> Callable[..., list[str]]:
    """flags(out, store, commands): what follows `polar collect`."""

    def make(out: Path, store: str, commands: list[str] = RIGHT) -> list[str]:
        config = run_config(task_file(), commands)
        return [
            *(config.tasks, "--engine", config.engine.spec, "--model", str(config.engine.model), "--engine-log"),
            *("--harness", "shell", "--command", config.harness.options["command"], "--sandbox", "local"),
            *("--samples", "2", "--out", str(out), "--store", store),
        ]

    return make


def start(*args: str | Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "polarlike", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def polar(*args: str | Path, **env: str) -> tuple[int, str, str]:
    process = start(*args, **env)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def secrets_in(folder: Path, secret: str) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


def test_two_runs_collect_into_one_database_at_once_and_are_shown_apart(
    server: PostgresServer, flags: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    both = [start("collect", *flags(run, server.url)) for run in runs]
    for process in both:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "Fidelity: 100.00 %" in out
        assert server.password not in out + errors
    recorded = []
    for run in runs:
        assert not (run / "store.db").exists()
        assert secrets_in(run, server.password) == []
        store = Store(RunFolder(run).store_url.replace("polar@", f"polar:{server.password}@"), read_only=True)
        rollouts = store.rollouts()
        assert [(r.status, r.score.value) for r in rollouts if r.score] == [(RolloutStatus.FINISHED, 1.0)] * 2
        calls = {c.call_id for r in rollouts for c in store.calls(r.session_id)}
        assert calls == set(read_log(run / "engine.jsonl"))
        assert len(calls) == 6
        recorded.append(calls)
        store.close_blocking()
    assert not recorded[0] & recorded[1]
    with psycopg.connect(server.url) as connection:
        schema = json.loads((runs[0] / "store.json").read_text())["schema"]
        assert connection.execute(f"select count(*) from {schema}.calls").fetchone() == (6,)
    code, out, errors = polar("show", runs[0], PGPASSWORD=server.password)
    assert (code, errors) == (0, "")
    assert out.count("score 1") == 2
    monkeypatch.delenv("PGPASSWORD", raising=False)
    with pytest.raises(StoreError, match="give the password as PGPASSWORD"):
        open_run(runs[0])


def test_a_server_that_dies_in_mid_run_ends_it_in_one_sentence_and_the_same_command_goes_on(
    server: PostgresServer, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = flags(run, server.url, ["echo 42 > answer.txt", "sleep 1", "sleep 1"])
    process = start("collect", *command)
    url = ""
    for _ in range(600):
        time.sleep(0.1)
        if (run / "engine.jsonl").is_file() and len(read_log(run / "engine.jsonl")) >= 3:
            url = RunFolder(run).store_url.replace("polar@", f"polar:{server.password}@")
            break
    server.stop(kill=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in errors and server.password not in errors
    assert "polar: The database server of postgresql://polar@127.0.0.1" in errors.splitlines()[-1]
    assert secrets_in(run, server.password) == []
    server.start()
    store = Store(url, read_only=True)
    before = {s.session_id: len(store.calls(s.session_id)) for s in store.sessions()}
    store.close_blocking()
    assert sum(before.values()) >= 1
    code, _, errors = polar("collect", *command)
    assert code == 0, errors
    store = Store(url, read_only=True)
    assert {s: len(store.calls(s)) for s in before} == before
    scored = [r for r in store.rollouts() if r.status is RolloutStatus.FINISHED]
    assert [r.score.value for r in scored if r.score] == [1.0, 1.0]
    assert not [r for r in store.rollouts() if r.status is RolloutStatus.RUNNING]
    store.close_blocking()


async def test_a_wrong_password_is_one_sentence_before_anything_runs(
    server: PostgresServer, task_file: Callable[..., Path], run_config: Any
) -> None:
    config = run_config(task_file(), RIGHT, store=server.url.replace(server.password, "wr0ngw0rd"))
    folder = RunFolder(config.out)
    folder.open(config, "collect")
    with pytest.raises(StoreError, match="does not let us in") as e:
        async with open_stage(config, folder):
            raise AssertionError("opened")
    folder.close()
    assert "wr0ngw0rd" not in str(e.value)
    assert secrets_in(config.out, "wr0ngw0rd") == []
