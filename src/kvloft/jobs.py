"""What the scheduler's side asks of the workers: copies between slots and engine blocks."""

from __future__ import annotations

import msgspec

from kvloft.plan import BlockCounts


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one group that a copy moves."""

    group: int
    first: int
    """Place in the slot, in blocks of this group, of the first block that is moved."""
    block_ids: list[int]
    """Ids in the engine's pool, one for each block from ``first`` on."""


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot and the engine blocks that it is filled from or that it fills."""

    offset: int
    """Bytes from the arena's start to the slot."""
    counts: BlockCounts
    """What the slot holds; gives its layout (:meth:`kvloft.plan.ChunkPlan.layout`)."""
    parts: list[Part]


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies that succeed or fail together. Every rank does its own share and reports once."""

    id: int
    """Used once in the life of a loft."""
    copies: list[Copy]
