"""What people do to a store, beside engines that go on using it.

Everything is done under the store's lock, a little at a time: engines must not wait for long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvloft.tiers.disk import control
from kvloft.tiers.disk.format import FULL_CODE, READY
from kvloft.tiers.disk.room import Name
from kvloft.tiers.disk.session import Session
from kvloft.tiers.disk.store import Store
from kvloft.tiers.disk.survey import Selection, Survey, names_in
from kvloft.tiers.disk.view import NONE

_BATCH = 256
"""Chunks that are removed under one lock."""
_LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What a clean-up has come to."""

    chunks: int = 0
    """That have been removed."""
    segments: int = 0
    """That have been dropped, because they were empty or to reach a size."""
    mended_records: int = 0
    """Damaged ones: made anew from the chunks, or given up."""
    leftover_files: int = 0
    """That belonged to no segment."""
    freed_bytes: int = 0
    """By which the store has become smaller."""


class StoreTools:
    """Changes to a store. ``path`` is the directory that has it in it
    (:func:`kvloft.tiers.disk.survey.locate`).

    Methods raise ``OSError``, :class:`kvloft.tiers.disk.control.LockedError` among them.
    """

    def __init__(self, path: Path) -> None:
        self.survey = Survey(path)

    def remove(self, names: Iterable[Name]) -> int:
        """Remove chunks, and with full chunks all that rests on them; how many have gone."""
        return self._remove(self._open(), list(names))

    def collect(
        self, selection: Selection | None = None, *, down_to: int | None = None
    ) -> Collected:
        """Clean up: damaged records, chunks whose parents are missing, what dead engines have
        reserved, files that belong to nothing, empty segments.

        ``selection``: also remove the chunks in it that have not been used since its time, nor
        anything that rests on them. ``down_to``: then drop the segments that have not been used for
        longest until the store takes at most so many bytes.
        """
        before = self.survey.totals()
        store, gone = self._open(), 0  # Opening is what mends.
        if selection is not None and selection.unused_since is not None:
            gone += self._remove(store, self._stale(store, selection))
        if down_to is not None:
            store.change(lambda session: store.room.shrink(store.view, session, down_to))
            gone += store.evicted
        return self._end(store, before.damaged_records, before.leftovers, before.total_bytes, gone)

    def clear(self, selection: Selection) -> Collected:
        """Remove all chunks that are meant, and what rests on them; what is being written just now
        stays. Chunks are as young as the youngest that rests on them."""
        before = self.survey.totals()
        store = self._open()
        if selection.unused_since is None:
            names = [entry.name for entry in self.survey.entries(selection)]
        else:
            names = self._stale(store, selection)
        gone = self._remove(store, names)
        return self._end(store, before.damaged_records, before.leftovers, before.total_bytes, gone)

    def _open(self) -> Store:
        """The store with its index read anew: nothing else knows when chunks were last used."""
        store = Store(self.survey.path, lock_seconds=_LOCK_SECONDS)
        store.load()
        return store

    def _remove(self, store: Store, names: list[Name]) -> int:
        return sum(store.remove(names[at : at + _BATCH]) for at in range(0, len(names), _BATCH))

    def _end(self, store: Store, damaged: int, leftovers: int, nbytes: int, gone: int) -> Collected:
        segments = len(store.view.extents)
        store.change(lambda session: _drop_empty(store, session))
        segments -= len(store.view.extents)
        self._forget_names()
        after = self.survey.totals()
        return Collected(
            gone, segments, max(0, damaged - after.damaged_records),
            max(0, leftovers - after.leftovers), max(0, nbytes - after.total_bytes),
        )  # fmt: skip

    def _stale(self, store: Store, selection: Selection) -> list[Name]:
        """Chunks that are meant and old with all that rests on them; those that go with another
        are left out."""
        cutoff, now = selection.unused_since or 0, int(time.time())
        view = store.view
        newest: dict[int, int] = {}
        meant: set[int] = set()
        for table in self.survey.tables():
            wanted = self.survey.wanted(table, selection, of_any_age=True)
            for slot in table.ready.nonzero()[0].tolist():
                slot_id = view.id_at(table.segment.number, slot)
                if slot_id != NONE and view.state[slot_id] == READY:
                    newest[slot_id] = int(table.used[slot])
                    if wanted[slot]:
                        meant.add(slot_id)
        for slot_id in (*view.all_ids(), *view.reserved):
            newest.setdefault(slot_id, now)  # It came after the tables were read.
        # Children come before parents: deeper full chunks first, all others before those.
        for slot_id in sorted(
            newest, key=lambda i: (view.name(i)[16:] == FULL_CODE, -view.depth[i])
        ):
            if (parent := view.parent[slot_id]) != NONE:
                newest[parent] = max(newest[parent], newest[slot_id])
        goes = {slot_id for slot_id in meant if newest[slot_id] < cutoff}
        return [
            Name(view.digest(slot_id), view.name(slot_id))
            for slot_id in goes
            if view.parent[slot_id] not in goes
        ]

    def _forget_names(self) -> None:
        """Remove files that name namespaces without chunks, unless an engine may be about to fill
        one."""
        survey = self.survey
        with control.locked(f"{survey.folder}/control", _LOCK_SECONDS):
            if control.live_writers(survey.folder / "writers"):
                return
            full = {digest for table in survey.tables() for digest, _, _ in table.kinds()}
            for digest in names_in(survey.folder / "names").keys() - full:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    (survey.folder / "names" / f"{digest.hex()}.json").unlink()


def _drop_empty(store: Store, session: Session) -> None:
    view = store.view
    busy = {view.segment[slot_id] for slot_id in view.reserved}
    for number, extent in list(view.extents.items()):
        if number not in busy and not view.chunks_in(extent):
            store.room.drop(view, session, extent)
