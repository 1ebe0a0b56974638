"""A lower tier in a directory that any number of engines share."""

from kvloft.tiers.disk.store import Store
from kvloft.tiers.disk.tier import DiskTier
from kvloft.tiers.disk.tools import StoreTools

__all__ = ["DiskTier", "Store", "StoreTools"]
