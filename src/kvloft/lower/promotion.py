"""Promotion: chunks that only a lower tier has come back to host memory while their request waits.

The engine asks for a request's prefix again and again while :meth:`Promoter.waits` says so; nothing
blocks. What is read goes to slots that nobody can find, and is added to the catalog, as a store
without copies, once it is there and verified. So a slow, failed or cancelled read disturbs nothing.

Long prefixes are read in parts of some dozens of chunks, begun in successive steps. A part that
follows another one, perhaps another request's, is added after it. Requests that need the same
chunks at the same time share the parts that bring them: a chunk is read once.

Waiting ends when all is there, when something can't be read, or when computing would have been
quicker: then the request goes on with what host memory has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from kvloft.catalog.catalog import NO_SLOT, STATE, Catalog, Store
from kvloft.catalog.tree import NONE, ROOT, WRITING
from kvloft.keys import Keys
from kvloft.lower.shelf import FULL, Shelf, code_of, ended_well
from kvloft.plan import ChunkLayout
from kvloft.seals import Seals
from kvloft.tiers.base import Chunk, Outcome

_MAX_READS_PER_PART = 128
"""Bounds the time of a scheduler call."""
_UNMEASURED_WAIT = 5.0
"""Seconds a request may wait while nobody knows how long computing its prefix takes."""
_DOUBT = 1.05
"""By how much a tier is thought faster each time that it seemed too slow."""
_TELLING_BYTES = 1 << 20
"""A smaller part says more of latency than of the rate; it can only show a higher one."""
_SMOOTHING = 0.3
"""Weight of the latest measurement of a rate."""

_Name = tuple[bytes, str]
"""The engine's hash of a boundary and a class of chunk."""

_Wanted = tuple[Chunk, _Name, ChunkLayout]


@dataclass(slots=True)
class Wait:
    """What a request waits for."""

    shelf: Shelf
    depth: int
    """Chunks."""
    until: float
    parts: list[Part] = field(default_factory=list)
    begun: int = 0
    """Chunks of the path down to which reads have been begun, or found under way."""
    resume_begun: bool = False
    no_room: bool = False
    """Host memory could not take all of it: what is coming is waited for, no more is begun."""


@dataclass(slots=True)
class _Read:
    chunk: Chunk
    name: _Name
    slot: int
    layout: ChunkLayout
    done: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """Chunks of one path that are read together; full ones in the order of the path, then those
    that let a request resume at its end."""

    shelf: Shelf
    parent: bytes
    """Key of the boundary above the path; empty at the root."""
    path: list[bytes]
    """Keys of the boundaries below it that are to be added, with a full chunk each if the model has
    any."""
    resume: bytes
    """Key of the boundary to resume at; empty if this is not the last part of a prefix."""
    reads: list[_Read]
    until: float
    started: float
    arrived: float = 0.0
    """When the latest read was done; set by the tier's threads."""
    submitted: int = 0
    open: int = 0
    failed: bool = False
    after: Part | None = None
    ended: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class PromotionCounters:
    """Totals since the start; requests unless the name says otherwise."""

    waited: int = 0
    shared: int = 0
    """Parts of a prefix that were being read for another request already."""
    declined: int = 0
    """Not waited for, since computing is quicker."""
    late: int = 0
    """Given up: it took longer than computing."""
    failed: int = 0
    """Given up: something could not be read, or there was no room for it."""
    failed_chunks: int = 0


class Promoter:
    """Brings chunks of one loft back from its lower tiers."""

    def __init__(
        self,
        shelves: Sequence[Shelf],
        catalog: Catalog,
        memory: memoryview,
        publish: Callable[[Store], None],
        clock: Callable[[], float],
        seals: Seals | None = None,
    ) -> None:
        """``memory``: the arena's. ``publish`` ends a store that has no copies, in its turn.
        ``seals``: to be put on what has been read."""
        self.counters = PromotionCounters()
        self.compute_rate = 0.0
        """Tokens a second that the engine computes of prompts; 0 before the first measurement."""
        self._shelves = shelves
        self._catalog = catalog
        self._plan = catalog.plan
        self._memory = memory
        self._publish = publish
        self._clock = clock
        self._seals = seals
        self._coming: dict[_Name, Part] = {}
        self._parts: list[Part] = []
        self._unread_bytes = 0
        self._done: deque[tuple[Part, _Read, Future[Outcome]]] = deque()
        """Filled by the tiers' threads."""
        self._news = Event()

    # ---------------------------------------------------------------- waiting

    def plan(self, keys: Keys, limit: int, above: int) -> Wait | None:
        """What a request should wait for that can resume at ``above`` chunks already and has
        ``limit``; ``None`` if no tier has more, or if computing it is quicker."""
        best, depth = None, above
        for shelf in self._shelves:
            if (found := shelf.find(keys, limit, depth)) > depth:
                best, depth = shelf, found
        if best is None:
            return None
        now = self._clock()
        if any(part.shelf is best and now > part.until for part in self._parts):
            # Reads that are overdue: whoever waited for this tier now would wait in vain.
            self.counters.declined += 1
            return None
        tokens = (depth - above) * self._plan.tokens_per_chunk
        wait = best.wait
        if wait is None:
            wait = tokens / self.compute_rate if self.compute_rate else _UNMEASURED_WAIT
            nbytes = (depth - above) * self._plan.full_chunk_bytes + self._plan.resume_bytes
            if best.read_rate and (self._unread_bytes + nbytes) / best.read_rate > wait:
                self.counters.declined += 1
                # What is never read is never measured again.
                best.read_rate *= _DOUBT
                return None
        self.counters.waited += 1
        return Wait(best, depth, now + wait)

    def waits(self, wait: Wait, keys: Keys) -> bool:
        """Whether to ask again later; begins some of the reads that are still missing."""
        if any(part.failed and part.ended for part in wait.parts):
            self.counters.failed += 1
            return False
        if self._clock() >= wait.until:
            self.counters.late += 1
            return False
        if self._advance(wait, keys):
            return True
        self.counters.failed += 1
        return False

    def measured_compute(self, tokens: int, seconds: float) -> None:
        """The engine has taken ``seconds`` for a step with ``tokens`` tokens of prompts."""
        if seconds > 0:
            self.compute_rate = _smooth(self.compute_rate, tokens / seconds)

    # ---------------------------------------------------------------- reading

    def _advance(self, wait: Wait, keys: Keys) -> bool:
        """Begin the next part of what ``wait`` needs; whether anything is coming."""
        if wait.no_room:
            return any(not part.ended for part in wait.parts)
        size, tree, shelf = self._plan.tokens_per_chunk, self._catalog.tree, wait.shelf
        node = tree.deepest(keys, wait.depth, ready=False)
        depth, coming, after = tree.depth[node], tree.state[node] == WRITING, None
        full = self._plan.full_layout
        while full is not None and depth < wait.depth:
            part = self._coming.get((keys((depth + 1) * size), FULL))
            if part is None:
                break
            coming, after = True, part
            self._join(wait, part)
            depth += 1
        if full is not None and depth < wait.begun:
            return False  # Evicted already: a second try would push others out in turn.
        parent = keys(depth * size) if depth else b""
        path: list[bytes] = []
        chunks: list[_Wanted] = []
        while depth < wait.depth and len(chunks) < _MAX_READS_PER_PART:
            above = path[-1] if path else parent
            depth += 1
            path.append(key := keys(depth * size))
            if full is not None:
                chunks.append((shelf.full_chunk(key, above, depth), (key, FULL), full))
        wait.begun = depth
        resume = b""
        if depth == wait.depth:
            resume = keys(depth * size)
            rest = self._resume_reads(wait, keys)
            if rest is None:
                return False
            at = tree.find(resume)
            if self._plan.has_resume_points and at != NONE and self._catalog.has_resume(at):
                coming = True  # Of a store under way: it is no resume point yet.
            for wanted in rest:
                if (part := self._coming.get(wanted[1])) is not None:
                    coming, after = True, after or part
                    self._join(wait, part)
                elif wait.resume_begun:
                    return False
                else:
                    chunks.append(wanted)
            wait.resume_begun = True
        if not chunks:
            return coming
        if not all(shelf.holds(chunk.key, chunk.code) for chunk, _, _ in chunks):
            return False
        return self._begin(wait, chunks, parent, path, resume, after) or coming

    def _join(self, wait: Wait, part: Part) -> None:
        if part not in wait.parts:
            wait.parts.append(part)
            self.counters.shared += 1

    def _resume_reads(self, wait: Wait, keys: Keys) -> list[_Wanted] | None:
        """The window and state chunks that a resume needs and memory lacks; ``None`` if the tier
        has lost one of them."""
        if not self._plan.has_resume_points:
            return []
        size, catalog, shelf = self._plan.tokens_per_chunk, self._catalog, wait.shelf
        end = keys(wait.depth * size)
        if (node := catalog.tree.find(end)) != NONE and catalog.has_resume(node):
            return []
        out: list[_Wanted] = []
        for piece in self._plan.pieces(wait.depth):
            depth = wait.depth - piece.chunks_back
            key = keys(depth * size)
            holder = catalog.tree.find(key)
            if holder != NONE and catalog.holds_piece(piece, holder):
                continue
            if (code := shelf.piece_code(key, piece)) is None:
                return None
            layout = piece.layout
            if code[0] == "W":
                layout = self._plan.whole_layout(piece.window_set)
            out.append((self._name(shelf, keys, depth, code, layout), (key, code), layout))
        if (state := self._plan.state_layout) is not None:
            code = code_of(STATE)
            out.append((self._name(shelf, keys, wait.depth, code, state), (end, code), state))
        return out

    def _name(self, shelf: Shelf, keys: Keys, depth: int, code: str, layout: ChunkLayout) -> Chunk:
        size = self._plan.tokens_per_chunk
        above = keys((depth - 1) * size) if depth > 1 else b""
        chunk = shelf.full_chunk(keys(depth * size), above, depth)
        return chunk._replace(code=code, nbytes=layout.nbytes)

    def _begin(
        self,
        wait: Wait,
        chunks: list[_Wanted],
        parent: bytes,
        path: list[bytes],
        resume: bytes,
        after: Part | None,
    ) -> bool:
        """Begin to read ``chunks``, or as many as there is room for; whether there are any."""
        slots = self._catalog.reserve([layout for _, _, layout in chunks])
        # Without windows or states a part of a prefix is worth having.
        least = len(chunks) if self._plan.has_resume_points else 1
        wait.no_room = len(slots) < len(chunks)
        if len(slots) < least:
            for slot, (_, _, layout) in zip(slots, chunks, strict=False):
                self._catalog.give_up(slot, layout)
            return False
        reads = [
            _Read(chunk, name, slot, layout)
            for slot, (chunk, name, layout) in zip(slots, chunks, strict=False)
        ]
        now = self._clock()
        part = Part(wait.shelf, parent, path, resume, reads, wait.until, now, after=after)
        self._parts.append(part)
        wait.parts.append(part)
        for read in reads:
            self._coming[read.name] = part
            self._unread_bytes += read.chunk.nbytes
        self._submit(part)
        return True

    def _submit(self, part: Part) -> None:
        while part.submitted < len(part.reads):
            read = part.reads[part.submitted]
            into = self._memory[read.slot : read.slot + read.layout.slot_bytes]
            future = part.shelf.get(read.chunk, into, part.until)
            if future is None:
                # Its queue is full: go on in a later step, but not for ever.
                if self._clock() < part.until and not part.cancelled:
                    return
                part.failed = True
                for late in part.reads[part.submitted :]:
                    self._unread_bytes -= late.chunk.nbytes
                part.submitted = len(part.reads)
                return
            part.submitted += 1
            part.open += 1
            future.add_done_callback(partial(self._tell, part, read))

    def _tell(self, part: Part, read: _Read, future: Future[Outcome]) -> None:
        part.arrived = self._clock()
        if self._seals is not None and ended_well(future):
            self._seals.seal_all(read.slot, read.layout)
        self._done.append((part, read, future))
        self._news.set()

    # ---------------------------------------------------------------- arriving

    @property
    def reading(self) -> bool:
        """Whether any reads are under way."""
        return bool(self._parts)

    @property
    def pending(self) -> int:
        """Parts of prefixes that are being read."""
        return len(self._parts)

    def pause(self, seconds: float) -> None:
        """Let up to ``seconds`` pass, less if something arrives: for an engine that has nothing
        to do but to wait."""
        self._news.wait(seconds)

    def step(self) -> bool:
        """Take in what has arrived; whether anything is under way."""
        busy = bool(self._parts)
        self._news.clear()
        while self._done:
            part, read, future = self._done.popleft()
            part.open -= 1
            self._unread_bytes -= read.chunk.nbytes
            read.done = part.shelf.outcome(future) is Outcome.DONE
            if not read.done:
                self.counters.failed_chunks += 1
                part.failed = True
        for part in self._parts:
            if part.submitted < len(part.reads):
                self._submit(part)
        ended = True
        while ended:
            ended = False
            for part in self._parts:
                if self._complete(part):
                    self._end(part)
                    ended = True
            self._parts = [part for part in self._parts if not part.ended]
        return busy

    def _complete(self, part: Part) -> bool:
        return (
            not part.open
            and not part.ended
            and part.submitted == len(part.reads)
            and (part.after is None or part.after.ended)
        )

    def _end(self, part: Part) -> None:
        part.ended = True
        for read in part.reads:
            if self._coming.get(read.name) is part:
                del self._coming[read.name]
        if not part.failed:
            nbytes = sum(read.chunk.nbytes for read in part.reads)
            rate, latest = part.shelf.read_rate, nbytes / max(part.arrived - part.started, 1e-6)
            if nbytes >= _TELLING_BYTES or latest > rate:
                part.shelf.read_rate = _smooth(rate, latest)
        left = {read.name: read for read in part.reads}
        if not part.cancelled:
            self._adopt(part, left)
        for read in left.values():
            self._catalog.give_up(read.slot, read.layout)

    def _adopt(self, part: Part, left: dict[_Name, _Read]) -> None:
        """Add what has been read to the catalog, as far as it hangs together; takes that out of
        ``left``."""
        catalog, tree = self._catalog, self._catalog.tree
        node = tree.find(part.parent) if part.parent else ROOT
        store = catalog.begin(promoted=True)
        for key in part.path if node != NONE else ():
            read = left.get((key, FULL))
            if self._plan.full_layout is not None and not (read and read.done):
                break
            there = tree.find(key)
            if there == NONE:
                there = catalog.adopt_chunk(store, node, key, read.slot if read else NO_SLOT)
                left.pop((key, FULL), None)
            node = there
        self._adopt_resume(part, left, store)
        if store.nodes or store.resumes:
            self._publish(store)
        else:
            catalog.cancel(store)

    def _adopt_resume(self, part: Part, left: dict[_Name, _Read], store: Store) -> None:
        if not (part.resume and self._plan.has_resume_points):
            return
        catalog, tree = self._catalog, self._catalog.tree
        at = tree.find(part.resume)
        if at == NONE:
            return
        slots: dict[tuple[int, int], int] = {}
        names: dict[int, _Name] = {}
        for read in left.values():
            code = read.chunk.code
            holder = tree.find(read.name[0])
            if code != FULL and read.done and holder != NONE:
                column = STATE if code == "s" else 2 * int(code[1:]) + (code[0] == "W")
                slots[holder, column] = read.slot
                names[read.slot] = read.name
        before = set(slots.values())
        if catalog.adopt_resume(store, at, slots):
            for slot in before - set(slots.values()):
                del left[names[slot]]

    # ---------------------------------------------------------------- the whole

    def reserved(self) -> list[tuple[int, ChunkLayout]]:
        """Slots that reads under way are filling."""
        return [(read.slot, read.layout) for part in self._parts for read in part.reads]

    def reset(self) -> None:
        """What is under way still ends, but is not added."""
        for part in self._parts:
            part.cancelled = part.failed = True
        self._coming.clear()


def _smooth(rate: float, latest: float) -> float:
    return latest if not rate else rate + _SMOOTHING * (latest - rate)
