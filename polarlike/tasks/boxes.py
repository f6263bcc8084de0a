"""A task in a box, and the grading of work that was done there. The one path that rollouts and `check_tasks` share.

Knows how a task's environment is asked of a sandbox and in which order a work tree is graded; knows no agent. What
holds: grading happens in a fresh box in which the agent never was, and it returns a Score: a fault is unscored, never 0
and never an exception. Errors of the user's (an unknown verifier, a wrong setting) are raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlike import plugins
from polarlike.records import Score, Task, Unscored, UsageError
from polarlike.verifiers.base import Verifier
from sandbox.base import Mount, Sandbox, SandboxError, SandboxProvider, SandboxSpec
from sandbox.tree import TreePatch

log = logging.getLogger(__name__)


def box_spec(task: Task, mounts: Sequence[Mount] = (), *, grading: bool = False) -> SandboxSpec:
    """What the task's box must be. A verifier table may open or close the network of the grading box alone."""
    environment = task.environment
    network = environment.network
    if grading:
        network = bool(task.verifier.get("network", network))
    return SandboxSpec(
        image=environment.base_image,
        dockerfile=environment.dockerfile,
        workdir=environment.workdir,
        env=dict(environment.env),
        memory_mb=environment.memory_mb,
        cpus=environment.cpus,
        pids=environment.pids,
        network=network,
        mounts=list(mounts),
    )


async def open_task_box(
    provider: SandboxProvider, task: Task, name: str, mounts: Sequence[Mount] = (), *, grading: bool = False
) -> Sandbox:
    """A box with the task's pristine files in it, its start marked (unless it is for grading). The caller stops it.

    Raises SandboxError; no box is left running then.
    """
    spec = box_spec(task, mounts, grading=grading)
    await provider.prepare(spec)
    box = await provider.start(spec, name)
    try:
        for host, path in task.environment.copies:
            await box.put(Path(host), path)
        if not grading:
            await box.mark_start()
    except BaseException as e:
        await asyncio.shield(box.stop())
        if isinstance(e, OSError):
            raise SandboxError(f"the files of task {task.task_id} could not be laid into its box: {e}") from e
        raise
    return box


def make_verifier(task: Task) -> Verifier:
    """The task's verifier, from its table less the keys that are not its own. Raises UsageError."""
    table: dict[str, Any] = {k: v for k, v in task.verifier.items() if k not in ("type", "network")}
    kind = task.verifier.get("type")
    if not isinstance(kind, str):
        raise UsageError(f"Task {task.task_id} names no type of verifier; set one, for example harbor.")
    verifier: Verifier = plugins.load("verifiers", kind)(table)
    return verifier


async def grade(
    provider: SandboxProvider,
    task: Task,
    patch: TreePatch | None,
    verifier: Verifier | None = None,
    *,
    name: str = "",
) -> Score:
    """Lays `patch` (None is no work at all) over the task's pristine files in a fresh box and lets the verifier judge.

    verifier: the task's own by default. name: a label for the box.
    """
    verifier = verifier or make_verifier(task)
    try:
        box = await open_task_box(provider, task, name or f"{task.task_id}-grade", grading=True)
    except SandboxError as e:
        return Score(None, Unscored.RETRY, f"The verifier's box did not start: {e}")
    try:
        if patch is not None:
            await box.apply(patch)
        return await verifier.verify(task, box)
    except SandboxError as e:
        return Score(None, Unscored.RETRY, f"The work could not be laid into the verifier's box: {e}")
    finally:
        await _stop(box)


async def _stop(box: Sandbox) -> None:
    """Ends a box whose verdict is known. That it would not go does not change the verdict; the run's reaper has it."""
    try:
        await asyncio.shield(box.stop())
    except SandboxError as e:
        log.warning("the box %s did not stop: %s", box.box_id, e)
