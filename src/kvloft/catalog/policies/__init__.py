"""Eviction policies, one class and file each, behind the protocol in :mod:`.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvloft.catalog.policies.base import EvictionPolicy
from kvloft.catalog.policies.lru import LRU

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LRU}
"""By the name that a user gives as ``eviction_policy``."""

__all__ = ["LRU", "POLICIES", "EvictionPolicy"]
