"""The prefix tree and its places against a dictionary that keeps every prefix apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlike.engines.kv_ranges import Allocator, Runs, count, cut, join
from polarlike.engines.kv_tree import Node, PrefixTree, common_prefix


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def places(runs: Runs) -> list[int]:
    return [p for start, n in runs for p in range(start, start + n)]


def path_places(node: Node) -> list[int]:
    return [p for n in node.path() for p in places(n.runs)]


def add(tree: PrefixTree, *values: int) -> Node:
    node = tree.match(ids(*values))
    rest = ids(*values[node.end :])
    runs = tree.allocator.take(rest.size)
    assert runs is not None
    return tree.insert(node, rest, runs)


def test_runs_are_cut_and_joined_place_by_place() -> None:
    runs = [(10, 3), (20, 2)]
    assert cut(runs, 0) == ([], runs)
    assert cut(runs, 2) == ([(10, 2)], [(12, 1), (20, 2)])
    assert cut(runs, 3) == ([(10, 3)], [(20, 2)])
    assert cut(runs, 5) == (runs, [])
    assert join([(1, 2), (3, 4), (9, 1)]) == [(1, 6), (9, 1)]


def test_an_allocation_takes_the_tightest_run_and_splits_only_when_it_must() -> None:
    a = Allocator(20)
    first, second, third = a.take(4), a.take(4), a.take(8)
    assert (first, second, third) == ([(0, 4)], [(4, 4)], [(8, 8)])
    a.give_back([(0, 4)])
    a.give_back([(8, 8)])
    assert a.take(3) == [(0, 3)]  # not from the longer run behind
    assert a.take(13) == [(8, 12), (3, 1)]
    assert a.take(1) is None
    assert a.free == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-8, 12), max_size=40))
def test_no_place_is_handed_out_twice_and_none_is_lost(steps: list[int]) -> None:
    a, held = Allocator(40), []
    for step in steps:
        if step > 0:
            runs = a.take(step)
            assert (runs is None) == (step > 40 - sum(map(count, held)))
            if runs is not None:
                held.append(runs)
        elif held:
            a.give_back(held.pop(-step % len(held)))
        taken = [p for runs in held for p in places(runs)]
        assert len(taken) == len(set(taken))
        assert a.free == 40 - len(taken)
    for runs in held:
        a.give_back(runs)
    assert a.take(40) == [(0, 40)]


def test_a_prefix_that_ends_inside_a_node_cuts_it_and_moves_no_place() -> None:
    tree = PrefixTree(Allocator(100))
    whole = path_places(add(tree, 1, 2, 3, 4, 5))
    node = tree.match(ids(1, 2, 3, 9))
    assert (node.end, path_places(node)) == (3, whole[:3])
    assert path_places(tree.match(ids(1, 2, 3, 4, 5, 6))) == whole
    assert tree.match(ids(2, 1)) is tree.root


def test_inserting_what_is_there_gives_its_places_back() -> None:
    tree = PrefixTree(Allocator(10))
    add(tree, 1, 2, 3)
    runs = tree.allocator.take(4)
    assert runs is not None
    node = tree.insert(tree.root, ids(1, 2, 3, 4), runs)
    assert node.end == 4
    assert tree.allocator.free == 10 - 4


def test_eviction_takes_the_least_recently_used_leaf_and_spares_pinned_ones() -> None:
    tree = PrefixTree(Allocator(12))
    old, pinned, new = add(tree, 1, 2, 3), add(tree, 1, 5, 6), add(tree, 7, 8, 9, 10)
    pinned.pins += 1
    tree.match(ids(1, 2, 3))  # used again: `new` is now the oldest
    assert tree.evict(5) == 4
    assert tree.match(ids(7, 8)).end == 0
    assert tree.match(ids(1, 2, 3)) is old
    assert new.end == 4
    assert tree.evict(12) == 2  # [2, 3]; 1 is still above the pinned leaf
    assert tree.match(ids(1, 5, 6)) is pinned


def test_claiming_takes_only_what_nobody_else_uses() -> None:
    tree = PrefixTree(Allocator(50))
    add(tree, 1, 2, 3)
    add(tree, 1, 2, 3, 4, 5)
    end = add(tree, 1, 2, 3, 4, 5, 6)
    add(tree, 1, 2, 9)
    expected = path_places(end)
    node, runs = tree.claim(end)
    assert (node.end, places(runs)) == (2, expected[2:])
    assert tree.match(ids(1, 2, 3, 4)).end == 2
    assert tree.match(ids(1, 2, 9)).end == 3


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaame"), st.lists(st.integers(0, 2), min_size=1, max_size=8)), max_size=25))
def test_the_tree_agrees_with_a_dictionary_of_prefixes(steps: list[tuple[str, list[int]]]) -> None:
    tree, known = PrefixTree(Allocator(60)), set[tuple[int, ...]]()
    for kind, values in steps:
        if kind == "a":
            add(tree, *values)
            known |= {tuple(values[:k]) for k in range(1, len(values) + 1)}
        elif kind == "e":
            tree.evict(60 - len(known) + 1)
            known = {p for p in known if tree.match(ids(*p)).end == len(p)}
        node = tree.match(ids(*values))
        longest = max(k for k in range(len(values) + 1) if k == 0 or tuple(values[:k]) in known)
        assert node.end == longest
        assert len(set(path_places(node))) == longest
        assert tree.tokens() == len(known)
        assert tree.allocator.free == 60 - len(known)


def test_common_prefix_of_arrays() -> None:
    assert [common_prefix(ids(1, 2, 3), ids(*b)) for b in ((1, 2, 3), (1, 2), (1, 9, 3), (4,), ())] == [3, 2, 1, 0, 0]
