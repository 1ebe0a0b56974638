"""A lower tier that keeps names only and answers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from kvloft.tiers.base import Chunk, Outcome, TierStats

_Name = tuple[bytes, str]


class BookTier:
    """Evicts what was used least lately of what nothing else needs."""

    name = "books"

    def __init__(self, limit: int) -> None:
        """``limit``: bytes."""
        self.written = 0
        """Bytes."""
        self._limit = limit
        self._used = 0
        self._chunks: dict[_Name, Chunk] = {}
        """The least recently used first."""
        self._dependants: dict[_Name, int] = {}

    def holds(self, key: bytes, code: str) -> bool:
        """As every tier does."""
        return (key, code) in self._chunks

    def _above(self, chunk: Chunk) -> _Name | None:
        if chunk.code != "f":
            return (chunk.key, "f")
        return (chunk.parent, "f") if chunk.parent else None

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Keep the name."""
        future: Future[Outcome] = Future()
        above, name = self._above(chunk), (chunk.key, chunk.code)
        if above is not None and above not in self._chunks:
            future.set_result(Outcome.REFUSED)
            return future
        if name not in self._chunks:
            self._used += chunk.nbytes
            self.written += chunk.nbytes
            if above is not None:
                self._dependants[above] = self._dependants.get(above, 0) + 1
        self._chunks[name] = chunk
        while self._used > self._limit:
            self._evict()
        future.set_result(Outcome.DONE)
        return future

    def _evict(self) -> None:
        name = next(n for n in self._chunks if not self._dependants.get(n))
        chunk = self._chunks.pop(name)
        self._used -= chunk.nbytes
        self._dependants.pop(name, None)
        if (above := self._above(chunk)) is not None:
            self._dependants[above] -= 1

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Nothing is copied."""
        future: Future[Outcome] = Future()
        there = (chunk.key, chunk.code) in self._chunks
        future.set_result(Outcome.DONE if there else Outcome.MISSING)
        return future

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """These, and all that they build upon, were used."""
        for chunk in chunks:
            path: list[_Name] = []
            name: _Name | None = (chunk.key, chunk.code)
            while name is not None and (found := self._chunks.get(name)) is not None:
                path.append(name)
                name = self._above(found)
            for name in path:
                self._chunks[name] = self._chunks.pop(name)

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        """Never asked here."""
        return None

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        """Never asked here."""
        return None

    def demote(self, chunks: Sequence[Chunk]) -> None:
        """These go first, as far as nothing needs them."""
        for chunk in chunks:
            name = (chunk.key, chunk.code)
            if (found := self._chunks.pop(name, None)) is not None:
                self._chunks = {name: found} | self._chunks

    def scan(self) -> Iterator[Chunk]:
        """All names."""
        yield from self._chunks.values()

    def stats(self) -> TierStats:
        """Nothing of it is asked here."""
        return TierStats(self._limit, self._used, len(self._chunks), 0, 0, 0)

    def close(self, timeout: float = 5.0) -> None:
        """Nothing to do: the books stay for the next engine."""
