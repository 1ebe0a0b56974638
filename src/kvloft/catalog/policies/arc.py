"""Adaptive replacement (Megiddo and Modha, FAST 2003): recency and frequency share the room.

Two lists, of what was used once and of what was used more often, and the names of as many entries
again that have been evicted from either. A name that comes back says which list was too short. As
with LRU here, of a path only the deepest node is touched when it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvloft.catalog.policies.lists import Lists
from kvloft.catalog.uses import Sighting, Use

_DEMOTED, _ONCE, _OFTEN = 0, 1, 2


class ARC:
    """The roles of T1, T2, B1, B2 and p as in the paper; c is the number of entries now held."""

    def __init__(self) -> None:
        self._lists = Lists(3)
        self._names: dict[int, int] = {}
        """By entry."""
        self._ghosts: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self._target = 0.0
        """How many entries the list of those used once should have."""
        self._left = _ONCE
        """The list that the latest entry to go was in."""

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, entry: int) -> bool:
        return entry in self._lists

    def insert(self, entry: int, use: Use | None) -> None:
        lists = self._lists
        held = entry in lists
        if use is None:
            lists.append(entry, max(_ONCE, lists.list_of(entry)))
            return
        known = self._names.get(entry) == use.name
        self._names[entry] = use.name
        once, often = self._ghosts
        which = _OFTEN if held or known else _ONCE
        if use.name in once:
            step = max(1.0, len(often) / len(once))
            self._target = min(float(len(lists)), self._target + step)
            del once[use.name]
            which = _OFTEN
        elif use.name in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
            del often[use.name]
            which = _OFTEN
        lists.append(entry, which)

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        for entry in entries:
            self.insert(entry, replace(use, name=name_of(entry)))

    def demote(self, entry: int) -> None:
        self._lists.push(entry, _DEMOTED)

    def revive(self, entry: int, after: int) -> None:
        self._lists.push(entry, self._left)

    def follow(self, entry: int, after: int) -> bool:
        return False

    def remove(self, entry: int) -> None:
        self._lists.remove(entry)
        self._names.pop(entry, None)

    def admits(self, use: Use) -> bool:
        return True

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        lists = self._lists
        for _ in range(limit):
            which = _DEMOTED
            if not lists.sizes[_DEMOTED]:
                if not len(lists) or (newcomer is not None and not newcomer.worth):
                    return None
                once = lists.sizes[_ONCE]
                which = (
                    _ONCE if once and (once > self._target or not lists.sizes[_OFTEN]) else _OFTEN
                )
            entry = lists.heads[which]
            lists.remove(entry)
            if evictable(entry):
                if which != _DEMOTED:
                    self._left = which
                    self._remember(entry, which - 1)
                return entry
        return None

    def _remember(self, entry: int, which: int) -> None:
        name = self._names.get(entry)
        if name is None:
            return
        ghosts = self._ghosts[which]
        ghosts[name] = None
        while len(ghosts) > max(16, len(self._lists)):
            del ghosts[next(iter(ghosts))]

    def saw(self, sightings: Sequence[Sighting]) -> None:
        pass
