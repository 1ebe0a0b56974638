"""What is remembered of prompts whether or not their bytes are kept.

Each prompt is walked once, at some of its boundaries: every 128 tokens at its beginning, every 512
further on, and beyond 128Ki tokens ever fewer, so that a walk takes O(log n).
A boundary's record says when it was last seen and to which *group* it belongs:

- how many prompts had been seen to begin with it (0, 1, or more),
- how it came up: as a beginning of its own, as the first continuation of a known prefix, or as a
  further one, which makes that prefix a branch point,
- how many turns its prompt had built upon: a conversation that has gone on goes on,
- how much was new in its prompt (powers of two).

Records lie in one table of fixed size, four to a row, the oldest of which makes room. So memory is
bounded, nothing is ever moved, and prefixes that were evicted, or never stored, are still known.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from kvloft.catalog.uses import Sighting, Use
from kvloft.keys import Keys

GROUPS = 216
LENGTHS = 8
"""Groups that differ in nothing but how much was new follow upon each other."""

_ROW = 4
_TIME_BITS = 24
_TIME_MASK = (1 << _TIME_BITS) - 1
_NAME_MASK = (1 << 28) - 1
_GROUP_MASK = (1 << 11) - 1
_LENGTH_UNIT = 512
"""Tokens."""

_FINE_TOKENS = 2048
_FINE_STEP = 128
_COARSE_STEP = 512
_COARSENESS = 256


def group_of(seen: int, origin: int, turn: int, new_tokens: int) -> int:
    """The number of a group; see above."""
    length = min(LENGTHS - 1, (new_tokens // _LENGTH_UNIT + 1).bit_length() - 1)
    return ((min(seen, 2) * 3 + origin) * 3 + min(turn, 2)) * LENGTHS + length


def seen_of(group: int) -> int:
    """How many prompts before had begun with such a prefix; 2 for more."""
    return group // (9 * LENGTHS)


def _turn_of(group: int) -> int:
    return group // LENGTHS % 3


@dataclass(slots=True)
class Visit:
    """One prompt's prefixes as they are known now."""

    depths: list[int] = field(default_factory=list)
    """Chunks: where the prompt was known already, in ascending order."""
    groups: list[int] = field(default_factory=list)
    """Of the prefixes that end there."""
    new_group: int = 0
    """Of all that is deeper."""
    branch: int = 0
    """Depth (chunks) at which prompts are known to part; 0 for none."""

    factor: float = 1.0
    """By how much this prompt's prefixes are worth more than others'."""

    @property
    def known(self) -> int:
        """The deepest known boundary (chunks)."""
        return self.depths[-1] if self.depths else 0

    def segment(self, depth: int) -> tuple[int, int]:
        """The group of the prefix that is ``depth`` chunks long, and down to where it is the same;
        the latter is beyond all depths for what is new."""
        at = bisect_left(self.depths, depth)
        if at >= len(self.groups):
            return self.new_group, 1 << 62
        group = self.groups[at]
        while at + 1 < len(self.groups) and self.groups[at + 1] == group:
            at += 1
        return group, self.depths[at]

    def use(self, depth: int, key: bytes, worth: float = 1.0) -> Use:
        """What to tell a policy of the prefix that is ``depth`` chunks long."""
        at = bisect_left(self.depths, depth)
        group = self.groups[at] if at < len(self.groups) else self.new_group
        return Use(int.from_bytes(key[:8], "little"), seen_of(group), group, worth * self.factor)


NO_VISIT = Visit()


class Sightings:
    """The table. 8 bytes a record."""

    def __init__(self, records: int, tokens_per_chunk: int) -> None:
        """``records``: at least as many as this are kept; in fact a power of two."""
        self._tokens_per_chunk = tokens_per_chunk
        self._grid = array("q")
        self._rows = 1 << max(4, (records // _ROW - 1).bit_length())
        self._table = array("Q", [0]) * (self._rows * _ROW)
        self._now = 0

    def grid(self, limit: int) -> list[int]:
        """The depths (chunks) up to ``limit`` at which a path is looked at."""
        grid, size = self._grid, self._tokens_per_chunk
        while not grid or grid[-1] < limit:
            last = grid[-1] if grid else 0
            coarse = max(_COARSE_STEP, last * size // _COARSENESS)
            step = _FINE_STEP if last * size < _FINE_TOKENS else coarse
            grid.append(last + max(1, step // size))
        return grid[: bisect_right(grid, limit)].tolist()

    def visit(self, keys: Keys, limit: int) -> tuple[Visit, list[Sighting]]:
        """Take note of a prompt of ``limit`` chunks; what is and was known of its prefixes."""
        self._now = now = (self._now + 1) & _TIME_MASK or 1
        tokens_per_chunk = self._tokens_per_chunk
        table, depths, visit = self._table, self.grid(limit), Visit()
        names = [int.from_bytes(keys(depth * tokens_per_chunk)[:8], "little") for depth in depths]
        places: list[int] = []
        for name in names:
            place = self._find(name)
            if place < 0:
                break
            places.append(place)
        known = len(places)
        visit.depths = depths[:known]
        new = (limit - visit.known) * tokens_per_chunk
        origin = turn = 0
        if known:
            last = table[places[-1]]
            origin, turn = 1 + (last & 1), min(2, _turn_of(last >> 1 & _GROUP_MASK) + 1)
            if known < len(depths):
                visit.branch = visit.known if last & 1 else 0
                table[places[-1]] = last | 1
        sightings, before = [], 0
        for place, name, depth in zip(places, names, depths, strict=False):
            record = table[place]
            old = record >> 1 & _GROUP_MASK
            group = group_of(seen_of(old) + 1, origin, _turn_of(old), new)
            visit.groups.append(group)
            table[place] = record >> 36 << 36 | now << 12 | group << 1 | record & 1
            weight = (depth - before) * tokens_per_chunk / _LENGTH_UNIT
            age = (now - (record >> 12)) & _TIME_MASK
            sightings.append(Sighting(name, weight, old, age, group))
            before = depth
        visit.new_group = group = group_of(0, origin, turn, new)
        for name, depth in zip(names[known:], depths[known:], strict=True):
            self._add(name, group)
            weight = (depth - before) * tokens_per_chunk / _LENGTH_UNIT
            sightings.append(Sighting(name, weight, -1, 0, group))
            before = depth
        return visit, sightings

    def _find(self, name: int) -> int:
        """Where a name's record is; negative if there is none."""
        mark, row = name >> 32 & _NAME_MASK or 1, (name & (self._rows - 1)) * _ROW
        for place in range(row, row + _ROW):
            if self._table[place] >> 36 == mark:
                return place
        return -1

    def _add(self, name: int, group: int) -> None:
        """Make a record in the place of the oldest one of its row."""
        table, now = self._table, self._now
        row = (name & (self._rows - 1)) * _ROW
        oldest, age = row, -1
        for place in range(row, row + _ROW):
            if not (record := table[place]):
                oldest = place
                break
            if (found := (now - (record >> 12)) & _TIME_MASK) > age:
                oldest, age = place, found
        table[oldest] = (name >> 32 & _NAME_MASK or 1) << 36 | now << 12 | group << 1

    def clear(self) -> None:
        """Forget everything."""
        self._table = array("Q", [0]) * (self._rows * _ROW)
