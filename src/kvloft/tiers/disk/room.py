"""Making room within the limit: the only place that creates segments, evicts or drops them.

In this order: a free slot of the size; one that a dead writer had reserved; a new segment, if the
limit allows; the coldest chunk of that size that nothing rests on. Sizes compete by dropping whole
segments: when one of another size has not been used since the victim was, it goes instead, with
whatever rests on its chunks elsewhere, and a segment of the needed size takes its place.

Everything here happens under the store's lock.
"""

from __future__ import annotations

import errno
import heapq
import time
from collections.abc import Callable, Collection, Container, Iterable
from pathlib import Path
from typing import NamedTuple

from kvloft.tiers.disk.control import CONTROL_BYTES, live_writers
from kvloft.tiers.disk.format import (
    FREE,
    FREE_RECORD,
    NAME_AT,
    NAME_BYTES,
    READY,
    RESERVED,
    USED_AT,
    least_segment_bytes,
    segment_slots,
)
from kvloft.tiers.disk.segments import MAX_SEGMENT_BYTES, Files
from kvloft.tiers.disk.session import Session
from kvloft.tiers.disk.view import NONE, Extent, View
from kvloft.units import PAGE_BYTES, format_size

SPARE_BYTES = 32 << 10
"""Kept free of segments: directories grow, and each namespace has a small file that names it."""
SLACK_BYTES = SPARE_BYTES // 2
"""By how much less than that directories grow in one operation."""
FIXED_BYTES = CONTROL_BYTES + 3 * PAGE_BYTES + SPARE_BYTES
"""What a store takes besides segments."""
_SEGMENTS = 64
"""A store has about so many, unless it is large: enough for sizes to share it finely."""
_PAUSE_SECONDS = 10.0
"""After the device was full, for so long no segment is tried."""
_TRADE_SECONDS = 1.0
"""After no segment of another size was to go, for so long none is looked for."""
_CANDIDATES = 8
_LEAVES = 256
"""How many chunks of other sizes may go to make one of the needed size evictable."""
_READY = bytes([READY])
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Fault = Callable[[str, str], None]
"""Told of what has gone wrong: cause and message."""


class StaleError(Exception):
    """The index does not agree with the disk; it has to be read again."""


def least_bytes(slot_sizes: Collection[int]) -> int:
    """The smallest limit with which every class has room for one chunk."""
    return FIXED_BYTES + sum(least_segment_bytes(size) for size in slot_sizes)


def free(view: View, session: Session, slot_id: int) -> None:
    """Make a slot free that was anything else, on disk and in the view."""
    session.write(*view.place(slot_id), FREE_RECORD)
    view.release(slot_id)


class Name(NamedTuple):
    """What tells a chunk apart in the whole store."""

    digest: bytes
    name: bytes


class Shield:
    """Chunks that must stay for now: some ids, and whatever has one of some names."""

    def __init__(self, ids: Iterable[int] = (), names: Container[Name] = ()) -> None:
        self.ids = {slot_id for slot_id in ids if slot_id != NONE}
        self._names = names

    def covers(self, view: View, slot_id: int) -> bool:
        """Whether a chunk must stay."""
        name = Name(view.digest(slot_id), view.name(slot_id))
        return slot_id in self.ids or name in self._names

    def also(self, slot_id: int) -> Shield:
        """One more."""
        return Shield({*self.ids, slot_id}, self._names)


class Room:
    """See the module."""

    def __init__(self, files: Files, writers: Path, limit: int | None, fault: Fault) -> None:
        self.evicted = 0
        """Chunks that have gone to make room."""
        self.overhead = FIXED_BYTES - SPARE_BYTES
        """Bytes of all that is no segment, when it was last looked at."""
        self._files = files
        self._writers = writers
        self._limit = limit
        self._fault = fault
        self._grow_after = 0.0
        self._trade_after = 0.0
        self._keep_until = 0.0
        self._reclaim_after = 0.0

    # ---------------------------------------------------------------- for one chunk

    def take(self, view: View, session: Session, stride: int, shield: Shield) -> int:
        """A slot of this stride that nobody uses, free in the view; its record is still to be
        overwritten. ``NONE`` if there is no room. ``shield``: what must stay.

        Raises :class:`StaleError` if the view turns out to be wrong, and ``OSError``.
        """
        slot_id = self._free(view, session, stride)
        if slot_id == NONE and self._reclaim(view, session):
            slot_id = self._free(view, session, stride)
        if slot_id == NONE and self._grow(view, session, stride):
            slot_id = self._free(view, session, stride)
        if slot_id == NONE:
            slot_id = self._evict(view, session, stride, shield)
        return slot_id

    def _free(self, view: View, session: Session, stride: int) -> int:
        slot_id = view.take_free(stride)
        if slot_id != NONE and any(session.tables.raw(*view.place(slot_id))[:USED_AT]):
            raise StaleError
        return slot_id

    def _reclaim(self, view: View, session: Session) -> bool:
        """Free what dead writers have reserved; whether there was anything."""
        if not view.reserved or time.monotonic() < self._reclaim_after:
            return False
        self._reclaim_after = time.monotonic() + _TRADE_SECONDS
        return self.free_reserved(view, session, live_writers(self._writers)) > 0

    def free_reserved(self, view: View, session: Session, alive: set[int]) -> int:
        """Free what writers have reserved that are not ``alive``; how many slots."""
        dead = [slot_id for slot_id, writer in view.reserved.items() if writer not in alive]
        for slot_id in dead:
            free(view, session, slot_id)
        return len(dead)

    def _evict(self, view: View, session: Session, stride: int, shield: Shield) -> int:
        victim = self._coldest(view, session, stride, shield)
        if victim == NONE:
            victim = self._uncover(view, session, stride, shield)
        now = time.monotonic()
        if now >= self._trade_after or (victim == NONE and now >= self._keep_until):
            if self._trade(view, session, stride, shield, victim):
                if victim != NONE:
                    view.lru[stride].demote(victim)
                return self._free(view, session, stride)
            # Else there is a segment of free slots now, which takes a while to fill.
            self._trade_after = max(self._trade_after, time.monotonic() + _TRADE_SECONDS)
        if victim != NONE:
            view.release(victim)
            self.evicted += 1
            # Its id is in the list of free ones now, where it will be found to be in use.
        return victim

    def _trade(
        self, view: View, session: Session, stride: int, shield: Shield, victim: int
    ) -> bool:
        """Replace segments of other strides, colder than ``victim``, by one of this stride."""
        than = None if victim == NONE else view.used[victim]
        keep = shield.also(victim)
        needed = least_segment_bytes(stride - PAGE_BYTES)
        while needed > 0:
            before = view.total_bytes
            if not self._drop_coldest(view, session, keep, than=than, but=stride):
                return False
            needed -= before - view.total_bytes
            self._grow_after = 0.0  # There is space now, at least for as much.
            if self._grow(view, session, stride):
                return True
        if time.monotonic() < self._grow_after:
            # Somebody else takes the space on the device; giving up more would only feed them.
            self._keep_until = self._trade_after = self._grow_after
        return False

    def _coldest(self, view: View, session: Session, stride: int, shield: Shield) -> int:
        """The coldest chunk of this stride that may go, out of the order now; or ``NONE``."""
        lru = view.lru.get(stride)
        if lru is None:
            return NONE
        kept = []

        def evictable(slot_id: int) -> bool:
            if view.child[slot_id] != NONE:
                return False
            if shield.covers(view, slot_id):
                kept.append(slot_id)
                return False
            raw = session.tables.raw(*view.place(slot_id))
            if raw[:1] != _READY or raw[NAME_AT : NAME_AT + NAME_BYTES] != view.name(slot_id):
                raise StaleError
            used = int.from_bytes(raw[USED_AT : USED_AT + 4], "little")
            if used > view.used[slot_id]:
                view.set_used(slot_id, used)  # Another engine has used it.
                kept.append(slot_id)
                return False
            return True

        victim = lru.victim(evictable, len(lru))
        for slot_id in kept:
            lru.insert(slot_id)
        return NONE if victim is None else victim

    def _uncover(self, view: View, session: Session, stride: int, shield: Shield) -> int:
        """Evict the coldest chunks of other strides until one of this may go; that, or ``NONE``."""
        mine = [e for e in view.extents.values() if e.segment.stride == stride]
        held = sum(view.extent(slot_id) in mine for slot_id in shield.ids)
        if sum(extent.ready for extent in mine) <= held:
            return NONE
        for _ in range(_LEAVES):
            found = []
            for other in view.strides() - {stride}:
                if (slot_id := self._coldest(view, session, other, shield)) != NONE:
                    found.append((view.used[slot_id], other, slot_id))
            if not found:
                break
            found.sort()
            for _, other, slot_id in found[1:]:
                view.lru[other].demote(slot_id)
            self.evicted += self.remove(view, session, found[0][2])
            if (victim := self._coldest(view, session, stride, shield)) != NONE:
                return victim
        return NONE

    def remove(self, view: View, session: Session, slot_id: int) -> int:
        """Remove a chunk and all that rests on it; how many chunks."""
        gone = 0
        for one in reversed(view.subtree(slot_id)):
            if view.state[one] == RESERVED:
                view.detach(one)  # Its writer will find out.
            else:
                free(view, session, one)
                gone += 1
        return gone

    # ---------------------------------------------------------------- segments

    def _grow(self, view: View, session: Session, stride: int) -> bool:
        """Make a segment of this stride if the limit and the device allow; whether they did."""
        if self._limit is None or time.monotonic() < self._grow_after:
            return False
        wanted = max(1, segment_slots(min(self._limit // _SEGMENTS, MAX_SEGMENT_BYTES), stride))
        if not self._worth(view, stride, wanted):  # Mostly: the store is full.
            return False
        self.measure(view)
        if not (slots := self._worth(view, stride, wanted)):
            return False
        try:
            segment = session.create(stride, slots, max(view.extents, default=-1))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._grow_after = time.monotonic() + _PAUSE_SECONDS
            self._fault(
                "no_space",
                f"there is no space for another {format_size(stride * slots)} in "
                f"{self._files.folder}; the tier goes on with the {format_size(view.total_bytes)} "
                "that it has. Make space, or lower max_bytes",
            )
            return False
        view.add_segment(segment)
        return True

    def _worth(self, view: View, stride: int, wanted: int) -> int:
        """How many slots, ``wanted`` at most, a new segment may have; 0 if so few that there had
        better be none."""
        other = max(FIXED_BYTES, self.overhead + SLACK_BYTES)
        room = (self._limit or 0) - other - view.total_bytes
        slots = min(wanted, segment_slots(max(0, room), stride))
        # A small one is better than none, but not worth its file where there are others.
        return 0 if slots < wanted // 4 and stride in view.strides() else slots

    def measure(self, view: View) -> int:
        """What the store takes now, in bytes, as ``du -sb`` would count it."""
        total = self._files.measure()
        self.overhead = max(0, total - view.total_bytes)
        return total

    def measure_overhead(self) -> None:
        """Bring :attr:`overhead` up to date, as far as that can be done quickly."""
        self.overhead = self._files.measure(segments=False)

    def shrink(self, view: View, session: Session, limit: int) -> None:
        """Drop segments, the coldest first, until the store takes at most ``limit`` bytes."""
        while self.measure(view) > limit and self._drop_coldest(view, session, Shield()):
            pass

    def _drop_coldest(
        self, view: View, session: Session, shield: Shield, *,
        than: int | None = None, but: int | None = None,
    ) -> bool:  # fmt: skip
        """Drop the segment that has not been used for longest; whether there was one that may go.

        ``than``: only if it was last used before this time. ``but``: none of this stride.
        """
        busy = {view.segment[slot_id] for slot_id in (*view.reserved, *shield.ids)}
        extents = [
            extent
            for number, extent in view.extents.items()
            if extent.segment.stride != but and number not in busy
        ]
        coldest: tuple[tuple[int, int], Extent] | None = None
        for extent in heapq.nsmallest(_CANDIDATES, extents, key=lambda e: e.hot * bool(e.ready)):
            if than is not None and extent.ready and extent.hot >= than:
                break
            use = self._use(view, extent, shield)
            if use is None or (than is not None and use[0] >= than):
                continue
            if coldest is None or use < coldest[0]:
                coldest = use, extent
            if not use[1]:
                break
        if coldest is None:
            return False
        self.evicted += self.drop(view, session, coldest[1])
        return True

    def _use(self, view: View, extent: Extent, shield: Shield) -> tuple[int, int] | None:
        """When a chunk of the segment, or one that rests on it, was last used, and how many there
        are; ``None`` if one of them must stay. The time is remembered: touches only reach the
        deepest chunk of a prefix."""
        hot = 0
        seen: set[int] = set()
        for root in view.chunks_in(extent):
            for slot_id in view.subtree(root) if root not in seen else ():
                if shield.covers(view, slot_id):
                    return None
                seen.add(slot_id)
                if view.state[slot_id] == READY:
                    hot = max(hot, view.used[slot_id])
        extent.hot = hot
        return hot, len(seen)

    def drop(self, view: View, session: Session, extent: Extent) -> int:
        """Drop a segment without reservations, and all that rests on its chunks; how many."""
        gone = 0
        session.begin()
        for root in view.chunks_in(extent):
            if view.state[root] == FREE:
                continue  # It has gone with another.
            for slot_id in reversed(view.subtree(root)):
                if view.state[slot_id] == RESERVED:
                    view.detach(slot_id)
                    continue
                if view.extent(slot_id) is not extent:
                    session.write(*view.place(slot_id), FREE_RECORD)
                view.release(slot_id)
                gone += 1
        session.remove(extent.segment)
        view.drop_segment(extent.segment.number)
        return gone
