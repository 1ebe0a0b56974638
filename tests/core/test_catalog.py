"""The catalog against the oracle, and its eviction order against a list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.effort import examples

from kvloft.arena import Arena
from kvloft.catalog.catalog import Catalog, Chunks, Store, room_of
from kvloft.catalog.policies import LRU, POLICIES
from kvloft.catalog.tree import NONE, READY, ROOT, WRITING
from kvloft.geometry import Group, Layers, make_geometry
from kvloft.plan import ChunkPlan
from kvloft.testing import audit, oracle

PAGE = 4096


def key(path: str) -> bytes:
    return hashlib.md5(path.encode(), usedforsecurity=False).digest()


def keys(path: str, size: int) -> Callable[[int], bytes]:
    """Hashes of a request whose chunks of ``size`` tokens are the letters of ``path``."""
    return lambda tokens: key(path[: tokens // size])


def one(size: int = 8) -> tuple[Layers, ...]:
    return (Layers(1, size, size),)


def window(id: int, tokens: int, size: int, extra: int = 0) -> Group:
    return Group(id, "window", tokens, one(5000), window=size, extra_retained_tokens=extra)


def local(id: int, tokens: int, chunk: int) -> Group:
    return Group(id, "chunked_local", tokens, one(3000), attention_chunk=chunk)


FULL = Group(0, "full", 4, one())
PLANS: dict[str, ChunkPlan] = {
    name: ChunkPlan(make_geometry(groups, 4), size)
    for name, size, groups in [
        ("full", 4, (FULL,)),
        ("short window", 4, (FULL, window(1, 2, 3))),
        ("window within a chunk", 8, (FULL, window(1, 2, 6), window(2, 4, 6))),
        ("window over chunks", 4, (FULL, window(1, 2, 12, extra=1))),
        ("two windows and a ring", 4, (
            FULL, Group(1, "ring", 3, one(), cacheable=False), window(2, 4, 7), window(3, 1, 10),
        )),
        ("local", 4, (FULL, local(1, 2, 10))),
        ("local that ends with chunks", 4, (FULL, local(1, 4, 8))),
        ("state", 4, (FULL, Group(1, "state", 4, one(9000)))),
        ("state and windows", 4, (
            FULL, Group(1, "state", 4, one(9000)), window(2, 2, 9), local(3, 2, 12),
        )),
        ("no full group", 4, (window(0, 2, 7), Group(1, "state", 2, one()))),
    ]
}  # fmt: skip


@dataclass
class Pin:
    node: int
    reads: list[Chunks]


class CatalogMachine(RuleBasedStateMachine):
    """Stores begin, end and fail in order; requests match and read; all under a small budget."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[bytes, str] = {}
        self.stores: list[Store] = []
        self.pins: list[Pin] = []

    @initialize(
        name=st.sampled_from(list(PLANS)), pages=st.sampled_from([6, 15, 40, 200]),
        policy=st.sampled_from(list(POLICIES)),
    )  # fmt: skip
    def start(self, name: str, pages: int, policy: str) -> None:
        self.plan = PLANS[name]
        self.size = self.plan.tokens_per_chunk
        slab = max(self.plan.slot_sizes())
        arena = Arena(max(pages * PAGE, slab), slab)
        self.catalog = Catalog(self.plan, arena, POLICIES[policy](room_of(self.plan, arena.budget)))

    # What a loft does, in the order in which it does it.

    @rule(path=st.text("ab", min_size=1, max_size=8), data=st.data())
    def begin(self, path: str, data: st.DataObject) -> None:
        catalog, tree = self.catalog, self.catalog.tree
        visit = None
        if data.draw(st.booleans()):
            visit = catalog.visit(keys(path, self.size), len(path))
        store = catalog.begin()
        node = tree.deepest(keys(path, self.size), len(path), ready=False)
        depth = tree.depth[node]
        while depth < len(path):
            stop = data.draw(st.integers(depth + 1, len(path)))
            ends = [path[:end] for end in range(depth + 1, stop + 1)]
            self.paths.update((key(end), end) for end in ends)
            use = visit.use(depth + 1, key(ends[0])) if visit else None
            added = catalog.add_chunks(store, node, [key(end) for end in ends], use)
            node, depth = (added or [node])[-1], depth + len(added)
            if depth < stop:
                break
        if self.plan.has_resume_points:
            for end in sorted(data.draw(st.sets(st.integers(1, len(path)), max_size=3))):
                at = tree.find(key(path[:end]))
                if at >= 0 and not catalog.has_resume(at):
                    missing = list(catalog.missing_pieces(at))
                    before = len(store.writes)
                    worth = data.draw(st.sampled_from([0.0, 1.0, 50.0]))
                    use = visit.use(end, tree.key(at), worth) if visit else None
                    if catalog.add_resume(store, at, use):
                        wrote = [w for w in store.writes[before:] if w.kind == "window"]
                        assert [w.layout for w in wrote] == [p.layout for p, _ in missing]
                        assert [w.boundary for w in wrote] == [ends for _, ends in missing]
        if store.nodes or store.resumes:
            self.stores.append(store)
        else:
            catalog.cancel(store)

    @precondition(lambda self: self.stores)
    @rule()
    def end(self) -> None:
        self.catalog.end(self.stores.pop(0), ok=True)

    @precondition(lambda self: self.stores)
    @rule()
    def fail(self) -> None:
        """Takes all that are under way with it, unless it was given up before."""
        harmless, under_way = self.stores[0].abandoned, list(self.stores)
        self.catalog.end(self.stores.pop(0), ok=False)
        assert harmless or all(store.abandoned for store in under_way)

    @precondition(lambda self: len(self.stores) > 1)
    @rule()
    def end_out_of_order(self) -> None:
        with pytest.raises(ValueError, match="order"):
            self.catalog.end(self.stores[-1], ok=True)

    @rule(path=st.text("ab", min_size=1, max_size=9), above=st.integers(0, 9), pin=st.booleans())
    def match(self, path: str, above: int, pin: bool) -> None:
        limit = len(path) * self.size
        expected = self.expected(path, limit)
        found = self.catalog.match(keys(path, self.size), limit, above)
        if expected > above:
            assert found.boundary == expected
            assert self.catalog.tree.key(found.node) == key(path[: expected // self.size])
        else:
            assert (found.boundary, found.node) == (0, ROOT)
        assert found.branch % self.size == 0
        if pin and found.node != ROOT:
            self.catalog.pin(found.node)
            self.pins.append(Pin(found.node, list(self.catalog.reads(found.node, 0))))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """What is being read stays, byte for byte where it was, whatever has happened since."""
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        assert list(self.catalog.reads(pin.node, 0)) == pin.reads
        self.catalog.unpin(pin.node)

    @rule()
    def reset(self) -> None:
        self.catalog.reset()
        assert all(store.abandoned for store in self.stores)
        assert not any(chunk.published for chunk in audit.held(self.catalog))

    # What must hold.

    def expected(self, path: str, limit: int) -> int:
        def prefix(tokens: int) -> Hashable:
            return path[: -(-tokens // self.size)], tokens

        tree = self.catalog.tree
        used = audit.nodes(self.catalog)
        named = {n: self.paths[tree.key(n)] for n in used}
        stored: set[oracle.StoredBlock] = set()
        for chunk in audit.held(self.catalog):
            if not chunk.published:
                continue
            name = self.paths[chunk.key]
            for group, count in chunk.layout.counts:
                tokens = self.plan.geometry.groups[group].tokens_per_block
                stop = chunk.boundary // tokens
                for index in range(stop - count, stop):
                    end = (index + 1) * tokens
                    stored.add((group, index, (name[: -(-end // self.size)], end)))
        return oracle.greatest_boundary(
            self.plan.geometry,
            self.size,
            limit + 1,
            prefix,
            stored,
            {prefix(len(named[n]) * self.size) for n in used if tree.state[n] == READY and
             named[n] == path[: len(named[n])]},
            {prefix(len(named[n]) * self.size) for n in used
             if self.catalog._resume[n] == WRITING and named[n] == path[: len(named[n])]},
        )  # fmt: skip

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "catalog"):
            audit.check(self.catalog)

    def teardown(self) -> None:
        if not hasattr(self, "catalog"):
            return
        for store in self.stores:
            self.catalog.end(store, ok=True)
        for pin in self.pins:
            self.catalog.unpin(pin.node)
        audit.check_idle(self.catalog)
        self.evict_everything()
        audit.check_empty(self.catalog)

    def evict_everything(self) -> None:
        """Eviction alone must be able to empty the arena, one entry after the other."""
        policy = self.catalog.policy
        while (entry := policy.victim(self.catalog._evictable, 10_000)) is not None:
            self.catalog._evict(entry)
            audit.check(self.catalog)


CatalogMachine.TestCase.settings = settings(max_examples=examples(2), stateful_step_count=40)
TestCatalog = CatalogMachine.TestCase


# --- eviction order -------------------------------------------------------------------------------


class LRUMachine(RuleBasedStateMachine):
    """Ten chunks of one size; the least recently used leaf goes, and nothing else.

    A prefix has been used whenever anything below it has.
    """

    ROOM = 10

    def __init__(self) -> None:
        super().__init__()
        plan = PLANS["full"]
        self.catalog = Catalog(plan, Arena(self.ROOM * PAGE, PAGE), LRU())
        self.used: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.clock = 0

    def use(self, path: str) -> None:
        self.clock += 1
        if path in self.used:
            self.used[path] = self.clock

    def make_room(self, keep: str) -> bool:
        """Drop the coldest leaf that may go, if there is no room; whether there is room then."""
        if len(self.used) < self.ROOM:
            return True
        leaves = [
            p for p in self.used
            if not any(o.startswith(p) and o != p for o in self.used)
            and not self.pins.get(p) and p != keep
        ]  # fmt: skip
        if not leaves:
            return False
        coldest = min(leaves, key=self.used.__getitem__)
        recency = self.used.pop(coldest)
        if coldest[:-1] in self.used:
            self.used[coldest[:-1]] = max(self.used[coldest[:-1]], recency)
        return True

    @rule(path=st.text("ab", min_size=1, max_size=9), at_once=st.integers(1, 9))
    def store(self, path: str, at_once: int) -> None:
        catalog = self.catalog
        store = catalog.begin()
        node = catalog.tree.deepest(keys(path, 4), len(path), ready=False)
        depth, fits = catalog.tree.depth[node], True
        while fits and depth < len(path):
            ends = [path[:end] for end in range(depth + 1, min(len(path), depth + at_once) + 1)]
            fitting = 0
            for end in ends:
                if not (fits := self.make_room(end[:-1])):
                    break
                fitting += 1
                if len(end) == catalog.tree.depth[node] + 1 and not store.nodes:
                    self.use(end[:-1])
                # Nothing goes while it is being written.
                self.used[end] = 0
                self.pins[end] = self.pins.get(end, 0) + 1
            added = catalog.add_chunks(store, node, [key(end) for end in ends])
            assert len(added) == fitting
            node, depth = (added or [node])[-1], depth + len(added)
        if not store.nodes:
            catalog.cancel(store)
            return
        catalog.end(store, ok=True)
        for node in store.nodes:
            name = path[: catalog.tree.depth[node]]
            self.pins[name] -= 1
            self.use(name)

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def match(self, path: str) -> None:
        found = self.catalog.match(keys(path, 4), 4 * len(path), 0)
        self.use(path[: found.boundary // 4])

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def pin(self, path: str) -> None:
        node = self.catalog.tree.find(key(path))
        assume(node != NONE)
        self.catalog.pin(node)
        self.pins[path] = self.pins.get(path, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(p for p, n in self.pins.items() if n)))
        self.catalog.unpin(self.catalog.tree.find(key(path)))
        self.pins[path] -= 1
        if not self.pins[path]:
            self.use(path)

    @invariant()
    def the_same_is_resident(self) -> None:
        tree = self.catalog.tree
        resident = {tree.key(node) for node in audit.nodes(self.catalog)}
        assert resident == {key(path) for path in self.used}
        audit.check(self.catalog)


LRUMachine.TestCase.settings = settings(max_examples=examples(2), stateful_step_count=50)
TestLRUOrder = LRUMachine.TestCase


# --- cases worth a name ---------------------------------------------------------------------------


def store_path(catalog: Catalog, path: str, *resumes: int) -> list[int]:
    """Store a path at once; returns its nodes from the top."""
    size = catalog.plan.tokens_per_chunk
    store = catalog.begin()
    node = catalog.tree.deepest(keys(path, size), len(path), ready=False)
    missing = [key(path[:end]) for end in range(catalog.tree.depth[node] + 1, len(path) + 1)]
    added = catalog.add_chunks(store, node, missing)
    assert len(added) == len(missing)
    for end in resumes:
        assert catalog.add_resume(store, catalog.tree.find(key(path[:end])))
    catalog.end(store, ok=True)
    return catalog.tree.path((added or [node])[-1])


def make(name: str, pages: int) -> Catalog:
    plan = PLANS[name]
    return Catalog(plan, Arena(pages * PAGE, max(plan.slot_sizes())), LRU())


def test_a_branch_is_reported_where_the_request_leaves_the_path() -> None:
    catalog = make("window over chunks", 100)
    store_path(catalog, "abcdef", 6)
    found = catalog.match(keys("abcx", 4), 16, 0)
    assert (found.boundary, found.branch) == (0, 12)
    store_path(catalog, "abcx", 3)
    found = catalog.match(keys("abcy", 4), 16, 0)
    assert (found.boundary, found.branch) == (12, 0)


def test_a_superseded_resume_point_goes_first() -> None:
    catalog = make("state", 60)
    nodes = store_path(catalog, "abcdef", 2, 4)
    other = store_path(catalog, "x", 1)
    assert catalog.policy.victim(catalog._evictable, 1) == 2 * nodes[1] + 1
    assert catalog.has_resume(other[0])


def test_losing_a_state_ends_the_resume_point_and_no_other() -> None:
    catalog = make("state and windows", 200)
    nodes = store_path(catalog, "abcd", 3, 4)
    catalog._evict(2 * nodes[3] + 1)
    audit.check_idle(catalog)
    assert catalog.match(keys("abcd", 4), 16, 0).boundary == 12


def test_windows_shared_by_two_resume_points_go_with_the_last() -> None:
    catalog = make("window over chunks", 100)
    nodes = store_path(catalog, "abcdef", 5, 6)
    whole = catalog.live_bytes
    alone = make("window over chunks", 100)
    store_path(alone, "abcdef", 6)
    catalog._evict(2 * nodes[4] + 1)
    assert alone.live_bytes == catalog.live_bytes < whole
    catalog._evict(2 * nodes[5] + 1)
    assert catalog.live_bytes == 6 * 8


def test_no_room_drops_the_store_and_counts_it() -> None:
    catalog = make("full", 2)
    nodes = store_path(catalog, "ab")
    catalog.pin(nodes[1])
    store = catalog.begin()
    assert catalog.add_chunks(store, ROOT, [key("x")]) == []
    catalog.cancel(store)
    assert catalog.counters.dropped_stores == 1
    catalog.unpin(nodes[1])
    audit.check_idle(catalog)


def test_a_resume_point_without_room_leaves_no_part_of_itself() -> None:
    """Window chunks first, then the state, which does not fit any more."""
    plan = PLANS["state and windows"]
    slab = max(plan.slot_sizes())
    catalog = Catalog(plan, Arena(5 * slab, slab), LRU())
    store = catalog.begin()
    (node,) = catalog.add_chunks(store, ROOT, [key("a")])
    catalog.pin(node)
    held = catalog.live_bytes
    for _ in range(2):
        assert catalog.arena.allocate(slab) is not None
    assert not catalog.add_resume(store, node)
    assert not catalog.has_resume(node)
    assert catalog.live_bytes == held
    catalog.end(store, ok=True)
    catalog.unpin(node)
    assert len(store.writes) == 1


def test_what_is_not_pinned_can_not_be_unpinned() -> None:
    catalog = make("full", 4)
    node = store_path(catalog, "a")[0]
    with pytest.raises(ValueError, match="not pinned"):
        catalog.unpin(node)


def test_windows_that_are_still_being_written_count_for_nobody() -> None:
    catalog = make("window over chunks", 100)
    store_path(catalog, "abcdef", 2)
    store = catalog.begin()
    assert catalog.add_resume(store, catalog.tree.find(key("abcde")))
    assert catalog.match(keys("abcd", 4), 16, 0).boundary == 8
    catalog.end(store, ok=True)
    assert catalog.match(keys("abcd", 4), 16, 0).boundary == 16


def test_a_failed_resume_point_gives_back_the_windows_of_one_that_is_gone() -> None:
    catalog = make("window over chunks", 100)
    nodes = store_path(catalog, "abcdef", 5)
    store = catalog.begin()
    assert catalog.add_resume(store, nodes[5])
    catalog._evict(2 * nodes[4] + 1)
    catalog.end(store, ok=False)
    audit.check_idle(catalog)
    assert catalog.live_bytes == 6 * 8


def test_a_cold_resume_point_that_gets_a_child_can_still_be_evicted() -> None:
    """Eviction meets it while it is kept for the child that room is made for."""
    catalog = make("state", 9)
    store_path(catalog, "a", 1)
    for path in "xyzwv":
        store_path(catalog, path)
    store_path(catalog, "ab")
    audit.check_idle(catalog)
    assert catalog.has_resume(catalog.tree.find(key("a")))


def test_where_a_prompt_ends_on_a_boundary_the_one_before_is_kept_as_long() -> None:
    """The same prompt again has to compute its last token, so that it resumes one chunk earlier."""
    catalog = make("state", 60)
    nodes = store_path(catalog, "abcdef", 2, 5, 6)
    entry = catalog.policy.victim(catalog._evictable, 1)
    assert entry is not None
    assert entry == 2 * nodes[1] + 1
    catalog._evict(entry)
    assert catalog.match(keys("abcdef", 4), 23, 0).boundary == 20
