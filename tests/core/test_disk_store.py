"""The store on disk without threads: the limit, the order of eviction, many stores on one path,
crashes and damage. All of it against what a few dictionaries say."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.testing.tiers import chain, content, needs, with_all
from kvloft.tiers.base import Chunk, Outcome
from kvloft.tiers.disk import Store, StoreTools, control
from kvloft.tiers.disk.format import (
    RECORD_BYTES,
    Segment,
    chunk_name,
    reservation,
    unpack_record,
)
from kvloft.tiers.disk.places import Place
from kvloft.tiers.disk.room import FIXED_BYTES, Name
from kvloft.tiers.disk.segments import Files, Slots, aligned
from kvloft.tiers.disk.store import Fill, Want
from kvloft.tiers.disk.survey import Flaw, Selection, Survey
from kvloft.units import PAGE_BYTES, page_aligned

SEEDS = st.integers(0, 2**32 - 1)
DIGEST = b"\x01" * 16
OTHER = b"\x02" * 16


class User:
    """One process's store, driven by hand."""

    def __init__(
        self, path: Path, limit: int | None = None, digest: bytes = DIGEST, seconds: float = 2.0
    ) -> None:
        self.faults: list[str] = []
        self.digest = digest
        self.store = Store(
            path, limit=limit, create=True, fault=lambda cause, _: self.faults.append(cause),
            lock_seconds=seconds,
        )  # fmt: skip
        self.store.load()
        self.number = self.store.join(digest, {"model": "test"})
        self.slots = Slots(self.store.files)

    def want(self, chunk: Chunk, parent_comes: bool = False) -> Want:
        record = reservation(chunk, self.digest, self.number, has_full=True, now=int(time.time()))
        return Want(record, PAGE_BYTES + page_aligned(chunk.nbytes), lambda: parent_comes)

    def reserve(self, chunk: Chunk) -> Place | Outcome:
        name = self.want(chunk).record.support
        self.store.awaited = {Name(self.digest, name): 1} if name else {}
        [place] = self.store.reserve([self.want(chunk)])
        return place

    def write(self, chunk: Chunk, place: Place) -> Outcome:
        data = memoryview(bytearray(page_aligned(chunk.nbytes)))
        data[: chunk.nbytes] = content(chunk, self.digest)
        fill = Fill(place, self.want(chunk).record, chunk.key, data)
        [record] = self.store.write([fill], self.slots)
        [outcome] = self.store.publish([(place, record)])
        return outcome

    def put(self, chunk: Chunk) -> Outcome:
        place = self.reserve(chunk)
        return place if isinstance(place, Outcome) else self.write(chunk, place)

    def get(self, chunk: Chunk) -> Outcome:
        into = memoryview(bytearray(page_aligned(chunk.nbytes)))
        [(outcome, _)] = self.store.read(self.digest, [(chunk, into)], self.slots)
        if outcome is Outcome.DONE:
            assert into[: chunk.nbytes] == content(chunk, self.digest), "wrong bytes"
        return outcome

    def holds(self, chunk: Chunk) -> bool:
        return self.store.find(*self.name(chunk)) is not None

    def name(self, chunk: Chunk) -> Name:
        return Name(self.digest, chunk_name(chunk.key, chunk.code))

    def remove(self, *chunks: Chunk) -> int:
        return self.store.remove([self.name(chunk) for chunk in chunks])

    def held(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What is held; fails if it is not prefix-closed, or can't be got."""
        self.store.peek()
        held = [chunk for chunk in chunks if self.holds(chunk)]
        names = {(chunk.key, chunk.code) for chunk in held}
        for chunk in held:
            above = needs(chunk)
            assert above is None or above in names, "held without what it rests on"
        for chunk in held:
            assert self.get(chunk) is Outcome.DONE
        return held

    def die(self) -> None:
        """As if killed: its lock goes, everything else stays."""
        self.slots.close()
        writer = self.store._writer
        assert writer is not None
        os.close(writer._fd)
        writer._fd = -1
        self.store._writer = None

    def leave(self) -> None:
        self.slots.close()
        self.store.leave()


def used(path: Path) -> int:
    """What ``du -sb`` says of everything in the store."""
    total = 0
    for folder, _, files in os.walk(path / "kvloft-1"):
        total += os.lstat(folder).st_size
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(f"{folder}/{name}").st_size
    return total


def reserved(path: Path) -> int:
    return sum(size.reserved for size in Survey(path).totals().sizes)


def flaws(path: Path) -> list[Flaw]:
    """What a verification finds."""
    survey, everything = Survey(path), Selection()
    return [*survey.broken(everything), *survey.unreadable(everything, lambda _: None)]


def one_size(slots: int, nbytes: int = 8192) -> int:
    """A limit with room for so many chunks of this size, each in a segment of its own."""
    return FIXED_BYTES + slots * (page_aligned(nbytes) + 2 * PAGE_BYTES)


# --- against a model ------------------------------------------------------------------------------


@settings(max_examples=examples(0.4))
@given(seed=SEEDS, slots=st.integers(2, 20))
def test_eviction_takes_the_leaf_used_longest_ago(
    tmp_path_factory: pytest.TempPathFactory, seed: int, slots: int
) -> None:
    rng = random.Random(seed)
    user = User(tmp_path_factory.mktemp("lru"), one_size(slots))
    used_at: dict[Chunk, int] = {}  # Of held chunks: the last use of them or what rested on them.
    for now in range(80):
        if used_at and rng.random() < 0.4:
            inner = {c.parent for c in used_at}
            leaf = rng.choice([c for c in used_at if c.key not in inner])
            user.store.hint(user.name(leaf), touched=True)
            used_at[leaf] = now
            continue
        above = rng.choice([None, *used_at])
        [chunk] = chain((seed, now), 1, above=above)
        chunk = chunk._replace(nbytes=8192)
        expected = dict(used_at)
        if len(used_at) == slots:
            inner = {c.parent for c in used_at}
            leaves = [c for c in used_at if c.key not in inner and c is not above]
            if leaves:
                gone = min(leaves, key=lambda c: used_at[c])
                del expected[gone]
                for parent in expected:
                    if parent.key == gone.parent:
                        expected[parent] = max(expected[parent], used_at[gone])
            else:
                assert user.put(chunk) is Outcome.REFUSED
                continue
        assert user.put(chunk) is Outcome.DONE
        expected[chunk] = now
        held = set(user.held([*used_at, chunk]))
        assert held == set(expected)
        used_at = expected
        # Reading has used all of them, in the order in which they were put.
        for chunk in used_at:
            used_at[chunk] = now
        order = list(used_at)
        used_at = {c: now + order.index(c) / 1000 for c in order}  # type: ignore[misc]
    user.leave()


@pytest.mark.parametrize("users", [1, 2, 3])
@settings(max_examples=examples(0.15))
@given(seed=SEEDS)
def test_any_sequence_keeps_the_limit_and_serves_what_is_right(
    tmp_path_factory: pytest.TempPathFactory, users: int, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("many")
    limit = FIXED_BYTES + rng.choice([5, 10, 30, 60]) * 24_576
    chunks = [c for i in range(6) for c in with_all(chain((seed % 100, i), 5))]
    digests = [DIGEST, DIGEST, OTHER][:users]
    some = [User(path, limit, digest) for digest in digests]
    open_puts: list[tuple[User, Chunk, Place]] = []
    put_ever: set[tuple[bytes, Chunk]] = set()
    for _ in range(60):
        at = rng.randrange(users)
        user, chunk = some[at], rng.choice(chunks)
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                index = chunks.index(chunk)
                for one in chunks[index - index % 20 : index + 1]:
                    outcome = user.put(one)
                    assert outcome in (Outcome.DONE, Outcome.REFUSED)
                    if outcome is Outcome.DONE:
                        put_ever.add((user.digest, one))
                    assert used(path) <= limit
            case 4:
                place = user.reserve(chunk)
                if isinstance(place, Place):
                    open_puts.append((user, chunk, place))
            case 5 if open_puts:
                owner, chunk, place = open_puts.pop(rng.randrange(len(open_puts)))
                if rng.random() < 0.5:
                    if owner.write(chunk, place) is Outcome.DONE:
                        put_ever.add((owner.digest, chunk))
                else:
                    owner.store.release([place])
            case 6:
                user.get(chunk)
            case 7:
                user.remove(chunk)
                assert not user.holds(chunk)
            case 8:
                user.store.hint(user.name(chunk), touched=rng.random() < 0.5)
            case 9:
                (user.die if rng.random() < 0.5 else user.leave)()
                open_puts = [p for p in open_puts if p[0] is not user]
                some[at] = User(path, limit, digests[at])
            case 10:
                user.store.upkeep()
            case _:
                held = user.held(chunks)
                assert {(user.digest, c) for c in held} <= put_ever
        assert used(path) <= limit
    for user, _, place in open_puts:
        user.store.release([place])
    views = [user.held(chunks) for user in some]
    if users > 1:
        assert views[0] == views[1], "two processes disagree on what is there"
    assert reserved(path) == 0 or users > 1
    for user in some:
        user.leave()
    fresh = User(path, limit, DIGEST)
    assert fresh.held(chunks) == views[0]
    assert fresh.faults == []
    fresh.leave()
    assert reserved(path) == 0
    assert list((path / "kvloft-1" / "writers").iterdir()) == []


def test_nothing_is_read_again_without_need(tmp_path: Path) -> None:
    one, two = User(tmp_path, 1 << 20), User(tmp_path, 1 << 20)
    one.put(chain("a", 1)[0])
    two.store.peek()
    views = one.store.view, two.store.view
    for i in range(30):
        (one if i % 2 else two).put(chain(i, 1)[0])
    one.store.peek()
    two.store.peek()
    assert (one.store.view, two.store.view) == views, "everything was read again"
    chunks = [chain(i, 1)[0] for i in range(30)]
    assert one.held(chunks) == two.held(chunks) == chunks
    one.leave()
    two.leave()


def test_a_process_that_has_missed_too_much_reads_everything(tmp_path: Path) -> None:
    limit = 40 << 20
    one, two = User(tmp_path, limit), User(tmp_path, limit)
    small = [c._replace(nbytes=100) for i in range(1500) for c in chain(i, 1)]
    for chunk in small:
        one.put(chunk)
    for chunk in small[:700]:
        one.remove(chunk)
    for chunk in small[:500]:
        one.put(chunk)
    assert two.held(small) == one.held(small)
    one.leave()
    two.leave()


# --- room -----------------------------------------------------------------------------------------


def test_sizes_take_room_from_each_other(tmp_path: Path) -> None:
    limit = 4 << 20
    user = User(tmp_path, limit)
    big = [chain(("big", i), 1)[0]._replace(nbytes=200_000) for i in range(60)]
    small = [chain(("small", i), 1)[0]._replace(nbytes=4096) for i in range(600)]
    for step, group in enumerate((big, small, big)):
        clock = time.time() + 100 * step
        for chunk in group:
            with at_time(clock):
                assert user.put(chunk) is Outcome.DONE
            assert used(tmp_path) <= limit
        held = user.held([*big, *small])
        assert sum(c in group for c in held) > len(group) // 4
        with at_time(clock):
            user.store.upkeep()
    user.leave()


class at_time:  # noqa: N801
    """Let the store see another time of day, and as if a second had passed on its stop-watch."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        real = time.monotonic
        self._patch.setattr(time, "time", lambda: self._now)
        self._patch.setattr(time, "monotonic", lambda: real() + self._now % 1e6)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def test_what_another_process_has_used_stays(tmp_path: Path) -> None:
    limit = one_size(4)
    one, two = User(tmp_path, limit), User(tmp_path, limit)
    chunks = [chain(i, 1)[0]._replace(nbytes=8192) for i in range(5)]
    for chunk in chunks[:4]:
        one.put(chunk)
    two.store.peek()
    with at_time(time.time() + 100):
        assert two.get(chunks[0]) is Outcome.DONE
        two.store.upkeep()
        assert one.put(chunks[4]) is Outcome.DONE
    assert one.held(chunks) == [chunks[0], *chunks[2:]]
    one.leave()
    two.leave()


def test_a_full_device_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = User(tmp_path, 64 << 20)
    chunks = [chain(i, 1)[0] for i in range(200)]
    for chunk in chunks[:100]:
        assert user.put(chunk) is Outcome.DONE
    assert len(user.store.view.extents) > 2

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for chunk in chunks:
        assert user.put(chunk) is Outcome.DONE
    assert user.faults == ["no_space"], "it is not tried again and again"
    assert 0 < len(user.held(chunks)) < len(chunks)
    for _ in range(10):
        assert user.put(chain("w", 1)[0]._replace(nbytes=1)) is Outcome.REFUSED
    assert user.held(chunks), "everything was given up for a size that can't be had"
    user.leave()


def test_a_device_smaller_than_the_limit_is_shared_by_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity, real = 6 << 20, os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        if used(tmp_path) + size > capacity:
            raise OSError(errno.ENOSPC, "no space")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    user = User(tmp_path, 64 << 20)
    for i in range(400):
        assert user.put(chain(i, 1)[0]) is Outcome.DONE
    small = [chain(("w", i), 1)[0]._replace(nbytes=1) for i in range(20)]
    assert [user.put(chunk) for chunk in small] == [Outcome.DONE] * 20
    assert user.held(small) == small
    user.leave()


def test_files_grow_where_they_can_not_be_preallocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    user = User(tmp_path, 1 << 20)
    chunks = with_all(chain("x", 4))
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    assert user.held(chunks) == chunks
    user.leave()


def test_without_direct_io_all_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    user = User(tmp_path, 1 << 20)
    chunks = with_all(chain("x", 4))
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    assert not user.store.files.direct
    assert user.held(chunks) == chunks
    user.leave()


@pytest.mark.parametrize("askew", [0, 1, 64, 512])
def test_memory_may_lie_askew(tmp_path: Path, askew: int) -> None:
    files = Files(tmp_path)
    segment = Segment(0, 3 * PAGE_BYTES, 2)
    files.create(segment)
    data = aligned(4 * PAGE_BYTES)[askew : askew + segment.slot_bytes]
    data[:] = random.Random(0).randbytes(len(data))
    before = bytes(data)
    slots = Slots(files)
    page = slots.pages[0]
    page[:5] = b"hello"
    slots.write(segment, 1, [data])
    page[:5] = data[:5] = b"other"
    assert slots.read(segment, 1, [data]) == segment.stride
    assert (bytes(data), bytes(page[:5])) == (before, b"hello")
    slots.close()


# --- dead and hung processes ----------------------------------------------------------------------


def test_what_the_dead_have_reserved_is_free(tmp_path: Path) -> None:
    limit = one_size(3)
    one = User(tmp_path, limit)
    two = User(tmp_path, limit)
    chunks = [chain(i, 1)[0]._replace(nbytes=8192) for i in range(6)]
    assert all(isinstance(one.reserve(c), Place) for c in chunks[:3])
    assert two.put(chunks[3]) is Outcome.REFUSED, "the living lose nothing"
    assert reserved(tmp_path) == 3
    one.die()
    with at_time(time.time() + 5):
        assert [two.put(c) for c in chunks[3:]] == [Outcome.DONE] * 3
    assert list((tmp_path / "kvloft-1" / "writers").iterdir()) == [two.store._writer._path]  # type: ignore[union-attr]
    two.leave()


@pytest.mark.parametrize("step", range(12))
def test_death_in_the_middle_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each write to the tables or the control file may be the last one."""
    limit = FIXED_BYTES + 6 * 28_672
    chunks = [c for i in range(3) for c in with_all(chain(i, 2))]
    one, two = User(tmp_path, limit), User(tmp_path, limit)
    for chunk in chunks:
        one.put(chunk)
    held = one.held(chunks)
    real, left = os.pwrite, step

    class Killed(BaseException):
        pass

    def die(fd: int, data: Any, offset: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            # Half of it may have got through.
            real(fd, bytes(data)[: len(data) // 2], offset)
            raise Killed
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", die)
    new = [c for i in range(10) for c in with_all(chain(("new", i), 2))]
    with pytest.raises(Killed):
        [one.put(chunk) for chunk in new]
    monkeypatch.setattr(os, "pwrite", real)
    one.die()
    everything = [*chunks, *new]
    assert set(two.held(everything)) <= set(everything)
    for chunk in chunks:
        assert two.put(chunk) in (Outcome.DONE, Outcome.REFUSED)
        assert used(tmp_path) <= limit
    assert two.held(everything)
    assert held
    three = User(tmp_path, limit)
    assert three.held(everything) == two.held(everything)
    assert reserved(tmp_path) == 0
    two.leave()
    three.leave()


def test_a_lock_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    user = User(tmp_path, 1 << 20, seconds=0.05)
    [chunk, other] = chain("x", 2)
    user.put(chunk)
    with control.locked(str(tmp_path / "kvloft-1" / "control"), 1.0):
        with pytest.raises(control.LockedError):
            user.put(other)
        assert user.get(chunk) is Outcome.DONE, "reading takes no lock"
    assert user.put(other) is Outcome.DONE
    user.leave()


def test_a_control_file_that_is_replaced_locks_all_the_same(tmp_path: Path) -> None:
    one, two = User(tmp_path, 1 << 20), User(tmp_path, 1 << 20)
    chunks = chain("x", 8)
    one.put(chunks[0])
    for i, rubbish in enumerate((None, b"", b"x" * 50_000)):
        control_file = tmp_path / "kvloft-1" / "control"
        control_file.unlink()
        if rubbish is not None:
            control_file.write_bytes(rubbish)
        assert one.put(chunks[2 * i + 1]) is Outcome.DONE
        assert two.put(chunks[2 * i + 2]) is Outcome.DONE
        assert one.held(chunks) == two.held(chunks) == chunks[: 2 * i + 3]
    one.leave()
    two.leave()


# --- damage ---------------------------------------------------------------------------------------


def filled(path: Path, limit: int = 1 << 20) -> list[Chunk]:
    """A store with a few chunks of all kinds; which."""
    chunks = [c for i in range(2) for c in with_all(chain(("filled", i), 3))]
    user = User(path, limit)
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    user.leave()
    return chunks


def still_right(path: Path, chunks: Sequence[Chunk], limit: int = 1 << 20) -> int:
    """Open a damaged store, get everything, put it again and get it again; how many there were."""
    user = User(path, limit)
    assert used(path) <= limit
    outcomes = [user.get(c) for c in chunks]
    assert set(outcomes) <= {Outcome.DONE, Outcome.MISSING, Outcome.DAMAGED}
    user.store.upkeep()
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    assert user.held(chunks) == list(chunks)
    assert used(path) <= limit
    user.leave()
    assert flaws(path) == []
    return outcomes.count(Outcome.DONE)


def flips(path: Path, samples: int, apart: int) -> Iterator[tuple[str, int]]:
    """Bits to flip: sampled from every file, and in each table's first record and the control
    file's head those that lie so far apart."""
    rng = random.Random(0)
    for file in sorted((path / "kvloft-1").rglob("*")):
        if file.is_file() and (size := file.stat().st_size):
            name = str(file.relative_to(path))
            whole = range(size * 8)
            for bit in rng.sample(whole, min(len(whole), samples)):
                yield name, bit
            if name.endswith(".tab"):
                yield from ((name, bit) for bit in range(3, RECORD_BYTES * 8, apart))
            if name.endswith("control"):
                yield from ((name, bit) for bit in range(0, 48 * 8, apart))


@pytest.mark.parametrize(
    ("samples", "apart"), [(2, 191), pytest.param(40, 7, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_no_flipped_bit_serves_wrong_bytes(tmp_path: Path, samples: int, apart: int) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    chunks = filled(source)
    for name, bit in flips(source, samples, apart):
        shutil.copytree(source, copy)
        with (copy / name).open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))
        # No more than one path is lost; of a record and the control file, nothing.
        least = len(chunks) // 2 if name.endswith(".seg") else len(chunks)
        assert still_right(copy, chunks) >= least, (name, bit)
        shutil.rmtree(copy)


def _swap(folder: Path) -> None:
    for ending in (".seg", ".tab"):
        files = sorted(folder.glob(f"*{ending}"))
        data = [file.read_bytes() for file in files]
        for file, other in zip(files, data[1:] + data[:1], strict=True):
            file.write_bytes(other)


def _swap_alike(folder: Path) -> None:
    groups: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.seg")):
        groups.setdefault(file.name.partition("-")[2], []).append(file)
    swapped = False
    for files in groups.values():
        data = [file.read_bytes() for file in files]
        for file, other in zip(files, data[1:] + data[:1], strict=True):
            file.write_bytes(other)
            swapped |= len(files) > 1
    assert swapped


def each(change: Callable[[Path], object], pattern: str = "*") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for file in folder.glob(pattern):
            if file.is_file():
                change(file)

    return damage


def _rename(file: Path) -> None:
    file.rename(file.with_name(file.name.replace("-", "7-", 1)))


def _add(folder: Path, add: Callable[[Path], object], *names: str) -> None:
    for name in names:
        add(folder / name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "segments swapped": _swap,
    "segments of one size swapped": _swap_alike,
    "segments renumbered": each(_rename, "0*"),
    "all emptied": each(lambda f: f.write_bytes(b"")),
    "all zeroed": each(lambda f: f.write_bytes(bytes(f.stat().st_size))),
    "all truncated": each(lambda f: os.truncate(f, f.stat().st_size * 2 // 3)),
    "all extended": each(lambda f: f.write_bytes(f.read_bytes() + b"x" * 50_000)),
    "all removed": each(lambda f: f.unlink()),
    "rubbish throughout": each(lambda f: f.write_bytes(random.Random(1).randbytes(f.stat().st_size))),  # noqa: E501
    "tables removed": each(lambda f: f.unlink(), "*.tab"),
    "tables cut": each(lambda f: os.truncate(f, 200), "*.tab"),
    "tables of rubbish": each(lambda f: f.write_bytes(b"\xff" * f.stat().st_size), "*.tab"),
    "data removed": each(lambda f: f.unlink(), "*.seg"),
    "control removed": lambda folder: (folder / "control").unlink(),
    "control emptied": lambda folder: (folder / "control").write_bytes(b""),
    "folders removed": lambda f: _add(f, shutil.rmtree, "writers", "names"),
    "strange files": lambda f: _add(
        f, lambda p: p.write_text("x"), "000099-8192-4.seg", "000098-8192-4.tab", "writers/012", "y"
    ),
    "strange folders": lambda f: _add(f, Path.mkdir, "000097-8192-4.seg", "z"),
    "links": lambda f: _add(
        f, lambda p: p.symlink_to("/etc/passwd"),
        "000096-8192-4.seg", "000096-8192-4.tab", "writers/" + "a" * 16,
    ),
}  # fmt: skip
KEEP_ALL = {
    "all extended", "tables removed", "tables cut", "tables of rubbish", "control removed",
    "control emptied", "folders removed", "strange files", "strange folders", "links",
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_costs_chunks_and_never_bytes(tmp_path: Path, kind: str) -> None:
    chunks = filled(tmp_path)
    DAMAGE[kind](tmp_path / "kvloft-1")
    found = still_right(tmp_path, chunks)
    if kind in KEEP_ALL:
        assert found == len(chunks), "what was whole is lost"


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_under_a_running_process(tmp_path: Path, kind: str) -> None:
    chunks = [c for i in range(2) for c in with_all(chain(("filled", i), 3))]
    user = User(tmp_path, 1 << 20)
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    DAMAGE[kind](tmp_path / "kvloft-1")
    for _ in range(2):
        for chunk in chunks:
            assert user.get(chunk) in (Outcome.DONE, Outcome.MISSING, Outcome.DAMAGED)
        for chunk in chunks:
            try:
                assert user.put(chunk) in (Outcome.DONE, Outcome.REFUSED)
            except OSError:
                continue
        try:
            user.store.upkeep()
        except OSError:
            continue
    user.leave()
    still_right(tmp_path, chunks)


def test_an_index_that_is_wrong_is_read_anew(tmp_path: Path) -> None:
    """A record is compared before its slot is used again."""
    user = User(tmp_path, one_size(2))
    a, b, c = (chain(i, 1)[0]._replace(nbytes=8192) for i in range(3))
    assert [user.put(chunk) for chunk in (a, b)] == [Outcome.DONE] * 2
    place = user.store.find(*user.name(a))
    assert place is not None
    with (tmp_path / "kvloft-1" / place.segment.table_name).open("r+b") as table:
        table.write(bytes(place.segment.table_bytes))
    assert user.put(c) is Outcome.DONE
    assert user.store.evicted == 0, "it went for what was not there any more"
    assert user.held([a, b, c]) == [b, c]
    user.leave()


def test_a_record_and_its_page_that_are_both_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad spot of the device costs what lies there, not the store."""
    chunks = filled(tmp_path)
    user = User(tmp_path, 1 << 20)
    place = user.store.find(*user.name(chunks[-1]))
    assert place is not None
    user.leave()
    with (tmp_path / "kvloft-1" / place.segment.table_name).open("r+b") as table:
        table.seek(place.slot * RECORD_BYTES)
        table.write(b"xx")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "bad spot")

    monkeypatch.setattr(Slots, "read_page", fail)
    user = User(tmp_path, 1 << 20)
    assert user.faults == ["record"]
    assert user.held(chunks) == chunks[:-1]
    user.leave()


def test_what_has_lost_its_parent_is_not_published(tmp_path: Path) -> None:
    one, two = User(tmp_path, 1 << 20), User(tmp_path, 1 << 20)
    [parent, child] = chain("x", 2)
    assert one.put(parent) is Outcome.DONE
    place = one.reserve(child)
    assert isinstance(place, Place)
    assert two.remove(parent) == 1
    assert one.write(child, place) is Outcome.REFUSED
    assert one.held([parent, child]) == two.held([parent, child]) == []
    assert reserved(tmp_path) == 0
    assert [one.put(parent), one.put(child)] == [Outcome.DONE] * 2
    one.leave()
    two.leave()


def test_nothing_goes_for_what_can_not_be_published(tmp_path: Path) -> None:
    """A put whose parent is refused is refused too, and evicts nothing."""
    user = User(tmp_path, one_size(3))
    path = [chunk._replace(nbytes=8192) for chunk in chain("x", 8)]
    assert [user.put(chunk) for chunk in path[:3]] == [Outcome.DONE] * 3
    user.store.awaited = {user.name(path[2]): 1}
    [first] = user.store.reserve([user.want(path[3])])
    assert first is Outcome.REFUSED
    user.store.awaited = {}
    wants = [user.want(path[4]), *(user.want(chunk, parent_comes=True) for chunk in path[5:])]
    assert user.store.reserve(wants) == [Outcome.REFUSED] * 4
    assert user.held(path) == path[:3]
    user.leave()


def test_what_is_damaged_is_hidden_at_once(tmp_path: Path) -> None:
    user = User(tmp_path, 1 << 20)
    chunks = with_all(chain("x", 3))
    assert [user.put(chunk) for chunk in chunks] == [Outcome.DONE] * 12
    victim = chunks[4]
    place = user.store.find(*user.name(victim))
    assert place is not None
    with (tmp_path / "kvloft-1" / place.segment.data_name).open("r+b") as data:
        data.seek(place.slot * place.segment.stride + PAGE_BYTES)
        data.write(b"xxxx")
    assert user.get(victim) is Outcome.DAMAGED
    assert [chunk for chunk in chunks if user.holds(chunk)] == chunks[:4]
    user.store.upkeep()
    assert user.held(chunks) == chunks[:4]
    assert [user.put(chunk) for chunk in chunks] == [Outcome.DONE] * 12
    assert user.held(chunks) == chunks
    user.leave()


@pytest.mark.parametrize(("asked", "cause"), [(8191, "long"), (8192, ""), (4097, "long")])
def test_a_chunk_of_another_length_is_not_served(tmp_path: Path, asked: int, cause: str) -> None:
    user = User(tmp_path, 1 << 20)
    [chunk] = chain("x", 1)
    chunk = chunk._replace(nbytes=8192)
    assert user.put(chunk) is Outcome.DONE
    into = memoryview(bytearray(8192))
    outcome = Outcome.DAMAGED if cause else Outcome.DONE
    wants = [(chunk._replace(nbytes=asked), into)]
    assert user.store.read(DIGEST, wants, user.slots) == [(outcome, cause)]
    user.leave()


def test_a_slot_given_to_another_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    one, two = User(tmp_path, one_size(1)), User(tmp_path, one_size(1))
    a, b = (chain(i, 1)[0]._replace(nbytes=8192) for i in range(2))
    one.put(a)
    two.store.peek()
    one.put(b)
    assert two.holds(a)
    assert two.get(a) is Outcome.MISSING
    assert not two.holds(a)
    assert two.get(b) is Outcome.DONE
    one.leave()
    two.leave()


def test_only_its_own_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "000001-8192-4.seg").write_text("mine")
    filled(tmp_path)
    StoreTools(tmp_path).clear(Selection())
    assert (tmp_path / "000001-8192-4.seg").read_text() == "mine"
    for path in [tmp_path / "kvloft-1", *(tmp_path / "kvloft-1").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_records_are_where_they_should_be(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    assert len(chunks) == 24
    found = set()
    for table in tmp_path.glob("kvloft-1/*.tab"):
        number = int(table.name.split("-")[0])
        raw = table.read_bytes()
        for slot in range(len(raw) // RECORD_BYTES):
            record = unpack_record(
                raw[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES], number, slot
            )
            assert record is not None
            if record.writer:
                found.add(record.name)
    assert found == {chunk_name(c.key, c.code) for c in chunks}
