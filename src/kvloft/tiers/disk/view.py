"""The index: what one process knows of the whole store, all namespaces included.

Every slot of every segment has a number in one range (*id*), and everything about it lies in flat
arrays under that number, so a million chunks are a few dozen objects for the garbage collector
and not millions. Names are keys of plain dictionaries, many small ones, so that none takes long to
grow.

A chunk that rests on another (:data:`kvloft.tiers.disk.format.ON_PARENT`) is linked below it:
parent, first child, next and previous sibling. What has children can't be evicted alone. Slots
that are reserved are linked too as soon as what they will rest on is there, which keeps it.

Eviction order is one :class:`kvloft.catalog.policies.lru.LRU` for each size of slot. See there for
why entries with dependants may be dropped from it, and when they come back.

Only :meth:`View.find`, ``count`` and ``ids`` may be called without the store's mutex.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.catalog.policies.lru import LRU
from kvloft.tiers.base import CLASSES
from kvloft.tiers.disk.format import (
    COLUMNS,
    DIGEST_AT,
    FREE,
    FULL_CODE,
    NAME_AT,
    NAME_BYTES,
    ON_PARENT,
    PARENT_AT,
    READY,
    RECORD_BYTES,
    RESERVED,
    RESTS_AT,
    Record,
    Rows,
    Segment,
    sound_rows,
)

NONE = -1
HIDDEN = 3
"""The state of a chunk that is ready on disk, but damaged; known to this process alone."""
_SHARDS = 256
_NO_NAMES: dict[bytes, int] = {}
"""In place of all shards that have no names, of which a namespace of few chunks has many. Stays
empty."""


class Extent:
    """A segment, and where its slots are in the view."""

    __slots__ = ("base", "hot", "ready", "segment")

    def __init__(self, segment: Segment, base: int) -> None:
        self.segment = segment
        self.base = base
        self.ready = 0
        self.hot = 0
        """No chunk in it has been used later than this (unix seconds), as far as is known."""


class View:
    """See the module. Times are unix seconds."""

    def __init__(self) -> None:
        self.extents: dict[int, Extent] = {}
        """By segment number."""
        self.reserved: dict[int, int] = {}
        """Writer, by id."""
        self.lru: dict[int, LRU] = {}
        """By stride."""
        self.state = bytearray()
        self.names = bytearray()
        self.parents = bytearray()
        """Keys of the boundaries before."""
        self.segment = array("I")
        self.space = array("I")
        """Index of the namespace."""
        self.depth = array("I")
        self.nbytes = array("Q")
        self.used = array("I")
        """Time of last use that the disk has, as far as is known."""
        self.parent = array("i")
        self.child = array("i")
        self.next = array("i")
        self.prev = array("i")
        self.total_bytes = 0
        """Of all segments."""
        self._free: dict[int, list[int]] = {}
        """Stacks of free ids by stride; some may be stale."""
        self._ranges: dict[int, list[int]] = {}
        """Bases of ranges that are not in use, by length."""
        self._digests: list[bytes] = []
        self._index: dict[bytes, int] = {}
        self._shards: list[list[dict[bytes, int]]] = []
        """By namespace and first byte of the name."""
        self._held: list[dict[str, list[int]]] = []
        """By namespace and class: chunks and their exact bytes."""

    # ---------------------------------------------------------------- names

    def space_of(self, digest: bytes) -> int:
        """The index of a namespace, which is added if it is new."""
        index = self._index.get(digest)
        if index is None:
            index = len(self._digests)
            self._digests.append(digest)
            self._shards.append([_NO_NAMES] * _SHARDS)
            self._held.append({name: [0, 0] for name in CLASSES.values()})
            self._index[digest] = index
        return index

    def digest(self, slot_id: int) -> bytes:
        """The namespace of a chunk."""
        return self._digests[self.space[slot_id]]

    def count(self, digest: bytes) -> int:
        """How many chunks of a namespace are ready."""
        return sum(chunks for chunks, _ in self.held(digest).values())

    def held(self, digest: bytes) -> dict[str, tuple[int, int]]:
        """By class, a namespace's chunks that are ready, and their exact bytes."""
        index = self._index.get(digest)
        classes = self._held[index] if index is not None else {}
        return {name: (chunks, nbytes) for name, (chunks, nbytes) in classes.items()}

    def _count(self, slot_id: int, name: bytes, change: int) -> None:
        held = self._held[self.space[slot_id]][CLASSES.get(chr(name[16]), "window")]
        held[0] += change
        held[1] += change * self.nbytes[slot_id]

    def ids(self, digest: bytes) -> list[int]:
        """The ids of a namespace's chunks."""
        index = self._index.get(digest)
        shards = [] if index is None else self._shards[index]
        return [slot_id for shard in shards for slot_id in list(shard.values())]

    def all_ids(self) -> list[int]:
        """The ids of all chunks."""
        return [slot_id for digest in list(self._index) for slot_id in self.ids(digest)]

    def find(self, digest: bytes, name: bytes) -> int:
        """The id of a chunk that is ready, or ``NONE``."""
        index = self._index.get(digest)
        return NONE if index is None else self._shards[index][name[0]].get(name, NONE)

    def _shard(self, space: int, name: bytes) -> dict[bytes, int]:
        """Where a name is to be added."""
        shard = self._shards[space][name[0]]
        if shard is _NO_NAMES:
            shard = self._shards[space][name[0]] = {}
        return shard

    def name(self, slot_id: int) -> bytes:
        """The name of a chunk that is reserved or ready."""
        return bytes(self.names[slot_id * NAME_BYTES : (slot_id + 1) * NAME_BYTES])

    # ---------------------------------------------------------------- places

    def extent(self, slot_id: int) -> Extent:
        """The segment that an id lies in."""
        return self.extents[self.segment[slot_id]]

    def place(self, slot_id: int) -> tuple[Segment, int]:
        """The segment and slot of an id."""
        extent = self.extents[self.segment[slot_id]]
        return extent.segment, slot_id - extent.base

    def id_at(self, segment: int, slot: int) -> int:
        """The id of a place, ``NONE`` if there is no such segment or slot."""
        extent = self.extents.get(segment)
        if extent is None or slot >= extent.segment.slots:
            return NONE
        return extent.base + slot

    def strides(self) -> set[int]:
        """The strides that segments have."""
        return {extent.segment.stride for extent in self.extents.values()}

    def add_segment(self, segment: Segment, *, free: bool = True) -> Extent:
        """Take up a segment; ``free``: all its slots are."""
        n = segment.slots
        if bases := self._ranges.get(n):
            base = bases.pop()
        else:
            base = len(self.state)
            self.state.extend(bytes(n))
            self.names.extend(bytes(n * NAME_BYTES))
            self.parents.extend(bytes(n * 16))
            for column in (self.segment, self.space, self.depth, self.nbytes, self.used):
                column.frombytes(bytes(n * column.itemsize))
            for column in (self.parent, self.child, self.next, self.prev):
                column.frombytes(b"\xff" * (n * column.itemsize))
        extent = self.extents[segment.number] = Extent(segment, base)
        self._column(self.segment, base, n)[:] = segment.number
        self.lru.setdefault(segment.stride, LRU())
        # The lowest is taken first, so that reading and writing go forward.
        lowest_last = range(base + n - 1, base - 1, -1) if free else ()
        self._free.setdefault(segment.stride, []).extend(lowest_last)
        self.total_bytes += segment.total_bytes
        return extent

    def drop_segment(self, number: int) -> None:
        """Forget a segment, whose slots must all be free."""
        extent = self.extents.pop(number)
        self.total_bytes -= extent.segment.total_bytes
        self._ranges.setdefault(extent.segment.slots, []).append(extent.base)
        gone = range(extent.base, extent.base + extent.segment.slots)
        free = self._free[extent.segment.stride]
        self._free[extent.segment.stride] = [slot_id for slot_id in free if slot_id not in gone]

    def take_free(self, stride: int) -> int:
        """A free id of this stride, which is no longer listed as free; ``NONE`` if none is left."""
        free = self._free.get(stride)
        while free:
            slot_id = free.pop()
            if self.state[slot_id] == FREE:
                return slot_id
        return NONE

    def list_free(self, slot_id: int) -> None:
        """Give back an id that :meth:`take_free` has given out."""
        self._free[self.extent(slot_id).segment.stride].append(slot_id)

    def chunks_in(self, extent: Extent) -> list[int]:
        """The ids of a segment's chunks, hidden ones included."""
        part = self.state[extent.base : extent.base + extent.segment.slots]
        return [
            slot_id for slot_id, state in enumerate(part, extent.base) if state in (READY, HIDDEN)
        ]

    # ---------------------------------------------------------------- changes of one slot

    def reserve(self, slot_id: int, record: Record, parent: int) -> None:
        """A free slot is reserved for a chunk that rests on ``parent`` (or ``NONE``)."""
        self._fill(slot_id, record)
        self.state[slot_id] = RESERVED
        self.reserved[slot_id] = record.writer
        if parent != NONE:
            self._link(slot_id, parent)

    def publish(self, slot_id: int, record: Record, parent: int) -> None:
        """A chunk is there, in a slot that was free or reserved; its name must be new."""
        if self.state[slot_id] == RESERVED:
            del self.reserved[slot_id]
            self._unlink(slot_id)
        self._fill(slot_id, record)
        self.state[slot_id] = READY
        if parent != NONE:
            self._link(slot_id, parent)
        space = self.space[slot_id]
        name = record.name
        self._count(slot_id, name, 1)
        extent = self.extent(slot_id)
        extent.ready += 1
        extent.hot = max(extent.hot, record.used)
        self.lru[extent.segment.stride].insert(slot_id)
        self._shard(space, name)[name] = slot_id

    def release(self, slot_id: int) -> None:
        """A slot is free that was anything else; it must have no children."""
        if self.state[slot_id] == READY:
            self._withdraw(slot_id)
        elif self.state[slot_id] == RESERVED:
            del self.reserved[slot_id]
        self.state[slot_id] = FREE
        self._free[self.extent(slot_id).segment.stride].append(slot_id)
        self._unlink(slot_id)

    def _withdraw(self, slot_id: int) -> None:
        space, name, extent = self.space[slot_id], self.name(slot_id), self.extent(slot_id)
        shard = self._shards[space][name[0]]
        if shard.get(name) == slot_id:
            del shard[name]
        self._count(slot_id, name, -1)
        extent.ready -= 1
        self.lru[extent.segment.stride].remove(slot_id)

    def hide(self, slot_id: int) -> None:
        """A chunk is no longer to be found, nor to be evicted, until :meth:`release`."""
        self._withdraw(slot_id)
        self.state[slot_id] = HIDDEN

    def touch(self, slot_id: int) -> None:
        """A chunk was used just now."""
        self.lru[self.extent(slot_id).segment.stride].touch(slot_id)

    def set_used(self, slot_id: int, used: int) -> None:
        """What the disk has as a chunk's last use."""
        self.used[slot_id] = used
        extent = self.extent(slot_id)
        extent.hot = max(extent.hot, used)

    def demote(self, slot_id: int) -> None:
        """A chunk is to go first."""
        self.used[slot_id] = 1
        self.lru[self.extent(slot_id).segment.stride].demote(slot_id)

    def _fill(self, slot_id: int, record: Record) -> None:
        at = slot_id * NAME_BYTES
        self.names[at : at + NAME_BYTES] = record.name
        self.parents[slot_id * 16 : slot_id * 16 + 16] = record.parent
        self.space[slot_id] = self.space_of(record.digest)
        self.depth[slot_id] = record.depth
        self.nbytes[slot_id] = record.nbytes
        self.used[slot_id] = record.used

    # ---------------------------------------------------------------- the tree

    def support(self, record: Record) -> int | None:
        """The id of what a chunk rests on, ``NONE`` if on nothing; ``None`` if it is not there."""
        name = record.support
        if name is None:
            return NONE
        slot_id = self.find(record.digest, name)
        if slot_id == NONE or not self._may_rest(record.rests, record.depth, slot_id):
            return None
        return slot_id

    def _may_rest(self, rests: int, depth: int, parent: int) -> bool:
        # Else damaged records could rest on each other in a ring, which nothing would ever remove.
        return rests != ON_PARENT or self.depth[parent] < depth

    def parent_key(self, slot_id: int) -> bytes:
        """The 16 bytes that a chunk has for its parent's key; none at the first boundary."""
        key = bytes(self.parents[slot_id * 16 : slot_id * 16 + 16])
        return key if any(key) else b""

    def children(self, slot_id: int) -> Iterator[int]:
        """What rests on a chunk directly, reserved slots included."""
        at = self.child[slot_id]
        while at != NONE:
            following = self.next[at]
            yield at
            at = following

    def subtree(self, slot_id: int) -> list[int]:
        """A chunk and all that rests on it, each after what it rests on."""
        found = [slot_id]
        for one in found:
            found.extend(self.children(one))
        return found

    def _link(self, slot_id: int, parent: int) -> None:
        self.parent[slot_id] = parent
        first = self.next[slot_id] = self.child[parent]
        if first != NONE:
            self.prev[first] = slot_id
        self.child[parent] = slot_id

    def _unlink(self, slot_id: int) -> None:
        parent = self.parent[slot_id]
        if parent == NONE:
            return
        before, after = self.prev[slot_id], self.next[slot_id]
        if before != NONE:
            self.next[before] = after
        else:
            self.child[parent] = after
        if after != NONE:
            self.prev[after] = before
        self.parent[slot_id] = self.prev[slot_id] = self.next[slot_id] = NONE
        if self.child[parent] == NONE:
            lru = self.lru[self.extent(parent).segment.stride]
            if parent not in lru:
                lru.demote(parent)

    def detach(self, slot_id: int) -> None:
        """A reserved slot no longer rests on anything here."""
        self._unlink(slot_id)

    # ---------------------------------------------------------------- all at once

    def load(self, tables: Iterable[tuple[Segment, Rows]]) -> list[int]:
        """Take up whole segments into an empty view; records that are bad count as free.

        Returns the ids of chunks that must go, each after what it rests on: what they rest on is
        missing, or their name is there twice. They are free in the view.
        """
        lost: list[int] = []
        resting: list[tuple[int, int, bytes]] = []
        for segment, rows in tables:
            extent = self.add_segment(segment, free=False)
            self._load_rows(extent, rows)
            self._load_names(extent, rows, lost, resting)
        for slot_id, rests, name in resting:
            parent = self._shards[self.space[slot_id]][name[0]].get(name, NONE)
            if parent == NONE or not self._may_rest(rests, self.depth[slot_id], parent):
                lost.append(slot_id)
            else:
                self._link(slot_id, parent)
        gone = [one for slot_id in lost for one in self.subtree(slot_id)]
        for slot_id in reversed(gone):
            self.release(slot_id)
        self._order()
        return gone

    def _load_rows(self, extent: Extent, rows: Rows) -> None:
        base, n = extent.base, len(rows)
        columns = rows.view(COLUMNS).reshape(n)
        good = sound_rows(rows, extent.segment)
        state = np.where(good, columns["state"], FREE).astype(np.uint8)
        self._column(self.state, base, n)[:] = state
        self._column(self.depth, base, n)[:] = columns["depth"]
        self._column(self.nbytes, base, n)[:] = columns["nbytes"]
        self._column(self.used, base, n)[:] = columns["used"]
        names = rows[:, NAME_AT : NAME_AT + NAME_BYTES]
        self._column(self.names, base * NAME_BYTES, n * NAME_BYTES)[:] = names.ravel()
        parents = rows[:, PARENT_AT : PARENT_AT + 16]
        self._column(self.parents, base * 16, n * 16)[:] = parents.ravel()
        for slot in np.flatnonzero(state == RESERVED).tolist():
            self.reserved[base + slot] = int(columns["writer"][slot])
        free = base + np.flatnonzero(state == FREE)[::-1]
        self._free[extent.segment.stride].extend(free.tolist())

    def _load_names(
        self, extent: Extent, rows: Rows, lost: list[int], resting: list[tuple[int, int, bytes]]
    ) -> None:
        base = extent.base
        raw = rows.tobytes()
        digest, space = b"", 0
        for slot, state in enumerate(self.state[base : base + len(rows)]):
            if state == FREE:
                continue
            slot_id, at = base + slot, slot * RECORD_BYTES
            if raw[at + DIGEST_AT : at + DIGEST_AT + 16] != digest:
                digest = raw[at + DIGEST_AT : at + DIGEST_AT + 16]
                space = self.space_of(digest)
            self.space[slot_id] = space
            if state == RESERVED:
                continue
            name = raw[at + NAME_AT : at + NAME_AT + NAME_BYTES]
            extent.ready += 1
            self._count(slot_id, name, 1)
            if self._shard(space, name).setdefault(name, slot_id) != slot_id:
                lost.append(slot_id)
            elif rests := raw[at + RESTS_AT]:
                key = raw[at + PARENT_AT : at + PARENT_AT + 16] if rests == ON_PARENT else name[:16]
                resting.append((slot_id, rests, key + FULL_CODE))

    def _order(self) -> None:
        """Bring all chunks into the order of eviction, deeper ones first among equals."""
        state = np.frombuffer(self.state, np.uint8)
        used = np.frombuffer(self.used, np.uint32)
        depth = np.frombuffer(self.depth, np.uint32).astype(np.int64)
        number = np.frombuffer(self.segment, np.uint32)
        ready = np.flatnonzero(state == READY)
        order = ready[np.lexsort((-depth[ready], used[ready]))]
        numbers: dict[int, list[int]] = {}
        for extent in self.extents.values():
            part = slice(extent.base, extent.base + extent.segment.slots)
            extent.hot = int(used[part][state[part] == READY].max(initial=0))
            numbers.setdefault(extent.segment.stride, []).append(extent.segment.number)
        for stride, mine in numbers.items():
            lru = self.lru[stride]
            for slot_id in order[np.isin(number[order], mine)].tolist():
                lru.insert(slot_id)

    @staticmethod
    def _column(column: array[int] | bytearray, base: int, n: int) -> npt.NDArray[Any]:
        """A part of a column to assign to; not to be kept, as the column can't grow meanwhile."""
        dtype = np.dtype("B" if isinstance(column, bytearray) else column.typecode)
        return np.frombuffer(column, dtype, n, base * dtype.itemsize)
