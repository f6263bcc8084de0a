"""Keeps the head and the tail of a stream that may be endless. Knows nothing of where the bytes come from."""

from __future__ import annotations


class Clip:
    """Holds at most `limit` bytes: the first half, and the last half of what follows it."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            # Cut only when it has doubled, so that a byte is moved once and not at every chunk.
            if len(self._tail) > 2 * self._tail_room + 65536:
                self._cut()

    def _cut(self) -> None:
        del self._tail[: len(self._tail) - self._tail_room]

    def value(self) -> bytes:
        """What was kept; a line says how many bytes are missing between the halves."""
        if len(self._tail) > self._tail_room:
            self._cut()
        missing = self.total - len(self._head) - len(self._tail)
        gap = f"\n[{missing} bytes left out]\n".encode() if missing else b""
        return bytes(self._head) + gap + bytes(self._tail)
