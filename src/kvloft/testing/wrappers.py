"""Tiers around other tiers that are slow, full, broken or lying: faults for tests, never flags in
product code. They nest: ``DelayedTier(CorruptingTier(tier, every(3)), seconds=0.01)``.

Each takes a predicate that says which calls it applies to. Where a wrapper breaks the contract on
purpose, it says so.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Literal, NamedTuple, TypeVar

from kvloft.tiers.base import Chunk, Outcome, Tier, TierStats

RUBBISH = 0xDB
"""Fills buffers that hold nothing of worth."""

_T = TypeVar("_T")


class Call(NamedTuple):
    """One call of a wrapped tier."""

    operation: str
    """The method's name."""
    chunks: tuple[Chunk, ...]
    """None where the method takes none; of ``holds`` with key and code alone."""
    number: int
    """Of the calls of this method; 0 at the first."""


When = Callable[[Call], bool]
"""Which calls a wrapper applies to."""


def always(call: Call) -> bool:
    """Every call."""
    return True


def on(*operations: str) -> When:
    """Every call of these methods."""
    return lambda call: call.operation in operations


def every(count: int, *operations: str) -> When:
    """Each ``count``-th call of these methods (of each method, if none is named)."""
    return lambda call: (
        (not operations or call.operation in operations) and call.number % count == count - 1
    )


def _begun() -> Future[_T]:
    """A future that can't be cancelled."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(later: Future[_T], ended: Future[_T], change: Callable[[_T], _T]) -> None:
    if (error := ended.exception()) is not None:
        later.set_exception(error)
    else:
        later.set_result(change(ended.result()))


def then(future: Future[_T], change: Callable[[_T], _T]) -> Future[_T]:
    """A future that ends as ``future`` does, its result changed."""
    changed: Future[_T] = _begun()
    future.add_done_callback(lambda ended: _settle(changed, ended, change))
    return changed


class WrapperTier:
    """Hands every call on to ``inner``; a base for tiers that do something else now and then."""

    def __init__(self, inner: Tier, when: When = always) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        """By method."""
        self._when = when
        self._lock = threading.Lock()

    def applies(self, operation: str, chunks: Sequence[Chunk] = ()) -> bool:
        """Count a call; whether this wrapper is to do what it is for."""
        with self._lock:
            number = self.calls[operation]
            self.calls[operation] += 1
        return self._when(Call(operation, tuple(chunks), number))

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.inner.name})"

    def holds(self, key: bytes, code: str) -> bool:
        return self.inner.holds(key, code)

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self.inner.put(chunk, data, deadline)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self.inner.get(chunk, into, deadline)

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        return self.inner.contains(chunks, deadline)

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        return self.inner.delete(chunks)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        self.inner.touch(chunks)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        self.inner.demote(chunks)

    def scan(self) -> Iterator[Chunk]:
        return self.inner.scan()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self, timeout: float = 5.0) -> None:
        self.inner.close(timeout)


class DelayedTier(WrapperTier):
    """Futures end later than those of ``inner``: after ``seconds``, or, without, when the test
    calls :meth:`release`. The tier itself has done its work by then."""

    def __init__(self, inner: Tier, when: When = always, *, seconds: float | None = None) -> None:
        super().__init__(inner, when)
        self._seconds = seconds
        self._held: deque[Callable[[], None]] = deque()
        self._closed = False
        self._due: SimpleQueue[float | None] = SimpleQueue()
        self._clock: threading.Thread | None = None
        if seconds is not None:
            self._clock = threading.Thread(target=self._run, name="delayed-tier", daemon=True)
            self._clock.start()

    @property
    def held(self) -> int:
        """Futures that ``inner`` is done with and that have not ended."""
        return len(self._held)

    def release(self, count: int | None = None) -> int:
        """End up to ``count`` futures, all if ``None``, in the order in which ``inner`` was done
        with them; how many."""
        released = 0
        while released != count:
            try:
                end = self._held.popleft()
            except IndexError:
                break
            end()
            released += 1
        return released

    def _delay(
        self, operation: str, chunks: Sequence[Chunk], begin: Callable[[], Future[_T] | None]
    ) -> Future[_T] | None:
        applies = self.applies(operation, chunks)
        future = begin()
        if future is None or not applies:
            return future
        later: Future[_T] = _begun()

        def hold(ended: Future[_T]) -> None:
            self._held.append(lambda: _settle(later, ended, lambda result: result))
            if self._seconds is not None:
                self._due.put(time.monotonic() + self._seconds)
            if self._closed:
                self.release()

        future.add_done_callback(hold)
        return later

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            while not self._closed and (left := due - time.monotonic()) > 0:
                time.sleep(min(left, 0.01))
            self.release(1)

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self._delay("put", [chunk], lambda: self.inner.put(chunk, data, deadline))

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return self._delay("get", [chunk], lambda: self.inner.get(chunk, into, deadline))

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        return self._delay("contains", chunks, lambda: self.inner.contains(chunks, deadline))

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        return self._delay("delete", chunks, lambda: self.inner.delete(chunks))

    def close(self, timeout: float = 5.0) -> None:
        """Close ``inner`` and let go of everything."""
        self.inner.close(timeout)
        self._closed = True
        self.release()
        self._due.put(None)
        if self._clock is not None and self._clock is not threading.current_thread():
            self._clock.join(timeout)


class TierFaultError(Exception):
    """What a :class:`FailingTier` throws."""


class FailingTier(WrapperTier):
    """Calls fail, by ``how``:

    - ``failed``: as the contract allows. Puts and gets end FAILED, a get's buffer full of rubbish;
      everything else is answered as if nothing were there.
    - ``late``: as ``failed``, but LATE.
    - ``raises``: the call itself raises :class:`TierFaultError`. Breaks the contract.
    - ``exception``: its future holds one; calls without a future raise. Breaks the contract.
    - ``never``: its future never ends; calls without a future fail. Breaks the contract.
    """

    def __init__(
        self, inner: Tier, when: When = always,
        how: Literal["failed", "late", "raises", "exception", "never"] = "failed",
    ) -> None:  # fmt: skip
        super().__init__(inner, when)
        self._how = how

    def _fail(self, operation: str, result: _T, *, ends: bool = True) -> _T:
        if self._how == "raises" or (self._how == "exception" and not ends):
            raise TierFaultError(operation)
        return result

    def _future(self, operation: str, result: _T) -> Future[_T]:
        self._fail(operation, None)
        future: Future[_T] = _begun()
        if self._how == "exception":
            future.set_exception(TierFaultError(operation))
        elif self._how != "never":
            future.set_result(result)
        return future

    @property
    def _outcome(self) -> Outcome:
        return Outcome.LATE if self._how == "late" else Outcome.FAILED

    def holds(self, key: bytes, code: str) -> bool:
        if self.applies("holds", [Chunk(key, code, b"", 0, 0)]):
            return self._fail("holds", False, ends=False)
        return super().holds(key, code)

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        if self.applies("put", [chunk]):
            return self._future("put", self._outcome)
        return super().put(chunk, data, deadline)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        if self.applies("get", [chunk]):
            into[:] = bytes([RUBBISH]) * len(into)
            return self._future("get", self._outcome)
        return super().get(chunk, into, deadline)

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        if self.applies("contains", chunks):
            return self._future("contains", [False] * len(chunks))
        return super().contains(chunks, deadline)

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        if self.applies("delete", chunks):
            return self._future("delete", 0)
        return super().delete(chunks)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        if self.applies("touch", chunks):
            return self._fail("touch", None, ends=False)
        return super().touch(chunks)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        if self.applies("demote", chunks):
            return self._fail("demote", None, ends=False)
        return super().demote(chunks)

    def scan(self) -> Iterator[Chunk]:
        if self.applies("scan"):
            return iter(self._fail("scan", (), ends=False))
        return super().scan()

    def stats(self) -> TierStats:
        if self.applies("stats"):
            return self._fail("stats", TierStats(0, 0, 0, 0, 0, 0), ends=False)
        return super().stats()

    def close(self, timeout: float = 5.0) -> None:
        """Always closes ``inner``, before it fails."""
        super().close(timeout)
        if self.applies("close"):
            self._fail("close", None, ends=False)


class CorruptingTier(WrapperTier):
    """Gets say DONE of bytes that are wrong in one bit. Breaks the contract, to prove that a test
    of the whole would notice. ``bit``: which one, counted from the chunk's start, modulo its
    length; ``None`` takes another one each time."""

    def __init__(self, inner: Tier, when: When = always, *, bit: int | None = None) -> None:
        super().__init__(inner, when)
        self.corrupted = 0
        """Gets that were tampered with."""
        # Steps of a prime that is no multiple of 8 visit all bytes and all bits of a byte.
        self._bits = itertools.count(0, 7919) if bit is None else itertools.repeat(bit)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        applies = self.applies("get", [chunk])
        future = super().get(chunk, into, deadline)
        if future is None or not applies:
            return future

        def corrupt(outcome: Outcome) -> Outcome:
            if outcome is Outcome.DONE and chunk.nbytes:
                byte, bit = divmod(next(self._bits) % (8 * chunk.nbytes), 8)
                into[byte] ^= 1 << bit
                self.corrupted += 1
            return outcome

        return then(future, corrupt)


class ShortTier(WrapperTier):
    """Gets that would be DONE bring the chunk's first half and rubbish, and end as ``outcome``.

    DAMAGED, MISSING: the chunk is removed, as the contract says. DONE breaks the contract.
    """

    def __init__(
        self, inner: Tier, when: When = always, *, outcome: Outcome = Outcome.DAMAGED
    ) -> None:
        super().__init__(inner, when)
        self._outcome = outcome

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        applies = self.applies("get", [chunk])
        future = super().get(chunk, into, deadline)
        if future is None or not applies:
            return future
        short: Future[Outcome] = _begun()

        def spoil(ended: Future[Outcome]) -> None:
            if ended.exception() is not None or ended.result() is not Outcome.DONE:
                _settle(short, ended, lambda outcome: outcome)
                return
            half = chunk.nbytes // 2
            into[half:] = bytes([RUBBISH]) * (len(into) - half)
            removal = None
            if self._outcome in (Outcome.DAMAGED, Outcome.MISSING):
                removal = self.inner.delete([chunk])
            if removal is None:
                short.set_result(self._outcome)
            else:
                removal.add_done_callback(lambda _: short.set_result(self._outcome))

        future.add_done_callback(spoil)
        return short


class FullTier(WrapperTier):
    """The queue is full: puts, gets, ``contains`` and ``delete`` are not taken on."""

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return None if self.applies("put", [chunk]) else super().put(chunk, data, deadline)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return None if self.applies("get", [chunk]) else super().get(chunk, into, deadline)

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        full = self.applies("contains", chunks)
        return None if full else super().contains(chunks, deadline)

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        return None if self.applies("delete", chunks) else super().delete(chunks)
