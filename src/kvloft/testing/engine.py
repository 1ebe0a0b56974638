"""A small paged engine that computes nothing but its own cache, and checks every byte it relies on.

It behaves as vLLM does wherever a cache in host memory could go wrong: one block table per group,
sliding windows and local chunks that lose their blocks as the sequence moves, states that exist
only where a step ends, prefill in pieces under a token budget, preemption, aborts, a prefix cache
of its own, loads that are done in the background, and several ranks that finish in any order.
Before each forward pass it looks at all bytes that the pass would attend to, on every rank; a chunk
restored wrongly, too early, into the wrong block or from a reused slot is an :class:`EngineError`.

Everything random comes from the ``random.Random`` it is given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import DEFAULT_POLICY, POLICIES
from kvloft.catalog.tree import READY, WRITING
from kvloft.geometry import Geometry, Group
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.plan import ChunkPlan
from kvloft.testing import audit, oracle
from kvloft.testing.manual import ManualTier
from kvloft.testing.pages import Hashes, Pages, PagesLayout, expected_pages, extend_hash
from kvloft.testing.pool import BlockPool
from kvloft.transfer import CpuCopier

WAITING, LOADING, RUNNING, ENDED = "waiting", "loading", "running", "ended"

_VOCABULARY = 50
_PATIENCE = 1e9
"""Seconds that requests wait for lower tiers: a test's tiers take as long as the test lets them."""


class EngineError(AssertionError):
    """Bytes, books or a hit are not what they must be."""


@dataclass
class Request:
    """A prompt on its way."""

    id: str
    tokens: list[int]
    prompt_tokens: int
    total_tokens: int
    """Where generation ends."""
    hashes: list[int] = field(default_factory=list)
    """Of the prefix that ends with each token."""
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    status: str = WAITING
    may_load: bool = True
    """No load of this request has failed."""
    fresh_context: bool = False
    """The context has come from a cache and has not been looked at yet."""
    waiting_for: int = 0
    """The load's job id."""
    loading: dict[int, list[int]] = field(default_factory=dict)
    """By group, the blocks that the load fills."""

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.hashes.append(extend_hash(self.hashes[-1] if self.hashes else 0, token))
            self.tokens.append(token)

    def key(self, boundary: int) -> bytes:
        """The engine's hash of the first ``boundary`` tokens."""
        return prefix_key(self.hashes[boundary - 1])

    def array(self) -> Hashes:
        """``hashes`` for numpy."""
        return np.array(self.hashes, dtype=np.uint64)


def prefix_key(prefix_hash: int) -> bytes:
    """The name of a prefix as the engine hands it to KVLoft."""
    return prefix_hash.to_bytes(8, "little") * 2


@dataclass
class _RankWork:
    """A rank's share of a job, not reported yet."""

    job: Job
    rank: int
    request: Request | None
    """Of a load."""
    done: bool = False
    ok: bool = True


@dataclass
class Totals:
    """What a run has seen; a test that wants to prove something happened reads these."""

    steps: int = 0
    hits: int = 0
    restored_tokens: int = 0
    local_hits: int = 0
    preemptions: int = 0
    aborts: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    finished: int = 0
    waits: int = 0
    """Times that a request was told to ask again."""


class Engine:
    """A scheduler and its ranks, driving one real loft, arena and copier per rank."""

    def __init__(
        self,
        plan: ChunkPlan,
        rng: random.Random,
        *,
        num_blocks: int,
        arena_bytes: int,
        step_tokens: int,
        resume_interval: int,
        prompt_only: bool = True,
        prefix_caching: bool = True,
        layout: PagesLayout = "own",
        failures: float = 0.0,
        tiers: Sequence[ManualTier] = (),
        write_all: bool = True,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        """``failures``: the chance that a rank's copy fails. ``tiers``: lower ones, which get on
        whenever the ranks do; ``write_all`` as in :class:`kvloft.lower.LowerTier`."""
        self.plan = plan
        self.geometry: Geometry = plan.geometry
        self.rng = rng
        self.totals = Totals()
        self._ranks = self.geometry.tensor_parallel
        self._step_tokens = step_tokens
        self._prefix_caching = prefix_caching
        self._failures = failures
        self._prompt_only = prompt_only
        self._has_draft = any(g.draft and g.cacheable for g in self.geometry.groups)
        states = [g.tokens_per_block for g in plan.state_groups]
        self._align = math.lcm(*states) if states else 0
        self._pages = [
            Pages(self.geometry, num_blocks, rank=rank, layout=layout)
            for rank in range(self._ranks)
        ]
        self.pool = BlockPool(num_blocks, self._poison)
        arena = Arena(arena_bytes, choose_slab_bytes(arena_bytes, plan.slot_sizes()))
        self.memory = np.full(arena_bytes, 0x5C, dtype=np.uint8)
        self.tiers = list(tiers)
        self.loft = Loft(
            plan, arena, POLICIES[policy](room_of(plan, arena_bytes)),
            ranks=self._ranks, resume_interval=resume_interval, prompt_only=prompt_only,
            tiers=[LowerTier(tier, write_all, _PATIENCE) for tier in tiers],
            memory=self.memory.data,
        )  # fmt: skip
        self._copiers = [
            CpuCopier(plan, pages.views, self.memory, rank=rank)
            for rank, pages in enumerate(self._pages)
        ]
        self.requests: list[Request] = []
        """Not ended, oldest first."""
        self._work: list[_RankWork] = []
        self._prefixes: dict[bytes, list[int]] = {}
        """By boundary key, the hashes of all tokens of the prefix: what a chunk should hold."""
        self._submitted = 0

    def _poison(self, blocks: list[int]) -> None:
        for pages in self._pages:
            pages.poison(blocks)

    # ---------------------------------------------------------------- what a user can do

    def submit(self, tokens: list[int], generate: int) -> Request:
        """A new request that ends after ``generate`` generated tokens."""
        self._submitted += 1
        request = Request(f"r{self._submitted}", [], len(tokens), len(tokens) + generate)
        request.extend(tokens)
        request.tables = [[] for _ in self.geometry.groups]
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request at once; blocks that a load still fills are kept until it is done."""
        self.totals.aborts += 1
        self._end(request)

    def preempt(self, request: Request) -> None:
        """Take all blocks of a running request; it starts over."""
        if request.status != RUNNING:
            raise ValueError(f"{request.id} is {request.status}")
        self.totals.preemptions += 1
        self._free(request)
        request.status = WAITING

    def reset(self, *, connector: bool) -> None:
        """Forget the engine's own prefix cache and, if asked to, all that is in the loft."""
        self.pool.drop_cache()
        if connector:
            self.loft.reset()

    # ---------------------------------------------------------------- the step

    def step(self) -> bool:
        """Schedule, compute and store once. Whether anything was computed."""
        self.totals.steps += 1
        self.loft.step()
        budget = self._step_tokens
        scheduled: list[tuple[Request, int]] = []
        for request in list(self.requests):
            if budget <= 0:
                break
            if request.status == WAITING:
                self._admit(request)
            if request.status != RUNNING:
                continue
            count = self._split(request, min(budget, len(request.tokens) - request.computed))
            if count <= 0:
                continue
            if not self._grow(request, request.computed + count, [r for r, _ in scheduled]):
                continue
            scheduled.append((request, count))
            budget -= count
        jobs: list[Job] = []
        for request, count in scheduled:
            end = request.computed + count
            final = self._final(request, end)
            size = self.plan.tokens_per_chunk
            for boundary in range(size, final + 1, size):
                if (key := request.key(boundary)) not in self._prefixes:
                    self._prefixes[key] = request.hashes[:boundary]
            states = self._states(request, end)
            job = self.loft.begin_store(request.id, final, request.tables, states)
            if job is not None:
                jobs.append(job)
        for request, count in scheduled:
            self._forward(request, request.computed + count)
        for job in jobs:
            self._store(job)
        for request, count in scheduled:
            self._advance(request, request.computed + count)
        return bool(scheduled)

    def _final(self, request: Request, end: int) -> int:
        """Tokens whose bytes will not be written again. A drafter looks one token ahead, so that it
        computes its last one again once the next token is known."""
        return min(end, len(request.tokens) - 1) if self._has_draft else end

    def _split(self, request: Request, count: int) -> int:
        """A prefill of a model with states ends on a state's boundary where it can."""
        if not self._align or count <= 0:
            return count
        start, align = request.computed, self._align
        end = start + count
        known = len(request.tokens)
        if start >= known - 1:
            return count
        if start % align:
            end = min(end, (start // align + 1) * align)
        elif end < known and end // align * align > start:
            end = end // align * align
        # The deepest states that this prompt, and a longer one, could resume from.
        for stop in ((known - 1) // align * align, known // align * align):
            if start < stop < end:
                end = stop
                break
        return end - start

    def _states(self, request: Request, end: int) -> dict[int, dict[int, int]]:
        if not self._align or end % self._align:
            return {}
        blocks = {
            g.id: request.tables[g.id][end // g.tokens_per_block - 1]
            for g in self.plan.state_groups
        }
        return {end: blocks}

    # ---------------------------------------------------------------- blocks

    def _skipped(self, group: Group, computed: int) -> int:
        """Tokens of ``group`` that a request which has computed so many no longer needs."""
        match group.kind:
            case "window":
                return max(0, computed - group.window + 1 - group.extra_retained_tokens)
            case "chunked_local":
                return computed // group.attention_chunk * group.attention_chunk
            case "state":
                return max(0, computed - 1)
            case _:
                return 0

    def _release_skipped(self, request: Request, computed: int) -> None:
        for group in self.geometry.groups:
            table = request.tables[group.id]
            for index in range(
                min(len(table), self._skipped(group, computed) // group.tokens_per_block)
            ):
                if table[index]:
                    self.pool.release(table[index])
                    table[index] = 0

    def _missing(self, group: Group, table: list[int], computed: int, end: int) -> list[int]:
        """Block-table positions that computing up to ``end`` needs; 0 = stays null, 1 = fresh."""
        if group.kind == "ring":
            return [1] * (1 - len(table))
        size = group.tokens_per_block
        wanted = range(len(table), math.ceil(end / size))
        if group.kind == "state":
            # One state before the step and one after it.
            return [int(index == wanted.stop - 1) for index in wanted]
        skipped = self._skipped(group, computed) // size
        return [int(index >= skipped) for index in wanted]

    def _allocate(self, request: Request, computed: int, end: int) -> bool:
        plans = [
            self._missing(group, request.tables[group.id], computed, end)
            for group in self.geometry.groups
        ]
        if sum(map(sum, plans)) > self.pool.free:
            return False
        for table, plan in zip(request.tables, plans, strict=True):
            for fresh in plan:
                table.append(self.pool.allocate(1)[0] if fresh else 0)
        return True

    def _grow(self, request: Request, end: int, protected: list[Request]) -> bool:
        """Blocks for a step of ``request`` up to ``end``, preempting younger ones if need be."""
        self._release_skipped(request, request.computed)
        while not self._allocate(request, request.computed, end):
            others = [
                r for r in self.requests
                if r.status == RUNNING and r is not request and r not in protected
            ]  # fmt: skip
            if not others:
                # Loads in progress will give their blocks back.
                if not protected and not self._work:
                    self.preempt(request)
                return False
            self.preempt(others[-1])
        return True

    def _free(self, request: Request) -> None:
        for table in request.tables:
            # The tail first, so that a prefix stays in the cache the longest.
            for block in reversed(table):
                if block:
                    self.pool.release(block)
            table.clear()
        request.computed = 0

    # ---------------------------------------------------------------- admission

    def _local_hit(self, request: Request) -> tuple[int, list[list[int]]]:
        """What the engine's own prefix cache has: tokens, and blocks per group with 0 for gaps."""
        unit = self.geometry.unit_tokens
        for boundary in range((len(request.tokens) - 1) // unit * unit, 0, -unit):
            if not self._prefix_caching:
                break
            tables: list[list[int]] = [[] for _ in self.geometry.groups]
            for group in self.geometry.cacheable:
                size = group.tokens_per_block
                needed = oracle.resume_blocks(group, boundary)
                for index in range(boundary // size):
                    block = 0
                    if index in needed:
                        name = (group.id, index, request.hashes[(index + 1) * size - 1])
                        block = self.pool.find(name)
                        if not block:
                            break
                    tables[group.id].append(block)
                if len(tables[group.id]) < boundary // size:
                    break
            else:
                return boundary, tables
        return 0, [[] for _ in self.geometry.groups]

    def _admit(self, request: Request) -> None:
        local, tables = self._local_hit(request)
        self.loft.track(request.id, request.key, request.prompt_tokens)
        expected = self._expected_match(request, local)
        size = self.plan.tokens_per_chunk
        for end in range(size, len(request.tokens) + 1, size):
            self._prefixes.setdefault(request.key(end), request.hashes[:end])
        boundary = self.loft.match(request.id, len(request.tokens), local)
        if boundary is None:
            self.totals.waits += 1
            return
        if boundary != expected:
            raise EngineError(
                f"{request.id}: a resume at {boundary} was found, the greatest is {expected} "
                f"({len(request.tokens)} tokens, {local} of them in the engine)"
            )
        idle = {block for table in tables for block in table if block and self.pool.is_idle(block)}
        wanted = sum(
            len(self._to_load(group, len(tables[group.id]), boundary))
            for group in self.geometry.cacheable
        )
        if wanted + len(idle) > self.pool.free or self.rng.random() < 0.1:
            # No room, or the engine changes its mind: asked again later, the pin stays.
            return
        request.tables = tables
        for table in tables:
            for block in table:
                if block:
                    self.pool.share(block)
        request.computed = local
        if local:
            self.totals.local_hits += 1
            request.fresh_context = True
        if boundary <= local:
            request.status = RUNNING
            return
        self._begin_load(request, local, boundary)

    def _to_load(self, group: Group, present: int, boundary: int) -> range:
        """Block-table positions that get a fresh block when a load up to ``boundary`` begins."""
        first = self._skipped(group, boundary) // group.tokens_per_block
        stop = boundary // group.tokens_per_block
        return range(min(max(first, present), stop), stop) if stop > present else range(0)

    def _begin_load(self, request: Request, local: int, boundary: int) -> None:
        first = [len(table) for table in request.tables]
        self._release_skipped(request, boundary)
        for group in self.geometry.cacheable:
            table = request.tables[group.id]
            fresh = self._to_load(group, len(table), boundary)
            table.extend([0] * (fresh.start - len(table)))
            table.extend(self.pool.allocate(len(fresh)))
        job = self.loft.begin_load(request.id, local, request.tables)
        request.loading = {
            g.id: [block for block in request.tables[g.id][first[g.id] :] if block]
            for g in self.geometry.cacheable
        }
        covered = sorted(
            (part.group, block) for copy in job.copies for part in copy.parts
            for block in part.block_ids
        )  # fmt: skip
        asked = sorted((g, block) for g, blocks in request.loading.items() for block in blocks)
        if covered != asked:
            raise EngineError(f"{request.id}: the load fills {covered}, allocated are {asked}")
        request.status, request.waiting_for = LOADING, job.id
        self.totals.hits += 1
        self.totals.restored_tokens += boundary - local
        request.computed = boundary
        request.fresh_context = True
        self._work.extend(_RankWork(job, rank, request) for rank in range(self._ranks))

    def stored(self) -> tuple[set[oracle.StoredBlock], set[int], set[int]]:
        """Every block that a published chunk holds, every boundary that is resident, and every
        boundary at which a resume point is being stored."""
        blocks: set[oracle.StoredBlock] = set()
        known: set[int] = set()
        pending: set[int] = set()
        catalog = self.loft.catalog
        for node in audit.nodes(catalog):
            name = int.from_bytes(catalog.tree.key(node)[:8], "little")
            if catalog.tree.state[node] == READY:
                known.add(name)
            if catalog._resume[node] == WRITING:
                pending.add(name)
        for chunk in audit.held(catalog):
            if not chunk.published:
                continue
            hashes = self._prefixes[chunk.key]
            for group_id, count in chunk.layout.counts:
                size = self.geometry.groups[group_id].tokens_per_block
                stop = chunk.boundary // size
                for index in range(stop - count, stop):
                    blocks.add((group_id, index, hashes[(index + 1) * size - 1]))
        return blocks, known, pending

    def _expected_match(self, request: Request, local: int) -> int:
        if not request.may_load:
            return 0
        stored, known, pending = self.stored()
        boundary = oracle.greatest_boundary(
            self.geometry, self.plan.tokens_per_chunk, len(request.tokens),
            lambda end: request.hashes[end - 1], stored, known, pending,
        )  # fmt: skip
        return boundary if boundary > local else 0

    # ---------------------------------------------------------------- computing

    def _check_context(self, request: Request) -> None:
        hashes = request.array()
        position = request.computed
        for group in self.geometry.cacheable:
            start = self._skipped(group, position)
            if start >= position:
                continue
            first = start // group.tokens_per_block
            blocks = request.tables[group.id][first : math.ceil(position / group.tokens_per_block)]
            if 0 in blocks:
                raise EngineError(f"{request.id}: group {group.id} lacks blocks it attends to")
            end = position
            if group.draft and position == len(request.tokens) - 1:
                end -= 1  # It is about to be computed again.
            for rank, pages in enumerate(self._pages):
                if end > start and pages.wrong(group, first, blocks, hashes, start, end):
                    raise EngineError(
                        f"{request.id}: group {group.id} ({group.kind}) on rank {rank} has wrong "
                        f"bytes in tokens {start} to {end}"
                    )

    def _forward(self, request: Request, end: int) -> None:
        if request.fresh_context or self.rng.random() < 0.2:
            self._check_context(request)
            request.fresh_context = False
        hashes = request.array()
        for group in self.geometry.cacheable:
            size = group.tokens_per_block
            if group.kind == "state":
                first = math.ceil(end / size) - 1
                start = 0
            else:
                # A drafter has to come back to the token that it computed in want of the next.
                start = max(0, request.computed - 1) if group.draft else request.computed
                start = max(start, self._skipped(group, request.computed))
                first = start // size
            blocks = request.tables[group.id][first : math.ceil(end / size)]
            if 0 in blocks:
                raise EngineError(f"{request.id}: group {group.id} computes into the null block")
            for pages in self._pages:
                pages.write(group, first, blocks, hashes, start, end)
                if group.draft and end == len(request.tokens):
                    pages.write(group, first, blocks, ~hashes, end - 1, end)

    def _store(self, job: Job) -> None:
        before = self.memory.copy()
        for rank, copier in enumerate(self._copiers):
            ok = self.rng.random() >= self._failures
            if ok:
                copier.store(job)
            else:
                self.totals.failed_stores += 1
                for copy in job.copies:
                    layout = self.plan.layout(copy.counts)
                    for offset in copy.offsets:
                        self.memory[offset : offset + layout.nbytes] = 0xEE
            self._work.append(_RankWork(job, rank, None, done=True, ok=ok))
        for copy in job.copies:
            nbytes = self.plan.layout(copy.counts).nbytes
            for offset in copy.offsets:
                before[offset : offset + nbytes] = self.memory[offset : offset + nbytes]
        if not np.array_equal(before, self.memory):
            raise EngineError(f"store {job.id} has written outside its slots")

    def _advance(self, request: Request, end: int) -> None:
        if request.status != RUNNING:
            return
        start, request.computed = request.computed, end
        if self._prefix_caching:
            self._cache_blocks(request, start, end)
        if end < len(request.tokens):
            return
        if len(request.tokens) < request.total_tokens:
            request.extend([request.hashes[-1] % _VOCABULARY])
            return
        self.totals.finished += 1
        self._end(request)

    def _cache_blocks(self, request: Request, start: int, end: int) -> None:
        for group in self.geometry.cacheable:
            size = group.tokens_per_block
            table = request.tables[group.id]
            if group.kind == "state":
                indices = [end // size - 1] if end % size == 0 else []
            else:
                first = max(0, start - 1) if group.draft else start
                last = self._final(request, end)
                indices = list(range(first // size, last // size))
            for index in indices:
                if index >= 0 and table[index]:
                    name = (group.id, index, request.hashes[(index + 1) * size - 1])
                    self.pool.cache(table[index], name)

    def _end(self, request: Request) -> None:
        self.loft.forget(request.id)
        self.requests.remove(request)
        if request.status != LOADING:
            self._free(request)
        request.status = ENDED

    # ---------------------------------------------------------------- what ranks do meanwhile

    def deliver(self) -> bool:
        """Let one rank get on: do its copy, or report what it has done. Whether there was work."""
        for tier in self.tiers:
            if tier.pending and self.rng.random() < 0.5:
                return tier.work()
        if not self._work:
            return any(tier.work() for tier in self.tiers)
        work = self.rng.choice(self._work)
        if work.done:
            self._work.remove(work)
            self.loft.report(work.job.id, work.rank, work.ok)
            if work.request is not None:
                self._load_reported(work)
            return True
        work.done = True
        work.ok = self.rng.random() >= self._failures
        if work.ok:
            self._load(work)
        return True

    def _load(self, work: _RankWork) -> None:
        pages, request = self._pages[work.rank], work.request
        assert request is not None
        before = pages.snapshot()
        memory = self.memory.copy()
        self._copiers[work.rank].load(work.job)
        loaded = {block for blocks in request.loading.values() for block in blocks}
        stray = pages.changed_blocks(before) - loaded
        if stray or not np.array_equal(memory, self.memory):
            raise EngineError(f"load {work.job.id} has written to blocks {stray} or to the arena")
        for group, blocks in request.loading.items():
            for block in blocks:
                if not pages.padding_intact(group, block):
                    raise EngineError(f"load {work.job.id} has written beside block {block}")

    def _load_reported(self, work: _RankWork) -> None:
        request = work.request
        assert request is not None
        if not work.ok:
            request.may_load = False
        if any(other.request is request for other in self._work):
            return
        failed = not request.may_load
        request.loading = {}
        if request.status == ENDED:
            self._free(request)
        elif failed:
            self.totals.failed_loads += 1
            self._free(request)
            request.status = WAITING
        else:
            request.status = RUNNING

    # ---------------------------------------------------------------- looking

    def check(self) -> None:
        """Compare the loft's books with each other, and every published chunk with its prefix."""
        catalog = self.loft.catalog
        audit.check(catalog, self.loft.promoter.reserved())
        for chunk in audit.held(catalog):
            if chunk.published:
                self._check_chunk(chunk)
        for pages in self._pages:
            for group in pages.views:
                if not pages.padding_intact(group, 0) or any(
                    (view[0] != view[0].flat[0]).any() for view in pages.views[group]
                ):
                    raise EngineError("the null block has been written")

    def _check_chunk(self, chunk: audit.Held) -> None:
        hashes = np.array(self._prefixes[chunk.key], dtype=np.uint64)
        at = chunk.slot
        shared_first = sorted(
            ((rank, group_id, count) for group_id, count in chunk.layout.counts
             for rank in range(1 if self.geometry.groups[group_id].replicated else self._ranks)),
            key=lambda item: (
                -1 if self.geometry.groups[item[1]].replicated else item[0],
                item[1],
            ),
        )  # fmt: skip
        for rank, group_id, count in shared_first:
            group = self.geometry.groups[group_id]
            first = chunk.boundary // group.tokens_per_block - count
            layer = 0
            for run in group.layers:
                right, _ = expected_pages(
                    group, run.page_bytes, range(layer, layer + run.count), rank,
                    first, count, hashes, 0, chunk.boundary,
                )  # fmt: skip
                layer += run.count
                found = self.memory[at : at + right.size].reshape(right.shape)
                if not np.array_equal(found, right):
                    raise EngineError(
                        f"the {chunk.kind} chunk at {chunk.boundary} holds wrong bytes of group "
                        f"{group_id}, rank {rank}"
                    )
                at += right.size
        if at - chunk.slot != chunk.layout.nbytes:
            raise EngineError("a chunk's layout does not add up")

    def run(self, steps: int = 10_000) -> None:
        """Step and deliver until every request has ended and every job is reported."""
        for _ in range(steps):
            if not self.requests and not self._work:
                return
            self.step()
            for _ in range(1 + self._ranks):
                self.deliver()
        raise EngineError(f"requests are stuck: {[(r.id, r.status) for r in self.requests]}")

    def close(self) -> None:
        """Run to the end, then look for anything that is left behind."""
        self.run()
        self.check()
        while self.loft.pending or any(tier.work() for tier in self.tiers):
            self.loft.step()
        self.loft.step()
        if self.loft.pending:
            raise EngineError(f"{self.loft.pending} jobs are pending")
        audit.check_idle(self.loft.catalog)
        if self.pool.free != self.pool.num_blocks - 1:
            raise EngineError("blocks of the engine are in use by nobody")
        self.loft.reset()
        audit.check_empty(self.loft.catalog)
