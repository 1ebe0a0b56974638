"""The suite that a lower tier has to pass: what :mod:`kvloft.tiers.base` says, as tests.

Subclass :class:`TierTests` in a module that pytest collects::

    class TestMyTier(TierTests[Path]):
        def new_place(self, path):
            return path / "place"

        def open_tier(self, place, namespace, *, max_bytes, queue_bytes):
            return MyTier(place, namespace, max_bytes=max_bytes, queue_bytes=queue_bytes)

and say with the class's attributes and hooks what more it can do. What is held is compared byte by
byte in every test; what may be missing, and when, follows from the contract alone.

Importing this needs pytest and hypothesis.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvloft.tiers.base import Chunk, Namespace, Outcome, Tier, TierStats
from kvloft.units import PAGE_BYTES, page_aligned

SIZES = {"f": 20_000, "W0": 3 * PAGE_BYTES, "s": PAGE_BYTES + 1, "w0": 1}
"""Exact bytes of the chunks of each class: of whole pages, and just not."""

AMPLE = 64 << 20
"""Bytes that hold all that a test puts, unless it says otherwise."""

_GUARD = b"\xa7" * PAGE_BYTES
_DIGEST = b"\x01" * 16

P = TypeVar("P")
_T = TypeVar("_T")


def namespace(digest: bytes = _DIGEST, *, has_full: bool = True) -> Namespace:
    """A namespace with chunks of :data:`SIZES`."""
    slots = sorted({page_aligned(size) for size in SIZES.values()}, reverse=True)
    return Namespace(digest, tuple(slots), has_full, {"model": "test"})


def chain(
    name: object, depth: int, *, above: Chunk | None = None, key_bytes: int = 32
) -> list[Chunk]:
    """The full chunks of a path, parents first; ``above`` is the one that it continues."""
    rng = random.Random(f"{name}")
    out: list[Chunk] = []
    for _ in range(depth):
        parent, at = (above.key, above.depth) if above else (b"", 0)
        above = Chunk(rng.randbytes(key_bytes), "f", parent, at + 1, SIZES["f"])
        out.append(above)
    return out


def beside(full: Chunk, *codes: str) -> list[Chunk]:
    """The chunks of other classes at the same boundary."""
    return [full._replace(code=code, nbytes=SIZES[code]) for code in codes]


def with_all(path: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of a path, each followed by those of all other classes at its boundary."""
    return [one for full in path for one in (full, *beside(full, "s", "w0", "W0"))]


def needs(chunk: Chunk) -> tuple[bytes, str] | None:
    """What has to be held for ``chunk`` to be held, in a namespace with full chunks."""
    if chunk.code != "f":
        return (chunk.key, "f")
    return (chunk.parent, "f") if chunk.parent else None


@lru_cache(maxsize=2048)
def content(chunk: Chunk, digest: bytes = _DIGEST) -> bytes:
    """What belongs in a chunk: different for every name in every namespace."""
    seed = b"/".join([digest, chunk.key, chunk.code.encode()])
    return random.Random(seed).randbytes(chunk.nbytes)


class Slot:
    """A chunk's slot, with guards on both sides."""

    def __init__(self, chunk: Chunk, data: bytes = b"") -> None:
        self.size = page_aligned(chunk.nbytes)
        self._memory = mmap.mmap(-1, self.size + 2 * PAGE_BYTES)
        whole = memoryview(self._memory)
        whole[:] = _GUARD * (len(whole) // PAGE_BYTES)
        self.view = whole[PAGE_BYTES:-PAGE_BYTES]
        self.view[: len(data)] = data

    def check_guards(self) -> None:
        """Fail if anything outside of the slot was written."""
        end = PAGE_BYTES + self.size
        assert self._memory[:PAGE_BYTES] == _GUARD, "bytes before the slot were written"
        assert self._memory[end:] == _GUARD, "bytes behind the slot were written"


class Checked:
    """A tier, all of whose answers are checked."""

    def __init__(self, tier: Tier, names: Namespace, patience: float) -> None:
        self.tier = tier
        self.namespace = names
        self._patience = patience

    def wait(self, future: Future[_T] | None) -> _T:
        """What a future ends as; fails if it does not end, or holds an exception."""
        assert future is not None, "the queue is full although nothing waits in it"
        error = future.exception(self._patience)
        assert error is None, f"a future holds {error!r}"
        return future.result()

    def try_put(self, chunk: Chunk, deadline: float | None = None) -> Future[Outcome] | None:
        """Begin a put of the right bytes."""
        slot = Slot(chunk, content(chunk, self.namespace.digest))
        future = self.tier.put(chunk, slot.view, deadline)
        if future is not None:
            # The slot must live until then. An assertion in a callback would be lost.
            future.slot = slot  # type: ignore[attr-defined]
        return future

    def begin_put(self, chunk: Chunk, deadline: float | None = None) -> Future[Outcome]:
        """Begin a put, when there is room in the queue."""
        end = time.monotonic() + self._patience
        while (future := self.try_put(chunk, deadline)) is None:
            assert time.monotonic() < end, "the queue stays full"
            time.sleep(0.001)
        return future

    def put_all(self, chunks: Iterable[Chunk]) -> list[Outcome]:
        """Put back to back, then wait for all."""
        futures = [self.begin_put(chunk) for chunk in chunks]
        return [self.end_put(future) for future in futures]

    def end_put(self, future: Future[Outcome]) -> Outcome:
        """Wait for a put."""
        outcome = self.wait(future)
        assert outcome in (Outcome.DONE, Outcome.REFUSED, Outcome.LATE, Outcome.FAILED)
        future.slot.check_guards()  # type: ignore[attr-defined]
        return outcome

    def put(self, chunk: Chunk, deadline: float | None = None) -> Outcome:
        """Put and wait."""
        return self.end_put(self.begin_put(chunk, deadline))

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Put what has to be held afterwards."""
        chunks = list(chunks)
        outcomes = self.put_all(chunks)
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            assert outcome is Outcome.DONE, f"a put of {describe(chunk)} ended {outcome}"
            assert self.holds(chunk), f"{describe(chunk)} has been put and is not held"

    def get(self, chunk: Chunk, deadline: float | None = None) -> Outcome:
        """Get and wait; fails if the get is DONE and the bytes are not those that belong there."""
        slot = Slot(chunk)
        end = time.monotonic() + self._patience
        while (future := self.tier.get(chunk, slot.view, deadline)) is None:
            assert time.monotonic() < end, "the queue stays full"
            time.sleep(0.001)
        outcome = self.wait(future)
        assert outcome is not Outcome.REFUSED
        slot.check_guards()
        if outcome is Outcome.DONE:
            got = bytes(slot.view[: chunk.nbytes])
            assert got == content(chunk, self.namespace.digest), (
                f"wrong bytes of {describe(chunk)}, first at "
                f"{first_difference(got, content(chunk, self.namespace.digest))}"
            )
        return outcome

    def expect(self, chunks: Iterable[Chunk], outcome: Outcome = Outcome.DONE) -> None:
        """Get chunks, all of which must end as ``outcome``."""
        for chunk in chunks:
            got = self.get(chunk)
            assert got is outcome, f"a get of {describe(chunk)} ended {got}"

    def holds(self, chunk: Chunk) -> bool:
        return self.tier.holds(chunk.key, chunk.code)

    def held(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if self.holds(chunk)]

    def contains(self, chunks: Sequence[Chunk], deadline: float | None = None) -> list[bool]:
        """Ask the place."""
        answer = self.wait(self.tier.contains(chunks, deadline))
        assert len(answer) == len(chunks)
        return answer

    def delete(self, chunks: Sequence[Chunk]) -> int:
        """Delete and wait."""
        return self.wait(self.tier.delete(chunks))

    def scan(self) -> set[tuple[bytes, str]]:
        """Names, keys shortened to 16 bytes; fails if a child comes before its parent."""
        seen: set[tuple[bytes, str]] = set()
        for chunk in self.tier.scan():
            if self.namespace.has_full and (above := needs(chunk)) is not None:
                assert (above[0][:16], above[1]) in seen, f"{describe(chunk)} before its parent"
            assert (chunk.key[:16], chunk.code) not in seen, f"{describe(chunk)} twice"
            seen.add((chunk.key[:16], chunk.code))
        return seen

    def check(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Fail unless what is held of ``chunks``, which are all that there are, is prefix-closed
        and exact, all accounts agree and the limit is kept. What is held. For a tier at rest."""
        held = self.held(chunks)
        names = {(chunk.key, chunk.code) for chunk in held}
        for chunk in held if self.namespace.has_full else ():
            above = needs(chunk)
            assert above is None or above in names, f"{describe(chunk)} is held without its parent"
        there = self.contains(chunks)
        assert [c for c, found in zip(chunks, there, strict=True) if found] == held, (
            "contains() and holds() disagree"
        )
        assert self.scan() == {(key[:16], code) for key, code in names}, (
            "scan() and holds() disagree"
        )
        stats = self.tier.stats()
        assert stats.chunks == len(held)
        assert 0 <= stats.used_bytes <= stats.limit_bytes
        self.expect(held)
        return held


def describe(chunk: Chunk) -> str:
    """A chunk, for people."""
    return f"{chunk.code} {chunk.key[:4].hex()}… at depth {chunk.depth}"


def first_difference(a: bytes, b: bytes) -> int:
    """The first index at which two sequences differ."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@contextmanager
def watch(checked: Checked, chunks: Sequence[Chunk]) -> Iterator[None]:
    """Look all the time whether the limit is kept and the tier is prefix-closed, while something
    else goes on that puts no chunk again."""
    faults: list[str] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set() and not faults:
            for chunk in chunks:
                stats = checked.tier.stats()
                if stats.used_bytes > stats.limit_bytes:
                    faults.append(f"{stats.used_bytes} of {stats.limit_bytes} bytes are used")
                above = needs(chunk)
                # The child is asked twice: in between both may have gone.
                if (
                    above is not None
                    and checked.holds(chunk)
                    and not checked.tier.holds(*above)
                    and checked.holds(chunk)
                ):
                    faults.append(f"{describe(chunk)} is held without its parent")
                time.sleep(0)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not faults, faults[0]


class TierTests(Generic[P]):
    """Proves a tier. ``P`` is what your tiers are opened on: a path, an address, an object."""

    persistent: ClassVar[bool] = True
    """Whether a place keeps its chunks when the tier on it is closed."""
    shareable: ClassVar[bool] = True
    """Whether several tiers may be open on one place, of one namespace or of several."""
    small_bytes: ClassVar[int] = 1 << 20
    """A limit that some dozens of chunks exceed, for tests of eviction."""
    patience: ClassVar[float] = 20.0
    """Seconds after which something that has not happened never will."""
    examples: ClassVar[int] = 30
    """Random sequences to try."""
    shrink: ClassVar[bool] = True
    """Whether to look for a short one if one fails."""

    def new_place(self, path: Path) -> P:
        """An empty place; ``path`` is a directory for it, which may be missing."""
        raise NotImplementedError

    def open_tier(self, place: P, names: Namespace, *, max_bytes: int, queue_bytes: int) -> Tier:
        """A tier on ``place``. ``queue_bytes``: of the puts that may wait, roughly."""
        raise NotImplementedError

    def stalled(self, place: P, tier: Tier) -> AbstractContextManager[object] | None:
        """A context in which no work on ``place`` gets done, as if the medium hung; ``None`` if you
        have no such thing. Tests of the queue need it."""
        return None

    def damage(self, place: P, names: Namespace, chunk: Chunk) -> bool:
        """Change a bit of a chunk's bytes behind the tier's back; ``False`` if you can't."""
        return False

    # ---------------------------------------------------------------- help

    @contextmanager
    def opened(
        self,
        place: P,
        names: Namespace | None = None,
        *,
        max_bytes: int = AMPLE,
        queue_bytes: int = AMPLE,
    ) -> Iterator[Checked]:
        """A tier that is closed afterwards."""
        names = names or namespace()
        tier = self.open_tier(place, names, max_bytes=max_bytes, queue_bytes=queue_bytes)
        try:
            yield Checked(tier, names, self.patience)
        finally:
            tier.close()

    @contextmanager
    def stalling(self, place: P, checked: Checked) -> Iterator[None]:
        """As :meth:`stalled`, or skip."""
        context = self.stalled(place, checked.tier)
        if context is None:
            pytest.skip("this tier can't be stalled")
        with context:
            yield

    def eventually(self, condition: Callable[[], bool], message: str) -> None:
        """Wait until ``condition`` holds."""
        end = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < end, message
            time.sleep(0.005)

    def promptly(self, call: Callable[[], _T]) -> _T:
        """What ``call`` returns; fails if it blocks."""
        out: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                out.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience)
        assert not thread.is_alive(), "a call blocks"
        if errors:
            raise errors[0]
        return out[0]

    def all_at_once(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make calls in a thread each, and fail as the first that fails."""
        errors: list[BaseException] = []

        def run(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def many(self, factor: float) -> list[list[Chunk]]:
        """Paths of 6 full chunks and as many states, ``factor`` times :attr:`small_bytes`."""
        each = 6 * (SIZES["f"] + SIZES["s"])
        paths = [chain(("many", i), 6) for i in range(int(factor * self.small_bytes / each) + 1)]
        return [[one for full in path for one in (full, *beside(full, "s"))] for path in paths]

    @pytest.fixture(autouse=True)
    def no_thread_is_left(self) -> Iterator[None]:
        """Whatever a test does, closing ends all threads."""
        before = set(threading.enumerate())
        yield
        self.eventually(lambda: set(threading.enumerate()) <= before, "a thread is left")

    # ---------------------------------------------------------------- bytes

    @pytest.mark.parametrize("key_bytes", [16, 20, 32, 64])
    def test_every_byte_comes_back(self, tmp_path: Path, key_bytes: int) -> None:
        chunks = with_all(chain("bytes", 4, key_bytes=key_bytes))
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(chunks)
            tier.expect(chunks)
            tier.expect(reversed(chunks))
            assert tier.check(chunks) == chunks

    def test_what_is_put_is_copied(self, tmp_path: Path) -> None:
        with self.opened(self.new_place(tmp_path)) as tier:
            for chunk in with_all(chain("copies", 2)):
                slot = Slot(chunk, content(chunk))
                assert tier.wait(tier.tier.put(chunk, slot.view)) is Outcome.DONE
                slot.check_guards()
                assert bytes(slot.view[: chunk.nbytes]) == content(chunk)
                slot.view[:] = bytes(slot.size)
                assert tier.get(chunk) is Outcome.DONE

    def test_what_is_got_is_a_copy(self, tmp_path: Path) -> None:
        [chunk] = chain("copies", 1)
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill([chunk])
            slot = Slot(chunk)
            assert tier.wait(tier.tier.get(chunk, slot.view)) is Outcome.DONE
            slot.view[:] = bytes(slot.size)
            assert tier.get(chunk) is Outcome.DONE

    def test_a_put_of_what_is_there_is_done(self, tmp_path: Path) -> None:
        chunks = with_all(chain("again", 3))
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(chunks)
            used = tier.tier.stats().used_bytes
            tier.fill(chunks)
            tier.fill(reversed(chunks))
            assert tier.tier.stats().used_bytes == used
            assert tier.check(chunks) == chunks

    def test_absent_chunks_are_missing(self, tmp_path: Path) -> None:
        there, absent = with_all(chain("there", 2)), with_all(chain("absent", 2))
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.expect(absent, Outcome.MISSING)
            tier.fill(there)
            tier.expect(absent, Outcome.MISSING)
            assert not tier.held(absent)
            assert tier.contains([*absent, *there]) == [False] * len(absent) + [True] * len(there)
            assert tier.contains([]) == []

    def test_neither_another_key_nor_another_class_is_served(self, tmp_path: Path) -> None:
        [full] = chain("names", 1)
        [state] = beside(full, "s")
        flipped = full._replace(key=full.key[:15] + bytes([full.key[15] ^ 1]) + full.key[16:])
        others = [
            flipped,
            *beside(full, "w0", "W0"),
            full._replace(code="w1"),
            *beside(flipped, "s"),
        ]
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill([full, state])
            assert not tier.held(others)
            tier.expect(others, Outcome.MISSING)
            assert tier.check([full, state, *others]) == [full, state]

    def test_a_chunk_of_another_length_is_never_done(self, tmp_path: Path) -> None:
        for nbytes in (SIZES["f"] - 1, SIZES["f"] + 1, 1):
            [chunk] = chain(("length", nbytes), 1)
            with self.opened(self.new_place(tmp_path / f"{nbytes}")) as tier:
                tier.fill([chunk])
                assert tier.get(chunk._replace(nbytes=nbytes)) in (
                    Outcome.DAMAGED,
                    Outcome.MISSING,
                )

    def test_damage_is_noticed(self, tmp_path: Path) -> None:
        place, path = self.new_place(tmp_path), chain("damage", 4)
        chunks, victim = with_all(path), path[1]
        gone = chunks[chunks.index(victim) :]
        with self.opened(place) as tier:
            tier.fill(chunks)
            if not self.damage(place, tier.namespace, victim):
                pytest.skip("this tier's chunks can't be damaged")
            assert tier.get(victim) is Outcome.DAMAGED
            # It is removed, and what is of no use without it.
            self.eventually(lambda: not tier.held(gone), "a damaged chunk is still held")
            assert tier.check(chunks) == chunks[: chunks.index(victim)]
            tier.expect([victim], Outcome.MISSING)
            assert sum(tier.tier.stats().faults.values()) > 0
            tier.fill(gone)
            assert tier.check(chunks) == chunks

    # ---------------------------------------------------------------- namespaces

    def test_namespaces_do_not_see_each_other(self, tmp_path: Path) -> None:
        if not self.shareable:
            pytest.skip("one tier a place")
        chunks = with_all(chain("shared keys", 3))
        other = namespace(_DIGEST[:-1] + b"\x02")
        place = self.new_place(tmp_path)
        with self.opened(place) as mine, self.opened(place, other) as theirs:
            mine.fill(chunks)
            assert theirs.check(chunks) == []
            theirs.expect(chunks, Outcome.MISSING)
            assert theirs.put(chunks[-1]) is Outcome.REFUSED
            assert theirs.delete(chunks) == 0
            assert mine.check(chunks) == chunks
            theirs.fill(chunks)
            assert theirs.check(chunks) == mine.check(chunks) == chunks
            assert mine.delete(chunks[:1]) == len(chunks)
            assert theirs.check(chunks) == chunks
            # One limit holds for all.
            self.eventually(
                lambda: mine.tier.stats().used_bytes == theirs.tier.stats().used_bytes,
                "what others use is not counted",
            )

    def test_another_namespace_finds_nothing_after_a_restart(self, tmp_path: Path) -> None:
        chunks, place = with_all(chain("shared keys", 2)), self.new_place(tmp_path)
        with self.opened(place) as tier:
            tier.fill(chunks)
        with self.opened(place, namespace(b"\x02" + _DIGEST[1:])) as tier:
            assert tier.check(chunks) == []
            tier.expect(chunks, Outcome.MISSING)

    # ---------------------------------------------------------------- prefix-closed

    def test_a_child_without_its_parent_is_refused(self, tmp_path: Path) -> None:
        path = chain("orphan", 3)
        with self.opened(self.new_place(tmp_path)) as tier:
            for chunk in reversed(with_all(path)):
                if needs(chunk) is not None:
                    assert tier.put(chunk) is Outcome.REFUSED, describe(chunk)
            assert tier.check(with_all(path)) == []
            tier.fill(path[:2])
            assert tier.put(path[2]._replace(parent=b"\x55" * 32)) is Outcome.REFUSED
            tier.fill(path[2:])

    def test_without_full_chunks_nothing_depends(self, tmp_path: Path) -> None:
        rest = [one for one in with_all(chain("no full", 3)) if one.code != "f"]
        with self.opened(self.new_place(tmp_path), namespace(has_full=False)) as tier:
            tier.fill(reversed(rest))
            assert tier.check(rest) == rest
            assert tier.delete(rest[:1]) == 1
            assert tier.check(rest) == rest[1:]

    def test_parents_and_children_back_to_back(self, tmp_path: Path) -> None:
        trunk = chain("trunk", 100)
        branches = [chain(("branch", i), 3, above=trunk[10 * i]) for i in range(5)]
        chunks = with_all([*trunk, *(one for branch in branches for one in branch)])
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(chunks)
            assert tier.check(chunks) == chunks

    def test_nothing_is_kept_below_a_put_that_ends_badly(self, tmp_path: Path) -> None:
        path = chain("late parent", 3)
        with self.opened(self.new_place(tmp_path)) as tier:
            futures = [tier.begin_put(path[0], time.monotonic() - 1)]
            futures += [tier.begin_put(chunk) for chunk in with_all(path)[1:]]
            outcomes = [tier.end_put(future) for future in futures]
            assert Outcome.DONE not in outcomes
            assert tier.check(with_all(path)) == []

    def test_delete_takes_what_depends(self, tmp_path: Path) -> None:
        trunk = chain("trunk", 4)
        left, right = (chain(side, 3, above=trunk[1]) for side in ("left", "right"))
        chunks = with_all([*trunk, *left, *right])
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(chunks)
            kept = list(chunks)

            def delete(targets: Sequence[Chunk], gone: Sequence[Chunk]) -> None:
                assert tier.delete(targets) == len(gone)
                kept[:] = [chunk for chunk in kept if chunk not in gone]
                assert tier.check(chunks) == kept
                tier.expect(gone, Outcome.MISSING)

            delete(chain("absent", 2), [])
            delete([], [])
            delete(beside(left[0], "s"), beside(left[0], "s"))
            delete(left[1:2], with_all(left[1:]))
            delete(left[1:2], [])
            # Whatever the order, each is counted once.
            delete([right[2], right[1], right[2]], with_all(right[1:]))
            delete(trunk[1:2], [one for one in kept if one.depth > 2 or one.key == trunk[1].key])
            tier.fill(chunks)
            assert tier.check(chunks) == chunks
            assert tier.delete(chunks) == len(chunks)
            assert tier.check(chunks) == []

    def test_scan_tells_all_there_is_to_know(self, tmp_path: Path) -> None:
        chunks = with_all(chain("scan", 5)) + with_all(chain("scan as well", 3))
        with self.opened(self.new_place(tmp_path)) as tier:
            assert list(tier.tier.scan()) == []
            tier.fill(chunks)
            assert tier.scan() == {(chunk.key[:16], chunk.code) for chunk in chunks}
            scanned = {(chunk.key[:16], chunk.code): chunk for chunk in tier.tier.scan()}
            for chunk in chunks:
                found = scanned[chunk.key[:16], chunk.code]
                assert found.key in (chunk.key, chunk.key[:16])
                assert found.parent in (chunk.parent, chunk.parent[:16])
                assert (found.depth, found.nbytes) == (chunk.depth, chunk.nbytes)

    # ---------------------------------------------------------------- the limit

    def test_the_limit_is_never_exceeded(self, tmp_path: Path) -> None:
        paths = self.many(3)
        chunks = [chunk for path in paths for chunk in path]
        with self.opened(self.new_place(tmp_path), max_bytes=self.small_bytes) as tier:
            assert tier.tier.stats().limit_bytes <= self.small_bytes
            with watch(tier, chunks):
                outcomes = tier.put_all(chunks)
            assert set(outcomes) <= {Outcome.DONE, Outcome.REFUSED}
            held = tier.check(chunks)
            assert held
            assert len(held) < len(chunks)
            # Old chunks make room for new ones.
            assert any(chunk in paths[-1] for chunk in held)
            assert tier.tier.stats().evicted_chunks > 0

    def test_a_path_longer_than_the_limit(self, tmp_path: Path) -> None:
        path = chain("long", 2 * self.small_bytes // SIZES["f"])
        with self.opened(self.new_place(tmp_path), max_bytes=self.small_bytes) as tier:
            with watch(tier, path):
                outcomes = tier.put_all(path)
            assert outcomes[0] is Outcome.DONE
            assert Outcome.REFUSED in outcomes
            held = tier.check(path)
            assert held == path[: len(held)]
            assert held

    def test_touched_chunks_outlive_others(self, tmp_path: Path) -> None:
        # The older half, which would go first if nothing were touched.
        touched, others = self._outlived(
            tmp_path, slice(None, None, -1), lambda tier, chunks: tier.touch(chunks)
        )
        assert touched > others, f"of the touched {touched} are left, of the others {others}"

    def test_demoted_chunks_go_first(self, tmp_path: Path) -> None:
        # The newer half, which would go last.
        demoted, others = self._outlived(
            tmp_path, slice(None), lambda tier, chunks: tier.demote(chunks)
        )
        assert demoted < others, f"of the demoted {demoted} are left, of the others {others}"

    def _outlived(
        self, tmp_path: Path, order: slice, hint: Callable[[Tier, Sequence[Chunk]], None]
    ) -> tuple[int, int]:
        """How many are left of the chunks that a hint was given for, and of as many others, when
        half have been evicted. ``order``: of the chunks put, to have those last that are hinted."""
        half = self.small_bytes // 4 // SIZES["f"]
        old = [chain(("old", i), 1)[0] for i in range(2 * half)]
        hinted = old[order][half:]
        with self.opened(self.new_place(tmp_path), max_bytes=self.small_bytes) as tier:
            tier.fill(old)
            hint(tier.tier, [*hinted, *chain("absent", 1)])
            for i in range(40 * half):
                tier.put(chain(("new", i), 1)[0])
                if len(tier.held(old)) <= len(old) // 2:
                    break
            left = tier.held(old)
        assert len(left) < len(old), "nothing is evicted"
        return sum(one in hinted for one in left), sum(one not in hinted for one in left)

    # ---------------------------------------------------------------- the queue

    def test_a_full_queue_takes_nothing_on(self, tmp_path: Path) -> None:
        place, limit = self.new_place(tmp_path), 4 * PAGE_BYTES * 5
        [there] = chain("there", 1)
        chunks = [chain(("full", i), 1)[0] for i in range(500)]
        with self.opened(place, queue_bytes=limit) as tier:
            tier.fill([there])
            with self.stalling(place, tier):
                futures = [self.promptly(lambda c=c: tier.try_put(c)) for c in chunks]  # type: ignore[misc]
                taken = [c for c, future in zip(chunks, futures, strict=True) if future is not None]
                refused = [c for c in chunks if c not in taken]
                assert taken, "an empty queue takes nothing"
                assert refused, "the queue has no bound"
                stats = self.promptly(tier.tier.stats)
                assert 0 < stats.queued_puts <= len(taken)
                assert 0 < stats.queued_put_bytes <= len(taken) * SIZES["f"]
                # Nothing else blocks either, whether there is room for it or not.
                slots = [Slot(there) for _ in range(500)]
                gets = [
                    self.promptly(lambda s=s: tier.tier.get(there, s.view))  # type: ignore[misc]
                    for s in slots
                ]
                assert gets[0] is not None, "gets wait for room that puts take"
                asked = self.promptly(lambda: tier.tier.contains([there]))
                again = self.promptly(lambda: tier.try_put(there))
                assert again is not None
                assert again.done(), "what is there is not done at once"
                self.promptly(lambda: tier.tier.touch([there]))
                self.promptly(lambda: tier.tier.demote([there]))
                assert self.promptly(lambda: tier.holds(there))
                assert self.promptly(lambda: list(tier.tier.scan()))
            for future in futures:
                assert future is None or tier.end_put(future) is Outcome.DONE
            for get in gets:
                assert get is None or tier.wait(get) is Outcome.DONE
            assert asked is None or tier.wait(asked) == [True]
            assert tier.check([there, *chunks]) == [there, *taken]
            tier.fill(refused[:3])

    def test_gets_go_before_puts(self, tmp_path: Path) -> None:
        place = self.new_place(tmp_path)
        there = chain("there", 2)
        chunks = [chain(("behind", i), 1)[0] for i in range(60)]
        ended: list[str] = []
        with self.opened(place) as tier:
            tier.fill(there)
            slots = [Slot(chunk) for chunk in there]
            with self.stalling(place, tier):
                puts = [tier.begin_put(chunk) for chunk in chunks]
                gets = [tier.tier.get(c, s.view) for c, s in zip(there, slots, strict=True)]
                for put in puts:
                    put.add_done_callback(lambda _: ended.append("put"))
                for get in gets:
                    assert get is not None
                    get.add_done_callback(lambda _: ended.append("get"))
            assert [tier.wait(get) for get in gets] == [Outcome.DONE] * 2
            assert {tier.end_put(put) for put in puts} == {Outcome.DONE}
            self.eventually(lambda: len(ended) == 62, "a callback has not been called")
            last = max(i for i, kind in enumerate(ended) if kind == "get")
            assert last < 31, f"a get ended after {last - 1} of 60 puts before it"

    def test_past_deadlines_are_late(self, tmp_path: Path) -> None:
        there, new = chain("there", 1), chain("new", 1)
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(there)
            past, future = time.monotonic() - 1, time.monotonic() + 3600
            assert tier.put(new[0], past) is Outcome.LATE
            assert tier.check(there + new) == there
            assert tier.get(there[0], past) is Outcome.LATE
            assert tier.contains(there, past) == [False]
            assert tier.check(there + new) == there
            assert tier.get(there[0], future) is Outcome.DONE
            assert tier.contains(there + new, future) == [True, False]
            assert tier.put(new[0], future) is Outcome.DONE
            stats = tier.tier.stats()
            assert stats.puts[Outcome.LATE.value] == stats.gets[Outcome.LATE.value] == 1

    def test_deadlines_pass_in_the_queue(self, tmp_path: Path) -> None:
        place = self.new_place(tmp_path)
        [there] = chain("there", 1)
        chunks = [chain(("behind", i), 1)[0] for i in range(60)]
        with self.opened(place) as tier:
            tier.fill([there])
            with self.stalling(place, tier):
                deadline = time.monotonic() + 0.1
                puts = [tier.begin_put(chunk, deadline) for chunk in chunks]
                slots = [Slot(there) for _ in range(60)]
                gets = [tier.tier.get(there, slot.view, deadline) for slot in slots]
                asked = tier.tier.contains([there], deadline)
                time.sleep(max(0.0, deadline - time.monotonic()) + 0.01)
            outcomes = [tier.end_put(put) for put in puts]
            assert set(outcomes) <= {Outcome.DONE, Outcome.LATE}
            assert outcomes[-1] is Outcome.LATE
            assert tier.wait(gets[-1]) is Outcome.LATE
            assert {tier.wait(get) for get in gets} <= {Outcome.DONE, Outcome.LATE}
            assert tier.wait(asked) == [False]
            done = [c for c, out in zip(chunks, outcomes, strict=True) if out is Outcome.DONE]
            assert tier.check([there, *chunks]) == [there, *done]

    def test_callbacks_may_call_back(self, tmp_path: Path) -> None:
        path = chain("callback", 2)
        answers: list[object] = []
        told = threading.Event()
        with self.opened(self.new_place(tmp_path)) as tier:

            def call_back(_: Future[Outcome]) -> None:
                answers.append(tier.holds(path[0]))
                answers.append(tier.tier.stats().chunks)
                answers.extend(tier.tier.scan())
                tier.tier.touch(path)
                answers.append(tier.tier.contains(path))
                answers.append(tier.try_put(path[1]))
                told.set()
                raise RuntimeError("callbacks may fail, too")

            # The standard library logs what callbacks raise; that is no failure of the tier.
            tier.begin_put(path[0]).add_done_callback(call_back)
            assert told.wait(self.patience), "a callback blocks"
            assert answers[0] is True
            future = answers[-1]
            assert isinstance(future, Future)
            assert tier.end_put(future) is Outcome.DONE
            assert tier.check(path) == path

    def test_cancelling_breaks_nothing(self, tmp_path: Path) -> None:
        place = self.new_place(tmp_path)
        path = chain("cancel", 4)
        with self.opened(place) as tier:
            with self.stalling(place, tier):
                futures = [tier.begin_put(chunk) for chunk in path]
                # A buffer is in use until its future is done, and a cancelled future is done.
                assert not any(future.cancel() for future in futures)
            assert {tier.end_put(future) for future in futures} == {Outcome.DONE}
            assert tier.check(path) == path

    # ---------------------------------------------------------------- the end

    def test_afterwards_all_is_empty_and_full(self, tmp_path: Path) -> None:
        chunks = with_all(chain("closed", 2))
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(chunks)
            tier.tier.close()
            for _ in range(2):
                assert not tier.held(chunks)
                assert list(tier.tier.scan()) == []
                assert tier.try_put(chunks[0]) is None
                assert tier.try_put(chain("new", 1)[0]) is None
                assert tier.tier.get(chunks[0], Slot(chunks[0]).view) is None
                assert tier.tier.contains(chunks) is None
                assert tier.tier.delete(chunks) is None
                tier.tier.touch(chunks)
                tier.tier.demote(chunks)
                stats = tier.tier.stats()
                assert (stats.chunks, stats.queued_puts, stats.queued_gets) == (0, 0, 0)
                assert tier.tier.name
                tier.tier.close(0.0)

    def test_closing_ends_what_is_queued(self, tmp_path: Path) -> None:
        place = self.new_place(tmp_path)
        [there] = chain("there", 1)
        chunks = [chain(("left", i), 1)[0] for i in range(60)]
        with self.opened(place) as tier:
            tier.fill([there])
            with self.stalling(place, tier):
                puts = [tier.begin_put(chunk) for chunk in chunks]
                slots = [Slot(there) for _ in range(60)]
                gets = [tier.tier.get(there, slot.view) for slot in slots]
                asked, deleted = tier.tier.contains([there]), tier.tier.delete([there])
                self.promptly(lambda: tier.tier.close(0.05))
                # What is under way may go on, but only a few can be.
                late = [f for f in (*puts, *gets) if f is not None and f.done()]
                assert len(late) > 60, "what is queued does not end"
                assert {tier.wait(f) for f in late} == {Outcome.LATE}
                self.promptly(lambda: tier.tier.close(0.05))
            # Now what was under way ends, as it likes.
            outcomes = [tier.end_put(put) for put in puts]
            assert set(outcomes) <= {Outcome.DONE, Outcome.LATE}
            assert {tier.wait(get) for get in gets} <= {Outcome.DONE, Outcome.LATE}
            assert tier.wait(asked) in ([False], [True])
            assert tier.wait(deleted) in (0, 1)
            kept = tier.wait(deleted) == 0
            done = [c for c, out in zip(chunks, outcomes, strict=True) if out is Outcome.DONE]
        if self.persistent:
            with self.opened(place) as tier:
                assert tier.check([there, *chunks]) == [there] * kept + done

    def test_closing_in_the_middle(self, tmp_path: Path) -> None:
        place = self.new_place(tmp_path)
        chunks = [chunk for path in self.many(1) for chunk in path]
        with self.opened(place) as tier:
            futures = [tier.begin_put(chunk) for chunk in chunks]
            self.all_at_once([tier.tier.close] * 3)
            outcomes = [tier.end_put(future) for future in futures]
        assert set(outcomes) <= {Outcome.DONE, Outcome.LATE, Outcome.REFUSED}
        if self.persistent:
            done = [c for c, out in zip(chunks, outcomes, strict=True) if out is Outcome.DONE]
            with self.opened(place) as tier:
                assert tier.check(chunks) == done

    def test_closing_ends_all_threads(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with self.opened(self.new_place(tmp_path)) as tier:
            tier.fill(with_all(chain("threads", 3)))
        assert set(threading.enumerate()) <= before, "a thread is left"

    # ---------------------------------------------------------------- restarts and neighbours

    def test_chunks_survive_a_restart(self, tmp_path: Path) -> None:
        if not self.persistent:
            pytest.skip("not persistent")
        place, path = self.new_place(tmp_path), chain("restart", 8)
        chunks = with_all(path[:4])
        with self.opened(place) as tier:
            tier.fill(chunks)
            used = tier.tier.stats().used_bytes
        with self.opened(place) as tier:
            assert tier.check(chunks) == chunks
            stats = tier.tier.stats()
            assert stats.used_bytes <= max(used, stats.limit_bytes)
            assert not any(stats.puts.values())
            tier.fill(chunks)
            tier.fill(path[4:6])
            assert tier.delete(beside(path[0], "s")) == 1
        with self.opened(place) as tier:
            kept = [chunk for chunk in chunks if chunk != beside(path[0], "s")[0]]
            assert tier.check([*chunks, *path[4:]]) == [*kept, *path[4:6]]
            assert tier.put(path[7]) is Outcome.REFUSED
            assert tier.delete(path[:1]) == len(kept) + 2
        with self.opened(place) as tier:
            assert tier.check([*chunks, *path[4:]]) == []

    def test_a_lower_limit_after_a_restart(self, tmp_path: Path) -> None:
        if not self.persistent:
            pytest.skip("not persistent")
        place = self.new_place(tmp_path)
        chunks = [chunk for path in self.many(2) for chunk in path]
        with self.opened(place) as tier:
            tier.fill(chunks)
        with self.opened(place, max_bytes=self.small_bytes) as tier:
            self.eventually(
                lambda: tier.tier.stats().used_bytes <= self.small_bytes, "the limit is not kept"
            )
            assert tier.check(chunks)
            tier.fill(chain("new", 3))

    def test_two_tiers_share_what_they_keep(self, tmp_path: Path) -> None:
        if not self.shareable:
            pytest.skip("one tier a place")
        place, path = self.new_place(tmp_path), chain("shared", 6)
        top, rest = with_all(path[:3]), with_all(path[3:])
        with self.opened(place) as one, self.opened(place) as two:
            one.fill(top)
            assert two.contains(top) == [True] * len(top)
            self.eventually(lambda: two.held(top) == top, "chunks of others are not found")
            two.expect(top)
            two.fill(rest)
            self.eventually(lambda: one.held(rest) == rest, "chunks of others are not found")
            assert one.check(top + rest) == two.check(top + rest) == top + rest
            one.fill(top + rest)
            assert two.delete(path[3:4]) == len(rest)
            assert one.contains(rest) == [False] * len(rest)
            one.expect(rest, Outcome.MISSING)
            self.eventually(lambda: not one.held(rest), "what others delete is still held")
            assert one.check(top + rest) == two.check(top + rest) == top

    def test_two_tiers_keep_one_limit(self, tmp_path: Path) -> None:
        if not self.shareable:
            pytest.skip("one tier a place")
        place, paths = self.new_place(tmp_path), self.many(3)
        chunks = [chunk for path in paths for chunk in path]
        other = namespace(_DIGEST[:-1] + b"\x02")
        with (
            self.opened(place, max_bytes=self.small_bytes) as one,
            self.opened(place, other, max_bytes=self.small_bytes) as two,
        ):
            with watch(one, chunks), watch(two, chunks):
                self.all_at_once([lambda: one.put_all(chunks), lambda: two.put_all(chunks)])

            def settled() -> bool:
                # What the other one has evicted may show later.
                return all(
                    tier.contains(chunks) == [tier.holds(c) for c in chunks] for tier in (one, two)
                )

            self.eventually(settled, "what others evict is still held")
            assert one.check(chunks) or two.check(chunks)
            two.check(chunks)

    # ---------------------------------------------------------------- everything at once

    def test_hammering(self, tmp_path: Path) -> None:
        paths = self.many(1.5)
        chunks = [chunk for path in paths for chunk in path]
        with self.opened(
            self.new_place(tmp_path), max_bytes=self.small_bytes, queue_bytes=self.small_bytes // 4
        ) as tier:

            def hammer(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(40):
                    path = rng.choice(paths)
                    some = rng.sample(path, rng.randint(1, 4))
                    match rng.randrange(8):
                        case 0 | 1 | 2:
                            outcomes = tier.put_all(path)
                            assert set(outcomes) <= {Outcome.DONE, Outcome.REFUSED}
                        case 3 | 4:
                            for chunk in some:
                                assert tier.get(chunk) in (Outcome.DONE, Outcome.MISSING)
                        case 5:
                            assert tier.delete(some[:1]) >= 0
                        case 6:
                            tier.tier.touch(some)
                            tier.tier.demote(some[:1])
                        case _:
                            tier.contains(some)
                            tier.held(some)
                            stats = tier.tier.stats()
                            assert stats.used_bytes <= stats.limit_bytes
                            list(tier.tier.scan())

            self.all_at_once([lambda seed=seed: hammer(seed) for seed in range(4)])  # type: ignore[misc]
            tier.check(chunks)
            self.eventually(lambda: at_rest(tier.tier.stats()), "something is queued for ever")

    def test_the_books_are_kept(self, tmp_path: Path) -> None:
        chunks, absent = with_all(chain("books", 3)), chain("absent", 3)
        with self.opened(self.new_place(tmp_path)) as tier:
            before = tier.tier.stats()
            assert (before.chunks, before.put_bytes, before.get_bytes) == (0, 0, 0)
            tier.fill(chunks)
            tier.expect(chunks[:5])
            tier.expect(absent, Outcome.MISSING)
            assert tier.put(absent[2]) is Outcome.REFUSED
            self.eventually(lambda: at_rest(tier.tier.stats()), "something is queued for ever")
            stats = tier.tier.stats()
            assert stats.chunks == len(chunks)
            assert stats.used_bytes > before.used_bytes
            puts, gets = ({k: n for k, n in d.items() if n} for d in (stats.puts, stats.gets))
            assert puts == {Outcome.DONE.value: len(chunks), Outcome.REFUSED.value: 1}
            assert gets == {Outcome.DONE.value: 5, Outcome.MISSING.value: 3}
            assert stats.put_bytes == sum(chunk.nbytes for chunk in chunks)
            assert stats.get_bytes == sum(chunk.nbytes for chunk in chunks[:5])
            assert stats.evicted_chunks == 0

    @pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "tight"])
    def test_random_sequences(self, tmp_path: Path, roomy: bool) -> None:
        paths = self.many(1.5)
        chunks = [chunk for path in paths for chunk in path]
        operations = ["path", "path", "put", "get", "delete", "touch", "demote", "reopen"]
        steps = st.tuples(st.sampled_from(operations), st.integers(0, len(chunks) - 1))
        number = 0

        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if self.shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(steps, min_size=10, max_size=60))
        def run(sequence: list[tuple[str, int]]) -> None:
            nonlocal number
            number += 1
            place = self.new_place(tmp_path / f"{number}")
            model = _Model(chunks, AMPLE if roomy else self.small_bytes)
            if not roomy:
                # More than there is room for, to begin with.
                sequence = [("path", 12 * i + 11) for i in range(len(paths))] + sequence
            while sequence:
                with self.opened(place, max_bytes=model.limit) as tier:
                    sequence = model.run(tier, sequence)
                if not self.persistent:
                    model = _Model(chunks, model.limit)

        run()


def at_rest(stats: TierStats) -> bool:
    """Whether nothing is queued."""
    return not (stats.queued_puts or stats.queued_put_bytes or stats.queued_gets)


class _Model:
    """What a tier must hold: all that was put and not deleted, but for what it says it evicted."""

    def __init__(self, chunks: Sequence[Chunk], limit: int) -> None:
        self.limit = limit
        self._chunks = chunks
        self._held: set[Chunk] = set()
        self._lost = 0
        """Chunks that have gone by themselves since the tier was opened."""

    def run(self, tier: Checked, sequence: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Take steps up to the next restart; those that are left."""
        self._lost = 0
        self._look(tier)
        for at, (operation, index) in enumerate(sequence):
            if operation == "reopen":
                return sequence[at + 1 :]
            getattr(self, f"_{operation}")(tier, self._chunks[index])
            self._look(tier)
        assert set(tier.check(self._chunks)) == self._held
        return []

    def _look(self, tier: Checked) -> None:
        held = set(tier.held(self._chunks))
        assert held <= self._held, "held, but never put or deleted since"
        self._lost += len(self._held - held)
        stats = tier.tier.stats()
        assert stats.used_bytes <= stats.limit_bytes
        assert self._lost <= stats.evicted_chunks, "chunks have gone that were not evicted"
        names = {(chunk.key, chunk.code) for chunk in held}
        for chunk in held:
            above = needs(chunk)
            assert above is None or above in names, f"{describe(chunk)} is held without its parent"
        if self.limit == AMPLE:
            assert stats.evicted_chunks == 0
        self._held = held

    def _put(self, tier: Checked, chunk: Chunk) -> None:
        above = needs(chunk)
        outcome = tier.put(chunk)
        if above is not None and not any((c.key, c.code) == above for c in self._held):
            assert outcome is Outcome.REFUSED
        elif self.limit == AMPLE or chunk in self._held:
            assert outcome is Outcome.DONE
        else:
            assert outcome in (Outcome.DONE, Outcome.REFUSED)
        if outcome is Outcome.DONE:
            self._held.add(chunk)

    def _path(self, tier: Checked, chunk: Chunk) -> None:
        index = self._chunks.index(chunk)
        for one in self._chunks[index - index % 12 : index + 1]:
            self._put(tier, one)
            self._look(tier)

    def _get(self, tier: Checked, chunk: Chunk) -> None:
        expected = Outcome.DONE if chunk in self._held else Outcome.MISSING
        assert tier.get(chunk) is expected

    def _delete(self, tier: Checked, chunk: Chunk) -> None:
        doomed: set[Chunk] = {chunk} & self._held
        for one in self._chunks:  # Parents first.
            if one in self._held and any(needs(one) == (d.key, d.code) for d in doomed):
                doomed.add(one)
        assert tier.delete([chunk]) == len(doomed)
        self._held -= doomed

    def _touch(self, tier: Checked, chunk: Chunk) -> None:
        tier.tier.touch([chunk])

    def _demote(self, tier: Checked, chunk: Chunk) -> None:
        tier.tier.demote([chunk])
