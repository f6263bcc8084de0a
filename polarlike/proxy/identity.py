"""Conversations by digest, and how a harness changed a turn on the way back. Pure functions over canonical messages.

A conversation's identity is a chain of digests, one a message, seeded with its tools. What makes two messages the same
is `reconstruct.identity`'s; what that leaves open (a rewritten call under the same id) is found by `echo_edits` and
reported, not hidden.
"""

from __future__ import annotations

import hashlib

import orjson

from polarlike.records import Message, Tool
from reconstruct.identity import identity, parsed

Digest = bytes


def tools_digest(tools: list[Tool] | None) -> Digest:
    return _hash(b"tools", orjson.dumps(tools or [], option=orjson.OPT_SORT_KEYS))


def extend(before: Digest, message: Message) -> Digest:
    """The digest of a conversation after one more message."""
    return _hash(before, identity(message))


def chain(root: Digest, messages: list[Message]) -> list[Digest]:
    """chain(...)[k] is the digest of the first k messages."""
    out = [root]
    for message in messages:
        out.append(extend(out[-1], message))
    return out


def echo_edits(sampled: Message, echoed: Message) -> list[str]:
    """How the harness changed a turn: content, reasoning, or the call at some place. Differences of JSON spacing,
    escapes and key order, outer white space, and dropped reasoning are no edits."""
    edits = []
    if sampled.get("content", "").strip() != echoed.get("content", "").strip():
        edits.append("content")
    reasoning = echoed.get("reasoning_content")
    if reasoning is not None and reasoning.strip() != sampled.get("reasoning_content", "").strip():
        edits.append("reasoning")
    ours, theirs = sampled.get("tool_calls", []), echoed.get("tool_calls", [])
    if len(ours) != len(theirs):
        edits.append("tool_calls")
    for k, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a["function"]["name"] != b["function"]["name"]:
            edits.append(f"tool_calls[{k}].name")
        if parsed(a["function"]["arguments"]) != parsed(b["function"]["arguments"]):
            edits.append(f"tool_calls[{k}].arguments")
    return edits


def reasoning_differs(sampled: Message, echoed: Message) -> bool:
    """True where the echo carries reasoning and it is another turn's: tells apart siblings of equal text."""
    return "reasoning" in echo_edits(sampled, echoed)


def _hash(*parts: bytes) -> Digest:
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()
