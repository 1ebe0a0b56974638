"""The facade that an engine's adapter talks to: match, load, store, reset.

The adapter says what the engine's scheduler knows (prompts, block tables, how far a request is
computed) and passes the jobs that come back to the workers; each worker reports each job once. No
call blocks, copies chunk bytes or imports torch, so all of this may run on the scheduler's thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvloft.arena import Arena, ClassUse
from kvloft.catalog.catalog import Catalog, Counters, Store
from kvloft.catalog.policies import EvictionPolicy
from kvloft.catalog.tree import ROOT
from kvloft.errors import TransferError
from kvloft.jobs import Copy, Job, Part
from kvloft.keys import Keys
from kvloft.lower import LowerTier, Promoter, PromotionCounters, Shelf, Wait, WriteCounters, Writer
from kvloft.plan import ChunkLayout, ChunkPlan
from kvloft.tiers.base import TierStats

Tables = Sequence[Sequence[int]]
"""Per group (ring groups included), the request's block ids; 0 is the engine's null block."""

States = Mapping[int, Mapping[int, int]]
"""By boundary (tokens): by state group, the block that holds the state exactly there."""

_MAX_CHUNKS_PER_STORE = 512
"""A longer backlog is stored over several steps: bounds the time of a scheduler call."""

NULL_BLOCK = 0


@dataclass(slots=True)
class _Request:
    keys: Keys
    prompt_tokens: int
    seen: int = 0
    """Tokens up to which storing has been decided; a multiple of G."""
    branch: int = 0
    """A boundary that deserves a resume point because others left the path there."""
    resumed: int = 0
    """The deepest boundary known to be a resume point of this request."""
    leased: int = ROOT
    """The node that a match has pinned and no load has taken over yet."""
    may_load: bool = True
    may_store: bool = True
    may_wait: bool = True
    """For lower tiers; a request that has given up does not ask them again."""
    wait: Wait | None = None


@dataclass(slots=True)
class _Pending:
    """A job that some ranks have not reported yet."""

    waiting: set[int]
    ok: bool = True
    store: Store | None = None
    node: int = ROOT
    request: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a loft holds and has done; sizes in bytes."""

    budget_bytes: int
    live_bytes: int
    """Exact bytes of the chunks that hold a slot."""
    slot_bytes: int
    """The same in whole pages of memory."""
    slab_bytes: int
    """Memory of the slabs that serve a class; what is above ``slot_bytes`` is free in them."""
    chunks: int
    """Boundaries with a resident full chunk."""
    resume_points: int
    pending_stores: int
    pending_loads: int
    lookups: int
    hits: int
    restored_tokens: int
    failed_loads: int
    counters: Counters
    classes: tuple[ClassUse, ...] = field(default=())
    promotions: PromotionCounters = field(default_factory=PromotionCounters)
    tiers: tuple[LowerStats, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class LowerStats:
    """One lower tier: its own account, and what this loft has written to it."""

    name: str
    tier: TierStats
    writes: WriteCounters
    broken_calls: int
    """In which the tier has raised."""


class Loft:
    """One engine's chunks in one arena."""

    def __init__(
        self,
        plan: ChunkPlan,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        ranks: int,
        resume_interval: int,
        prompt_only: bool = True,
        tiers: Sequence[LowerTier] = (),
        memory: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tiers``: the quickest first; they belong to the loft from now on (:meth:`close`), and
        read from and write to ``memory``, the arena's."""
        self.plan = plan
        self.catalog = Catalog(plan, arena, policy)
        if tiers and memory is None:
            raise ValueError("lower tiers need the arena's memory")
        bytes_of = memory if memory is not None else memoryview(b"")
        self._shelves = [Shelf(lower, self.catalog) for lower in tiers]
        self._writers = [Writer(shelf, self.catalog, bytes_of) for shelf in self._shelves]
        self.promoter = Promoter(self._shelves, self.catalog, bytes_of, self._publish, clock)
        self._arena = arena
        self._ranks = ranks
        self._resume_interval = resume_interval
        self._prompt_only = prompt_only
        self._requests: dict[str, _Request] = {}
        self._pending: dict[int, _Pending] = {}
        self._store_order: deque[int] = deque()
        self._next_job = 1
        self.version = 0
        """Changes whenever :meth:`stats` may have."""
        self._lookups = self._hits = self._restored_tokens = self._failed_loads = 0

    # ---------------------------------------------------------------- requests

    def track(self, request: str, keys: Keys, prompt_tokens: int) -> None:
        """Make a request known; a second call for the same id changes nothing."""
        if request not in self._requests:
            self._requests[request] = _Request(keys, prompt_tokens)

    def forget(self, request: str) -> None:
        """A request has ended. Its loads and stores under way go on and are reported as ever."""
        if (state := self._requests.pop(request, None)) is not None:
            self._end_lease(state)

    def wants(self, request: str, reach: int) -> bool:
        """Whether :meth:`begin_store` has anything to decide at ``reach`` tokens. Cheap."""
        state = self._requests[request]
        if self._prompt_only and reach > state.prompt_tokens:
            reach = state.prompt_tokens
        return reach - state.seen >= self.plan.tokens_per_chunk and state.may_store

    def matched(self, request: str) -> int:
        """The boundary (tokens) that the last :meth:`match` has pinned; 0 for none."""
        node = self._requests[request].leased
        return self.catalog.tree.depth[node] * self.plan.tokens_per_chunk

    def release(self, request: str) -> None:
        """Give up what :meth:`match` has pinned for a request that will not load it."""
        self._end_lease(self._requests[request])

    # ---------------------------------------------------------------- loading

    def match(self, request: str, tokens: int, computed: int) -> int | None:
        """The boundary (tokens) at which a request of ``tokens`` tokens can resume; 0 for none.

        It is the greatest one above ``computed``, what the engine has itself, and below ``tokens``:
        the last token is always computed. What was found stays pinned until :meth:`begin_load`,
        :meth:`forget` or the next match for this request. Asking again is harmless.

        ``None``: more of the prefix is on its way from a lower tier; ask again after :meth:`step`.
        That ends, whatever the tier does.
        """
        state = self._requests[request]
        self._end_lease(state)
        state.may_store = True
        if not state.may_load:
            return 0
        self.version += 1
        found = self.catalog.match(state.keys, tokens - 1, computed)
        state.branch = found.branch
        state.resumed = max(computed, found.boundary)
        if found.node != ROOT:
            self.catalog.pin(found.node)
            state.leased = found.node
        if state.wait is None:
            self._lookups += 1
            for writer in self._writers:
                writer.found(found.deepest)
        if self._shelves and state.may_wait and self._waits(state, tokens):
            return None
        return found.boundary

    def _waits(self, state: _Request, tokens: int) -> bool:
        """Whether a request had better wait for a lower tier than resume where it can now."""
        size = self.plan.tokens_per_chunk
        reached = state.resumed // size
        if state.wait is None:
            state.wait = self.promoter.plan(state.keys, (tokens - 1) // size, reached)
        wait = state.wait
        if wait is not None and reached < wait.depth and self.promoter.waits(wait, state.keys):
            return True
        state.may_wait = wait is None
        state.wait = None
        return False

    def _end_lease(self, state: _Request) -> None:
        if state.leased != ROOT:
            self.catalog.unpin(state.leased)
            state.leased = ROOT

    def begin_load(self, request: str, computed: int, tables: Tables) -> Job:
        """The copies that restore what :meth:`match` found into the blocks just allocated.

        ``computed``: tokens that the engine has itself; blocks before them are left alone. Raises
        :class:`TransferError`, with the pin given up, if the allocated blocks are not exactly those
        that a resume at the boundary needs: then the request must be computed instead.
        """
        state = self._requests[request]
        node = state.leased
        if node == ROOT:
            raise TransferError(f"request {request!r} has no match to load")
        boundary = self.catalog.tree.depth[node] * self.plan.tokens_per_chunk
        try:
            copies = self._load_copies(node, boundary, computed, tables)
        except TransferError:
            state.may_load = False
            self._failed_loads += 1
            self._end_lease(state)
            raise
        state.leased = ROOT
        state.seen = boundary
        for writer in self._writers:
            writer.used(node)
        self._hits += 1
        self._restored_tokens += boundary - computed
        job = self._issue(copies)
        self._pending[job.id] = _Pending(set(range(self._ranks)), node=node, request=request)
        return job

    def _load_copies(self, node: int, boundary: int, computed: int, tables: Tables) -> list[Copy]:
        groups = self.plan.geometry.groups
        wanted: dict[int, range] = {}
        for group in self.plan.geometry.cacheable:
            size = group.tokens_per_block
            needed = group.resume_blocks(boundary)
            first = max(needed.start, computed // size)
            wanted[group.id] = range(first, needed.stop)
            table = tables[group.id]
            if len(table) < needed.stop:
                raise TransferError(
                    f"group {group.id}: {len(table)} blocks are allocated, a resume at token "
                    f"{boundary} needs {needed.stop}"
                )
            start = computed // size
            if any(table[start:first]) or NULL_BLOCK in table[first : needed.stop]:
                raise _unlike(group.id, table, range(start, needed.stop), first, boundary)
        copies = []
        for slot, layout, end, _ in self.catalog.reads(node, computed):
            parts = []
            for group_id, blocks in layout.counts:
                stop = end // groups[group_id].tokens_per_block
                first = max(stop - blocks, wanted[group_id].start)
                if first < stop:
                    ids = list(tables[group_id][first:stop])
                    parts.append(Part(group_id, first - (stop - blocks), ids))
            if parts:
                copies.append(Copy(slot, layout.counts, parts))
        return copies

    # ---------------------------------------------------------------- storing

    def begin_store(
        self, request: str, reach: int, tables: Tables, states: States | None = None
    ) -> Job | None:
        """The copies that store what a request will have computed once this step is done.

        ``reach``: tokens whose bytes are final by then and whose prefix hashes are known.
        ``tables``: current ones, with 0 where the engine has freed a block. ``states``: the states
        that exist now. ``None`` if there is nothing to store.
        """
        state = self._requests[request]
        size = self.plan.tokens_per_chunk
        limit = (min(reach, state.prompt_tokens) if self._prompt_only else reach) // size
        if limit * size <= state.seen or not state.may_store:
            return None
        tree = self.catalog.tree
        store = self.catalog.begin()
        node = tree.deepest(state.keys, limit, ready=False)
        depth = tree.depth[node]
        stop = min(limit, depth + _MAX_CHUNKS_PER_STORE)
        present = self._full_blocks_present(depth, stop, tables)
        complete = present == stop
        while depth < present:
            added = self.catalog.add_chunk(store, node, state.keys((depth + 1) * size))
            if added < 0:
                complete = False
                break
            node, depth = added, depth + 1
        if self.plan.has_resume_points:
            self._add_resumes(store, state, node, depth, tables, states or {})
        state.seen = stop * size if complete else limit * size
        if not (store.nodes or store.resumes):
            self.catalog.cancel(store)
            return None
        return self._issue_store(store, tables, states or {})

    def _full_blocks_present(self, depth: int, stop: int, tables: Tables) -> int:
        """How deep, from ``depth`` to at most ``stop`` chunks, the tables have all full blocks."""
        for group in self.plan.full_groups:
            count = self.plan.blocks_per_chunk(group)
            ids = tables[group.id][depth * count : stop * count]
            missing = ids.index(NULL_BLOCK) if NULL_BLOCK in ids else len(ids)
            stop = min(stop, depth + missing // count)
        return stop

    def _add_resumes(
        self,
        store: Store,
        state: _Request,
        node: int,
        depth: int,
        tables: Tables,
        states: States,
    ) -> None:
        """Make resume points of the boundaries that deserve one and can be captured now."""
        size, tree = self.plan.tokens_per_chunk, self.catalog.tree
        for boundary in self._deserving(state, depth * size, states):
            if store.resumes and self.catalog.busy:
                return
            at = tree.find(state.keys(boundary))
            if at < 0 or self.catalog.has_resume(at):
                continue
            present = self._whole_windows_present(boundary, tables) or all(
                self._window_blocks_present(boundary_of_piece, piece.layout, tables)
                for piece, boundary_of_piece in self.catalog.missing_pieces(at)
            )
            if present and self.catalog.add_resume(store, at):
                state.resumed = max(state.resumed, boundary)

    def _deserving(self, state: _Request, top: int, states: States) -> Iterator[int]:
        """Boundaries up to ``top`` that retention gives a resume point, the dearest first.

        The last boundary of the prompt (and the one before, where the prompt ends on a boundary,
        since its own last token must be computed again), the point where others branched off, and
        every ``resume_interval`` tokens. States exist only where the engine ends a step; there the
        first one in each interval is taken.
        """
        size, interval = self.plan.tokens_per_chunk, self._resume_interval
        prompt = state.prompt_tokens
        marks = {(prompt - 1) // size * size, prompt // size * size, state.branch}
        if self.plan.state_groups:
            for boundary in sorted(states):
                if (
                    0 < boundary <= top
                    and boundary % size == 0
                    and len(states[boundary]) == len(self.plan.state_groups)
                    and (boundary in marks or boundary // interval > state.resumed // interval)
                ):
                    yield boundary
            return
        yield from sorted((mark for mark in marks if state.seen < mark <= top), reverse=True)
        first = (state.seen // interval + 1) * interval
        yield from (at for at in range(first, top + 1, interval) if at not in marks)

    def _whole_windows_present(self, boundary: int, tables: Tables) -> bool:
        """Whether all that a resume at ``boundary`` needs of windows is there: mostly it is, and
        one look at each table is quicker than one at each chunk."""
        for window_set in self.plan.window_sets:
            for group in window_set.groups:
                needed = group.resume_blocks(boundary)
                ids = tables[group.id][needed.start : needed.stop]
                if len(ids) < len(needed) or NULL_BLOCK in ids:
                    return False
        return True

    def _window_blocks_present(self, end: int, layout: ChunkLayout, tables: Tables) -> bool:
        for group_id, count in layout.counts:
            stop = end // self.plan.geometry.groups[group_id].tokens_per_block
            ids = tables[group_id][stop - count : stop]
            if len(ids) < count or NULL_BLOCK in ids:
                return False
        return True

    def _issue_store(self, store: Store, tables: Tables, states: States) -> Job | None:
        groups = self.plan.geometry.groups
        copies = []
        for write in store.writes:
            parts = []
            for group_id, count in write.layout.counts:
                if write.kind == "state":
                    ids = [states[write.boundary][group_id]]
                else:
                    stop = write.boundary // groups[group_id].tokens_per_block
                    ids = list(tables[group_id][stop - count : stop])
                parts.append(Part(group_id, 0, ids))
            copies.append(Copy(write.slot, write.layout.counts, parts))
        job = self._issue(copies)
        waiting = set(range(self._ranks)) if copies else set()
        self._pending[job.id] = _Pending(waiting, store=store)
        self._store_order.append(job.id)
        self._end_stores()
        return job if copies else None

    # ---------------------------------------------------------------- reports

    def _issue(self, copies: list[Copy]) -> Job:
        self.version += 1
        job = Job(self._next_job, copies)
        self._next_job += 1
        return job

    def report(self, job: int, rank: int, ok: bool) -> None:
        """A rank has done its share of a job, or failed at it. Late and repeated ones are ignored.

        A store is published, and a load gives up its pin, once every rank has reported.
        """
        pending = self._pending.get(job)
        if pending is None or rank not in pending.waiting:
            return
        self.version += 1
        pending.waiting.discard(rank)
        pending.ok &= ok
        if pending.store is not None:
            self._end_stores()
        elif not pending.waiting:
            del self._pending[job]
            self.catalog.unpin(pending.node)
            if not pending.ok:
                self._failed_loads += 1
                if (state := self._requests.get(pending.request)) is not None:
                    # It is computed instead; a second try could fail in the same way for ever.
                    state.may_load = False
                    state.seen = 0

    def _end_stores(self) -> None:
        while self._store_order:
            pending = self._pending[self._store_order[0]]
            if pending.waiting or pending.store is None:
                return
            self.catalog.end(pending.store, pending.ok)
            if pending.ok and not pending.store.abandoned:
                for writer in self._writers:
                    writer.stored(pending.store)
            del self._pending[self._store_order.popleft()]

    # ---------------------------------------------------------------- lower tiers

    def step(self) -> None:
        """Take note of what lower tiers have done, and give them more to do. Call it in each step
        of the engine."""
        if self._shelves:
            busy = self.promoter.step()
            for writer in self._writers:
                busy |= writer.step()
            self.version += busy

    def pause(self, seconds: float) -> None:
        """For an engine with nothing else to do: let up to ``seconds`` pass, if requests wait for
        a lower tier, and less if something arrives."""
        if self.promoter.reading:
            self.promoter.pause(seconds)

    def _publish(self, store: Store) -> None:
        """Let a store without copies take its turn."""
        job = self._issue([])
        self._pending[job.id] = _Pending(set(), store=store)
        self._store_order.append(job.id)
        self._end_stores()

    def close(self, timeout: float = 2.0) -> None:
        """Let what is stored reach the lower tiers, for up to ``timeout`` seconds, and close them.
        Nothing else may be called afterwards."""
        deadline = time.monotonic() + timeout
        while any(w.pending or w.writing for w in self._writers) and time.monotonic() < deadline:
            self.step()
            time.sleep(0.001)
        for shelf in self._shelves:
            shelf.close()

    # ---------------------------------------------------------------- the whole

    @property
    def pending(self) -> int:
        """Jobs that some rank has not reported, and what waits to be named to a lower tier: for as
        long as there are any, the engine should go on stepping."""
        return len(self._pending) + sum(writer.pending for writer in self._writers)

    def reset(self) -> None:
        """Forget all chunks. Jobs under way go on, into slots that stay theirs until they end.

        Requests that are running now are not stored any more unless they start over: part of what
        they have computed belongs to the time before. Lower tiers keep what they have for the next
        start, but this loft does not find it any more: the engine may go on with other weights than
        those of its files.
        """
        self.version += 1
        for state in self._requests.values():
            self._end_lease(state)
            state.seen = state.resumed = state.branch = 0
            state.may_store = False
            state.wait = None
        self.promoter.reset()
        salt = os.urandom(16)
        for shelf in self._shelves:
            shelf.rename(salt)
        self.catalog.reset()

    def stats(self) -> Stats:
        """A snapshot."""
        uses = self._arena.use()
        return Stats(
            budget_bytes=self._arena.budget,
            live_bytes=self.catalog.live_bytes,
            slot_bytes=self._arena.used_bytes,
            slab_bytes=sum(use.slabs for use in uses) * self._arena.slab_bytes,
            chunks=len(self.catalog.tree),
            resume_points=self.catalog.resume_points,
            pending_stores=len(self._store_order),
            pending_loads=len(self._pending) - len(self._store_order),
            lookups=self._lookups,
            hits=self._hits,
            restored_tokens=self._restored_tokens,
            failed_loads=self._failed_loads,
            counters=self.catalog.counters,
            classes=uses,
            promotions=self.promoter.counters,
            tiers=tuple(
                LowerStats(s.name, stats, w.counters, s.broken_calls)
                for s, w in zip(self._shelves, self._writers, strict=True)
                if (stats := s.stats()) is not None
            ),
        )


def _unlike(
    group: int, table: Sequence[int], needed: range, first: int, boundary: int
) -> TransferError:
    """Which block of a table is allocated before ``first``, or is not from there on."""
    for index in needed:
        if (table[index] != NULL_BLOCK) != (index >= first):
            break
    problem = "missing" if index >= first else "allocated but not needed"
    return TransferError(
        f"group {group}: block {index} is {problem} for a resume at token {boundary}"
    )
