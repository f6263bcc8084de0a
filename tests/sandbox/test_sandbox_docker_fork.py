"""Programs that start by a fork: the same rights, limits, streams and ends as those the engine starts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import SandboxSpec, Toolbox, ToolboxRecipe
from sandbox.docker_box import DockerBox, DockerProvider

pytestmark = [pytest.mark.docker, pytest.mark.root]

# Named and made as the bare Python, so that it is built once. `this` prints nothing here that is looked at.
RECIPE = ToolboxRecipe("python", [], preload=["decimal"], varying=["SECRET"])
ENV = {"HOME": "/tmp/home", "SECRET": "s3cret"}

PROBE = textwrap.dedent(
    """
    import ctypes, json, os, signal, sys
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(number, *rest):
        return ctypes.get_errno() if libc.syscall(number, *rest) < 0 else 0
    forked = "decimal" in sys.modules
    rights = ["Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"]
    rights += ["Seccomp_filters", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "Mems_allowed", "Threads", "TracerPid"]
    def text(path):
        return open(path).read()
    print(json.dumps({
        "forked": forked,
        "secret": "s3cret" in text("/proc/self/environ"),
        "same": {
            **{name: status[name] for name in rights},
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
            "limits": text("/proc/self/limits"),
            "cgroup": text("/proc/self/cgroup"),
            "oom": text("/proc/self/oom_score_adj"),
            "mounts": text("/proc/self/mountinfo"),
            "root": sorted(os.listdir("/")),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "open": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 3 or os.path.exists(
                f"/proc/self/fd/{name}")),
            "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getppid()],
            "umask": os.umask(0),
            "nice": os.nice(0),
            "arguments": [sys.argv, __name__, __file__, sys.path, sys.flags.isolated],
            "read-only program": bool(os.statvfs("/proc/self/exe").f_flag & os.ST_RDONLY),
            "dumpable": libc.prctl(3, 0, 0, 0, 0),
            "securebits": libc.prctl(27, 0, 0, 0, 0),
            "refused": [
                refused(272, 0x10000000), refused(165, b"t", b"/mnt", b"tmpfs", 0, None), refused(250, 0, -3, 0),
                refused(308, 0, 0), refused(435, 0, 0), refused(321, 0, 0, 0), refused(135, 0x40000),
            ],
        },
    }))
    """
)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(tmp_path, f"fork-{os.getpid()}")
    yield made
    await made.close()


@pytest.fixture
async def toolbox(provider: DockerProvider) -> Toolbox:
    return await provider.toolbox(RECIPE)


@pytest.fixture
async def box(provider: DockerProvider, toolbox: Toolbox) -> AsyncIterator[DockerBox]:
    made = await start(provider, toolbox)
    yield made
    await made.stop()


async def start(provider: DockerProvider, toolbox: Toolbox, **more: Any) -> DockerBox:
    assert toolbox.mount is not None
    return await provider.start(SandboxSpec(memory_mb=128, pids=40, mounts=[toolbox.mount], **more), "fork")


async def command(box: DockerBox, toolbox: Toolbox, code: str) -> list[str]:
    """What starts `code` by a fork: it was loaded with `decimal` already there."""
    await box.write("/opt/code.py", f"import sys\nassert 'decimal' in sys.modules, 'not forked'\n{code}".encode())
    return [f"{toolbox.root}/bin/python", "-I", "/opt/code.py"]


async def test_a_forked_program_has_nothing_more_and_nothing_less_than_an_executed_one(
    box: DockerBox, toolbox: Toolbox
) -> None:
    await box.write("/opt/probe.py", PROBE.encode())
    plain = [f"{toolbox.root}/bin/python", "-I", "/opt/probe.py", "one", "two words"]
    runs = [await box.run(line, timeout=60, env=ENV, cwd="/tmp") for line in (plain, ["env", *plain])]
    forked, executed = (json.loads(run.stdout) for run in runs)
    assert (forked["forked"], executed["forked"]) == (True, False)
    assert forked["same"] == executed["same"]
    assert int(forked["same"]["CapBnd"], 16) == 0
    assert forked["same"]["read-only program"]
    assert 0 not in forked["same"]["refused"]
    # The server never had what differs between starts.
    assert (forked["secret"], executed["secret"]) == (False, True)
    assert forked["same"]["environment"]["SECRET"] == "s3cret"


async def test_streams_and_exit_codes_are_those_of_the_program(box: DockerBox, toolbox: Toolbox) -> None:
    line = await command(box, toolbox, "sys.stdout.write(sys.stdin.read()); sys.stderr.write('err'); sys.exit(3)")
    result = await box.run(line, timeout=60, env=ENV, stdin=b"x" * 300_000)
    assert (result.exit_code, result.stderr, result.timed_out) == (3, b"err", False)
    assert result.stdout == b"x" * 300_000
    line = await command(box, toolbox, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (await box.run(line, timeout=60, env=ENV)).exit_code == 137
    line = await command(box, toolbox, "raise ValueError('seen')")
    result = await box.run(line, timeout=60, env=ENV)
    assert result.exit_code == 1
    assert result.stderr.endswith(b"ValueError: seen\n")


async def test_a_timeout_and_a_cancelled_run_kill_what_hid(
    provider: DockerProvider, box: DockerBox, toolbox: Toolbox, daemon: str
) -> None:
    line = await command(box, toolbox, f"sys.argv = ['x', '/tmp/pid', '300']\nexec({daemon!r})")
    result = await box.run(line, timeout=3, env=ENV)
    assert (result.timed_out, result.exit_code) == (True, 137)
    assert (await box.run(["sh", "-c", "test -s /tmp/pid && ! kill -0 $(cat /tmp/pid)"], timeout=10)).exit_code == 0
    line = await command(box, toolbox, "open('/tmp/on', 'w').close()\nimport time\ntime.sleep(300)")
    running = asyncio.create_task(box.run(line, timeout=300, env=ENV))
    while await box.read("/tmp/on") is None:  # noqa: ASYNC110 - the file tells
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(provider.api.top(box.box_id)["Processes"]) == 2  # process 1 and its sleep


async def test_limits_hold_for_a_forked_program(box: DockerBox, toolbox: Toolbox) -> None:
    line = await command(box, toolbox, "x = bytearray(400 << 20)")
    assert (await box.run(line, timeout=60, env=ENV)).exit_code == 137
    bomb = (
        "import os, time\ntry:\n  for i in range(100):\n    if os.fork() == 0: time.sleep(20)\nexcept OSError: print(i)"
    )
    result = await box.run(await command(box, toolbox, bomb), timeout=3, env=ENV)
    assert 20 < int(result.stdout) < 40


async def test_a_process_of_the_box_gets_no_hold_of_one_that_still_has_rights(box: DockerBox, toolbox: Toolbox) -> None:
    """A spy in the box tries every new process, over and over, while programs are forked into it."""
    spy = textwrap.dedent(
        """
        import os, sys
        print("on", flush=True)
        own = os.listdir("/proc")
        got = open("/tmp/got", "w", buffering=1)
        while not os.path.exists("/tmp/stop"):
            for pid in os.listdir("/proc"):
                if not pid.isdigit() or pid in own: continue
                for what in ("mem", "environ", "fd/0", "fd/1", "fd/3", "fd/4", "root", "cwd", "exe"):
                    try:
                        handle = os.open(f"/proc/{pid}/{what}", os.O_RDONLY)
                        caps = [l for l in open(f"/proc/{pid}/status") if l.startswith(("CapPrm", "Seccomp:"))]
                        os.close(handle)
                    except OSError:
                        continue
                    got.write(f"{what} {caps}\\n".replace("\\\\t", " "))
        got.write("end\\n")
        """
    )
    await box.write("/opt/spy.py", spy.encode())
    await box.launch(["python3", "/opt/spy.py"])
    line = await command(box, toolbox, "import time; time.sleep(0.1)")
    for _ in range(6):
        assert (await box.run(line, timeout=60, env=ENV)).exit_code == 0
    await box.write("/tmp/stop", b"")
    while b"end\n" not in (seen := await box.read("/tmp/got") or b""):  # noqa: ASYNC110 - the file tells
        await asyncio.sleep(0.05)
    lines = seen.decode().splitlines()[:-1]
    assert any(line.startswith("mem ") for line in lines)  # once it is an ordinary process of the box, as any other
    plain = "['CapPrm: 0000000000000000\\n', 'Seccomp: 2\\n']"
    assert {line for line in lines if not line.endswith(plain)} == set()


async def test_another_environment_or_a_network_means_the_plain_start(
    provider: DockerProvider, toolbox: Toolbox, box: DockerBox, caplog: pytest.LogCaptureFixture
) -> None:
    line = await command(box, toolbox, "")
    assert (await box.run(line, timeout=60, env=ENV)).exit_code == 0
    with caplog.at_level(logging.WARNING):
        assert b"not forked" in (await box.run(line, timeout=60, env={**ENV, "MORE": "1"})).stderr
    assert "its environment is not that of the first start" in caplog.text
    other = await start(provider, toolbox, env={"LANG": "C"})
    assert b"not forked" in (await other.run(await command(other, toolbox, ""), timeout=60, env=ENV)).stderr
    await other.stop()


async def test_a_library_that_cannot_be_loaded_means_the_plain_start(
    provider: DockerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    toolbox = await provider.toolbox(ToolboxRecipe("python", [], preload=["no_such_module"]))
    box = await start(provider, toolbox)
    with caplog.at_level(logging.WARNING):
        result = await box.run([f"{toolbox.root}/bin/python", "-I", "/dev/stdin"], timeout=60, stdin=b"print(1)")
    assert result.stdout == b"1\n"
    assert "No module named 'no_such_module'" in caplog.text
    await box.stop()


async def test_closing_ends_the_server(tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, f"fork-end-{os.getpid()}")
    toolbox = await provider.toolbox(RECIPE)
    box = await start(provider, toolbox)
    assert (await box.run(await command(box, toolbox, ""), timeout=60, env=ENV)).exit_code == 0
    ((_, server),) = provider.forks._servers.values()
    await provider.close()
    assert (await server)._process.returncode is not None


async def test_who_wants_no_fork_gets_the_plain_start(tmp_path: Path) -> None:
    provider = DockerProvider(tmp_path, f"fork-off-{os.getpid()}", fork=False)
    toolbox = await provider.toolbox(RECIPE)
    box = await start(provider, toolbox)
    result = await box.run(await command(box, toolbox, ""), timeout=60, env=ENV)
    assert result.exit_code != 0 and b"not forked" in result.stderr
    await provider.close()
