"""How good the policy is: rollouts in the pretended shell at a temperature, and what they show.

Knows the dialogue, a model and a chat template; the sandbox, the agent and the proxy are not used. All rollouts of a
call advance together, one turn at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from examples.make_tasks import ExampleTask
from examples.policy.dialogue import NO_CALL, command_of
from examples.policy.prompts import MiniPrompts, Uname
from examples.policy.shell import Shell, judge, reward
from polarlike.records import Ids, Message
from polarlike.templates import ChatTemplate

MAX_TURNS = 8
MAX_TOKENS = 64
HOST = Uname("Linux", "6.1.0-18-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)", "x86_64")


@dataclass
class SimulatedRollout:
    """One attempt. commands: those of its well-formed replies, in order; replies counts the others too."""

    task: ExampleTask
    shell: Shell
    prompt: Ids
    history: list[Message]
    commands: list[str] = field(default_factory=list)
    replies: int = 0

    @property
    def reward(self) -> float:
        return reward(self.task, self.shell.files)


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Ids], *, stops: Sequence[int], temperature: float, generator: torch.Generator
) -> list[Ids]:
    """One completion a prompt, its stop id included, of at most MAX_TOKENS. temperature 0 is greedy."""
    longest = max(p.size for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest + MAX_TOKENS, dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all rows sample at the same place
        ids[row, longest - prompt.size :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - prompt.size :] = 1
    positions = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask[:, :longest], position_ids=positions, use_cache=True, logits_to_keep=1)
    ending, done = torch.tensor(stops), torch.zeros(len(prompts), dtype=torch.bool)
    drawn: list[torch.Tensor] = []
    for step in range(MAX_TOKENS):
        logits = out.logits[:, -1].float()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True)
        drawn.append(token)
        done |= torch.isin(token[:, 0], ending)
        if done.all() or step + 1 == MAX_TOKENS:
            break
        seen = longest + step + 1
        out = model(
            token,
            attention_mask=mask[:, :seen],
            position_ids=positions[:, -1:] + step + 1,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
    return [_up_to_stop(row.numpy().astype(np.int32), stops) for row in torch.cat(drawn, 1)]


def _up_to_stop(ids: Ids, stops: Sequence[int]) -> Ids:
    ends = np.flatnonzero(np.isin(ids, stops))
    return ids[: ends[0] + 1] if ends.size else ids


def rollouts(
    model: Any,
    template: ChatTemplate,
    prompts: MiniPrompts,
    tasks: Sequence[ExampleTask],
    *,
    samples: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 32,
) -> list[list[SimulatedRollout]]:
    """`samples` attempts at each task, as one list a task."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for task in tasks:
        history = prompts.opening(task.instruction, HOST)
        opening = template.render(history, [prompts.tool])
        groups.append([SimulatedRollout(task, Shell(dict(task.files)), opening, history) for _ in range(samples)])
    running = [rollout for group in groups for rollout in group]
    for _ in range(MAX_TURNS):
        for start in range(0, len(running), batch):
            part = running[start : start + batch]
            replies = sample(
                model, [r.prompt for r in part], stops=template.stop_ids, temperature=temperature, generator=generator
            )
            for rollout, completion in zip(part, replies, strict=True):
                _advance(rollout, completion, template, prompts)
        running = [rollout for rollout in running if not rollout.shell.submitted]
        if not running:
            break
    return groups


def _advance(rollout: SimulatedRollout, completion: Ids, template: ChatTemplate, prompts: MiniPrompts) -> None:
    """What the agent does with a reply: run its command, or leave it out and say that the call was malformed."""
    rollout.replies += 1
    message = template.parse(rollout.prompt, completion, [prompts.tool]).message
    try:
        command = command_of(message)
    except (ValueError, KeyError, TypeError):
        rollout.history = [*rollout.history, prompts.format_error(NO_CALL)]
        rollout.prompt = template.render(rollout.history, [prompts.tool])
        return
    rollout.commands.append(command)
    output, returncode = rollout.shell.run(command)
    observation = prompts.observation(output, returncode, message["tool_calls"][0]["id"])
    rollout.history = [*rollout.history, message, observation]
    suffix = template.bridge(rollout.prompt, completion, [observation], [prompts.tool])
    if suffix is None:
        rollout.prompt = template.render(rollout.history, [prompts.tool])
    else:
        rollout.prompt = np.concatenate([rollout.prompt, completion, suffix])


def figures(groups: Sequence[Sequence[SimulatedRollout]]) -> dict[str, float]:
    """well_formed: share of replies with one usable call. copied: share of rollouts whose first command shows the
    task's file. operator: of the rollouts that made an edit of the right kind in an operator task, the share with the
    right operator (0.25 by chance). varied: share of groups whose rewards are not all equal."""
    every = [rollout for group in groups for rollout in group]
    judged = [judge(r.task, r.shell.files) for r in every if r.task.kind == "operator"]
    edits = [parts["right"] for parts in judged if parts["edited"]]
    found: dict[str, float] = {
        "rollouts": len(every),
        "well_formed": sum(len(r.commands) for r in every) / max(1, sum(r.replies for r in every)),
        "copied": fmean(bool(r.commands) and r.commands[0] == f"cat {r.task.case['file']}" for r in every),
        "operator": fmean(edits) if edits else 0.0,
        "submitted": fmean(r.shell.submitted for r in every),
        "reward": fmean(r.reward for r in every),
        "solved": fmean(r.reward == 1.0 for r in every),
        "varied": fmean(len({r.reward for r in group}) > 1 for group in groups),
        "turns": fmean(r.replies for r in every),
    }
    return {key: round(value, 3) for key, value in found.items()}
