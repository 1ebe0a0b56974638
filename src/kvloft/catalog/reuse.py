"""How likely a prefix comes back, by its kind and by how long it has not: learnt from the prompts.

For each group of prefixes (:mod:`kvloft.catalog.sightings`) the chance of coming back at an age, in
prompts, is estimated by Kaplan and Meier's rule (1958): of the prefixes that reached that age, how
many came back at it; those that are still waiting count for as long as they have waited, so that
the young ones do not look hopeless. It takes no notice of what the cache holds, and so does not
mistake what it has pushed out itself for what nobody wants. Groups with few observations borrow
from the groups like them, those from all, and these from the rule of thumb that an age's chance is
inversely proportional to it; until something has been learnt this makes an LRU.

From the chances follows an index for each group and age: the greatest ratio, over all times that
one might go on keeping the prefix, of the chance that it comes back within that time to the time it
is then expected to take up room. That is Gittins' index (1979) of a prefix that is used once; what
is worth least goes first. Hit density (Beckmann et al., NSDI 2018) has the same aim with one common
horizon.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from operator import mul

import numpy as np

from kvloft.catalog.sightings import GROUPS, LENGTHS
from kvloft.catalog.uses import Sighting

BUCKETS = 36
"""Ages in steps of the square root of two; the last one is open."""

_KINDS = GROUPS // LENGTHS
_ALL = GROUPS + _KINDS
_PRIOR = 0.03
"""Chance per bucket that a prefix of which nothing is known comes back."""
_PRIOR_WEIGHT = 100.0
_GROUP_WEIGHT = 400.0
"""In chunks of 512 tokens: what an opinion borrowed from others weighs beside observations."""
_RATIO_WEIGHT = 50.0
_SLOT = 64
_MAX_SLOTS = 512
_HALVING = 1 << 15
"""Prompts after which what has been observed counts half."""


def bucket_of(age: int) -> int:
    """The bucket of an age in prompts."""
    return min(BUCKETS - 1, (age * age).bit_length())


EDGES = [0.0, *(2 ** ((k - 1) / 2) for k in range(1, BUCKETS + 1))]
_WIDTHS = np.array([max(1.0, EDGES[k + 1] - EDGES[k]) for k in range(BUCKETS)])
_LATER = np.triu(np.ones((BUCKETS, BUCKETS), dtype=bool))
_SPANS = np.where(_LATER, _WIDTHS, 0.0) - np.diag(_WIDTHS / 2)
"""Prompts spent in each bucket (column) from each on (row): the one at hand is half over."""


def index_of(chances: Sequence[float]) -> list[float]:
    """The index at each age from the chance of coming back in each bucket, given it is reached.

    Per prompt of expected waiting. The bucket at hand is half over on average.
    """
    coming = np.asarray(chances)
    # A row for each age to start from. Taking differences of one row instead would lose the late
    # ages in rounding, as next to nothing reaches them.
    reached = np.ones((BUCKETS, BUCKETS))
    reached[:, 1:] = np.cumprod(np.where(_LATER, 1 - coming, 1.0), axis=1)[:, :-1]
    found = np.cumsum(np.where(_LATER, reached * coming, 0.0), axis=1)
    waited = np.cumsum(reached * (1 - coming / 2) * _SPANS, axis=1)
    ratios = np.divide(found, waited, out=np.zeros_like(found), where=_LATER)
    index: list[float] = ratios.max(axis=1).tolist()
    return index


class Reuse:
    """The estimates. A prompt costs O(1) but for its sightings: one group is worked out anew."""

    def __init__(self) -> None:
        self.now = 0
        """Prompts seen."""
        self._came_back = [array("d", [0.0]) * BUCKETS for _ in range(_ALL + 1)]
        """By group, then by kind (groups that differ in length alone), then all, and by age."""
        self._given_up = [array("d", [0.0]) * BUCKETS for _ in range(_ALL + 1)]
        """Not come back for as long as anybody kept count."""
        self._waiting: list[dict[int, float]] = [{} for _ in range(_ALL + 1)]
        """By group and slot of time in which they were last seen."""
        prior = [_PRIOR] * BUCKETS
        self._chances: dict[int, list[float]] = {}
        self._prior = prior
        first = index_of(prior)
        self.index = [first] * GROUPS
        """By group and bucket of age."""
        self._active: list[int] = []
        self._turn = 0

    def saw(self, sightings: Sequence[Sighting]) -> int:
        """A prompt has come in. Returns the group whose index is new; negative for none."""
        self.now += 1
        together: Counter[tuple[int, int, int]] = Counter()
        for _, weight, before, age, group in sightings:
            together[before, age, group] += weight  # type: ignore[assignment]
        slot = self.now // _SLOT
        for (before, age, group), weight in together.items():
            if before >= 0:
                bucket, then = bucket_of(age), (self.now - age) // _SLOT
                for level in (before, GROUPS + before // LENGTHS, _ALL):
                    self._came_back[level][bucket] += weight
                    waiting = self._waiting[level]
                    if then in waiting:
                        waiting[then] = max(0.0, waiting[then] - weight)
            if not self._waiting[group]:
                self._active.append(group)
            for level in (group, GROUPS + group // LENGTHS, _ALL):
                waiting = self._waiting[level]
                waiting[slot] = waiting.get(slot, 0.0) + weight
        if not self.now % _HALVING:
            self._halve()
        return self._learn_one()

    def _halve(self) -> None:
        for table in (*self._came_back, *self._given_up):
            for at in range(BUCKETS):
                table[at] /= 2

    def _learn_one(self) -> int:
        if not self._active:
            return -1
        self._turn += 1
        if self._turn >= len(self._active):
            self._turn = 0
            self._chances[_ALL] = self._learn(_ALL, self._prior, _PRIOR_WEIGHT)
            self._chances = {_ALL: self._chances[_ALL]}
        group = self._active[self._turn]
        kind = GROUPS + group // LENGTHS
        if kind not in self._chances:
            above = self._chances.get(_ALL, self._prior)
            self._chances[kind] = self._learn(kind, above, _PRIOR_WEIGHT)
        self.index[group] = index_of(self._learn(group, self._chances[kind], _GROUP_WEIGHT))
        return group

    def _learn(self, level: int, prior: Sequence[float], weight: float) -> list[float]:
        """The chance of coming back in each bucket of age."""
        waiting, lost = self._waiting[level], self._given_up[level]
        still = list(lost)
        slot = self.now // _SLOT
        while waiting and slot - (oldest := next(iter(waiting))) > _MAX_SLOTS:
            amount = waiting.pop(oldest)
            lost[bucket_of((slot - oldest) * _SLOT)] += amount
            still[bucket_of((slot - oldest) * _SLOT)] += amount
        middle = self.now - _SLOT // 2
        for then, amount in waiting.items():
            # bucket_of, written out: the loop is most of a prompt's work, and none is in the last.
            age = middle - then * _SLOT
            still[(age * age).bit_length() if age > 0 else 0] += amount
        came_back, risk = self._came_back[level], 0.0
        at_risk = [0.0] * BUCKETS
        for at in range(BUCKETS - 1, -1, -1):
            risk += came_back[at] + still[at]
            # Those that wait in this very bucket have been through half of it.
            at_risk[at] = risk - still[at] / 2
        expected = sum(map(mul, at_risk, prior))
        ratio = (sum(came_back) + _RATIO_WEIGHT) / (expected + _RATIO_WEIGHT)
        return [
            min(1.0, (back + weight * ratio * usual) / (those + weight))
            for back, usual, those in zip(came_back, prior, at_risk, strict=True)
        ]
