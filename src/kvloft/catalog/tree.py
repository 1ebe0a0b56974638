"""The prefix tree of boundaries.

A node is one boundary of one prefix: ``G·depth`` tokens, named by the engine's hash of all of them.
It owns the full chunk that ends there. The tree is prefix-closed (a node's parent is in it), which
is what makes :meth:`Tree.deepest` a binary search: if the node at depth i is there, all above are.

A million nodes as Python objects would stall the engine whenever the garbage collector walks them
(0.1 s and more), and one dict of them whenever it grows. Hence columns of plain integers, which the
collector does not see, node ids that are reused, and an index in 256 parts, so that growing one of
them moves a 256th. vLLM's own manager keeps an ordered dict per block and pays both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvloft.keys import Keys

ROOT = 0
NONE = -1

FREE, WRITING, READY, DOOMED = range(4)
"""States of a node: unused; its chunk is being written; resident; forgotten, but still pinned."""

_SHARDS = 256


def gallop(limit: int, there: Callable[[int], bool]) -> int:
    """The greatest depth up to ``limit`` for which ``there`` holds; 0 if there is none.

    ``there`` holds for all depths up to the one sought and for none beyond it. A probe at the
    limit, then doubling steps, then bisection; the last probe that held is the answer.
    """
    if limit <= 0:
        return 0
    if there(limit):
        return limit
    low, high, step = 0, limit, 1
    while low + step < high:
        if not there(low + step):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if there(middle):
            low = middle
        else:
            high = middle
    return low


class Tree:
    """Nodes, their links and their index. Knows nothing of memory or of eviction."""

    def __init__(self, tokens_per_chunk: int) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.state = array("b", [READY])
        self.depth = array("i", [0])
        self.parent = array("i", [NONE])
        self.first_child = array("i", [NONE])
        self._next = array("i", [NONE])
        self._prev = array("i", [NONE])
        self.pins = array("i", [1])
        """Readers and writers that need the node to stay; the root is pinned for ever."""
        self._keys = bytearray()
        self._key_bytes = 0
        self._index: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._unused = array("i")

    def __len__(self) -> int:
        """Nodes in use, without the root."""
        return len(self.state) - 1 - len(self._unused)

    @property
    def capacity(self) -> int:
        """One more than the greatest node id."""
        return len(self.state)

    def find(self, key: bytes) -> int:
        """The node of a prefix, resident or being written; ``NONE`` if there is none."""
        return self._index[key[0]].get(key, NONE)

    def deepest(self, keys: Keys, limit: int, *, ready: bool) -> int:
        """The deepest node on a path, no deeper than ``limit`` chunks; the root if there is none.

        With ``ready``, nodes that are still being written do not count. O(log limit) look-ups: a
        probe at the limit, then doubling steps, then bisection.
        """
        size, index, state = self.tokens_per_chunk, self._index, self.state
        least = READY if ready else WRITING

        best = ROOT

        def there(depth: int) -> bool:
            nonlocal best
            key = keys(depth * size)
            node = index[key[0]].get(key, NONE)
            if node < 0 or state[node] < least:
                return False
            best = node
            return True

        gallop(limit, there)
        return best

    def add_path(self, parent: int, keys: Sequence[bytes]) -> list[int]:
        """New nodes in state WRITING below ``parent``, each the child of the one before."""
        if not keys:
            return []
        if not self._key_bytes:
            self._key_bytes = len(keys[0])
            self._keys = bytearray(self._key_bytes)
        nodes = self._take(len(keys))
        width, names, index = self._key_bytes, self._keys, self._index
        first_child, depth = self.first_child, self.depth[parent]
        above = parent
        for node, below, key in zip(nodes, [*nodes[1:], NONE], keys, strict=True):
            depth += 1
            self.state[node] = WRITING
            self.depth[node] = depth
            self.parent[node] = above
            first_child[node] = below
            self._next[node] = self._prev[node] = NONE
            self.pins[node] = 0
            names[node * width : (node + 1) * width] = key
            index[key[0]][key] = above = node
        sibling, first = first_child[parent], nodes[0]
        self._next[first] = sibling
        if sibling >= 0:
            self._prev[sibling] = first
        first_child[parent] = first
        return nodes

    def _take(self, count: int) -> list[int]:
        """Ids that are not in use."""
        again = min(count, len(self._unused))
        nodes = self._unused[len(self._unused) - again :].tolist()
        del self._unused[len(self._unused) - again :]
        nodes.reverse()
        start, missing = len(self.state), count - again
        if missing:
            empty = array("i", [NONE]) * missing
            for column in (self.depth, self.parent, self.first_child, self._next, self._prev):
                column.extend(empty)
            self.state.extend([FREE] * missing)
            self.pins.extend([0] * missing)
            self._keys.extend(bytes(self._key_bytes * missing))
            nodes += range(start, start + missing)
        return nodes

    def key(self, node: int) -> bytes:
        """The hash that names ``node``."""
        width = self._key_bytes
        return bytes(self._keys[node * width : (node + 1) * width])

    def name(self, node: int) -> int:
        """64 bits of the hash that names ``node``."""
        at = node * self._key_bytes
        return int.from_bytes(self._keys[at : at + 8], "little")

    def unindex(self, node: int) -> None:
        """Make ``node`` impossible to find; it keeps its links."""
        key = self.key(node)
        shard = self._index[key[0]]
        if shard.get(key) == node:
            del shard[key]

    def remove(self, node: int) -> int:
        """Remove a childless node; returns its parent."""
        self.unindex(node)
        parent, before, after = self.parent[node], self._prev[node], self._next[node]
        if before >= 0:
            self._next[before] = after
        else:
            self.first_child[parent] = after
        if after >= 0:
            self._prev[after] = before
        self.state[node] = FREE
        self._unused.append(node)
        return parent

    def has_children(self, node: int) -> bool:
        """Whether any node hangs below ``node``."""
        return self.first_child[node] >= 0

    def children(self, node: int) -> Iterator[int]:
        """The nodes that hang below ``node``."""
        child = self.first_child[node]
        while child >= 0:
            yield child
            child = self._next[child]

    def only_child(self, node: int) -> bool:
        """Whether ``node`` has no siblings."""
        return self._next[node] < 0 and self._prev[node] < 0

    def path(self, node: int, stop: int = ROOT) -> list[int]:
        """The nodes from below ``stop`` down to ``node``."""
        out = []
        while node != stop and node > ROOT:
            out.append(node)
            node = self.parent[node]
        out.reverse()
        return out

    def ancestor(self, node: int, steps: int) -> int:
        """The node ``steps`` above ``node``."""
        for _ in range(steps):
            node = self.parent[node]
        return node
