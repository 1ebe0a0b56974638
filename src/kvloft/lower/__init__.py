"""The tiers below host memory as one engine uses them: what to write there, what to bring back."""

from kvloft.lower.promotion import Promoter, PromotionCounters, Wait
from kvloft.lower.shelf import LowerTier, Shelf
from kvloft.lower.writing import WriteCounters, Writer

__all__ = [
    "LowerTier",
    "Promoter",
    "PromotionCounters",
    "Shelf",
    "Wait",
    "WriteCounters",
    "Writer",
]
