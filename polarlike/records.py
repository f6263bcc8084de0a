"""The nouns of the project as types. This module imports nothing of ours.

Token arrays are numpy: ids and policy versions int32, logprobs float32, masks bool, all one-dimensional. Messages are
plain dicts in one canonical conversation form (`Message`), whatever API they came in by, so that the rest of the code
knows no dialect.

What holds: a `Call` stores only what it adds to its parent (messages and token ids), so a record grows with new tokens
and never with history times turns.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

Message = dict[str, Any]
"""role: system | user | assistant | tool. content: str (always a string, parts are joined by the dialect).
assistant only: reasoning_content: str, tool_calls: [{id, type: "function", function: {name, arguments: str}}].
tool only: tool_call_id. Optional: name. Absent keys are absent, never None."""

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}} as in OpenAI Chat Completions."""


def new_id(prefix: str) -> str:
    """A unique id such as call_3f…: prefix, underscore, 24 hex digits."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


class PolarError(Exception):
    """Base of our errors. Its text is one sentence for the user that says what to do."""

    exit_code = 1


class UsageError(PolarError):
    """The user's input is wrong: exit code 2."""

    exit_code = 2


# ---------------------------------------------------------------- calls


class Delivery(StrEnum):
    """How far a reply got. CONFIRMED and DROPPED are derived by `reconstruct`, the others are stored."""

    COMMITTED = "committed"  # on disk, not all bytes out
    FLUSHED = "flushed"  # closing event written to the socket
    LOST = "lost"  # flushed into a connection that had closed
    ABORTED = "aborted"  # client gone or weights forced while sampling
    CONFIRMED = "confirmed"  # echoed later, or the last flushed reply of its lane
    DROPPED = "dropped"  # flushed, then the harness asked again without it


class Cause(StrEnum):
    """Why a call's prompt starts where it does. CONTINUES extends its parent; all others start a new segment."""

    FIRST = "first"  # the session's first call
    CONTINUES = "continues"
    NEW_CONVERSATION = "new_conversation"  # shares no leading message with an earlier call
    PARALLEL = "parallel"  # the same conversation as a call that is still open: another sample of it
    REPLY_DROPPED = "reply_dropped"  # an earlier request's history, without its reply
    HISTORY_CHANGED = "history_changed"  # an earlier conversation, edited
    TOOLS_CHANGED = "tools_changed"
    AMBIGUOUS = "ambiguous"  # two earlier calls fit and differ in tokens
    BRIDGE_REFUSED = "bridge_refused"  # the template cannot extend this turn token for token
    ECHO_EDITED = "echo_edited"  # the harness changed the sampled turn and the session's policy is to fork


@dataclass(slots=True, frozen=True)
class Sampling:
    """Effective sampling parameters, each one sent to the engine explicitly. top_k 0 means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 4096
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


def no_ids() -> Ids:
    return np.zeros(0, np.int32)


@dataclass(slots=True)
class Call:
    """One model request and its reply.

    suffix_ids: int32, what this call's prompt adds to its parent's prompt + completion (the whole prompt without one).
    completion_ids, logprobs, versions: int32, float32, int32 of one length. forced: bool, True where a grammar or tool
    choice forced the token (not trainable). A text-only call (an engine without ids) has empty arrays.
    """

    call_id: str
    session_id: str
    index: int
    parent_id: str | None
    cause: Cause
    new_messages: list[Message]
    tools: list[Tool] | None
    suffix_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    versions: Ids
    forced: Mask
    reply: Message
    finish_reason: str  # stop | tool_calls | length | abort | error
    sampling: Sampling
    requested: dict[str, Any] = field(default_factory=dict)  # sampling fields as the harness asked
    dropped: list[str] = field(default_factory=list)  # request fields that could not be honoured
    model: str = ""
    dialect: str = "openai-chat"
    stream: bool = False
    delivery: Delivery = Delivery.COMMITTED
    retries: int = 0  # retries that joined this call
    echo_edits: list[str] = field(default_factory=list)  # how the parent's reply came back changed
    rewrites: dict[str, int] = field(default_factory=dict)  # volatile-span rules applied, with counts
    malformed_calls: int = 0
    text_only: bool = False
    started: float = 0.0  # unix seconds
    finished: float = 0.0
    first_difference: dict[str, Any] | None = None  # where a new segment departs from the nearest earlier prompt


# ---------------------------------------------------------------- trajectories


@dataclass(slots=True)
class Span:
    """Where one call's sampled tokens lie in a segment: ids[start:end]."""

    call_id: str
    start: int
    end: int


@dataclass(slots=True)
class Segment:
    """One token stream of a rollout, the unit a trainer eats.

    ids: int32 [T]. loss_mask: bool [T], True on trainable sampled tokens. logprobs: float32 [T], the engine's own where
    loss_mask is True, 0 elsewhere. versions: int32 [T], policy version of each sampled token, -1 elsewhere.
    """

    segment_id: str
    role: str
    cause: Cause
    ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Ids
    temperature: float
    spans: list[Span]
    finish_reason: str = ""

    @property
    def trainable(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(slots=True)
class Link:
    """How two segments of one trajectory relate: kind is continues, spawned, compacted or forked."""

    source: str
    target: str
    kind: str
    cause: Cause


class Unscored(StrEnum):
    """What to do with a rollout that has no score."""

    RETRY = "retry"  # a fault of ours that may pass: run it again
    GRADE_ANYWAY = "grade_anyway"  # the harness was cut by our limit: its work can still be judged
    DISCARD = "discard"


@dataclass(slots=True)
class Score:
    """value is None exactly when unscored is set. components and evidence explain it."""

    value: float | None
    unscored: Unscored | None = None
    reason: str = ""
    components: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.value is None) != (self.unscored is not None):
            raise ValueError("a score has a value or a class of being unscored, never both or neither")


@dataclass(slots=True)
class Trajectory:
    """A rollout's segments, their links, score and fidelity report."""

    rollout_id: str
    task_id: str
    segments: list[Segment]
    links: list[Link]
    fidelity: dict[str, Any]
    score: Score | None = None
    messages: list[Message] = field(default_factory=list)


class RolloutStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"  # scored
    UNSCORED = "unscored"
    INTERRUPTED = "interrupted"  # our process ended first; it is run again on resume


@dataclass(slots=True)
class Rollout:
    """One attempt at one task. `slot` names the attempt's place (group and sample) so that a resumed run can tell
    which are done: group_id + ":" + sample."""

    rollout_id: str
    task_id: str
    group_id: str
    sample: int
    status: RolloutStatus
    session_id: str = ""
    attempt: int = 0
    score: Score | None = None
    fidelity: dict[str, Any] = field(default_factory=dict)
    harness: str = ""
    harness_exit: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    patch: bytes = b""  # the captured work tree against the start, see sandbox.tree
    started: float = 0.0
    finished: float = 0.0

    @property
    def slot(self) -> str:
        return f"{self.group_id}:{self.sample}"


@dataclass(slots=True)
class Group:
    """The scored rollouts of one task under one setting: what a trainer is given."""

    group_id: str
    task_id: str
    trajectories: list[Trajectory]


# ---------------------------------------------------------------- tasks


@dataclass(slots=True)
class Environment:
    """Where a task runs.

    base_image: an image name; None is our own base image. copies: (host path, path in the box) laid into it before the
    agent starts. dockerfile: a folder with a Dockerfile that must be built, set when copies cannot express it.
    """

    base_image: str | None = None
    copies: list[tuple[str, str]] = field(default_factory=list)
    dockerfile: str | None = None
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    memory_mb: int = 1024
    cpus: float = 1.0
    pids: int = 256
    network: bool = False


@dataclass(slots=True)
class Limits:
    agent_s: float = 600.0
    verifier_s: float = 600.0
    max_calls: int = 0  # model calls a rollout may make, 0 is no limit


@dataclass(slots=True)
class Task:
    """An instruction, an environment, a verifier, limits. verifier: {"type": name of an entry point, ...settings}."""

    task_id: str
    instruction: str
    environment: Environment
    verifier: dict[str, Any]
    limits: Limits = field(default_factory=Limits)
    solution: str | None = None  # host path of a folder with solve.sh, for the oracle alone
    metadata: dict[str, Any] = field(default_factory=dict)
    path: str = ""
