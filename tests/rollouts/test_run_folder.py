"""What a run folder binds, what it says of the harness, and where it keeps its calls."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from postgres_server import PostgresServer

from harnesses.shell import Shell
from polarlike.config import RunConfig, load_config
from polarlike.records import Rollout, RolloutStatus, Score, Unscored, UsageError
from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store

SCORED = Score(1.0)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**overrides: Any) -> RunConfig:
        values = {
            "tasks": "tasks.jsonl",
            "out": tmp_path / "My run!",
            "engine.spec": "scripted:policy.py",
            "harness.name": "shell",
            "harness.options": {"command": "agent"},
        }
        return load_config(None, {**values, **{k.replace("__", "."): v for k, v in overrides.items()}})

    return make


def open_and_close(config: RunConfig, command: str = "collect") -> RunFolder:
    folder = RunFolder(config.out)
    try:
        folder.open(config, command)
    finally:
        folder.close()
    return folder


def begin(config: RunConfig, command: str = "collect", score: Score | None = SCORED) -> RunFolder:
    """A run with one rollout that ended so."""
    folder = open_and_close(config, command)
    store = Store(folder.store_url)
    asyncio.run(store.put_rollout(Rollout("r", "t", "t", 0, RolloutStatus.FINISHED, score=score)))
    store.close_blocking()
    return folder


def files_with(folder: Path, text: str) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


def test_the_folder_says_which_harness_ran_with_its_pinned_versions(config: Callable[..., RunConfig]) -> None:
    settings = config()
    open_and_close(settings)
    versions = json.loads((settings.out / "versions.json").read_text())
    assert versions["harness"] == {"name": "shell", "version": "1", "options": {"command": "agent"}}


def test_a_run_is_not_resumed_with_another_version_of_its_harness(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(config())
    open_and_close(config())
    monkeypatch.setattr(Shell, "version", "2")
    with pytest.raises(UsageError, match=r"other settings: harness.version \(was '1'\)"):
        open_and_close(config())


def test_a_run_is_not_resumed_with_other_options_of_its_harness(config: Callable[..., RunConfig]) -> None:
    begin(config())
    with pytest.raises(UsageError, match=r"harness.options \(was {'command': 'agent'}\)"):
        open_and_close(config(harness__options={"command": "another"}))


def test_a_run_does_not_become_its_own_control_half_way(config: Callable[..., RunConfig]) -> None:
    begin(config(), "train")
    with pytest.raises(UsageError, match=r"other settings: train.shuffle_rewards \(was False\)"):
        open_and_close(config(train__shuffle_rewards=True), "train")


@pytest.mark.parametrize(
    ("change", "name"),
    [({"trainer__settings": {"learning_rate": 2e-5}}, "trainer.settings"), ({"trainer__name": "sft"}, "trainer")],
)
def test_a_training_run_keeps_its_trainer_and_the_error_says_how_to_go_on_otherwise(
    config: Callable[..., RunConfig], change: dict[str, Any], name: str
) -> None:
    folder = begin(config(trainer__settings={"learning_rate": 1e-5}), "train")
    open_and_close(config(trainer__settings={"learning_rate": 1e-5}), "train")
    with pytest.raises(UsageError, match=rf"other settings: {name} \(was") as e:
        open_and_close(config(**{"trainer__settings": {"learning_rate": 1e-5}, **change}), "train")
    assert f"another --out and --engine embedded:{folder.path}/checkpoints/STEP/model (" in str(e.value)
    assert f"with LoRA a checkpoint has the adapter alone: embedded:{folder.path}/model" in str(e.value)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"train__tasks_per_step": 3}, r"train.tasks_per_step \(was 4\)"),
        ({"limit": 5}, r"limit \(was 0\)"),
        ({"samples": 8}, r"samples \(was 4\)"),
        ({"builder": "per_request"}, r"builder \(was 'exact'\)"),
    ],
)
def test_a_training_run_keeps_what_its_steps_are_made_of(
    config: Callable[..., RunConfig], change: dict[str, Any], name: str
) -> None:
    begin(config(), "train")
    with pytest.raises(UsageError, match=f"other settings: {name}"):
        open_and_close(config(**change), "train")


def test_more_samples_or_tasks_extend_a_run_that_collects(config: Callable[..., RunConfig]) -> None:
    begin(config(limit=2))
    open_and_close(config(samples=8, limit=5))


def test_the_trainer_binds_no_run_that_does_not_train(config: Callable[..., RunConfig]) -> None:
    begin(config())
    open_and_close(config(trainer__name="another"))


@pytest.mark.parametrize("score", [None, Score(None, Unscored.RETRY, "our fault")])
def test_a_run_without_a_result_that_counts_binds_nobody(config: Callable[..., RunConfig], score: Score | None) -> None:
    begin(config(), score=score)
    open_and_close(config(seed=7))


def test_a_served_session_binds_its_folder(config: Callable[..., RunConfig]) -> None:
    folder = open_and_close(config(), "serve")
    store = Store(folder.store_url)
    asyncio.run(store.put_session("s", "", {}))
    store.close_blocking()
    with pytest.raises(UsageError, match=r"other settings: command \(was 'serve'\)"):
        open_and_close(config())


def test_a_run_of_an_earlier_release_is_bound_by_what_it_recorded(config: Callable[..., RunConfig]) -> None:
    folder = begin(config())
    recorded = json.loads((folder.path / "run.json").read_text())
    for name in ("harness.version", "harness.options"):
        del recorded[name]
    (folder.path / "run.json").write_text(json.dumps(recorded))
    open_and_close(config(harness__options={"command": "another"}))


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("sqlite:///store.db", "'store' is a PostgreSQL URL"),
        ("postgresql://db/runs?schema=mine", "each run makes one of its own"),
        ("db.example/runs", "is not a database URL"),
    ],
)
def test_a_store_that_runs_could_not_share_safely_is_refused(
    config: Callable[..., RunConfig], store: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        open_and_close(config(store=store))


def test_each_run_has_a_schema_of_its_own_and_the_password_is_nowhere_in_its_folder(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    url = "postgresql://ann:s3cret@db/runs"
    folders = [open_and_close(config(store=url, out=tmp_path / name / "My run!")) for name in "ab"]
    schemas = [json.loads((f.path / "store.json").read_text())["schema"] for f in folders]
    assert schemas[0] != schemas[1] and all(s.startswith("polar_my_run_") for s in schemas)
    assert folders[0].store_url == f"postgresql+psycopg://ann:s3cret@db/runs?schema={schemas[0]}"
    assert RunFolder(folders[0].path).store_url == f"postgresql+psycopg://ann@db/runs?schema={schemas[0]}"
    assert [files_with(f.path, "s3cret") for f in folders] == [[], []]
    assert "store: postgresql://ann@db/runs\n" in (folders[0].path / "config.yaml").read_text()
    assert "s3cret" not in repr(config(store=url))


@pytest.mark.postgres
def test_a_run_stays_in_the_store_it_began_in(config: Callable[..., RunConfig], postgres: PostgresServer) -> None:
    folder = begin(config(store=postgres.url))
    assert not (folder.path / "store.db").exists()
    again = open_and_close(config(store=postgres.url))
    assert again.store_url == folder.store_url
    with pytest.raises(UsageError, match=r"other settings: seed"):
        open_and_close(config(store=postgres.url, seed=7))


@pytest.mark.postgres
def test_a_run_is_not_resumed_in_another_store(
    config: Callable[..., RunConfig], postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", postgres.password)
    begin(config(store=postgres.url))
    with pytest.raises(UsageError, match=r"other settings: store \(was 'postgresql://polar@127.0.0.1"):
        open_and_close(config())


@pytest.mark.postgres
def test_a_run_that_began_in_its_folder_is_not_moved_to_a_server(
    config: Callable[..., RunConfig], postgres: PostgresServer
) -> None:
    begin(config())
    with pytest.raises(UsageError, match=r"other settings: store \(was 'store.db in the run folder'\)"):
        open_and_close(config(store=postgres.url))


@pytest.mark.postgres
def test_a_run_without_a_result_may_still_choose_its_store(
    config: Callable[..., RunConfig], postgres: PostgresServer
) -> None:
    begin(config(), score=None)
    assert begin(config(store=postgres.url), score=None).store_url.startswith("postgresql")
