"""polar show of served sessions, of folders that hold no run, and of a disk that cannot be written."""

import asyncio
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from polarlike.commands.show import show_rollout, show_run
from polarlike.config import load_config
from polarlike.records import (
    Call,
    Cause,
    Delivery,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    Score,
    UsageError,
)
from polarlike.rollouts.folder import RunFolder
from polarlike.store import Store


def call(session: str, index: int, parent: str | None, asked: str, answered: str, delivery: Delivery) -> Call:
    new: list[Message] = [{"role": "user", "content": asked}]
    ids = np.arange(3, dtype=np.int32)
    return Call(
        call_id=f"call_{session}_{index}",
        session_id=session,
        index=index,
        parent_id=parent,
        cause=Cause.CONTINUES if parent else Cause.FIRST,
        new_messages=new,
        tools=None,
        suffix_ids=ids,
        completion_ids=ids,
        logprobs=np.full(3, -0.5, np.float32),
        versions=np.full(3, index, np.int32),
        forced=np.zeros(3, np.bool_),
        reply={"role": "assistant", "content": answered},
        finish_reason="stop",
        sampling=Sampling(),
        delivery=delivery,
    )


def recorded(path: Path, *, served: bool) -> None:
    """A folder with two sessions of two calls and none, or with one rollout of two calls."""
    folder = RunFolder(path)
    folder.open(load_config(None, {"out": path}), "serve" if served else "collect")
    store = Store(folder.store_url)

    async def fill() -> None:
        await store.put_session("session_a1", "" if served else "roll_1", {})
        if served:
            await store.put_session("session_b2", "", {})
        first = call("session_a1", 0, None, "the question", "the answer", Delivery.FLUSHED)
        await store.put_call(first)
        await store.put_call(call("session_a1", 1, first.call_id, "and more", "no more", Delivery.LOST))
        if not served:
            rollout = Rollout("roll_1", "t", "t", 0, RolloutStatus.FINISHED, session_id="session_a1", score=Score(0.5))
            await store.put_rollout(rollout)
        await store.close()

    asyncio.run(fill())
    folder.close()


def shown(path: Path, name: str | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=140)
    if name is None:
        show_run(path, console)
    else:
        show_rollout(path, name, console)
    return out.getvalue()


def test_a_served_run_is_its_sessions_with_their_calls_and_how_far_they_got(tmp_path: Path) -> None:
    recorded(tmp_path / "run", served=True)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown(tmp_path / "run").splitlines()]
    first, second = (next(r for r in rows if r[0] == name) for name in ("session_a1", "session_b2"))
    assert first[2:] == ["2", "6", "0..1", "1 flushed, 1 lost"]
    assert second[2:] == ["0", "0", "-", "-"]


def test_a_served_session_is_shown_turn_by_turn(tmp_path: Path) -> None:
    recorded(tmp_path / "run", served=True)
    text = shown(tmp_path / "run", "session_a")
    places = [text.index(part) for part in ("the question", "the answer", "and more", "no more", "fidelity")]
    assert places == sorted(places)
    with pytest.raises(UsageError, match="no rollout 'session_c'"):
        shown(tmp_path / "run", "session_c")


def test_showing_a_run_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    recorded(tmp_path / "run", served=False)
    store = (tmp_path / "run" / "store.db").read_bytes()
    assert "score 0.5" in shown(tmp_path / "run")
    assert (tmp_path / "run" / "store.db").read_bytes() == store


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_a_run_is_said_so_and_gets_none(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="There is no run at"):
        shown(tmp_path / "run")
    assert not list(tmp_path.rglob("store.db"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
@pytest.mark.parametrize("served", [True, False])
def test_a_run_on_a_read_only_disk_is_shown(disk: Path, served: bool) -> None:
    recorded(disk / "run", served=served)
    before = shown(disk / "run"), shown(disk / "run", "session_a1" if served else "t:0")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert (shown(disk / "run"), shown(disk / "run", "session_a1" if served else "t:0")) == before
    assert "the answer" in before[1]
