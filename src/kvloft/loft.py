"""The facade that an engine's adapter talks to: match, load, store, reset.

The adapter says what the engine's scheduler knows (prompts, block tables, how far a request is
computed) and passes the jobs that come back to the workers; each worker reports each job once. No
call blocks, copies chunk bytes or imports torch, so all of this may run on the scheduler's thread.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from kvloft.arena import Arena, ClassUse
from kvloft.catalog.catalog import Catalog, Chunks, Counters, Store
from kvloft.catalog.holds import Holds
from kvloft.catalog.policies import EvictionPolicy, Use
from kvloft.catalog.sightings import NO_VISIT, Visit
from kvloft.catalog.tree import NONE, READY, ROOT
from kvloft.errors import TransferError
from kvloft.hints import NO_HINTS, Hints, parse_hints
from kvloft.jobs import Copy, Job, Part
from kvloft.keys import Keys
from kvloft.lower import LowerTier, Promoter, PromotionCounters, Shelf, Wait, WriteCounters, Writer
from kvloft.plan import ChunkLayout, ChunkPlan
from kvloft.seals import Seals
from kvloft.tiers.base import TierStats

Tables = Sequence[Sequence[int]]
"""Per group (ring groups included), the request's block ids; 0 is the engine's null block."""

States = Mapping[int, Mapping[int, int]]
"""By boundary (tokens): by state group, the block that holds the state exactly there."""

_FAILURES_IN_A_ROW = 5
"""Failed loads, with none that worked in between, after which loading is left alone for a while: a
load that fails costs a request more than no cache at all."""
_LOAD_PAUSE_SECONDS = 60.0

_MAX_CHUNKS_PER_STORE = 512
"""A longer backlog is stored over several steps: bounds the time of a scheduler call."""

NULL_BLOCK = 0


@dataclass(slots=True)
class _Request:
    keys: Keys
    prompt_tokens: int
    hints: Hints = NO_HINTS
    visit: Visit | None = None
    """What is known of the prompt's prefixes; ``None`` until it has been looked up."""
    seen: int = 0
    """Tokens up to which storing has been decided; a multiple of G."""
    branch: int = 0
    """A boundary that deserves a resume point because others left the path there."""
    resumed: int = 0
    """The deepest boundary known to be a resume point of this request."""
    answer_end: int = 0
    """The latest boundary of the answer that was made a resume point."""
    leased: int = ROOT
    """The node that a match has pinned and no load has taken over yet."""
    may_load: bool = True
    may_store: bool = True
    may_wait: bool = True
    """For lower tiers; a request that has given up does not ask them again."""
    wait: Wait | None = None
    canary: bool | None = None
    """Computed in order to compare with what it would have been restored from; ``None``: not
    decided yet, since nothing could have been restored."""
    compared: int = 0
    """Tokens up to which a canary has been compared."""


@dataclass(slots=True)
class _Pending:
    """A job that some ranks have not reported yet."""

    waiting: set[int]
    ok: bool = True
    store: Store | None = None
    node: int = ROOT
    request: str = ""
    compares: bool = False
    cause: str = ""
    """Why the first rank that failed has failed."""
    bad_slots: set[int] = field(default_factory=set)


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
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By class (``full``, ``window``, ``state``): chunks in host memory, and their exact bytes."""
    pending_promotions: int = 0
    failures: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Jobs by ``(operation, cause)``."""
    forgotten_chunks: int = 0
    """Boundaries forgotten since their bytes, or those above them, could not be trusted."""
    loading: bool = True
    """Whether requests are restored at all: not while failures follow upon each other, and not
    any more once a canary has differed."""
    load_pauses: int = 0
    canaries: int = 0
    """Requests that were computed in order to compare."""
    compared_chunks: int = 0
    canary_differences: int = 0
    ignored_hints: int = 0
    pins: int = 0
    """Prefixes that a hint keeps in memory."""
    pinned_bytes: int = 0
    """Of these; what several share counts for each."""
    refused_pins: int = 0
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
    queued_paths: int = 0
    """That wait to be named to the tier."""


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
        seals: Seals | None = None,
        canary: float = 0.0,
        tell: Callable[[str, str], None] = lambda cause, message: None,
    ) -> None:
        """``tiers``: the quickest first; they belong to the loft from now on (:meth:`close`), and
        read from and write to ``memory``, the arena's. ``seals``: with them slots are verified.
        ``canary``: share of requests to compute and compare. ``tell``: told, by cause, what a
        person should know; it must not be once per request."""
        self.plan = plan
        self.catalog = Catalog(plan, arena, policy)
        if tiers and memory is None:
            raise ValueError("lower tiers need the arena's memory")
        bytes_of = memory if memory is not None else memoryview(b"")
        self._shelves = [Shelf(lower, self.catalog) for lower in tiers]
        self._writers = [
            Writer(shelf, self.catalog, bytes_of, seals, self._rotten) for shelf in self._shelves
        ]
        self.promoter = Promoter(self._shelves, self.catalog, bytes_of, self._publish, clock, seals)
        self._holds = Holds(self.catalog)
        self._ignored_hints = 0
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
        self._failures: Counter[tuple[str, str]] = Counter()
        self._failed_in_a_row = 0
        self._paused_until = 0.0
        self._load_pauses = 0
        self._forgotten_chunks = 0
        self._clock = clock
        self._tell = tell
        self._canary = canary
        self._sampler = random.Random()
        self._canaries = self._compared_chunks = self._canary_differences = 0

    # ---------------------------------------------------------------- requests

    def track(self, request: str, keys: Keys, prompt_tokens: int, params: object = None) -> None:
        """Make a request known; a second call for the same id changes nothing. ``params``: in which
        there may be hints (:mod:`kvloft.hints`)."""
        if request in self._requests:
            return
        hints, complaints = parse_hints(params)
        for complaint in complaints:
            self._ignored_hints += 1
            self._tell("hint", f"a request's hint is ignored: {complaint}")
        if hints.max_offload_tokens is not None:
            prompt_tokens = min(prompt_tokens, hints.max_offload_tokens)
        self._requests[request] = _Request(keys, prompt_tokens, hints)

    def forget(self, request: str) -> None:
        """A request has ended. Its loads and stores under way go on and are reported as ever."""
        if (state := self._requests.pop(request, None)) is not None:
            self._end_lease(state)
            if state.hints.pin_seconds:
                depth = max(state.seen, state.resumed) // self.plan.tokens_per_chunk
                self._holds.add(state.keys, depth, state.hints.pin_seconds, self._next_job)

    def wants(self, request: str, reach: int) -> bool:
        """Whether :meth:`begin_store` has anything to decide at ``reach`` tokens. Cheap."""
        state = self._requests[request]
        reach = self._reach(state, reach)
        return reach - state.seen >= self.plan.tokens_per_chunk and state.may_store

    def _reach(self, state: _Request, reach: int) -> int:
        """Tokens up to which a request may be stored."""
        hints = state.hints
        if hints.do_not_store:
            return 0
        if self._prompt_only:
            return min(reach, state.prompt_tokens)
        return reach if hints.max_offload_tokens is None else min(reach, hints.max_offload_tokens)

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
        size = self.plan.tokens_per_chunk
        if state.visit is None:
            chunks = min(tokens, state.prompt_tokens) // size
            state.visit = self.catalog.visit(state.keys, chunks)
            state.visit.factor = state.hints.factor
        if not (state.may_load and self.loading) or state.hints.do_not_load:
            return 0
        if (most := state.hints.max_load_tokens) is not None:
            tokens = min(tokens, computed + most + 1)
        self.version += 1
        found = self.catalog.match(state.keys, tokens - 1, computed, state.visit)
        state.branch = max(found.branch, state.visit.branch * size)
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
        if found.node != ROOT and self._canary and self._is_canary(state):
            self._end_lease(state)
            state.compared = computed // size * size
            return 0
        return found.boundary

    @property
    def loading(self) -> bool:
        """Whether requests are restored at all."""
        return not self._canary_differences and self._clock() >= self._paused_until

    def _is_canary(self, state: _Request) -> bool:
        if state.canary is None:
            state.canary = self._sampler.random() < self._canary
            self._canaries += state.canary
        return state.canary

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
            self._count_failed_load("blocks")
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
        for chunks in self.catalog.reads(node, computed):
            parts = []
            for group_id, blocks in chunks.layout.counts:
                stop = chunks.boundary // groups[group_id].tokens_per_block
                start = stop - blocks * len(chunks.slots)
                first = max(start, wanted[group_id].start)
                if first < stop:
                    parts.append(Part(group_id, first - start, list(tables[group_id][first:stop])))
            if parts:
                copies.append(Copy(chunks.slots, chunks.layout.counts, parts))
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
        limit = self._reach(state, reach) // size
        if limit * size <= state.seen or not state.may_store:
            return None
        visit = state.visit or NO_VISIT
        worthy = self._worthy_depth(visit, limit, state.keys)
        tree = self.catalog.tree
        node = tree.deepest(state.keys, limit, ready=False)
        depth = tree.depth[node]
        store = self.catalog.begin()
        stop = min(limit, depth + _MAX_CHUNKS_PER_STORE)
        present = self._full_blocks_present(depth, min(stop, max(worthy, depth)), tables)
        complete = present == stop
        prospect = self._prospect(state, node, visit)
        while depth < present:
            use, until = prospect, present
            if use is None:
                use = visit.use(depth + 1, state.keys((depth + 1) * size))
                until = min(present, visit.segment(depth + 1)[1])
            keys = [state.keys(end * size) for end in range(depth + 1, until + 1)]
            added = self.catalog.add_chunks(store, node, keys, use)
            node, depth = (added or [node])[-1], depth + len(added)
            if depth < until:
                complete = False
                break
        if self.plan.has_resume_points:
            self._add_resumes(store, state, node, min(depth, worthy), tables, states or {})
        state.seen = stop * size if complete else limit * size
        if not (store.nodes or store.resumes):
            self.catalog.cancel(store)
            return None
        return self._issue_store(store, tables, states or {})

    def _worthy_depth(self, visit: Visit, limit: int, keys: Keys) -> int:
        """How many of ``limit`` chunks the policy wants; what is known better is shallower. All of
        them while there is room for nothing else."""
        size = self.plan.tokens_per_chunk
        if self._arena.has_free_slabs:
            return limit
        for depth in (limit, *reversed(visit.depths)):
            if depth <= limit and self.catalog.policy.admits(visit.use(depth, keys(depth * size))):
                return depth
        return 0

    def _prospect(self, state: _Request, node: int, visit: Visit) -> Use | None:
        """What the chunks of a prompt are worth that will have a resume point at its end: nothing
        by themselves. ``None`` on models without resume points."""
        if not self.plan.has_resume_points:
            return None
        size = self.plan.tokens_per_chunk
        end = max(1, state.prompt_tokens // size)
        tree = self.catalog.tree
        above = tree.depth[node]
        if not (self.catalog.is_resume(node) and tree.has_children(node)):
            above = self.catalog.resume_above(node) if node != ROOT else 0
        worth = self.catalog.worth(end, min(above, end - 1))
        return visit.use(end, b"", worth)

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
        for boundary, planned in self._deserving(state, depth * size, states):
            if store.resumes and self.catalog.busy:
                return
            at = tree.find(state.keys(boundary))
            if at < 0 or self.catalog.has_resume(at):
                continue
            present = self._whole_windows_present(boundary, tables) or all(
                self._window_blocks_present(boundary_of_piece, piece.layout, tables)
                for piece, boundary_of_piece in self.catalog.missing_pieces(at)
            )
            if present and self.catalog.add_resume(store, at, self._resume_use(state, at, planned)):
                state.resumed = max(state.resumed, boundary)
                if boundary > state.prompt_tokens:
                    if state.answer_end:
                        store.replaced.append((state.keys(state.answer_end), at))
                    state.answer_end = boundary

    def _resume_use(self, state: _Request, node: int, planned: bool) -> Use:
        """What a resume point at ``node`` is worth; if it is one of those at regular intervals,
        not a place that anything else could have."""
        tree, visit = self.catalog.tree, state.visit or NO_VISIT
        depth = tree.depth[node]
        worth = self.catalog.worth(depth, self.catalog.resume_above(node)) if planned else 0.0
        return visit.use(depth, tree.key(node), worth)

    def _deserving(self, state: _Request, top: int, states: States) -> Iterator[tuple[int, bool]]:
        """Boundaries up to ``top`` that retention gives a resume point, the dearest first, and
        whether others may have to go for it.

        The last boundary of the prompt (and the one before, where the prompt ends on a boundary,
        since its own last token must be computed again), the point where others branched off, and
        every ``resume_interval`` tokens. States exist only where the engine ends a step; there the
        first one in each interval is taken.
        """
        size, interval = self.plan.tokens_per_chunk, self._resume_interval
        prompt = state.prompt_tokens
        marks = {(prompt - 1) // size * size, prompt // size * size, state.branch}
        visit = state.visit or NO_VISIT
        if top <= visit.known * size < prompt // size * size:
            marks.add(top)  # The rest of the prompt is not stored.
        if top > prompt:
            marks.add(top)  # Where an answer ends is known afterwards, when its windows are gone.
        if self.plan.state_groups:
            for boundary in sorted(states):
                if (
                    0 < boundary <= top
                    and boundary % size == 0
                    and len(states[boundary]) == len(self.plan.state_groups)
                    and (boundary in marks or boundary // interval > state.resumed // interval)
                ):
                    yield boundary, boundary in marks
            return
        for mark in sorted((mark for mark in marks if state.seen < mark <= top), reverse=True):
            yield mark, True
        first = (state.seen // interval + 1) * interval
        for boundary in range(first, top + 1, interval):
            if boundary not in marks:
                yield boundary, False

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
        copies = []
        for write in store.writes:
            parts = self._blocks_of(write, tables, states)
            if parts is None:  # A chunk without its bytes must not come to be.
                self._publish(store, cause="blocks")
                return None
            copies.append(Copy(write.slots, write.layout.counts, parts))
        if not copies:
            self._publish(store)
            return None
        job = self._issue(copies)
        self._pending[job.id] = _Pending(set(range(self._ranks)), store=store)
        self._store_order.append(job.id)
        return job

    def _blocks_of(self, chunks: Chunks, tables: Tables, states: States) -> list[Part] | None:
        """Where the engine has the bytes of whole chunks; ``None`` if it does not have all."""
        groups, parts, end = self.plan.geometry.groups, [], chunks.boundary
        for group_id, blocks in chunks.layout.counts:
            if chunks.kind == "state":
                count, ids = 1, [states.get(end, {}).get(group_id, NULL_BLOCK)]
            else:
                count, stop = blocks * len(chunks.slots), end // groups[group_id].tokens_per_block
                ids = list(tables[group_id][max(0, stop - count) : stop])
            if len(ids) < count or NULL_BLOCK in ids:
                return None
            parts.append(Part(group_id, 0, ids))
        return parts

    # ---------------------------------------------------------------- reports

    def _issue(self, copies: list[Copy]) -> Job:
        self.version += 1
        job = Job(self._next_job, copies)
        self._next_job += 1
        return job

    def report(
        self, job: int, rank: int, ok: bool, cause: str = "copy", bad_slots: Sequence[int] = ()
    ) -> None:
        """A rank has done its share of a job, or failed at it. Late and repeated ones are ignored.

        A store is published, and a load gives up its pin, once every rank has reported. ``cause``:
        why it has failed. ``bad_slots``: which of the slots that it read do not hold what was
        written.
        """
        pending = self._pending.get(job)
        if pending is None or rank not in pending.waiting:
            return
        self.version += 1
        pending.waiting.discard(rank)
        if not ok:
            pending.ok = False
            pending.cause = pending.cause or cause
            pending.bad_slots.update(bad_slots)
        if pending.store is not None:
            self._end_stores()
        elif not pending.waiting:
            del self._pending[job]
            if pending.compares:
                self._end_comparison(pending)
            else:
                self._end_load(pending)

    def _end_load(self, pending: _Pending) -> None:
        if pending.ok:
            self._failed_in_a_row = 0
            self.catalog.unpin(pending.node)
            return
        self._count_failed_load(pending.cause)
        if (state := self._requests.get(pending.request)) is not None:
            # It is computed instead; a second try could fail in the same way for ever.
            state.may_load = False
            state.seen = 0
        self._forget_unfit(pending.node, pending.bad_slots)

    def _forget_unfit(self, node: int, bad_slots: Collection[int]) -> None:
        """A resume at a pinned ``node`` has failed: end the pin and see to it that no other request
        fails in the same way. Where no slot is known to be bad, the whole of what was read goes
        that nobody but this path needs: it will be stored again by whoever computes it."""
        catalog, tree = self.catalog, self.catalog.tree
        holders = {catalog.holder_of(node, slot) for slot in bad_slots} - {NONE}
        top = min(holders, key=tree.depth.__getitem__) if holders else node
        while not holders and tree.only_child(top) and tree.parent[top] != ROOT:
            top = tree.parent[top]
        catalog.unpin(node)
        before = len(tree)
        if tree.state[top] == READY:
            catalog.forget(top)
            self._holds.drop_forgotten()
        self._forgotten_chunks += before - len(tree)
        self.version += 1

    def _count_failed_load(self, cause: str) -> None:
        self._failed_loads += 1
        self._failures["load", cause] += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
            self._failed_in_a_row = 0
            self._load_pauses += 1
            self._paused_until = self._clock() + _LOAD_PAUSE_SECONDS
            self._tell(
                "load_pause",
                f"{_FAILURES_IN_A_ROW} loads in a row have failed, the last one by {cause!r}; "
                f"requests are computed instead of restored for {_LOAD_PAUSE_SECONDS:.0f} s. If "
                "this goes on, look at the errors before this line and restart the engine",
            )

    def _rotten(self, node: int, slot: int) -> None:
        """The slot of a chunk that a resume at a pinned ``node`` needs has changed by itself."""
        self._failures["write", "checksum"] += 1
        self._forget_unfit(node, [slot])

    # ---------------------------------------------------------------- canaries

    def begin_comparison(
        self, request: str, reach: int, tables: Tables, states: States | None = None
    ) -> Job | None:
        """For a request that is computed in order to compare: what it would have been restored
        from, beside what it has computed by the end of this step. Arguments and answer as for
        :meth:`begin_store`, before which it is to be called."""
        state = self._requests[request]
        size, tree = self.plan.tokens_per_chunk, self.catalog.tree
        above, limit = state.compared, reach // size
        if not state.canary or limit * size <= above:
            return None
        state.compared = limit * size
        node = tree.deepest(state.keys, limit, ready=True)
        if self.catalog.is_resume(node) and tree.depth[node] == limit:
            chunks = list(self.catalog.reads(node, above))
        elif self.plan.full_layout is not None:
            chunks = list(self.catalog.full_chunks(node, above))
        else:
            chunks = []
        copies = []
        for some in chunks:
            blocks = self._blocks_of(some, tables, states or {})
            if blocks is not None:
                copies.append(Copy(some.slots, some.layout.counts, blocks))
        if not copies:
            return None
        self.catalog.pin(node)
        self._compared_chunks += sum(len(made.offsets) for made in copies)
        job = self._issue(copies)
        waiting = set(range(self._ranks))
        self._pending[job.id] = _Pending(waiting, node=node, request=request, compares=True)
        return job

    def _end_comparison(self, pending: _Pending) -> None:
        self.catalog.unpin(pending.node)
        if pending.ok:
            return
        self._failures["compare", pending.cause] += 1
        if pending.cause == "difference":
            self._canary_differences += 1
            self._tell(
                "canary",
                f"request {pending.request} was computed and holds other numbers than what it "
                "would have been restored from: what is stored is WRONG for this model. Nothing is "
                "restored any more until the engine is restarted; it goes on serving without. "
                "Please report this with the log of the start, and run 'kvloft store clear' on the "
                "directories of lower tiers before they are used again",
            )

    def _end_stores(self) -> None:
        while self._store_order:
            pending = self._pending[self._store_order[0]]
            if pending.waiting or pending.store is None:
                return
            if not pending.ok:
                self._failures["store", pending.cause] += 1
            self.catalog.end(pending.store, pending.ok)
            if pending.ok and not pending.store.abandoned:
                for writer in self._writers:
                    writer.stored(pending.store)
            del self._pending[self._store_order.popleft()]

    # ---------------------------------------------------------------- lower tiers

    def step(self) -> None:
        """Take note of what lower tiers have done, and give them more to do. Call it in each step
        of the engine."""
        self._holds.step(
            self._clock(), self._store_order[0] if self._store_order else self._next_job
        )
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

    def _publish(self, store: Store, cause: str = "") -> None:
        """Let a store without copies take its turn; with a ``cause``, as one that has failed."""
        job = self._issue([])
        self._pending[job.id] = _Pending(set(), ok=not cause, store=store, cause=cause)
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
        self._holds.release()
        self.promoter.reset()
        salt = os.urandom(16)
        for shelf in self._shelves:
            shelf.rename(salt)
        self.catalog.reset()

    def release_pins(self) -> None:
        """End what requests have pinned by hints."""
        self._holds.release()

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
            counters=copy(self.catalog.counters),
            held=self.catalog.held(),
            pending_promotions=self.promoter.pending,
            failures=dict(self._failures),
            forgotten_chunks=self._forgotten_chunks,
            loading=self.loading,
            load_pauses=self._load_pauses,
            canaries=self._canaries,
            compared_chunks=self._compared_chunks,
            ignored_hints=self._ignored_hints,
            pins=len(self._holds),
            pinned_bytes=self._holds.held_bytes,
            refused_pins=self._holds.refused,
            canary_differences=self._canary_differences,
            classes=uses,
            promotions=copy(self.promoter.counters),
            tiers=tuple(
                LowerStats(s.name, stats, copy(w.counters), s.broken_calls, w.pending)
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
