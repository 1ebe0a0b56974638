"""Jobs taken apart, for tests of whoever does them."""

from __future__ import annotations

from collections.abc import Iterator

from kvloft.jobs import Copy, Job, Part


def apart(job: Job) -> Iterator[Copy]:
    """The copies of a job, one for each slot."""
    for copy in job.copies:
        counts = dict(copy.counts)
        for slot, offset in enumerate(copy.offsets):
            parts = []
            for part in copy.parts:
                count = counts[part.group]
                start, stop = slot * count - part.first, (slot + 1) * count - part.first
                ids = part.block_ids[max(0, start) : max(0, stop)]
                parts.append(Part(part.group, max(0, -start), ids))
            yield Copy([offset], copy.counts, [part for part in parts if part.block_ids])


def half(job: Job) -> Job:
    """The first half of a job's slots: what a worker has done that fails half-way."""
    copies = list(apart(job))
    return Job(job.id, copies[: len(copies) // 2])
