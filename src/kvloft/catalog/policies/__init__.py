"""Eviction policies, one class and file each, behind the protocol in :mod:`.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvloft.catalog.policies.adaptive import Adaptive
from kvloft.catalog.policies.arc import ARC
from kvloft.catalog.policies.base import EvictionPolicy
from kvloft.catalog.policies.cost import CostAware
from kvloft.catalog.policies.density import Density
from kvloft.catalog.policies.lru import LRU
from kvloft.catalog.policies.s3fifo import S3FIFO
from kvloft.catalog.policies.twice import Twice
from kvloft.catalog.uses import Room, Sighting, Use

DEFAULT_POLICY = "adaptive"
POLICIES: Mapping[str, Callable[[Room], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "arc": lambda room: ARC(),
    "cost": lambda room: CostAware(),
    "density": lambda room: Density(),
    "lru": lambda room: LRU(),
    "s3fifo": lambda room: S3FIFO(),
    "twice": lambda room: Twice(),
}
"""By the name that a user gives as ``eviction_policy``."""

__all__ = [
    "ARC", "DEFAULT_POLICY", "LRU", "POLICIES", "S3FIFO", "Adaptive", "CostAware", "Density",
    "EvictionPolicy", "Room", "Sighting", "Twice", "Use",
]  # fmt: skip
