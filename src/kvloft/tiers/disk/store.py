"""The store: what many processes share, one locked operation at a time, without any threads.

The index (:mod:`kvloft.tiers.disk.view`) is what this process believes. Every operation first
brings it up to date under the lock, and still nothing that matters hangs on it: before a slot is
used again its record is read and compared, and a chunk that has been read tells by itself whether
it is the one that was asked for. An index that turns out wrong is thrown away and read anew. So a
bug in it, a damaged table or somebody's rude ``rm`` costs hits, never bytes.

Reading takes no lock. If a slot is given to another chunk meanwhile, what has been read does not
match, and the chunk is simply not there any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from kvloft.tiers.base import Chunk, Outcome
from kvloft.tiers.disk import control
from kvloft.tiers.disk.control import (
    RING,
    LockedError,
    Position,
    StrangeError,
    Writer,
    open_folder,
    open_plain,
)
from kvloft.tiers.disk.format import (
    FREE_RECORD,
    FULL_CODE,
    READY,
    Header,
    Record,
    chunk_name,
    pack_header,
    unpack_header,
)
from kvloft.tiers.disk.places import Place, flaw, runs
from kvloft.tiers.disk.room import SLACK_BYTES, Fault, Name, Room, Shield, StaleError, free
from kvloft.tiers.disk.segments import Files, Slots
from kvloft.tiers.disk.session import Session, Tables
from kvloft.tiers.disk.sync import apply, tidy, whole_tables
from kvloft.tiers.disk.view import HIDDEN, NONE, View

FOLDER = "kvloft-1"
"""Everything is in this folder of the path that the user gives; nothing else there is touched."""
_WORTHLESS = 1
"""The time of last use of what is to go first."""
_TOUCH_SECONDS = 60
"""How precisely the disk knows when a chunk was last used."""
_MAX_HINTS = 1 << 16
_ABOUT_CHARS = 300
_TRIES = 3

_T = TypeVar("_T")


class Fill(NamedTuple):
    """A chunk that is to be written."""

    place: Place
    record: Record
    key: bytes
    """All of it."""
    data: memoryview
    """The whole slot."""


class Want(NamedTuple):
    """A chunk that is to be put."""

    record: Record
    """As it is to be while the slot is reserved."""
    stride: int
    parent_comes: Callable[[], bool]
    """Whether what it rests on, if it is not there yet, may still come before it is published."""


def _ignore(_cause: str, _message: str) -> None:
    pass


class Store:
    """One process's access to a store. All methods may be called from any thread.

    ``path``: the directory that the user has named. ``limit``: bytes that the store may take in
    all; without one, no segments are made. ``create``: make what is missing. ``fault``: is told of
    what goes wrong, from any thread, with the store's mutex held. ``lock_seconds``: how long to
    wait for others. ``verify``: compute the checksum of what is read.

    All methods raise ``OSError``, :class:`kvloft.tiers.disk.control.LockedError` among them, unless
    they say otherwise. Call :meth:`load` before anything else.
    """

    def __init__(
        self, path: Path, *, limit: int | None = None, create: bool = False,
        fault: Fault = _ignore, lock_seconds: float = 2.0, verify: bool = True,
    ) -> None:  # fmt: skip
        self._verify = verify
        self.path = path
        self.folder = path / FOLDER
        self.limit = limit
        self.view = View()
        self.files = Files(self.folder)
        self.reading: dict[int, Sequence[Place]] = {}
        """What this process reads just now, by thread."""
        self.awaited: dict[Name, int] = {}
        """What puts that are still to come rest on, and how many of them; it is not evicted."""
        self._writers = self.folder / "writers"
        self._names = self.folder / "names"
        self._control = f"{self.folder}/control"
        self.room = Room(self.files, self._writers, limit, fault)
        self._fault = fault
        self._lock_seconds = lock_seconds
        self._mutex = threading.Lock()
        self._known: Position | None = None
        """What the view corresponds to; ``None``: it has to be read anew."""
        self._writer: Writer | None = None
        self._mine: set[tuple[int, int]] = set()
        """Segment numbers and slots that this process has reserved and still writes."""
        self._hints: deque[tuple[Name, bool]] = deque(maxlen=_MAX_HINTS)
        """Chunks that have been touched (True) or demoted."""
        self._stamps: dict[Place, int] = {}
        """Times of last use that are still to be written."""
        self._condemned: dict[Place, Name] = {}
        """Damaged chunks that are still to be removed."""
        self._dirty_seen = False
        if create:
            # One by one: ``parents`` would leave those above open to others.
            missing = [folder for folder in self.path.parents if not folder.exists()]
            for folder in (*reversed(missing), self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.folder, self._writers, self._names):
                folder.mkdir(mode=0o700, exist_ok=True)
                _close_to_others(folder)

    # ---------------------------------------------------------------- coming and going

    def load(self) -> None:
        """Read all tables, and mend what a crash or worse has left."""
        self.change(lambda session: None)

    def join(self, digest: bytes, about: Mapping[str, str]) -> int:
        """Become one of those who write; the number that goes into this process's reservations.

        Says what the namespace is for people who look, and drops segments until the limit holds.
        """
        shown = {key: value[:_ABOUT_CHARS] for key, value in about.items()}
        text = json.dumps({**shown, "digest": digest.hex()}, indent=1).encode()

        def work(session: Session) -> int:
            if self._writer is None:
                self._writer = Writer(self._writers)
            self.room.free_reserved(self.view, session, control.live_writers(self._writers))
            limit = self.limit
            if limit is not None:
                self.room.shrink(self.view, session, limit)
            if limit is None or self.room.measure(self.view) + len(text) + SLACK_BYTES <= limit:
                target = self._names / f"{digest.hex()}.json"
                _write_small(target, text)
            return self._writer.number

        return self.change(work)

    def leave(self) -> None:
        """Release what is reserved and stop being a writer. Others find out by themselves if this
        can't be done."""
        if self._writer is not None:
            self._mine.clear()
            with contextlib.suppress(OSError):
                self.release([])
            self._writer.close()
            self._writer = None

    # ---------------------------------------------------------------- under the lock

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        deadline = time.monotonic() + self._lock_seconds
        if not self._mutex.acquire(timeout=self._lock_seconds):
            raise LockedError("this process is still busy with the store")
        try:
            self._check_folder()
            left = max(0.0, deadline - time.monotonic())
            with control.locked(self._control, left) as fd:
                session = None
                try:
                    session = self._begin(fd)
                    yield session
                    session.finish()
                    self._known = session.position
                except BaseException:
                    self._known = None
                    raise
                finally:
                    if session is not None:
                        session.close()
        finally:
            self._mutex.release()

    def _check_folder(self) -> None:
        """Raises :class:`StrangeError` if the folder has become a link to another place."""
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode):
            raise StrangeError(errno.ENOENT, "It is no directory", str(self.folder))

    def change(self, work: Callable[[Session], _T]) -> _T:
        """What ``work`` returns, done under the lock with the view up to date.

        It may be called again after :class:`StaleError`, which it may raise.
        """
        for _ in range(_TRIES):
            try:
                with self._session() as session:
                    return work(session)
            except StaleError:
                continue
        raise OSError(errno.EIO, "the tables do not stay as they have been read")

    def _begin(self, fd: int) -> Session:
        """Bring the view up to date."""
        position = control.read_position(fd)
        if position is None or position.dirty:
            found, _ = self.files.found()
            following = max((s.number + 1 for s in found), default=0)
            if position is not None:
                following = max(following, position.next_segment)
            position, self._known = control.start_epoch(fd, following), None
        session = Session(self.files, fd, position)
        known, changes = self._known, None
        if known is not None and known.epoch == position.epoch:
            changes = control.read_changes(fd, known.sequence, position.sequence)
        try:
            if changes is None:
                self._reload(session)
            else:
                try:
                    apply(self.view, self.files, changes, session.tables)
                except StaleError:
                    self._reload(session)
            self._known = position
            self._take_hints()
            for place, used in list(self._stamps.items()):
                if used == _WORTHLESS:  # Else it would look as if another process had used it.
                    session.tables.stamp(*place, used)
                    del self._stamps[place]
        except BaseException:
            session.close()
            raise
        return session

    # ---------------------------------------------------------------- bringing the view up to date

    def peek(self) -> None:
        """Learn what others have changed, without the lock."""
        if not self._mutex.acquire(timeout=self._lock_seconds):
            return
        try:
            self._check_folder()
            fd = open_plain(self._control, os.O_RDONLY)
            try:
                self._peek(fd)
            finally:
                os.close(fd)
            self._take_hints()
        except FileNotFoundError:
            self._known = None
            if self.folder.is_symlink() or not self.folder.exists():
                self.view = View()
                self._fault("vanished", f"{self.folder} is gone; nothing is kept or found any more")
        finally:
            self._mutex.release()

    def _peek(self, fd: int) -> None:
        position, known, changes = control.read_position(fd), self._known, None
        if position is None or position.dirty:
            return
        if known is not None and known.epoch == position.epoch:
            changes = control.read_changes(fd, known.sequence, position.sequence)
            after = control.read_position(fd)
            if (
                after is None
                or after.epoch != known.epoch
                or after.sequence > known.sequence + RING
            ):
                changes = None  # Overwritten while it was being read.
        self._known = None
        if changes is None:
            self._reload(None)
        else:
            with contextlib.closing(Tables(self.files)) as tables:
                try:
                    apply(self.view, self.files, changes, tables)
                except (StaleError, FileNotFoundError):
                    return
        # What is changed from here on comes with the next sequence numbers, at worst once more.
        self._known = position

    def _reload(self, session: Session | None) -> None:
        """Read all tables; with a session, mend them too."""
        segments, leftovers = self.files.found()
        if session is not None:
            tidy(self.files, session, segments, leftovers, self._fault)
        view = View()
        gone = view.load(whole_tables(self.files, segments, session, self._fault))
        if session is not None:
            for slot_id in gone:
                session.write(*view.place(slot_id), FREE_RECORD)
            alive = control.live_writers(self._writers)
            if self._writer is not None:
                alive.discard(self._writer.number)
            keep = {view.id_at(*place) for place in list(self._mine)}
            dead = {i: w for i, w in view.reserved.items() if w not in alive and i not in keep}
            for slot_id in dead:
                free(view, session, slot_id)
        for place in list(self._condemned):
            if (slot_id := view.id_at(place.segment.number, place.slot)) != NONE:
                self._hide(view, slot_id)
        self.view = view

    def _take_hints(self) -> None:
        now, view = int(time.time()), self.view
        while self._hints:
            (digest, name), touched = self._hints.popleft()
            slot_id = view.find(digest, name)
            if slot_id == NONE:
                continue
            used = view.used[slot_id]
            if not touched:
                view.demote(slot_id)
                self._stamps[Place(*view.place(slot_id))] = _WORTHLESS
                continue
            view.touch(slot_id)
            if now - used >= _TOUCH_SECONDS:
                view.set_used(slot_id, now)
                self._stamps[Place(*view.place(slot_id))] = now

    # ---------------------------------------------------------------- puts

    def reserve(self, wants: Sequence[Want]) -> list[Place | Outcome]:
        """A place for each chunk; DONE where it is there already, REFUSED where there is no room
        or what it rests on is missing. Every place must be published or released."""

        taken: set[tuple[int, int]] = set()

        def work(session: Session) -> list[Place | Outcome]:
            view = self.view
            out: list[Place | Outcome] = []
            self._mine -= taken  # Of a try before, whose changes have been undone.
            taken.clear()
            busy = [
                view.id_at(place.segment.number, place.slot)
                for places in list(self.reading.values())
                for place in places
            ]
            shield = Shield(busy, self.awaited)
            placed: set[bytes] = set()
            refused: set[bytes] = set()
            for want in wants:
                record = want.record
                if view.find(record.digest, record.name) != NONE:
                    out.append(Outcome.DONE)
                    continue
                parent, support = view.support(record), record.support
                slot_id = NONE
                # Nothing is evicted for a chunk that can't be published.
                if (
                    parent is not None
                    or support in placed
                    or (support not in refused and want.parent_comes())
                ):
                    slot_id = self.room.take(view, session, want.stride, shield)
                if slot_id == NONE:
                    refused.add(record.name)
                    out.append(Outcome.REFUSED)
                    continue
                placed.add(record.name)
                place = Place(*view.place(slot_id))
                session.write(*place, record)
                view.reserve(slot_id, record, NONE if parent is None else parent)
                out.append(place)
                taken.add((place.segment.number, place.slot))
                self._mine.add((place.segment.number, place.slot))
            return out

        try:
            return self.change(work)
        except BaseException:
            self._mine -= taken
            raise

    def write(self, run: Sequence[Fill], slots: Slots) -> list[Record]:
        """Write chunks into the slots reserved for them, which lie side by side (:func:`runs`);
        their records as they are to be published.

        What lies beyond the chunks' bytes in their slots becomes zeros.
        """
        now, out = int(time.time()), []
        for page, (place, record, key, data) in zip(slots.pages, run, strict=False):
            data[record.nbytes :] = bytes(len(data) - record.nbytes)
            payload = xxhash.xxh3_64_intdigest(data)
            header = Header(
                record.rests, record.writer, record.digest, record.code, record.depth,
                record.parent, record.nbytes, len(data), place.segment.number, place.slot, payload,
                record.created, key,
            )  # fmt: skip
            pack_header(page, header)
            out.append(record._replace(state=READY, payload=payload, used=now))
        slots.write(*run[0].place, [fill.data for fill in run])
        return out

    def publish(self, written: Sequence[tuple[Place, Record]]) -> list[Outcome]:
        """Let chunks be found that have been written whole, those before others that rest on them.

        ``written`` has each one's record as it is to be from now on. DONE, also if another process
        has been faster; REFUSED if what it rests on is gone; FAILED if the reservation is. None of
        the places is reserved afterwards, unless this raises.
        """

        def work(session: Session) -> list[Outcome]:
            return [self._publish(session, place, record) for place, record in written]

        outcomes = self.change(work)
        self._mine.difference_update((p.segment.number, p.slot) for p, _ in written)
        return outcomes

    def _publish(self, session: Session, place: Place, record: Record) -> Outcome:
        view = self.view
        slot_id = view.id_at(place.segment.number, place.slot)
        if view.reserved.get(slot_id) != record.writer or view.name(slot_id) != record.name:
            return Outcome.FAILED
        outcome = Outcome.DONE
        parent = view.support(record)
        if parent is None:
            outcome = Outcome.REFUSED
        elif view.find(record.digest, record.name) == NONE:
            session.write(*place, record)
            view.publish(slot_id, record, parent)
            return outcome
        free(view, session, slot_id)
        return outcome

    def release(self, places: Iterable[Place]) -> None:
        """Give up reservations, and all that this process has forgotten to give up."""
        self._mine.difference_update((p.segment.number, p.slot) for p in places)
        own = self._writer.number if self._writer is not None else 0

        def work(session: Session) -> None:
            view = self.view
            keep = {view.id_at(*place) for place in list(self._mine)}
            for slot_id in [i for i, w in view.reserved.items() if w == own and i not in keep]:
                free(view, session, slot_id)

        self.change(work)

    # ---------------------------------------------------------------- gets

    def find(self, digest: bytes, name: bytes) -> Place | None:
        """Where a chunk is, as far as is known. Takes no lock and raises nothing."""
        view = self.view
        slot_id = view.find(digest, name)
        if slot_id == NONE:
            return None
        try:
            return Place(*view.place(slot_id))
        except KeyError:  # It is just being dropped.
            return None

    def read(
        self, digest: bytes, wants: Sequence[tuple[Chunk, memoryview]], slots: Slots
    ) -> list[tuple[Outcome, str]]:
        """Fill memory of whole slots with chunks, each one's own; for each DONE, MISSING, or
        DAMAGED with its cause."""
        out = [(Outcome.MISSING, "")] * len(wants)
        left: Sequence[int] = range(len(wants))
        thread = threading.get_ident()
        for turn in range(2):
            if turn:
                self.peek()  # What is left has gone, or has moved.
            found = [(i, self.find(digest, _name(wants[i][0]))) for i in left]
            there = [(i, place) for i, place in found if place is not None]
            places = [place for _, place in there]
            self.reading[thread] = places
            left = []
            try:
                for run in runs(places):
                    part = [there[at] for at in run]
                    for i, answer in self._read_run(digest, part, wants, slots):
                        if answer is None:
                            left.append(i)
                        else:
                            out[i] = answer
            finally:
                self.reading.pop(thread, None)
            if not left:
                break
        return out

    def _read_run(
        self, digest: bytes, run: Sequence[tuple[int, Place]],
        wants: Sequence[tuple[Chunk, memoryview]], slots: Slots,
    ) -> Iterator[tuple[int, tuple[Outcome, str] | None]]:  # fmt: skip
        """Read what lies side by side; ``None`` for what is not where it was thought to be."""
        stride = run[0][1].segment.stride
        try:
            got = slots.read(*run[0][1], [wants[i][1] for i, _ in run])
        except FileNotFoundError:
            got = -1
            self._known = None  # Whoever has removed it, what is known of the store is void.
        for at, (i, place) in enumerate(run):
            chunk, into = wants[i]
            name, page = Name(digest, _name(chunk)), slots.pages[at]
            cause = flaw(digest, chunk, place, page, into, got - at * stride, verify=self._verify)
            if cause is None:
                self._hints.append((name, True))
                yield i, (Outcome.DONE, "")
                continue
            record = None
            if got >= 0:
                with contextlib.closing(Tables(self.files)) as tables:
                    record = _record_of(name, place, tables)
            if record is None:
                yield i, None
                continue
            header = unpack_header(page)
            if cause == "checksum" and header and header.payload != record.payload:
                cause = "torn"
            self.condemn(place, name)
            yield i, (Outcome.DAMAGED, cause)

    def still_there(self, names: Iterable[Name]) -> list[bool]:
        """Whether chunks are there, by their records on disk."""
        self.peek()
        with contextlib.closing(Tables(self.files)) as tables:
            return [
                (place := self.find(*name)) is not None
                and _record_of(name, place, tables) is not None
                for name in names
            ]

    # ---------------------------------------------------------------- hints, removal, upkeep

    def hint(self, name: Name, *, touched: bool) -> None:
        """A chunk was used just now, or is worth less than all others. Takes no lock, nor time."""
        self._hints.append((name, touched))

    def condemn(self, place: Place, name: Name) -> None:
        """Let a damaged chunk, and what rests on it, not be found from now on; :meth:`upkeep`
        removes it."""
        self._condemned[place] = name
        if not self._mutex.acquire(timeout=self._lock_seconds):
            return  # It will only be read in vain again until then.
        try:
            slot_id = self.view.id_at(place.segment.number, place.slot)
            if slot_id != NONE and self.view.find(*name) == slot_id:
                self._hide(self.view, slot_id)
        finally:
            self._mutex.release()

    @staticmethod
    def _hide(view: View, slot_id: int) -> None:
        for one in view.subtree(slot_id):
            if view.state[one] == READY:
                view.hide(one)

    def remove(self, names: Iterable[Name]) -> int:
        """Remove chunks and what rests on them; how many have gone."""

        def work(session: Session) -> int:
            view, gone = self.view, 0
            for name in names:
                if (slot_id := view.find(*name)) != NONE:
                    gone += self.room.remove(view, session, slot_id)
            return gone

        names = list(names)
        return self.change(work) if names else 0

    def upkeep(self) -> None:
        """What wants to be done about once a second: learn what others have changed, write times of
        last use, remove what is damaged."""
        self.peek()
        self.room.measure_overhead()
        stamps, self._stamps = self._stamps, {}
        with contextlib.closing(Tables(self.files, os.O_RDWR)) as tables:
            for place, used in stamps.items():
                with contextlib.suppress(FileNotFoundError):
                    tables.stamp(*place, used)
        if self._condemned:
            self.change(self._purge)
        elif self._is_dirty():
            self.change(lambda session: None)

    def _purge(self, session: Session) -> None:
        view = self.view
        for place, name in list(self._condemned.items()):
            slot_id = view.id_at(place.segment.number, place.slot)
            if (
                slot_id != NONE
                and view.state[slot_id] in (READY, HIDDEN)
                and view.name(slot_id) == name.name
            ):
                self.room.remove(view, session, slot_id)
            del self._condemned[place]

    def _is_dirty(self) -> bool:
        """Whether somebody seems to have died in the middle of a change: dirty twice in a row."""
        fd = open_plain(self._control, os.O_RDONLY)
        try:
            position = control.read_position(fd)
        finally:
            os.close(fd)
        seen, self._dirty_seen = self._dirty_seen, position is None or position.dirty
        return seen and self._dirty_seen

    def chunks_known(self, digest: bytes) -> Iterator[Chunk]:
        """A namespace's chunks, parents first, as the index has them; keys in their first 16 bytes.

        Chunks that come or go meanwhile may be missing.
        """
        view = self.view
        ids = view.ids(digest)
        ids.sort(key=lambda i: (view.depth[i], view.name(i)[16:] != FULL_CODE))
        for slot_id in ids:
            name = view.name(slot_id)
            parent = view.parent_key(slot_id)
            code = name[16:].rstrip(b"\0").decode("ascii", "replace")
            yield Chunk(name[:16], code, parent, view.depth[slot_id], view.nbytes[slot_id])

    @property
    def evicted(self) -> int:
        """Chunks that have gone to make room."""
        return self.room.evicted

    @property
    def used_bytes(self) -> int:
        """What the store takes, as far as is known; at once."""
        return self.room.overhead + self.view.total_bytes


def _record_of(name: Name, place: Place, tables: Tables) -> Record | None:
    """The record on disk of a chunk that is ready there; ``None`` if that place has another."""
    try:
        record = tables.read(*place)
    except FileNotFoundError:
        return None
    if record is None or (record.state, record.digest, record.name) != (READY, *name):
        return None
    return record


def _name(chunk: Chunk) -> bytes:
    return chunk_name(chunk.key, chunk.code)


def _write_small(path: Path, text: bytes) -> None:
    """Replace a small file that is only for people; where a folder has its name, there is none."""
    fresh = path.with_suffix(".tmp").name
    with open_folder(path.parent) as at, contextlib.suppress(IsADirectoryError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=at)
        fd = open_plain(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=at)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)
        os.replace(fresh, path.name, src_dir_fd=at, dst_dir_fd=at)


def _close_to_others(folder: Path) -> None:
    """See that nobody else can put files here: theirs would be taken for ours.

    Raises :class:`StrangeError` if it is a link, ``PermissionError`` if that is not in our power.
    """
    with open_folder(folder) as fd:
        status = os.fstat(fd)
        if status.st_mode & 0o077:
            try:
                os.fchmod(fd, 0o700)
            except OSError as error:
                # Where it is ours, the file system has no permissions, or only one for everything.
                if status.st_uid != os.geteuid():
                    raise PermissionError(
                        errno.EACCES, "it belongs to another user, and not to that one alone",
                        str(folder),
                    ) from error  # fmt: skip
