"""Write-behind: copies of what host memory holds, made in the background while it stays there.

The scheduler's thread only names chunks. What is to be written waits in two bounded queues: a list
of paths here, from which each step takes a few chunks, and the tier's own queue. Where either is
full the rest of a path is dropped and counted, never waited for; it is made up for when the path is
stored further, or found again, since a path is always written from its first missing chunk on.

A chunk that is being written is pinned, so its slot can't be given to another one meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvloft.catalog.catalog import STATE, Catalog, Store
from kvloft.catalog.tree import READY, ROOT
from kvloft.lower.shelf import FULL, Shelf, code_of, ended_well
from kvloft.plan import ChunkLayout
from kvloft.seals import Seals
from kvloft.tiers.base import Chunk, Outcome

_MAX_PATHS = 4096
_MAX_WRITES_PER_STEP = 64
"""Bounds the time that a step spends on naming chunks: some 10 us each."""

_Written = tuple[int, int, Chunk, bool, Future[Outcome]]
"""Node, slot, chunk, whether the slot was intact when it had been written, and what came of it."""


@dataclass(slots=True)
class WriteCounters:
    """Totals since the start."""

    written_chunks: int = 0
    written_bytes: int = 0
    dropped_chunks: int = 0
    """Not written because a queue was full; a dropped path counts as one."""
    failed_chunks: int = 0


class Writer:
    """Writes one loft's chunks to one tier."""

    def __init__(
        self, shelf: Shelf, catalog: Catalog, memory: memoryview, seals: Seals | None,
        rotten: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """``memory``: the arena's, in which slots lie. ``seals``: to be looked at once a slot has
        been written; ``rotten`` is told the node, whose pin it ends, and the slot that are wrong.
        """
        self.counters = WriteCounters()
        self._shelf = shelf
        self._catalog = catalog
        self._memory = memory
        self._seals = seals
        self._rotten = rotten
        self._paths: deque[tuple[int, bytes]] = deque()
        self._done: deque[_Written] = deque()
        """Filled by the tier's threads."""

    @property
    def pending(self) -> int:
        """Paths that wait to be named to the tier."""
        return len(self._paths)

    @property
    def writing(self) -> int:
        """Chunks that the tier has been given and is not done with."""
        return len(self._shelf.writing)

    def stored(self, store: Store) -> None:
        """A store has been published."""
        if self._shelf.write_all:
            ends = [*store.nodes[-1:], *store.resumes]
            for node in dict.fromkeys(ends):
                self._add(node)
        for above, below in store.superseded:
            self._demote(above, below)

    def found(self, node: int) -> None:
        """A look-up has found the path down to ``node``."""
        if node != ROOT and not self._complete(node):
            self._add(node)

    def used(self, node: int) -> None:
        """A request resumes at ``node``."""
        chunks = [self._shelf.full_chunk_of(node)] if self._catalog.plan.full_layout else []
        if self._catalog.plan.has_resume_points:
            chunks.extend(self._shelf.resume_names(node))
        self._shelf.touch(chunks)

    def _complete(self, node: int) -> bool:
        """Whether the tier has, or is getting, what ``node`` has; a look at the last chunk."""
        key = self._shelf.key(self._catalog.tree.key(node))
        if self._catalog.plan.full_layout and not self._shelf.has_or_writes(key, FULL):
            return False
        if not (self._catalog.plan.has_resume_points and self._catalog.is_resume(node)):
            return True
        return all(
            self._shelf.has_or_writes(chunk.key, chunk.code)
            for chunk in self._shelf.resume_names(node)
        )

    def _add(self, node: int) -> None:
        if len(self._paths) >= _MAX_PATHS:
            self.counters.dropped_chunks += 1
            return
        # By name too: the node may be gone, and its number in use again, before its turn comes.
        self._paths.append((node, self._catalog.tree.key(node)))

    def step(self) -> bool:
        """Take note of what has been written, and name some more; whether there was any."""
        busy = bool(self._done or self._paths)
        while self._done:
            node, slot, chunk, intact, future = self._done.popleft()
            self._shelf.writing.discard((chunk.key, chunk.code))
            if not intact:
                # Written with a checksum that says all is well: the tier could never find out.
                self._shelf.outcome(future)
                self._shelf.delete([chunk])
                self._rotten(node, slot)
                continue
            self._catalog.unpin(node)
            if self._shelf.outcome(future) is Outcome.DONE:
                self.counters.written_chunks += 1
                self.counters.written_bytes += chunk.nbytes
            else:
                self.counters.failed_chunks += 1
        room = _MAX_WRITES_PER_STEP
        while self._paths and room > 0:
            node, key = self._paths[0]
            count, whole = 0, True
            if self._catalog.tree.find(key) == node and self._catalog.tree.state[node] == READY:
                count, whole = self._write_path(node, room)
            if whole:
                self._paths.popleft()
            room -= max(1, count)
        return busy

    def _write_path(self, node: int, room: int) -> tuple[int, bool]:
        """Put up to ``room`` of a path's missing chunks, the first ones first.

        How many, and whether that was all that can be done for this path now.
        """
        tree, catalog, shelf = self._catalog.tree, self._catalog, self._shelf
        count = 0
        if (full := catalog.plan.full_layout) is not None:
            missing = []
            at = node
            while at != ROOT and not shelf.has_or_writes(shelf.key(tree.key(at)), FULL):
                missing.append(at)
                at = tree.parent[at]
            while missing and count < room:
                at = missing.pop()
                if not self._put(at, shelf.full_chunk_of(at), catalog.full_slot(at), full):
                    return count, True
                count += 1
            if missing:
                return count, False
        if catalog.plan.has_resume_points and catalog.is_resume(node):
            for holder, column, slot, layout in catalog.resume_chunks(node):
                chunk = shelf.chunk_of(holder, column, layout.nbytes)
                if shelf.has_or_writes(chunk.key, chunk.code):
                    continue
                if not self._put(node, chunk, slot, layout):
                    break
                count += 1
        return count, True

    def _put(self, node: int, chunk: Chunk, slot: int, layout: ChunkLayout) -> bool:
        self._catalog.pin(node)
        data = self._memory[slot : slot + layout.slot_bytes]
        future = self._shelf.put(chunk, data)
        if future is None:
            self._catalog.unpin(node)
            self.counters.dropped_chunks += 1
            return False
        self._shelf.writing.add((chunk.key, chunk.code))

        def tell(future: Future[Outcome]) -> None:
            seals = self._seals
            intact = not (seals and ended_well(future)) or seals.all_intact(slot, layout)
            self._done.append((node, slot, chunk, intact, future))

        future.add_done_callback(tell)
        return True

    def _demote(self, above: int, below: int) -> None:
        """Resume point ``above`` is worth less; what ``below`` needs of it is not."""
        plan, tree = self._catalog.plan, self._catalog.tree
        depth = tree.depth[below]
        needed = {(p.window_set, depth - p.chunks_back) for p in plan.pieces(depth)}
        chunks = []
        for holder, column, _, layout in self._catalog.resume_chunks(above):
            if column == STATE or (column // 2, tree.depth[holder]) not in needed:
                chunk = self._shelf.chunk_of(holder, column, layout.nbytes)
                if self._shelf.has_or_writes(chunk.key, code_of(column)):
                    chunks.append(chunk)
        if chunks:
            self._shelf.demote(chunks)
