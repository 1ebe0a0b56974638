"""What the catalog asks of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders entries for eviction. Every call takes O(1), amortised.

    Entries are small non-negative integers, reused after :meth:`remove`. The catalog says which
    entries may go at a given moment (leaves that nobody reads or writes); the policy only orders.
    """

    def insert(self, entry: int) -> None:
        """A new entry, just used."""

    def touch(self, entry: int) -> None:
        """``entry`` was used; does nothing if it is not held (see :meth:`victim`)."""

    def demote(self, entry: int) -> None:
        """``entry`` is worth less than all others: it goes first. Inserts it if not held."""

    def remove(self, entry: int) -> None:
        """``entry`` is gone; does nothing if it is not held."""

    def victim(self, evictable: Callable[[int], bool], limit: int) -> int | None:
        """The entry that goes next, no longer held; ``None`` if none of the first ``limit`` may.

        An entry that may not go now is dropped from the order; the catalog brings it back with
        :meth:`demote` (its last dependant went just now) or :meth:`insert`.
        """

    def __contains__(self, entry: int) -> bool:
        """Whether ``entry`` is held."""

    def __len__(self) -> int:
        """Entries held."""
