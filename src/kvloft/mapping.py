"""The one shared host mapping behind an arena: made once, attached by every process of an engine.

The file lives in the system's shared memory under a name only for as long as processes still have
to find it: the scheduler's side takes the name away once all ranks have attached, so that nothing
is left behind even if the engine is killed. Every attached process holds a shared lock on the file;
a file that nobody holds is what a crash left in that short time, and is removed at the next start.

All pages are claimed at creation. Otherwise a full ``/dev/shm`` would show only later, as a bus
error that ends the engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloft.errors import ArenaError
from kvloft.units import PAGE_BYTES, format_size, page_aligned

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "kvloft-"
_MAGIC = b"KVLOFT01"
_HEAD = struct.Struct("<8sQII")
_RANK = struct.Struct("<B16s")
_LOCK_SECONDS = 120.0

SCHEDULER = -1
"""The rank under which the scheduler's side attaches: it reads no chunks."""


_NOTE_BYTES = 60 << 10


def header_bytes(ranks: int) -> int:
    """Bytes that a mapping needs besides the arena, whole pages."""
    return page_aligned(_HEAD.size + ranks * _RANK.size + _NOTE_BYTES)


class Mapping:
    """An attached mapping. ``data`` is the arena's memory, ``(nbytes,)`` of uint8."""

    def __init__(
        self, name: str, nbytes: int, *, rank: int, ranks: int, digest: bytes,
        note: bytes = b"", directory: Path = SHARED_MEMORY,
    ) -> None:  # fmt: skip
        """Attach to the mapping ``name``, creating it if this is the first process to come.

        ``nbytes``: the whole budget, header included. ``digest``: the geometry's; every rank leaves
        its own in the header. ``note``: what the first rank leaves for the scheduler's side to
        read (:meth:`note`), at most 60 KiB.

        Raises :class:`ArenaError`, with nothing left allocated, if the memory is not there or
        the mapping was made for another size.
        """
        self._path = directory / f"{_PREFIX}{name}"
        self._ranks = ranks
        self._header = header_bytes(ranks)
        if nbytes <= self._header + PAGE_BYTES:
            raise ArenaError(f"{format_size(nbytes)} is too little for an arena")
        if len(note) > _NOTE_BYTES:
            raise ArenaError(f"a note of {len(note)} bytes does not fit the mapping's header")
        total = nbytes // PAGE_BYTES * PAGE_BYTES
        self._fd = _open_locked(self._path)
        try:
            size = os.fstat(self._fd).st_size
            if size == 0:
                _remove_stale(directory)
                _claim(self._fd, total, directory)
            elif size != total:
                raise ArenaError(
                    f"the mapping {self._path.name} has {size} bytes, this process expects "
                    f"{total}; all processes of an engine must be given the same options"
                )
            # Pages that a rank meets for the first time cost it more than copying what is in them,
            # so they are all met now.
            flags = mmap.MAP_SHARED | (0 if rank == SCHEDULER else mmap.MAP_POPULATE)
            self._memory = mmap.mmap(self._fd, total, flags=flags)
            if size == 0:
                _HEAD.pack_into(self._memory, 0, _MAGIC, total, ranks, 0)
            if _HEAD.unpack_from(self._memory, 0)[:3] != (_MAGIC, total, ranks):
                raise ArenaError(f"{self._path.name} is not a mapping for {ranks} ranks")
            if rank != SCHEDULER:
                if rank == 0:
                    start = _HEAD.size + ranks * _RANK.size
                    self._memory[start : start + len(note)] = note
                    _HEAD.pack_into(self._memory, 0, _MAGIC, total, ranks, len(note))
                _RANK.pack_into(self._memory, _HEAD.size + rank * _RANK.size, 1, digest)
        except BaseException:
            self._unlink()
            os.close(self._fd)
            raise
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._digest = digest
        whole = np.frombuffer(self._memory, dtype=np.uint8)
        self.data: npt.NDArray[np.uint8] = whole[self._header :]

    def note(self) -> bytes:
        """What rank 0 has left; empty if it has not attached yet."""
        length = _HEAD.unpack_from(self._memory, 0)[3]
        start = _HEAD.size + self._ranks * _RANK.size
        return self._memory[start : start + length]

    def attached(self) -> list[bytes | None]:
        """The digest that each rank has left; ``None`` for a rank that has not attached yet."""
        out: list[bytes | None] = []
        for rank in range(self._ranks):
            there, digest = _RANK.unpack_from(self._memory, _HEAD.size + rank * _RANK.size)
            out.append(digest if there else None)
        return out

    def agree(self, digest: bytes | None = None) -> bool:
        """Whether all ranks have attached; then the name is taken away.

        Raises :class:`ArenaError` if a rank sees another geometry than this process (``digest``, or
        the one given to the constructor).
        """
        self._digest = self._digest if digest is None else digest
        digests = self.attached()
        for rank, digest in enumerate(digests):
            if digest is not None and digest != self._digest:
                raise ArenaError(
                    f"rank {rank} sees another KV-cache geometry (digest {digest.hex()}) than the "
                    f"scheduler ({self._digest.hex()}); all ranks must run the same model, options "
                    "and versions"
                )
        if None in digests:
            return False
        self._unlink()
        return True

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            if os.path.samestat(self._path.stat(), os.fstat(self._fd)):
                self._path.unlink()

    def close(self) -> None:
        """Detach; the memory goes back to the system with the last process. Idempotent."""
        if self._fd < 0:
            return
        self._unlink()
        self.data = np.empty(0, dtype=np.uint8)
        # A view that is still about keeps the memory until it goes; that is not an error here.
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self._fd)
        self._fd = -1


def _open_locked(path: Path) -> int:
    """Open or create ``path`` with the exclusive lock, never a file that has lost its name."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            # Not blocking: somebody may have put a pipe there.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ArenaError(
                f"no shared memory can be made at {path.parent}: {error.strerror}"
            ) from error
        try:
            _check_private(fd, path)
            while not (lock := _try_lock(fd)):
                if time.monotonic() > deadline:
                    raise ArenaError(
                        f"{path.name} has been locked by another process for "
                        f"{_LOCK_SECONDS:.0f} s; is one of the engine's processes hung?"
                    )
                time.sleep(0.002)
        except BaseException:
            os.close(fd)
            raise
        status = os.fstat(fd)
        if status.st_nlink and lock == fcntl.LOCK_EX and status.st_size:
            # Whoever made it has been killed, or else would share the lock.
            path.unlink()
        elif status.st_nlink:
            return fd
        os.close(fd)


def _try_lock(fd: int) -> int:
    """The lock that was taken, ``LOCK_EX`` or ``LOCK_SH``; 0 if it has to be tried again."""
    # Attached processes hold a shared lock, so only the one that finds the file empty needs more.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        # Shared with a process that has finished its set-up, never with one that is empty-handed:
        # two of those would keep each other from the exclusive lock.
        if os.fstat(fd).st_size:
            return fcntl.LOCK_SH
        fcntl.flock(fd, fcntl.LOCK_UN)
        return 0
    return fcntl.LOCK_EX


def _check_private(fd: int, path: Path) -> None:
    """Others may have made a file of that name, to read along or to write into it."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ArenaError(f"{path} has been made by somebody else; remove it")
    os.fchmod(fd, 0o600)


def _claim(fd: int, total: int, directory: Path) -> None:
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    if total > free:
        raise ArenaError(
            f"{directory} has {format_size(free)} free, cpu_bytes_to_use asks for "
            f"{format_size(total)}; ask for less, or enlarge it (a container: --shm-size)"
        )
    available = min(_available_memory())
    if total > available:
        raise ArenaError(
            f"the machine has {format_size(available)} of memory available, cpu_bytes_to_use "
            f"asks for {format_size(total)}; ask for less"
        )
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise ArenaError(
            f"{directory} could not give {format_size(total)}: {error.strerror}; ask for less"
        ) from error


def _available_memory() -> Iterator[int]:
    """What the system, and the control group if there is one, can still give; bytes."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        yield max(0, limit - int((group / "memory.current").read_text()))
    yield 1 << 62


def _remove_stale(directory: Path) -> None:
    """Remove mappings that a crash left behind: nobody holds a lock on them."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An empty file belongs to a process that is about to lock it.
                if os.fstat(fd).st_size:
                    path.unlink()
            finally:
                os.close(fd)
