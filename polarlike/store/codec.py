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

_LEVEL = 3  # 9 and 19 save 2 and 5 per cent at several times the cost
_JSON_MARK = b" "  # leads what the standard library's json wrote and has to read
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
        return _dump_with_json(value)
    if b"null" in data and _holds_non_finite(value):  # orjson writes NaN and infinities as null
        return _dump_with_json(value)
    return data


def load_json(data: bytes) -> Any:
    # orjson would read an integer past 64 bits as a float.
    return json.loads(data) if data.startswith(_JSON_MARK) else orjson.loads(data)


def _dump_with_json(value: Any) -> bytes:
    return _JSON_MARK + json.dumps(value, separators=(",", ":")).encode()


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
#
# Chosen by measurement (benchmarks/store_size.py): ids as variable-length integers, then zstd, are the smallest or near
# it at every length (tokenizers give common tokens small ids; differences of neighbours are larger than the ids). The
# high bytes of logprobs (sign, exponent) compress well and the mantissas hardly, so each go into a frame of their own.

_TOKEN_FORMAT = 1
_HEAD = struct.Struct("<B7I")  # format, lengths


def varints(values: npt.NDArray[Any]) -> bytes:
    """int32 as little-endian base-128, 1 to 5 bytes each."""
    unsigned = values.astype("<i4", copy=False).view("<u4").astype(np.uint64)
    sizes = np.ones(unsigned.size, np.int64)
    for k in range(1, 5):
        sizes += unsigned >= np.uint64(1 << (7 * k))
    starts = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), np.uint8)
    for k in range(5):
        has = sizes > k
        more = np.where(sizes[has] > k + 1, 0x80, 0).astype(np.uint8)
        out[starts[has] + k] = ((unsigned[has] >> np.uint64(7 * k)) & np.uint64(0x7F)).astype(np.uint8) | more
    return out.tobytes()


def from_varints(data: bytes) -> Ids:
    raw = np.frombuffer(data, np.uint8)
    if not raw.size:
        return np.zeros(0, np.int32)
    starts = np.concatenate(([0], np.flatnonzero(raw < 0x80)[:-1] + 1))
    place = np.arange(raw.size) - np.repeat(starts, np.diff(np.append(starts, raw.size)))
    values = np.add.reduceat((raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64), starts)
    return values.astype(np.uint32).view(np.int32)


def _run_lengths(values: Ids) -> Ids:
    """int32 [2 * runs]: value, length, value, length, ..."""
    if not values.size:
        return np.zeros(0, np.int32)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    lengths = np.diff(np.append(starts, values.size))
    return np.stack((values[starts], lengths), axis=1).astype(np.int32).reshape(-1)


def pack_tokens(suffix_ids: Ids, completion_ids: Ids, logprobs: Logprobs, versions: Ids, forced: Mask) -> bytes:
    """One call's arrays. Versions are run-length coded; forced costs nothing where no token is forced."""
    runs = _run_lengths(np.asarray(versions, np.int32))
    integers = np.concatenate((np.asarray(suffix_ids, np.int32), np.asarray(completion_ids, np.int32), runs))
    bits = np.packbits(np.asarray(forced, np.bool_)).tobytes() if forced.any() else b""
    planes = np.asarray(logprobs, "<f4").view(np.uint8).reshape(-1, 4).T
    frames = [compress(varints(integers)), compress(planes[3].tobytes()), compress(planes[:3].tobytes())]
    body = b"".join([*frames, bits])
    counts = (suffix_ids.size, completion_ids.size, logprobs.size, forced.size, *map(len, frames))
    return _HEAD.pack(_TOKEN_FORMAT, *counts) + body


def unpack_tokens(data: bytes) -> tuple[Ids, Ids, Logprobs, Ids, Mask]:
    """suffix_ids, completion_ids, logprobs, versions, forced."""
    kind, n_suffix, n_completion, n_logprobs, n_forced, *sizes = _HEAD.unpack_from(data)
    if kind != _TOKEN_FORMAT:
        raise ValueError(f"unknown token format {kind}")
    frames, at = [], _HEAD.size
    for size in sizes:
        frames.append(decompress(data[at : at + size]))
        at += size
    integers = from_varints(frames[0])
    suffix_ids, completion_ids, runs = np.split(integers, (n_suffix, n_suffix + n_completion))
    planes = np.frombuffer(frames[2] + frames[1], np.uint8).reshape(4, n_logprobs)
    logprobs = np.ascontiguousarray(planes.T).reshape(-1).view("<f4")
    versions = np.repeat(runs[::2], runs[1::2])
    bits = np.frombuffer(data, np.uint8, offset=at)
    forced = np.unpackbits(bits, count=n_forced).astype(np.bool_) if bits.size else np.zeros(n_forced, np.bool_)
    return suffix_ids.copy(), completion_ids.copy(), logprobs, versions, forced
