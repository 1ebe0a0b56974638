"""A bounded tier in ordinary memory: for tests, simulations, and as an example of the contract.

It takes its memory beside the arena's, so it makes no sense below one in production. Everything
happens on one thread, in the order of the calls, but that gets overtake puts.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Generic, TypeVar

import xxhash

from kvloft.tiers.base import Chunk, Namespace, Outcome, TierStats
from kvloft.units import format_size

_MAX_JOBS = 1 << 16
"""Of each kind that may wait, however small they are."""

_T = TypeVar("_T")
_Name = tuple[bytes, str]


@dataclass(slots=True, eq=False)
class Kept:
    """A chunk in a place."""

    chunk: Chunk
    data: bytes
    checksum: int
    home: dict[_Name, Kept]
    """All chunks of its namespace."""
    above: Kept | None
    """What it depends on."""
    used: int
    """When it was last used, in the place's ticks; 0 if it has been demoted."""
    below: dict[_Name, Kept] = field(default_factory=dict)
    """What depends on it."""

    @property
    def name(self) -> _Name:
        return (self.chunk.key, self.chunk.code)


class MemoryPlace:
    """What tiers keep; outlives them, and may be shared by several, as a disk is by processes."""

    def __init__(self) -> None:
        self.lock = Lock()
        """Held by whoever reads bytes or changes what is kept; a test that holds it stalls all
        tiers on this place. Names may be looked up without."""
        self.used_bytes = 0
        self._homes: dict[bytes, dict[_Name, Kept]] = {}
        self._ticks = itertools.count(1)
        self._leaves: list[tuple[int, int, Kept]] = []
        """A heap, by last use as it was known at the time. Whatever in it is no leaf any more, or
        has been used since, is found out when it comes up."""
        self._demoted: deque[Kept] = deque()

    def home(self, namespace: Namespace) -> dict[_Name, Kept]:
        """All chunks of a namespace."""
        return self._homes.setdefault(namespace.digest, {})

    def touch(self, kept: Kept) -> None:
        """It was used just now, and with it what it depends on. Needs no lock."""
        kept.used = next(self._ticks)

    def demote(self, kept: Kept) -> None:
        """It may go before all others. Needs no lock."""
        kept.used = 0
        self._demoted.append(kept)

    def add(self, kept: Kept) -> None:
        """Keep one more; the caller has made room."""
        self.used_bytes += kept.chunk.nbytes
        self.touch(kept)
        kept.home[kept.name] = kept
        if kept.above is not None:
            kept.above.below[kept.name] = kept
        self._push(kept)

    def remove(self, kept: Kept) -> int:
        """Remove a chunk and all that depends on it, children before parents; how many."""
        doomed = [kept]
        for one in doomed:
            doomed.extend(one.below.values())
        for one in reversed(doomed):
            del one.home[one.name]
            self.used_bytes -= one.chunk.nbytes
            one.below.clear()
            one.data = b""
        if (above := kept.above) is not None:
            del above.below[kept.name]
            above.used = max(above.used, kept.used)
            self._push(above)
        return len(doomed)

    def make_room(self, limit: int, parent: Kept | None = None) -> int:
        """Evict until no more than ``limit`` bytes are used, or nothing is left but ``parent`` and
        what it depends on; how many. Leaves only, those first that were used longest ago."""
        while self._demoted:
            self._push(self._demoted.popleft())
        evicted = 0
        while self.used_bytes > limit and self._leaves:
            used, _, kept = heappop(self._leaves)
            if kept is parent or kept.below or used > kept.used or not self._is_there(kept):
                continue
            if used < kept.used:
                self._push(kept)
            else:
                evicted += self.remove(kept)
        if parent is not None:
            self._push(parent)
        return evicted

    def _is_there(self, kept: Kept) -> bool:
        return kept.home.get(kept.name) is kept

    def _push(self, kept: Kept) -> None:
        if kept.below:
            return
        heappush(self._leaves, (kept.used, next(self._ticks), kept))
        homes = self._homes.values()
        if len(self._leaves) > 1000 + 2 * sum(map(len, homes)):
            leaves = [one for home in homes for one in home.values() if not one.below]
            self._leaves = [(one.used, next(self._ticks), one) for one in leaves]
            heapify(self._leaves)


@dataclass(slots=True, eq=False)
class _Job(Generic[_T]):
    kind: str
    nbytes: int
    deadline: float | None
    work: Callable[[], _T]
    late: _T
    failed: _T
    future: Future[_T] = field(default_factory=Future)


def _transfer(
    kind: str, chunk: Chunk, deadline: float | None, work: Callable[[], Outcome]
) -> _Job[Outcome]:
    return _Job(kind, chunk.nbytes, deadline, work, Outcome.LATE, Outcome.FAILED)


class MemoryTier:
    """One namespace's view of a :class:`MemoryPlace`."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        max_bytes: int,
        queue_bytes: int = 256 << 20,
        place: MemoryPlace | None = None,
    ) -> None:
        """``max_bytes``: of chunks in the place, those of others included. ``queue_bytes``: of
        chunks that wait to be put, and of as many that wait to be read; a single chunk may be
        larger. Without a ``place`` what is put goes with the tier."""
        self._place = place or MemoryPlace()
        self._home = self._place.home(namespace)
        self._has_full = namespace.has_full
        self._limit = max_bytes
        self._queue_bytes = queue_bytes
        self._reads: deque[_Job[Any]] = deque()
        self._writes: deque[_Job[Any]] = deque()
        self._queued: Counter[str] = Counter()
        self._queued_bytes: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {"put": Counter(), "get": Counter()}
        self._done_bytes: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._closed = False
        self._changed = Condition()
        with self._place.lock:
            self._evicted = self._place.make_room(max_bytes)
        self._thread = Thread(target=self._run, name="kvloft-memory-tier", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"memory ({format_size(self._limit)})"

    def holds(self, key: bytes, code: str) -> bool:
        return not self._closed and (key, code) in self._home

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        if self.holds(chunk.key, chunk.code):
            there: Future[Outcome] = Future()
            with self._changed:
                self._ended["put"][Outcome.DONE.value] += 1
            there.set_result(Outcome.DONE)
            return there
        return self._submit(_transfer("put", chunk, deadline, lambda: self._put(chunk, data)))

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self._submit(_transfer("get", chunk, deadline, lambda: self._get(chunk, into)))

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        none = [False] * len(chunks)
        job = _Job("contains", 0, deadline, lambda: self._contains(chunks), none, none)
        return self._submit(job)

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        job = _Job("delete", 0, None, lambda: self._delete(chunks), 0, 0)
        return self._submit(job)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        for kept in self._find(() if self._closed else chunks):
            self._place.touch(kept)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        for kept in self._find(() if self._closed else chunks):
            self._place.demote(kept)

    def scan(self) -> Iterator[Chunk]:
        there = [] if self._closed else [kept.chunk for kept in self._home.copy().values()]
        yield from sorted(there, key=lambda chunk: (chunk.depth, chunk.code != "f"))

    def stats(self) -> TierStats:
        with self._changed:
            return TierStats(
                limit_bytes=self._limit,
                used_bytes=self._place.used_bytes,
                chunks=0 if self._closed else len(self._home),
                queued_puts=self._queued["put"],
                queued_put_bytes=self._queued_bytes["put"],
                queued_gets=self._queued["get"],
                puts=dict(self._ended["put"]),
                gets=dict(self._ended["get"]),
                put_bytes=self._done_bytes["put"],
                get_bytes=self._done_bytes["get"],
                evicted_chunks=self._evicted,
                faults=dict(self._faults),
            )

    def close(self, timeout: float = 5.0) -> None:
        with self._changed:
            self._closed = True
            left = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
        for job in left:
            self._end(job, job.late)
        if current_thread() is not self._thread:
            self._thread.join(timeout)

    # ---------------------------------------------------------------- the queue

    def _submit(self, job: _Job[_T]) -> Future[_T] | None:
        # Its buffer is in use until it is done: it can't be cancelled.
        job.future.set_running_or_notify_cancel()
        kind = job.kind
        with self._changed:
            waiting = self._queued_bytes[kind]
            if self._closed or self._queued[kind] >= _MAX_JOBS:
                return None
            if waiting and waiting + job.nbytes > self._queue_bytes:
                return None
            self._queued[kind] += 1
            self._queued_bytes[kind] += job.nbytes
            (self._reads if kind in ("get", "contains") else self._writes).append(job)
            self._changed.notify()
        return job.future

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if job.deadline is not None and time.monotonic() >= job.deadline:
                self._end(job, job.late)
                continue
            try:
                result = job.work()
            except Exception as error:
                self._faults[type(error).__name__] += 1
                result = job.failed
            self._end(job, result)

    def _next(self) -> _Job[Any] | None:
        with self._changed:
            while not (self._reads or self._writes or self._closed):
                self._changed.wait()
            if self._closed:
                return None
            return (self._reads or self._writes).popleft()

    def _end(self, job: _Job[_T], result: _T) -> None:
        with self._changed:
            self._queued[job.kind] -= 1
            self._queued_bytes[job.kind] -= job.nbytes
            if isinstance(result, Outcome):
                self._ended[job.kind][result.value] += 1
                if result is Outcome.DONE:
                    self._done_bytes[job.kind] += job.nbytes
        # Last, and without a lock: callbacks may call back.
        job.future.set_result(result)

    # ---------------------------------------------------------------- the work

    def _put(self, chunk: Chunk, data: memoryview) -> Outcome:
        copy = bytes(data[: chunk.nbytes])
        if len(copy) < chunk.nbytes:
            raise ValueError(f"{len(copy)} of {chunk.nbytes} bytes")
        with self._place.lock:
            if (chunk.key, chunk.code) in self._home:
                return Outcome.DONE
            needs, above = self._needs(chunk), None
            if needs is not None and (above := self._home.get(needs)) is None:
                return Outcome.REFUSED
            room = self._limit - chunk.nbytes
            if room >= 0:
                self._evicted += self._place.make_room(room, above)
            if self._place.used_bytes > room:
                return Outcome.REFUSED
            checksum = xxhash.xxh3_64_intdigest(copy)
            self._place.add(Kept(chunk, copy, checksum, self._home, above, 0))
        return Outcome.DONE

    def _needs(self, chunk: Chunk) -> _Name | None:
        """What has to be there for ``chunk`` to be of use."""
        if not self._has_full:
            return None
        if chunk.code != "f":
            return (chunk.key, "f")
        return (chunk.parent, "f") if chunk.parent else None

    def _get(self, chunk: Chunk, into: memoryview) -> Outcome:
        with self._place.lock:
            kept = self._home.get((chunk.key, chunk.code))
            if kept is None:
                return Outcome.MISSING
            data = kept.data
        fault = "length" if len(data) != chunk.nbytes else ""
        if not fault:
            into[: chunk.nbytes] = data
            if xxhash.xxh3_64_intdigest(into[: chunk.nbytes]) != kept.checksum:
                fault = "checksum"
        if not fault:
            self._place.touch(kept)
            return Outcome.DONE
        self._faults[fault] += 1
        with self._place.lock:
            if self._home.get(kept.name) is kept:
                self._place.remove(kept)
        return Outcome.DAMAGED

    def _contains(self, chunks: Sequence[Chunk]) -> list[bool]:
        with self._place.lock:
            return [(chunk.key, chunk.code) in self._home for chunk in chunks]

    def _delete(self, chunks: Sequence[Chunk]) -> int:
        with self._place.lock:
            return sum(self._place.remove(kept) for kept in self._find(chunks))

    def _find(self, chunks: Sequence[Chunk]) -> Iterator[Kept]:
        for chunk in chunks:
            if (kept := self._home.get((chunk.key, chunk.code))) is not None:
                yield kept
