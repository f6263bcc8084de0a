"""When is a message that came back the message we know? Pure functions over canonical messages; wire.md's measurements
of what harnesses change on the way back are why each rule is there.

A conversation's identity is a chain of digests, one a message, seeded with its tools. Assistant turns count by their
tool-call ids, which every harness keeps, else by their text without outer white space; reasoning never counts, since
some harnesses trim it and some drop it. What that leaves open (a rewritten call under the same id) is found by
`echo_edits` and reported, not hidden.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from polarlike.records import Message, Tool

Digest = bytes


def tools_digest(tools: list[Tool] | None) -> Digest:
    return _hash(b"tools", orjson.dumps(tools or [], option=orjson.OPT_SORT_KEYS))


def extend(before: Digest, message: Message) -> Digest:
    """The digest of a conversation after one more message."""
    return _hash(before, orjson.dumps(_identity(message)))


def chain(root: Digest, messages: list[Message]) -> list[Digest]:
    """chain(...)[k] is the digest of the first k messages."""
    out = [root]
    for message in messages:
        out.append(extend(out[-1], message))
    return out


def _identity(m: Message) -> list[Any]:
    if m["role"] == "assistant":
        ids = [c.get("id") for c in m.get("tool_calls", [])]
        if ids and all(ids):
            return ["assistant", ids]
        calls = [[c["function"]["name"], _parsed(c["function"]["arguments"])] for c in m.get("tool_calls", [])]
        return ["assistant", m.get("content", "").strip(), calls]
    return [m["role"], m.get("content", ""), m.get("tool_call_id"), m.get("name")]


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
        if _parsed(a["function"]["arguments"]) != _parsed(b["function"]["arguments"]):
            edits.append(f"tool_calls[{k}].arguments")
    return edits


def reasoning_differs(sampled: Message, echoed: Message) -> bool:
    """True where the echo carries reasoning and it is another turn's: tells apart siblings of equal text."""
    return "reasoning" in echo_edits(sampled, echoed)


def _parsed(arguments: str) -> Any:
    """Arguments by meaning; a text that is not JSON stands for itself."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # the latter where it is nested too deeply to be written
        return ["raw", arguments]


def _hash(*parts: bytes) -> Digest:
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()
