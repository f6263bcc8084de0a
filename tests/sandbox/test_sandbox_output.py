"""The clip: short streams whole, long ones by their ends, and memory that does not grow with the stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.output import Clip


@given(st.lists(st.binary(max_size=50)), st.integers(min_value=2, max_value=100))
def test_head_and_tail_are_those_of_the_whole_stream(chunks: list[bytes], limit: int) -> None:
    clip, whole = Clip(limit), b"".join(chunks)
    for chunk in chunks:
        clip.add(chunk)
    value = clip.value()
    if len(whole) <= limit:
        assert value == whole
    else:
        gap = f"\n[{len(whole) - limit} bytes left out]\n".encode()
        assert value == whole[: limit - limit // 2] + gap + whole[len(whole) - limit // 2 :]


def test_an_endless_stream_is_not_kept() -> None:
    clip = Clip(1000)
    for _ in range(100):
        clip.add(b"x" * 1_000_000)
    assert clip.total == 100_000_000
    assert len(clip.value()) < 1100
    assert len(clip._tail) <= 1000
