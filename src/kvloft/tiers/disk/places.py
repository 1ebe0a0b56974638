"""Where chunks lie, and whether what has been read there is the chunk that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from kvloft.tiers.base import Chunk
from kvloft.tiers.disk.format import Header, Segment, chunk_name, unpack_header
from kvloft.tiers.disk.segments import RUN_BYTES, RUN_SLOTS


class Place(NamedTuple):
    """Where a chunk lies."""

    segment: Segment
    slot: int


def runs(places: Sequence[Place]) -> Iterator[list[int]]:
    """The indices of places that lie side by side, in the order in which they lie."""
    order = sorted(range(len(places)), key=lambda i: (places[i].segment.number, places[i].slot))
    run: list[int] = []
    for i in order:
        segment, slot = places[i]
        if run and (
            (segment, slot - 1) != places[run[-1]]
            or len(run) == RUN_SLOTS
            or len(run) * segment.stride >= RUN_BYTES
        ):
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def lies_at(header: Header, segment: Segment, slot: int) -> bool:
    """Whether a header belongs to this slot."""
    return (header.segment, header.slot, header.slot_bytes) == (
        segment.number, slot, segment.slot_bytes,
    ) and header.nbytes <= segment.slot_bytes  # fmt: skip


def flaw(
    digest: bytes, chunk: Chunk, place: Place, page: memoryview, data: memoryview, got: int,
    *, verify: bool,
) -> str | None:  # fmt: skip
    """Why what has been read is not the chunk; ``None`` if it is. ``verify``: whether to compute
    the checksum of its bytes, or to take the header's word for them."""
    if got < place.segment.stride:
        return "short"
    if (header := unpack_header(page)) is None:
        return "header"
    code = chunk_name(chunk.key, chunk.code)[16:]
    if not lies_at(header, *place) or (header.digest, header.key, header.code) != (
        digest, chunk.key, code,
    ):  # fmt: skip
        return "foreign"
    if header.nbytes != chunk.nbytes:
        return "short" if header.nbytes < chunk.nbytes else "long"
    if verify and header.payload != xxhash.xxh3_64_intdigest(data):
        return "checksum"
    return None
