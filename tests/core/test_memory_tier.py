"""The tier in memory passes the suite; tiers with one defect each do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvloft.testing.tiers import SIZES, Checked, TierTests, beside, chain, namespace
from kvloft.testing.wrappers import CorruptingTier, WrapperTier, then
from kvloft.tiers import memory
from kvloft.tiers.base import Chunk, Namespace, Outcome, Tier, TierStats
from kvloft.tiers.memory import Kept, MemoryPlace, MemoryTier


class MemoryTierTests(TierTests[MemoryPlace]):
    """How the suite opens tiers in memory."""

    def new_place(self, path: Path) -> MemoryPlace:
        return MemoryPlace()

    def open_tier(
        self, place: MemoryPlace, names: Namespace, *, max_bytes: int, queue_bytes: int
    ) -> Tier:
        return MemoryTier(names, max_bytes=max_bytes, queue_bytes=queue_bytes, place=place)

    def stalled(self, place: MemoryPlace, tier: Tier) -> AbstractContextManager[object]:
        return place.lock

    def damage(self, place: MemoryPlace, names: Namespace, chunk: Chunk) -> bool:
        kept = place.home(names)[chunk.key, chunk.code]
        kept.data = kept.data[:-1] + bytes([kept.data[-1] ^ 0x10])
        return True


class TestMemoryTier(MemoryTierTests):
    """The suite."""


# --- beyond the suite -----------------------------------------------------------------------------


def opened(max_bytes: int, place: MemoryPlace | None = None) -> Checked:
    names = namespace()
    return Checked(MemoryTier(names, max_bytes=max_bytes, place=place), names, 10.0)


def test_the_leaf_goes_that_was_used_longest_ago() -> None:
    size = SIZES["f"]
    tier = opened(4 * size)
    a, b = chain("a", 2), chain("b", 2)
    tier.fill([*a, *b])
    # A use of a child is a use of its parents: b goes, from its end, though a is older.
    tier.tier.touch([a[1]])
    new = chain("new", 4)
    kept = [[*a, b[0]], [*a], [a[0]], []]
    for one, left in zip(new, kept, strict=True):
        tier.fill([one])
        assert tier.held([*a, *b]) == left
    tier.tier.close()


def test_a_read_is_a_use() -> None:
    tier = opened(3 * SIZES["f"])
    old = [chain(("old", i), 1)[0] for i in range(3)]
    tier.fill(old)
    tier.expect(old[:1])
    tier.fill(chain("new", 1))
    assert tier.held(old) == [old[0], old[2]]
    tier.tier.close()


def test_a_parent_is_not_evicted_for_its_child() -> None:
    size = SIZES["f"]
    tier = opened(2 * size)
    [a, b] = chain("a", 2)
    tier.fill([a, *chain("b", 1)])
    tier.fill([b])
    assert tier.check([a, b, *chain("b", 1)]) == [a, b]
    # With one byte less than they take, nothing more goes for a put that is in vain.
    assert tier.put(beside(b, "w0")[0]) is Outcome.REFUSED
    assert tier.held([a, b]) == [a, b]
    tier.tier.close()


def test_what_is_larger_than_the_limit_evicts_nothing() -> None:
    tier = opened(SIZES["s"])
    names = [one for path in (chain("a", 1), chain("b", 1)) for one in beside(path[0], "w0")]
    small = [one._replace(code="f") for one in names]
    tier.fill(small)
    assert tier.put(chain("large", 1)[0]) is Outcome.REFUSED
    assert tier.check(small) == small
    tier.tier.close()


def test_a_chunk_larger_than_the_queue_is_taken_on_alone() -> None:
    place = MemoryPlace()
    tier = MemoryTier(namespace(), max_bytes=1 << 20, queue_bytes=1, place=place)
    checked = Checked(tier, namespace(), 10.0)
    a, b = chain("a", 2)
    with place.lock:
        first, second = checked.try_put(a), checked.try_put(b)
        assert first is not None
        assert second is None
    assert checked.end_put(first) is Outcome.DONE
    checked.fill([b])
    tier.close()


def test_a_call_that_makes_no_sense_fails_quietly() -> None:
    tier = opened(1 << 20)
    [chunk] = chain("short", 1)
    assert tier.wait(tier.tier.put(chunk, memoryview(bytes(8)))) is Outcome.FAILED
    tier.fill([chunk])
    assert tier.wait(tier.tier.get(chunk, memoryview(bytearray(8)))) is Outcome.FAILED
    assert tier.tier.stats().faults == {"ValueError": 2}
    assert tier.check([chunk]) == [chunk]
    tier.tier.close()


def test_books_on_leaves_stay_small() -> None:
    place = MemoryPlace()
    tier = opened(1 << 20, place)
    path = chain("leaves", 2)
    tier.fill(path)
    for _ in range(1500):
        tier.tier.demote(path)
        tier.delete(path[1:])
        tier.put(path[1])
    assert len(place._leaves) < 2000
    tier.tier.close()


# --- tiers with one defect, which the suite must find ---------------------------------------------


class Forgetful(MemoryTier):
    """Says DONE, and does not keep every tenth chunk."""

    _count = 0

    def _put(self, chunk: Chunk, data: memoryview) -> Outcome:
        self._count += 1
        return Outcome.DONE if self._count % 10 == 0 else super()._put(chunk, data)


class Borrowing(MemoryTier):
    """Keeps the caller's buffer instead of a copy."""

    def _put(self, chunk: Chunk, data: memoryview) -> Outcome:
        outcome = super()._put(chunk, data)
        for kept in self._find([chunk]):
            kept.data = data[: chunk.nbytes]  # type: ignore[assignment]
        return outcome


class Trusting(MemoryTier):
    """Does not verify what it reads."""

    def _get(self, chunk: Chunk, into: memoryview) -> Outcome:
        for kept in self._find([chunk]):
            size = min(len(kept.data), len(into))
            into[:size] = kept.data[:size]
            return Outcome.DONE
        return Outcome.MISSING


class KeepsDamage(MemoryTier):
    """Leaves a damaged chunk where it is."""

    def _get(self, chunk: Chunk, into: memoryview) -> Outcome:
        before = self._home.copy()
        outcome = super()._get(chunk, into)
        self._home.update(before)
        return outcome


class Orphans(MemoryTier):
    """Takes children without their parents."""

    def _needs(self, chunk: Chunk) -> tuple[bytes, str] | None:
        return None


class LeavesDependants(MemoryTier):
    """Deletes what it is told to and nothing else."""

    def _delete(self, chunks: Sequence[Chunk]) -> int:
        return sum(self._home.pop((c.key, c.code), None) is not None for c in chunks)


class CountsTwice(MemoryTier):
    """Counts a chunk that is deleted twice in one call as two."""

    def _delete(self, chunks: Sequence[Chunk]) -> int:
        return super()._delete(chunks) + len(chunks) - len(set(chunks))


class Remembering(MemoryTier):
    """Holds for ever what it has held once."""

    def holds(self, key: bytes, code: str) -> bool:
        seen = self.__dict__.setdefault("seen", set())
        if super().holds(key, code):
            seen.add((key, code))
        return not self._closed and (key, code) in seen


class Deaf(MemoryTier):
    """Holds only what it has put itself."""

    def put(self, chunk: Chunk, data: memoryview, deadline: float | None = None) -> Any:
        self.__dict__.setdefault("mine", set()).add((chunk.key, chunk.code))
        return super().put(chunk, data, deadline)

    def holds(self, key: bytes, code: str) -> bool:
        return super().holds(key, code) and (key, code) in self.__dict__.get("mine", ())


class Undying(MemoryTier):
    """Answers after it was closed."""

    def holds(self, key: bytes, code: str) -> bool:
        return (key, code) in self._home


class Overfull(MemoryTier):
    """Takes a little more than its limit."""

    def _put(self, chunk: Chunk, data: memoryview) -> Outcome:
        self._limit += 20_000
        try:
            return super()._put(chunk, data)
        finally:
            self._limit -= 20_000


class RootsFirst(MemoryPlace):
    """Evicts what was put longest ago, leaf or not."""

    def make_room(self, limit: int, parent: Kept | None = None) -> int:
        evicted = 0
        for kept in [kept for home in self._homes.values() for kept in home.values()]:
            if self.used_bytes > limit and kept is not parent:
                del kept.home[kept.name]
                self.used_bytes -= kept.chunk.nbytes
                evicted += 1
        return evicted


class IgnoresTouch(MemoryTier):
    """Takes no hints of use."""

    def touch(self, chunks: Sequence[Chunk]) -> None:
        pass


class IgnoresDemote(MemoryTier):
    """Takes no hints of worth."""

    def demote(self, chunks: Sequence[Chunk]) -> None:
        pass


class Misled(MemoryTier):
    """Takes each hint for the other."""

    def touch(self, chunks: Sequence[Chunk]) -> None:
        super().demote(chunks)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        super().touch(chunks)


class ChildrenFirst(MemoryTier):
    """Lists children before their parents."""

    def scan(self) -> Iterator[Chunk]:
        return reversed(list(super().scan()))


class Incomplete(MemoryTier):
    """Lists full chunks alone."""

    def scan(self) -> Iterator[Chunk]:
        return (chunk for chunk in super().scan() if chunk.code == "f")


class OneQueue(MemoryTier):
    """Reads wait behind writes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reads = self._writes


class Patient(MemoryTier):
    """Ignores deadlines."""

    def _submit(self, job: memory._Job[Any]) -> Any:
        job.deadline = None
        return super()._submit(job)


class Early(MemoryTier):
    """Looks at the deadline when it is called, and never again."""

    def _submit(self, job: memory._Job[Any]) -> Any:
        if job.deadline is not None and time.monotonic() < job.deadline:
            job.deadline = None
        return super()._submit(job)


class Blocking(MemoryTier):
    """Waits for room in the queue."""

    def put(self, chunk: Chunk, data: memoryview, deadline: float | None = None) -> Any:
        while (future := super().put(chunk, data, deadline)) is None and not self._closed:
            time.sleep(0.001)
        return future


class Stalling(MemoryTier):
    """Asks the medium whether it holds a chunk."""

    def holds(self, key: bytes, code: str) -> bool:
        with self._place.lock:
            return super().holds(key, code)


class Abandoning(MemoryTier):
    """Closes, and what was queued never ends."""

    def close(self, timeout: float = 5.0) -> None:
        with self._changed:
            self._reads.clear()
            self._writes.clear()
        super().close(timeout)


class Draining(MemoryTier):
    """Does all that is queued before it closes."""

    def close(self, timeout: float = 5.0) -> None:
        while self._reads or self._writes:
            time.sleep(0.001)
        super().close(timeout)


class Cancellable(WrapperTier):
    """Hands out futures that the caller can end."""

    def put(self, chunk: Chunk, data: memoryview, deadline: float | None = None) -> Any:
        inner = super().put(chunk, data, deadline)
        assert inner is not None
        future: Future[Outcome] = Future()

        def end(ended: Future[Outcome]) -> None:
            if not future.done():
                future.set_result(ended.result())

        inner.add_done_callback(end)
        return future


class Locking(WrapperTier):
    """Ends futures while it holds a lock that its methods take."""

    def put(self, chunk: Chunk, data: memoryview, deadline: float | None = None) -> Any:
        inner = super().put(chunk, data, deadline)
        future: Future[Outcome] = Future()

        def end(ended: Future[Outcome]) -> None:
            with self._lock:
                future.set_result(ended.result())

        assert inner is not None
        inner.add_done_callback(end)
        return future

    def stats(self) -> TierStats:
        if not self._lock.acquire(timeout=2):
            raise TimeoutError("a deadlock, but for this")
        self._lock.release()
        return super().stats()


class Rounding(WrapperTier):
    """Loses the last byte of what is not whole pages."""

    def get(self, chunk: Chunk, into: memoryview, deadline: float | None = None) -> Any:
        def cut(outcome: Outcome) -> Outcome:
            if chunk.nbytes % 4096:
                into[chunk.nbytes - 1] ^= 0xFF
            return outcome

        future = super().get(chunk, into, deadline)
        assert future is not None
        return then(future, cut)


class Leaking(MemoryTier):
    """Leaves a thread."""

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()


class Classless(WrapperTier):
    """Knows no classes of chunks."""

    def get(self, chunk: Chunk, into: memoryview, deadline: float | None = None) -> Any:
        return super().get(
            chunk._replace(code="f", nbytes=SIZES["f"]), memoryview(bytearray(20480))
        )


def wrapped(wrap: Callable[[Tier], Tier]) -> Callable[..., Tier]:
    def open_tier(names: Namespace, **options: Any) -> Tier:
        return wrap(MemoryTier(names, **options))

    open_tier.__name__ = getattr(wrap, "__name__", "wrapped")
    return open_tier


def without_digest(names: Namespace, **options: Any) -> Tier:
    return MemoryTier(namespace(b"\0" * 16, has_full=names.has_full), **options)


def without_place(names: Namespace, **options: Any) -> Tier:
    return MemoryTier(names, **options | {"place": MemoryPlace()})


def without_bound(names: Namespace, **options: Any) -> Tier:
    return MemoryTier(names, **options | {"queue_bytes": 1 << 60})


EVERY_BYTE = ("test_every_byte_comes_back", 32)
TIGHT, ROOMY = ("test_random_sequences", False), ("test_random_sequences", True)
DEFECTS: list[tuple[Callable[..., Tier], list[str | tuple[str, object]]]] = [
    (wrapped(CorruptingTier), [EVERY_BYTE, ROOMY, TIGHT, "test_hammering"]),
    (wrapped(Rounding), [EVERY_BYTE]),
    (wrapped(Classless), ["test_neither_another_key_nor_another_class_is_served"]),
    (Forgetful, [EVERY_BYTE, ROOMY]),
    (Borrowing, ["test_what_is_put_is_copied"]),
    (Trusting, ["test_damage_is_noticed", "test_a_chunk_of_another_length_is_never_done"]),
    (KeepsDamage, ["test_damage_is_noticed"]),
    (without_digest, ["test_namespaces_do_not_see_each_other"]),
    (without_digest, ["test_another_namespace_finds_nothing_after_a_restart"]),
    (Orphans, ["test_a_child_without_its_parent_is_refused", ROOMY, TIGHT]),
    (Orphans, ["test_nothing_is_kept_below_a_put_that_ends_badly"]),
    (LeavesDependants, ["test_delete_takes_what_depends", ROOMY]),
    (CountsTwice, ["test_delete_takes_what_depends"]),
    (Remembering, ["test_delete_takes_what_depends", ROOMY]),
    (Deaf, ["test_two_tiers_share_what_they_keep", "test_chunks_survive_a_restart"]),
    (Undying, ["test_afterwards_all_is_empty_and_full"]),
    (Overfull, ["test_the_limit_is_never_exceeded", "test_a_path_longer_than_the_limit", TIGHT]),
    (Overfull, ["test_two_tiers_keep_one_limit"]),
    (IgnoresTouch, ["test_touched_chunks_outlive_others"]),
    (IgnoresDemote, ["test_demoted_chunks_go_first"]),
    (Misled, ["test_touched_chunks_outlive_others", "test_demoted_chunks_go_first"]),
    (ChildrenFirst, ["test_scan_tells_all_there_is_to_know", EVERY_BYTE]),
    (Incomplete, ["test_scan_tells_all_there_is_to_know", EVERY_BYTE]),
    (OneQueue, ["test_gets_go_before_puts"]),
    (Patient, ["test_past_deadlines_are_late", "test_deadlines_pass_in_the_queue"]),
    (Early, ["test_deadlines_pass_in_the_queue"]),
    (Blocking, ["test_a_full_queue_takes_nothing_on"]),
    (Stalling, ["test_a_full_queue_takes_nothing_on"]),
    (without_bound, ["test_a_full_queue_takes_nothing_on"]),
    (Abandoning, ["test_closing_ends_what_is_queued"]),
    (Draining, ["test_closing_ends_what_is_queued"]),
    (Leaking, ["test_closing_ends_all_threads"]),
    (wrapped(Cancellable), ["test_cancelling_breaks_nothing"]),
    (wrapped(Locking), ["test_callbacks_may_call_back"]),
    (without_place, ["test_chunks_survive_a_restart", "test_two_tiers_share_what_they_keep"]),
]


class Defective(MemoryTierTests):
    """The suite for a tier that is not in order."""

    patience = 0.5
    shrink = False

    def __init__(
        self, open_tier: Callable[..., Tier], new_place: Callable[[], MemoryPlace] = MemoryPlace
    ) -> None:
        self._open = open_tier
        self._new = new_place

    def new_place(self, path: Path) -> MemoryPlace:
        return self._new()

    def open_tier(
        self, place: MemoryPlace, names: Namespace, *, max_bytes: int, queue_bytes: int
    ) -> Tier:
        return self._open(names, max_bytes=max_bytes, queue_bytes=queue_bytes, place=place)


CASES = [(defect, test) for defect, tests in DEFECTS for test in tests]


@pytest.mark.parametrize(
    ("defect", "test"), CASES, ids=[f"{defect.__name__}-{test}" for defect, test in CASES]
)
def test_the_suite_finds(
    defect: Callable[..., Tier], test: str | tuple[str, object], tmp_path: Path
) -> None:
    name, *arguments = [test] if isinstance(test, str) else test
    with pytest.raises((AssertionError, TimeoutError)):
        getattr(Defective(defect), str(name))(tmp_path, *arguments)


@pytest.mark.parametrize("test", ["test_the_limit_is_never_exceeded", "test_random_sequences"])
def test_the_suite_finds_that_parents_are_evicted(test: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(Defective(MemoryTier, RootsFirst), test)(tmp_path, *[False][: "random" in test])
