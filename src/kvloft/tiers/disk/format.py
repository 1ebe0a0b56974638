"""What is on disk, byte for byte: a table's records and the page at the head of every chunk.

Both say the same, for different readers. Records are small and lie side by side, so that a million
of them are read and checked in well under a second; the header page travels with the chunk in the
same write, so what a get has in its hands tells by itself whether it is all of the right thing.
Everything is little-endian.

A record is 128 bytes: 14 words, a checksum over them and over the record's own place, and, outside
the checksum, when the chunk was last used (unix seconds). That is a hint which anybody may
overwrite without a lock. A free record is all zeros but for that. The checksum is a chain of one
multiplication a word: any change of one word changes it for certain, any other change with a
chance of 1 - 2**-64 or so, and numpy computes it for a whole table at once, as it could not xxh3.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvloft.tiers.base import Chunk
from kvloft.units import PAGE_BYTES, ceil_div, page_aligned

Rows = npt.NDArray[np.uint8]
"""Records, ``(count, RECORD_BYTES)``."""
Buffer = bytes | bytearray | memoryview

VERSION = 1
RECORD_BYTES = 128
USED_AT = 120
"""Where in a record the time of last use lies."""
NAME_AT = 32
NAME_BYTES = 20
"""Of a chunk's name in its namespace: 16 bytes of the key, and the code filled up with zeros."""
FREE, RESERVED, READY = 0, 1, 2
"""States of a slot."""
ON_NOTHING, ON_PARENT, ON_SELF = 0, 1, 2
"""What a chunk rests on, and goes with: the full chunk of its parent, or that of its own key."""
FULL_CODE = b"f\0\0\0"
KEY_BYTES = 64
MAX_SLOTS = 1 << 20
_MAX_STRIDE = 1 << 40

_WORDS = 14
_RECORD = struct.Struct("<BBHIQ16s16s4sIQ16sQII16x")
_RAW_WORDS = struct.Struct("<14Q")
_TAIL = struct.Struct("<QI4x")
_EMPTY = bytes(USED_AT)
_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_PRIME = 0xD6E8FEB86659FD93


class Record(NamedTuple):
    """One slot's entry in its segment's table. See :class:`kvloft.tiers.base.Chunk`."""

    state: int
    rests: int
    depth: int
    writer: int
    """Who has reserved the slot, or has written what is in it; never 0."""
    digest: bytes
    key: bytes
    """16 bytes."""
    code: bytes
    """4 bytes, filled up with zeros."""
    nbytes: int
    parent: bytes
    """16 bytes, zeros at the first boundary."""
    payload: int
    """xxh3-64 of the whole slot's bytes; 0 while it is reserved."""
    created: int
    """Unix seconds."""
    used: int
    """Unix seconds; 1 for what is worth less than all others."""

    @property
    def name(self) -> bytes:
        """What tells the chunk apart in its namespace."""
        return self.key + self.code

    @property
    def support(self) -> bytes | None:
        """The name of the chunk that this one rests on."""
        if self.rests == ON_NOTHING:
            return None
        return (self.parent if self.rests == ON_PARENT else self.key) + FULL_CODE


FREE_RECORD = Record(FREE, 0, 0, 0, bytes(16), bytes(16), bytes(4), 0, bytes(16), 0, 0, 0)


def chunk_name(key: bytes, code: str) -> bytes:
    """The name of a chunk within its namespace."""
    return key[:16] + code.encode().ljust(4, b"\0")


def check_chunk(chunk: Chunk) -> bool:
    """Whether the format can hold this chunk's name and size."""
    return (
        16 <= len(chunk.key) <= KEY_BYTES
        and (not chunk.parent or 16 <= len(chunk.parent) <= KEY_BYTES)
        and 1 <= len(chunk.code) <= 4
        and chunk.code.isascii()
        and 0 < chunk.depth < 1 << 32
        and 0 < chunk.nbytes < _MAX_STRIDE
    )


def reservation(chunk: Chunk, digest: bytes, writer: int, *, has_full: bool, now: int) -> Record:
    """The record of a chunk that ``writer`` is about to put; ``now`` in unix seconds."""
    name = chunk_name(chunk.key, chunk.code)
    rests = ON_NOTHING
    if has_full:
        if name[16:] != FULL_CODE:
            rests = ON_SELF
        elif chunk.parent:
            rests = ON_PARENT
    return Record(
        RESERVED, rests, chunk.depth, writer, digest, name[:16], name[16:], chunk.nbytes,
        chunk.parent[:16].ljust(16, b"\0"), 0, now, now,
    )  # fmt: skip


def _place_word(segment: int, slot: int) -> int:
    return (segment << 32 | slot) ^ _SEED


def pack_record(record: Record, segment: int, slot: int) -> bytes:
    """The 128 bytes of a record in its place."""
    if record.state == FREE:
        return bytes(RECORD_BYTES)
    r = record
    raw = _RECORD.pack(
        r.state, r.rests, 0, r.depth, r.writer, r.digest, r.key, r.code, 0, r.nbytes, r.parent,
        r.payload, r.created, 0,
    )  # fmt: skip
    check = _place_word(segment, slot)
    for word in _RAW_WORDS.unpack(raw):
        check = (check ^ word) * _PRIME & _MASK
        check ^= check >> 29
    return raw + _TAIL.pack(check, r.used)


def unpack_record(raw: Buffer, segment: int, slot: int) -> Record | None:
    """The record in these 128 bytes; ``None`` if they are none of this place."""
    if len(raw) != RECORD_BYTES:
        return None
    head = bytes(raw[:USED_AT])
    if head == _EMPTY:
        return FREE_RECORD
    check = _place_word(segment, slot)
    for word in _RAW_WORDS.unpack_from(head):
        check = (check ^ word) * _PRIME & _MASK
        check ^= check >> 29
    stored, used = _TAIL.unpack_from(raw, _WORDS * 8)
    if stored != check:
        return None
    state, rests, _, depth, writer, digest, key, code, _, nbytes, parent, payload, created, _ = (
        _RECORD.unpack_from(head)
    )
    if state not in (RESERVED, READY) or rests > ON_SELF:
        return None
    return Record(
        state, rests, depth, writer, digest, key, code, nbytes, parent, payload, created, used
    )


COLUMNS = np.dtype(
    {
        "names": ["state", "rests", "depth", "writer", "code", "nbytes", "used"],
        "formats": ["u1", "u1", "<u4", "<u8", "<u4", "<u8", "<u4"],
        "offsets": [0, 1, 4, 8, 48, 56, USED_AT],
        "itemsize": RECORD_BYTES,
    }
)
"""The columns of a table that are looked at many at a time."""
RESTS_AT, DIGEST_AT, PARENT_AT = 1, 16, 64


def good_rows(rows: Rows, segment: int) -> npt.NDArray[np.bool_]:
    """Which records of a whole table, slot 0 first, :func:`unpack_record` would accept."""
    words = rows.view("<u8")
    check = np.arange(len(rows), dtype=np.uint64)
    check |= np.uint64(segment << 32)
    check ^= np.uint64(_SEED)
    prime, shift = np.uint64(_PRIME), np.uint64(29)
    for at in range(_WORDS):
        check ^= words[:, at]
        check *= prime
        check ^= check >> shift
    state, rests = rows[:, 0], rows[:, RESTS_AT]
    good = (check == words[:, _WORDS]) & (rests <= ON_SELF)
    good &= (state == RESERVED) | (state == READY)
    good |= ~words[:, : _WORDS + 1].any(axis=1)
    return np.asarray(good, dtype=np.bool_)


def sound_rows(rows: Rows, segment: Segment) -> npt.NDArray[np.bool_]:
    """Which records of a whole table are good, and :func:`is_sound`."""
    columns = rows.view(COLUMNS).reshape(len(rows))
    full = columns["code"] == int.from_bytes(FULL_CODE, "little")
    good = good_rows(rows, segment.number) & (columns["nbytes"] <= segment.slot_bytes)
    return np.asarray(good & ~(full & (columns["rests"] == ON_SELF)), dtype=np.bool_)


def is_sound(record: Record, segment: Segment) -> bool:
    """Whether what a record says can be: checksums don't keep anybody from making it up.

    A chunk fits its slot, and none rests on itself, which would be without end.
    """
    fits = record.nbytes <= segment.slot_bytes
    return fits and not (record.rests == ON_SELF and record.code == FULL_CODE)


# --- the header page ------------------------------------------------------------------------------

_MAGIC = b"KVLOFTCH"
_HEADER = struct.Struct("<8sIIQ16s4sI16sQQIIQQB64s")
_PAGE_CHECK_AT = PAGE_BYTES - 8
_PAGE_CHECK = struct.Struct("<Q")


class Header(NamedTuple):
    """What the page before a chunk's bytes says of them."""

    rests: int
    writer: int
    digest: bytes
    code: bytes
    """4 bytes, filled up with zeros."""
    depth: int
    parent: bytes
    """16 bytes, zeros at the first boundary."""
    nbytes: int
    slot_bytes: int
    segment: int
    slot: int
    payload: int
    """xxh3-64 of all ``slot_bytes``."""
    created: int
    """Unix seconds."""
    key: bytes
    """All of it, up to 64 bytes."""

    def record(self, used: int) -> Record:
        """The record of a chunk that is ready, as its table should have it."""
        return Record(
            READY, self.rests, self.depth, self.writer, self.digest, self.key[:16], self.code,
            self.nbytes, self.parent, self.payload, self.created, used,
        )  # fmt: skip


def pack_header(page: memoryview, header: Header) -> None:
    """Write ``header`` into ``page``, whose 4,096 bytes were zeros or another header before."""
    h = header
    _HEADER.pack_into(
        page, 0, _MAGIC, VERSION, h.rests, h.writer, h.digest, h.code, h.depth, h.parent, h.nbytes,
        h.slot_bytes, h.segment, h.slot, h.payload, h.created, len(h.key), h.key,
    )  # fmt: skip
    _PAGE_CHECK.pack_into(page, _PAGE_CHECK_AT, xxhash.xxh3_64_intdigest(page[:_PAGE_CHECK_AT]))


def unpack_header(page: Buffer) -> Header | None:
    """The header in ``page``; ``None`` if there is no whole one of this version."""
    if len(page) != PAGE_BYTES:
        return None
    page = memoryview(page)
    (check,) = _PAGE_CHECK.unpack_from(page, _PAGE_CHECK_AT)
    if check != xxhash.xxh3_64_intdigest(page[:_PAGE_CHECK_AT]):
        return None
    (
        magic, version, rests, writer, digest, code, depth, parent, nbytes, slot_bytes, segment,
        slot, payload, created, length, key,
    ) = _HEADER.unpack_from(page)  # fmt: skip
    if magic != _MAGIC or version != VERSION or rests > ON_SELF or length > KEY_BYTES:
        return None
    return Header(
        rests, writer, digest, code, depth, parent, nbytes, slot_bytes, segment, slot, payload,
        created, key[:length],
    )  # fmt: skip


# --- segments -------------------------------------------------------------------------------------

_NAME = re.compile(r"(\d{6,10})-(\d{1,13})-(\d{1,7})\.(seg|tab)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of equal slots, and the file of their records beside it."""

    number: int
    stride: int
    """Bytes of a slot with the header page before it."""
    slots: int

    @property
    def slot_bytes(self) -> int:
        return self.stride - PAGE_BYTES

    @property
    def data_bytes(self) -> int:
        return self.stride * self.slots

    @property
    def table_bytes(self) -> int:
        return page_aligned(self.slots * RECORD_BYTES)

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + self.table_bytes

    @property
    def data_name(self) -> str:
        return f"{self.number:06d}-{self.stride}-{self.slots}.seg"

    @property
    def table_name(self) -> str:
        return f"{self.number:06d}-{self.stride}-{self.slots}.tab"


def segment_of(file_name: str) -> Segment | None:
    """The segment that a file of this name, of data or a table, belongs to."""
    if not (match := _NAME.fullmatch(file_name)):
        return None
    segment = Segment(int(match[1]), int(match[2]), int(match[3]))
    if (
        file_name not in (segment.data_name, segment.table_name)
        or segment.number >= 1 << 32
        or not 2 * PAGE_BYTES <= segment.stride <= _MAX_STRIDE
        or segment.stride % PAGE_BYTES
        or not 1 <= segment.slots <= MAX_SLOTS
    ):
        return None
    return segment


def segment_slots(room: int, stride: int) -> int:
    """How many slots a segment of at most ``room`` bytes, table included, has."""
    slots = min(MAX_SLOTS, room // (stride + RECORD_BYTES))
    while slots and slots * stride + page_aligned(slots * RECORD_BYTES) > room:
        slots -= 1
    return max(0, slots)


def least_segment_bytes(slot_bytes: int) -> int:
    """What the smallest segment for slots of ``slot_bytes`` takes."""
    return (ceil_div(slot_bytes, PAGE_BYTES) + 2) * PAGE_BYTES
