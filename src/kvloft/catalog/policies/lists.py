"""Several linked lists of the same small integers, each of them in one list at a time.

Over arrays: no object per entry, nothing for the garbage collector to walk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NONE = -1


class Lists:
    """Entries from the head (goes first) to the tail of each list; all operations take O(1)."""

    def __init__(self, count: int) -> None:
        self.heads = [NONE] * count
        self.tails = [NONE] * count
        self.sizes = [0] * count
        self._prev = array("i")
        self._next = array("i")
        self._list = array("i")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entry: int) -> bool:
        return 0 <= entry < len(self._list) and self._list[entry] >= 0

    def list_of(self, entry: int) -> int:
        """The list that holds ``entry``; negative if none does."""
        return self._list[entry] if entry < len(self._list) else NONE

    def add_list(self) -> int:
        """Make one more list; its number."""
        self.heads.append(NONE)
        self.tails.append(NONE)
        self.sizes.append(0)
        return len(self.heads) - 1

    def append(self, entry: int, which: int) -> None:
        """Put ``entry`` at the tail of a list, from wherever it is."""
        lists = self._list
        if entry >= len(lists):
            self._reach(entry)
        elif lists[entry] >= 0:
            self.remove(entry)
        tail = self.tails[which]
        self._prev[entry], self._next[entry] = tail, NONE
        if tail >= 0:
            self._next[tail] = entry
        else:
            self.heads[which] = entry
        self.tails[which] = entry
        lists[entry] = which
        self.sizes[which] += 1
        self._count += 1

    def extend(self, entries: Sequence[int], which: int) -> None:
        """:meth:`append` each; they are different ones."""
        if not entries:
            return
        self._reach(max(entries))
        before, after, lists = self._prev, self._next, self._list
        for entry in entries:
            if lists[entry] >= 0:
                self.remove(entry)
        tail = self.tails[which]
        if tail < 0:
            self.heads[which] = entries[0]
        for entry in entries:
            before[entry] = tail
            if tail >= 0:
                after[tail] = entry
            lists[entry] = which
            tail = entry
        after[tail] = NONE
        self.tails[which] = tail
        self.sizes[which] += len(entries)
        self._count += len(entries)

    def push(self, entry: int, which: int) -> None:
        """Put ``entry`` at the head of a list, from wherever it is."""
        self._reach(entry)
        if self._list[entry] >= 0:
            self.remove(entry)
        head = self.heads[which]
        self._prev[entry], self._next[entry] = NONE, head
        if head >= 0:
            self._prev[head] = entry
        else:
            self.tails[which] = entry
        self.heads[which] = entry
        self._list[entry] = which
        self.sizes[which] += 1
        self._count += 1

    def remove(self, entry: int) -> int:
        """Take ``entry`` out; the list that it was in, negative if in none."""
        lists = self._list
        which = lists[entry] if entry < len(lists) else NONE
        if which < 0:
            return NONE
        before, after = self._prev[entry], self._next[entry]
        if before >= 0:
            self._next[before] = after
        else:
            self.heads[which] = after
        if after >= 0:
            self._prev[after] = before
        else:
            self.tails[which] = before
        lists[entry] = NONE
        self.sizes[which] -= 1
        self._count -= 1
        return which

    def _reach(self, entry: int) -> None:
        missing = entry + 1 - len(self._list)
        if missing > 0:
            self._list.extend([NONE] * missing)
            self._prev.extend([NONE] * missing)
            self._next.extend([NONE] * missing)
