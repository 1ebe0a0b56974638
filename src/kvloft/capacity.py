"""How much a budget of host memory holds, counted in the slabs and slots that it would be cut into.

Dividing the budget by the bytes per token promises more than the arena can keep: a slot is whole
pages of memory and a class of chunks holds whole slabs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvloft.arena import choose_slab_bytes
from kvloft.plan import ChunkPlan
from kvloft.units import ceil_div

Slots = Mapping[int, int]
"""Slot bytes to how many of them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an arena holds; counts are ``None`` where a model has nothing of the kind to store."""

    slab_bytes: int
    slabs: int
    tokens: int | None
    """Of prefixes, in full chunks alone."""
    resume_points: int | None
    """In window and state chunks alone, none shared between them."""
    resume_interval: int
    tokens_at_interval: int
    """Of prefixes with a resume point every ``resume_interval`` tokens."""
    resume_points_at_interval: int


def capacity(plan: ChunkPlan, arena_bytes: int, resume_interval: int) -> Capacity:
    """What ``arena_bytes`` hold; ``resume_interval`` is a multiple of the chunk's tokens.

    Raises :class:`kvloft.errors.ArenaError` where not even one chunk of each class fits.
    """
    slab = choose_slab_bytes(arena_bytes, plan.slot_sizes())
    slabs = arena_bytes // slab
    full = Counter({plan.full_layout.slot_bytes: 1}) if plan.full_layout else Counter()
    resume = _resume_slots(plan, plan.tokens_per_chunk * _FAR)

    def most(slots: Slots) -> int | None:
        return _most(slots, slab, slabs) if slots else None

    chunks = most(full)
    points = most(resume)
    both = _resume_slots(plan, resume_interval)
    for size, count in full.items():
        both[size] += count * (resume_interval // plan.tokens_per_chunk)
    # Where the prefix ends before the next resume point, full chunks fill what room is left.
    intervals = most(both) or 0
    tokens = intervals * resume_interval
    if full:
        tokens = plan.tokens_per_chunk * _largest(
            lambda n: _fits(
                _total(both, n // (resume_interval // plan.tokens_per_chunk), full,
                       n % (resume_interval // plan.tokens_per_chunk)),
                slab, slabs,
            )
        )  # fmt: skip
    return Capacity(
        slab_bytes=slab,
        slabs=slabs,
        tokens=None if chunks is None else chunks * plan.tokens_per_chunk,
        resume_points=points,
        resume_interval=resume_interval,
        tokens_at_interval=tokens,
        resume_points_at_interval=tokens // resume_interval if resume else 0,
    )


_FAR = 1 << 60
"""Chunks between resume points that share nothing."""


def _resume_slots(plan: ChunkPlan, distance: int) -> Counter[int]:
    """The slots of one more resume point, ``distance`` tokens after the one before.

    Whole window chunks are shared where the windows overlap. A local-attention chunk counts at its
    fullest, so what comes of it is what fits at least.
    """
    size = plan.tokens_per_chunk
    slots: Counter[int] = Counter()
    if (state := plan.state_layout) is not None:
        slots[state.slot_bytes] += 1
    for index, window_set in enumerate(plan.window_sets):
        group = window_set.groups[0]
        span = group.reach if group.kind == "window" else plan.greatest_span(group.attention_chunk)
        if whole := min(span // size, distance // size):
            slots[plan.whole_layout(index).slot_bytes] += whole
        if rest := span % size:
            counts = ((g.id, ceil_div(rest, g.tokens_per_block)) for g in window_set.groups)
            slots[plan.layout(tuple(counts)).slot_bytes] += 1
    return slots


def _total(a: Slots, times_a: int, b: Slots, times_b: int) -> Counter[int]:
    total: Counter[int] = Counter()
    for slots, times in ((a, times_a), (b, times_b)):
        for size, count in slots.items():
            total[size] += count * times
    return total


def _most(slots: Slots, slab: int, slabs: int) -> int:
    return _largest(lambda n: _fits(_total(slots, n, {}, 0), slab, slabs))


def _fits(slots: Slots, slab: int, slabs: int) -> bool:
    return sum(ceil_div(count, slab // size) for size, count in slots.items()) <= slabs


def _largest(fits: Callable[[int], bool]) -> int:
    """The greatest n for which ``fits`` holds; it holds for 0 and for ever fewer as n grows."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
