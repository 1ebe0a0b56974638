"""Least recently used, exact on a tree although only the deepest node of a request is touched.

A prefix is at least as recent as anything below it, but touching every node of a path would cost
O(depth) per request. So entries that can't go (they have dependants) are simply dropped from the
order when eviction meets them, and come back at the cold end when their last dependant goes: that
dependant was the coldest entry of all, and an ancestor met before was no warmer. An ancestor that
has been touched for itself since is still in its own place.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

_NONE = -1
_ABSENT = -2


class LRU:
    """An intrusive list over arrays: no object per entry, nothing for the garbage collector."""

    def __init__(self) -> None:
        self._head = _NONE
        """The coldest entry."""
        self._tail = _NONE
        self._count = 0
        self._prev = array("i")
        self._next = array("i")
        """``_ABSENT`` marks an entry that is not held."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entry: int) -> bool:
        return 0 <= entry < len(self._next) and self._next[entry] != _ABSENT

    def insert(self, entry: int) -> None:
        missing = entry + 1 - len(self._next)
        if missing > 0:
            self._next.extend([_ABSENT] * missing)
            self._prev.extend([_NONE] * missing)
        if self._next[entry] != _ABSENT:
            self._unlink(entry)
        self._prev[entry], self._next[entry] = self._tail, _NONE
        if self._tail >= 0:
            self._next[self._tail] = entry
        else:
            self._head = entry
        self._tail = entry
        self._count += 1

    def touch(self, entry: int) -> None:
        if entry != self._tail and entry in self:
            self.insert(entry)

    def demote(self, entry: int) -> None:
        head = self._head
        if entry == head:
            return
        if head < 0 or entry >= len(self._next):
            self.insert(entry)
            self.demote(entry)
            return
        if self._next[entry] != _ABSENT:
            self._unlink(entry)
        self._prev[entry], self._next[entry] = _NONE, head
        self._prev[head] = entry
        self._head = entry
        self._count += 1

    def remove(self, entry: int) -> None:
        if entry in self:
            self._unlink(entry)
            self._next[entry] = _ABSENT

    def victim(self, evictable: Callable[[int], bool], limit: int) -> int | None:
        for _ in range(limit):
            entry = self._head
            if entry < 0:
                return None
            self._unlink(entry)
            self._next[entry] = _ABSENT
            if evictable(entry):
                return entry
        return None

    def _unlink(self, entry: int) -> None:
        before, after = self._prev[entry], self._next[entry]
        if before >= 0:
            self._next[before] = after
        else:
            self._head = after
        if after >= 0:
            self._prev[after] = before
        else:
            self._tail = before
        self._count -= 1
