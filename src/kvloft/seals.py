"""Checksums of what slots hold, kept beside the arena in the mapping that all processes share.

Each rank seals its own share of a slot when it has written it, and looks at the seal before it
reads the share back: a bit that flips in host memory, or a write that strays into a slot, then ends
in a miss instead of in an answer (``verify: always``). What ranks hold alike is sealed by rank 0.

A seal is 8 bytes. Slots do not overlap and none is smaller than the smallest class, so a slot's
offset divided by that size is a number that no other slot has.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvloft.plan import ChunkLayout, ChunkPlan
from kvloft.units import page_aligned

_SHARED = 0
"""Column of what the ranks share; rank r has column r + 1."""


def seal_bytes(plan: ChunkPlan, nbytes: int) -> int:
    """Bytes of seals, in whole pages, for an arena of up to ``nbytes`` bytes."""
    sizes = plan.slot_sizes()
    if not sizes:
        return 0
    return page_aligned((nbytes // min(sizes) + 1) * 8 * (plan.geometry.tensor_parallel + 1))


class Seals:
    """xxh3-64 of every rank's share of every slot. A process's own view of the shared table."""

    def __init__(self, plan: ChunkPlan, memory: npt.NDArray[np.uint8], arena_bytes: int) -> None:
        """``memory``: the mapping's, whose first ``arena_bytes`` bytes are the arena."""
        self._memory = memory
        self._ranks = plan.geometry.tensor_parallel
        self._least = min(plan.slot_sizes(), default=1)
        columns = self._ranks + 1
        rows = (len(memory) - arena_bytes) // (8 * columns)
        table = memory[arena_bytes : arena_bytes + rows * 8 * columns].view(np.uint64)
        self._table = table.reshape(rows, columns)

    def seal(self, slot: int, layout: ChunkLayout, rank: int) -> None:
        """``rank`` has written its share of ``slot`` (bytes from the arena's start)."""
        row = self._table[slot // self._least]
        if layout.shared_bytes and rank == 0:
            row[_SHARED] = self._digest(slot, layout.shared_bytes)
        if layout.rank_bytes:
            row[rank + 1] = self._digest(slot + layout.rank_offset(rank), layout.rank_bytes)

    def intact(self, slot: int, layout: ChunkLayout, rank: int) -> bool:
        """Whether what ``rank`` reads of ``slot`` is what has been sealed."""
        row = self._table[slot // self._least]
        if layout.shared_bytes and row[_SHARED] != self._digest(slot, layout.shared_bytes):
            return False
        own = slot + layout.rank_offset(rank)
        return not layout.rank_bytes or bool(row[rank + 1] == self._digest(own, layout.rank_bytes))

    def seal_all(self, slot: int, layout: ChunkLayout) -> None:
        """A whole chunk has been brought to ``slot``."""
        for rank in range(self._ranks):
            self.seal(slot, layout, rank)

    def all_intact(self, slot: int, layout: ChunkLayout) -> bool:
        """Whether the whole chunk in ``slot`` is what has been sealed."""
        return all(self.intact(slot, layout, rank) for rank in range(self._ranks))

    def _digest(self, start: int, nbytes: int) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(self._memory[start : start + nbytes].data))
