"""What moves bytes on any device: the pages it sees, the jobs it takes, the checks on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloft.errors import TransferError
from kvloft.jobs import Job
from kvloft.plan import ChunkPlan

PageViews = Mapping[int, Sequence[npt.NDArray[np.uint8]]]
"""Per cacheable group, one array per layer in geometry order: ``(num_blocks, ...)`` of uint8.

Block b's live bytes are ``view[b]``, in C order; strides may be anything (padding between blocks,
other layers in between, kernel blocks). Only CPU memory has such views.
"""


class Copier(Protocol):
    """Moves one rank's share of a job. Jobs come in the order in which they must take effect."""

    def store(self, job: Job) -> None:
        """Fill slots from pages; the pages may be reused when it returns.

        Raises :class:`TransferError` before the first byte if a descriptor leaves its bounds.
        """

    def load(self, job: Job) -> None:
        """Fill pages from slots, all of them when it returns. Raises as :meth:`store`."""

    def difference(self, job: Job) -> float:
        """The share of pieces in which the pages and their place in slots are unlike, of the page
        where it is greatest (:mod:`kvloft.transfer.likeness`). Changes nothing. Raises as
        :meth:`store`."""


def check_job(job: Job, plan: ChunkPlan, arena_bytes: int, num_blocks: int) -> None:
    """Bounds-check every descriptor of a job. Raises :class:`TransferError`.

    ``arena_bytes``: size of the arena's memory; ``num_blocks``: blocks in the engine's pool, of
    which 0 is the null block that no copy may touch.
    """
    known = {group.id: plan.blocks_per_chunk(group) for group in plan.geometry.cacheable}
    for copy in job.copies:
        counts: dict[int, int] = {}
        for group, blocks in copy.counts:
            if group not in known or group in counts or not 0 < blocks <= known[group]:
                raise TransferError(f"job {job.id}: a slot with {blocks} blocks of group {group}")
            counts[group] = blocks
        nbytes = plan.layout(copy.counts).nbytes
        for offset in (min(copy.offsets, default=0), max(copy.offsets, default=0)):
            if offset < 0 or offset + nbytes > arena_bytes:
                raise TransferError(
                    f"job {job.id}: slot [{offset}, {offset + nbytes}) leaves the arena of "
                    f"{arena_bytes} bytes"
                )
        for part in copy.parts:
            blocks = counts.get(part.group, 0) * len(copy.offsets)
            stop = part.first + len(part.block_ids)
            if part.group not in counts or part.first < 0 or stop > blocks:
                raise TransferError(
                    f"job {job.id}: blocks {part.first} to {stop} of group {part.group} leave "
                    f"slots of {blocks}"
                )
            if part.block_ids and not (
                min(part.block_ids) > 0 and max(part.block_ids) < num_blocks
            ):
                raise TransferError(
                    f"job {job.id}: block ids {part.block_ids} of group {part.group} leave "
                    f"the pool, 1 to {num_blocks - 1}"
                )
