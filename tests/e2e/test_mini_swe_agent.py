"""The real mini-swe-agent, in real containers without a network, against the proxy in the container's own loopback."""

import asyncio
from pathlib import Path

import pytest

from polarlike.config import RunConfig, load_config
from polarlike.records import Cause, Group, Rollout, RolloutStatus
from polarlike.rollouts.collect import Wanted, collect
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.store import Store
from polarlike.tasks import load_tasks

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.harness, pytest.mark.slow]


def config(tmp_path: Path, policy: Path, sandbox: str, **overrides: object) -> RunConfig:
    return load_config(
        None,
        {
            "tasks": str(ROOT / "examples/tasks/train"),
            "out": tmp_path / "run",
            "samples": 1,
            "concurrency": 2,
            "engine.spec": f"scripted:{policy}",
            "engine.model": ROOT / "examples/policy/model",
            "engine.log": True,
            "sandbox.kind": sandbox,
            **overrides,
        },
    )


async def gather(settings: RunConfig, count: int) -> tuple[list[Group], list[Rollout], Store]:
    folder = RunFolder(settings.out)
    folder.open(settings, "collect")
    try:
        async with open_stage(settings, folder) as stage:
            wanted = [Wanted(t, t.task_id, settings.samples) for t in load_tasks(settings.tasks)[:count]]
            groups = [group async for group in collect(stage, wanted)]
            left = await stage.provider.reap()
            assert left == 0
    finally:
        folder.close()
    store = Store(folder.store_url)
    return groups, store.rollouts(RolloutStatus.FINISHED), store


@pytest.mark.parametrize("sandbox", [pytest.param("docker", marks=pytest.mark.docker), "local"])
async def test_the_teacher_solves_tasks_through_the_unmodified_agent(tmp_path: Path, sandbox: str) -> None:
    settings = config(tmp_path, ROOT / "examples/teacher.py", sandbox)
    groups, rollouts, store = await gather(settings, 3)
    assert [t.score.value for g in groups for t in g.trajectories if t.score] == [1.0] * 3
    for rollout in rollouts:
        calls = store.calls(rollout.session_id)
        assert [c.cause for c in calls] == [Cause.FIRST] + [Cause.CONTINUES] * 3
        assert [c.parent_id for c in calls] == [None, *(c.call_id for c in calls[:-1])]
        assert rollout.fidelity["segments"] == 1
        assert rollout.harness_exit["reason"] == "submitted"
    evidence = audit(store, RunFolder(settings.out).engine_log)
    assert evidence.trainable == evidence.equal > 300


# A reply without a call, one with broken JSON, one with an unknown tool, then the task is done and submitted.
FAULTY = """
import json

def call(name, arguments):
    return {"role": "assistant", "content": "x", "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}}]}

def policy(conversation):
    errors = sum("Tool call error" in m["content"] for m in conversation.messages if m["role"] == "user")
    done = sum(m["role"] == "tool" for m in conversation.messages)
    if done == 0 and errors == 0:
        return "I would rather talk"
    if done == 0:
        return call("bash", json.dumps({"command": "ls"}))
    if done == 1 and errors == 1:
        return call("bash", '{"command": "ls')
    if done == 1 and errors == 2:
        return call("python", json.dumps({"command": "ls"}))
    return call("bash", json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
"""


async def test_replies_that_the_agent_drops_are_leaves_of_their_own(tmp_path: Path) -> None:
    policy = tmp_path / "policy.py"
    policy.write_text(FAULTY)
    settings = config(tmp_path, policy, "local")
    [group], [rollout], store = await gather(settings, 1)
    calls = store.calls(rollout.session_id)
    # 0 talk (dropped) | 1 ls | 2 broken JSON (dropped) | 3 unknown tool (dropped) | 4 submit
    assert [c.cause for c in calls] == [
        Cause.FIRST,
        Cause.REPLY_DROPPED,
        Cause.CONTINUES,
        Cause.CONTINUES,
        Cause.CONTINUES,
    ]
    assert [c.parent_id and [x.call_id for x in calls].index(c.parent_id) for c in calls] == [None, None, 1, 1, 1]
    assert rollout.fidelity["delivery"] == {"confirmed": 2, "dropped": 3}
    [trajectory] = group.trajectories
    in_segments = [
        sorted([x.call_id for x in calls].index(s.call_id) for s in seg.spans) for seg in trajectory.segments
    ]
    assert sorted(in_segments) == [[0], [1, 4], [2], [3]]
    assert sum(s.trainable for s in trajectory.segments) == sum(c.completion_ids.size for c in calls)
    evidence = await asyncio.to_thread(audit, store, RunFolder(settings.out).engine_log)
    assert evidence.trainable == evidence.equal > 0
