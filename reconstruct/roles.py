"""Who speaks in each call. Knows the model alias each request named; the only place that decides roles.

A program of several agents calls each by its own model alias, so the alias is the role. One alias is one agent: main.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarlike.records import Call

MAIN = "main"


def assign(calls: Sequence[Call]) -> dict[str, str]:
    """Call id to role."""
    several = len({c.model for c in calls}) > 1
    return {c.call_id: (c.model or MAIN) if several else MAIN for c in calls}
