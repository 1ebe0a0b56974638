"""Files of equal slots, made in full size beforehand and overwritten from then on.

A file for each chunk would have been simpler. On ext4 over NVMe, making one takes 0.8 ms, and
writing into a fresh file gets a fifth to a half of the device's speed, because blocks have to be
found and their metadata written; overwriting ranges of a file that has its blocks gets all of it.
What it costs is that room is given to sizes in whole segments.

A segment's records lie in a file of their own. In one file with the slots, each small buffered
write of a record waits for the direct writes under way in that file and holds up those behind it:
direct writes of 64 KiB came to half the speed, those of 1 MiB to two thirds.

Chunks are written and read with direct I/O where the file system has it: the engine keeps its own
cache of them, so the system's would only take memory and time from it. Files stay open for a few
accesses in a row and no longer, so that one that another process removes does give its space back.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from kvloft.tiers.disk.control import MAX_SEGMENT, REFUSED, allocate, open_plain
from kvloft.tiers.disk.format import RECORD_BYTES, Rows, Segment, segment_of
from kvloft.units import PAGE_BYTES

RUN_SLOTS = 64
"""How many slots are read or written in one go, at most."""
RUN_BYTES = 8 << 20
"""A run ends with the slot that makes it so long."""
MAX_SEGMENT_BYTES = 256 << 20
"""More than this only a segment of a single slot has."""
_MAX_USES = 64
"""How often files are accessed before they are opened anew."""


def aligned(nbytes: int) -> memoryview:
    """Zeroed memory that starts on a page."""
    return memoryview(mmap.mmap(-1, nbytes))


class Files:
    """The segments of one store. Methods raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefix = f"{folder}/"
        self.direct = True
        """Whether the file system takes direct I/O; found out by trying."""

    # ---------------------------------------------------------------- whole segments

    def measure(self, *, segments: bool = True) -> int:
        """Bytes of everything in the store, directories too; or of all that is no segment."""
        return _measure(str(self.folder), segments)

    def found(self) -> tuple[list[Segment], list[str]]:
        """Segments whose data are there in full, by number, and names of files that belong to none.

        Data that are longer than they should be count too: :meth:`trim` mends that. A missing or
        short table is no reason to leave out a segment; its records will turn out bad. Whatever is
        no file, or has a name that no engine gives, belongs to nothing.
        """
        sizes: dict[str, int] = {}
        strange: list[str] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if (segment := segment_of(entry.name)) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and can_be(segment):
                        sizes[entry.name] = status.st_size
                    else:
                        strange.append(entry.name)
        segments: dict[int, Segment] = {}
        for name, size in sorted(sizes.items()):
            segment = segment_of(name)
            if segment and name == segment.data_name and size >= segment.data_bytes:
                segments.setdefault(segment.number, segment)
        kept = {name for s in segments.values() for name in (s.data_name, s.table_name)}
        return list(segments.values()), [*strange, *(name for name in sizes if name not in kept)]

    def create(self, segment: Segment) -> None:
        """Make a segment with room for all its slots, or nothing at all."""
        made = []
        try:
            # The table first: a table without data is known for a leftover.
            for name, size in (
                (segment.table_name, segment.table_bytes),
                (segment.data_name, segment.data_bytes),
            ):
                fd = open_plain(f"{self._prefix}{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
                made.append(name)
                try:
                    allocate(fd, size)
                finally:
                    os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(made)
            raise

    def remove(self, segment: Segment) -> None:
        """Remove a segment's files."""
        self.unlink((segment.data_name, segment.table_name))

    def unlink(self, names: Iterable[str]) -> None:
        """Remove files of the store that are still there; a folder in place of one gets another
        name."""
        for name in names:
            path = self.folder / name
            try:
                path.unlink(missing_ok=True)
            except IsADirectoryError:
                path.rename(path.with_name(f"{name}.{secrets.token_hex(8)}"))

    def trim(self, segment: Segment) -> bool:
        """Cut off what lies beyond a segment's end; whether there was anything."""
        cut = False
        for name, size in (
            (segment.data_name, segment.data_bytes),
            (segment.table_name, segment.table_bytes),
        ):
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_size > size:
                    fd = open_plain(path, os.O_WRONLY)
                    try:
                        os.ftruncate(fd, size)
                    finally:
                        os.close(fd)
                    cut = True
        return cut

    # ---------------------------------------------------------------- tables

    def open_table(self, segment: Segment, mode: int) -> int:
        """A descriptor of a segment's table; ``mode`` is that of ``os.open``."""
        return open_plain(f"{self._prefix}{segment.table_name}", mode)

    def table(self, segment: Segment) -> Rows:
        """All records of a segment. Those that can't be read are none: 0xff throughout."""
        want = segment.slots * RECORD_BYTES
        raw = bytearray(b"\xff") * want
        with contextlib.suppress(FileNotFoundError):
            fd = self.open_table(segment, os.O_RDONLY)
            try:
                at = 0
                while at < want and (got := os.preadv(fd, [memoryview(raw)[at:]], at)):
                    at += got
            finally:
                os.close(fd)
        return np.frombuffer(raw, dtype=np.uint8).reshape(segment.slots, RECORD_BYTES)


class Slots:
    """Reads and writes runs of slots that lie side by side, for one thread; one run at a time of
    all that share ``gate``, or so many as that admits. Methods raise ``OSError``."""

    def __init__(self, files: Files, gate: AbstractContextManager[object] | None = None) -> None:
        pages = aligned(RUN_SLOTS * PAGE_BYTES)
        self.pages = [pages[i : i + PAGE_BYTES] for i in range(0, len(pages), PAGE_BYTES)]
        """Where the header pages of a run are read into and written from."""
        self._files = files
        self._gate = gate or contextlib.nullcontext()
        self._fds: dict[tuple[int, int], int] = {}
        self._uses = 0

    def write(self, segment: Segment, first: int, run: Sequence[memoryview]) -> None:
        """Write as many of :attr:`pages`, and the slots' bytes, in one go."""
        parts = self._parts(run)
        done = self._access(segment, first, os.O_WRONLY, parts)
        if done != segment.stride * len(run):
            raise OSError(errno.EIO, f"{done} of {segment.stride * len(run)} bytes were written")

    def read(self, segment: Segment, first: int, run: Sequence[memoryview]) -> int:
        """Read as many of :attr:`pages`, and the slots' bytes; how many bytes there were."""
        return self._access(segment, first, os.O_RDONLY, self._parts(run))

    def read_page(self, segment: Segment, slot: int) -> int:
        """Read the first of :attr:`pages` alone; how many bytes there were."""
        return self._access(segment, slot, os.O_RDONLY, self.pages[:1])

    def read_part(self, segment: Segment, slot: int, at: int, part: memoryview) -> int:
        """Read some of a slot's bytes, from ``at`` on, a multiple of a page; how many there
        were."""
        return self._access(segment, slot, os.O_RDONLY, [part], PAGE_BYTES + at)

    def _parts(self, run: Sequence[memoryview]) -> list[memoryview]:
        return [part for pair in zip(self.pages, run, strict=False) for part in pair]

    def close(self) -> None:
        """Close all files. They are opened again as needed."""
        self._uses = 0
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _access(
        self, segment: Segment, slot: int, mode: int, parts: list[memoryview], at: int = 0
    ) -> int:
        with self._gate:
            return self._transfer(segment, slot * segment.stride + at, mode, parts)

    def _transfer(self, segment: Segment, offset: int, mode: int, parts: list[memoryview]) -> int:
        self._uses += 1
        if self._uses > _MAX_USES:
            self.close()
        if self._files.direct:
            try:
                return _transfer(self._fd(segment, mode), mode, parts, offset)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
            # The file system has none, or wants it otherwise; or else the memory lies askew.
            done = None
            with contextlib.suppress(OSError):
                done = _bounced(self._fd(segment, mode), mode, parts, offset)
            if done is not None:
                return done
            self._files.direct = False
            self.close()
        fd = self._fd(segment, mode)
        done = _transfer(fd, mode, parts, offset)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def _fd(self, segment: Segment, mode: int) -> int:
        fd = self._fds.get((segment.number, mode))
        if fd is None:
            direct = os.O_DIRECT if self._files.direct else 0
            fd = open_plain(f"{self._files.folder}/{segment.data_name}", mode | direct)
            self._fds[segment.number, mode] = fd
        return fd


def can_be(segment: Segment) -> bool:
    """Whether an engine could have made this: a name alone may ask for any amount of memory."""
    return segment.number <= MAX_SEGMENT and (
        segment.slots == 1 or segment.total_bytes <= MAX_SEGMENT_BYTES
    )


def _measure(folder: str, segments: bool) -> int:
    total = os.lstat(folder).st_size
    todo = [folder]
    while todo:
        inner = todo.pop()
        try:
            with os.scandir(inner) as entries:
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder:
                        todo.append(entry.path)
                    if is_folder or segments or segment_of(entry.name) is None:
                        with contextlib.suppress(FileNotFoundError):
                            total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            if inner == folder:
                raise
            # It has gone, or is too deep down or closed to us; and it is none of ours.
    return total


def _transfer(fd: int, mode: int, parts: list[memoryview], offset: int) -> int:
    """Write or read all parts; how many bytes, fewer only where the file ends."""
    whole = sum(len(part) for part in parts)
    move = os.preadv if mode == os.O_RDONLY else os.pwritev
    done = move(fd, parts, offset)
    while 0 < done < whole and done % PAGE_BYTES == 0:
        rest = _beyond(parts, done)
        more = move(fd, rest, offset + done)
        if not more:
            break
        done += more
    return done


def _beyond(parts: list[memoryview], done: int) -> list[memoryview]:
    out = []
    for part in parts:
        if done < len(part):
            out.append(part[done:])
        done = max(0, done - len(part))
    return out


def _bounced(fd: int, mode: int, parts: list[memoryview], offset: int) -> int:
    """The same through aligned memory."""
    with contextlib.closing(mmap.mmap(-1, sum(map(len, parts)))) as memory:
        if mode != os.O_RDONLY:
            memory[:] = b"".join(parts)
        with memoryview(memory) as whole:
            done = _transfer(fd, mode, [whole], offset)
            if mode == os.O_RDONLY:
                at = 0
                for part in parts:
                    part[:] = whole[at : at + len(part)]
                    at += len(part)
    return done
