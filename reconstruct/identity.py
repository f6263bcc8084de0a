"""When is a message that came back the message we know? Pure; shared by whoever matches conversations.

Harnesses re-serialise arguments, trim or drop reasoning and turn empty content into null; none of that makes another
message. What this leaves open (a rewritten call under the same id) is an echo edit, found and counted by the proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def identity(message: Mapping[str, Any]) -> bytes:
    """What harnesses keep of a message when they send it back, as the proxy matches it: an assistant's turn is its
    tool-call ids, else its text without outer white space; reasoning never counts, since some trim it or drop it."""
    kept: list[Any]
    if message["role"] == "assistant":
        asked = message.get("tool_calls") or []
        ids = [c.get("id") for c in asked]
        if ids and all(ids):
            kept = ["assistant", ids]
        else:
            calls = [[c["function"]["name"], parsed(c["function"]["arguments"])] for c in asked]
            kept = ["assistant", (message.get("content") or "").strip(), calls]
    else:
        kept = [message["role"], message.get("content") or "", message.get("tool_call_id"), message.get("name")]
    return orjson.dumps(kept)


def parsed(arguments: str) -> str:
    """Arguments by meaning, as canonical JSON; a text that is not JSON, or nested too deep to write again, stands for
    itself."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError):
        return arguments
