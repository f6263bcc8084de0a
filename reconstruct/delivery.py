"""What became of each reply: the states that the proxy stored, and what later calls prove about them.

Knows calls; nothing of tokens. A trie of messages holds every conversation of the session; each call ends at one node
(its history) and its reply leads to another. A later call whose new messages pass a history either goes on through that
reply (the harness echoed it: confirmed) or passes it by (the harness asked again without it: dropped).

What holds:
- An echo proves delivery, whatever was stored: a crash may have cut the note that the reply was flushed.
- Only a call that began after the reply was finished can pass it by. Two open requests with one history are two
  samples.
- Looking at a call's new messages is enough, so the cost is linear: had it passed an older reply by, its parent would
  have done so first; a parent that came before that reply makes the call's lane older, not a second asking.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarlike.records import Call, Cause, Delivery, Message
from reconstruct.identity import identity

_ROOT = 0
_CUT = ("abort", "error")

TRAINS = (Delivery.CONFIRMED, Delivery.DROPPED)

REASONS = {
    Delivery.COMMITTED: "committed",  # on disk, not all bytes out: nobody saw it
    Delivery.FLUSHED: "unconfirmed",  # the harness did not end, so nothing shows that it read the reply
    Delivery.LOST: "lost",
    Delivery.ABORTED: "aborted",
}
"""Why a call in this state is excluded."""


def final_states(calls: Sequence[Call], *, harness_ended: bool) -> dict[str, Delivery]:
    """Each call's state by id, derived from stored states and the calls after it.

    calls: all calls of a session in the order they were made. harness_ended: it ended cleanly or by our own time or
    turn limit, so that the last flushed reply of each lane was read.
    """
    echoed, passed_by = _evidence(calls)
    return {c.call_id: _state(c, c.call_id in echoed, c.call_id in passed_by, harness_ended) for c in calls}


def _state(call: Call, echoed: bool, passed_by: bool, harness_ended: bool) -> Delivery:
    if call.delivery is Delivery.ABORTED or call.finish_reason in _CUT:
        return Delivery.ABORTED
    if echoed:
        return Delivery.CONFIRMED
    if call.delivery in (Delivery.COMMITTED, Delivery.LOST):
        return call.delivery
    if passed_by:
        return Delivery.DROPPED
    return Delivery.CONFIRMED if harness_ended else Delivery.FLUSHED


def _evidence(calls: Sequence[Call]) -> tuple[set[str], set[str]]:
    """Ids of calls whose reply a later call echoed, and of those that a later call passed by."""
    echoed = {c.parent_id for c in calls if c.parent_id is not None}
    passed_by: set[str] = set()
    step: dict[tuple[int, bytes], int] = {}
    asked_at: dict[int, list[Call]] = {}
    reply_node: dict[str, int] = {}

    def go(node: int, message: Message) -> int:
        return step.setdefault((node, identity(message)), len(step) + 1)

    for call in calls:
        path = [_ROOT if call.parent_id is None else reply_node[call.parent_id]]
        for message in call.new_messages:
            path.append(go(path[-1], message))
        for k, node in enumerate(path):
            onward = path[k + 1] if k + 1 < len(path) else None
            for earlier in asked_at.get(node, ()):
                if onward == reply_node[earlier.call_id] or _edited_echo(call, k):
                    echoed.add(earlier.call_id)
                elif call.started >= earlier.finished:
                    passed_by.add(earlier.call_id)
        asked_at.setdefault(path[-1], []).append(call)
        reply_node[call.call_id] = go(path[-1], call.reply)
    return echoed, passed_by


def _edited_echo(call: Call, k: int) -> bool:
    """Whether new message k stands where a sampled reply stood before the harness edited it."""
    messages = call.new_messages
    return call.cause is Cause.ECHO_EDITED and k < len(messages) and messages[k].get("role") == "assistant"
