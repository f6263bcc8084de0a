"""Docker boxes: what is shut, what is bounded, what gets in and out, and that nothing outlives its time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import docker
import pytest

from sandbox.base import SandboxError, SandboxSpec
from sandbox.docker_box import DockerBox, DockerProvider

pytestmark = pytest.mark.docker

Serve = Callable[[socket.socket, str], Awaitable[asyncio.Server]]
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=3).read().decode(), end='')"


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(tmp_path, f"test-{os.getpid()}")
    yield made
    await made.close()


@pytest.fixture
async def box(provider: DockerProvider) -> AsyncIterator[DockerBox]:
    made = await provider.start(SandboxSpec(memory_mb=128, pids=40), "box")
    yield made
    await made.stop()


def processes(box: DockerBox) -> int:
    client = docker.from_env()
    count = len(client.containers.get(box.box_id).top()["Processes"])
    client.close()
    return count


# ---------------------------------------------------------------- commands


async def test_a_command_runs_in_the_work_folder_with_its_streams_apart(box: DockerBox) -> None:
    result = await box.run(["sh", "-c", "pwd; echo $MINE; echo err >&2; exit 3"], timeout=10, env={"MINE": "mine"})
    assert (result.exit_code, result.timed_out) == (3, False)
    assert result.stdout == b"/app\nmine\n"
    assert result.stderr == b"err\n"


async def test_short_output_is_never_lost(box: DockerBox) -> None:
    results = [await box.run(["echo", str(number)], timeout=10) for number in range(20)]
    assert [result.stdout for result in results] == [f"{number}\n".encode() for number in range(20)]


async def test_stdin_reaches_the_command_and_ends(box: DockerBox) -> None:
    data = bytes(range(256)) * 2000
    assert (await box.run(["cat"], timeout=10, stdin=data)).stdout == data


async def test_a_command_that_does_not_read_its_stdin_ends_all_the_same(box: DockerBox) -> None:
    assert (await box.run(["true"], timeout=10, stdin=b"x" * 5_000_000)).exit_code == 0


async def test_a_missing_program_is_an_exit_code_and_not_a_fault(box: DockerBox) -> None:
    assert (await box.run(["no-such-program"], timeout=10)).exit_code in (126, 127)


async def test_endless_output_is_cut_and_not_kept(box: DockerBox) -> None:
    result = await box.run(["sh", "-c", "echo first; exec yes"], timeout=2, max_output=1000)
    assert result.timed_out
    assert result.stdout.startswith(b"first\ny\n")
    assert b"bytes left out" in result.stdout
    assert len(result.stdout) < 1100


async def test_a_timeout_kills_a_child_that_hid(box: DockerBox, daemon: str) -> None:
    result = await box.run(["python3", "-c", daemon, "/tmp/pid", "300"], timeout=2)
    assert result.timed_out
    assert result.exit_code == 137
    assert result.seconds < 8
    assert processes(box) == 2  # process 1 and its sleep
    assert (await box.run(["test", "-s", "/tmp/pid"], timeout=10)).exit_code == 0


async def test_a_timeout_holds_where_the_agent_replaced_the_shell(box: DockerBox) -> None:
    spoil = "cp /bin/true /bin/kill; cp /usr/bin/sleep /tmp/s; rm /bin/sh; cp /bin/true /bin/sh; exec /tmp/s 300"
    result = await box.run(["bash", "-c", spoil], timeout=2)
    assert result.timed_out
    client = docker.from_env()
    assert client.containers.get(box.box_id).status == "exited"
    client.close()
    assert await box.read("/tmp/s") is not None


async def test_a_cancelled_command_is_killed(box: DockerBox) -> None:
    task = asyncio.create_task(box.run(["sleep", "300"], timeout=300))
    while processes(box) < 3:  # noqa: ASYNC110 - the engine tells
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes(box) == 2


async def test_commands_in_many_boxes_do_not_wait_for_each_other(provider: DockerProvider) -> None:
    boxes = await asyncio.gather(*(provider.start(SandboxSpec(memory_mb=64), "many") for _ in range(4)))
    results = await asyncio.gather(*(box.run(["sh", "-c", "sleep 1; hostname"], timeout=20) for box in boxes))
    assert [result.stdout for result in results] == [b"box\n"] * 4
    await asyncio.gather(*(box.stop() for box in boxes))


# ---------------------------------------------------------------- limits


async def test_memory_is_bounded_and_the_kill_shows_as_137(box: DockerBox) -> None:
    result = await box.run(["python3", "-c", "x = bytearray(400 << 20)"], timeout=30)
    assert result.exit_code == 137
    assert not result.timed_out


async def test_processes_are_bounded(box: DockerBox) -> None:
    fork = (
        "import os, time\ntry:\n  for i in range(100):\n    if os.fork() == 0: time.sleep(20)\nexcept OSError: print(i)"
    )
    result = await box.run(["python3", "-c", fork], timeout=20)
    assert 20 < int(result.stdout) < 40


async def test_a_full_process_table_is_still_swept(box: DockerBox) -> None:
    bomb = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    result = await box.run(["python3", "-c", bomb], timeout=2)
    assert result.timed_out
    assert result.seconds < 15


async def test_a_program_has_no_capabilities_and_can_gain_none(box: DockerBox) -> None:
    status = (await box.run(["cat", "/proc/self/status"], timeout=10)).stdout.decode()
    values = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert int(values["CapEff"], 16) == int(values["CapBnd"], 16) == 0
    assert values["NoNewPrivs"] == "1"
    assert values["Seccomp"] == "2"


async def test_there_is_no_network_but_loopback(box: DockerBox) -> None:
    devices = (await box.run(["cat", "/proc/net/dev"], timeout=10)).stdout.decode().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]


async def test_the_hosts_servers_are_out_of_reach(box: DockerBox, serve: Serve) -> None:
    listener = socket.create_server(("0.0.0.0", 0))
    server = await serve(listener, "host")
    port = listener.getsockname()[1]
    for address in ("127.0.0.1", "172.17.0.1", "host.docker.internal"):
        result = await box.run(["python3", "-c", FETCH, f"http://{address}:{port}/"], timeout=20)
        assert result.exit_code == 1, result.stdout
    server.close()


# ---------------------------------------------------------------- files


async def test_files_go_in_owned_by_root_and_usable_without_capabilities(box: DockerBox, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    script = folder / "deep" / "run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o700)
    os.chown(script, 12345, 12345) if os.geteuid() == 0 else None
    (folder / "link").symlink_to("deep/run.sh")
    await box.put(folder, "/opt/new/place")
    await box.put(script, "/opt/other/name.sh")
    assert (await box.run(["/opt/new/place/link"], timeout=10)).stdout == b"ran\n"
    assert (await box.run(["/opt/other/name.sh"], timeout=10)).stdout == b"ran\n"
    owner = await box.run(["stat", "-c", "%u:%g %a", "/opt/new/place/deep/run.sh"], timeout=10)
    assert owner.stdout == b"0:0 700\n"


async def test_writing_leaves_the_modes_of_folders_on_the_way(box: DockerBox) -> None:
    await box.write("/tmp/a/b/file", b"\x00\xff", mode=0o600)
    assert await box.read("/tmp/a/b/file") == b"\x00\xff"
    assert (await box.run(["stat", "-c", "%a", "/tmp", "/tmp/a/b/file"], timeout=10)).stdout == b"1777\n600\n"


async def test_reading_tells_a_missing_file_a_folder_and_a_link_from_a_file(box: DockerBox) -> None:
    await box.run(["ln", "-s", "/etc/passwd", "/app/link"], timeout=10)
    assert await box.read("/app/none") is None
    assert await box.read("/app") is None
    assert await box.read("link") is None
    await box.write("empty", b"")
    assert await box.read("/app/empty") == b""


WORK = """
set -e
git init -q . && echo one > committed.txt && echo one > staged.txt && echo one > unstaged.txt && echo one > gone.txt
echo one > mode.sh && printf '\\000\\377' > binary.bin && mkdir dir && echo x > dir/inner && ln -s staged.txt link
echo same > same.txt && git add -A && git commit -qm start
"""
CHANGE = """
set -e
echo two > committed.txt && git commit -qam agent
echo two > staged.txt && git add staged.txt
echo two > unstaged.txt && rm gone.txt && chmod 755 mode.sh && printf '\\000\\376' > binary.bin
echo new > untracked.txt && ln -sfn unstaged.txt link && rm -r dir && echo file > dir
mkdir -p __pycache__ made && echo junk > __pycache__/m.pyc && ln untracked.txt hard.txt
echo evil > .git/hooks/pre-commit
"""


async def test_the_patch_holds_every_kind_of_change_and_lands_whole_elsewhere(
    box: DockerBox, provider: DockerProvider
) -> None:
    await box.run(["sh", "-c", WORK], timeout=20)
    await box.mark_start()
    done = await box.run(["sh", "-c", CHANGE], timeout=20)
    assert done.exit_code == 0, done.stderr
    patch = await box.patch()
    assert patch.summary()["added"] == ["hard.txt", "made", "untracked.txt"]
    assert patch.summary()["modified"] == [
        "binary.bin", "committed.txt", "dir", "link", "mode.sh", "staged.txt", "unstaged.txt",
    ]  # fmt: skip
    assert patch.deleted == ["dir/inner", "gone.txt"]
    assert patch.files["binary.bin"].data == b"\x00\xfe"
    assert patch.files["hard.txt"].data == b"new\n"
    assert patch.files["link"].link == "unstaged.txt"
    assert patch.files["mode.sh"].mode == 0o755
    other = await provider.start(SandboxSpec(), "other")
    await other.run(["sh", "-c", WORK], timeout=20)
    await other.apply(type(patch).from_bytes(patch.to_bytes()))
    await box.run(["rm", "-r", "__pycache__"], timeout=10)
    names = ["sh", "-c", "find . -path ./.git -prune -o -printf '%p %y %m %l\\n' | sort; cat *.txt dir binary.bin"]
    assert (await other.run(names, timeout=10)).stdout == (await box.run(names, timeout=10)).stdout
    await other.stop()


async def test_a_patch_needs_a_start(box: DockerBox) -> None:
    with pytest.raises(SandboxError, match="mark_start"):
        await box.patch()


# ---------------------------------------------------------------- sockets


@pytest.mark.root
async def test_two_boxes_on_one_port_are_told_apart_in_their_namespaces(provider: DockerProvider, serve: Serve) -> None:
    await _told_apart(provider, serve)


async def test_two_boxes_on_one_port_are_told_apart_by_unix_sockets(tmp_path: Path, serve: Serve) -> None:
    provider = DockerProvider(tmp_path, f"test-{os.getpid()}", reach="socket")
    await _told_apart(provider, serve)
    await provider.close()


async def _told_apart(provider: DockerProvider, serve: Serve) -> None:
    boxes = [await provider.start(SandboxSpec(), "box") for _ in range(2)]
    servers = [await serve(await box.listen(8111), f"box {index}") for index, box in enumerate(boxes)]
    fetch = ["python3", "-c", FETCH]
    for index, box in enumerate(boxes):
        result = await box.run([*fetch, f"http://{box.address(8111)}/"], timeout=20)
        assert (result.stdout, result.stderr) == (f"box {index}".encode(), b"")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8111), timeout=1).close()
    # A timeout kills the box's processes; the socket is there again for the next command.
    assert (await boxes[0].run(["sleep", "60"], timeout=1)).timed_out
    assert (await boxes[0].run([*fetch, "http://127.0.0.1:8111/"], timeout=20)).stdout == b"box 0"
    servers[1].close()
    await boxes[1].stop()
    assert (await boxes[0].run([*fetch, "http://127.0.0.1:8111/"], timeout=20)).stdout == b"box 0"
    await boxes[0].stop()


# ---------------------------------------------------------------- what is left behind


async def test_reap_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    label = f"reap-{os.getpid()}"
    script = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from sandbox.base import SandboxSpec
        from sandbox.docker_box import DockerProvider
        async def main():
            provider = DockerProvider(Path({str(tmp_path)!r}), {label!r}, reach="socket")
            box = await provider.start(SandboxSpec(), "lost")
            print(box.box_id, box._reach.folder, flush=True)
            await asyncio.sleep(300)
        asyncio.run(main())
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=env, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    lost, folder = (await owner.stdout.readline()).decode().split()
    provider = DockerProvider(tmp_path, label)
    mine = await provider.start(SandboxSpec(), "mine")
    assert await provider.reap() == 0
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    assert Path(folder).exists()
    assert await provider.reap() == 1
    assert not Path(folder).exists()
    assert (await mine.run(["true"], timeout=10)).exit_code == 0
    client = docker.from_env()
    assert [
        found.id[:12] for found in client.containers.list(all=True, filters={"label": f"polarlike.run={label}"})
    ] == [mine.box_id]
    assert lost != mine.box_id
    client.close()
    await provider.close()


async def test_stop_may_be_called_twice_and_close_removes_the_rest(tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, f"close-{os.getpid()}")
    box = await provider.start(SandboxSpec(), "one")
    await provider.start(SandboxSpec(), "forgotten")
    await box.stop()
    await box.stop()
    await provider.close()
    client = docker.from_env()
    assert client.containers.list(all=True, filters={"label": f"polarlike.run=close-{os.getpid()}"}) == []
    client.close()
