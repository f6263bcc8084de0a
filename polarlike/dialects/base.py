"""What a dialect is: one model API as pure functions. A request body goes in and a conversation comes out; a reply goes
in and events come out. No I/O, no tokens, no sessions.

There is one shape of answer: a stream of events. The plain answer is that stream, folded, so that the two can not
differ. Dialects register in the entry-point group `polarlike.dialects`: name -> class without arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from polarlike.records import Message, PolarError, Tool


class DialectError(PolarError):
    """A request that is answered with an HTTP status and the dialect's own error body."""

    def __init__(self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


@dataclass(slots=True)
class ModelRequest:
    """A request, free of its dialect. `sampling` holds only what the client sent, by the names of records.Sampling."""

    model: str
    messages: list[Message]
    tools: list[Tool] | None
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    dropped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class ReplyMeta:
    """What every event of one reply carries. created: unix seconds."""

    reply_id: str
    model: str
    created: int
    include_usage: bool = False


class Dialect(Protocol):
    name: str
    path: str  # below the base URL, as in /v1/chat/completions

    def parse(self, body: bytes) -> ModelRequest:
        """Raises DialectError with status 400 for what is malformed or cannot be honoured."""
        ...

    def opening(self, meta: ReplyMeta) -> bytes:
        """The event that may leave before anything was sampled."""
        ...

    def delta(self, meta: ReplyMeta, *, reasoning: str = "", content: str = "") -> bytes: ...

    def closing(
        self,
        meta: ReplyMeta,
        reply: Message,
        finish_reason: str,
        usage: Usage | None,
        *,
        sent: tuple[str, str] = ("", ""),
    ) -> Iterator[bytes]:
        """What is left to say of the reply after (reasoning, content) were sent, and the end of the stream. The last
        item is the closing event."""
        ...

    def keep_alive(self) -> bytes: ...

    def plain(self, meta: ReplyMeta, reply: Message, finish_reason: str, usage: Usage | None) -> bytes:
        """The whole answer as one JSON body: the stream of events, folded."""
        ...

    def error(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None
    ) -> bytes:
        """An error body in the dialect's own shape."""
        ...

    def error_event(self, message: str) -> bytes:
        """An error after the stream began."""
        ...
