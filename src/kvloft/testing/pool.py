"""The reference engine's blocks: one pool for all groups, reused in LRU order, cached by prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

CacheKey = tuple[int, int, int]
"""``(group, block index, hash of the prefix that ends with the block)``."""


class BlockPool:
    """Block ids 1 to ``num_blocks - 1``; 0 is the null block. A block in use by nobody keeps what
    is in it, and can be found, until it is handed out again."""

    def __init__(self, num_blocks: int, on_allocate: Callable[[list[int]], None]) -> None:
        self.num_blocks = num_blocks
        self._on_allocate = on_allocate
        self._users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((n, None) for n in range(1, num_blocks))
        self._cached: dict[CacheKey, int] = {}
        self._key_of: dict[int, CacheKey] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Fresh blocks with undefined content; the caller has looked at :attr:`free`."""
        out = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            out.append(block)
        if out:
            self._on_allocate(out)
        return out

    def release(self, block: int) -> None:
        """End one use."""
        if self._users[block] < 1:
            raise AssertionError(f"block {block} is not in use")
        self._users[block] -= 1
        if not self._users[block]:
            self._free[block] = None

    def share(self, block: int) -> None:
        """Begin another use of a block that was found with :meth:`find`."""
        if not self._users[block]:
            del self._free[block]
        self._users[block] += 1

    def is_idle(self, block: int) -> bool:
        """Whether nobody uses the block."""
        return not self._users[block]

    def cache(self, block: int, key: CacheKey) -> None:
        """The block's content is final and named ``key``; the first block of a name keeps it."""
        if key not in self._cached and block not in self._key_of:
            self._cached[key] = block
            self._key_of[block] = key

    def find(self, key: CacheKey) -> int:
        """The block that holds ``key``; 0 if there is none."""
        return self._cached.get(key, 0)

    def drop_cache(self) -> None:
        """Forget what every block holds."""
        self._cached.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            del self._cached[key]
