"""Many rollouts: which places in which groups are still to be filled, how many at once, and groups as they get whole.

A place (group and sample) that is done in the store is not run again: the same command resumes a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from polarlike.records import Group, Rollout, RolloutStatus, Task, Trajectory, Unscored
from polarlike.rollouts.rollout import Stage, run_rollout
from polarlike.store import Store
from reconstruct import rebuild


@dataclass(slots=True)
class Wanted:
    """A group to fill: so many samples of a task."""

    task: Task
    group_id: str
    samples: int


OnRollout = Callable[[Rollout], None]


def ended_rollouts(store: Store, group_ids: Iterable[str]) -> list[Rollout]:
    """The groups' rollouts that ended, scored or not."""
    found = [r for group_id in group_ids for r in store.rollouts(group_id=group_id)]
    return [r for r in found if r.status in (RolloutStatus.FINISHED, RolloutStatus.UNSCORED)]


def _done(rollout: Rollout) -> bool:
    """Whether its place needs no further run: all that ended, but for faults of ours that may pass."""
    return rollout.score is not None and rollout.score.unscored is not Unscored.RETRY


def stored_trajectory(stage: Stage, rollout: Rollout) -> Trajectory:
    """A finished rollout's trajectory, rebuilt from its calls."""
    trajectory = rebuild(
        stage.store.calls(rollout.session_id),
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        builder=stage.config.builder,
        harness_ended=bool(rollout.harness_exit.get("reason")),
    )
    trajectory.score = rollout.score
    return trajectory


async def collect(stage: Stage, wanted: Iterable[Wanted], on_rollout: OnRollout | None = None) -> AsyncIterator[Group]:
    """Fills groups and yields each as its last rollout ends. Trajectories are in order of sample; unscored ones are
    left out of the group (they are in the store). Cancelling stops what runs and leaves the run resumable."""
    wanted = list(wanted)
    ended = await asyncio.to_thread(ended_rollouts, stage.store, [group.group_id for group in wanted])
    done = {r.slot: r for r in ended if _done(r)}
    limit = asyncio.Semaphore(stage.config.concurrency)
    finished: asyncio.Queue[Group | BaseException] = asyncio.Queue()

    async def place(group: Wanted, sample: int) -> Trajectory | None:
        known = done.get(f"{group.group_id}:{sample}")
        if known is not None:
            rollout, trajectory = known, await asyncio.to_thread(stored_trajectory, stage, known)
        else:
            async with limit:
                for failed in (r for r in ended if r.slot == f"{group.group_id}:{sample}"):
                    failed.status = RolloutStatus.INTERRUPTED  # the new run counts in its place
                    await stage.store.put_rollout(failed)
                rollout, trajectory = await run_rollout(stage, group.task, group.group_id, sample)
        if on_rollout:
            on_rollout(rollout)
        return trajectory if rollout.status is RolloutStatus.FINISHED else None

    async def fill(group: Wanted) -> None:
        try:
            async with asyncio.TaskGroup() as places:  # one that raises ends its siblings
                running = [places.create_task(place(group, k)) for k in range(group.samples)]
        except BaseExceptionGroup as e:
            finished.put_nowait(e.exceptions[0])
            return
        got = [r.result() for r in running]
        finished.put_nowait(Group(group.group_id, group.task.task_id, [t for t in got if t is not None]))

    tasks = [asyncio.create_task(fill(group)) for group in wanted]
    try:
        for _ in wanted:
            item = await finished.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
