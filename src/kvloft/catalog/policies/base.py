"""What the catalog asks of an eviction policy, and what it tells one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of an entry when it is stored or used."""

    name: int = 0
    """64 bits of the hash of its prefix: the same whenever the same bytes come back."""
    seen: int = 0
    """Earlier requests whose prompts are known to have begun with this prefix, 2 for more."""
    group: int = 0
    """Its kind of prefix (:mod:`kvloft.catalog.sightings`)."""
    worth: float = 1.0
    """Tokens that need not be computed if it is found, per byte that is kept for it. 0: it may
    take what is free, and the place of what has been demoted, but of nothing else."""


NO_USE = Use()


class Sighting(NamedTuple):
    """A prompt has begun with a known prefix again, or with a new one."""

    name: int
    weight: float
    """How much of the prompt this prefix stands for, in units of 512 tokens."""
    before: int
    """Its group until now; negative if the prefix is new."""
    age: int
    """Prompts that have come in since it was last seen."""
    group: int
    """Its group from now on."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much there is to give away, and what it is given to."""

    budget: int
    """Bytes."""
    chunk_bytes: int
    """Of a full chunk."""
    resume_bytes: int
    """Of all else that one resume point needs; 0 where every boundary is one."""
    tokens_per_chunk: int


class EvictionPolicy(Protocol):
    """Orders entries for eviction. Every call takes O(1), amortised.

    Entries are small non-negative integers, reused after :meth:`remove`. The catalog says which
    entries may go at a given moment (leaves that nobody reads or writes); the policy only orders.
    """

    def insert(self, entry: int, use: Use | None) -> None:
        """An entry that is new or was just used. ``None``: neither, it only may go again; what is
        known of it is what was known when it was dropped (see :meth:`victim`)."""

    def demote(self, entry: int) -> None:
        """``entry`` is worth less than all others: it goes first. Inserts it if not held."""

    def revive(self, entry: int, after: int) -> None:
        """The last dependant of ``entry``, ``after``, has been evicted just now, so it may go
        itself: whoever used ``after`` used it as well."""

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
