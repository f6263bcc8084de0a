"""Bytes on disk: JSON values, token arrays, hashes. Knows no tables and no I/O.

What holds: every value comes back equal. JSON goes through orjson; what orjson would change or refuse (NaN, integers
past 64 bits, lone surrogates) goes through the standard library's json instead, and what is not JSON is refused.
Token arrays keep their bits, NaN payloads included.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from polarlike.records import Ids, Logprobs, Mask
from polarlike.store.schema import HASH_BYTES

_LEVEL = 3
_FORMAT = 1
_HEAD = struct.Struct("<B5I")
_local = threading.local()


def compress(data: bytes) -> bytes:
    compressor = getattr(_local, "compressor", None)
    if compressor is None:  # a compressor is not safe to share between threads
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    packed: bytes = compressor.compress(data)
    return packed


def decompress(data: bytes) -> bytes:
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    plain: bytes = decompressor.decompress(data)
    return plain


def digest(data: bytes) -> bytes:
    """The name of a blob: 16 bytes of BLAKE2b over its uncompressed JSON."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


# ---------------------------------------------------------------- JSON


def dump_json(value: Any) -> bytes:
    """Raises TypeError for what JSON cannot hold."""
    try:
        data = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError:
        _check_json(value)
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    if b"null" in data and _holds_non_finite(value):  # orjson writes NaN and infinities as null
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    return data


def load_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def _holds_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_holds_non_finite(v) for v in value.values())
    return isinstance(value, list | tuple) and any(_holds_non_finite(v) for v in value)


def _check_json(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a JSON object has text keys, not {key!r}")
            _check_json(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(item)
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(f"{type(value).__name__} is not JSON")


# ---------------------------------------------------------------- token arrays


def _planes(array: npt.NDArray[Any]) -> bytes:
    """The bytes of 4-byte values, all first bytes first: the high bytes of ids are then long runs."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, 4).T.tobytes()


def _unplanes(data: memoryview, dtype: str, count: int) -> npt.NDArray[Any]:
    planes = np.frombuffer(data, np.uint8, count * 4).reshape(4, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _run_lengths(values: Ids) -> Ids:
    """int32 [runs, 2] as value, length."""
    if not values.size:
        return np.zeros((0, 2), np.int32)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    lengths = np.diff(np.concatenate((starts, [values.size])))
    return np.stack((values[starts], lengths.astype(np.int32)), axis=1).astype(np.int32)


def pack_tokens(suffix_ids: Ids, completion_ids: Ids, logprobs: Logprobs, versions: Ids, forced: Mask) -> bytes:
    """One call's arrays. Versions are run-length coded; forced costs nothing where no token is forced."""
    suffix_ids, completion_ids = np.asarray(suffix_ids, "<i4"), np.asarray(completion_ids, "<i4")
    logprobs, runs = np.asarray(logprobs, "<f4"), _run_lengths(np.asarray(versions, "<i4"))
    forced = np.asarray(forced, np.bool_)
    sparse = np.packbits(forced).tobytes() if forced.any() else b""
    body = _planes(suffix_ids) + _planes(completion_ids) + _planes(logprobs) + runs.tobytes() + sparse
    head = _HEAD.pack(_FORMAT, suffix_ids.size, completion_ids.size, logprobs.size, len(runs), forced.size)
    return head + compress(body)


def unpack_tokens(data: bytes) -> tuple[Ids, Ids, Logprobs, Ids, Mask]:
    """suffix_ids, completion_ids, logprobs, versions, forced."""
    kind, n_suffix, n_completion, n_logprobs, n_runs, n_forced = _HEAD.unpack_from(data)
    if kind != _FORMAT:
        raise ValueError(f"unknown token format {kind}")
    body = memoryview(decompress(data[_HEAD.size :]))
    arrays = []
    for dtype, count in (("<i4", n_suffix), ("<i4", n_completion), ("<f4", n_logprobs)):
        arrays.append(_unplanes(body, dtype, count))
        body = body[count * 4 :]
    runs = np.frombuffer(body, "<i4", n_runs * 2).reshape(-1, 2)
    versions = np.repeat(runs[:, 0], runs[:, 1]).astype(np.int32)
    packed = np.frombuffer(body[n_runs * 8 :], np.uint8)
    forced = np.unpackbits(packed, count=n_forced).astype(np.bool_) if packed.size else np.zeros(n_forced, np.bool_)
    return arrays[0], arrays[1], arrays[2], versions, forced
