"""What one holder of the lock reads and changes, and how the others get to know."""

from __future__ import annotations

import os
from dataclasses import replace

from kvloft.tiers.disk import control
from kvloft.tiers.disk.control import WHOLE, Change, Position
from kvloft.tiers.disk.format import (
    RECORD_BYTES,
    USED_AT,
    Record,
    Segment,
    is_sound,
    pack_record,
    unpack_record,
)
from kvloft.tiers.disk.segments import Files
from kvloft.units import PAGE_BYTES

_IN_PAGE = PAGE_BYTES // RECORD_BYTES


class Tables:
    """Single records of many tables, read by pages that are kept until :meth:`close`.

    Methods raise ``OSError``.
    """

    def __init__(self, files: Files, mode: int = os.O_RDONLY) -> None:
        self._files = files
        self._mode = mode
        self._fds: dict[int, int] = {}
        self._pages: dict[tuple[int, int], bytearray] = {}

    def raw(self, segment: Segment, slot: int) -> bytearray:
        """The bytes of a slot's record; fewer than 128 if the table ends before."""
        page, at = divmod(slot, _IN_PAGE)
        return self._page(segment, page)[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]

    def _page(self, segment: Segment, page: int) -> bytearray:
        found = self._pages.get((segment.number, page))
        if found is None:
            raw = os.pread(self._fd(segment), PAGE_BYTES, page * PAGE_BYTES)
            found = self._pages[segment.number, page] = bytearray(raw)
        return found

    def read(self, segment: Segment, slot: int) -> Record | None:
        """The record of a slot; ``None`` if it is damaged, or can't be."""
        record = unpack_record(self.raw(segment, slot), segment.number, slot)
        return record if record is not None and is_sound(record, segment) else None

    def stamp(self, segment: Segment, slot: int, used: int) -> None:
        """Note when a chunk was last used, on disk at once. Needs no lock."""
        raw = used.to_bytes(4, "little")
        os.pwrite(self._fd(segment), raw, slot * RECORD_BYTES + USED_AT)

    def close(self) -> None:
        """Close all tables."""
        self._pages.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _fd(self, segment: Segment) -> int:
        fd = self._fds.get(segment.number)
        if fd is None:
            fd = self._files.open_table(segment, self._mode)
            self._fds[segment.number] = fd
        return fd


class _LockedTables(Tables):
    """Tables whose records can be changed; nothing is written before :meth:`flush`."""

    def __init__(self, files: Files) -> None:
        super().__init__(files, os.O_RDWR | os.O_CREAT)
        self._fresh: dict[Segment, dict[int, bytes]] = {}

    def write(self, segment: Segment, slot: int, record: Record) -> None:
        """Change the record of a slot."""
        raw = pack_record(record, segment.number, slot)
        self._fresh.setdefault(segment, {})[slot] = raw
        # Whoever reads the record before it is written must find it changed: the page has to be
        # there, or it would be read from disk as it was.
        number, at = divmod(slot, _IN_PAGE)
        page = self._page(segment, number)
        page.extend(bytes(max(0, (at + 1) * RECORD_BYTES - len(page))))
        page[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] = raw

    def drop(self, segment: Segment) -> None:
        """A segment is about to be removed."""
        self._fresh.pop(segment, None)
        for key in [key for key in self._pages if key[0] == segment.number]:
            del self._pages[key]
        if (fd := self._fds.pop(segment.number, None)) is not None:
            os.close(fd)

    def flush(self) -> None:
        """Write what has changed, neighbours together: they mostly come in runs."""
        for segment, fresh in self._fresh.items():
            fd = self._fd(segment)
            slots = sorted(fresh)
            start = 0
            for at in range(1, len(slots) + 1):
                if at == len(slots) or slots[at] != slots[at - 1] + 1:
                    raw = b"".join(fresh[slot] for slot in slots[start:at])
                    os.pwrite(fd, raw, slots[start] * RECORD_BYTES)
                    start = at
        self._fresh.clear()


class Session:
    """The time for which one thread of one process holds the lock.

    Records are written at the end, by :meth:`finish`. If it is never reached although something has
    been changed, or if it fails half-way, the control file stays dirty, and whoever comes next
    reads everything again.
    """

    def __init__(self, files: Files, fd: int, position: Position) -> None:
        self.position = position
        self.tables = _LockedTables(files)
        self._files = files
        self._fd = fd
        self._begun = position.dirty
        self._changes: list[Change] = []

    def begin(self) -> None:
        """Must come before the first change on disk."""
        if not self._begun:
            control.write_position(self._fd, replace(self.position, dirty=True))
            self._begun = True

    def write(self, segment: Segment, slot: int, record: Record) -> None:
        """Change a slot's record."""
        self.tables.write(segment, slot, record)
        self._changes.append((segment.number, slot))

    def create(self, stride: int, slots: int, above: int) -> Segment:
        """Make a segment with a new number, greater than ``above``."""
        self.begin()
        # What the control file says may be made up, and numbers are never there twice.
        number = max(self.position.next_segment, above + 1)
        segment = Segment(number, stride, slots)
        self._files.create(segment)
        self.position = replace(self.position, next_segment=number + 1)
        self._changes.append((number, WHOLE))
        return segment

    def remove(self, segment: Segment) -> None:
        """Remove a segment."""
        self.begin()
        self.tables.drop(segment)
        self._files.remove(segment)
        self._changes.append((segment.number, WHOLE))

    def finish(self) -> None:
        """Write all records, and tell the others what has changed."""
        if not (self._changes or self._begun):
            return
        self.begin()
        self.tables.flush()
        control.write_changes(self._fd, self.position.sequence, self._changes)
        sequence = self.position.sequence + len(self._changes)
        self.position = replace(self.position, sequence=sequence, dirty=False)
        control.write_position(self._fd, self.position)
        self._changes.clear()
        self._begun = False

    def close(self) -> None:
        """Close what is open."""
        self.tables.close()
