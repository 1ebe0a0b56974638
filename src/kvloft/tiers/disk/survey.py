"""What is in a store and what is wrong with it, for people, beside engines that go on using it.

Everything here only reads; what changes a store is in :mod:`kvloft.tiers.disk.tools`. No lock is
held meanwhile, so a table may be read while somebody writes a record, a segment may go, a chunk may
be evicted under a reader's hands. Whatever looks wrong is therefore looked at again, and counts
only if it is still wrong in the same way.

Methods raise ``OSError``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvloft.errors import ConfigError
from kvloft.tiers.disk import control
from kvloft.tiers.disk.control import StrangeError, open_folder, open_plain
from kvloft.tiers.disk.faults import cause_of
from kvloft.tiers.disk.format import (
    COLUMNS,
    DIGEST_AT,
    NAME_AT,
    NAME_BYTES,
    READY,
    RESERVED,
    Record,
    Rows,
    Segment,
    segment_of,
    sound_rows,
    unpack_header,
    unpack_record,
)
from kvloft.tiers.disk.places import lies_at
from kvloft.tiers.disk.room import Name
from kvloft.tiers.disk.segments import RUN_BYTES, Files, Slots, aligned, can_be
from kvloft.tiers.disk.store import FOLDER
from kvloft.units import PAGE_BYTES

CREATED_AT = 88
"""Where in a record the time lies at which it was written."""
_LOCK_SECONDS = 2.0
_LOOKS = 3
"""How often what looks wrong is looked at."""
_PAUSE_SECONDS = 0.01
_ABOUT_BYTES = 64 << 10
_ABOUT_CHARS = 300
_NAMES_FILE = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)

_CLASSES = {
    "f": r"f", "full": r"f", "s": r"s", "state": r"s", "window": r"[wW]\d+", "short": r"w\d+",
    "whole": r"W\d+",
}  # fmt: skip
_AGE = re.compile(r"\s*(\d{1,9})\s*(s|min|m|h|d|w)\s*", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def locate(path: Path) -> Path:
    """The directory that has the store in it; ``path`` is that, or the store's own folder.

    Raises :class:`ConfigError` if there is none.
    """
    if _is_folder(path / FOLDER):
        return path
    for candidate in (path.absolute(), path.resolve()):
        if candidate.name == FOLDER and _is_folder(candidate):
            return candidate.parent
    raise ConfigError(
        f"{str(path)!r} has no store: looked for the directory {str(path / FOLDER)!r}. Name the "
        f"'path' of a tier of type 'disk', or the {FOLDER!r} in it"
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def parse_age(text: str) -> int:
    """Seconds of text such as ``30m``, ``12h`` or ``7d``; raises ``ValueError``."""
    if not (match := _AGE.fullmatch(text)):
        raise ValueError(f"{text[:60]!r} is not an age: write text such as '30m', '12h' or '7d'")
    return int(match[1]) * _SECONDS[match[2]]


def class_name(code: str) -> str:
    """What a person calls a class of chunks."""
    if code in ("f", "s"):
        return {"f": "full", "s": "state"}[code]
    if re.fullmatch(r"[wW]\d+", code, re.ASCII):
        return f"window {code[1:]}, {'whole' if code[0] == 'W' else 'short'}"
    return code


class Selection:
    """Which chunks a command is about: all that agree with whatever is given.

    ``model``: a part of the model's name. ``namespace``: the beginning of the digest in
    hexadecimal. ``code``: a class, by its code or by a readable name. ``unused_since``: not used
    since then (unix seconds). Raises :class:`ConfigError`.
    """

    def __init__(
        self, model: str | None = None, namespace: str | None = None, code: str | None = None,
        unused_since: float | None = None,
    ) -> None:  # fmt: skip
        if namespace is not None and not re.fullmatch(r"[0-9a-fA-F]{1,32}", namespace, re.ASCII):
            raise ConfigError(
                f"'--namespace': {namespace[:60]!r} is not the beginning of a namespace: write 1 "
                "to 32 hexadecimal digits, as 'kvloft store ls' shows them"
            )
        if code is not None and code not in _CLASSES and not re.fullmatch(r"[wW]\d{1,3}", code):
            raise ConfigError(
                f"'--class': {code[:60]!r} is not a class: write full, state, window, short or "
                "whole, or the code of one: f, s, w0, W0, w1 …"
            )
        self.unused_since = unused_since
        self._model = None if model is None else model.casefold()
        self._namespace = "" if namespace is None else namespace.lower()
        self._code = None if code is None else re.compile(_CLASSES.get(code, code), re.ASCII)
        self.everything = unused_since is None and model is namespace is code is None

    def names(self, digest: bytes, about: Mapping[str, str]) -> bool:
        """Whether a namespace is meant."""
        if self._model is not None and self._model not in about.get("model", "").casefold():
            return False
        return digest.hex().startswith(self._namespace)

    def covers(self, code: str) -> bool:
        """Whether a class is meant."""
        return self._code is None or self._code.fullmatch(code) is not None

    @property
    def any_class(self) -> bool:
        """Whether all classes and ages are meant."""
        return self._code is None and self.unused_since is None


class Table:
    """The records of one segment, all of them at one time."""

    def __init__(self, segment: Segment, rows: Rows, good: npt.NDArray[np.bool_]) -> None:
        self.segment = segment
        self.rows = rows
        self.good = good
        columns = rows.view(COLUMNS).reshape(len(rows))
        self.ready = np.asarray(good & (columns["state"] == READY), dtype=np.bool_)
        self.reserved = np.asarray(good & (columns["state"] == RESERVED), dtype=np.bool_)
        self.nbytes = np.where(good, columns["nbytes"], 0)
        self.created = rows[:, CREATED_AT : CREATED_AT + 4].copy().view("<u4")[:, 0]
        # The engine lets a chunk go first by the time 1; when it was written is known all the same.
        self.used = np.maximum(columns["used"], self.created)

    def record(self, slot: int) -> Record | None:
        """One record; ``None`` if it is damaged."""
        return unpack_record(self.rows[slot].tobytes(), self.segment.number, slot)

    def kinds(self) -> Iterator[tuple[bytes, bytes, npt.NDArray[np.bool_]]]:
        """Namespaces and codes (4 bytes) of the chunks, and which slots have them."""
        slots = np.flatnonzero(self.ready)
        if not len(slots):
            return
        parts = np.concatenate(
            [
                self.rows[slots, DIGEST_AT : DIGEST_AT + 16],
                self.rows[slots, NAME_AT + 16 : NAME_AT + NAME_BYTES],
            ],
            axis=1,
        )
        found, which = np.unique(
            np.ascontiguousarray(parts).view("V20").ravel(), return_inverse=True
        )
        for index, kind in enumerate(found):
            mask = np.zeros(len(self.rows), dtype=np.bool_)
            mask[slots[which == index]] = True
            raw = bytes(kind)
            yield raw[:16], raw[16:], mask


@dataclass(slots=True)
class Use:
    """What some chunks come to."""

    chunks: int = 0
    nbytes: int = 0
    """Exact bytes."""
    slot_bytes: int = 0
    """What they take in their segments, header pages included."""
    oldest: int | None = None
    """Unix seconds: when the one that has not been used for longest was used, or written."""
    newest: int | None = None

    def add(self, other: Use) -> None:
        """Count more chunks."""
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.slot_bytes += other.slot_bytes
        for time_, name, pick in ((other.oldest, "oldest", min), (other.newest, "newest", max)):
            if time_ is not None:
                mine = getattr(self, name)
                setattr(self, name, time_ if mine is None else pick(mine, time_))


@dataclass(slots=True)
class Space:
    """A namespace and what is in it, by class."""

    digest: bytes
    about: Mapping[str, str]
    """What an engine has said of it: anything at all may be in there."""
    use: Use = field(default_factory=Use)
    classes: dict[str, Use] = field(default_factory=dict)


@dataclass(slots=True)
class Slotted:
    """The segments with slots of one size."""

    slot_bytes: int
    """Without the header page."""
    segments: int = 0
    nbytes: int = 0
    """On disk, tables included."""
    slots: int = 0
    chunks: int = 0
    reserved: int = 0
    """Slots that are being written, or whose writer has died."""


@dataclass(slots=True)
class Totals:
    """A store at a glance."""

    total_bytes: int
    """Of all files and directories: what ``max_bytes`` limits."""
    free_bytes: int
    """Of the file system, for people without privileges."""
    chunks: int
    chunk_bytes: int
    namespaces: int
    damaged_records: int
    leftovers: int
    """Files that belong to no segment."""
    writers: int | None
    """Engines that have the store open; ``None`` if the lock can't be had."""
    sizes: list[Slotted]


class Entry(NamedTuple):
    """One chunk."""

    digest: bytes
    key: bytes
    """16 bytes."""
    code: str
    depth: int
    nbytes: int
    used: int
    """Unix seconds; when it was written, if it is to go first."""
    name: Name


class Flaw(NamedTuple):
    """Something that is not as it should be, and where."""

    cause: str
    """``record``, ``short``, ``header``, ``foreign``, ``torn``, ``checksum`` or ``EIO``."""
    file: str
    slot: int
    entry: Entry | None
    """The chunk that should be there; ``None`` if that can't be told."""


@dataclass(slots=True)
class Progress:
    """How far a verification has come."""

    total_bytes: int
    done_bytes: int = 0
    chunks: int = 0
    """That have been read."""
    gone: int = 0
    """That have been evicted before they could be read, or meanwhile."""


class Survey:
    """A store, seen from outside. ``path`` is the directory that has it in it (:func:`locate`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / FOLDER
        self.files = Files(self.folder)
        self.about = names_in(self.folder / "names")

    # ---------------------------------------------------------------- looking

    def tables(self) -> Iterator[Table]:
        """All tables, one in memory at a time."""
        for segment in self.files.found()[0]:
            if (table := self._table(segment)) is not None:
                yield table

    def _table(self, segment: Segment) -> Table | None:
        """A table as it is when nobody writes in it; ``None`` if the segment has gone."""
        for look in range(_LOOKS):
            if look:
                time.sleep(_PAUSE_SECONDS)
            rows = self.files.table(segment)
            good = sound_rows(rows, segment)
            if good.all():
                break
            if not self._is_whole(segment):
                return None
        return Table(segment, rows, good)

    def _is_whole(self, segment: Segment) -> bool:
        return _size(self.folder / segment.data_name) >= segment.data_bytes

    def wanted(
        self, table: Table, selection: Selection, *, of_any_age: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Which slots hold chunks that are meant."""
        mask = np.zeros(len(table.rows), dtype=np.bool_)
        for digest, code, slots in table.kinds():
            if selection.names(digest, self.about.get(digest, {})) and selection.covers(
                _code(code)
            ):
                mask |= slots
        if selection.unused_since is not None and not of_any_age:
            mask &= table.used < selection.unused_since
        return mask

    def spaces(self, selection: Selection) -> list[Space]:
        """What each namespace has, the one used last first; also those that have nothing left."""
        found: dict[bytes, Space] = {}
        if selection.any_class:
            found = {d: Space(d, a) for d, a in self.about.items() if selection.names(d, a)}
        for table in self.tables():
            wanted = self.wanted(table, selection)
            for digest, code, slots in table.kinds():
                mask = slots & wanted
                if not mask.any():
                    continue
                space = found.setdefault(digest, Space(digest, self.about.get(digest, {})))
                count, used = int(mask.sum()), table.used[mask]
                use = Use(
                    count, int(table.nbytes[mask].sum()), count * table.segment.stride,
                    int(used.min()), int(used.max()),
                )  # fmt: skip
                space.use.add(use)
                space.classes.setdefault(_code(code), Use()).add(use)
        return sorted(found.values(), key=lambda s: (-(s.use.newest or 0), s.digest))

    def entries(self, selection: Selection) -> Iterator[Entry]:
        """Single chunks, in the order in which they lie on disk."""
        for table in self.tables():
            for slot in np.flatnonzero(self.wanted(table, selection)).tolist():
                if (record := table.record(slot)) is not None:
                    yield _entry(record)

    def totals(self) -> Totals:
        """A summary of everything."""
        sizes: dict[int, Slotted] = {}
        spaces: set[bytes] = set()
        damaged = chunk_bytes = 0
        for table in self.tables():
            segment = table.segment
            size = sizes.setdefault(segment.slot_bytes, Slotted(segment.slot_bytes))
            size.segments += 1
            size.nbytes += segment.total_bytes
            size.slots += segment.slots
            size.chunks += int(table.ready.sum())
            size.reserved += int(table.reserved.sum())
            damaged += int((~table.good).sum())
            chunk_bytes += int(table.nbytes[table.ready].sum())
            spaces.update(digest for digest, _, _ in table.kinds())
        system = os.statvfs(self.folder)
        return Totals(
            total_bytes=self.files.measure(),
            free_bytes=system.f_bavail * system.f_frsize,
            chunks=sum(size.chunks for size in sizes.values()),
            chunk_bytes=chunk_bytes,
            namespaces=len(spaces),
            damaged_records=damaged,
            leftovers=len(self.files.found()[1]),
            writers=self._count_writers(),
            sizes=[sizes[key] for key in sorted(sizes)],
        )

    def _count_writers(self) -> int | None:
        """How many engines are alive; ``None`` if that can't be told."""
        if _size(self.folder / "control") < 0:
            return 0  # No engine has been here, or all that knew of it have been deserted.
        try:
            # An engine that is just starting must not find its own sign of life locked.
            with control.locked(f"{self.folder}/control", _LOCK_SECONDS):
                return len(control.live_writers(self.folder / "writers", reap=False))
        except StrangeError:
            return None
        except FileNotFoundError:
            return 0
        except OSError:
            return None

    # ---------------------------------------------------------------- verification

    def broken(self, selection: Selection) -> Iterator[Flaw]:
        """What is wrong by the tables alone: records that are damaged, segments that are short."""
        if selection.everything:  # Else it can't be told whether a record is meant.
            for table in self.tables():
                for slot in np.flatnonzero(~table.good).tolist():
                    yield Flaw("record", table.segment.table_name, slot, None)
        for name in self.files.found()[1]:
            segment = segment_of(name)
            if segment is None or name != segment.data_name or not can_be(segment):
                continue
            rows = self.files.table(segment)
            table = Table(segment, rows, sound_rows(rows, segment))
            if not 0 <= _size(self.folder / name) < segment.data_bytes:
                continue
            for slot in np.flatnonzero(self.wanted(table, selection)).tolist():
                if (record := table.record(slot)) is not None:
                    yield Flaw("short", name, slot, _entry(record))

    def unreadable(self, selection: Selection, tell: Callable[[Progress], None]) -> Iterator[Flaw]:
        """Read every byte of the chunks that are meant, and yield what is wrong.

        ``tell`` is called after each chunk. Takes the memory of the largest table, and little more.
        """
        progress = Progress(
            sum(int(self.wanted(t, selection).sum()) * t.segment.stride for t in self.tables())
        )
        buffer = memoryview(b"")
        for table in self.tables():
            segment = table.segment
            with contextlib.closing(Slots(self.files)) as slots:
                for slot in np.flatnonzero(self.wanted(table, selection)).tolist():
                    size = min(segment.slot_bytes, RUN_BYTES)
                    if len(buffer) < size:
                        buffer = aligned(size)
                    data = buffer[:size]
                    cause, record = self._examine(segment, slot, table.record(slot), data, slots)
                    progress.done_bytes += segment.stride
                    progress.chunks += record is not None
                    progress.gone += record is None
                    if cause is not None and record is not None:
                        yield Flaw(cause, segment.data_name, slot, _entry(record))
                    tell(progress)
        progress.total_bytes = progress.done_bytes
        tell(progress)

    def _examine(
        self, segment: Segment, slot: int, record: Record | None, data: memoryview, slots: Slots
    ) -> tuple[str | None, Record | None]:
        """What is wrong with a chunk, if anything, and its record; no record if it has gone."""
        cause = None
        for _ in range(_LOOKS):
            if record is None or (cause := _flaw(segment, slot, record, data, slots)) is None:
                break
            slots.close()  # So that the next look is at what has the name then.
            again = self._record(segment, slot)
            if again is None or again.state != READY or again.name != record.name:
                return None, None
            if again._replace(used=0) == record._replace(used=0):
                time.sleep(_PAUSE_SECONDS)
            record = again
        return cause, record

    def _record(self, segment: Segment, slot: int) -> Record | None:
        if not self._is_whole(segment):
            # Cut short meanwhile, or removed; the next verification tells.
            return None
        return unpack_record(self.files.table(segment)[slot].tobytes(), segment.number, slot)


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return -1


def _flaw(
    segment: Segment, slot: int, record: Record, data: memoryview, slots: Slots
) -> str | None:
    """Why a slot does not hold what its record says; ``None`` if it does. ``data``: memory for a
    part of it."""
    try:
        return _compare(segment, slot, record, data, slots)
    except FileNotFoundError:
        return "short"
    except OSError as error:
        return cause_of(error)


def _compare(
    segment: Segment, slot: int, record: Record, data: memoryview, slots: Slots
) -> str | None:
    at = len(data)
    if slots.read(segment, slot, [data]) < PAGE_BYTES + at:
        return "short"
    if (header := unpack_header(slots.pages[0])) is None:
        return "header"
    if not lies_at(header, segment, slot) or (header.digest, header.key[:16], header.code) != (
        record.digest, record.key, record.code,
    ):  # fmt: skip
        return "foreign"
    if header.payload != record.payload or header.nbytes != record.nbytes:
        return "torn"
    payload = xxhash.xxh3_64(data)
    while at < segment.slot_bytes:  # Its length is what somebody has written on it.
        part = data[: segment.slot_bytes - at]
        if slots.read_part(segment, slot, at, part) < len(part):
            return "short"
        payload.update(part)
        at += len(part)
    return None if header.payload == payload.intdigest() else "checksum"


def _code(code: bytes) -> str:
    # Whoever has made the record may have meant a terminal to obey it.
    text = code.rstrip(b"\0").decode("ascii", "backslashreplace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _entry(record: Record) -> Entry:
    return Entry(
        record.digest, record.key, _code(record.code), record.depth, record.nbytes,
        max(record.used, record.created), Name(record.digest, record.name),
    )  # fmt: skip


def names_in(folder: Path) -> dict[bytes, dict[str, str]]:
    """What engines have said of their namespaces, as far as it is text."""
    with contextlib.suppress(FileNotFoundError), open_folder(folder) as at:
        return {
            bytes.fromhex(name.removesuffix(".json")): _about(name, at)
            for name in sorted(os.listdir(at))  # noqa: PTH208
            if _NAMES_FILE.fullmatch(name)
        }
    return {}


def _about(name: str, folder: int) -> dict[str, str]:
    try:
        fd = open_plain(name, os.O_RDONLY, folder=folder)
        try:
            said = json.loads(os.read(fd, _ABOUT_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {k[:_ABOUT_CHARS]: v[:_ABOUT_CHARS] for k, v in said.items() if isinstance(v, str)}
