"""The run folder, which explains itself: config.yaml, versions.json, store.db, engine.jsonl, metrics.jsonl, run.log.

Where the calls are kept in a PostgreSQL database, store.json stands in place of store.db: its URL, and the name of this
run's own schema there. What holds: no password is written into the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import platform
import re
import secrets
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from polarlike import plugins
from polarlike.config import RunConfig, to_yaml
from polarlike.records import Unscored, UsageError
from polarlike.store import NoRun, Store
from polarlike.store.url import parse, public

_PACKAGES = (
    "polarlike",
    "renderers",
    "tokenizers",
    "transformers",
    "torch",
    "trl",
    "peft",
    "litellm",
    "aiohttp",
    "sqlalchemy",
    "psycopg",
    "docker",
)


class RunFolder:
    """One process at a time writes a run. `label` marks its sandboxes, so that a later process finds what this left."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: TextIO | None = None
        self._given_store = ""  # the setting, with its password if it has one

    @property
    def store_url(self) -> str:
        """What `Store` opens. A password that the settings did not give is found by PostgreSQL's client, in PGPASSWORD
        or ~/.pgpass."""
        place = self._store_place()
        if not place["url"]:
            return f"sqlite:///{self.path / 'store.db'}"
        same = self._given_store and public(parse(self._given_store)) == place["url"]
        url = parse(self._given_store if same else place["url"])
        return url.update_query_dict({"schema": place["schema"]}).render_as_string(hide_password=False)

    def _store_place(self) -> dict[str, str]:
        file = self.path / "store.json"
        place: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {"url": "", "schema": ""}
        return place

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def label(self) -> str:
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]

    def open(self, config: RunConfig, command: str) -> None:
        """Takes the folder for this process and writes what explains it. Raises UsageError where another process runs
        in it, or where it holds a run of other settings that cannot be resumed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as e:
            raise UsageError(
                f"Cannot write in the run folder {self.path} ({e.strerror}); choose another with --out."
            ) from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UsageError(f"Another process is running in {self.path}; wait for it or choose another --out.") from e
        store, self._given_store = _checked(config.store), config.store
        harness = _described(config) if command != "serve" else {}
        self._check_same_run(config, command, harness, store)
        (self.path / "config.yaml").write_text(to_yaml(config.model_copy(update={"store": store})))
        (self.path / "versions.json").write_text(json.dumps(_versions() | {"harness": harness}, indent=2) + "\n")
        logging.basicConfig(
            filename=self.path / "run.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )

    def _check_same_run(self, config: RunConfig, command: str, harness: dict[str, Any], store: str) -> None:
        """A resumed run must be the same run: tasks, harness, engine, sampling and trainer decide what its rollouts
        mean. Until a first result counts, a run binds nobody: the user mends the command and gives it again."""
        now = json.loads(json.dumps(_bound(config, command, harness)))
        was = self._begun_as()
        place = self._store_place()
        changed = {k: v for k, v in was.items() if now.get(k) != v}
        if was and place["url"] != store:
            changed["store"] = place["url"] or "store.db in the run folder"
        if changed:
            raise UsageError(_other_settings(self.path, *next(iter(changed.items()))))
        if not was:
            if place["url"] != store:
                self._write("store.json", {"url": store, "schema": _schema_name(self.path) if store else ""})
            self._write("run.json", now)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        whole = self.path / f"{name}.new"
        whole.write_text(json.dumps(value, indent=2) + "\n")
        whole.replace(self.path / name)

    def _begun_as(self) -> dict[str, Any]:
        """The settings of the run that this folder holds; empty where it holds no result that counts yet."""
        file = self.path / "run.json"
        if not file.is_file():
            return {}
        try:
            store = Store(self.store_url, read_only=True)
        except NoRun:
            return {}
        try:
            served = any(not session.rollout_id for session in store.sessions())
            scores = (rollout.score for rollout in store.rollouts())
            if not served and not any(score and score.unscored is not Unscored.RETRY for score in scores):
                return {}
        finally:
            store.close_blocking()
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def metric(self, kind: str, **values: Any) -> None:
        """One line of metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **values}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None


def _bound(config: RunConfig, command: str, harness: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run may not change, by the names that an error gives. More samples or tasks extend a run that only
    collects: each place is its own there. In training they decide what a step is made of."""
    bound = {
        "command": command,
        "tasks": config.tasks,
        "harness": config.harness.name,
        **{f"harness.{k}": v for k, v in harness.items() if k != "name"},
        "engine": config.engine.spec,
        "weights of the model": _weights_digest(config.engine.model_folder),
        "sampling": config.sampling.model_dump(mode="json"),
        "seed": config.seed,
        "builder": config.builder,
    }
    if command == "train":
        bound |= {"trainer": config.trainer.name, "trainer.settings": config.trainer.settings}
        bound |= {"samples": config.samples, "limit": config.limit, "train.tasks_per_step": config.train.tasks_per_step}
        bound["train.shuffle_rewards"] = config.train.shuffle_rewards  # a control is no half of a run
    return bound


def _other_settings(path: Path, name: str, was: Any) -> str:
    said = f"The run in {path} was made with other settings: {name} (was {was!r}); "
    if name.startswith("trainer"):
        # A run's metrics are one curve of one trainer: a change in the middle of it would be seen nowhere.
        return said + (
            "a run keeps its trainer and its settings, so use the same to resume it, or go on from its last weights "
            f"as a new run with another --out and --engine embedded:{path}/checkpoints/STEP/model (with LoRA a "
            f"checkpoint has the adapter alone: embedded:{path}/model, which a run that ended leaves)."
        )
    return said + "use the same settings to resume it, or another --out."


def _described(config: RunConfig) -> dict[str, Any]:
    """What the harness says of itself: its pinned versions and its options."""
    harness = plugins.load("harnesses", config.harness.name)(config.harness.options)
    described: dict[str, Any] = harness.describe()
    return described


def _checked(store: str) -> str:
    """The store setting without its password. Raises UsageError."""
    if not store:
        return ""
    url = parse(store)
    if url.drivername == "sqlite":
        raise UsageError(
            "The setting 'store' is a PostgreSQL URL; without it the run folder has a SQLite file of its own."
        )
    if "schema" in url.query:
        raise UsageError("The setting 'store' names no schema: each run makes one of its own; take ?schema=... away.")
    return public(url)


def _schema_name(path: Path) -> str:
    """A name that no other run has, and that says which folder it belongs to."""
    name = re.sub(r"[^a-z0-9]+", "_", path.resolve().name.lower()).strip("_")[:40]
    return f"polar_{name}_{secrets.token_hex(4)}"


def _weights_digest(model: Path | None) -> str:
    """Tells one model's weights from another's by the name, size, first and last megabyte of each file; empty without
    a model. A whole hash of a large model would take longer than its first rollouts."""
    if model is None:
        return ""
    h = hashlib.sha256()
    for path in sorted(p for pattern in ("*.safetensors", "*.bin") for p in model.glob(pattern)):
        size = path.stat().st_size
        h.update(f"{path.name}:{size}".encode())
        with path.open("rb") as f:
            h.update(f.read(2**20))
            f.seek(max(0, size - 2**20))
            h.update(f.read(2**20))
    return h.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
