"""The prefix tree: which token sequences have their keys and values in the pool, and where.

A node stands for some tokens that follow its parent's; the path from the root spells a prefix. It knows token ids and
runs of places (kv_ranges), no tensors: cutting a node in two moves nothing. It is shared by all sessions, since all
rollouts of a harness begin with the same long prompt.

What holds: children of a node differ in their first token; a node that a running sequence stands on (`pins`) or that
has children is never evicted; least recently used leaves go first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polarlike.engines.kv_ranges import Allocator, Runs, cut
from polarlike.records import Ids, no_ids


@dataclass(slots=True, eq=False)
class Node:
    """ids: int32 [n], and the n places of their keys and values. start: how many tokens come before."""

    ids: Ids
    runs: Runs
    start: int
    parent: Node | None
    serial: int
    children: dict[int, Node] = field(default_factory=dict)
    pins: int = 0
    used: int = 0

    @property
    def end(self) -> int:
        return self.start + int(self.ids.size)

    def path(self) -> list[Node]:
        """From the root's child down to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids two arrays share."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else int(n)


class PrefixTree:
    def __init__(self, allocator: Allocator):
        self.allocator = allocator
        self.evicted = 0
        self._tick = 0
        self._serial = 0
        self.root = self._node(no_ids(), [], 0, None)

    def _node(self, ids: Ids, runs: Runs, start: int, parent: Node | None) -> Node:
        self._serial += 1
        return Node(ids, runs, start, parent, self._serial, used=self._tick)

    def match(self, ids: Ids) -> Node:
        """The node whose path is the longest cached prefix of `ids`; a node that fits in part is cut there."""
        self._tick += 1
        node, at = self.root, 0
        while at < ids.size and (child := node.children.get(int(ids[at]))) is not None:
            n = common_prefix(child.ids, ids[at:])
            node = child if n == child.ids.size else self._cut(child, n)
            node.used = self._tick
            at += n
            if node is not child:
                break
        return node

    def _cut(self, node: Node, n: int) -> Node:
        """Puts a new node with the first n tokens above `node`, which keeps the rest, and returns the new one."""
        assert node.parent is not None
        head, rest = cut(node.runs, n)
        upper = self._node(node.ids[:n], head, node.start, node.parent)
        node.parent.children[int(node.ids[0])] = upper
        upper.children[int(node.ids[n])] = node
        node.ids, node.runs, node.start, node.parent = node.ids[n:], rest, node.start + n, upper
        return upper

    def insert(self, node: Node, ids: Ids, runs: Runs) -> Node:
        """Adds tokens that follow `node`, with their places, and returns the node they end at. Places of tokens that
        are there already go back to the allocator."""
        self._tick += 1
        while ids.size:
            child = node.children.get(int(ids[0]))
            if child is None:
                child = self._node(ids, runs, node.end, node)
                node.children[int(ids[0])] = child
                return child
            n = common_prefix(child.ids, ids)
            node = child if n == child.ids.size else self._cut(child, n)
            node.used = self._tick
            twice, runs = cut(runs, n)
            self.allocator.give_back(twice)
            ids = ids[n:]
        return node

    def claim(self, node: Node) -> tuple[Node, Runs]:
        """Takes the end of `node`'s path that nobody else uses out of the tree: the node left to stand on, and the
        places of what was taken, which are the caller's now."""
        taken: list[Node] = []
        while node.parent is not None and not node.pins and not node.children:
            taken.append(node)
            node = node.parent
            del node.children[int(taken[-1].ids[0])]
        return node, [run for n in reversed(taken) for run in n.runs]

    def evict(self, places: int) -> int:
        """Frees the least recently used leaves until `places` are free or nothing more can go; how many were freed."""
        freed = 0
        while self.allocator.free < places:
            leaves = [n for n in self._walk() if not n.children and not n.pins and n.parent is not None]
            if not leaves:
                break
            for leaf in sorted(leaves, key=lambda n: n.used):
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.allocator.give_back(leaf.runs)
                freed += int(leaf.ids.size)
                if self.allocator.free >= places:
                    break
        self.evicted += freed
        return freed

    def _walk(self) -> list[Node]:
        nodes, k = [self.root], 0
        while k < len(nodes):
            nodes.extend(nodes[k].children.values())
            k += 1
        return nodes

    def tokens(self) -> int:
        return sum(int(n.ids.size) for n in self._walk())

    def clear(self) -> None:
        """Forgets everything. No running sequence may stand on a node any more."""
        for node in self._walk():
            self.allocator.give_back(node.runs)
        self.root = self._node(no_ids(), [], 0, None)
