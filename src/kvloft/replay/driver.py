"""One engine's life on a trace: the real loft, its catalog and its policy; memory is books alone.

Requests are served one after the other. The engine computes a prompt in steps, and its prefix cache
is an LRU of chunks; states exist where a step ends. No bytes are moved, so an hour of a service
takes seconds.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import POLICIES
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.plan import ChunkPlan, auto_resume_interval
from kvloft.replay.books import BookTier
from kvloft.replay.trace import Request, Trace, boundary_ids

_KEY_BYTES = 16
_POINTS = 120
"""Of a timeline."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run replays a trace with."""

    plan: ChunkPlan
    policy: str
    budget_bytes: int
    disk_bytes: int = 0
    engine_blocks: int = 0
    """Chunks that the engine's own prefix cache holds."""
    step_tokens: int = 8192
    """Tokens of a prompt that the engine computes at once."""
    resume_interval: int = 0
    """Tokens; 0 for the connector's own choice."""
    prefill_rate: float = 10_000.0
    """Tokens a second that the engine computes of prompts."""
    link_rate: float = 25e9
    """Bytes a second from host memory to the engine's."""


class EngineCache:
    """The engine's own prefix cache: its chunks, the least recently used one goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, None] = {}

    def serve(self, ids: Sequence[int], limit: int) -> int:
        """Chunks of a prompt that are there, no more than ``limit``; all of them are afterwards."""
        if not self._limit:
            return 0
        held, found = self._held, 0
        while found < limit and ids[found] in held:
            found += 1
        for name in reversed(ids):  # The beginning of a prompt is used last, and so goes last.
            held.pop(name, None)
            held[name] = None
        while len(held) > self._limit:
            del held[next(iter(held))]
        return found


@dataclass(slots=True)
class _Counts:
    """Over the requests that are measured."""

    prompt_tokens: int = 0
    engine_tokens: int = 0
    restored_tokens: int = 0
    hit_requests: int = 0
    saved_seconds: float = 0.0


@dataclass(slots=True)
class _Point:
    """A moment of a run."""

    request: int
    time: float
    held: dict[str, tuple[int, int]]
    token_hit_rate: float


@dataclass(slots=True)
class Run:
    """A replay that is under way or done."""

    setting: Setting
    loft: Loft
    counts: _Counts = field(default_factory=_Counts)
    calls: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each call on the scheduler's thread."""
    points: list[_Point] = field(default_factory=list)
    seconds: float = 0.0
    most_bytes: int = 0
    """The most that slots took at once."""
    restored_bytes: int = 0
    fit: float = 1.0
    """Exact bytes of what is held to the slots that it lies in, at its worst."""


def chunk_names(ids: Sequence[int]) -> list[bytes]:
    """A hash-like name of 16 bytes for each id: the finalizer of splitmix64 (Steele et al., 2014)
    and the id itself."""
    out = np.empty((len(ids), 2), dtype=np.uint64)
    found = np.asarray(ids, dtype=np.uint64)
    mixed = found + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out[:, 0], out[:, 1] = mixed ^ (mixed >> np.uint64(31)), found
    raw = out.tobytes()
    return [raw[at : at + _KEY_BYTES] for at in range(0, len(raw), _KEY_BYTES)]


class Replayer:
    """Serves requests, one after the other."""

    def __init__(self, setting: Setting, trace: Trace) -> None:
        plan = setting.plan
        self._setting = setting
        self._plan = plan
        self._tokens_per_block = trace.tokens_per_block
        slab = choose_slab_bytes(setting.budget_bytes, plan.slot_sizes())
        self._now = 0.0
        tiers = []
        if setting.disk_bytes:
            book = BookTier(setting.disk_bytes)
            tiers.append(LowerTier(book, True, 1e9))
        policy = POLICIES[setting.policy](room_of(plan, setting.budget_bytes))
        self._arena = Arena(setting.budget_bytes, slab)
        loft = Loft(
            plan, self._arena, policy, ranks=1,
            resume_interval=setting.resume_interval or auto_resume_interval(plan),
            tiers=tiers, memory=memoryview(b""), clock=lambda: self._now,
        )  # fmt: skip
        self.run = Run(setting, loft)
        self._engine = EngineCache(setting.engine_blocks)
        longest = max((r.prompt_tokens for r in trace.requests), default=0)
        least = min(g.tokens_per_block for g in plan.geometry.groups)
        self._blocks = [1] * (longest // least + 2)
        """A block table that has everything."""
        self._served = 0

    def serve(self, request: Request, *, measured: bool) -> None:
        """One request from its look-up to its end."""
        plan, loft, run = self._plan, self.run.loft, self.run
        size, tokens = plan.tokens_per_chunk, request.prompt_tokens
        self._now = request.time
        self._served += 1
        ids = boundary_ids(request, self._tokens_per_block, size)
        computed = self._engine.serve(ids, (tokens - 1) // size) * size
        name, names = str(self._served), chunk_names(ids)

        def keys(boundary: int) -> bytes:
            return names[boundary // size - 1]

        tokens = min(tokens, len(ids) * size + 1)
        loft.track(name, keys, tokens)
        boundary = self._call(loft.match, name, tokens, computed)
        while boundary is None:
            self._call(loft.step)
            boundary = self._call(loft.match, name, tokens, computed)
        nbytes = 0
        if boundary > computed:
            nbytes = self._load(name, computed, boundary)
        self._store(name, max(computed, boundary), min(tokens, len(ids) * size))
        self._call(loft.forget, name)
        while loft.pending:
            self._call(loft.step)
        run.most_bytes = max(run.most_bytes, self._arena.used_bytes)
        if self._arena.used_bytes:
            run.fit = min(run.fit, loft.catalog.live_bytes / self._arena.used_bytes)
        if measured:
            self._count(request, computed, max(0, boundary - computed), nbytes)

    def _count(self, request: Request, computed: int, restored: int, nbytes: int) -> None:
        counts, setting = self.run.counts, self._setting
        counts.prompt_tokens += request.prompt_tokens
        counts.engine_tokens += computed
        counts.restored_tokens += restored
        counts.hit_requests += restored > 0
        seconds = restored / setting.prefill_rate - nbytes / setting.link_rate
        counts.saved_seconds += seconds
        self.run.restored_bytes += nbytes

    def _load(self, name: str, computed: int, boundary: int) -> int:
        """Restore a request; the bytes that this takes."""
        tables = []
        for group in self._plan.geometry.groups:
            needed = group.resume_blocks(boundary) if group.cacheable else range(0)
            first = max(needed.start, computed // group.tokens_per_block)
            tables.append([0] * first + self._blocks[: max(0, needed.stop - first)])
        job = self._call(self.run.loft.begin_load, name, computed, tables)
        self._report(job)
        return sum(self._plan.layout(copy.counts).nbytes * len(copy.offsets) for copy in job.copies)

    def _store(self, name: str, start: int, end: int) -> None:
        loft, setting, plan = self.run.loft, self._setting, self._plan
        size = plan.tokens_per_chunk
        tables = [self._blocks] * len(plan.geometry.groups)
        step = max(size, setting.step_tokens // size * size)
        reach = start
        while reach < end:
            reach = min(reach + step, end)
            whole = reach // size * size
            states = {whole: {g.id: 1 for g in plan.state_groups}}
            while self._call(loft.wants, name, reach):
                self._report(self._call(loft.begin_store, name, reach, tables, states))

    def _report(self, job: Job | None) -> None:
        if job is not None:
            self._call(self.run.loft.report, job.id, 0, True)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        out = function(*arguments)
        self.run.calls.append(time.perf_counter() - start)
        return out


def replay(
    trace: Trace,
    setting: Setting,
    *,
    measured_from: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Replay a whole trace.

    ``measured_from``: the first request that counts, by default the one half-way: those before it
    find a cache that is being filled. ``tell``: told requests done and in all.
    """
    replayer = Replayer(setting, trace)
    run, total = replayer.run, len(trace.requests)
    measured_from = total // 2 if measured_from is None else measured_from
    every = max(1, total // _POINTS)
    begun = time.perf_counter()
    for index, request in enumerate(trace.requests):
        replayer.serve(request, measured=index >= measured_from)
        if index % every == every - 1 or index == total - 1:
            counts = run.counts
            rate = (counts.engine_tokens + counts.restored_tokens) / max(1, counts.prompt_tokens)
            run.points.append(_Point(index, request.time, run.loft.catalog.held(), rate))
            tell(index + 1, total)
    run.seconds = time.perf_counter() - begun
    run.loft.close()
    return run
