"""Prefixes that must stay for a while although nobody reads them: pins that end by themselves."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from kvloft.catalog.catalog import Catalog
from kvloft.catalog.tree import DOOMED, ROOT
from kvloft.keys import Keys

_MAX_SHARE = 0.5
"""Of the budget, that pins may hold together: the rest must stay free to move."""
_MAX_ENDED = 16
"""Pins that end in one call."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    keys: Keys
    depth: int
    seconds: float
    after: int


class Holds:
    """The pins of one catalog. What several of them share counts for each."""

    def __init__(self, catalog: Catalog) -> None:
        self.refused = 0
        """Pins that would have held too much, or for which nothing was there."""
        self.held_bytes = 0
        self._catalog = catalog
        self._limit = int(catalog.arena.budget * _MAX_SHARE)
        self._wanted: deque[_Wanted] = deque()
        self._held: list[tuple[float, int, int]] = []
        """Heap of ``(until, node, bytes)``."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, keys: Keys, depth: int, seconds: float, after: int) -> None:
        """Pin what is resident of a path of ``depth`` chunks once job ``after`` is no more under
        way: what the request has stored last is not there before."""
        self._wanted.append(_Wanted(keys, depth, seconds, after))

    def step(self, now: float, oldest_job: int) -> None:
        """Begin and end what is due. ``oldest_job``: the first store that is still under way."""
        while self._wanted and self._wanted[0].after <= oldest_job:
            self._hold(self._wanted.popleft(), now)
        for _ in range(_MAX_ENDED):
            if not self._held or self._held[0][0] > now:
                break
            self._end(heapq.heappop(self._held))

    def _hold(self, wanted: _Wanted, now: float) -> None:
        catalog, tree, plan = self._catalog, self._catalog.tree, self._catalog.plan
        node = tree.deepest(wanted.keys, wanted.depth, ready=True)
        while node != ROOT and not catalog.is_resume(node):
            node = tree.parent[node]
        depth = tree.depth[node]
        nbytes = depth * plan.full_chunk_bytes + plan.resume_bytes
        if node == ROOT or self.held_bytes + nbytes > self._limit:
            self.refused += 1
            return
        catalog.pin(node)
        self.held_bytes += nbytes
        heapq.heappush(self._held, (now + wanted.seconds, node, nbytes))

    def _end(self, held: tuple[float, int, int]) -> None:
        self._catalog.unpin(held[1])
        self.held_bytes -= held[2]

    def drop_forgotten(self) -> None:
        """End the pins of what the catalog has forgotten, which would take up room for nothing."""
        state = self._catalog.tree.state
        ended = [held for held in self._held if state[held[1]] == DOOMED]
        self._held = [held for held in self._held if state[held[1]] != DOOMED]
        heapq.heapify(self._held)
        for held in ended:
            self._end(held)

    def release(self) -> None:
        """End all pins."""
        self._wanted.clear()
        while self._held:
            self._end(self._held.pop())
