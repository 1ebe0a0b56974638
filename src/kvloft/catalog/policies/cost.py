"""Cost-aware: GreedyDual-Size with frequency (Cherkasova 1998, after Cao and Irani 1997).

An entry's priority is what it saves per byte, times how often it has been seen, plus an age that
rises to the priority of whatever was evicted last. Here what is saved per byte is rounded to powers
of the square root of two, and all entries of one such level form a queue in order of priority; so
the lowest one is at the head of some queue, and no heap of objects is needed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

from kvloft.catalog.policies.lists import Lists
from kvloft.catalog.uses import NO_USE, Sighting, Use

_DEMOTED = 0


class CostAware:
    """Evicts what saves least per byte and was used least lately."""

    def __init__(self) -> None:
        self._lists = Lists(1)
        self._levels: dict[int, int] = {}
        self._gains: list[float] = [0.0]
        """By list."""
        self._level = array("i")
        self._priority = array("d")
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, entry: int) -> bool:
        return entry in self._lists

    def insert(self, entry: int, use: Use | None) -> None:
        self._reach(entry)
        if use is not None:
            self._level[entry] = self._list_for(use.worth * (1 + use.seen))
        which = self._level[entry]
        self._priority[entry] = self._age + self._gains[which]
        self._lists.append(entry, which)

    def _reach(self, entry: int) -> None:
        missing = entry + 1 - len(self._level)
        if missing > 0:
            self._level.extend([self._list_for(NO_USE.worth)] * missing)
            self._priority.extend([0.0] * missing)

    def _list_for(self, gain: float) -> int:
        if gain <= 0:
            return _DEMOTED
        level = round(2 * math.log2(gain))
        which = self._levels.get(level)
        if which is None:
            which = self._levels[level] = self._lists.add_list()
            self._gains.append(2 ** (level / 2))
        return which

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        for entry in entries:
            self.insert(entry, use)

    def demote(self, entry: int) -> None:
        self._reach(entry)
        self._lists.push(entry, _DEMOTED)

    def revive(self, entry: int, after: int) -> None:
        self._reach(max(entry, after))
        self._level[entry] = max(
            self._level[entry], self._level[after], key=self._gains.__getitem__
        )
        self._priority[entry] = self._priority[after]
        self._lists.push(entry, self._level[entry])

    def follow(self, entry: int, after: int) -> bool:
        return False

    def remove(self, entry: int) -> None:
        self._lists.remove(entry)

    def admits(self, use: Use) -> bool:
        return True

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        heads, priority = self._lists.heads, self._priority
        for _ in range(limit):
            entry = heads[_DEMOTED]
            if entry < 0:
                if newcomer is not None and not newcomer.worth:
                    return None
                candidates = [head for head in heads if head >= 0]
                if not candidates:
                    return None
                entry = min(candidates, key=priority.__getitem__)
                self._age = max(self._age, priority[entry])
            self._lists.remove(entry)
            if evictable(entry):
                return entry
        return None

    def saw(self, sightings: Sequence[Sighting]) -> None:
        pass
