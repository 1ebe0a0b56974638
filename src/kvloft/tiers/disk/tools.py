"""What people want to know of a store and do to it, beside engines that go on using it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from kvloft.errors import ConfigError
from kvloft.tiers.disk.control import live_writers
from kvloft.tiers.disk.format import (
    FREE,
    FULL_CODE,
    READY,
    RESERVED,
    Record,
    Segment,
    good_rows,
    segment_of,
    unpack_header,
    unpack_record,
)
from kvloft.tiers.disk.room import Name
from kvloft.tiers.disk.segments import Slots, aligned
from kvloft.tiers.disk.session import Session, Tables
from kvloft.tiers.disk.store import FOLDER, Store, lies_at
from kvloft.tiers.disk.view import NONE

_BATCH = 256
"""Chunks that are removed under one lock: engines must not wait for long."""
_LOCK_SECONDS = 30.0
_MAX_ABOUT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as the tables have it."""

    digest: bytes
    """Its namespace, 16 bytes."""
    key: bytes
    """16 bytes."""
    code: str
    parent: bytes
    """16 bytes; zeros at the first boundary."""
    depth: int
    nbytes: int
    """Exact length."""
    slot_bytes: int
    """What it takes, but for 4,096 bytes more."""
    ready: bool
    """False while somebody writes it."""
    created: int
    """Unix seconds."""
    used: int
    """Unix seconds, to about a minute; 1 for what is to go first."""
    segment: int
    slot: int

    @property
    def name(self) -> Name:
        """What :meth:`StoreTools.remove` takes."""
        return Name(self.digest, self.key + self.code.encode().ljust(4, b"\0"))


@dataclass(slots=True)
class NamespaceUse:
    """What one namespace has in the store."""

    digest: bytes
    about: Mapping[str, str] = field(default_factory=dict)
    """For people: the model and so on. Written by the engine, never checked; may be empty."""
    chunks: int = 0
    """Ready ones."""
    nbytes: int = 0
    """Exact bytes of those."""
    created: int = 0
    """When the newest was written, unix seconds."""
    used: int = 0
    """When one was used last, unix seconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the store takes, and for what."""

    total_bytes: int
    """Of all files and directories: what ``max_bytes`` limits."""
    segments: int
    segment_bytes: int
    slots: int
    ready: int
    """Slots that hold a chunk."""
    reserved: int
    """Slots that are being written, or whose writer has died."""
    damaged: int
    """Slots whose record is damaged."""
    chunk_bytes: int
    """Exact bytes of all chunks."""
    writers: int
    """Engines that have the store open."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something in the store that is not as it should be."""

    segment: int
    slot: int
    cause: str
    """``record``, ``header``, ``foreign``, ``short``, ``torn`` or ``checksum``."""
    name: Name | None
    """The chunk that should be there; ``None`` if that can't be told, or if the whole segment is
    cut short."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a clean-up has come to."""

    chunks: int
    """That have been removed."""
    segments: int
    freed_bytes: int
    """By which the store has become smaller."""


class StoreTools:
    """A store seen from the command line. ``path`` is the ``path`` of the tier.

    :meth:`chunks`, :meth:`namespaces`, :meth:`usage` and :meth:`verify` change nothing, take no
    lock and need no more than permission to read; what engines change meanwhile may or may not
    show. The others take the store's lock, for a short while each time. ``OSError`` passes through,
    :class:`kvloft.tiers.disk.control.LockedError` among them.

    Raises :class:`kvloft.errors.ConfigError` if there is no store.
    """

    def __init__(self, path: Path) -> None:
        if not (path / FOLDER).is_dir():
            raise ConfigError(
                f"there is no store in {str(path)!r}: no folder {FOLDER!r}; name the 'path' of a "
                "tier in 'secondary_tiers'"
            )
        self.path = path
        self._store = Store(path, lock_seconds=_LOCK_SECONDS)
        self._files = self._store.files

    # ---------------------------------------------------------------- looking

    def chunks(self, digest: bytes | None = None) -> Iterator[StoredChunk]:
        """All chunks, or those of one namespace, in the order in which they lie on disk."""
        for segment, slot, record in self._records():
            if record is not None and digest in (None, record.digest):
                yield StoredChunk(
                    digest=record.digest,
                    key=record.key,
                    code=_code(record),
                    parent=record.parent,
                    depth=record.depth,
                    nbytes=record.nbytes,
                    slot_bytes=segment.slot_bytes,
                    ready=record.state == READY,
                    created=record.created,
                    used=record.used,
                    segment=segment.number,
                    slot=slot,
                )

    def namespaces(self) -> list[NamespaceUse]:
        """What each namespace has, the one used last first; also those that have nothing left."""
        found: dict[bytes, NamespaceUse] = {}
        for file in sorted((self._store.folder / "names").glob("*.json")):
            if (digest := _digest(file.stem)) is not None:
                found[digest] = NamespaceUse(digest, _about(file))
        for chunk in self.chunks():
            use = found.setdefault(chunk.digest, NamespaceUse(chunk.digest))
            if chunk.ready:
                use.chunks += 1
                use.nbytes += chunk.nbytes
                use.created = max(use.created, chunk.created)
                use.used = max(use.used, chunk.used)
        return sorted(found.values(), key=lambda use: -use.used)

    def usage(self) -> Usage:
        """What the store takes."""
        segments, _ = self._files.found()
        ready = reserved = damaged = chunk_bytes = 0
        for _, _, record in self._records():
            if record is None:
                damaged += 1
            elif record.state == RESERVED:
                reserved += 1
            else:
                ready += 1
                chunk_bytes += record.nbytes
        return Usage(
            total_bytes=self._files.measure(),
            segments=len(segments),
            segment_bytes=sum(segment.total_bytes for segment in segments),
            slots=sum(segment.slots for segment in segments),
            ready=ready,
            reserved=reserved,
            damaged=damaged,
            chunk_bytes=chunk_bytes,
            writers=len(live_writers(self._store.folder / "writers", reap=False)),
        )

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Flaw]:
        """Read every byte of every chunk, and yield what is wrong.

        ``progress`` is told after each chunk how many bytes of how many have been read. Takes the
        memory of the largest chunk. Nothing is changed: pass the names to :meth:`remove`.
        """
        records = list(self._records()) if progress else self._records()
        total = sum(segment.stride for segment, _, _ in records) if progress else 0
        done, slots = 0, Slots(self._files)
        buffer = memoryview(b"")
        for name in self._files.found()[1]:
            if (cut := segment_of(name)) is not None and name == cut.data_name:
                yield Flaw(cut.number, 0, "short", None)
        try:
            for segment, slot, record in records:
                if record is None:
                    yield Flaw(segment.number, slot, "record", None)
                elif record.state == READY:
                    if len(buffer) < segment.slot_bytes:
                        buffer = aligned(segment.slot_bytes)
                    data = buffer[: segment.slot_bytes]
                    cause = self._flaw(segment, slot, record, data, slots)
                    if cause is not None and self._is_still(segment, slot, record):
                        yield Flaw(segment.number, slot, cause, Name(record.digest, record.name))
                done += segment.stride
                if progress:
                    progress(done, total)
        finally:
            slots.close()

    def _flaw(
        self, segment: Segment, slot: int, record: Record, data: memoryview, slots: Slots
    ) -> str | None:
        try:
            got = slots.read(segment, slot, [data])
        except FileNotFoundError:
            return "short"
        if got < segment.stride:
            return "short"
        if (header := unpack_header(slots.pages[0])) is None:
            return "header"
        if not lies_at(header, segment, slot) or (header.digest, header.key[:16], header.code) != (
            record.digest, record.key, record.code,
        ):  # fmt: skip
            return "foreign"
        if header.payload != record.payload or header.nbytes != record.nbytes:
            return "torn"
        return None if header.payload == xxhash.xxh3_64_intdigest(data) else "checksum"

    def _is_still(self, segment: Segment, slot: int, record: Record) -> bool:
        """Whether a record has not been changed since it was read."""
        with contextlib.closing(Tables(self._files)) as tables:
            try:
                now = tables.read(segment, slot)
            except FileNotFoundError:
                return False
        return now is not None and now._replace(used=0) == record._replace(used=0)

    def _records(self) -> Iterator[tuple[Segment, int, Record | None]]:
        """All slots that are not free; ``None`` where the record is damaged."""
        for segment in self._files.found()[0]:
            rows = self._files.table(segment)
            good = good_rows(rows, segment.number)
            for slot in np.flatnonzero(~good | (rows[:, 0] != FREE)).tolist():
                yield segment, slot, unpack_record(rows[slot].tobytes(), segment.number, slot)

    # ---------------------------------------------------------------- changing

    def remove(self, names: Iterable[Name]) -> int:
        """Remove chunks, and with full chunks all that rests on them; how many have gone."""
        store, gone = self._ready(), 0
        names = list(names)
        for at in range(0, len(names), _BATCH):
            gone += store.remove(names[at : at + _BATCH])
        return gone

    def collect(self, *, unused_for: float | None = None, down_to: int | None = None) -> Collected:
        """Clean up: what dead engines have reserved, chunks whose parents are missing, damaged
        records, files that belong to nothing, and empty segments.

        ``unused_for``: also remove chunks that have not been used for so many seconds, nor anything
        that rests on them. ``down_to``: then drop the segments that have not been used for longest
        until the store takes at most so many bytes.
        """
        before = self._files.measure()
        store, gone, dropped = self._ready(), 0, 0
        if unused_for is not None:
            gone += self.remove(self._unused_since(time.time() - unused_for))
        if down_to is not None:
            evicted, segments = store.room.evicted, len(store.view.extents)
            store.change(lambda session: store.room.shrink(store.view, session, down_to))
            gone += store.room.evicted - evicted
            dropped += segments - len(store.view.extents)
        dropped += store.change(self._drop_empty)
        return Collected(gone, dropped, max(0, before - self._files.measure()))

    def clear(self, digest: bytes | None = None) -> Collected:
        """Remove all chunks, or those of one namespace; what is being written just now stays."""
        before = self._files.measure()
        store = self._ready()
        view = store.view
        ids = view.all_ids() if digest is None else view.ids(digest)
        gone = self.remove([Name(view.digest(i), view.name(i)) for i in ids])
        pattern = "*.json" if digest is None else f"{digest.hex()}.json"
        for file in (store.folder / "names").glob(pattern):
            file.unlink(missing_ok=True)
        dropped = store.change(self._drop_empty)
        return Collected(gone, dropped, max(0, before - self._files.measure()))

    def _ready(self) -> Store:
        """The store with its index up to date."""
        self._store.load()
        return self._store

    def _unused_since(self, cutoff: float) -> list[Name]:
        """Chunks last used before ``cutoff`` (unix seconds), all that rests on them included."""
        view = self._store.view
        ids = view.all_ids()
        # Children come before parents: deeper full chunks first, all others before those.
        ids.sort(key=lambda i: (view.name(i)[16:] == FULL_CODE, -view.depth[i]))
        newest = {slot_id: view.used[slot_id] for slot_id in ids}
        for slot_id in ids:
            if (parent := view.parent[slot_id]) != NONE:
                newest[parent] = max(newest[parent], newest[slot_id])
        return [Name(view.digest(i), view.name(i)) for i in ids if newest[i] < cutoff]

    def _drop_empty(self, session: Session) -> int:
        view, room = self._store.view, self._store.room
        busy = {view.segment[slot_id] for slot_id in view.reserved}
        empty = [
            extent
            for number, extent in view.extents.items()
            if number not in busy and not view.chunks_in(extent)
        ]
        for extent in empty:
            room.drop(view, session, extent)
        return len(empty)


def _code(record: Record) -> str:
    return record.code.rstrip(b"\0").decode("ascii", "replace")


def _digest(text: str) -> bytes | None:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == 16 else None


def _about(file: Path) -> dict[str, str]:
    """What an engine has said of its namespace, as far as it makes sense."""
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MAX_ABOUT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
