"""The tier: a store with threads and queues in front of it, which never raises and never blocks.

A few threads read and write, gets first; one more, the keeper, does what wants to be done every
second. A thread takes several puts at once, reserves places for all of them under one lock, writes
them, and publishes them under one lock again. Puts may end in another order than they came in, but
a chunk is only ever published after what it rests on: if that is still being written, by another
thread perhaps, its own end waits for that one's.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvloft.errors import ConfigError
from kvloft.tiers.base import Chunk, Namespace, Outcome, TierStats
from kvloft.tiers.disk.control import LockedError, StrangeError
from kvloft.tiers.disk.faults import DiskFaults
from kvloft.tiers.disk.format import Record, check_chunk, chunk_name, reservation
from kvloft.tiers.disk.places import Place, runs
from kvloft.tiers.disk.room import FIXED_BYTES, Name, least_bytes
from kvloft.tiers.disk.segments import RUN_BYTES, RUN_SLOTS, Slots
from kvloft.tiers.disk.store import Fill, Store, Want
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES, format_size, page_aligned

_BATCH_BYTES = 16 << 20
_MORE_THREADS = 2
"""Threads beyond those that may access the device: for checksums and the books meanwhile."""
_MAX_GETS = 1024
_KEEPER_SECONDS = 1.0
_FAILURES = 5
"""After so many failures of the medium in a row, the tier leaves it alone for a while."""
_SUSPEND_SECONDS = 10.0

Report = Callable[[str, str], None]
"""Told of what a person should know: cause and message. Called from any thread."""


def _begun() -> Future[Any]:
    """A future that can't be cancelled, as the work behind it can't."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class _Put:
    """A put on its way."""

    __slots__ = (
        "above", "begun", "chunk", "data", "deadline", "futures", "name", "outcome", "place",
        "record", "waiting",
    )  # fmt: skip

    def __init__(
        self, chunk: Chunk, name: bytes, data: memoryview, deadline: float | None, record: Record
    ) -> None:
        self.chunk = chunk
        self.name = name
        self.data = data
        self.deadline = deadline
        self.record = record
        self.futures: list[Future[Outcome]] = []
        self.above: _Put | None = None
        """The put of what this chunk rests on, if that had not ended when this one came."""
        self.begun = False
        """Whether the memory is in use."""
        self.waiting: list[_Put] = []
        """Puts that have been written and can't be published before this one has ended."""
        self.place: Place | None = None
        self.outcome: Outcome | None = None


class _Get:
    """A get on its way."""

    __slots__ = ("chunk", "deadline", "future", "into")

    def __init__(self, chunk: Chunk, into: memoryview, deadline: float | None) -> None:
        self.chunk = chunk
        self.into = into
        self.deadline = deadline
        self.future: Future[Outcome] = _begun()


class _Call:
    """A question to the store on its way; ``otherwise`` is the answer if it fails."""

    __slots__ = ("deadline", "future", "otherwise", "work")

    def __init__(self, work: Callable[[], Any], otherwise: Any, deadline: float | None) -> None:
        self.work = work
        self.otherwise = otherwise
        self.deadline = deadline
        self.future: Future[Any] = _begun()


class DiskTier:
    """Implements :class:`kvloft.tiers.base.Tier`.

    Raises :class:`kvloft.errors.ConfigError` if the directory or the limit won't do; then nothing
    is left running. ``report`` is told what a person should know: the first fault of each cause,
    and how many there have been since, at most every ten minutes. ``verify``: compute the
    checksums of chunks that are read; without, a torn or damaged one is not noticed.
    """

    def __init__(
        self, options: DiskOptions, namespace: Namespace, *, report: Report | None = None,
        verify: bool = True,
    ) -> None:  # fmt: skip
        self._options = options
        self._digest = namespace.digest
        self._has_full = namespace.has_full
        self._faults = DiskFaults(report)
        self._codes: dict[str, bytes] = {}
        self._store, self._number = _open(options, namespace, self._faults, verify)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._gets: deque[_Get | _Call] = deque()
        self._puts: deque[_Put] = deque()
        self._in_flight: dict[bytes, _Put] = {}
        """Puts that have not ended, by name."""
        self._put_bytes = 0
        """Of puts that have not ended."""
        self._closed = False
        self._suspended_until = 0.0
        self._failures = 0
        self._ended: dict[str, Counter[str]] = {"puts": Counter(), "gets": Counter()}
        self._done_bytes = {"puts": 0, "gets": 0}
        self._stop = threading.Event()
        self._gate = threading.BoundedSemaphore(options.threads)
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvloft-disk-{i}", daemon=True)
            for i in range(options.threads + _MORE_THREADS)
        ]
        self._keeper = threading.Thread(target=self._keep, name="kvloft-disk-keeper", daemon=True)
        for thread in (*self._threads, self._keeper):
            thread.start()

    # ---------------------------------------------------------------- the contract

    @property
    def name(self) -> str:
        return f"disk:{self._options.path}"

    def holds(self, key: bytes, code: str) -> bool:
        if self._away:
            return False
        padded = self._codes.get(code)
        if padded is None:
            padded = self._codes[code] = chunk_name(b"", code)
        return self._store.view.find(self._digest, key[:16] + padded) >= 0

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        if self._away:
            return None
        if not check_chunk(chunk) or data.nbytes < page_aligned(chunk.nbytes):
            return self._ended_future("puts", Outcome.REFUSED)
        name = chunk_name(chunk.key, chunk.code)
        data = data.cast("B")[: page_aligned(chunk.nbytes)]
        record = reservation(
            chunk, self._digest, self._number, has_full=self._has_full, now=int(time.time())
        )
        put = _Put(chunk, name, data, deadline, record)
        future: Future[Outcome] = _begun()
        put.futures.append(future)
        with self._lock:
            if self._closed:
                return None
            if (other := self._in_flight.get(name)) is not None:
                other.futures.append(future)
                return future
            known = self._place_in_order(put)
            if known is None:
                if self._in_flight and self._put_bytes + chunk.nbytes > self._options.queue_bytes:
                    return None
                self._in_flight[name] = put
                self._await(put, 1)
                self._put_bytes += chunk.nbytes
                self._puts.append(put)
                self._work.notify()
                return future
        if known is Outcome.DONE:
            self._store.hint(Name(self._digest, name), touched=True)
        return self._ended_future("puts", known)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        if self._closed:
            return None
        if self._away or not check_chunk(chunk) or into.nbytes < page_aligned(chunk.nbytes):
            return self._ended_future("gets", Outcome.MISSING)
        get = _Get(chunk, into.cast("B")[: page_aligned(chunk.nbytes)], deadline)
        return get.future if self._ask(get) else None

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        names = self._names(chunks)
        call = _Call(lambda: self._store.still_there(names), [False] * len(names), deadline)
        return call.future if self._ask(call) else None

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        names = self._names(chunks)
        call = _Call(lambda: self._store.remove(names), 0, None)
        return call.future if self._ask(call) else None

    def touch(self, chunks: Sequence[Chunk]) -> None:
        for name in self._names(chunks):
            self._store.hint(name, touched=True)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        for name in self._names(chunks):
            self._store.hint(name, touched=False)

    def scan(self) -> Iterator[Chunk]:
        if not self._away:
            yield from self._store.chunks_known(self._digest)

    def stats(self) -> TierStats:
        view = self._store.view
        with self._lock:
            return TierStats(
                limit_bytes=self._options.max_bytes,
                used_bytes=self._store.used_bytes,
                chunks=0 if self._closed else view.count(self._digest),
                queued_puts=len(self._in_flight),
                queued_put_bytes=self._put_bytes,
                queued_gets=len(self._gets),
                puts=dict(self._ended["puts"]),
                gets=dict(self._ended["gets"]),
                put_bytes=self._done_bytes["puts"],
                get_bytes=self._done_bytes["gets"],
                evicted_chunks=self._store.evicted,
                faults=self._faults.counts(),
                held={} if self._closed else view.held(self._digest),
            )

    def close(self, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
            puts = [put for put in self._in_flight.values() if not put.begun]
            gets = list(self._gets)
            self._puts.clear()
            self._gets.clear()
            self._work.notify_all()
        self._end_late(puts)
        for get in gets:
            self._end_get(get, Outcome.LATE)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            # What is left waits for a write that hangs; the memory of those that wait is not in
            # use any more.
            waiting = [below for put in self._in_flight.values() for below in put.waiting]
        self._end_late(waiting)
        self._stop.set()
        self._keeper.join(max(0.0, deadline - time.monotonic()))

    def _end_late(self, puts: list[_Put]) -> None:
        while puts:
            puts += self._end_put(puts.pop(), Outcome.LATE)

    # ---------------------------------------------------------------- accepting

    @property
    def _away(self) -> bool:
        """Whether nothing is to be had from the tier now."""
        if self._closed:
            return True
        return self._suspended_until > 0.0 and time.monotonic() < self._suspended_until

    def _names(self, chunks: Sequence[Chunk]) -> list[Name]:
        return [Name(self._digest, chunk_name(chunk.key, chunk.code)) for chunk in chunks]

    def _place_in_order(self, put: _Put) -> Outcome | None:
        """Find what a put has to wait for; its outcome if that is known already."""
        if self._store.find(self._digest, put.name) is not None:
            return Outcome.DONE
        support = put.record.support
        if support is not None:
            put.above = self._in_flight.get(support)
            if put.above is None and self._store.find(self._digest, support) is None:
                return Outcome.REFUSED
        return None

    def _await(self, put: _Put, change: int) -> None:
        """What a put rests on is to stay until it has ended."""
        if (support := put.record.support) is not None:
            name, awaited = Name(self._digest, support), self._store.awaited
            count = awaited.get(name, 0) + change
            if count:
                awaited[name] = count
            else:
                del awaited[name]

    def _ask(self, job: _Get | _Call) -> bool:
        with self._lock:
            if self._closed or len(self._gets) >= _MAX_GETS:
                return False
            self._gets.append(job)
            self._work.notify()
            return True

    def _ended_future(self, kind: str, outcome: Outcome) -> Future[Outcome]:
        with self._lock:
            self._ended[kind][outcome.value] += 1
        future: Future[Outcome] = _begun()
        future.set_result(outcome)
        return future

    # ---------------------------------------------------------------- threads

    def _serve(self) -> None:
        slots = Slots(self._store.files, self._gate)
        while True:
            with self._lock:
                while not (self._gets or self._puts or self._closed):
                    slots.close()
                    self._work.wait()
                if not (self._gets or self._puts):
                    slots.close()
                    return
                jobs = self._take_jobs()
                batch = [] if jobs else self._take_batch()
            if jobs:
                self._answer(jobs, slots)
            else:
                self._write(batch, slots)

    def _take_batch(self) -> list[_Put]:
        # Not more than a fair share, so that all threads have something to do.
        most = min(RUN_SLOTS, -(-len(self._puts) // self._options.threads))
        batch: list[_Put] = []
        nbytes = 0
        while self._puts and len(batch) < most and nbytes < _BATCH_BYTES:
            batch.append(self._puts.popleft())
            nbytes += len(batch[-1].data)
        return batch

    def _take_jobs(self) -> list[_Get | _Call]:
        """One question, or the next get and those after it whose chunks lie beside its own."""
        if not self._gets:
            return []
        jobs = [self._gets.popleft()]
        if isinstance(jobs[0], _Call) or (place := self._place(jobs[0])) is None:
            return jobs
        most = min(RUN_SLOTS, -(-len(self._gets) // self._options.threads))
        segment, first = place
        last = first
        while len(jobs) < most and len(jobs) * segment.stride < RUN_BYTES:
            job = self._gets[0]
            place = None if isinstance(job, _Call) else self._place(job)
            if place == (segment, last + 1):
                last += 1
            elif place == (segment, first - 1):
                first -= 1
            else:
                break
            jobs.append(self._gets.popleft())
        return jobs

    def _place(self, get: _Get) -> Place | None:
        return self._store.find(self._digest, chunk_name(get.chunk.key, get.chunk.code))

    def _answer_gets(self, slots: Slots) -> None:
        while self._gets:
            with self._lock:
                jobs = self._take_jobs()
            self._answer(jobs, slots)

    def _answer(self, jobs: Sequence[_Get | _Call], slots: Slots) -> None:
        now = time.monotonic()
        gets = []
        for job in jobs:
            late = job.deadline is not None and now > job.deadline
            if isinstance(job, _Call):
                job.future.set_result(job.otherwise if late else self._find_out(job))
            elif late:
                self._end_get(job, Outcome.LATE)
            else:
                gets.append(job)
        if gets:
            self._read(gets, slots)

    def _find_out(self, call: _Call) -> Any:
        try:
            return call.work()
        except Exception as error:
            self._failed("asking", error)
            return call.otherwise

    def _read(self, gets: Sequence[_Get], slots: Slots) -> None:
        wants = [(get.chunk, get.into) for get in gets]
        try:
            answers = self._store.read(self._digest, wants, slots)
        except Exception as error:
            if len(gets) > 1:  # Perhaps not all of them lie on a bad spot.
                for get in gets:
                    self._read([get], slots)
                return
            self._failed("reading from", error)
            answers = [(Outcome.FAILED, "")]
        for get, (outcome, cause) in zip(gets, answers, strict=True):
            if outcome is Outcome.DAMAGED:
                self._faults.add(
                    cause,
                    f"a chunk in {self._store.folder} is damaged ({cause}); it is removed and will "
                    "be computed again. Check the device",
                )
            elif outcome is Outcome.DONE:
                self._failures = 0
            self._end_get(get, outcome)

    def _write(self, batch: list[_Put], slots: Slots) -> None:
        """Put all of a batch, in order."""
        now = time.monotonic()
        begun: list[_Put] = []
        for put in batch:
            if put.deadline is not None and now > put.deadline:
                self._finish(self._end_put(put, Outcome.LATE))
            elif put.above is not None and put.above.outcome not in (None, Outcome.DONE):
                self._finish(self._end_put(put, Outcome.REFUSED))
            else:
                begun.append(put)
        wants = [
            Want(put.record, PAGE_BYTES + len(put.data), partial(self._may_follow, put))
            for put in begun
        ]
        try:
            places = self._store.reserve(wants) if wants else []
        except Exception as error:
            outcome = self._failed("writing to", error)
            for put in begun:
                self._finish(self._end_put(put, outcome))
            return
        placed: list[tuple[_Put, Place]] = []
        for put, place in zip(begun, places, strict=True):
            if isinstance(place, Outcome):
                self._finish(self._end_put(put, place))
            else:
                put.place = place
                placed.append((put, place))
        for run in runs([place for _, place in placed]):
            self._answer_gets(slots)
            self._write_run([placed[at] for at in run], slots)
        self._finish([put for put, _ in placed if put.outcome is None])

    def _may_follow(self, put: _Put) -> bool:
        """Whether what a put rests on is on its way, and all that this rests on is too."""
        with self._lock:
            above = put.above
            while above is not None and above.outcome is None and above.above is not None:
                above = above.above
            return above is not None and above.outcome in (None, Outcome.DONE)

    def _write_run(self, run: Sequence[tuple[_Put, Place]], slots: Slots) -> None:
        """Write what lies side by side; puts for which that fails have ended."""
        with self._lock:
            late = self._closed
            for put, _ in run:
                put.begun = not late
        if late:
            self._finish(self._give_up([put for put, _ in run], Outcome.LATE))
            return
        try:
            fills = [Fill(place, put.record, put.chunk.key, _own(put.data)) for put, place in run]
            records = self._store.write(fills, slots)
        except Exception as error:
            outcome = self._failed("writing to", error)
            self._finish(self._give_up([put for put, _ in run], outcome))
            return
        self._failures = 0
        for (put, _), record in zip(run, records, strict=True):
            put.record = record

    def _finish(self, puts: list[_Put]) -> None:
        """Publish what has been written, and then what has waited for that."""
        while puts:
            ready, refused = self._ready(puts)
            ended = self._give_up(refused, Outcome.REFUSED)
            outcomes = [Outcome.DONE] * len(ready)
            if ready:
                try:
                    outcomes = self._store.publish(
                        [(put.place, put.record) for put in ready if put.place is not None]
                    )
                except Exception as error:
                    ended += self._give_up(ready, self._failed("writing to", error))
                    ready = []
            for put, outcome in zip(ready, outcomes, strict=False):
                ended += self._end_put(put, outcome)
            puts = ended

    def _ready(self, puts: list[_Put]) -> tuple[list[_Put], list[_Put]]:
        """Which of these can be published together, and which never; the others are to wait."""
        ready: dict[_Put, None] = {}
        refused = []
        todo = deque(puts)
        with self._lock:
            while todo:
                put = todo.popleft()
                above = put.above
                if above is None or above.outcome is Outcome.DONE or above in ready:
                    ready[put] = None
                    # All of a path at once: one by one would take the store's lock for each.
                    todo.extend(put.waiting)
                    put.waiting = []
                elif above.outcome is None:
                    above.waiting.append(put)
                else:
                    refused.append(put)
        return list(ready), refused

    def _give_up(self, puts: list[_Put], outcome: Outcome) -> list[_Put]:
        """End puts that have a place; those that have waited for them."""
        if places := [put.place for put in puts if put.place is not None]:
            try:
                self._store.release(places)
            except Exception as error:  # The next release gives them up as well.
                self._failed("writing to", error)
        return [below for put in puts for below in self._end_put(put, outcome)]

    def _end_put(self, put: _Put, outcome: Outcome) -> list[_Put]:
        """End a put; those that have waited for it."""
        with self._lock:
            if put.outcome is not None:
                return []
            put.outcome = outcome
            put.above = None
            del self._in_flight[put.name]
            self._await(put, -1)
            self._put_bytes -= put.chunk.nbytes
            waiting, put.waiting = put.waiting, []
            self._ended["puts"][outcome.value] += len(put.futures)
            if outcome is Outcome.DONE:
                self._done_bytes["puts"] += put.chunk.nbytes
        for future in put.futures:
            future.set_result(outcome)
        return waiting

    def _end_get(self, job: _Get | _Call, outcome: Outcome) -> None:
        if isinstance(job, _Call):
            job.future.set_result(job.otherwise)
            return
        with self._lock:
            self._ended["gets"][outcome.value] += 1
            if outcome is Outcome.DONE:
                self._done_bytes["gets"] += job.chunk.nbytes
        job.future.set_result(outcome)

    def _failed(self, doing: str, error: Exception) -> Outcome:
        """Take note of a failure, and of many in a row; what a put comes to for it."""
        if isinstance(error, LockedError):
            self._faults.add(
                "locked",
                f"another process has held the lock in {self._store.folder} for too long; chunks "
                "are not kept until it lets go. Is one of the engines there hung?",
            )
            return Outcome.REFUSED
        if isinstance(error, OSError):
            self._faults.add_error(doing, self._store.folder, error)
        else:
            self._faults.add("bug", f"{doing} {self._store.folder}: {error!r}; please report this")
        self._failures += 1
        if self._failures >= _FAILURES and not self._closed:
            self._failures = 0
            self._suspended_until = time.monotonic() + _SUSPEND_SECONDS
            self._faults.add(
                "suspended",
                f"{_FAILURES} failures in a row; {self._store.folder} is left alone for "
                f"{_SUSPEND_SECONDS:.0f} s at a time until it works again",
            )
        return Outcome.FAILED

    def _keep(self) -> None:
        while not self._stop.wait(_KEEPER_SECONDS):
            if self._away:
                continue
            try:
                self._store.upkeep()
            except Exception as error:
                self._failed("looking after", error)
        # A write that hangs may still happen, so its place must stay reserved until it has ended.
        for thread in self._threads:
            thread.join()
        self._store.leave()


def _own(data: memoryview) -> memoryview:
    """Memory that can be written to: what lies beyond a chunk becomes zeros."""
    return memoryview(bytearray(data)) if data.readonly else data


def _open(
    options: DiskOptions, namespace: Namespace, faults: DiskFaults, verify: bool
) -> tuple[Store, int]:
    """Open the store of a tier. Raises :class:`ConfigError`."""
    where = f"'secondary_tiers': 'path': {str(options.path)!r}"
    least = least_bytes(namespace.slot_bytes)
    if options.max_bytes < least:
        raise ConfigError(
            f"'secondary_tiers': 'max_bytes': {format_size(options.max_bytes)} is too little: one "
            f"chunk of each size and {format_size(FIXED_BYTES)} for bookkeeping take "
            f"{format_size(least)}"
        )
    try:
        store = Store(
            options.path, limit=options.max_bytes, create=True, fault=faults.add, verify=verify
        )
        store.load()
        number = store.join(namespace.digest, namespace.about)
    except LockedError as error:
        raise ConfigError(
            f"{where}: another process has held the lock for too long; is an engine hung there?"
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{where} is a file, or lies in one; name a directory") from error
    except StrangeError as error:
        raise ConfigError(f"{where} can't be used: {error.strerror}") from error
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise ConfigError(
                f"{where}: the file system there has no locks (flock); use a local one"
            ) from error
        raise ConfigError(
            f"{where} can't be used: {error.strerror}; name a directory that can be written to"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where} is no path: {error}") from error
    needed = least - FIXED_BYTES
    if not store.view.extents and (free := _free_bytes(options)) < needed:
        store.leave()
        raise ConfigError(
            f"{where} has {format_size(free)} free; one chunk of each size takes "
            f"{format_size(needed)}. Make space, or name another directory"
        )
    return store, number


def _free_bytes(options: DiskOptions) -> int:
    room = os.statvfs(options.path)
    return room.f_bavail * room.f_frsize
