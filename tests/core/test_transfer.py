"""Copies between pages and slots, against loops over single bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.errors import TransferError
from kvloft.geometry import Group, Layers, make_geometry
from kvloft.jobs import Copy, Job, Part
from kvloft.plan import BlockCounts, ChunkLayout, ChunkPlan
from kvloft.testing.geometries import plans
from kvloft.testing.jobs import apart
from kvloft.testing.pages import PAGES_LAYOUTS, Pages, PagesLayout
from kvloft.transfer import CpuCopier, check_job

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
BLOCKS = 40


# --- what must happen, byte by byte ---------------------------------------------------------------


def place_of(plan: ChunkPlan, counts: BlockCounts, rank: int) -> Iterator[tuple[int, int, int]]:
    """``(group, run, offset in the slot)``: groups that ranks share lie first, then those of rank 0
    in order, then those of rank 1, …"""
    geometry = plan.geometry
    at = 0
    owners: list[int | None] = [None, *range(geometry.tensor_parallel)]
    for owner in owners:
        for group_id, blocks in counts:
            group = geometry.groups[group_id]
            if group.replicated != (owner is None):
                continue
            for run, layers in enumerate(group.layers):
                if owner in (None, rank):
                    yield group_id, run, at
                at += blocks * layers.count * layers.page_bytes


def naive(plan: ChunkPlan, pages: Pages, arena: Bytes, rank: int, job: Job, *, store: bool) -> None:
    """The job's copies as loops."""
    for copy in apart(job):
        for group_id, run, at in place_of(plan, copy.counts, rank):
            group = plan.geometry.groups[group_id]
            if store and group.replicated and rank:
                continue
            before = sum(layers.count for layers in group.layers[:run])
            layers = group.layers[run]
            for part in copy.parts:
                if part.group != group_id:
                    continue
                for place, block in enumerate(part.block_ids, part.first):
                    for layer in range(layers.count):
                        page = pages.views[group_id][before + layer][block]
                        start = (
                            copy.offsets[0]
                            + at
                            + (place * layers.count + layer) * layers.page_bytes
                        )
                        for n, index in enumerate(np.ndindex(page.shape)):
                            if store:
                                arena[start + n] = page[index]
                            else:
                                page[index] = arena[start + n]


# --- jobs -----------------------------------------------------------------------------------------


def layouts_of(plan: ChunkPlan) -> list[ChunkLayout]:
    found = [layout for layout in (plan.full_layout, plan.state_layout) if layout]
    found += [piece.layout for depth in (1, 2, 5) for piece in plan.pieces(depth)]
    return [lay for lay in dict.fromkeys(found) if max(n for _, n in lay.counts) < BLOCKS // 2]


def block_ids(rng: random.Random, count: int, free: list[int]) -> list[int]:
    """Distinct ids: neighbours up or down, or anything; taken from ``free``."""
    pattern = rng.choice(["up", "down", "random", "mixed"])
    if pattern in ("up", "down"):
        starts = [s for s in range(1, BLOCKS - count + 1) if set(range(s, s + count)) <= set(free)]
        if starts:
            start = rng.choice(starts)
            ids = list(range(start, start + count))
            return ids if pattern == "up" else ids[::-1]
    ids = rng.sample(free, count)
    return sorted(ids) if pattern == "mixed" else ids


def make_job(plan: ChunkPlan, rng: random.Random) -> tuple[Job, int]:
    """Copies between distinct blocks and slots; and the bytes of the arena."""
    offset, copies, free = PAGE, [], list(range(1, BLOCKS))
    for layout in rng.sample(layouts_of(plan), len(layouts_of(plan))):
        parts, slots = [], rng.choice([1, 1, 2, 3])
        for group, in_slot in layout.counts:
            blocks = in_slot * slots
            first = rng.randrange(blocks) if rng.random() < 0.4 else 0
            count = rng.randint(1, blocks - first) if rng.random() < 0.4 else blocks - first
            if count > len(free) or rng.random() < 0.1:
                continue
            ids = block_ids(rng, count, free)
            free = [block for block in free if block not in ids]
            parts.append(Part(group, first, ids))
        offsets = [offset + n * layout.slot_bytes for n in range(slots)]
        rng.shuffle(offsets)
        copies.append(Copy(offsets, layout.counts, parts))
        offset += slots * layout.slot_bytes
    return Job(1, copies), offset + PAGE


def through_the_wire(job: Job) -> Job:
    """As a worker sees it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)


def scramble(pages: Pages, rng: random.Random) -> None:
    for rows in pages._rows:
        rows[...] = np.frombuffer(rng.randbytes(rows.size), dtype=np.uint8).reshape(rows.shape)


@settings(max_examples=examples(2))
@given(plan=plans(), seed=st.integers(0, 2**32), layout=st.sampled_from(PAGES_LAYOUTS))
def test_copies_move_exactly_the_live_bytes(
    plan: ChunkPlan, seed: int, layout: PagesLayout
) -> None:
    """All ranks store one after the other, then load from another arena: equal to loops."""
    rng = random.Random(seed)
    if not layouts_of(plan):
        return
    job, size = make_job(plan, rng)
    job = through_the_wire(job)
    arena = np.frombuffer(bytearray(rng.randbytes(size)), dtype=np.uint8)
    expected = arena.copy()
    for rank in range(plan.geometry.tensor_parallel):
        pages = Pages(plan.geometry, BLOCKS, rank=rank, layout=layout)
        twin = Pages(plan.geometry, BLOCKS, rank=rank, layout=layout)
        scramble(pages, rng)
        for rows, other in zip(pages._rows, twin._rows, strict=True):
            other[...] = rows
        copier = CpuCopier(plan, pages.views, arena, rank=rank)
        copier.store(job)
        naive(plan, twin, expected, rank, job, store=True)
        assert np.array_equal(arena, expected)
        assert not pages.changed_blocks(twin.snapshot()), "a store has changed pages"

        source = np.frombuffer(bytearray(rng.randbytes(size)), dtype=np.uint8)
        before = source.copy()
        CpuCopier(plan, pages.views, source, rank=rank).load(job)
        naive(plan, twin, source, rank, job, store=False)
        assert not pages.changed_blocks(twin.snapshot())
        assert np.array_equal(source, before), "a load has changed the arena"


@pytest.mark.parametrize("kind", ["apart", "rows", "layers first", "backwards", "uneven", "planes"])
def test_layers_are_joined_however_they_lie(kind: str) -> None:
    """Layers at equal distances become one array; the bytes are the same as without it."""
    geometry = make_geometry([Group(0, "full", 4, (Layers(5, 12, 12),))], 4)
    plan = ChunkPlan(geometry, 12)
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, (7, BLOCKS, 7, 16), dtype=np.uint8)
    views: list[Bytes] = {
        "apart": lambda: [memory[0, :, n, :12].copy() for n in range(5)],
        "rows": lambda: [memory[0, :, n, :12] for n in range(5)],
        "layers first": lambda: [memory[n, :, 0, 2:14] for n in range(5)],
        "backwards": lambda: [memory[0, :, 5 - n, :12] for n in range(5)],
        "uneven": lambda: [memory[0, :, n, :12] for n in (0, 1, 3, 4, 6)],
        "planes": lambda: [memory[n, :, :3, :4] for n in range(5)],
    }[kind]()
    arena = np.zeros(2 * PAGE, dtype=np.uint8)
    ids = [9, 8, 30]
    layout = plan.full_layout
    assert layout is not None
    job = Job(1, [Copy([PAGE], layout.counts, [Part(0, 0, ids)])])
    copier = CpuCopier(plan, {0: views}, arena, rank=0)
    copier.store(job)
    right = np.concatenate([views[layer][block].ravel() for block in ids for layer in range(5)])
    assert np.array_equal(arena[PAGE : PAGE + right.size], right)
    assert not arena[:PAGE].any()
    assert not arena[PAGE + right.size :].any()
    saved = [view.copy() for view in views]
    for view in views:
        view[ids] = 0
    copier.load(job)
    assert all(np.array_equal(view, old) for view, old in zip(views, saved, strict=True))


# --- refusals -------------------------------------------------------------------------------------

PLAN = ChunkPlan(
    make_geometry(
        [
            Group(0, "full", 4, (Layers(2, 100, 128),)),
            Group(1, "ring", 4, (Layers(1, 8, 8),), cacheable=False),
            Group(2, "window", 2, (Layers(1, 64, 64),), window=5),
        ],
        4,
    ),
    8,
)
COUNTS = ((0, 2), (2, 4))
GOOD = Copy([PAGE], COUNTS, [Part(0, 0, [1, 2]), Part(2, 1, [5, 4, 3])])

BAD: dict[str, Copy] = {
    "slot before the arena": Copy([-PAGE], COUNTS, GOOD.parts),
    "slot behind the arena": Copy([4 * PAGE - 8], COUNTS, GOOD.parts),
    "second slot behind the arena": Copy([PAGE, 4 * PAGE - 8], COUNTS, GOOD.parts),
    "second slot before the arena": Copy([PAGE, -8], COUNTS, GOOD.parts),
    "blocks without a slot": Copy([], COUNTS, GOOD.parts),
    "part behind the second slot": Copy([0, PAGE], COUNTS, [Part(0, 2, [1, 2, 3])]),
    "more blocks than a chunk": Copy([0], ((0, 3),), []),
    "no blocks": Copy([0], ((0, 0),), []),
    "negative blocks": Copy([0], ((0, -1),), []),
    "unknown group": Copy([0], ((7, 1),), []),
    "ring group": Copy([0], ((1, 1),), []),
    "group named twice": Copy([0], ((0, 1), (0, 1)), []),
    "part of another group": Copy([0], ((0, 2),), [Part(2, 0, [1])]),
    "empty part of another group": Copy([0], ((0, 2),), [Part(2, 0, [])]),
    "part before the slot": Copy([0], COUNTS, [Part(0, -1, [1])]),
    "part behind the slot": Copy([0], COUNTS, [Part(0, 1, [1, 2])]),
    "null block": Copy([0], COUNTS, [Part(0, 0, [1, 0])]),
    "negative block": Copy([0], COUNTS, [Part(0, 0, [-1])]),
    "block behind the pool": Copy([0], COUNTS, [Part(0, 0, [BLOCKS])]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_descriptor_out_of_bounds_moves_nothing(name: str) -> None:
    """Not even the copies of the same job that come before it."""
    pages = Pages(PLAN.geometry, BLOCKS, rank=0, layout="own")
    scramble(pages, random.Random(1))
    arena = np.frombuffer(bytearray(random.Random(2).randbytes(4 * PAGE)), dtype=np.uint8)
    before_pages, before_arena = pages.snapshot(), arena.copy()
    copier = CpuCopier(PLAN, pages.views, arena, rank=0)
    job = Job(3, [GOOD, BAD[name]])
    for action in (copier.store, copier.load):
        with pytest.raises(TransferError, match="job 3"):
            action(job)
    assert np.array_equal(arena, before_arena)
    assert not pages.changed_blocks(before_pages)
    check_job(Job(4, [GOOD]), PLAN, len(arena), BLOCKS)


def views_without(change: Callable[[dict[int, list[Bytes]]], object]) -> dict[int, list[Bytes]]:
    views = Pages(PLAN.geometry, BLOCKS, rank=0, layout="own").views
    change(views)
    return views


@pytest.mark.parametrize(
    "views",
    [
        views_without(lambda v: v.pop(2)),
        views_without(lambda v: v[0].pop()),
        views_without(lambda v: v[0].append(v[0][0])),
        views_without(lambda v: v[0].__setitem__(1, v[0][1][:, :99])),
        views_without(lambda v: v[2].__setitem__(0, v[2][0][:-1])),
        views_without(lambda v: v[2].__setitem__(0, v[2][0].view(np.int8))),
        views_without(lambda v: v[0].__setitem__(0, v[0][0][:0])),
    ],
    ids=["group", "layer", "extra layer", "page bytes", "pool length", "dtype", "no blocks"],
)
def test_pages_that_are_not_the_geometry_s_are_refused(views: dict[int, list[Bytes]]) -> None:
    with pytest.raises(TransferError):
        CpuCopier(PLAN, views, np.zeros(PAGE, dtype=np.uint8), rank=0)
