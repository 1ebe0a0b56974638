"""The arena against a model that knows only which bytes are taken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.effort import examples

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.errors import ArenaError
from kvloft.testing import oracle

PAGE = 4096
SIZES = [1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE - 7, 8 * PAGE]


class ArenaMachine(RuleBasedStateMachine):
    """Slots of several classes come and go in an arena of 12 slabs and a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12 * 8 * PAGE + 1000, 8 * PAGE)
        self.taken: dict[int, int] = {}

    slots = Bundle("slots")

    @rule(target=slots, nbytes=st.sampled_from(SIZES))
    def allocate(self, nbytes: int) -> int:
        offset = self.arena.allocate(nbytes)
        if offset is None:
            # True only if neither a slab of the class has room nor is there a free slab.
            free = self.arena.slabs - sum(use.slabs for use in self.arena.use())
            assert free == 0
            size = oracle.slot_bytes(nbytes)
            per_slab = self.arena.slab_bytes // size
            for use in self.arena.use():
                assert use.slot_bytes != size or use.slots == use.slabs * per_slab
            return -1
        assert offset not in self.taken
        self.taken[offset] = oracle.slot_bytes(nbytes)
        return offset

    @rule(offset=consumes(slots))
    def free(self, offset: int) -> None:
        if offset in self.taken:
            del self.taken[offset]
            self.arena.free(offset)

    @rule(offset=st.integers(-1, 13 * 8).map(lambda page: page * PAGE) | st.integers(0, 2 * PAGE))
    def free_what_is_not_taken(self, offset: int) -> None:
        if offset in self.taken:
            return
        with pytest.raises(ArenaError):
            self.arena.free(offset)

    @rule()
    def clear(self) -> None:
        self.arena.clear()
        self.taken.clear()

    @invariant()
    def no_slot_overlaps_another_or_leaves_the_budget(self) -> None:
        end = 0
        for offset, size in sorted(self.taken.items()):
            assert offset % PAGE == 0
            assert offset >= end
            end = offset + size
        assert end <= self.arena.budget

    @invariant()
    def sums_are_exact(self) -> None:
        assert self.arena.used_bytes == sum(self.taken.values())
        uses = self.arena.use()
        assert {u.slot_bytes: u.slots for u in uses} == {
            size: list(self.taken.values()).count(size) for size in set(self.taken.values())
        }
        assert sum(u.slabs for u in uses) * self.arena.slab_bytes <= self.arena.budget
        assert [u.slot_bytes for u in uses] == sorted((u.slot_bytes for u in uses), reverse=True)
        slabs = {offset // self.arena.slab_bytes for offset in self.taken}
        assert sum(u.slabs for u in uses) == len(slabs), "a slab serves a class that has no slot"


ArenaMachine.TestCase.settings = settings(max_examples=examples(), stateful_step_count=60)
TestArena = ArenaMachine.TestCase


def fill(arena: Arena, nbytes: int) -> list[int]:
    out = []
    while (offset := arena.allocate(nbytes)) is not None:
        out.append(offset)
    return out


@settings(max_examples=examples())
@given(
    slab_pages=st.integers(1, 9),
    slabs=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_memory_never_stays_with_a_class(
    slab_pages: int, slabs: int, sizes: list[int], seed: int
) -> None:
    """What one class has given back is there for the next one, down to the last slot."""
    slab = slab_pages * PAGE
    arena = Arena(slabs * slab + 17, slab)
    rng = random.Random(seed)
    for pages in sizes:
        if pages > slab_pages:
            with pytest.raises(ArenaError, match="does not fit"):
                arena.allocate(pages * PAGE)
            continue
        offsets = fill(arena, pages * PAGE)
        assert len(offsets) == slabs * (slab_pages // pages)
        rng.shuffle(offsets)
        for offset in offsets:
            arena.free(offset)
        assert arena.used_bytes == 0
        assert arena.use() == ()


def test_a_slot_is_reused_from_the_lowest_slab_that_has_room() -> None:
    """High slabs run empty, so that they can change hands."""
    arena = Arena(4 * 4 * PAGE, 4 * PAGE)
    offsets = fill(arena, PAGE)
    for offset in (offsets[13], offsets[2]):
        arena.free(offset)
    assert arena.allocate(PAGE) == offsets[2]


def test_freeing_twice_is_an_error() -> None:
    """A slot given to two chunks would be wrong bytes later; it must fail where it happens."""
    arena = Arena(4 * PAGE, 4 * PAGE)
    first, second = arena.allocate(PAGE), arena.allocate(PAGE)
    assert first is not None
    assert second is not None
    arena.free(first)
    with pytest.raises(ArenaError, match=f"offset {first} is not a slot in use"):
        arena.free(first)
    with pytest.raises(ArenaError):
        arena.free(3 * PAGE)
    assert arena.used_bytes == PAGE


@pytest.mark.parametrize("slab", [0, PAGE - 1, PAGE + 1, 9 * PAGE, -PAGE])
def test_slabs_are_whole_pages_within_the_budget(slab: int) -> None:
    with pytest.raises(ArenaError, match=f"a slab of {slab} bytes"):
        Arena(8 * PAGE, slab)


@pytest.mark.parametrize("nbytes", [0, -1, 2 * PAGE + 1])
def test_slots_that_no_slab_can_hold_are_refused(nbytes: int) -> None:
    with pytest.raises(ArenaError, match=f"a slot of {nbytes} bytes"):
        Arena(8 * PAGE, 2 * PAGE).allocate(nbytes)


@settings(max_examples=examples(4))
@given(
    pages=st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True),
    budget=st.integers(1, 20_000),
)
def test_the_slab_size_serves_every_class(pages: list[int], budget: int) -> None:
    """All classes get a slot side by side, or the budget is refused with what it takes."""
    sizes = [n * PAGE for n in pages]
    if budget < max(pages) * len(pages):
        with pytest.raises(ArenaError, match="can't hold one chunk of each class"):
            choose_slab_bytes(budget * PAGE, sizes)
        return
    slab = choose_slab_bytes(budget * PAGE, sizes)
    arena = Arena(budget * PAGE, slab)
    assert all(arena.allocate(size) is not None for size in sizes)
    waste = max(1 - slab // size * size * arena.slabs / arena.budget for size in sizes)
    if budget >= 64 * max(pages) * len(pages):
        assert waste < 0.10


def test_a_budget_that_is_not_tight_wastes_little() -> None:
    sizes = [985_664 + 4096 - 985_664 % 4096, 15_400_960, 1_212_416]
    slab = choose_slab_bytes(8 << 30, sizes)
    slabs = (8 << 30) // slab
    assert all(slab // size * size * slabs > 0.98 * (8 << 30) for size in sizes)


def test_a_model_that_needs_no_bytes_gets_an_arena() -> None:
    assert choose_slab_bytes(1 << 20, ()) == PAGE
