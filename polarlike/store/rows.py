"""Records to table rows and back. Pure: no connection, no hashing of what is stored elsewhere.

What holds: decode(encode(record)) == record, field for field. Settings that the calls of a session share (sampling,
model, requested fields) go into one blob; what differs from call to call (the clamped token limit, the seed) does not,
or each call would bring a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from polarlike.records import Call, Cause, Delivery, Rollout, RolloutStatus, Sampling, Score, Unscored
from polarlike.store.codec import compress, decompress, digest, dump_json, load_json, pack_tokens, unpack_tokens
from polarlike.store.schema import HASH_BYTES

_SHARED = ("requested", "dropped", "model", "dialect", "stream", "rewrites", "text_only")
_OWN: dict[str, Any] = {  # field to the value that is not written; these are of the format and never change
    "parent_id": None,
    "finish_reason": "stop",
    "echo_edits": [],
    "malformed_calls": 0,
    "started": 0.0,
    "finished": 0.0,
    "first_difference": None,
}


@dataclass(slots=True)
class Encoded:
    """A row and the blobs it names: hash to uncompressed JSON."""

    row: dict[str, Any]
    blobs: dict[bytes, bytes] = field(default_factory=dict)

    def add(self, value: Any) -> bytes:
        data = dump_json(value)
        name = digest(data)
        self.blobs[name] = data
        return name


def encode_call(call: Call) -> Encoded:
    out = Encoded({})
    sampling = {f.name: getattr(call.sampling, f.name) for f in fields(Sampling)}
    own = {name: value for name, blank in _OWN.items() if (value := getattr(call, name)) != blank}
    own |= {"cause": call.cause.value, "max_tokens": sampling.pop("max_tokens"), "seed": sampling.pop("seed")}
    shared = {name: getattr(call, name) for name in _SHARED} | {"sampling": sampling}
    out.row = {
        "call_id": call.call_id,
        "session_id": call.session_id,
        "position": call.index,
        "delivery": call.delivery.value,
        "retries": call.retries,
        "messages": b"".join(out.add(m) for m in call.new_messages),
        "tools": None if call.tools is None else out.add(call.tools),
        "reply": out.add(call.reply),
        "settings": out.add(shared),
        "fields": dump_json(own),
        "tokens": pack_tokens(call.suffix_ids, call.completion_ids, call.logprobs, call.versions, call.forced),
    }
    return out


def hashes(joined: bytes) -> list[bytes]:
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def blobs_of(row: Mapping[str, Any]) -> list[bytes]:
    """The hashes that a call row names."""
    named = [*hashes(row["messages"]), row["reply"], row["settings"]]
    return named if row["tools"] is None else [*named, row["tools"]]


def decode_call(row: Mapping[str, Any], blob: Mapping[bytes, bytes]) -> Call:
    """blob: hash to uncompressed JSON. Every record gets its own copies, so that changing one changes no other."""
    own, shared = deepcopy(_OWN) | load_json(row["fields"]), load_json(blob[row["settings"]])
    sampling = shared.pop("sampling")
    sampling |= {"max_tokens": own.pop("max_tokens"), "seed": own.pop("seed"), "stop": tuple(sampling["stop"])}
    suffix_ids, completion_ids, logprobs, versions, forced = unpack_tokens(row["tokens"])
    return Call(
        call_id=row["call_id"],
        session_id=row["session_id"],
        index=row["position"],
        cause=Cause(own.pop("cause")),
        new_messages=[load_json(blob[name]) for name in hashes(row["messages"])],
        tools=None if row["tools"] is None else load_json(blob[row["tools"]]),
        suffix_ids=suffix_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
        versions=versions,
        forced=forced,
        reply=load_json(blob[row["reply"]]),
        sampling=Sampling(**sampling),
        delivery=Delivery(row["delivery"]),
        retries=row["retries"],
        **own,
        **shared,
    )


def encode_rollout(rollout: Rollout) -> Encoded:
    record = asdict(replace(rollout, patch=b""))
    del record["patch"]
    return Encoded(
        {
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task_id,
            "group_id": rollout.group_id,
            "sample": rollout.sample,
            "status": rollout.status.value,
            "started": rollout.started,
            "record": compress(dump_json(record)),
            "patch": compress(rollout.patch),
        }
    )


def decode_rollout(row: Mapping[str, Any]) -> Rollout:
    record = load_json(decompress(row["record"]))
    score = record.pop("score")
    if score is not None:
        unscored = score.pop("unscored")
        score = Score(**score, unscored=None if unscored is None else Unscored(unscored))
    status = RolloutStatus(record.pop("status"))
    return Rollout(**record, status=status, score=score, patch=decompress(row["patch"]))


def encode_value(value: dict[str, Any]) -> bytes:
    return compress(dump_json(value))


def decode_value(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = load_json(decompress(data))
    return value
