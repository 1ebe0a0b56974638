"""From a geometry and a chunk length: what is stored at a boundary, and how it lies in a slot.

The scheduler's side and every rank's worker derive the same layout from the same two inputs, so a
chunk is described between them by its slot and its block ids alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvloft.errors import GeometryError
from kvloft.geometry import Geometry, Group
from kvloft.units import ceil_div, page_aligned

AUTO_CHUNK_BYTES = 1 << 20
"""``auto`` takes the smallest chunk whose full blocks, over all ranks, have this many bytes."""

BlockCounts = tuple[tuple[int, int], ...]
"""``(group id, blocks)`` of every group in a chunk, in group order."""

_MAX_CLASSES = 4096


@dataclass(frozen=True, slots=True)
class Section:
    """The pages of one run of equal layers, ``(blocks, count, page_bytes)`` bytes in C order."""

    group: int
    blocks: int
    run: int
    """Index into the group's ``layers``."""
    count: int
    page_bytes: int
    offset: int
    """Bytes from the slot's start, for rank 0."""
    rank_stride: int
    """Bytes from one rank's section to the next one's; 0 where the ranks share one copy."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How the live bytes of some blocks lie in a slot: shared sections first, then each rank's."""

    counts: BlockCounts
    sections: tuple[Section, ...]
    nbytes: int
    """Exact live bytes over all ranks."""
    slot_bytes: int
    """``nbytes`` in whole pages of memory."""
    shared_bytes: int
    """What the ranks hold alike; it comes first."""
    rank_bytes: int
    """One rank's share of the rest."""

    def rank_offset(self, rank: int) -> int:
        """Where the share of ``rank`` begins: bytes from the slot's start."""
        return self.shared_bytes + rank * self.rank_bytes


def make_layout(geometry: Geometry, counts: BlockCounts) -> ChunkLayout:
    """Lay out ``counts`` blocks of the groups named in it."""
    sections: list[Section] = []
    shared = sum(
        geometry.groups[g].block_bytes * n for g, n in counts if geometry.groups[g].replicated
    )
    per_rank = sum(
        geometry.groups[g].block_bytes * n for g, n in counts if not geometry.groups[g].replicated
    )
    at_shared, at_rank = 0, shared
    for group_id, blocks in counts:
        group = geometry.groups[group_id]
        for run, layers in enumerate(group.layers):
            size = blocks * layers.count * layers.page_bytes
            offset = at_shared if group.replicated else at_rank
            stride = 0 if group.replicated else per_rank
            sections.append(
                Section(group_id, blocks, run, layers.count, layers.page_bytes, offset, stride)
            )
            if group.replicated:
                at_shared += size
            else:
                at_rank += size
    nbytes = shared + per_rank * geometry.tensor_parallel
    return ChunkLayout(counts, tuple(sections), nbytes, page_aligned(nbytes), shared, per_rank)


@dataclass(frozen=True, slots=True)
class WindowSet:
    """Groups that forget alike, so that one piece holds what a resume needs of all of them."""

    groups: tuple[Group, ...]

    def start(self, boundary: int) -> int:
        """First token that a resume at ``boundary`` needs; ``boundary`` where it needs none."""
        return self.groups[0].resume_start(boundary)


@dataclass(frozen=True, slots=True)
class Piece:
    """A window chunk that a resume needs: some blocks of one window set that end together.

    ``whole`` pieces hold an entire chunk; the others hold its end. At one boundary a set has at
    most these two, whatever resumes need it (see :meth:`ChunkPlan.pieces`).
    """

    window_set: int
    chunks_back: int
    """How many chunks before the resume's boundary the piece ends."""
    whole: bool
    layout: ChunkLayout


class ChunkPlan:
    """A geometry cut into chunks of G tokens: the classes of chunk, and what a resume needs."""

    def __init__(self, geometry: Geometry, tokens_per_chunk: int) -> None:
        if tokens_per_chunk < 1 or tokens_per_chunk % geometry.unit_tokens:
            raise ValueError(
                f"{tokens_per_chunk} tokens are no multiple of the unit, {geometry.unit_tokens}"
            )
        self.geometry = geometry
        self.tokens_per_chunk = tokens_per_chunk
        groups = geometry.cacheable
        self.full_groups = tuple(g for g in groups if g.kind == "full")
        self.state_groups = tuple(g for g in groups if g.kind == "state")
        sets: dict[tuple[str, int, int], list[Group]] = {}
        for group in groups:
            if group.kind in ("window", "chunked_local"):
                key = (group.kind, group.reach, group.attention_chunk)
                sets.setdefault(key, []).append(group)
        self.window_sets = tuple(WindowSet(tuple(members)) for members in sets.values())
        self._layouts: dict[BlockCounts, ChunkLayout] = {}
        self._whole_layouts: dict[int, ChunkLayout] = {}
        self._pieces: dict[tuple[int, ...], tuple[Piece, ...]] = {}
        self._settled = 1 + max(
            (ceil_div(s.groups[0].reach, tokens_per_chunk) for s in self.window_sets), default=0
        )
        self._local_chunks = tuple(
            s.groups[0].attention_chunk for s in self.window_sets if s.groups[0].attention_chunk
        )

    def layout(self, counts: BlockCounts) -> ChunkLayout:
        """The layout of a chunk with these blocks; the same object each time."""
        found = self._layouts.get(counts)
        if found is None:
            found = self._layouts[counts] = make_layout(self.geometry, counts)
        return found

    def blocks_per_chunk(self, group: Group) -> int:
        """Blocks of ``group`` in a chunk."""
        return self.tokens_per_chunk // group.tokens_per_block

    @cached_property
    def full_layout(self) -> ChunkLayout | None:
        """The full chunk; ``None`` for a model without a ``full`` group."""
        return self._layout_of(self.full_groups, whole=True)

    @cached_property
    def state_layout(self) -> ChunkLayout | None:
        """The state chunk; ``None`` for a model without a ``state`` group."""
        return self._layout_of(self.state_groups, whole=False)

    def _layout_of(self, groups: tuple[Group, ...], *, whole: bool) -> ChunkLayout | None:
        if not groups:
            return None
        return self.layout(tuple((g.id, self.blocks_per_chunk(g) if whole else 1) for g in groups))

    @property
    def has_resume_points(self) -> bool:
        """Whether a resume needs more than full chunks."""
        return bool(self.window_sets or self.state_groups)

    @property
    def full_chunk_bytes(self) -> int:
        """Exact live bytes of one full chunk, all ranks."""
        return self.full_layout.nbytes if self.full_layout else 0

    def pieces(self, depth: int) -> tuple[Piece, ...]:
        """The window chunks that a resume at ``depth`` chunks needs, newest first in every set.

        A window reaches a fixed number of tokens back, so only the oldest piece is cut short, and
        always equally; a local-attention chunk starts at one position for all boundaries in it.
        Hence one short form at each boundary, and few distinct answers, which are kept.
        """
        boundary = depth * self.tokens_per_chunk
        key = (min(depth, self._settled), *(boundary % c for c in self._local_chunks))
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = tuple(self._make_pieces(boundary))
        return found

    def _make_pieces(self, boundary: int) -> Iterator[Piece]:
        size = self.tokens_per_chunk
        for index, window_set in enumerate(self.window_sets):
            start = window_set.start(boundary)
            for back, end in enumerate(range(boundary, start, -size)):
                counts = tuple(
                    (g.id, end // g.tokens_per_block - max(start, end - size) // g.tokens_per_block)
                    for g in window_set.groups
                )
                whole = all(
                    n == size // self.geometry.groups[g].tokens_per_block for g, n in counts
                )
                yield Piece(index, back, whole, self.layout(counts))

    def short_layout(self, window_set: int, depth: int) -> ChunkLayout:
        """The layout of the short window chunk of a set that ends at ``depth`` chunks."""
        groups = self.window_sets[window_set].groups
        if chunk := groups[0].attention_chunk:
            span = depth * self.tokens_per_chunk % chunk
        else:
            span = groups[0].reach % self.tokens_per_chunk
        return self.layout(tuple((g.id, ceil_div(span, g.tokens_per_block)) for g in groups))

    def whole_layout(self, window_set: int) -> ChunkLayout:
        """The layout of the whole window chunk of a set."""
        found = self._whole_layouts.get(window_set)
        if found is None:
            groups = self.window_sets[window_set].groups
            found = self.layout(tuple((g.id, self.blocks_per_chunk(g)) for g in groups))
            self._whole_layouts[window_set] = found
        return found

    def greatest_resume_blocks(self, group: Group) -> int:
        """The most blocks that a resume at any boundary needs of ``group``; 0 for ``full``."""
        match group.kind:
            case "window":
                return ceil_div(group.reach, group.tokens_per_block)
            case "chunked_local":
                return ceil_div(self.greatest_span(group.attention_chunk), group.tokens_per_block)
            case "state":
                return 1
            case _:
                return 0

    def greatest_span(self, chunk: int) -> int:
        """The most tokens of a local-attention chunk that a boundary leaves before it."""
        return self._residues(chunk)[-1]

    def _residues(self, chunk: int) -> range:
        # Boundaries are multiples of G; modulo the chunk they are those of gcd(G, chunk).
        return range(0, chunk, math.gcd(self.tokens_per_chunk, chunk))

    @cached_property
    def resume_bytes(self) -> int:
        """Exact live bytes of all that one resume point needs besides full chunks, all ranks."""
        return sum(
            self.greatest_resume_blocks(g) * g.block_bytes * self.geometry.copies(g)
            for g in self.geometry.cacheable
        )

    def slot_sizes(self) -> tuple[int, ...]:
        """Slot bytes of every class of chunk that this plan can make, greatest first."""
        layouts = {lay for lay in (self.full_layout, self.state_layout) if lay}
        size = self.tokens_per_chunk
        for window_set in self.window_sets:
            group = window_set.groups[0]
            if group.kind == "window":
                spans = {min(group.reach, size), group.reach % size}
            else:
                spans = set(self._residues(group.attention_chunk)[: _MAX_CLASSES + 1])
                if len(spans) > _MAX_CLASSES and max(spans) < size:
                    raise GeometryError(
                        f"group {group.id}: local-attention chunks of {group.attention_chunk} "
                        f"tokens in chunks of {size} tokens make too many sizes of window chunk; "
                        f"write chunks of a multiple or a divisor of {group.attention_chunk} tokens"
                    )
                spans = {min(span, size) for span in spans}
            for span in spans - {0}:
                counts = ((g.id, ceil_div(span, g.tokens_per_block)) for g in window_set.groups)
                layouts.add(self.layout(tuple(counts)))
        return tuple(sorted({lay.slot_bytes for lay in layouts}, reverse=True))


def auto_tokens_per_chunk(geometry: Geometry) -> int:
    """The least multiple of the unit whose full chunk has at least 1 MiB over all ranks."""
    unit = ChunkPlan(geometry, geometry.unit_tokens)
    if not unit.full_chunk_bytes:
        return geometry.unit_tokens
    return geometry.unit_tokens * ceil_div(AUTO_CHUNK_BYTES, unit.full_chunk_bytes)


def auto_resume_interval(plan: ChunkPlan) -> int:
    """Tokens between resume points at which they cost no more than the full chunks between them.

    A multiple of G. Without ``full`` groups: the farthest reach of a window, so that neighbouring
    resume points do not overlap by more than they hold.
    """
    if plan.full_chunk_bytes:
        chunks = ceil_div(plan.resume_bytes, plan.full_chunk_bytes)
    else:
        farthest = max(
            (max(s.groups[0].reach, s.groups[0].attention_chunk) for s in plan.window_sets),
            default=0,
        )
        chunks = ceil_div(farthest, plan.tokens_per_chunk)
    return max(1, chunks) * plan.tokens_per_chunk
