"""mini-swe-agent, the real program, against a scripted server: what it sends, and how each of its ends is read."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import HarnessContext, HarnessExit
from harnesses.mini_swe_agent import MiniSweAgent
from polarlike.records import UsageError
from sandbox.base import RunResult, SandboxSpec
from sandbox.docker_box import DockerProvider
from sandbox.local_box import LocalBox, LocalProvider

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Bash = Callable[..., dict[str, Any]]


def context(base_url: str, toolbox: str, home: str, **more: Any) -> HarnessContext:
    return HarnessContext(
        instruction="-Say \"hello\" = 'x'.",
        base_url=base_url,
        key="session-key",
        model="policy",
        workdir="/app",
        home=home,
        toolbox=toolbox,
        **{"timeout_s": 120.0, "max_calls": 0, **more},
    )


class Runner:
    """Runs the agent in a local box against the scripted server."""

    def __init__(self, box: LocalBox, toolbox: str, fake: Any) -> None:
        self.box, self.toolbox, self.fake = box, toolbox, fake

    async def __call__(self, timeout: float = 120.0, **more: Any) -> tuple[HarnessExit, RunResult]:
        harness = MiniSweAgent({})
        launch = harness.launch(context(self.fake.base_url, self.toolbox, self.box.path("/tmp/home"), **more))
        result = await self.box.run(launch.command, timeout=timeout, env=launch.env, stdin=launch.stdin)
        return harness.judge(result), result


@pytest.fixture
async def agent(tmp_path: Path, fake_openai: Any) -> AsyncIterator[Runner]:
    provider = LocalProvider(tmp_path, "test")
    recipe = MiniSweAgent().recipe()
    toolbox = await provider.toolbox(recipe)
    box = await provider.start(SandboxSpec(), "agent")
    yield Runner(box, toolbox.root, fake_openai)
    await box.stop()


def test_an_option_is_refused_and_a_command_is_sent_to_the_shell_harness() -> None:
    with pytest.raises(UsageError, match="no option 'command'; a command line of your own runs with --harness shell"):
        MiniSweAgent({"command": "python agent.py"})


@pytest.mark.harness
async def test_four_turns_end_in_a_submission(agent: Runner, call_bash: Bash) -> None:
    commands = ["pwd", "cat input.txt", "echo done > out.txt", SUBMIT]
    agent.fake.replies = [call_bash(command, f"call_{number}") for number, command in enumerate(commands)]
    await agent.box.write("input.txt", "grüße\n".encode())
    verdict, result = await agent()
    assert verdict == HarnessExit(True, "submitted"), result.stderr
    assert await agent.box.read("out.txt") == b"done\n"
    assert agent.fake.keys == ["Bearer session-key"] * 4
    first, last = agent.fake.requests[0], agent.fake.requests[3]
    assert first["model"] == "policy"
    assert "-Say \"hello\" = 'x'." in first["messages"][1]["content"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["bash"]
    assert "temperature" not in first
    assert not first.get("stream")
    assert last["messages"][: len(first["messages"])] == first["messages"]
    echoed = [message for message in last["messages"] if message["role"] == "assistant"]
    assert [message["tool_calls"][0] for message in echoed] == [
        reply["tool_calls"][0] for reply in agent.fake.replies[:3]
    ]
    observed = [json.loads(message["content"]) for message in last["messages"] if message["role"] == "tool"]
    assert observed[0]["output"].strip() == str(agent.box.workdir)
    assert observed[1] == {"returncode": 0, "output": "grüße\n"}
    assert json.loads(await agent.box.read("/tmp/home/trajectory.json") or b"")["info"]["exit_status"] == "Submitted"


@pytest.mark.harness
async def test_a_reply_it_cannot_parse_is_left_out_of_its_history(agent: Runner, call_bash: Bash) -> None:
    broken = call_bash("ls")
    broken["tool_calls"][0]["function"]["arguments"] = '{"command": "ls'
    agent.fake.replies = [{"role": "assistant", "content": "no call"}, broken, call_bash(SUBMIT)]
    verdict, _ = await agent()
    assert verdict == HarnessExit(True, "submitted")
    roles = [message["role"] for message in agent.fake.requests[2]["messages"]]
    assert roles == ["system", "user", "user", "user"]


@pytest.mark.harness
async def test_three_bad_replies_in_a_row_are_its_own_end(agent: Runner) -> None:
    agent.fake.replies = [{"role": "assistant", "content": "no call"}]
    verdict, _ = await agent()
    assert (verdict.ok, verdict.reason) == (True, "exited")
    assert len(agent.fake.requests) == 3


@pytest.mark.harness
async def test_the_call_limit_is_kept_and_named(agent: Runner, call_bash: Bash) -> None:
    agent.fake.replies = [call_bash("echo 'Exit:'")]
    verdict, _ = await agent(max_calls=2)
    assert (verdict.ok, verdict.reason) == (False, "call_limit")
    assert len(agent.fake.requests) == 2


@pytest.mark.harness
async def test_a_failed_request_is_tried_again(agent: Runner, call_bash: Bash) -> None:
    agent.fake.replies = [500, 429, call_bash(SUBMIT)]
    verdict, _ = await agent()
    assert verdict == HarnessExit(True, "submitted")
    assert len(agent.fake.requests) == 3


@pytest.mark.harness
@pytest.mark.slow
async def test_a_dead_proxy_is_an_error_within_half_a_minute(agent: Runner) -> None:
    agent.fake.base_url = "http://127.0.0.1:9"
    verdict, result = await agent()
    assert (verdict.ok, verdict.reason) == (False, "error")
    assert "exit code 1" in verdict.detail
    assert result.seconds < 40


@pytest.mark.harness
async def test_a_config_of_the_same_name_in_the_work_folder_is_not_taken(agent: Runner, call_bash: Bash) -> None:
    await agent.box.write("mini.yaml", b"agent: {system_template: planted, instance_template: planted}")
    await agent.box.write("json.py", b"raise SystemExit('planted')")
    agent.fake.replies = [call_bash(SUBMIT)]
    verdict, result = await agent()
    assert verdict == HarnessExit(True, "submitted"), result.stderr
    assert "planted" not in agent.fake.requests[0]["messages"][0]["content"]


@pytest.mark.harness
async def test_a_run_that_is_cut_is_a_time_limit(agent: Runner, call_bash: Bash) -> None:
    agent.fake.replies = [call_bash("sleep 300")]
    verdict, _ = await agent(timeout=8)
    assert (verdict.ok, verdict.reason) == (False, "time_limit")


@pytest.mark.harness
@pytest.mark.docker
@pytest.mark.parametrize("reach", [pytest.param("namespace", marks=pytest.mark.root), "socket"])
async def test_it_runs_in_a_box_without_a_network(
    reach: str, tmp_path: Path, fake_openai: Any, call_bash: Bash
) -> None:
    from aiohttp import web

    provider = DockerProvider(tmp_path, f"harness-{os.getpid()}", reach=reach)
    harness = MiniSweAgent({})
    toolbox = await provider.toolbox(harness.recipe())
    assert toolbox.mount is not None
    box = await provider.start(SandboxSpec(mounts=[toolbox.mount]), "agent")
    fake_openai.replies = [call_bash("env; command -v python3"), call_bash("echo hi > new.txt"), call_bash(SUBMIT)]
    app = web.Application()
    app.router.add_post("/s/one/v1/chat/completions", fake_openai.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, await box.listen(8000)).start()
    await box.mark_start()
    launch = harness.launch(context(f"http://{box.address(8000)}/s/one", toolbox.root, "/tmp/home"))
    result = await box.run(launch.command, timeout=120, env=launch.env)
    assert harness.judge(result) == HarnessExit(True, "submitted"), result.stderr
    assert (await box.patch()).summary()["added"] == ["new.txt"]
    seen = json.loads(fake_openai.requests[1]["messages"][-1]["content"])["output"]
    assert "LD_LIBRARY_PATH" not in seen
    assert "PYTHON" not in seen
    assert "/usr/bin/python3" in seen
    await runner.cleanup()
    await provider.close()


def ended(stdout: str, code: int = 0, stderr: str = "", timed_out: bool = False) -> RunResult:
    return RunResult(code, stdout.encode(), stderr.encode(), timed_out, 3.0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ended("\nExit:\n\nSaved trajectory to 'x'\n"), "submitted"),
        (ended("\nExit:\nall done\nSaved trajectory"), "submitted"),
        (ended("\nTool:\n\nExit:\nLimitsExceeded\n\nExit:\n\nSaved trajectory"), "submitted"),
        (ended("\nExit:\nLimitsExceeded\n"), "call_limit"),
        (ended("\nExit:\nRepeatedFormatError\n"), "exited"),
        (ended("", code=1, stderr="Traceback\n╭──╮\n│ x │\n╰──╯\nBoom: no key\n"), "error"),
        (ended("", code=0), "error"),
        (ended("", code=137, timed_out=True), "time_limit"),
    ],
)
def test_every_end_has_its_word(result: RunResult, reason: str) -> None:
    assert MiniSweAgent({}).judge(result).reason == reason


def test_an_error_is_told_by_the_last_line_that_says_something() -> None:
    verdict = MiniSweAgent({}).judge(ended("", code=1, stderr="Boom: no key\n╰────╯\n"))
    assert verdict.detail == "exit code 1: Boom: no key"
