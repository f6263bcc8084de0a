"""A fork server that failed or died is started again, a few times; a stand-in starts and dies at will."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox import docker_fork
from sandbox.base import Mount, Toolbox, ToolboxRecipe
from sandbox.docker_fork import Forks, NoFork

ROOT = "/toolbox"


class StandIn:
    def __init__(self) -> None:
        self.gone = self.closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def forks() -> Forks:
    made = Forks()
    made.know(ToolboxRecipe("python", [], preload=["decimal"]), Toolbox(ROOT, Mount("/host", ROOT)))
    return made


async def test_a_server_that_died_is_started_again_at_most_twice(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StandIn] = []

    async def start(*given: Any) -> StandIn:
        started.append(StandIn())
        return started[-1]

    monkeypatch.setattr(docker_fork.ForkServer, "start", start)
    for _ in range(5):
        server: Any = await forks._server(ROOT, {})
        assert await forks._server(ROOT, {}) is server
        server.gone = True
    assert [s.closed for s in started] == [True, True, False]


async def test_a_server_that_failed_is_started_again_at_most_twice(
    forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []

    async def start(*given: Any) -> None:
        starts.append(given)
        raise NoFork("no memory")

    monkeypatch.setattr(docker_fork.ForkServer, "start", start)
    for _ in range(5):
        with pytest.raises(NoFork, match="no memory"):
            await forks._server(ROOT, {})
    assert len(starts) == 3
