"""Which earlier call does a request continue, and which token ids are its prompt? No I/O.

A request that continues an earlier call is not rendered again: its prompt is that call's prompt ids, its sampled ids,
and the rendering of the new messages alone. Every other request is rendered in full and starts a new segment with its
cause. Turns are kept as a chain of pieces, so memory grows with new tokens and not with history times turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polarlike.proxy import identity
from polarlike.records import Cause, Ids, Message, Tool, no_ids
from polarlike.templates import ChatTemplate


@dataclass(slots=True)
class Turn:
    """A finished call as planning needs it: what it added to its parent, and how it ended. length counts prompt and
    completion."""

    call_id: str
    parent: Turn | None
    suffix_ids: Ids
    completion_ids: Ids
    reply: Message
    length: int = 0

    def __post_init__(self) -> None:
        before = self.parent.length if self.parent else 0
        self.length = before + self.suffix_ids.size + self.completion_ids.size

    def pieces(self) -> list[Ids]:
        """Token arrays whose concatenation is this turn's prompt and completion."""
        out: list[Ids] = []
        turn: Turn | None = self
        while turn is not None:
            out += [turn.completion_ids, turn.suffix_ids]
            turn = turn.parent
        return out[::-1]

    def prompt_ids(self) -> Ids:
        return np.concatenate(self.pieces()[:-1])

    def all_ids(self) -> Ids:
        return np.concatenate(self.pieces())


@dataclass(slots=True)
class Plan:
    """prompt_ids = (parent's prompt + completion, if any) + suffix_ids."""

    parent: Turn | None
    cause: Cause
    new_messages: list[Message]
    prompt_ids: Ids
    suffix_ids: Ids
    echo_edits: list[str] = field(default_factory=list)
    first_difference: dict[str, Any] | None = None
    digests: list[bytes] = field(default_factory=list)  # of the tools, then of each leading part of the conversation

    @property
    def digest(self) -> bytes:
        """Of the request's whole conversation."""
        return self.digests[-1]


class Planner:
    """The turns of one session and the search among them. template None: a text-only session without ids."""

    def __init__(self, template: ChatTemplate | None, *, fork_on_edit: bool = False):
        self._template = template
        self._fork_on_edit = fork_on_edit
        self._turns: dict[bytes, list[Turn]] = {}  # digest of history + reply -> turns that end there
        self._requests: dict[bytes, int] = {}  # digest of a request's messages -> how many are still open
        self._seen: dict[bytes, Turn | None] = {}  # digest of any leading messages -> a turn under it
        self._roots: list[bytes] = []

    def plan(self, messages: list[Message], tools: list[Tool] | None) -> Plan:
        """Changes nothing: the caller says `opened` once the request is under way. May run in a thread while other
        calls of the session finish. Raises TemplateError for a conversation that cannot be rendered."""
        root = identity.tools_digest(tools)
        digests = identity.chain(root, messages)
        found, covered, cause = self._parent(messages, digests)
        plan = None
        if found is not None:
            edits = identity.echo_edits(found.reply, messages[covered - 1])
            cause = Cause.ECHO_EDITED if edits and self._fork_on_edit else Cause.BRIDGE_REFUSED
            if cause is Cause.BRIDGE_REFUSED:
                plan = self._continue(found, edits, messages[covered:], tools)
        if plan is None:
            plan = self._start(found, cause or self._cause(root, messages, digests), messages, tools, digests)
        plan.digests = digests
        return plan

    def opened(self, plan: Plan) -> None:
        """Counts the plan's request as open, until `finished` or `failed`."""
        if plan.digests[0] not in self._roots:
            self._roots.append(plan.digests[0])
        self._requests[plan.digest] = self._requests.get(plan.digest, 0) + 1
        for digest in plan.digests[1:]:
            self._seen.setdefault(digest, None)

    def finished(self, plan: Plan, turn: Turn) -> None:
        """Makes a whole reply known, so that later requests can continue it."""
        self._requests[plan.digest] -= 1
        self._seen[plan.digest] = turn
        self._turns.setdefault(identity.extend(plan.digest, turn.reply), []).append(turn)

    def failed(self, plan: Plan) -> None:
        """The call ended without a whole reply: nothing can continue it."""
        self._requests[plan.digest] -= 1

    # ------------------------------------------------------------

    def _parent(self, messages: list[Message], digests: list[bytes]) -> tuple[Turn | None, int, Cause | None]:
        """The longest known history that this request starts with; among equals the one whose reasoning came back, and
        none if several remain that differ in tokens."""
        for covered in range(len(messages), 0, -1):
            turns = self._turns.get(digests[covered])
            if not turns:
                continue
            echoed = messages[covered - 1]
            fitting = [t for t in turns if not identity.reasoning_differs(t.reply, echoed)] or turns
            newest = fitting[-1]
            if any(not _same_ids(t, newest) for t in fitting[:-1]):
                return None, 0, Cause.AMBIGUOUS
            return newest, covered, None
        return None, 0, None

    def _cause(self, root: bytes, messages: list[Message], digests: list[bytes]) -> Cause:
        if not self._roots:
            return Cause.FIRST
        for k in range(len(messages), 0, -1):
            if digests[k] in self._requests:
                still_open = k == len(messages) and self._requests[digests[k]] > 0
                return Cause.PARALLEL if still_open else Cause.REPLY_DROPPED
        for other in self._roots:
            if other != root and any(d in self._turns for d in identity.chain(other, messages)):
                return Cause.TOOLS_CHANGED
        return Cause.HISTORY_CHANGED if digests[1] in self._seen else Cause.NEW_CONVERSATION

    def _continue(self, parent: Turn, edits: list[str], new: list[Message], tools: list[Tool] | None) -> Plan | None:
        """None where the template cannot extend the turn (a request that ends with the assistant's turn included)."""
        if self._template is None:
            return Plan(parent, Cause.CONTINUES, new, no_ids(), no_ids(), edits)
        suffix = self._template.bridge(parent.prompt_ids(), parent.completion_ids, new, tools) if new else None
        if suffix is None:
            return None
        prompt = np.concatenate([*parent.pieces(), suffix])
        return Plan(parent, Cause.CONTINUES, new, prompt, suffix, edits)

    def _start(
        self,
        refused: Turn | None,
        cause: Cause,
        messages: list[Message],
        tools: list[Tool] | None,
        digests: list[bytes],
    ) -> Plan:
        if self._template is None:
            return Plan(None, cause, messages, no_ids(), no_ids())
        prompt = self._template.render(messages, tools)
        plan = Plan(None, cause, messages, prompt, prompt)
        nearest = refused or next((t for d in reversed(digests) if (t := self._seen.get(d))), None)
        if nearest is not None and cause not in (Cause.PARALLEL, Cause.NEW_CONVERSATION):
            plan.first_difference = self._difference(nearest, prompt)
        return plan

    def _difference(self, turn: Turn, prompt: Ids) -> dict[str, Any]:
        """Where the new prompt departs from what an earlier call's policy saw and said, both sides decoded."""
        assert self._template is not None
        was = turn.all_ids()
        shared = min(was.size, prompt.size)
        differing = np.flatnonzero(was[:shared] != prompt[:shared])
        at = int(differing[0]) if differing.size else shared
        return {
            "call_id": turn.call_id,
            "position": at,
            "was": self._template.decode(was[at : at + 24]),
            "now": self._template.decode(prompt[at : at + 24]),
        }


def _same_ids(a: Turn, b: Turn) -> bool:
    return a.length == b.length and bool(np.array_equal(a.all_ids(), b.all_ids()))
