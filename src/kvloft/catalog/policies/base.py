"""What the catalog asks of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvloft.catalog.uses import Sighting, Use


class EvictionPolicy(Protocol):
    """Orders entries for eviction. Every call takes O(1), amortised.

    Entries are small non-negative integers, reused after :meth:`remove`. The catalog says which
    entries may go at a given moment (leaves that nobody reads or writes); the policy only orders.
    """

    def insert(self, entry: int, use: Use | None) -> None:
        """An entry that is new or was just used. ``None``: neither, it only may go again; what is
        known of it is what was known when it was dropped (see :meth:`victim`)."""

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        """As :meth:`insert` of each, the deepest first; but for the name, all uses are alike."""

    def demote(self, entry: int) -> None:
        """``entry`` is worth less than all others: it goes first. Inserts it if not held."""

    def revive(self, entry: int, after: int) -> None:
        """The last dependant of ``entry``, ``after``, has been evicted just now, so it may go
        itself: whoever used ``after`` used it as well."""

    def follow(self, entry: int, after: int) -> bool:
        """The last dependant of ``entry``, ``after``, has been evicted just now: whether ``entry``
        goes next. If so, it counts as gone; if not, :meth:`revive` is called as ever. May be false
        although it would go next; it is there to save time with long paths."""

    def remove(self, entry: int) -> None:
        """``entry`` is gone; does nothing if it is not held."""

    def admits(self, use: Use) -> bool:
        """Whether something is worth storing at all, even where there is room."""

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        """The entry that goes next, no longer held; ``None`` if none of the first ``limit`` may, or
        if all are worth more than ``newcomer``, for which room is made.

        An entry that may not go now is dropped from the order; the catalog brings it back with
        :meth:`revive` (its last dependant went just now) or :meth:`insert`.
        """

    def saw(self, sightings: Sequence[Sighting]) -> None:
        """A prompt has come in. Called once for each; what time is measured in."""

    def __contains__(self, entry: int) -> bool:
        """Whether ``entry`` is held."""

    def __len__(self) -> int:
        """Entries held."""
