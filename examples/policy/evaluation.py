"""How good the policy is: rollouts in the pretended shell at a temperature, and what they show.

Knows the dialogue and an engine; the sandbox, the agent and the proxy are not used. The engine is the one of a run
(embedded), so rollouts share the agent's long prompt. Sampled tokens keep their logprobs and versions, so that a
rollout can be trained on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from examples.make_tasks import ExampleTask
from examples.policy.dialogue import NO_CALL, command_of
from examples.policy.prompts import MiniPrompts, Uname
from examples.policy.shell import Shell, judge, reward
from polarlike.engines.base import Engine, GenerateRequest
from polarlike.records import Ids, Logprobs, Message, Sampling
from polarlike.templates import ChatTemplate

MAX_TURNS = 6
MAX_TOKENS = 120
HOST = Uname("Linux", "6.1.0-18-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)", "x86_64")


@dataclass(slots=True)
class SimulatedTurn:
    """One call. prompt, completion: int32; logprobs: float32, versions: int32, one a completion token."""

    prompt: Ids
    completion: Ids
    logprobs: Logprobs
    versions: Ids


@dataclass
class SimulatedRollout:
    """One attempt. commands: those of its well-formed replies, in order. turns: every reply, malformed or not."""

    task: ExampleTask
    shell: Shell
    history: list[Message] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    turns: list[SimulatedTurn] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return reward(self.task, self.shell.files)


async def rollouts(
    engine: Engine,
    prompts: MiniPrompts,
    tasks: Sequence[ExampleTask],
    *,
    samples: int,
    temperature: float = 1.0,
    seed: int = 0,
    at_once: int = 64,
) -> list[list[SimulatedRollout]]:
    """`samples` attempts at each task, as one list a task."""
    free = asyncio.Semaphore(at_once)
    seeds = itertools.count(seed * 1_000_000)

    async def one(task: ExampleTask, seed: int) -> SimulatedRollout:
        async with free:
            return await _attempt(engine, prompts, task, Sampling(temperature, max_tokens=MAX_TOKENS, seed=seed))

    tried = await asyncio.gather(*(one(task, next(seeds)) for task in tasks for _ in range(samples)))
    return [list(tried[k : k + samples]) for k in range(0, len(tried), samples)]


async def _attempt(engine: Engine, prompts: MiniPrompts, task: ExampleTask, sampling: Sampling) -> SimulatedRollout:
    template = engine.template
    assert template is not None
    rollout = SimulatedRollout(task, Shell(dict(task.files)), prompts.opening(task.instruction, HOST))
    prompt = template.render(rollout.history, [prompts.tool])
    while len(rollout.turns) < MAX_TURNS and not rollout.shell.submitted:
        turn = await _sample(engine, prompt, sampling, f"{task.name}/{sampling.seed}/{len(rollout.turns)}")
        rollout.turns.append(turn)
        prompt = _answer(rollout, turn, template, prompts)
    return rollout


async def _sample(engine: Engine, prompt: Ids, sampling: Sampling, name: str) -> SimulatedTurn:
    assert engine.template is not None
    request = GenerateRequest(name, prompt, sampling, stop_ids=tuple(engine.template.stop_ids))
    chunks = [chunk async for chunk in engine.generate(request)]
    return SimulatedTurn(
        prompt,
        np.concatenate([chunk.ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.versions for chunk in chunks]),
    )


def _answer(rollout: SimulatedRollout, turn: SimulatedTurn, template: ChatTemplate, prompts: MiniPrompts) -> Ids:
    """What the agent does with a reply: run its command, or leave it out and say that the call was malformed. Returns
    the next prompt."""
    message = template.parse(turn.prompt, turn.completion, [prompts.tool]).message
    try:
        command = command_of(message)
    except (ValueError, KeyError, TypeError):
        rollout.history = [*rollout.history, prompts.format_error(NO_CALL)]
        return template.render(rollout.history, [prompts.tool])
    rollout.commands.append(command)
    output, returncode = rollout.shell.run(command)
    observation = prompts.observation(output, returncode, message["tool_calls"][0]["id"])
    rollout.history = [*rollout.history, message, observation]
    suffix = template.bridge(turn.prompt, turn.completion, [observation], [prompts.tool])
    if suffix is None:
        return template.render(rollout.history, [prompts.tool])
    return np.concatenate([turn.prompt, turn.completion, suffix])


def figures(groups: Sequence[Sequence[SimulatedRollout]]) -> dict[str, float]:
    """well_formed: share of replies with one usable call. copied: share of rollouts whose first command shows the
    task's file. operator: of the rollouts that made an edit of the right kind in an operator task, the share with the
    right operator (0.25 by chance). varied: share of groups whose rewards are not all equal."""
    every = [rollout for group in groups for rollout in group]
    judged = [judge(r.task, r.shell.files) for r in every if r.task.kind == "operator"]
    edits = [parts["right"] for parts in judged if parts["edited"]]
    found: dict[str, float] = {
        "rollouts": len(every),
        "well_formed": sum(len(r.commands) for r in every) / max(1, sum(len(r.turns) for r in every)),
        "copied": fmean(bool(r.commands) and r.commands[0] == f"cat {r.task.case['file']}" for r in every),
        "operator": fmean(edits) if edits else 0.0,
        "submitted": fmean(r.shell.submitted for r in every),
        "reward": fmean(r.reward for r in every),
        "solved": fmean(r.reward == 1.0 for r in every),
        "varied": fmean(len({r.reward for r in group}) > 1 for group in groups),
        "turns": fmean(len(r.turns) for r in every),
    }
    return {key: round(value, 3) for key, value in found.items()}
