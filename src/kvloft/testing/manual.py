"""A lower tier that does nothing by itself: tests decide what ends when, and how."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from kvloft.tiers.base import Chunk, Outcome, TierStats

_Name = tuple[bytes, str]


class ManualPlace:
    """What a :class:`ManualTier` keeps; outlives it, as a disk outlives a process."""

    def __init__(self) -> None:
        self.held: dict[_Name, tuple[Chunk, bytes]] = {}

    def parent_name(self, chunk: Chunk) -> _Name | None:
        """What must be there for ``chunk`` to be of use."""
        if chunk.code != "f":
            return (chunk.key, "f")
        return (chunk.parent, "f") if chunk.parent else None

    def remove(self, name: _Name) -> None:
        """Remove a chunk and all that depends on it."""
        if self.held.pop(name, None) is not None:
            for other, (chunk, _) in list(self.held.items()):
                if other in self.held and self.parent_name(chunk) == name:
                    self.remove(other)


class ManualTier:
    """A tier without threads: each call of :meth:`work` ends one put or get.

    ``faults``: the chance that one ends as something else than DONE. ``limit``: chunks; beyond it a
    leaf is evicted at random.
    """

    def __init__(
        self, place: ManualPlace, rng: random.Random, *, has_full: bool = True,
        faults: float = 0.0, limit: int = 1 << 60, queue: int = 1 << 60,
    ) -> None:  # fmt: skip
        self.place = place
        self.faults = faults
        self.reads = self.writes = 0
        """Gets and puts that ended DONE."""
        self._rng = rng
        self._limit = limit
        self._queue = queue
        self.has_full = has_full
        self._jobs: list[tuple[Chunk, memoryview, Future[Outcome], bool]] = []

    @property
    def name(self) -> str:
        return "manual"

    @property
    def pending(self) -> int:
        """Puts and gets that have not ended."""
        return len(self._jobs)

    def holds(self, key: bytes, code: str) -> bool:
        return (key, code) in self.place.held

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self._accept(chunk, data, writes=True)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self._accept(chunk, into, writes=False)

    def _accept(self, chunk: Chunk, data: memoryview, *, writes: bool) -> Future[Outcome] | None:
        if len(self._jobs) >= self._queue:
            return None
        future: Future[Outcome] = Future()
        self._jobs.append((chunk, data, future, writes))
        return future

    def work(self) -> bool:
        """End one put or get; gets in any order, puts in theirs. Whether there was one."""
        if not self._jobs:
            return False
        puts = [job for job in self._jobs if job[3]]
        job = self._rng.choice([job for job in self._jobs if not job[3]] + puts[:1])
        self._jobs.remove(job)
        chunk, data, future, writes = job
        if self._rng.random() < self.faults:
            outcome = self._rng.choice([Outcome.FAILED, Outcome.LATE, Outcome.REFUSED])
            if not writes:
                outcome = self._fail(chunk, data)
        else:
            outcome = self._write(chunk, data) if writes else self._read(chunk, data)
        future.set_result(outcome)
        return True

    def _fail(self, chunk: Chunk, data: memoryview) -> Outcome:
        outcome = self._rng.choice([Outcome.FAILED, Outcome.LATE, Outcome.MISSING, Outcome.DAMAGED])
        if outcome in (Outcome.MISSING, Outcome.DAMAGED):
            self.place.remove((chunk.key, chunk.code))
        data[:] = bytes([0xDB]) * len(data)
        return outcome

    def _write(self, chunk: Chunk, data: memoryview) -> Outcome:
        held, name = self.place.held, (chunk.key, chunk.code)
        above = self.place.parent_name(chunk)
        if self.has_full and above is not None and above not in held:
            return Outcome.REFUSED
        held[name] = (chunk, bytes(data[: chunk.nbytes]))
        self.writes += 1
        while len(held) > self._limit:
            parents = {self.place.parent_name(other) for other, _ in held.values()}
            leaves = [other for other in held if other not in parents and other != name]
            if not leaves:
                self.place.remove(name)
                return Outcome.REFUSED
            self.place.remove(self._rng.choice(leaves))
        return Outcome.DONE

    def _read(self, chunk: Chunk, into: memoryview) -> Outcome:
        found = self.place.held.get((chunk.key, chunk.code))
        if found is None:
            return Outcome.MISSING
        if found[0] != chunk:
            raise AssertionError(f"{chunk} was put as {found[0]}")
        into[: chunk.nbytes] = found[1]
        self.reads += 1
        return Outcome.DONE

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        future: Future[list[bool]] = Future()
        future.set_result([self.holds(chunk.key, chunk.code) for chunk in chunks])
        return future

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        before = len(self.place.held)
        for chunk in chunks:
            self.place.remove((chunk.key, chunk.code))
        future: Future[int] = Future()
        future.set_result(before - len(self.place.held))
        return future

    def touch(self, chunks: Sequence[Chunk]) -> None:
        pass

    def demote(self, chunks: Sequence[Chunk]) -> None:
        pass

    def scan(self) -> Iterator[Chunk]:
        yield from sorted(
            (chunk for chunk, _ in self.place.held.values()), key=lambda c: (c.depth, c.code != "f")
        )

    def stats(self) -> TierStats:
        return TierStats(self._limit, len(self.place.held), len(self.place.held), 0, 0, 0)

    def close(self, timeout: float = 5.0) -> None:
        for _, _, future, _ in self._jobs:
            future.set_result(Outcome.LATE)
        self._jobs.clear()
