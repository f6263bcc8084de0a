"""Local boxes: paths, environment, streams, and that nothing outlives a box's timeout, its stop or its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sandbox.base import Mount, SandboxError, SandboxSpec
from sandbox.local_box import LocalBox, LocalProvider

Alive = Callable[[int], bool]
Serve = Callable[[socket.socket, str], Awaitable[asyncio.Server]]


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path, "test")


@pytest.fixture
async def box(provider: LocalProvider) -> AsyncIterator[LocalBox]:
    made = await provider.start(SandboxSpec(), "box")
    yield made
    await made.stop()


@pytest.fixture
def wait_gone(alive: Alive) -> Alive:
    """Whether a process ends within 5 s."""

    def wait(pid: int) -> bool:
        until = time.monotonic() + 5
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.02)
        return not alive(pid)

    return wait


async def pid_in(path: Path) -> int:
    while not path.exists() or not path.read_text().strip():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    return int(path.read_text())


async def test_a_command_runs_in_the_work_folder_with_its_streams_apart(box: LocalBox) -> None:
    result = await box.run(["sh", "-c", "pwd; echo err >&2; exit 3"], timeout=10)
    assert (result.exit_code, result.timed_out) == (3, False)
    assert result.stdout.decode().strip() == str(box.root / "app")
    assert result.stderr == b"err\n"


async def test_stdin_reaches_the_command(box: LocalBox) -> None:
    data = bytes(range(256)) * 2000
    result = await box.run(["cat"], timeout=10, stdin=data)
    assert result.stdout == data


async def test_the_environment_is_built_from_nothing(box: LocalBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "leaked")
    result = await box.run(["env"], timeout=10, env={"MINE": "1"})
    names = {line.split("=")[0] for line in result.stdout.decode().splitlines()}
    assert "HOST_SECRET" not in names
    assert {"MINE", "POLAR_WORKDIR", "POLAR_TESTS", "POLAR_LOGS"} <= names


async def test_a_missing_program_is_127_as_in_a_shell(box: LocalBox) -> None:
    result = await box.run(["no-such-program"], timeout=10)
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


async def test_a_program_killed_by_a_signal_is_128_and_its_number(box: LocalBox) -> None:
    assert (await box.run(["sh", "-c", "kill -TERM $$"], timeout=10)).exit_code == 128 + 15


async def test_long_output_keeps_its_head_and_its_tail(box: LocalBox) -> None:
    command = ["sh", "-c", "echo first; head -c 5000000 /dev/zero; echo last"]
    result = await box.run(command, timeout=20, max_output=1000)
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"last\n")
    assert len(result.stdout) < 1100


async def test_a_timeout_kills_a_child_that_forked_twice_and_cleaned_its_environment(
    box: LocalBox, daemon: str, wait_gone: Alive
) -> None:
    mark = box.root / "pid"
    result = await box.run([sys.executable, "-c", daemon, str(mark), "300"], timeout=1)
    assert result.timed_out
    assert result.seconds < 5
    assert wait_gone(int(mark.read_text()))


async def test_a_daemon_that_holds_the_streams_does_not_hold_the_command(
    box: LocalBox, daemon: str, alive: Alive
) -> None:
    mark = box.root / "pid"
    result = await box.run([sys.executable, "-c", daemon, str(mark), "0.2"], timeout=30)
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.seconds < 5
    assert alive(await pid_in(mark))


async def test_stop_kills_what_earlier_commands_left_running(
    provider: LocalProvider, daemon: str, alive: Alive
) -> None:
    box = await provider.start(SandboxSpec(), "box")
    mark = box.root.parent / "pid"
    await box.run([sys.executable, "-c", daemon, str(mark), "0.2"], timeout=30)
    pid = await pid_in(mark)
    await box.stop()
    await box.stop()
    assert not alive(pid)
    assert not box.root.exists()


async def test_a_cancelled_command_is_killed(box: LocalBox, daemon: str, wait_gone: Alive) -> None:
    mark = box.root / "pid"
    task = asyncio.create_task(box.run([sys.executable, "-c", daemon, str(mark), "300"], timeout=300))
    pid = await pid_in(mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wait_gone(pid)


async def test_nothing_outlives_a_killed_owner_and_reap_removes_its_folders(
    tmp_path: Path, daemon: str, wait_gone: Alive
) -> None:
    mark = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from sandbox.base import SandboxSpec
        from sandbox.local_box import LocalProvider
        async def main():
            box = await LocalProvider(Path({str(tmp_path)!r}), "test").start(SandboxSpec(), "lost")
            await box.run([sys.executable, "-c", {daemon!r}, {str(mark)!r}, "300"], timeout=300)
        asyncio.run(main())
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=env)
    pid = await pid_in(mark)
    provider = LocalProvider(tmp_path, "test")
    mine = await provider.start(SandboxSpec(), "mine")
    assert await provider.reap() == 0
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    assert wait_gone(pid)
    assert await provider.reap() == 1
    assert [path.name for path in mine.root.parent.iterdir()] == [mine.root.name]


async def test_files_go_in_and_come_back(box: LocalBox, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "run.sh").write_bytes(b"\xff\x00")
    (folder / "deep" / "run.sh").chmod(0o755)
    await box.put(folder, "/tests")
    await box.put(folder / "deep" / "run.sh", "/opt/new/run.sh")
    await box.write("/logs/reward.txt", b"1", mode=0o600)
    assert await box.read("/tests/deep/run.sh") == b"\xff\x00"
    assert (await box.run(["test", "-x", box.path("/opt/new/run.sh")], timeout=5)).exit_code == 0
    assert await box.read("/logs/reward.txt") == b"1"
    assert await box.read("/logs/none.txt") is None
    assert await box.read("/logs") is None


async def test_a_path_given_as_the_host_names_it_is_not_moved_twice(box: LocalBox) -> None:
    assert box.path(box.path("/app/x")) == box.path("/app/x") == str(box.root / "app" / "x")


async def test_a_mount_is_seen_at_its_path(provider: LocalProvider, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "a").write_text("a")
    box = await provider.start(SandboxSpec(mounts=[Mount(str(tmp_path / "tools"), "/opt/tools")]), "box")
    assert (await box.run(["cat", box.path("/opt/tools/a")], timeout=5)).stdout == b"a"
    await box.stop()
    assert (tmp_path / "tools" / "a").exists()


async def test_two_boxes_asking_for_one_port_get_sockets_of_their_own(provider: LocalProvider, serve: Serve) -> None:
    boxes = [await provider.start(SandboxSpec(), "box") for _ in range(2)]
    for index, box in enumerate(boxes):
        await serve(await box.listen(8080), f"box {index}")
    for index, box in enumerate(boxes):
        reply = await asyncio.to_thread(lambda box=box: urllib.request.urlopen(f"http://{box.address(8080)}/").read())
        assert reply == f"box {index}".encode()
        await box.stop()


async def test_an_address_without_a_listener_is_refused(box: LocalBox) -> None:
    with pytest.raises(SandboxError, match="call listen first"):
        box.address(8080)


async def test_the_patch_is_the_work_folder_against_its_start(box: LocalBox) -> None:
    await box.write("/app/kept.txt", b"kept")
    await box.write("/app/gone.txt", b"gone")
    await box.mark_start()
    await box.run(["sh", "-c", "echo new > new.txt; rm gone.txt"], timeout=5)
    patch = await box.patch()
    assert {path: entry.data for path, entry in patch.files.items()} == {"new.txt": b"new\n"}
    assert patch.deleted == ["gone.txt"]


async def test_a_patch_lands_in_another_box(box: LocalBox, provider: LocalProvider) -> None:
    await box.mark_start()
    await box.write("/app/deep/new.txt", b"new")
    other = await provider.start(SandboxSpec(), "other")
    await other.apply(await box.patch())
    assert await other.read("/app/deep/new.txt") == b"new"
    await other.stop()


async def test_a_task_with_an_image_is_refused(provider: LocalProvider) -> None:
    with pytest.raises(SandboxError, match="use --sandbox docker"):
        await provider.prepare(SandboxSpec(image="some/image"))


def test_the_check_says_that_nothing_is_isolated() -> None:
    assert "development only" in LocalProvider.checks()[0].detail
