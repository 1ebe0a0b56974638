"""S3-FIFO (Yang et al., SOSP 2023): three queues, of which a small one takes what is new.

What is not used again before it leaves the small queue goes, and only its name is kept for a while;
what was, or whose name is still known when it comes back, gets into the main queue, where each use
is worth one more round.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvloft.catalog.policies.lists import Lists
from kvloft.catalog.uses import Sighting, Use

_DEMOTED, _SMALL, _MAIN = 0, 1, 2
_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3FIFO:
    """As in the paper, but for entries that can't go: they are dropped when met."""

    def __init__(self) -> None:
        self._lists = Lists(3)
        self._uses = array("b")
        self._names: dict[int, int] = {}
        self._ghosts: dict[int, None] = {}
        self._left = _SMALL
        """The queue that the latest entry to go was in."""

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, entry: int) -> bool:
        return entry in self._lists

    def insert(self, entry: int, use: Use | None) -> None:
        missing = entry + 1 - len(self._uses)
        if missing > 0:
            self._uses.extend([0] * missing)
        lists = self._lists
        if use is None:
            lists.append(entry, max(_SMALL, lists.list_of(entry)))
        elif self._names.get(entry) == use.name:
            self._uses[entry] = min(_MAX_USES, self._uses[entry] + 1)
            if lists.list_of(entry) <= _DEMOTED:
                lists.append(entry, _MAIN)
        else:
            self._names[entry] = use.name
            self._uses[entry] = 0
            known = use.name in self._ghosts
            if known:
                del self._ghosts[use.name]
            lists.append(entry, _MAIN if known else _SMALL)

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        for entry in entries:
            self.insert(entry, replace(use, name=name_of(entry)))

    def demote(self, entry: int) -> None:
        self._lists.push(entry, _DEMOTED)

    def revive(self, entry: int, after: int) -> None:
        if entry >= len(self._uses):
            self.insert(entry, None)
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
                small = lists.sizes[_SMALL]
                which = (
                    _SMALL if small > _SMALL_SHARE * len(lists) or small == len(lists) else _MAIN
                )
            entry = lists.heads[which]
            if which != _DEMOTED and self._uses[entry]:
                self._uses[entry] = 0 if which == _SMALL else self._uses[entry] - 1
                lists.append(entry, _MAIN)
                continue
            lists.remove(entry)
            if evictable(entry):
                if which != _DEMOTED:
                    self._left = which
                if which == _SMALL:
                    self._remember(entry)
                return entry
        return None

    def _remember(self, entry: int) -> None:
        if (name := self._names.get(entry)) is not None:
            self._ghosts[name] = None
            while len(self._ghosts) > max(16, len(self._lists)):
                del self._ghosts[next(iter(self._ghosts))]

    def saw(self, sightings: Sequence[Sighting]) -> None:
        pass
