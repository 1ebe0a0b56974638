"""Bring an index in line with what is on disk: all of it, or what has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvloft.tiers.disk.control import WHOLE, Change
from kvloft.tiers.disk.format import (
    FREE,
    FREE_RECORD,
    FULL_CODE,
    READY,
    RESERVED,
    Record,
    Rows,
    Segment,
    is_sound,
    pack_record,
    sound_rows,
    unpack_header,
)
from kvloft.tiers.disk.places import lies_at
from kvloft.tiers.disk.room import Fault, StaleError
from kvloft.tiers.disk.segments import Files, Slots
from kvloft.tiers.disk.session import Session, Tables
from kvloft.tiers.disk.view import HIDDEN, NONE, View
from kvloft.units import PAGE_BYTES

# --- all of it ------------------------------------------------------------------------------------


def tidy(
    files: Files, session: Session, segments: Sequence[Segment], leftovers: list[str], fault: Fault
) -> None:
    """Remove files that belong to no segment, and cut those that are too long."""
    if leftovers:
        session.begin()
        files.unlink(leftovers)
        if any(name.endswith(".seg") for name in leftovers):
            fault(
                "short",
                f"a file in {files.folder} was shorter than its name says and has been removed; "
                "if no engine has been killed lately, check the file system",
            )
    for segment in segments:
        if files.trim(segment):
            fault("long", f"a file in {files.folder} was longer than its name says; cut")


def whole_tables(
    files: Files, segments: Iterable[Segment], session: Session | None, fault: Fault
) -> Iterator[tuple[Segment, Rows]]:
    """The tables of all segments; with a session, damaged records are mended."""
    for segment in segments:
        rows = files.table(segment)
        if session is not None:
            good = sound_rows(rows, segment)
            if not good.all():
                _mend(files, session, segment, rows, (~good).nonzero()[0].tolist(), fault)
        yield segment, rows


def _mend(
    files: Files, session: Session, segment: Segment, rows: Rows, slots: Iterable[int], fault: Fault
) -> None:
    """Write damaged records anew after what the slots' own pages say."""
    with contextlib.closing(Slots(files)) as reader:
        for slot in slots:
            fault(
                "record",
                f"a record in {segment.table_name} is damaged; it is made anew from the chunk, or "
                "given up. Check the device",
            )
            header = None
            with contextlib.suppress(OSError):
                if reader.read_page(segment, slot) == PAGE_BYTES:
                    header = unpack_header(reader.pages[0])
            record = FREE_RECORD
            if header is not None and lies_at(header, segment, slot):
                made = header.record(header.created)
                record = made if is_sound(made, segment) else FREE_RECORD
            session.write(segment, slot, record)
            rows[slot] = np.frombuffer(pack_record(record, segment.number, slot), np.uint8)


# --- what has changed -----------------------------------------------------------------------------


def apply(view: View, files: Files, changes: Sequence[Change], tables: Tables) -> None:
    """Take up the records that others have changed. Raises :class:`StaleError` if that is not
    enough."""
    if any(slot == WHOLE for _, slot in changes):
        _apply_segments(view, files)
    todo = {view.id_at(number, slot) for number, slot in changes if slot != WHOLE} - {NONE}
    records: dict[int, Record] = {}
    while todo:
        slot_id = todo.pop()
        record = tables.read(*view.place(slot_id))
        if record is None:
            raise StaleError
        if _agrees(view, slot_id, record):
            view.set_used(slot_id, record.used)
        else:
            records[slot_id] = record
            todo |= _forget(view, slot_id) - records.keys()
    for slot_id, record in sorted(
        records.items(), key=lambda item: (item[1].code != FULL_CODE, item[1].depth)
    ):
        if record.state == FREE:
            continue
        parent = view.support(record)
        if record.state == RESERVED:
            view.reserve(slot_id, record, NONE if parent is None else parent)
        elif parent is not None and view.find(record.digest, record.name) == NONE:
            view.publish(slot_id, record, parent)
        # Else it stays free in the view; who takes it for that will find that it is not, and read
        # all anew.


def _apply_segments(view: View, files: Files) -> None:
    found, _ = files.found()
    there = {segment.number: segment for segment in found}
    for number in view.extents.keys() - there.keys():
        extent = view.extents[number]
        for slot_id in range(extent.base, extent.base + extent.segment.slots):
            _forget(view, slot_id)
        view.drop_segment(number)
    for number in sorted(there.keys() - view.extents.keys()):
        view.add_segment(there[number])


def _agrees(view: View, slot_id: int, record: Record) -> bool:
    """Whether the view has what a record says."""
    state = view.state[slot_id]
    if (READY if state == HIDDEN else state) != record.state:
        return False
    if record.state == RESERVED and view.reserved[slot_id] != record.writer:
        return False
    return record.state == FREE or (
        view.name(slot_id) == record.name and view.digest(slot_id) == record.digest
    )


def _forget(view: View, slot_id: int) -> set[int]:
    """Take a slot and what rests on it for free; the ids of those that are something else."""
    forgotten = set()
    for one in reversed(view.subtree(slot_id)):
        if view.state[one] != FREE:
            forgotten.add(one)
            view.release(one)
    return forgotten
