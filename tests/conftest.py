"""Shared by all rooms: one tiny random model folder a session, and the deselection of what this machine cannot run.

A test that needs a Docker engine, root, PostgreSQL or vLLM is marked so. Where the machine lacks it, such tests are
deselected, named and counted at the end; with POLAR_TEST_ALL=1 (CI) a lack is an error instead.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer, programs

from polarlike.engines.tiny import build_tiny_model


def _docker_works() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


VLLM_VENV = Path(__file__).parent.parent / ".venv-vllm"
NEEDS = {
    "docker": ("a running Docker engine", _docker_works),
    "root": ("root", lambda: os.geteuid() == 0),
    "vllm": ("vLLM (make vllm)", lambda: any(VLLM_VENV.glob(".ready-*"))),
    "postgres": ("PostgreSQL's programs (apt install postgresql)", lambda: programs() is not None),
}
_deselected: dict[str, list[str]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {m for m, (_, works) in NEEDS.items() if any(i.get_closest_marker(m) for i in items) and not works()}
    if missing and os.environ.get("POLAR_TEST_ALL") == "1":
        raise pytest.UsageError(f"All tests are to run, but this machine lacks: {', '.join(sorted(missing))}.")
    kept, dropped = [], []
    for item in items:
        lacks = next((m for m in sorted(missing) if item.get_closest_marker(m)), None)
        if lacks is None:
            kept.append(item)
        else:
            dropped.append(item)
            _deselected.setdefault(lacks, []).append(item.nodeid)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, names in _deselected.items():
        terminalreporter.write_line(f"NOT RUN: {len(names)} tests need {NEEDS[marker][0]}, which is missing here:")
        for name in names:
            terminalreporter.write_line(f"  {name}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 folder with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this session's own; the test needs the marker postgres."""
    with PostgresServer() as server:
        yield server
