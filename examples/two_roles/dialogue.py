"""A teacher's games as token streams, and the policy's own games in this process.

Knows the program, the items and a chat template. A stream is built as the proxy builds it: an opening is rendered, a
conversation that goes on is bridged, and a reply is what `encode_reply` gives. So the policy learns on exactly the ids
it will be given and will sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from examples.policy.batches import Example
from examples.two_roles.make_tasks import Item
from examples.two_roles.program import VERDICTS, play
from examples.two_roles.verifier.check import NO_ANSWER, verdict_on
from polarlike.records import Cause, Ids, Logprobs, Message, Score, Segment, Trajectory
from polarlike.templates import ChatTemplate

MAX_TOKENS = 8


@dataclass(frozen=True)
class Teacher:
    """How often each role says what is right: else the solver gives another thing's count, the checker another
    verdict."""

    solver: float = 1.0
    checker: float = 1.0


@dataclass
class Lane:
    """One conversation of a game. parts: prompt, reply, further prompt, reply, ... logprobs: of sampled replies."""

    role: str
    messages: list[Message]
    parts: list[Ids] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def prompt(self) -> Ids:
        return np.concatenate(self.parts)

    def segment(self, name: str, version: int) -> Segment:
        """Of a lane whose replies were sampled by that version of the policy at temperature 1."""
        mask = np.concatenate([np.full(part.size, bool(k % 2)) for k, part in enumerate(self.parts)])
        logprobs = np.zeros(mask.size, np.float32)
        logprobs[mask] = np.concatenate(self.logprobs)
        versions = np.where(mask, version, -1).astype(np.int32)
        return Segment(name, self.role, Cause.FIRST, self.prompt(), mask, logprobs, versions, 1.0, spans=[])


@dataclass
class Game:
    """A game under way: what is asked next and of whom, until it is over and has a reward."""

    item: Item
    template: ChatTemplate
    lanes: list[Lane] = field(default_factory=list)
    talk: list[dict[str, Any]] = field(default_factory=list)
    answer: int | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self._play: Any = play(self.item.text, self.talk)
        self._go_on(None)

    @property
    def lane(self) -> Lane:
        """The one that is to be replied to."""
        return self._asked

    @property
    def reward(self) -> float:
        """As tests/check.py gives it."""
        return NO_ANSWER if self.answer is None else float(self.answer == self.item.right)

    def trajectory(self, name: str, version: int) -> Trajectory:
        segments = [lane.segment(f"{name}/{k}", version) for k, lane in enumerate(self.lanes)]
        return Trajectory(name, name, segments, [], {}, Score(self.reward))

    def reply(self, completion: Ids) -> None:
        """Takes up a reply, as ids with the end of turn."""
        lane = self.lane
        message = self.template.parse(lane.prompt(), completion, None).message
        lane.parts.append(completion)
        self._go_on(message["content"])

    def _go_on(self, text: str | None) -> None:
        try:
            role, messages = self._play.send(text)
        except StopIteration as end:
            self.answer, self.over = end.value, True
            return
        self._asked = self._lane(role, messages)

    def _lane(self, role: str, messages: list[Message]) -> Lane:
        for lane in self.lanes:
            known = len(lane.messages)
            if lane.role == role and messages[:known] == lane.messages:
                prompt = np.concatenate(lane.parts[:-1])
                suffix = self.template.bridge(prompt, lane.parts[-1], messages[known + 1 :], None)
                if suffix is not None:
                    lane.messages = messages
                    lane.parts.append(suffix)
                    return lane
        self.lanes.append(Lane(role, messages, [self.template.render(messages, None)]))
        return self.lanes[-1]


def said_by(teacher: Teacher, rng: random.Random, game: Game) -> str:
    """The teacher's next reply."""
    item = game.item
    if game.lane.role == "solver":
        wrong = [count for count in item.counts.values() if count != item.right]
        return f"Count {item.asked} {item.right if rng.random() < teacher.solver else rng.choice(wrong)}"
    verdict = verdict_on(game.talk[-1]["number"], item.right)
    others = [v for v in VERDICTS if v != verdict]
    return f"Count {item.asked} {item.right} {verdict if rng.random() < teacher.checker else rng.choice(others)}"


def teacher_examples(rng: random.Random, item: Item, teacher: Teacher, template: ChatTemplate) -> list[Example]:
    """One stream a conversation; all that was said counts."""
    game = Game(item, template)
    while not game.over:
        text = said_by(teacher, rng, game)
        game.reply(template.encode_reply(game.lane.prompt(), {"role": "assistant", "content": text}))
    return [_example(lane) for lane in game.lanes]


def _example(lane: Lane) -> Example:
    weight = np.concatenate([np.full(part.size, k % 2, np.float32) for k, part in enumerate(lane.parts)])
    return Example(lane.prompt(), weight)


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Ids], stops: Sequence[int], generator: torch.Generator
) -> list[tuple[Ids, Logprobs]]:
    """One completion a prompt at temperature 1, its stop id included, of at most MAX_TOKENS; each with its logprobs.

    Prompts are short and replies shorter, so every token takes a whole forward and no cache."""
    lengths = torch.tensor([p.size for p in prompts])
    rows = torch.arange(len(prompts))
    ids = torch.zeros(len(prompts), int(lengths.max()) + MAX_TOKENS, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : prompt.size] = torch.from_numpy(prompt.astype(np.int64))
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    said, logprobs = [], []
    for k in range(MAX_TOKENS):
        hidden = model.model(input_ids=ids[:, : int(lengths.max()) + k], use_cache=False).last_hidden_state
        logs = model.lm_head(hidden[rows, lengths + k - 1]).float().log_softmax(-1)
        token = torch.multinomial(logs.exp(), 1, generator=generator)
        ids[rows, lengths + k] = token[:, 0]
        said.append(token)
        logprobs.append(logs.gather(1, token))
        ended |= torch.isin(token[:, 0], torch.tensor(stops))
        if ended.all():
            break
    return [
        (tokens[:end].astype(np.int32), logs[:end])
        for tokens, logs in zip(torch.cat(said, 1).numpy(), torch.cat(logprobs, 1).numpy(), strict=True)
        for end in [next((k + 1 for k, t in enumerate(tokens) if t in stops), len(tokens))]
    ]


def play_games(model: Any, template: ChatTemplate, items: Sequence[Item], generator: torch.Generator) -> list[Game]:
    """All games at once, one reply each a time."""
    games = [Game(item, template) for item in items]
    while running := [game for game in games if not game.over]:
        replies = sample(model, [g.lane.prompt() for g in running], template.stop_ids, generator)
        for game, (completion, logprobs) in zip(running, replies, strict=True):
            game.lane.logprobs.append(logprobs)
            game.reply(completion)
    return games
