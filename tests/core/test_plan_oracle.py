"""What a resume needs, in blocks and bytes: the planner against one look at every token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.geometry import Geometry, Group, Layers, from_dict, known_names, load, make_geometry
from kvloft.plan import ChunkPlan, auto_resume_interval, auto_tokens_per_chunk
from kvloft.testing import oracle
from kvloft.testing.geometries import geometries, plans, shipped

SHIPPED = shipped()


def boundaries(plan: ChunkPlan, most: int = 1200) -> range:
    """Boundaries until every window is full and every local chunk has gone round, and some more."""
    size = plan.tokens_per_chunk
    spans = [size]
    for group in plan.geometry.cacheable:
        spans.append(group.window + group.extra_retained_tokens)
        if group.attention_chunk:
            spans.append(math.lcm(group.attention_chunk, size))
    end = min(most, max(spans) + 2 * size)
    return range(size, max(end, 3 * size) + 1, size)


def check_plan(plan: ChunkPlan) -> None:
    geometry, size = plan.geometry, plan.tokens_per_chunk
    for boundary in boundaries(plan):
        for group in geometry.groups:
            needed = oracle.resume_blocks(group, boundary)
            if group.cacheable:
                assert set(group.resume_blocks(boundary)) == needed, (group, boundary)
            assert all(index < boundary // group.tokens_per_block for index in needed)
        check_pieces(plan, boundary)
    for group in geometry.groups:
        greatest = oracle.greatest_resume_blocks(group, size)
        assert (plan.greatest_resume_blocks(group) if group.cacheable else 0) == greatest, group
    assert plan.full_chunk_bytes == oracle.full_chunk_bytes(geometry, size)
    assert plan.resume_bytes == oracle.resume_bytes(geometry, size)


def check_pieces(plan: ChunkPlan, boundary: int) -> None:
    """Pieces cover each needed block exactly once and nothing else; a set has two forms at most."""
    geometry, size = plan.geometry, plan.tokens_per_chunk
    depth = boundary // size
    found: dict[int, list[int]] = {g.id: [] for g in geometry.groups}
    last: dict[int, int] = {}
    for piece in plan.pieces(depth):
        assert piece.chunks_back == last.get(piece.window_set, -1) + 1, "newest first, no gap"
        last[piece.window_set] = piece.chunks_back
        assert piece.chunks_back < depth
        end = boundary - piece.chunks_back * size
        for group_id, count in piece.layout.counts:
            stop = end // geometry.groups[group_id].tokens_per_block
            found[group_id].extend(range(stop - count, stop))
        if piece.whole:
            assert piece.layout is plan.whole_layout(piece.window_set)
        else:
            assert piece.layout is plan.short_layout(piece.window_set, depth - piece.chunks_back)
        assert piece.layout.slot_bytes in plan.slot_sizes()
    for window_set in plan.window_sets:
        for group in window_set.groups:
            needed = sorted(oracle.resume_blocks(group, boundary))
            assert sorted(found[group.id]) == needed, (group, boundary)


@pytest.mark.parametrize("units", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SHIPPED)
def test_known_models_need_what_the_oracle_says(name: str, units: int) -> None:
    geometry = SHIPPED[name]
    check_plan(ChunkPlan(geometry, units * geometry.unit_tokens))


@settings(max_examples=examples(4))
@given(plan=plans())
def test_any_geometry_needs_what_the_oracle_says(plan: ChunkPlan) -> None:
    check_plan(plan)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=False)
@given(plan=plans())
def test_many_geometries_need_what_the_oracle_says(plan: ChunkPlan) -> None:
    check_plan(plan)


@pytest.mark.parametrize("name", known_names())
def test_real_sizes_agree_with_the_oracle(name: str) -> None:
    """The shipped files as they are, at the chunk that ``auto`` gives."""
    geometry = load(name)
    assert geometry.unit_tokens == oracle.unit_tokens(geometry)
    size = auto_tokens_per_chunk(geometry)
    plan = ChunkPlan(geometry, size)
    assert plan.full_chunk_bytes == oracle.full_chunk_bytes(geometry, size)
    assert plan.resume_bytes == oracle.resume_bytes(geometry, size)
    for group in geometry.groups:
        greatest = oracle.greatest_resume_blocks(group, size)
        assert plan.greatest_resume_blocks(group) == greatest
    for boundary in (size, 2 * size, 9 * size):
        check_pieces(plan, boundary)


def test_deepseek_costs_what_the_design_says() -> None:
    """3,850 bytes a token in full chunks, 15.4 MB for one boundary's windows."""
    plan = ChunkPlan(load("deepseek-v4-flash"), 256)
    assert plan.full_chunk_bytes == 21 * 37376 + 21 * 8448 + 20 * 1168 == 985_664
    assert round(plan.full_chunk_bytes / 256) == 3850
    windows = 2 * 43 * 37376 + 2 * 21 * (32768 + 8192) + 16 * 20 * 32768
    assert plan.resume_bytes == windows
    assert 15.3e6 < windows < 15.5e6


@settings(max_examples=examples(2))
@given(geometry=geometries())
def test_the_unit_is_the_least_common_one(geometry: Geometry) -> None:
    assert geometry.unit_tokens == oracle.unit_tokens(geometry)
    assert from_dict(geometry.to_dict()) == geometry


@settings(max_examples=examples(2))
@given(plan=plans(), multiplier=st.integers(1, 4096))
def test_auto_is_the_smallest_chunk_of_a_mebibyte(plan: ChunkPlan, multiplier: int) -> None:
    geometry = plan.geometry
    wider = make_geometry(
        [
            Group(
                g.id, g.kind, g.tokens_per_block,
                tuple(Layers(r.count, r.page_bytes * multiplier, r.stride_bytes * multiplier)
                      for r in g.layers),
                g.window, g.attention_chunk, g.extra_retained_tokens, g.cacheable, g.draft,
                g.replicated,
            )
            for g in geometry.groups
        ],
        geometry.tokens_per_hash,
        tensor_parallel=geometry.tensor_parallel,
    )  # fmt: skip
    size, unit = auto_tokens_per_chunk(wider), wider.unit_tokens
    assert size % unit == 0
    if oracle.full_chunk_bytes(wider, unit) == 0:
        assert size == unit
        return
    assert oracle.full_chunk_bytes(wider, unit) * (size // unit) >= 1 << 20
    assert size == unit or oracle.full_chunk_bytes(wider, unit) * (size // unit - 1) < 1 << 20


@settings(max_examples=examples(2))
@given(plan=plans())
def test_layouts_hold_each_live_byte_once(plan: ChunkPlan) -> None:
    """Sections of all ranks tile the slot: no gap, no overlap; the ranks share replicated ones."""
    ranks = plan.geometry.tensor_parallel
    layouts = {piece.layout for depth in range(1, 6) for piece in plan.pieces(depth)}
    layouts |= {layout for layout in (plan.full_layout, plan.state_layout) if layout}
    for layout in layouts:
        spans = []
        for section in layout.sections:
            size = section.blocks * section.count * section.page_bytes
            owners = 1 if plan.geometry.groups[section.group].replicated else ranks
            if owners == 1:
                assert section.rank_stride == 0 or ranks == 1
            spans += [(section.offset + rank * section.rank_stride, size) for rank in range(owners)]
        end = 0
        for offset, size in sorted(spans):
            assert offset == end
            end += size
        assert end == layout.nbytes == oracle.chunk_bytes(plan.geometry, layout.counts)
        assert layout.slot_bytes == oracle.slot_bytes(end)


@settings(max_examples=examples())
@given(plan=plans())
def test_the_auto_interval_is_a_multiple_of_the_chunk(plan: ChunkPlan) -> None:
    interval = auto_resume_interval(plan)
    assert interval >= plan.tokens_per_chunk
    assert interval % plan.tokens_per_chunk == 0


@pytest.mark.parametrize("tokens", [0, -4, 6, 13])
def test_a_chunk_that_is_no_multiple_of_the_unit_is_refused(tokens: int) -> None:
    geometry = make_geometry([Group(0, "full", 4, (Layers(1, 8, 8),))], 4)
    with pytest.raises(ValueError, match=r"no multiple of the unit, 4|0 tokens"):
        ChunkPlan(geometry, tokens)


def test_ring_groups_keep_their_index_and_nothing_else() -> None:
    geometry = load("glm-5.3-flash-tp2")
    plan = ChunkPlan(geometry, geometry.unit_tokens)
    assert geometry.groups[1].kind == "ring"
    assert geometry.groups[1] not in geometry.cacheable
    for piece in plan.pieces(1):
        assert all(group_id != 1 for group_id, _ in piece.layout.counts)
    assert plan.greatest_resume_blocks(geometry.groups[1]) == 0
