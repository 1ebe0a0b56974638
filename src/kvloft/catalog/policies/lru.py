"""Least recently used, exact on a tree although only the deepest node of a request is touched.

A prefix is at least as recent as anything below it, but touching every node of a path would cost
O(depth) per request. So entries that can't go (they have dependants) are simply dropped from the
order when eviction meets them, and come back at the cold end when their last dependant goes: that
dependant was the coldest entry of all, and an ancestor met before was no warmer. An ancestor that
has been touched for itself since is still in its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvloft.catalog.policies.lists import Lists
from kvloft.catalog.uses import Sighting, Use

_DEMOTED, _ORDER = 0, 1


class LRU:
    """Two lists: what was demoted, the latest first, and the rest by its last use."""

    def __init__(self) -> None:
        self._lists = Lists(2)

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, entry: int) -> bool:
        return entry in self._lists

    def insert(self, entry: int, use: Use | None = None) -> None:
        self._lists.append(entry, _ORDER)

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        self._lists.extend(entries, _ORDER)

    def touch(self, entry: int) -> None:
        """``entry`` was used; does nothing if it is not held."""
        if entry in self._lists:
            self._lists.append(entry, _ORDER)

    def demote(self, entry: int) -> None:
        self._lists.push(entry, _DEMOTED)

    def revive(self, entry: int, after: int) -> None:
        self._lists.push(entry, _ORDER)

    def follow(self, entry: int, after: int) -> bool:
        heads = self._lists.heads
        if heads[_DEMOTED] >= 0:
            return False
        if heads[_ORDER] == entry:
            self._lists.remove(entry)
        return entry not in self._lists

    def remove(self, entry: int) -> None:
        self._lists.remove(entry)

    def admits(self, use: Use) -> bool:
        return True

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        heads = self._lists.heads
        for _ in range(limit):
            entry = heads[_DEMOTED]
            if entry < 0:
                entry = heads[_ORDER]
                if entry < 0 or (newcomer is not None and not newcomer.worth):
                    return None
            self._lists.remove(entry)
            if evictable(entry):
                return entry
        return None

    def saw(self, sightings: Sequence[Sighting]) -> None:
        pass
