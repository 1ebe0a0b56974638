"""Where in the host mapping a chunk lies: slabs, slot classes and slots.

The mapping is cut into slabs of one size. A slab serves slots of one size (a class) as long as any
of them is in use and then goes back to the common pool, so memory that one class has given up is
there for every other. A slot is exactly its chunk's bytes in whole pages, hence no class pays for
the size of another (vllm-project/vllm#56871, #56953 are what one common slot size costs). The slab
size is chosen once so that little is left over at a slab's end (:func:`choose_slab_bytes`).

Prior art is the slab allocator of kernels and of memcached; theirs move slabs between classes by
force, ours by eviction alone. Slots are taken from the lowest slab that has room, which lets the
high ones run empty. What it costs: a class holds a slab until its last slot goes.

This module hands out offsets; :mod:`kvloft.mapping` is the memory behind them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvloft.errors import ArenaError
from kvloft.units import PAGE_BYTES, ceil_div, format_size, page_aligned

_MAX_SLAB_WASTE = 0.01
_MAX_SLABS = 65536
"""Room enough for classes to grow and shrink; more would only be more to keep in order."""


def choose_slab_bytes(budget: int, slot_sizes: Sequence[int]) -> int:
    """The slab size (bytes) that leaves least unused of ``budget`` for these slot sizes.

    The smallest candidate that wastes at most 1 % in every class, or else the least wasteful one.
    Candidates are multiples of the slot sizes, from a 65,536th of the budget up to an eighth
    of it so that several classes find room. Raises :class:`ArenaError` where the budget can't give
    each class a slab.
    """
    if not slot_sizes:
        return PAGE_BYTES  # A model whose resumes need no bytes at all: windows of one token.
    greatest = max(slot_sizes)
    needed = greatest * len(slot_sizes)
    if budget < needed:
        raise ArenaError(
            f"{format_size(budget)} can't hold one chunk of each class: that takes "
            f"{format_size(needed)}; give more memory or choose a smaller chunk"
        )
    least = max(greatest, budget // _MAX_SLABS)
    limit = max(greatest, budget // 8)
    best = (2.0, greatest)
    multiples = {(ceil_div(least, size) + more) * size for size in slot_sizes for more in range(64)}
    for size in sorted(multiple for multiple in multiples if multiple <= limit):
        slabs = budget // size
        if slabs < len(slot_sizes):
            continue
        used = min(size // slot * slot * slabs for slot in slot_sizes)
        waste = 1 - used / budget
        if waste <= _MAX_SLAB_WASTE:
            return size
        best = min(best, (waste, size))
    return best[1]


@dataclass(frozen=True, slots=True)
class ClassUse:
    """What one slot class holds now."""

    slot_bytes: int
    slots: int
    """Slots in use."""
    slabs: int
    """Slabs that serve the class."""


class _Class:
    __slots__ = ("open_slabs", "per_slab", "slabs", "slot_bytes", "used")

    def __init__(self, slot_bytes: int, per_slab: int) -> None:
        self.slot_bytes = slot_bytes
        self.per_slab = per_slab
        self.open_slabs: list[int] = []
        """Heap of slabs that had room when they were pushed; some may be stale."""
        self.used = 0
        self.slabs = 0


class Arena:
    """Hands out and takes back slots of one mapping. Not thread-safe: the scheduler owns it."""

    def __init__(self, budget: int, slab_bytes: int) -> None:
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES or slab_bytes > budget:
            raise ArenaError(
                f"a slab of {slab_bytes} bytes is no whole number of {PAGE_BYTES}-byte pages "
                f"within the budget of {budget} bytes"
            )
        self.budget = budget
        self.slab_bytes = slab_bytes
        self.slabs = budget // slab_bytes
        self._reset()

    def _reset(self) -> None:
        self.used_bytes = 0
        """Exact sum of the slots in use."""
        self._classes: dict[int, _Class] = {}
        self._owner: list[_Class | None] = [None] * self.slabs
        self._used = array("q", [0]) * self.slabs
        self._taken = [bytearray()] * self.slabs
        """Per slab, a byte for each slot: 1 while it is in use. Not lists or arrays, which are as
        many objects for the garbage collector to walk (20 ms at 55,000 slabs)."""
        self._free = list(range(self.slabs))
        """Heap of slabs that serve no class."""

    @property
    def has_free_slabs(self) -> bool:
        """Whether any class can still grow."""
        return bool(self._free)

    def clear(self) -> None:
        """Take back every slot at once."""
        self._reset()

    def allocate_up_to(self, nbytes: int, count: int) -> list[int]:
        """The offsets of slots for ``nbytes`` bytes each: ``count``, or as many as there are."""
        slots: list[int] = []
        while len(slots) < count and (slot := self.allocate(nbytes)) is not None:
            slots.append(slot)
        return slots

    def allocate(self, nbytes: int) -> int | None:
        """A slot's offset for ``nbytes`` bytes, or ``None`` where there is no room right now."""
        size = nbytes
        cls = self._classes.get(size)
        if cls is None:
            size = page_aligned(nbytes)
            cls = self._classes.get(size)
        if cls is None:
            if not 0 < size <= self.slab_bytes:
                raise ArenaError(f"a slot of {nbytes} bytes does not fit a slab")
            cls = self._classes[size] = _Class(size, self.slab_bytes // size)
        slab = self._open_slab(cls)
        if slab < 0:
            return None
        taken = self._taken[slab]
        slot = taken.find(0)
        taken[slot] = 1
        used = self._used[slab] = self._used[slab] + 1
        if used == cls.per_slab:
            heapq.heappop(cls.open_slabs)
        cls.used += 1
        self.used_bytes += size
        return slab * self.slab_bytes + slot * size

    def _open_slab(self, cls: _Class) -> int:
        heap = cls.open_slabs
        while heap:
            slab = heap[0]
            if self._owner[slab] is cls and self._used[slab] < cls.per_slab:
                return slab
            heapq.heappop(heap)
        if not self._free:
            return -1
        slab = heapq.heappop(self._free)
        self._owner[slab] = cls
        self._taken[slab] = bytearray(cls.per_slab)
        cls.slabs += 1
        heapq.heappush(heap, slab)
        return slab

    def free(self, offset: int) -> None:
        """Take back the slot at ``offset``. Raises :class:`ArenaError` if none was handed out."""
        slab, within = divmod(offset, self.slab_bytes)
        cls = self._owner[slab] if 0 <= slab < self.slabs else None
        slot, beside = divmod(within, cls.slot_bytes) if cls else (0, 1)
        if cls is None or beside or slot >= cls.per_slab or not self._taken[slab][slot]:
            raise ArenaError(f"offset {offset} is not a slot in use")
        self._taken[slab][slot] = 0
        used = self._used[slab] = self._used[slab] - 1
        cls.used -= 1
        self.used_bytes -= cls.slot_bytes
        if used == 0:
            self._owner[slab] = None
            self._taken[slab] = bytearray()
            cls.slabs -= 1
            heapq.heappush(self._free, slab)
        elif used == cls.per_slab - 1:
            heapq.heappush(cls.open_slabs, slab)

    def use(self) -> tuple[ClassUse, ...]:
        """What each class holds now, greatest slots first."""
        return tuple(
            ClassUse(cls.slot_bytes, cls.used, cls.slabs)
            for cls in sorted(self._classes.values(), key=lambda c: -c.slot_bytes)
            if cls.slabs
        )
