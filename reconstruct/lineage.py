"""How calls hang together: parents, children, whole prompts and histories.

Knows calls alone; nothing of delivery or training. What holds: a call's prompt is its parent's prompt, its parent's
sampled ids and its own suffix, id for id. Each function costs the length of what it returns: parts are gathered up the
chain and joined once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from polarlike.records import Call, Ids, Message, PolarError, no_ids


class ReconstructError(PolarError):
    """Calls that cannot belong to one session."""


def index(calls: Sequence[Call]) -> dict[str, Call]:
    """Calls by id, in the order they were made. Raises ReconstructError for a repeated id, a parent that is missing or
    one that is not earlier than its child."""
    ordered = sorted(calls, key=lambda c: c.index)
    by_id: dict[str, Call] = {}
    for call in ordered:
        if call.call_id in by_id:
            raise ReconstructError(f"The call {call.call_id} is there twice; give each call of a session once.")
        if call.parent_id is not None and call.parent_id not in by_id:
            raise ReconstructError(
                f"The call {call.call_id} continues {call.parent_id}, which is not among the calls before it; "
                "give all calls of the session."
            )
        by_id[call.call_id] = call
    return by_id


def ancestry(call: Call, by_id: Mapping[str, Call]) -> list[Call]:
    """The chain of parents that ends with the call itself, oldest first."""
    chain = [call]
    while chain[-1].parent_id is not None:
        chain.append(by_id[chain[-1].parent_id])
    chain.reverse()
    return chain


def depth(call: Call, by_id: Mapping[str, Call]) -> int:
    """How many calls lie before it in its chain."""
    return len(ancestry(call, by_id)) - 1


def prompt_ids(call: Call, by_id: Mapping[str, Call]) -> Ids:
    """The ids the engine was given. int32 [P]."""
    parts: list[Ids] = []
    for link in ancestry(call, by_id):
        parts += [link.suffix_ids, link.completion_ids]
    return np.concatenate(parts[:-1]) if len(parts) > 1 else no_ids()


def history(call: Call, by_id: Mapping[str, Call]) -> list[Message]:
    """All messages before the reply, earlier replies as they were sampled."""
    messages: list[Message] = []
    for link in ancestry(call, by_id):
        messages += [*link.new_messages, link.reply]
    return messages[:-1]


def children(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Each call's children in the order given."""
    out: dict[str, list[Call]] = {}
    for call in calls:
        if call.parent_id is not None:
            out.setdefault(call.parent_id, []).append(call)
    return out
