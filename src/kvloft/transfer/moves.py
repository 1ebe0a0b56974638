"""Where the blocks of a job lie in slots, as arrays: no step per page is taken in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloft.jobs import Copy, Job
from kvloft.plan import BlockCounts, ChunkPlan, Section

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moves:
    """What is moved of one run of layers of a group: block ``ids[i]`` of all of its layers lies
    from byte ``places[i]`` of the arena on, ``block_bytes`` of them."""

    group: int
    run: int
    block_bytes: int
    ids: Integers
    places: Integers


@dataclass(slots=True)
class _Blocks:
    """Blocks of one group in slots of one class: ids, the slot of each and its place therein."""

    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of the slots that are moved as a whole."""
    parts: list[tuple[Integers, Integers]] = field(default_factory=list)
    """Slots and places of the others."""
    part_ids: list[int] = field(default_factory=list)

    def arrays(self, count: int) -> tuple[Integers, Integers, Integers]:
        """``(ids, slots, places)`` of equal length; ``count`` blocks of the group are in a slot."""
        slots, places = _spread(self.offsets, count)
        if self.parts:
            slots = np.concatenate([slots, *(slot for slot, _ in self.parts)])
            places = np.concatenate([places, *(place for _, place in self.parts)])
        return np.array(self.ids + self.part_ids, dtype=np.int64), slots, places


def _spread(offsets: list[int], count: int) -> tuple[Integers, Integers]:
    slots = np.repeat(np.array(offsets, dtype=np.int64), count)
    return slots, np.tile(np.arange(count, dtype=np.int64), len(offsets))


class Mover:
    """Makes the moves of one rank."""

    def __init__(self, plan: ChunkPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._sections: dict[BlockCounts, dict[int, list[Section]]] = {}

    def moves(self, job: Job, *, writes: bool) -> Iterator[Moves]:
        """The rank's share of a checked job (:func:`kvloft.transfer.check_job`).

        ``writes``: to slots; then what all ranks hold alike is rank 0's to move.
        """
        found: dict[tuple[BlockCounts, int], _Blocks] = {}
        for copy in job.copies:
            self._collect(copy, found)
        for (counts, group), blocks in found.items():
            ids, slots, places = blocks.arrays(dict(counts)[group])
            for section in self._sections_of(counts)[group]:
                if writes and self._rank and not section.rank_stride:
                    continue
                size = section.count * section.page_bytes
                start = section.offset + self._rank * section.rank_stride
                yield Moves(group, section.run, size, ids, slots + (places * size + start))

    @staticmethod
    def _collect(copy: Copy, found: dict[tuple[BlockCounts, int], _Blocks]) -> None:
        for part in copy.parts:
            if not (moved := len(part.block_ids)):
                continue
            blocks = found.setdefault((copy.counts, part.group), _Blocks())
            count = next(blocks for group, blocks in copy.counts if group == part.group)
            if moved == count * len(copy.offsets):
                blocks.ids.extend(part.block_ids)
                blocks.offsets.extend(copy.offsets)
                continue
            some = slice(part.first, part.first + moved)
            slots, places = _spread(copy.offsets, count)
            blocks.parts.append((slots[some], places[some]))
            blocks.part_ids.extend(part.block_ids)

    def _sections_of(self, counts: BlockCounts) -> dict[int, list[Section]]:
        """By group, where a slot with these blocks has what; made once per class of chunk."""
        known = self._sections.get(counts)
        if known is None:
            known = self._sections[counts] = {group: [] for group, _ in counts}
            for section in self._plan.layout(counts).sections:
                known[section.group].append(section)
        return known
