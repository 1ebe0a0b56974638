"""Records, header pages and file names on disk: what is written is read, nothing else is."""

from __future__ import annotations

import mmap
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.tiers.base import Chunk
from kvloft.tiers.disk import control
from kvloft.tiers.disk.format import (
    FREE_RECORD,
    ON_NOTHING,
    ON_PARENT,
    ON_SELF,
    READY,
    RECORD_BYTES,
    RESERVED,
    USED_AT,
    Header,
    Record,
    Segment,
    check_chunk,
    chunk_name,
    good_rows,
    least_segment_bytes,
    pack_header,
    pack_record,
    segment_of,
    segment_slots,
    unpack_header,
    unpack_record,
)
from kvloft.units import PAGE_BYTES


def fixed(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def words(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


RECORDS = st.builds(
    Record,
    state=st.sampled_from([RESERVED, READY]),
    rests=st.sampled_from([ON_NOTHING, ON_PARENT, ON_SELF]),
    depth=words(32),
    writer=words(64),
    digest=fixed(16),
    key=fixed(16),
    code=fixed(4),
    nbytes=words(64),
    parent=fixed(16),
    payload=words(64),
    created=words(32),
    used=words(32),
)
HEADERS = st.builds(
    Header,
    rests=st.sampled_from([ON_NOTHING, ON_PARENT, ON_SELF]),
    writer=words(64),
    digest=fixed(16),
    code=fixed(4),
    depth=words(32),
    parent=fixed(16),
    nbytes=words(64),
    slot_bytes=words(64),
    segment=words(32),
    slot=words(32),
    payload=words(64),
    created=words(32),
    key=st.binary(min_size=16, max_size=64),
)
PLACES = st.tuples(words(32), st.integers(0, 2**20 - 1))
SAMPLE = Record(
    READY, ON_PARENT, 7, 99, b"d" * 16, b"k" * 16, b"f\0\0\0", 1000, b"p" * 16, 12345, 2000, 3000
)


def table(raw: bytes, slots: int, slot: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A table of free slots but for one."""
    rows = np.zeros((slots, RECORD_BYTES), np.uint8)
    rows[slot] = np.frombuffer(raw, np.uint8)
    return rows


# --- records --------------------------------------------------------------------------------------


@settings(max_examples=examples(2))
@given(record=RECORDS, segment=words(32), slot=st.integers(0, 50))
def test_a_record_is_read_as_it_was_written(record: Record, segment: int, slot: int) -> None:
    raw = pack_record(record, segment, slot)
    assert len(raw) == RECORD_BYTES
    assert unpack_record(raw, segment, slot) == record
    assert good_rows(table(raw, 51, slot), segment).all()


@settings(max_examples=examples(2))
@given(record=RECORDS, place=PLACES, other=PLACES)
def test_a_record_is_good_in_its_place_alone(
    record: Record, place: tuple[int, int], other: tuple[int, int]
) -> None:
    assert (unpack_record(pack_record(record, *place), *other) is not None) == (place == other)


def test_a_free_record_is_all_zeros() -> None:
    assert pack_record(FREE_RECORD, 5, 6) == bytes(RECORD_BYTES)
    assert unpack_record(bytes(RECORD_BYTES), 5, 6) == FREE_RECORD


@pytest.mark.parametrize("record", [SAMPLE, SAMPLE._replace(state=RESERVED), FREE_RECORD])
def test_every_flipped_bit_of_a_record_shows(record: Record) -> None:
    raw = pack_record(record, 3, 4)
    for bit in range(USED_AT * 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_record(flipped, 3, 4) is None, bit
        assert good_rows(table(bytes(flipped), 6, 4), 3).tolist() == [True] * 4 + [False, True]


def test_the_time_of_last_use_may_be_overwritten() -> None:
    raw = bytearray(pack_record(SAMPLE, 3, 4))
    raw[USED_AT : USED_AT + 4] = (4000).to_bytes(4, "little")
    assert unpack_record(raw, 3, 4) == SAMPLE._replace(used=4000)


@settings(max_examples=examples(4))
@given(raw=fixed(RECORD_BYTES) | RECORDS.map(lambda r: pack_record(r, 0, 1)), slot=words(5))
def test_one_record_and_a_table_are_judged_alike(raw: bytes, slot: int) -> None:
    good = unpack_record(raw, 0, slot) is not None
    assert good_rows(table(raw, 32, slot), 0)[slot] == good


@given(raw=st.binary(max_size=3 * RECORD_BYTES))
def test_no_bytes_make_a_record_raise(raw: bytes) -> None:
    unpack_record(raw, 1, 2)


# --- header pages ---------------------------------------------------------------------------------


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


@settings(max_examples=examples(2))
@given(first=HEADERS, second=HEADERS)
def test_a_header_is_read_as_it_was_written_also_over_another(
    first: Header, second: Header
) -> None:
    memory, fresh = page(), page()
    pack_header(memory, first)
    pack_header(memory, second)
    assert unpack_header(memory) == second
    pack_header(fresh, second)
    assert bytes(memory) == bytes(fresh)


def test_every_flipped_bit_of_a_header_shows() -> None:
    memory = page()
    header = Header(1, 9, b"d" * 16, b"w0\0\0", 3, b"p" * 16, 5000, 8192, 1, 2, 77, 88, b"k" * 64)
    pack_header(memory, header)
    for bit in range(PAGE_BYTES * 8):
        memory[bit // 8] ^= 1 << bit % 8
        assert unpack_header(memory) is None, bit
        memory[bit // 8] ^= 1 << bit % 8
    assert unpack_header(memory) == header


@given(raw=st.binary(max_size=300) | fixed(PAGE_BYTES))
def test_no_bytes_make_a_header_raise(raw: bytes) -> None:
    assert unpack_header(raw) is None


# --- names and sizes ------------------------------------------------------------------------------


@given(
    segment=st.builds(
        Segment,
        number=words(32),
        stride=st.integers(2, 1 << 20).map(lambda pages: pages * PAGE_BYTES),
        slots=st.integers(1, 1 << 20),
    )
)
def test_a_segment_is_known_by_its_files(segment: Segment) -> None:
    assert segment_of(segment.data_name) == segment_of(segment.table_name) == segment


@pytest.mark.parametrize(
    "name",
    ["", "control", "000001-8192-1", "000001-8192-1.seg.tmp", "1-8192-1.seg", "0000001-8192-1.seg",
     "000001-08192-1.seg", "000001-8192-0.seg", "000001-8191-1.seg", "000001-4096-1.seg",
     "000001-8192-1048577.seg", "99999999999-8192-1.seg", "4294967296-8192-1.seg",
     "٠٠٠٠٠١-8192-1.seg", "000001-8192--1.seg"],
)  # fmt: skip
def test_other_names_are_no_segments(name: str) -> None:
    assert segment_of(name) is None


@given(room=st.integers(0, 1 << 32), pages=st.integers(2, 5000))
def test_a_segment_fills_its_room(room: int, pages: int) -> None:
    stride = pages * PAGE_BYTES
    slots = segment_slots(room, stride)
    if slots:
        assert Segment(0, stride, slots).total_bytes <= room
    assert Segment(0, stride, slots + 1).total_bytes > room
    assert Segment(0, stride, 1).total_bytes == least_segment_bytes(stride - PAGE_BYTES)


@pytest.mark.parametrize(
    "change",
    [{"key": b"k" * 15}, {"key": b"k" * 65}, {"parent": b"p"}, {"code": ""}, {"code": "W1234"},
     {"code": "é"}, {"depth": 0}, {"depth": 1 << 32}, {"nbytes": 0}, {"nbytes": 1 << 41}],
)  # fmt: skip
def test_what_the_format_can_not_hold_is_known(change: dict[str, object]) -> None:
    chunk = Chunk(b"k" * 32, "w12", b"p" * 32, 5, 100)
    assert check_chunk(chunk)
    assert check_chunk(chunk._replace(parent=b""))
    assert not check_chunk(chunk._replace(**change))  # type: ignore[arg-type]
    assert chunk_name(chunk.key, chunk.code) == b"k" * 16 + b"w12\0"


# --- the control file -----------------------------------------------------------------------------


def test_a_damaged_control_file_is_known(tmp_path: object) -> None:
    path = f"{tmp_path}/control"
    with control.locked(path, 1.0) as fd:
        assert control.read_position(fd) is None
        position = control.start_epoch(fd, 5)
        assert position.dirty
        assert control.read_position(fd) == position
        control.write_position(fd, position)
    with open(path, "r+b") as file:  # noqa: PTH123
        raw = file.read(56)
        for bit in range(len(raw) * 8):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            file.seek(0)
            file.write(flipped)
            file.flush()
            found = control.read_position(file.fileno())
            assert found is None or bit >= 48 * 8
        file.truncate(control.CONTROL_BYTES - 1)
        assert control.read_position(file.fileno()) is None


@settings(max_examples=examples(0.5))
@given(batches=st.lists(st.integers(0, control.RING + 5), min_size=1, max_size=6), back=words(13))
def test_the_ring_remembers_the_last_changes(batches: list[int], back: int) -> None:
    with tempfile.TemporaryFile() as file:
        fd = file.fileno()
        control.start_epoch(fd, 0)
        all_changes: list[tuple[int, int]] = []
        for count in batches:
            new = [(len(all_changes) + i, i) for i in range(count)]
            control.write_changes(fd, len(all_changes), new)
            all_changes += new
        until = len(all_changes)
        since = max(0, until - back)
        expected = all_changes[since:] if until - since <= control.RING else None
        assert control.read_changes(fd, since, until) == expected


def test_the_lock_is_waited_for_and_no_longer_than_that(tmp_path: object) -> None:
    path = f"{tmp_path}/control"
    with (
        control.locked(path, 1.0),
        pytest.raises(control.LockedError),
        control.locked(path, 0.05),
    ):
        pass
    with control.locked(path, 0.0):
        pass
