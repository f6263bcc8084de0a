"""The run folder, which explains itself: config.yaml, versions.json, store.db, engine.jsonl, metrics.jsonl, run.log."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from polarlike.config import RunConfig, to_yaml
from polarlike.records import UsageError
from polarlike.store import Store

_PACKAGES = ("polarlike", "renderers", "tokenizers", "transformers", "torch", "aiohttp", "sqlalchemy", "docker")


class RunFolder:
    """One process at a time writes a run. `label` marks its sandboxes, so that a later process finds what this left."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: TextIO | None = None

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.path / 'store.db'}"

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
        self._check_same_run(config, command)
        (self.path / "config.yaml").write_text(to_yaml(config))
        (self.path / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n")
        logging.basicConfig(
            filename=self.path / "run.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )

    def _check_same_run(self, config: RunConfig, command: str) -> None:
        """A resumed run must be the same run: tasks, harness, engine and sampling decide what its rollouts mean. A run
        that failed before its first rollout binds nobody: the user mends the command and gives it again."""
        file = self.path / "run.json"
        now = {
            "command": command,
            "tasks": config.tasks,
            "harness": config.harness.name,
            "engine": config.engine.spec,
            "weights of the model": _weights_digest(config.engine.model_folder),
            "sampling": config.sampling.model_dump(mode="json"),
            "seed": config.seed,
        }
        was = self._begun_as(file)
        changed = [k for k in now if was and was.get(k) != now[k]]
        if changed:
            raise UsageError(
                f"The run in {self.path} was made with other settings: {changed[0]} (was {was.get(changed[0])!r}); "
                "use the same settings to resume it, or another --out."
            )
        if not was:
            whole = file.with_suffix(".new")
            whole.write_text(json.dumps(now, indent=2) + "\n")
            whole.replace(file)

    def _begun_as(self, file: Path) -> dict[str, Any]:
        """The settings of the run that this folder holds; empty where it holds no session yet."""
        if not (file.is_file() and (self.path / "store.db").is_file() and Store(self.store_url).sessions()):
            return {}
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
