"""One rollout: prepare a box, run the harness in it against its own session, take the work tree, rebuild what was said,
judge it in a box where the agent never was. Knows nothing of groups, schedules or trainers.

What holds: whatever happens, the session is closed and the box is stopped; a fault of ours gives an unscored rollout
with its class, never a 0 and never an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from harnesses.base import Harness, HarnessContext, HarnessExit, Launch
from polarlike.config import RunConfig
from polarlike.proxy.server import Proxy
from polarlike.proxy.session import Session
from polarlike.proxy.settings import Rule, SamplingSettings, SessionSettings
from polarlike.records import Limits, Rollout, RolloutStatus, Score, Task, Trajectory, Unscored, new_id
from polarlike.store import Store
from polarlike.tasks.boxes import grade, open_task_box
from reconstruct import rebuild
from sandbox.base import RunResult, Sandbox, SandboxError, SandboxProvider
from sandbox.tree import TreeError, TreePatch

log = logging.getLogger(__name__)

PROXY_PORT = 8765  # the same in every box: the listening socket is the session's identity, not the port


@dataclass(slots=True)
class Stage:
    """What all rollouts of a run share. sampling: in place of the run's own, for an evaluation."""

    config: RunConfig
    proxy: Proxy
    store: Store
    provider: SandboxProvider
    harness: Harness
    train: bool = True
    sampling: SamplingSettings | None = None


@dataclass(slots=True)
class _Attempt:
    """What one attempt has gathered so far."""

    rollout: Rollout
    timings: dict[str, float] = field(default_factory=dict)
    patch: TreePatch | None = None
    exit: HarnessExit | None = None
    result: RunResult | None = None
    score: Score | None = None


async def run_rollout(stage: Stage, task: Task, group_id: str, sample: int) -> tuple[Rollout, Trajectory]:
    """One place in a group, run again after faults of ours up to limits.retries times. The last attempt is returned,
    scored or not; earlier ones stay in the store as interrupted."""
    attempt = 0
    while True:
        rollout, trajectory = await _attempt(stage, task, group_id, sample, attempt)
        score = rollout.score
        again = score is not None and score.unscored is Unscored.RETRY and attempt < stage.config.limits.retries
        if not again:
            return rollout, trajectory
        log.warning("rollout %s: %s; running it again", rollout.slot, score.reason if score else "")
        rollout.status = RolloutStatus.INTERRUPTED
        await stage.store.put_rollout(rollout)
        attempt += 1


async def _attempt(stage: Stage, task: Task, group_id: str, sample: int, attempt: int) -> tuple[Rollout, Trajectory]:
    task = replace(task, limits=_limits(stage.config, task.limits))
    rollout = Rollout(
        rollout_id=new_id("roll"),
        task_id=task.task_id,
        group_id=group_id,
        sample=sample,
        status=RolloutStatus.RUNNING,
        attempt=attempt,
        harness=f"{stage.harness.name}@{stage.harness.version}",
        started=time.time(),
    )
    work = _Attempt(rollout)
    session = await stage.proxy.open_session(_session_settings(stage, task), rollout.rollout_id)
    rollout.session_id = session.session_id
    await stage.store.put_rollout(rollout)
    try:
        await _run_harness(stage, task, session, work)
    except SandboxError as e:
        work.score = Score(None, Unscored.RETRY, f"sandbox: {e}")
    finally:
        await stage.proxy.close_session(session)
    if work.score is None:
        work.score = _unscored_run(stage, session, work)
    if work.score is None:
        assert work.patch is not None
        with _timed(work, "verify"):
            work.score = await grade(stage.provider, task, work.patch)
    return await _finish(stage, session, work)


async def _run_harness(stage: Stage, task: Task, session: Session, work: _Attempt) -> None:
    with _timed(work, "prepare"):
        recipe = stage.harness.recipe()
        toolbox = await stage.provider.toolbox(recipe) if recipe else None
        mounts = [toolbox.mount] if toolbox and toolbox.mount else []
        box = await open_task_box(stage.provider, task, f"{work.rollout.rollout_id[-8:]}-agent", mounts=mounts)
    try:
        with _timed(work, "prepare"):
            await stage.proxy.serve_session(session, await box.listen(PROXY_PORT))
            launch = stage.harness.launch(_context(stage, task, session, box, toolbox.root if toolbox else ""))
            for path, data in launch.files.items():
                await box.write(path, data)
        with _timed(work, "agent"):
            work.result = await _start(box, task, launch)
        await stage.proxy.close_session(session)  # the agent is over: nothing more is sampled for it
        work.exit = stage.harness.judge(work.result)
        with _timed(work, "patch"):
            try:
                work.patch = await box.patch()
            except TreeError as e:  # the agent's doing, not a fault of ours: it may not buy itself out of a 0
                work.score = Score(0.0, reason=f"the work tree cannot be taken: {e}")
    finally:
        with _timed(work, "stop"):
            await asyncio.shield(_leave(stage, session, box))


async def _leave(stage: Stage, session: Session, box: Sandbox) -> None:
    """The session's site first: its listening socket goes with the box."""
    await stage.proxy.close_session(session)
    await box.stop()


async def _start(box: Sandbox, task: Task, launch: Launch) -> RunResult:
    return await box.run(launch.command, timeout=task.limits.agent_s, env=launch.env, stdin=launch.stdin)


def _context(stage: Stage, task: Task, session: Session, box: Sandbox, toolbox: str) -> HarnessContext:
    return HarnessContext(
        instruction=task.instruction,
        base_url=f"http://{box.address(PROXY_PORT)}",
        key=session.key,
        model=stage.proxy.engine.model_name,
        workdir=box.path(task.environment.workdir),
        home=box.path("/tmp/home"),
        toolbox=toolbox,
        timeout_s=task.limits.agent_s,
        max_calls=task.limits.max_calls,
    )


def _session_settings(stage: Stage, task: Task) -> SessionSettings:
    config = stage.config
    rules = [Rule(name=r.name, pattern=r.pattern, replacement=r.replacement) for r in stage.harness.rewrites]
    return SessionSettings(
        sampling=stage.sampling or config.sampling,
        train=stage.train,
        streaming=config.session.streaming or stage.harness.streaming,  # type: ignore[arg-type]
        on_edit=config.session.on_edit,
        grace_s=config.session.grace_s,
        rewrites=[*rules, *config.session.rewrites],
        task={"task_id": task.task_id, "instruction": task.instruction, "metadata": task.metadata},
    )


def _limits(config: RunConfig, limits: Limits) -> Limits:
    over = config.limits
    return Limits(
        agent_s=over.agent_s or limits.agent_s,
        verifier_s=over.verifier_s or limits.verifier_s,
        max_calls=limits.max_calls if over.max_calls is None else over.max_calls,
    )


def _unscored_run(stage: Stage, session: Session, work: _Attempt) -> Score | None:
    """Whether the harness's run can be judged at all."""
    if work.exit is None or work.patch is None:
        return Score(None, Unscored.RETRY, "the harness was not run")
    if session.failures and not work.exit.ok:
        return Score(None, Unscored.RETRY, f"the engine failed: {session.failures[-1]}")
    if work.exit.reason == "error" and not session.calls:
        # It says nothing about the policy, and a command that is not there is mended by the user.
        return Score(None, Unscored.RETRY, f"the agent ended without a model call: {work.exit.detail}")
    if work.exit.reason == "time_limit" and stage.config.limits.on_time_limit == "discard":
        return Score(None, Unscored.GRADE_ANYWAY, "the agent ran out of time; its work is kept and can still be judged")
    return None


async def _finish(stage: Stage, session: Session, work: _Attempt) -> tuple[Rollout, Trajectory]:
    rollout, score = work.rollout, work.score
    assert score is not None
    with _timed(work, "rebuild"):
        trajectory = await asyncio.to_thread(_rebuild, stage, session, work)
    rollout.score = trajectory.score = score
    rollout.status = RolloutStatus.FINISHED if score.value is not None else RolloutStatus.UNSCORED
    rollout.fidelity = trajectory.fidelity
    rollout.harness_exit = _exit_record(session, work)
    rollout.patch = work.patch.to_bytes() if work.patch else b""
    rollout.timings = {k: round(v, 4) for k, v in work.timings.items()}
    rollout.finished = time.time()
    await stage.store.put_rollout(rollout)
    return rollout, trajectory


def _rebuild(stage: Stage, session: Session, work: _Attempt) -> Trajectory:
    return rebuild(
        stage.store.calls(session.session_id),
        rollout_id=work.rollout.rollout_id,
        task_id=work.rollout.task_id,
        builder=stage.config.builder,
        harness_ended=work.exit is not None,
    )


def _exit_record(session: Session, work: _Attempt) -> dict[str, Any]:
    record: dict[str, Any] = {"failures": session.failures, "refusals": session.refusals}
    if work.exit:
        record |= {"ok": work.exit.ok, "reason": work.exit.reason, "detail": work.exit.detail}
    if work.result:
        record |= {
            "exit_code": work.result.exit_code,
            "stdout": work.result.stdout[-4000:].decode(errors="replace"),
            "stderr": work.result.stderr[-4000:].decode(errors="replace"),
        }
    return record


class _timed:
    """Adds the seconds of a with-block to the attempt's timings."""

    def __init__(self, work: _Attempt, name: str):
        self._timings, self._name = work.timings, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._timings[self._name] = self._timings.get(self._name, 0.0) + time.perf_counter() - self._start
