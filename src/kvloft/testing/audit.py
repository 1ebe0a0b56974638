"""A look inside a catalog: what it holds, and whether its books agree with each other.

Reads private fields on purpose: the catalog keeps no second account that a test could ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvloft.catalog.catalog import Catalog
from kvloft.catalog.tree import DOOMED, FREE, READY, ROOT
from kvloft.plan import ChunkLayout
from kvloft.testing import oracle


class AuditError(AssertionError):
    """Two accounts of the same thing differ."""


def expect(condition: object, message: str) -> None:
    """Raise :class:`AuditError` unless ``condition`` holds."""
    if not condition:
        raise AuditError(message)


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk that holds a slot."""

    node: int
    key: bytes
    """Hash of the prefix that ends with the chunk."""
    boundary: int
    """Tokens."""
    kind: str
    slot: int
    layout: ChunkLayout
    published: bool
    """Whether every rank has written it, and a look-up may find it."""


def nodes(catalog: Catalog) -> list[int]:
    """The ids of all nodes in use, without the root."""
    tree = catalog.tree
    return [node for node in range(1, tree.capacity) if tree.state[node] != FREE]


def held(catalog: Catalog) -> Iterator[Held]:
    """Every chunk that a node owns, forgotten ones that are still being read included."""
    tree, plan = catalog.tree, catalog.plan
    unpublished = {
        piece for store in catalog._stores if not store.abandoned for piece in store.pieces
    }
    for node in nodes(catalog):
        key, depth, state = tree.key(node), tree.depth[node], tree.state[node]
        boundary = depth * plan.tokens_per_chunk
        if plan.full_layout is not None:
            yield Held(
                node, key, boundary, "full", catalog._slot[node], plan.full_layout, state == READY
            )
        for column, slots in enumerate(catalog._piece):
            if slots[node] < 0:
                continue
            layout = (
                plan.whole_layout(column // 2)
                if column % 2
                else plan.short_layout(column // 2, depth)
            )
            ready = state == READY and (node, column) not in unpublished
            yield Held(node, key, boundary, "window", slots[node], layout, ready)
        if plan.state_layout is not None and catalog._state_slot[node] >= 0:
            ready = state == READY and catalog._resume[node] == READY
            yield Held(
                node, key, boundary, "state", catalog._state_slot[node], plan.state_layout, ready
            )


def check(catalog: Catalog, reserved: Sequence[tuple[int, ChunkLayout]] = ()) -> None:
    """Raise :class:`AuditError` where the catalog's books disagree.

    ``reserved``: the slots that promotions under way are filling.
    """
    tree, plan, arena = catalog.tree, catalog.plan, catalog.arena
    used = nodes(catalog)
    expect(len(tree) == len(used), f"{len(tree)} nodes counted, {len(used)} found")

    # Prefix-closed; links in both directions; found by key exactly if not forgotten.
    children: Counter[int] = Counter()
    for node in used:
        parent, state = tree.parent[node], tree.state[node]
        expect(parent == ROOT or tree.state[parent] != FREE, f"node {node} has lost its parent")
        expect(tree.depth[node] == tree.depth[parent] + 1, f"node {node}: wrong depth")
        children[parent] += 1
        if state == READY:
            expect(tree.state[parent] == READY, f"node {node} is resident, its parent is not")
        found = tree.find(tree.key(node))
        expect((found == node) == (state != DOOMED), f"node {node}: index says {found}")
    for node in [ROOT, *used]:
        listed, child = 0, tree.first_child[node]
        while child >= 0:
            expect(tree.parent[child] == node, f"node {child} hangs below two nodes")
            listed, child = listed + 1, tree._next[child]
        expect(listed == children[node], f"node {node}: {listed} of {children[node]} children")
    expect(sum(map(len, tree._index)) == sum(tree.state[n] != DOOMED for n in used), "stale keys")

    # Every slot has one owner, and the sums are exact.
    owned = [(h.slot, h.layout) for h in held(catalog)] + list(reserved)
    for store in catalog._stores:
        if store.abandoned:
            owned.extend((slot, write.layout) for write in store.writes for slot in write.slots)
    end = 0
    for slot, layout in sorted(owned, key=lambda item: item[0]):
        expect(slot >= end, f"slots overlap at {slot}")
        end = slot + layout.slot_bytes
    expect(end <= arena.budget, "a slot beyond the budget")
    exact = sum(oracle.chunk_bytes(plan.geometry, layout.counts) for _, layout in owned)
    expect(exact == catalog.live_bytes, f"{catalog.live_bytes} bytes counted, {exact} held")
    by_class = [sum(column) for column in zip(*catalog.held().values(), strict=True)]
    expect(by_class == [len(owned), exact], f"{by_class} counted by class, {len(owned)} held")
    paged = sum(
        oracle.slot_bytes(oracle.chunk_bytes(plan.geometry, layout.counts)) for _, layout in owned
    )
    expect(paged == arena.used_bytes, f"{arena.used_bytes} bytes of slots counted, {paged} held")
    expect(paged <= arena.budget, "more memory in use than the budget")

    # A resume point is backed by every chunk it needs, and what nobody needs is gone.
    references: Counter[tuple[int, int]] = Counter()
    for node in used:
        if catalog._resume[node] == FREE:
            expect(catalog._state_slot[node] < 0, f"node {node}: a state without a resume point")
            continue
        for _, holder, column in catalog._held_pieces(node):
            references[holder, column] += 1
            expect(catalog._piece[column][holder] >= 0, f"resume point {node} lacks a window")
        if plan.state_layout is not None:
            expect(catalog._state_slot[node] >= 0, f"resume point {node} lacks its state")
    for column, slots in enumerate(catalog._piece):
        for node in used:
            count = references[node, column]
            expect(catalog._refs[column][node] == count, f"node {node}: references miscounted")
            expect((slots[node] >= 0) == (count > 0), f"node {node}: a window nobody needs")
    points = sum(catalog._resume[n] == READY for n in used)
    expect(points == catalog.resume_points, f"{catalog.resume_points} counted, {points} found")

    # Whatever may go is in the eviction order, or will be once its writer or reader ends.
    for node in used:
        if tree.pins[node] or tree.state[node] != READY:
            continue
        if catalog._resume[node] == READY:
            expect(2 * node + 1 in catalog.policy, f"resume point {node} can never be evicted")
            expect(2 * node not in catalog.policy, f"node {node} goes before its resume point")
        elif not tree.has_children(node) and catalog._resume[node] == FREE:
            expect(2 * node in catalog.policy, f"node {node} can never be evicted")


def check_idle(catalog: Catalog) -> None:
    """Raise :class:`AuditError` if anything is pinned or under way."""
    check(catalog)
    expect(not catalog._stores, "stores under way")
    for node in nodes(catalog):
        expect(catalog.tree.state[node] == READY, f"node {node} is not resident")
        expect(not catalog.tree.pins[node], f"node {node} is pinned")
        expect(catalog._resume[node] in (FREE, READY), f"node {node}: half a resume point")


def check_empty(catalog: Catalog) -> None:
    """Raise :class:`AuditError` if anything is left."""
    check_idle(catalog)
    expect(not nodes(catalog), "nodes are left")
    expect(not len(catalog.policy), "entries are left in the eviction order")
    expect(not catalog.arena.used_bytes and not catalog.live_bytes, "memory is left in use")
    expect(not catalog.arena.use(), "slabs still serve a class")
