"""A fresh store on each database (a SQLite file, a schema of a PostgreSQL server), and calls of chosen size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from polarlike.records import Call, Cause, Sampling
from polarlike.store import Store
from polarlike.store.database import open_database, writing

BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture(params=BACKENDS)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Each call gives the URL of another store."""
    if request.param == "postgres":
        url: Callable[[], str] = request.getfixturevalue("postgres").schema_url
        return url
    names = iter(range(10**6))
    return lambda: f"sqlite:///{tmp_path / f'store{next(names)}.db'}"


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def execute(url: str) -> Callable[..., Any]:
    """A statement in the store's database, apart from the store: its rows, or None where it has none."""

    def run(statement: sa.Executable | str) -> Any:
        engine = open_database(url)
        try:
            with writing(engine) as connection, connection.begin():
                found = connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
                return [tuple(row) for row in found] if found.returns_rows else None
        finally:
            engine.dispose()

    return run


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = Store(url)
    yield opened
    await opened.close()


@pytest.fixture
def call() -> Callable[..., Call]:
    """call(i, ...): call i of session "s", with ids and logprobs that do not compress away."""

    def make(i: int, *, suffix: int = 20, sampled: int = 10, **fields: Any) -> Call:
        rng = np.random.default_rng(i)
        settings: dict[str, Any] = {
            "session_id": "s",
            "new_messages": [{"role": "user", "content": f"question {i}"}],
            "tools": None,
            "reply": {"role": "assistant", "content": f"answer {i}"},
            "finish_reason": "stop",
        }
        return Call(
            call_id=f"call_{i}",
            index=i,
            parent_id=None,
            cause=Cause.FIRST,
            suffix_ids=rng.integers(0, 150_000, suffix, dtype=np.int32),
            completion_ids=rng.integers(0, 150_000, sampled, dtype=np.int32),
            logprobs=-rng.exponential(1, sampled).astype(np.float32),
            versions=np.zeros(sampled, np.int32),
            forced=np.zeros(sampled, np.bool_),
            sampling=Sampling(),
            **(settings | fields),
        )

    return make
