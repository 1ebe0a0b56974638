"""The tier on disk: the suite, and what only a disk can do to it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvloft.errors import ConfigError
from kvloft.testing.tiers import Checked, Slot, TierTests, chain, namespace, with_all
from kvloft.tiers.base import Chunk, Namespace, Outcome, Tier
from kvloft.tiers.disk import DiskTier
from kvloft.tiers.disk import tier as tier_module
from kvloft.tiers.disk.format import chunk_name
from kvloft.tiers.disk.room import least_bytes
from kvloft.tiers.disk.segments import Slots
from kvloft.tiers.disk.store import Store
from kvloft.tiers.disk.survey import Survey
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES, format_size


@contextmanager
def stuck() -> Iterator[None]:
    """A device that takes no request, until it is mended."""
    mended = threading.Event()
    real = Slots._access

    def late(*args: Any) -> int:
        mended.wait()
        return real(*args)

    with mock.patch.object(Slots, "_access", late):
        try:
            yield
        finally:
            mended.set()


class TestDiskTier(TierTests[Path]):
    """The suite."""

    # So that a limit lowered to it leaves some of the segments made under a high one.
    small_bytes = 4 << 20
    examples = 15

    def new_place(self, path: Path) -> Path:
        return path / "disk"

    def open_tier(self, place: Path, names: Namespace, *, max_bytes: int, queue_bytes: int) -> Tier:
        return DiskTier(DiskOptions(place, max_bytes, queue_bytes=queue_bytes), names)

    def stalled(self, place: Path, tier: Tier) -> AbstractContextManager[object]:
        return stuck()

    def damage(self, place: Path, names: Namespace, chunk: Chunk) -> bool:
        store = Store(place)
        store.load()
        found = store.find(names.digest, chunk_name(chunk.key, chunk.code))
        assert found is not None
        path = store.folder / found.segment.data_name
        with path.open("r+b") as file:
            at = found.slot * found.segment.stride + PAGE_BYTES + chunk.nbytes - 1
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
        return True


# --- trouble --------------------------------------------------------------------------------------


class Heard:
    """What a tier has reported."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def __call__(self, cause: str, message: str) -> None:
        self.said.append((cause, message))

    @property
    def causes(self) -> list[str]:
        return [cause for cause, _ in self.said]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def opened(tmp_path: Path, heard: Heard) -> Iterator[Checked]:
    """A tier with a few chunks in it."""
    names = namespace()
    tier = DiskTier(DiskOptions(tmp_path, 8 << 20, threads=2), names, report=heard)
    checked = Checked(tier, names, 20.0)
    checked.fill(OLD)
    yield checked
    tier.close()


OLD = with_all(chain("old", 3))
NEW = with_all(chain("new", 3))


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ENXIO]


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_writes_that_fail(
    opened: Checked, heard: Heard, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(tier_module, "_SUSPEND_SECONDS", 0.2)
    with mock.patch.object(os, "pwritev", failing(number)):
        for i in range(20):
            future = opened.try_put(chain(("new", i), 1)[0])
            assert future is None or opened.end_put(future) is Outcome.FAILED
        time.sleep(0.3)
        opened.expect(OLD)
    cause = errno.errorcode[number]
    assert opened.tier.stats().faults[cause] >= 5, opened.tier.stats().faults
    assert sorted(heard.causes) == sorted([cause, "suspended"]), "each is said once"
    assert eventually(lambda: opened.try_put(NEW[0]) is not None)
    assert eventually(lambda: opened.put(NEW[0]) is Outcome.DONE)
    opened.fill(NEW[1:])
    opened.check([*OLD, *NEW])


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_reads_that_fail(
    opened: Checked, heard: Heard, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(tier_module, "_SUSPEND_SECONDS", 0.2)
    with mock.patch.object(os, "preadv", failing(number)):
        outcomes = {opened.get(chunk) for chunk in OLD * 3}
        assert outcomes <= {Outcome.FAILED, Outcome.MISSING}
        assert not opened.held(OLD), "while it is left alone, nothing is promised"
    assert set(heard.causes) == {errno.errorcode[number], "suspended"}
    assert len(heard.causes) == 2
    assert eventually(lambda: opened.held(OLD) == OLD)
    opened.expect(OLD)


def test_a_bug_ends_no_thread(opened: Checked, heard: Heard) -> None:
    with mock.patch.object(Store, "read", side_effect=ZeroDivisionError("oops")):
        assert opened.get(OLD[0]) is Outcome.FAILED
    with mock.patch.object(Store, "reserve", side_effect=ZeroDivisionError("oops")):
        assert opened.put(NEW[0]) is Outcome.FAILED
    with mock.patch.object(Store, "publish", side_effect=ZeroDivisionError("oops")):
        assert opened.put(NEW[0]) is Outcome.FAILED
    with mock.patch.object(Store, "still_there", side_effect=ZeroDivisionError("oops")):
        assert opened.contains(OLD) == [False] * len(OLD)
    assert heard.causes == ["bug"]
    assert opened.tier.stats().faults == {"bug": 4}
    opened.fill(NEW)
    assert opened.check([*OLD, *NEW]) == [*OLD, *NEW]


def test_a_report_that_raises_ends_nothing(tmp_path: Path) -> None:
    names = namespace()
    tier = DiskTier(
        DiskOptions(tmp_path, 8 << 20), names, report=mock.Mock(side_effect=ZeroDivisionError)
    )
    checked = Checked(tier, names, 20.0)
    with mock.patch.object(os, "pwritev", failing(errno.EIO)):
        assert checked.put(NEW[0]) is Outcome.FAILED
    assert checked.put(NEW[0]) is Outcome.DONE
    tier.close()


def test_a_path_that_vanishes_and_comes_back(
    opened: Checked, tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_SUSPEND_SECONDS", 0.2)
    store, away = tmp_path / "kvloft-1", tmp_path / "away"
    store.rename(away)
    assert {opened.get(chunk) for chunk in OLD} <= {Outcome.MISSING, Outcome.FAILED}
    assert eventually(lambda: not opened.held(OLD))
    for chunk in NEW:
        future = opened.try_put(chunk)
        assert future is None or opened.end_put(future) is not Outcome.DONE
    # What is mounted there may come back; until then nothing is written below where it was.
    assert not store.exists()
    assert "vanished" in heard.causes
    assert len(heard.causes) == len(set(heard.causes))
    away.rename(store)
    assert eventually(lambda: opened.held(OLD) == OLD)
    assert eventually(lambda: opened.try_put(NEW[0]) is not None)
    assert eventually(lambda: opened.put(NEW[0]) is Outcome.DONE)
    opened.expect(OLD)


def _reserved(path: Path) -> int:
    return sum(size.reserved for size in Survey(path).totals().sizes)


def test_a_device_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    names = namespace()
    tier = DiskTier(DiskOptions(tmp_path, 8 << 20, threads=2), names)
    checked = Checked(tier, names, 20.0)
    checked.fill(OLD)
    threads = threading.active_count()
    new = with_all(chain("new", 60))
    with stuck():
        futures = [checked.begin_put(chunk) for chunk in new]
        assert eventually(lambda: _reserved(tmp_path) > 0)
        slots = [Slot(chunk) for chunk in OLD]
        gets = [tier.get(c, slot.view) for c, slot in zip(OLD, slots, strict=True)]
        time.sleep(0.1)
        begun = time.monotonic()
        tier.close(timeout=0.3)
        assert time.monotonic() - begun < 5
        assert sum(future.done() for future in futures) > 200, "what has not begun does not end"
        # The threads that hang may still write: their slots must stay theirs.
        assert Survey(tmp_path).totals().writers == 1
        assert _reserved(tmp_path) > 0
    for future in [*futures, *gets]:
        assert future is not None
        future.result(20)
    assert eventually(lambda: threading.active_count() <= threads - 3)
    again = DiskTier(DiskOptions(tmp_path, 8 << 20), names)
    assert Survey(tmp_path).totals().writers == 1
    assert _reserved(tmp_path) == 0
    Checked(again, names, 20.0).check([*OLD, *new])
    again.close()


# --- refusals -------------------------------------------------------------------------------------


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refused(path: Path, max_bytes: int = 8 << 20) -> str:
    """The message with which a tier refuses to start; nothing must be left running."""
    threads, fds = threading.active_count(), _open_files()
    with pytest.raises(ConfigError) as caught:
        DiskTier(DiskOptions(path, max_bytes), namespace())
    assert threading.active_count() == threads
    assert _open_files() == fds
    return str(caught.value)


def test_paths_that_make_no_sense(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        assert "name a directory" in refused(path)
    assert file.read_text() == "mine"
    for name in ("kvloft-1", "kvloft-1/writers"):
        place = tmp_path / name.replace("/", "-")
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text("x")
        assert str(place) in refused(place)


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("mkdir", errno.EACCES, "can be written to"),
        ("mkdir", errno.EROFS, "Read-only"),
        ("mkdir", errno.ENOSPC, "No space"),
        ("flock", errno.ENOLCK, "no locks"),
        ("flock", errno.EOPNOTSUPP, "no locks"),
        ("flock", errno.EAGAIN, "held the lock"),
    ],
)
def test_places_that_can_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    monkeypatch.setattr(fcntl if call == "flock" else os, call, failing(number))
    message = refused(tmp_path / "disk")
    assert words in message
    assert str(tmp_path / "disk") in message


def test_limits_that_make_no_sense(tmp_path: Path) -> None:
    least = least_bytes(namespace().slot_bytes)
    message = refused(tmp_path, least - 1)
    assert "max_bytes" in message
    assert format_size(least) in message
    names = namespace()
    tier = DiskTier(DiskOptions(tmp_path, least), names)
    checked = Checked(tier, names, 20.0)
    checked.fill(with_all(chain("x", 1)))
    tier.close()


def test_no_room_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    names = namespace()
    tier = DiskTier(DiskOptions(tmp_path / "old", 8 << 20), names)
    Checked(tier, names, 20.0).fill(OLD)
    tier.close()
    monkeypatch.setattr(os, "statvfs", lambda _: mock.Mock(f_bavail=1, f_frsize=real.f_frsize))
    message = refused(tmp_path / "new")
    assert "4.00 KiB free" in message or "4 KiB free" in message, message
    tier = DiskTier(DiskOptions(tmp_path / "old", 8 << 20), names)
    assert Checked(tier, names, 20.0).check(OLD) == OLD, "what has room already may go on"
    tier.close()


@pytest.fixture(params=["tmpfs", "ext4"])
def small_system(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of a few MiB, which fills up for real."""
    kind, image, place = request.param, tmp_path / "image", tmp_path / "mounted"
    place.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 8 << 20)
    what = ["-o", "size=3M", "tmpfs"] if kind == "tmpfs" else ["-o", "loop", str(image)]
    for command in (["mkfs.ext4", "-qF", str(image)], ["mount", "-t", kind, *what, str(place)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"file systems can't be mounted here: {error}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # A failed test has it open.


def test_a_file_system_that_fills_up(small_system: Path, heard: Heard) -> None:
    names = namespace()
    tier = DiskTier(DiskOptions(small_system / "disk", 64 << 20), names, report=heard)
    checked = Checked(tier, names, 20.0)
    for turn in range(2):
        chunks = [c for i in range(200) for c in with_all(chain((turn, i), 3))]
        outcomes = set(checked.put_all(chunks))
        assert outcomes <= {Outcome.DONE, Outcome.REFUSED}
        assert len(checked.check(chunks)) > 20, "what is new does not get the room of what is old"
    assert heard.causes == ["no_space"]
    tier.close()
    tier = DiskTier(DiskOptions(small_system / "disk", 64 << 20), names, report=heard)
    assert len(Checked(tier, names, 20.0).check(chunks)) > 20
    tier.close()
