"""Numbers that name whole prefixes, made from hashes that may name single blocks only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Chain:
    """Gives each distinct prefix a number, from 0 in the order in which they first appear.

    Published hashes come in two kinds: some cover everything before their block, some their block
    alone. Chaining is right for both: a number stands for a hash and the number before it. Where
    hashes are chained already every hash has one predecessor, and the numbers tell apart what the
    hashes do. Almost every hash has one in the other kind as well, which is why the first one is
    kept in flat arrays and only others cost a tuple each: millions of hashes are common.
    """

    def __init__(self) -> None:
        self._first: dict[int | str, int] = {}
        """Of each hash, the number it has after the predecessor it was first seen with."""
        self._parents = array("q")
        """Of each number, the one before it; negative: a root."""
        self._others: dict[tuple[int, int | str, int], int] = {}
        """What the two above can't say: predecessor, hash and, of partial blocks, tokens."""
        self._roots: dict[str, int] = {}

    def numbers(self, hashes: Sequence[int | str], tail: int, root: str = "") -> array[int]:
        """The numbers of a prompt's blocks.

        ``tail``: tokens in the last block if it is partial, else 0. A partial block is told apart
        from whole ones and from shorter ones: its end is a different prefix, whatever its hash is.
        """
        out = array("q")
        first, parents = self._first, self._parents
        number = self._roots.setdefault(root, -1 - len(self._roots))
        for hash_ in hashes[:-1] if tail else hashes:
            found = first.get(hash_)
            if found is None:
                found = first[hash_] = len(parents)
                parents.append(number)
            elif parents[found] != number:
                found = self._other(number, hash_, 0)
            out.append(found)
            number = found
        if tail:
            out.append(self._other(number, hashes[-1], tail))
        return out

    def _other(self, parent: int, hash_: int | str, tail: int) -> int:
        key = parent, hash_, tail
        found = self._others.get(key)
        if found is None:
            found = self._others[key] = len(self._parents)
            self._parents.append(parent)
        return found
