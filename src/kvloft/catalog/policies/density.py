"""Hit density: keeps what is most likely to come back soon, per byte, as the prompts have shown.

:mod:`kvloft.catalog.reuse` says how likely that is for a kind of prefix that has not been used for
so long. The chance does not simply fall with age: a conversation goes on after its user has read
the answer, so it rises first. So an order by last use does not do, neither within a kind nor over
all; and what is least worth keeping may be the very thing that is about to be stored, which is then
not stored at all.

Entries that are of one kind, of about the same worth per byte and last used by the same prompt are
always worth the same: they form a *cohort*. The cohorts of one kind and worth whose ages are in the
same bucket form a *rank*, which has one value until the chances are estimated anew. The victim is
the first entry of the oldest cohort of the least rank. Cohorts move to the next rank as they age:
some dozens of them at a prompt, however many entries there are.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from kvloft.catalog.policies.lists import Lists
from kvloft.catalog.reuse import BUCKETS, EDGES, Reuse, bucket_of
from kvloft.catalog.sightings import seen_of
from kvloft.catalog.uses import NO_USE, Sighting, Use

_UNKNOWN = -1
_DEMOTED = 0
"""The cohort of what goes first, which is of no rank."""
_TIME_BITS = 40
_TIME_MASK = (1 << _TIME_BITS) - 1
_CHECKS = 8
"""A rank's oldest cohort is looked at this often while cohorts stay in it."""
_PERIODS = [max(1, int(EDGES[b + 1] - EDGES[b]) // _CHECKS) for b in range(BUCKETS - 1)]


class Density:
    """See above."""

    def __init__(self, reuse: Reuse | None = None) -> None:
        """``reuse``: another's estimates, which it keeps; then :meth:`learnt` takes the place of
        :meth:`saw`."""
        self._entries = Lists(1)
        """One list for each cohort."""
        self._cohorts = Lists(0)
        """One list for each rank: that of kind k and bucket b has the number k * BUCKETS + b."""
        self._numbers: dict[int, int] = {}
        """Of the cohorts that have entries, by kind and last use."""
        self._unused: list[int] = []
        self._names = array("q", [0])
        """By cohort: its kind and last use."""
        self._kinds: dict[tuple[int, int], int] = {}
        self._groups: list[int] = []
        self._worths: list[float] = []
        self._members: dict[int, list[int]] = {}
        """The kinds of each group."""
        self._values = np.full(0, math.inf)
        """By rank; infinite where there is nothing."""
        self._lowest = _UNKNOWN
        """The rank of the least value, while nothing has changed that."""
        self._least = math.inf
        self._occupied: list[set[int]] = [set() for _ in range(BUCKETS)]
        """By bucket: the kinds that have cohorts of that age."""
        self._name = array("q")
        """By entry, held or not: the kind and last use that it had when it was last held."""
        self._reuse = reuse or Reuse()

    @property
    def reuse(self) -> Reuse:
        """What has been learnt."""
        return self._reuse

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: int) -> bool:
        return entry in self._entries

    # ---------------------------------------------------------------- entries

    def insert(self, entry: int, use: Use | None) -> None:
        self._reach(entry)
        self._leave(entry)
        if use is not None:
            if use.worth <= 0:
                self._entries.push(entry, _DEMOTED)
                return
            kind = self._kind_of(use.group, use.worth)
            self._name[entry] = kind << _TIME_BITS | self._reuse.now
        self._entries.append(entry, self._cohort(self._name[entry]))

    def insert_path(self, entries: Sequence[int], name_of: Callable[[int], int], use: Use) -> None:
        self._reach(max(entries))
        if use.worth <= 0:
            for entry in entries:
                self.insert(entry, use)
            return
        for entry in entries:
            self._leave(entry)
        name = self._kind_of(use.group, use.worth) << _TIME_BITS | self._reuse.now
        self._entries.extend(entries, self._cohort(name))
        for entry in entries:
            self._name[entry] = name

    def demote(self, entry: int) -> None:
        self._reach(entry)
        self._leave(entry)
        self._entries.push(entry, _DEMOTED)

    def revive(self, entry: int, after: int) -> None:
        self._reach(max(entry, after))
        self._leave(entry)
        name = self._name[entry] = self._latest(entry, after)
        self._entries.push(entry, self._cohort(name))

    def _latest(self, entry: int, after: int) -> int:
        """The name of ``after``, which ``entry`` was used with, unless its own says more."""
        mine, other = self._name[entry], self._name[after]
        if other & _TIME_MASK >= mine & _TIME_MASK and self._seen(other) >= self._seen(mine):
            return other
        return mine

    def follow(self, entry: int, after: int) -> bool:
        entries = self._entries
        if entries.heads[_DEMOTED] >= 0:
            return False
        if entry in entries:
            if (
                self._lowest == _UNKNOWN
                or entries.heads[self._cohorts.heads[self._lowest]] != entry
            ):
                return False
            self._leave(entry)
            return True
        # It would become the first one of the cohort that has just given the victim.
        self._reach(max(entry, after))
        return self._latest(entry, after) == self._name[after]

    def remove(self, entry: int) -> None:
        self._leave(entry)

    def admits(self, use: Use) -> bool:
        return True

    def _reach(self, entry: int) -> None:
        missing = entry + 1 - len(self._name)
        if missing > 0:
            name = self._kind_of(NO_USE.group, NO_USE.worth) << _TIME_BITS
            self._name.extend([name] * missing)

    def _seen(self, name: int) -> int:
        return seen_of(self._groups[name >> _TIME_BITS])

    # ---------------------------------------------------------------- cohorts and ranks

    def _kind_of(self, group: int, worth: float) -> int:
        level = round(2 * math.log2(worth))
        kind = self._kinds.get((group, level))
        if kind is None:
            kind = self._kinds[group, level] = len(self._groups)
            self._groups.append(group)
            self._worths.append(2 ** (level / 2))
            self._members.setdefault(group, []).append(kind)
            for _ in range(BUCKETS):
                self._cohorts.add_list()
            self._values = np.append(self._values, np.full(BUCKETS, math.inf))
        return kind

    def _cohort(self, name: int) -> int:
        """The cohort of a kind and last use, made if there is none."""
        cohort = self._numbers.get(name)
        if cohort is None:
            if self._unused:
                cohort = self._unused.pop()
            else:
                cohort = self._entries.add_list()
                self._names.append(0)
            self._names[cohort] = name
            self._numbers[name] = cohort
            self._rank(cohort)
        return cohort

    def _rank(self, cohort: int) -> None:
        """Put a cohort where its age belongs."""
        name = self._names[cohort]
        kind, last = name >> _TIME_BITS, name & _TIME_MASK
        bucket = bucket_of(self._reuse.now - last)
        rank = kind * BUCKETS + bucket
        cohorts = self._cohorts
        if not cohorts.sizes[rank]:
            self._occupied[bucket].add(kind)
            self._values[rank] = self._reuse.index[self._groups[kind]][bucket] * self._worths[kind]
            self._lowest = _UNKNOWN
        tail = cohorts.tails[rank]
        # One that comes back in between is rare, and going a little early does no harm.
        if tail >= 0 and last < self._names[tail] & _TIME_MASK:
            cohorts.push(cohort, rank)
        else:
            cohorts.append(cohort, rank)

    def _leave(self, entry: int) -> None:
        cohort = self._entries.remove(entry)
        if cohort > _DEMOTED and not self._entries.sizes[cohort]:
            self._unrank(cohort)
            del self._numbers[self._names[cohort]]
            self._unused.append(cohort)

    def _unrank(self, cohort: int) -> None:
        rank = self._cohorts.remove(cohort)
        if not self._cohorts.sizes[rank]:
            kind, bucket = divmod(rank, BUCKETS)
            self._occupied[bucket].discard(kind)
            self._values[rank] = math.inf
            self._lowest = _UNKNOWN

    # ---------------------------------------------------------------- eviction

    def victim(
        self, evictable: Callable[[int], bool], limit: int, newcomer: Use | None = None
    ) -> int | None:
        entries, values = self._entries, self._values
        bar = math.inf if newcomer is None else self._value(newcomer)
        for _ in range(limit):
            entry = entries.heads[_DEMOTED]
            if entry < 0:
                if not len(entries):
                    return None
                if self._lowest == _UNKNOWN:
                    self._lowest = int(values.argmin())
                    self._least = float(values[self._lowest])
                rank = self._lowest
                if self._least >= bar:
                    return None
                entry = entries.heads[self._cohorts.heads[rank]]
            self._leave(entry)
            if evictable(entry):
                return entry
        return None

    def _value(self, use: Use) -> float:
        return self._reuse.index[use.group][0] * use.worth

    # ---------------------------------------------------------------- time

    def saw(self, sightings: Sequence[Sighting]) -> None:
        self.learnt(self._reuse.saw(sightings))

    def learnt(self, group: int) -> None:
        """A prompt has come in, and the index of ``group`` is new."""
        for kind in self._members.get(group, ()):
            index, worth, first = self._reuse.index[group], self._worths[kind], kind * BUCKETS
            for bucket in range(BUCKETS):
                if self._cohorts.sizes[first + bucket]:
                    self._values[first + bucket] = index[bucket] * worth
            self._lowest = _UNKNOWN
        self._grow_older()

    def _grow_older(self) -> None:
        now, cohorts, names = self._reuse.now, self._cohorts, self._names
        for bucket, period in enumerate(_PERIODS):
            if now % period or not self._occupied[bucket]:
                continue
            for kind in tuple(self._occupied[bucket]):
                rank = kind * BUCKETS + bucket
                while (oldest := cohorts.heads[rank]) >= 0:
                    if now - (names[oldest] & _TIME_MASK) < EDGES[bucket + 1]:
                        break
                    self._unrank(oldest)
                    self._rank(oldest)
