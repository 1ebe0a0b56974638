"""The default: follows whichever policy would do best on the prompts that come in.

Hit density mostly does; but it has to learn first, and what it has learnt may have been chance. So
beside it others are kept in order as well, and for each of them a shadow (:mod:`.shadow`), a small
cache of names, serves the same prompts. Who has found most of late decides what is stored and what
goes. The price is that each entry is in several orders: some microseconds for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloft.catalog.policies.base import EvictionPolicy
from kvloft.catalog.policies.density import Density
from kvloft.catalog.policies.lru import LRU
from kvloft.catalog.policies.shadow import ChunkShadow, PromptShadow
from kvloft.catalog.policies.twice import Twice
from kvloft.catalog.uses import Room, Sighting, Use

_MEMORY = 0.9995
"""Of what was found, how much still counts after another prompt."""
_LEAD = 1.02
"""How much better another one must be to be followed instead."""


class Adaptive:
    """See above."""

    def __init__(self, room: Room) -> None:
        self._density = Density()
        self._rival = Density(self._density.reuse)
        self._orders: list[EvictionPolicy] = [self._density]
        rivals: list[EvictionPolicy] = [self._rival]
        if room.resume_bytes:
            self._orders += [LRU()]
            rivals += [LRU()]
        else:
            self._orders += [Twice()]
            rivals += [Twice()]
        kind = PromptShadow if room.resume_bytes else ChunkShadow
        self._shadows = [kind(rival, room) for rival in rivals]
        self._found = [0.0] * len(rivals)
        self._leader = 0
        self._order = self._orders[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, entry: int) -> bool:
        return entry in self._order

    def insert(self, entry: int, use: Use | None) -> None:
        for order in self._orders:
            order.insert(entry, use)

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        for order in self._orders:
            order.insert_path(entries, name_of, use)

    def demote(self, entry: int) -> None:
        for order in self._orders:
            order.demote(entry)

    def revive(self, entry: int, after: int) -> None:
        for order in self._orders:
            order.revive(entry, after)

    def follow(self, entry: int, after: int) -> bool:
        if not self._order.follow(entry, after):
            return False
        for order in self._orders:
            if order is not self._order:
                order.remove(entry)
        return True

    def remove(self, entry: int) -> None:
        for order in self._orders:
            order.remove(entry)

    def admits(self, use: Use) -> bool:
        return self._order.admits(use)

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        dropped: list[int] = []

        def may_go(entry: int) -> bool:
            if evictable(entry):
                return True
            dropped.append(entry)
            return False

        victim = self._order.victim(may_go, limit, newcomer)
        if victim is not None:
            dropped.append(victim)
        for order in self._orders:
            if order is not self._order:
                for entry in dropped:
                    order.remove(entry)
        return victim

    def saw(self, sightings: Sequence[Sighting]) -> None:
        learnt = self._density.reuse.saw(sightings)
        for density in (self._density, self._rival):
            density.learnt(learnt)
        for at, shadow in enumerate(self._shadows):
            self._found[at] = self._found[at] * _MEMORY + shadow.serve(sightings)
        best = max(range(len(self._found)), key=self._found.__getitem__)
        if self._found[best] > _LEAD * self._found[self._leader]:
            self._leader, self._order = best, self._orders[best]
