"""What the scheduler's side asks of the workers: copies between slots and engine blocks."""

from __future__ import annotations

import msgspec

from kvloft.plan import BlockCounts


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one group that a copy moves."""

    group: int
    first: int
    """Place in the first slot, in blocks of this group, of the first block that is moved."""
    block_ids: list[int]
    """Ids in the engine's pool, one for each block from ``first`` on, through all slots."""


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Slots of one class, and the engine blocks that they are filled from or that they fill.

    Several where the chunks follow upon each other: a prompt's full chunks are one copy, so that
    what describes it takes no time for each chunk.
    """

    offsets: list[int]
    """Bytes from the arena's start to each slot."""
    counts: BlockCounts
    """What each slot holds; gives its layout (:meth:`kvloft.plan.ChunkPlan.layout`)."""
    parts: list[Part]


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies that succeed or fail together. Every rank does its own share and reports once."""

    id: int
    """Used once in the life of a loft."""
    copies: list[Copy]
