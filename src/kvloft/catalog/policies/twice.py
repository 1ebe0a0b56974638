"""Least recently used among what has been asked for at least twice.

Of what a chat service computes, most is never asked for again: storing it pushes out what would be.
The price is that everything is computed twice.
"""

from __future__ import annotations

from kvloft.catalog.policies.lru import LRU
from kvloft.catalog.uses import Use


class Twice(LRU):
    """LRU that stores a prefix once it is known to come back."""

    def admits(self, use: Use) -> bool:
        return use.seen > 0
