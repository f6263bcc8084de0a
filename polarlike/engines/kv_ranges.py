"""Who owns which places of the key-value pool: runs of consecutive places, and the allocator that hands them out.

It knows only integers, no tensors. What holds: every place is either free or in exactly one run handed out, and an
allocation of n places succeeds whenever n are free, if need be in several runs, so the pool never fails by being
fragmented.
"""

from __future__ import annotations

from bisect import bisect_left

Run = tuple[int, int]
"""(start, length) of consecutive places."""

Runs = list[Run]


def count(runs: Runs) -> int:
    return sum(n for _, n in runs)


def cut(runs: Runs, n: int) -> tuple[Runs, Runs]:
    """The first n places and the rest."""
    head: Runs = []
    for k, (start, length) in enumerate(runs):
        if n < length:
            if n:
                head.append((start, n))
            return head, [(start + n, length - n), *runs[k + 1 :]]
        head.append((start, length))
        n -= length
    return head, []


def join(runs: Runs) -> Runs:
    """The same places in the same order, neighbours made one."""
    out: Runs = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


class Allocator:
    """Hands out places 0..size-1."""

    def __init__(self, size: int):
        self.size = size
        self.free = size
        self._starts: list[int] = [0]  # free runs, sorted
        self._lengths: list[int] = [size]

    def take(self, n: int) -> Runs | None:
        """n places in as few runs as there can be; None if fewer are free."""
        if n > self.free:
            return None
        runs: Runs = []
        while n:
            fitting = [(length, k) for k, length in enumerate(self._lengths) if length >= n]
            # The tightest run that holds all of it, else the longest there is.
            k = min(fitting)[1] if fitting else max(range(len(self._lengths)), key=self._lengths.__getitem__)
            got = min(n, self._lengths[k])
            runs.append((self._starts[k], got))
            self._shrink(k, got)
            n -= got
            self.free -= got
        return runs

    def _shrink(self, k: int, n: int) -> None:
        if n == self._lengths[k]:
            del self._starts[k], self._lengths[k]
        else:
            self._starts[k] += n
            self._lengths[k] -= n

    def give_back(self, runs: Runs) -> None:
        for start, length in runs:
            if not length:
                continue
            k = bisect_left(self._starts, start)
            self._starts.insert(k, start)
            self._lengths.insert(k, length)
            self._merge(k)
            self._merge(k - 1)
            self.free += length

    def _merge(self, k: int) -> None:
        """Makes free runs k and k + 1 one if they touch."""
        if 0 <= k < len(self._starts) - 1 and self._starts[k] + self._lengths[k] == self._starts[k + 1]:
            self._lengths[k] += self._lengths[k + 1]
            del self._starts[k + 1], self._lengths[k + 1]
