"""The prefix tree against a set of strings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.effort import examples

from kvloft.catalog.tree import NONE, READY, ROOT, WRITING, Tree

SIZE = 16


def key(path: str) -> bytes:
    return hashlib.md5(path.encode(), usedforsecurity=False).digest()


def keys(path: str) -> Callable[[int], bytes]:
    """Hashes of a request whose chunks are the letters of ``path``; none beyond its end."""

    def prefix(tokens: int) -> bytes:
        assert tokens % SIZE == 0
        assert 0 < tokens <= len(path) * SIZE, "asked for a prefix that is not there"
        return key(path[: tokens // SIZE])

    return prefix


class TreeMachine(RuleBasedStateMachine):
    """Nodes are added below others, published in order and removed as leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(SIZE)
        self.nodes: dict[str, int] = {}
        self.ready: set[str] = set()

    @rule(path=st.text("ab", min_size=1, max_size=12))
    def add(self, path: str) -> None:
        """Add what is missing of a path."""
        ends = [path[:end] for end in range(1, len(path) + 1)]
        missing = [end for end in ends if end not in self.nodes]
        parent = self.nodes.get(path[: len(path) - len(missing)], ROOT)
        nodes = self.tree.add_path(parent, [key(end) for end in missing])
        assert len(set(nodes)) == len(missing)
        assert not set(nodes) & set(self.nodes.values())
        assert all(self.tree.state[node] == WRITING for node in nodes)
        self.nodes.update(zip(missing, nodes, strict=True))

    @precondition(lambda self: len(self.ready) < len(self.nodes))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A node becomes resident after its parent has."""
        able = [
            path for path in sorted(self.nodes)
            if path not in self.ready and (len(path) == 1 or path[:-1] in self.ready)
        ]  # fmt: skip
        path = data.draw(st.sampled_from(able))
        self.tree.state[self.nodes[path]] = READY
        self.ready.add(path)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        leaves = [
            path for path in sorted(self.nodes)
            if not any(other.startswith(path) and other != path for other in self.nodes)
        ]  # fmt: skip
        path = data.draw(st.sampled_from(leaves))
        parent = self.nodes[path[:-1]] if len(path) > 1 else ROOT
        assert self.tree.remove(self.nodes.pop(path)) == parent
        self.ready.discard(path)

    @rule(path=st.text("abc", min_size=1, max_size=14), data=st.data())
    def deepest(self, path: str, data: st.DataObject) -> None:
        """The binary search agrees with a walk, for both ways of asking and every limit."""
        limit = data.draw(st.integers(0, len(path)))
        for ready in (True, False):
            there = self.ready if ready else self.nodes
            expected = ROOT
            for end in range(1, limit + 1):
                if path[:end] in there:
                    expected = self.nodes[path[:end]]
            assert self.tree.deepest(keys(path), limit, ready=ready) == expected

    @invariant()
    def links_agree(self) -> None:
        tree = self.tree
        assert len(tree) == len(self.nodes)
        for path, node in self.nodes.items():
            assert tree.find(key(path)) == node
            assert tree.key(node) == key(path)
            assert tree.depth[node] == len(path)
            below = [p for p in self.nodes if len(p) == len(path) + 1 and p.startswith(path)]
            assert tree.has_children(node) == bool(below)
            siblings = [p for p in self.nodes if len(p) == len(path) and p[:-1] == path[:-1]]
            assert tree.only_child(node) == (len(siblings) == 1)
            above = [self.nodes[path[:end]] for end in range(1, len(path) + 1)]
            assert tree.path(node) == above
            assert tree.path(node, above[0]) == above[1:]
            for steps in range(len(path)):
                assert tree.ancestor(node, steps) == above[-1 - steps]


TreeMachine.TestCase.settings = settings(max_examples=examples(), stateful_step_count=40)
TestTree = TreeMachine.TestCase


@given(length=st.integers(0, 5000), limit=st.integers(0, 5000))
def test_a_lookup_takes_a_logarithmic_number_of_probes(length: int, limit: int) -> None:
    tree = Tree(1)
    parent = ROOT
    for depth in range(1, length + 1):
        parent = tree.add_path(parent, [depth.to_bytes(4, "little")])[0]
    asked = []

    def prefix(depth: int) -> bytes:
        asked.append(depth)
        return depth.to_bytes(4, "little")

    found = tree.deepest(prefix, limit, ready=False)
    assert tree.depth[found] == min(length, limit)
    assert len(asked) <= 2 * max(1, limit).bit_length() + 2
    assert all(1 <= depth <= limit for depth in asked)


def test_ids_are_reused_so_that_memory_follows_what_is_resident() -> None:
    tree = Tree(SIZE)
    for turn in range(50):
        nodes = [tree.add_path(ROOT, [key(f"{turn} {n}")])[0] for n in range(20)]
        for node in nodes:
            tree.remove(node)
    assert tree.capacity == 21
    assert len(tree) == 0


def test_a_forgotten_node_is_not_found_and_its_name_is_free() -> None:
    tree = Tree(SIZE)
    old = tree.add_path(ROOT, [key("a")])[0]
    tree.unindex(old)
    assert tree.find(key("a")) == NONE
    new = tree.add_path(ROOT, [key("a")])[0]
    tree.remove(old)
    assert tree.find(key("a")) == new
