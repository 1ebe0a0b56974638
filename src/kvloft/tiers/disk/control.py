"""Who may change the store, what has changed, and who is still alive.

One lock for the whole store. It is held for as long as it takes to write a few 128-byte records
into the page cache, never while chunks are written, and a thread takes it once for a batch of
them; finer locks would have bought nothing and made "the limit holds for all writers together" a
distributed computation. It is an ``flock``, which goes with its owner, so a killed process leaves
none behind. It is only ever *tried*: where a device hangs under its owner, everybody else goes on
without the disk rather than hang too.

The file that is locked says what has changed: a sequence number and the last 4,096 slots that were
written, so that others bring their index up to date by reading so many records and not all. It is
marked dirty while a change is under way. Whoever finds it dirty knows that its writer has died in
the middle, reads all tables, and starts a new epoch, in which everyone else does the same.

Each open tier has an empty file in ``writers/`` and holds a lock on it. A reservation whose
writer's file is gone or not locked is nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvloft.units import PAGE_BYTES

FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Nothing is followed out of the store, and nothing that is no file is waited for."""
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says to a kind of access that it does not have."""
RING = 4096
"""Changes that are remembered."""
CONTROL_BYTES = PAGE_BYTES + RING * 8
MAX_SEGMENT = 1 << 31
"""The greatest number of a segment, which nobody gets to in a lifetime."""
WHOLE = 0xFFFFFFFF
"""In place of a slot: the segment has been made or removed."""

_MAX_SEQUENCE = 1 << 62
_STRANGE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
"""What the system says to opening a link, a folder, a socket or a device without a driver."""
_MAGIC = b"KVLOFTCT"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQII")
_CHECK = struct.Struct("<Q")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_CHANGE = struct.Struct("<II")
_WRITER = re.compile(r"[0-9a-f]{16}", re.ASCII)

Change = tuple[int, int]
"""A segment's number, and a slot in it or :data:`WHOLE`."""


class LockedError(OSError):
    """Somebody else has held the lock for as long as this process was willing to wait."""


class StrangeError(FileNotFoundError):
    """Something that is not of the store has the name of one of its files: that file is missing."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the store's history stands."""

    epoch: int
    sequence: int
    dirty: bool
    next_segment: int
    """Numbers are not used again, so that nobody mistakes a segment for an older one."""


def open_plain(path: str | Path, mode: int, *, folder: int | None = None) -> int:
    """A descriptor of a file; ``mode`` is that of ``os.open``, ``folder`` where ``path`` begins.

    Raises :class:`StrangeError` if it is anything but a file: whoever can write to the folder could
    otherwise have us follow a link, or wait for a pipe for ever.
    """
    try:
        fd = os.open(path, mode | FLAGS, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in _STRANGE:
            raise _strange(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _strange(path)
    return fd


@contextlib.contextmanager
def open_folder(path: str | Path) -> Iterator[int]:
    """A descriptor of a folder, which is itself there and no link to one.

    Raises :class:`StrangeError`, and other ``OSError`` as they come.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | FLAGS)
    except OSError as error:
        if error.errno in _STRANGE:
            raise _strange(path) from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def _strange(path: str | Path) -> StrangeError:
    path = Path(path)
    message = f"{path.name!r} is a link, or something else that is not the store's own; remove it"
    return StrangeError(errno.ENOENT, message, str(path))


def allocate(fd: int, size: int) -> None:
    """Make an empty file this long, with all its blocks if the file system can do that."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        os.ftruncate(fd, size)


def _pack(position: Position) -> bytes:
    head = _HEAD.pack(
        _MAGIC, _VERSION, RING, position.epoch, position.sequence, position.dirty,
        position.next_segment,
    )  # fmt: skip
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def read_position(fd: int) -> Position | None:
    """What an open control file says; ``None`` if it is damaged or new."""
    raw = os.pread(fd, _HEAD_BYTES, 0)
    if len(raw) != _HEAD_BYTES or os.fstat(fd).st_size != CONTROL_BYTES:
        return None
    magic, version, ring, epoch, sequence, dirty, next_segment = _HEAD.unpack_from(raw)
    (check,) = _CHECK.unpack_from(raw, _HEAD.size)
    if check != xxhash.xxh3_64_intdigest(raw[: _HEAD.size]):
        return None
    if (magic, version, ring) != (_MAGIC, _VERSION, RING):
        return None
    if sequence > _MAX_SEQUENCE or next_segment > MAX_SEGMENT:  # Nobody has ever counted so far.
        return None
    return Position(epoch, sequence, bool(dirty), next_segment)


def write_position(fd: int, position: Position) -> None:
    """Say where the history stands. The lock must be held."""
    os.pwrite(fd, _pack(position), 0)


def start_epoch(fd: int, next_segment: int) -> Position:
    """Begin an epoch in which all that others know is void; dirty. The lock must be held."""
    status = os.fstat(fd)
    if status.st_size != CONTROL_BYTES:
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "the control file is also a file elsewhere; remove it")
        os.ftruncate(fd, 0)
        allocate(fd, CONTROL_BYTES)  # Else a full device would end all changes.
    position = Position(secrets.randbits(63), 0, True, next_segment)
    write_position(fd, position)
    return position


def write_changes(fd: int, sequence: int, changes: Sequence[Change]) -> None:
    """Put changes ``sequence``, ``sequence + 1`` … into the ring. The lock must be held."""
    first = max(0, len(changes) - RING)
    at = (sequence + first) % RING
    raw = b"".join(_CHANGE.pack(*change) for change in changes[first:])
    split = min(len(raw), (RING - at) * _CHANGE.size)
    os.pwrite(fd, raw[:split], PAGE_BYTES + at * _CHANGE.size)
    if split < len(raw):
        os.pwrite(fd, raw[split:], PAGE_BYTES)


def read_changes(fd: int, since: int, until: int) -> list[Change] | None:
    """Changes ``since`` to ``until - 1``; ``None`` if the ring has no room for so many."""
    if since < 0 or not 0 <= until - since <= RING:
        return None
    raw = os.pread(fd, RING * _CHANGE.size, PAGE_BYTES)
    if len(raw) != RING * _CHANGE.size:
        return None
    return [
        _CHANGE.unpack_from(raw, sequence % RING * _CHANGE.size) for sequence in range(since, until)
    ]


@contextlib.contextmanager
def locked(path: str, seconds: float) -> Iterator[int]:
    """Hold the lock on the control file, which is made if it is missing; gives its descriptor.

    Opened anew each time: that costs a few microseconds, and neither a file that has been replaced
    nor a process forked from this one ever gets to hold a lock that is not its own. Raises
    :class:`LockedError` after ``seconds``, other ``OSError`` as they come.
    """
    deadline = time.monotonic() + seconds
    pause = 0.0001
    fd = -1
    try:
        while True:
            if fd < 0:
                try:
                    fd = open_plain(path, os.O_RDWR | os.O_CREAT)
                except StrangeError as error:
                    # Not as if it were missing: nobody may change anything without the lock.
                    raise OSError(errno.EINVAL, error.strerror, path) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LockedError(f"{path} is locked") from None
                time.sleep(min(pause, left))
                pause = min(pause * 2, 0.005)
                continue
            if _is_at(fd, path):
                break
            os.close(fd)
            fd = -1
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))  # noqa: PTH116
    except FileNotFoundError:
        return False


# --- writers --------------------------------------------------------------------------------------


class Writer:
    """This tier's sign of life. Made, like all that follows, while the store's lock is held."""

    def __init__(self, folder: Path) -> None:
        self.number = secrets.randbits(63) | 1
        self._path = folder / f"{self.number:016x}"
        with open_folder(folder) as at:
            mode = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._fd = open_plain(self._path.name, mode, folder=at)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up whatever is still reserved."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def live_writers(folder: Path, *, reap: bool = True) -> set[int]:
    """The writers that are alive; ``reap``: remove the files of others."""
    try:
        with open_folder(folder) as at:
            return _live_writers(at, reap)
    except StrangeError:
        raise
    except FileNotFoundError:
        return set()


def _live_writers(folder: int, reap: bool) -> set[int]:
    alive: set[int] = set()
    for name in os.listdir(folder):
        if not _WRITER.fullmatch(name):
            continue
        try:
            fd = open_plain(name, os.O_RDONLY, folder=folder)
        except FileNotFoundError:  # Gone, or no file: no sign of life.
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if reap:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        except BlockingIOError:
            alive.add(int(name, 16))
        finally:
            os.close(fd)
    return alive
