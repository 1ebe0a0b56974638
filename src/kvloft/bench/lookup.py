"""The scheduler's side, beside vLLM's own offloading: look-ups, store bookkeeping, slow calls.

No memory is behind the arenas here; only the books are kept. Garbage collection is on, as it is in
an engine.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.bench.report import Result, header, progress, table
from kvloft.bench.timing import percentiles, speed_ratio, take_turns
from kvloft.catalog.policies import LRU
from kvloft.geometry import Geometry, Group, Layers, load, make_geometry
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan, auto_resume_interval

BUDGET_LOOKUP = 20.0
"""Times as fast as vLLM's, for a prefix of a million tokens."""
BUDGET_P999_MS = 2.0
BUDGET_MAX_MS = 10.0
BUDGET_HELD = 1.02

BLOCK = 16
STEP_TOKENS = 2048
"""What one engine step computes: vLLM's default limit."""

_T = TypeVar("_T")


def uniform_geometry() -> Geometry:
    """One full group; its pages are as small as a slot can be."""
    return make_geometry([Group(0, "full", BLOCK, (Layers(16, 256, 256),))], BLOCK)


def mixed_geometry() -> Geometry:
    """One full group and eight windows of two lengths: nine block tables."""
    layers = (Layers(16, 256, 256),)
    groups = [Group(0, "full", BLOCK, layers)]
    groups += [
        Group(n, "window", BLOCK, layers, window=128 if n % 2 else 1024) for n in range(1, 9)
    ]
    return make_geometry(groups, BLOCK)


def make_loft(geometry: Geometry, budget: int, tokens_per_chunk: int) -> Loft:
    """A loft without memory behind it."""
    plan = ChunkPlan(geometry, tokens_per_chunk)
    arena = Arena(budget, choose_slab_bytes(budget, plan.slot_sizes()))
    interval = auto_resume_interval(plan)
    return Loft(plan, arena, LRU(), ranks=1, resume_interval=interval)


class Prompt:
    """A prompt's prefix hashes; random ones do, as all that matters is that they are equal."""

    def __init__(self, rng: random.Random, tokens: int, head: Sequence[bytes] = ()) -> None:
        count = tokens // BLOCK
        noise = rng.randbytes(32 * max(0, count - len(head)))
        self.hashes = list(head[:count])
        self.hashes += [noise[n : n + 32] for n in range(0, len(noise), 32)]
        self.tokens = tokens

    def __call__(self, tokens: int) -> bytes:
        return self.hashes[tokens // BLOCK - 1]


def store_all(loft: Loft, name: str, prompt: Prompt) -> None:
    """Store a prompt as the engine would compute it, step by step."""
    blocks = prompt.tokens // BLOCK
    tables = [list(range(1, blocks + 1)) for _ in loft.plan.geometry.groups]
    loft.track(name, prompt, prompt.tokens)
    loft.match(name, prompt.tokens, 0)
    reach = 0
    while reach < prompt.tokens:
        reach = min(prompt.tokens, reach + STEP_TOKENS)
        if (job := loft.begin_store(name, reach, tables)) is not None:
            loft.report(job.id, 0, True)
    loft.forget(name)


def _peer(geometry: Geometry, num_chunks: int) -> Any:
    """vLLM's side; ``None`` where vLLM is not installed."""
    try:
        from kvloft.engines.vllm.bench_peers import Peer
    except ImportError:
        return None
    return Peer(geometry, num_chunks)


def run(*, quick: bool) -> Result:
    """All parts; about four minutes, a few seconds if ``quick``."""
    result = header("lookup", quick=quick)
    result["lookup"] = _lookup(quick)
    result["bookkeeping"] = _bookkeeping(quick)
    chunks = 20_000 if quick else 1_000_000
    calls = 300 if quick else 6_000
    result["tail"] = {
        "uniform": _tail(uniform_geometry(), chunks, calls),
        "mixed": _tail(mixed_geometry(), chunks, calls),
        "vllm": _peer_tail(20_000 if quick else 410_000, calls),
    }
    result["held"] = [_held(name) for name in ("gpt-oss-120b", "deepseek-v4-flash")]
    return result


# ---------------------------------------------------------------------------------- look-ups


def _lookup(quick: bool) -> Result:
    """The longest resume of a prefix that is all there."""
    sizes = (10_000, 50_000) if quick else (10_000, 100_000, 1_000_000)
    geometry = mixed_geometry()
    blocks = sum(size // BLOCK + 1 for size in sizes)
    loft = make_loft(geometry, 40 * blocks * 4096, BLOCK)
    peer = _peer(geometry, 9 * blocks)
    rng = random.Random(1)
    rows = []
    for size in sizes:
        progress(f"look-ups in a prefix of {size:,} tokens")
        # One token more than whole chunks: the last one is computed in any case.
        prompt = Prompt(rng, size // BLOCK * BLOCK)
        asked = prompt.tokens + 1
        store_all(loft, "store", prompt)
        repeats = 100

        def ours(prompt: Prompt = prompt, asked: int = asked) -> int:
            found = 0
            for _ in range(repeats):
                loft.track("ask", prompt, asked)
                found = loft.match("ask", asked, 0)
                loft.forget("ask")
            return found

        assert ours() == prompt.tokens
        sides: dict[str, Callable[[], object]] = {"kvloft": ours}
        if peer is not None:
            for group in range(len(geometry.groups)):
                peer.store("store", prompt.hashes, group)
            request = peer.new_request("ask", prompt.hashes, asked)
            assert peer.match(request) == prompt.tokens

            def first(prompt: Prompt = prompt, asked: int = asked) -> None:
                peer.match(peer.new_request("new", prompt.hashes, asked))

            sides["vllm"] = lambda request=request: peer.match_again(request)
            sides["vllm first"] = first
        seconds = take_turns(sides, 2 if quick else 7)
        each = [s / repeats for s in seconds["kvloft"]]
        row: Result = {"tokens": prompt.tokens, "kvloft_us": round(min(each) * 1e6, 2)}
        if peer is not None:
            row["vllm_us"] = round(min(seconds["vllm"]) * 1e6, 2)
            row["vllm_first_us"] = round(min(seconds["vllm first"]) * 1e6, 2)
            row["ratio"] = round(speed_ratio(each, seconds["vllm"]), 1)
        rows.append(row)
    return {"groups": len(geometry.groups), "rows": rows}


# ---------------------------------------------------------------------------------- bookkeeping


def _bookkeeping(quick: bool) -> Result:
    """What it costs to book a chunk's store, from begin to end, without evictions."""
    progress("store bookkeeping")
    tokens, rounds = (16_384, 2) if quick else (131_072, 9)
    geometry = uniform_geometry()
    chunks = tokens // BLOCK
    loft = make_loft(geometry, 4096 * chunks * (rounds + 3), BLOCK)
    peer = _peer(geometry, chunks * (rounds + 3))
    rng = random.Random(2)
    prompts = [Prompt(rng, tokens) for _ in range(rounds + 1)]
    ours, theirs = iter(prompts), iter(prompts)

    def kvloft() -> None:
        store_all(loft, "store", next(ours))

    def vllm() -> None:
        prompt = next(theirs)
        context = peer.context("store")
        step = STEP_TOKENS // BLOCK
        for start in range(0, chunks, step):
            keys = peer.keys(prompt.hashes[start : start + step])
            peer.end_store(context, keys, peer.begin_store(context, keys))
        peer.finish(context)

    sides: dict[str, Callable[[], object]] = {"kvloft": kvloft}
    if peer is not None:
        sides["vllm manager"] = vllm
    seconds = take_turns(sides, rounds)
    out: Result = {
        f"{name.replace(' ', '_')}_us_per_chunk": round(min(s) / chunks * 1e6, 2)
        for name, s in seconds.items()
    }
    if peer is not None:
        out["ratio"] = round(speed_ratio(seconds["kvloft"], seconds["vllm manager"]), 2)
    return out


# ---------------------------------------------------------------------------------- slow calls


@dataclass
class _Clock:
    """Times single calls by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, name: str, call: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        out = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return out

    def result(self) -> Result:
        every = [s for calls in self.seconds.values() for s in calls]
        return {
            "all": percentiles(every),
            **{name: percentiles(calls) for name, calls in self.seconds.items()},
        }


def _prompts(rng: random.Random, recent: deque[Prompt]) -> Iterator[Prompt]:
    """Half of the prompts go on from an earlier one; lengths from 1,000 to 32,000 tokens."""
    while True:
        length = round(1000 * 32 ** rng.random())
        head: Sequence[bytes] = ()
        if recent and rng.random() < 0.5:
            before = rng.choice(recent)
            head = before.hashes[: rng.randint(1, len(before.hashes))]
            length += len(head) * BLOCK
        yield Prompt(rng, min(length, 64_000), head)


def _tail(geometry: Geometry, chunks: int, requests: int) -> Result:
    """Every call of a loft whose arena is full, so that each store must evict."""
    progress(f"single calls with {chunks:,} chunks resident, {len(geometry.groups)} groups")
    plan = ChunkPlan(geometry, BLOCK)
    assert plan.full_layout is not None
    interval = auto_resume_interval(plan)
    per_chunk = plan.full_layout.slot_bytes + plan.resume_bytes * BLOCK // interval
    loft = make_loft(geometry, chunks * per_chunk * 11 // 10, BLOCK)
    rng = random.Random(3)
    recent: deque[Prompt] = deque(maxlen=2_000)
    prompts = _prompts(rng, recent)
    number = 0
    while loft.stats().chunks < chunks:
        prompt = Prompt(rng, 32_000)
        store_all(loft, f"fill {number}", prompt)
        recent.append(prompt)
        number += 1
    while not loft.stats().counters.evicted_chunks:
        store_all(loft, f"fill {number}", Prompt(rng, 32_000))
        number += 1
    gc.collect()
    clock = _Clock()
    tables = _Tables(geometry)
    for number in range(requests):
        prompt = next(prompts)
        _serve(loft, f"request {number}", prompt, clock, tables)
        recent.append(prompt)
    stats = loft.stats()
    return {
        "resident_chunks": stats.chunks,
        "resume_points": stats.resume_points,
        "hits": stats.hits,
        "evicted_chunks": stats.counters.evicted_chunks,
        "dropped_stores": stats.counters.dropped_stores,
        "calls": clock.result(),
    }


class _Tables:
    """Block tables as an engine would give them; made outside of what is timed."""

    def __init__(self, geometry: Geometry) -> None:
        self._groups = geometry.groups
        self._ids = list(range(1, 1 << 14))

    def stored(self, tokens: int) -> list[list[int]]:
        return [self._ids[: tokens // g.tokens_per_block] for g in self._groups]

    def to_load(self, boundary: int) -> list[list[int]]:
        out = []
        for group in self._groups:
            needed = group.resume_blocks(boundary)
            out.append([0] * needed.start + self._ids[: len(needed)])
        return out


def _serve(loft: Loft, name: str, prompt: Prompt, clock: _Clock, tables: _Tables) -> None:
    loft.track(name, prompt, prompt.tokens)
    found = clock("match", lambda: loft.match(name, prompt.tokens, 0))
    if found:
        into = tables.to_load(found)
        load_job = clock("begin_load", lambda: loft.begin_load(name, 0, into))
        clock("report load", lambda: loft.report(load_job.id, 0, True))
    under_way: deque[int] = deque()
    reach = found
    while reach < prompt.tokens:
        reach = min(prompt.tokens, reach + STEP_TOKENS)
        current = tables.stored(reach)
        at = reach
        job = clock("begin_store", lambda: loft.begin_store(name, at, current))
        if job is not None:
            under_way.append(job.id)
        while len(under_way) > 2 or (under_way and reach == prompt.tokens):
            done = under_way.popleft()
            clock("report store", lambda: loft.report(done, 0, True))
    clock("forget", lambda: loft.forget(name))


def _peer_tail(chunks: int, requests: int) -> Result | None:
    """The same prompts through vLLM's manager with its own LRU, which is full as well."""
    peer = _peer(uniform_geometry(), chunks)
    if peer is None:
        return None
    progress(f"the same for vLLM's manager with {chunks:,} chunks")
    rng = random.Random(3)
    recent: deque[Prompt] = deque(maxlen=2_000)
    prompts = _prompts(rng, recent)
    filled = 0
    while filled < chunks + 10_000:
        prompt = Prompt(rng, 32_000)
        peer.store("fill", prompt.hashes)
        recent.append(prompt)
        filled += len(prompt.hashes)
    gc.collect()
    clock = _Clock()
    step = STEP_TOKENS // BLOCK
    for number in range(requests):
        prompt = next(prompts)
        request = peer.new_request(f"request {number}", prompt.hashes, prompt.tokens)
        found = clock("match", lambda: peer.match(request)) // BLOCK
        peer.forget(request)
        context = peer.context(f"request {number}")
        if found:
            keys = peer.keys(prompt.hashes[:found])
            clock("begin_load", lambda: peer.manager.prepare_load(keys, context))
            clock("report load", lambda: peer.manager.complete_load(keys, context))
        for start in range(found, len(prompt.hashes), step):
            new = peer.keys(prompt.hashes[start : start + step])
            began = clock("begin_store", lambda: peer.begin_store(context, new))
            clock("report store", lambda: peer.end_store(context, new, began))
        clock("forget", lambda: peer.finish(context))
        recent.append(prompt)
    return {"resident_chunks": chunks, "calls": clock.result()}


# ---------------------------------------------------------------------------------- bytes held


def _held(name: str) -> Result:
    """Memory that a prompt takes in the arena, against the sum of the live bytes it must keep."""
    geometry = load(name)
    from kvloft.config import resolve_chunk

    size = resolve_chunk(geometry)
    plan = ChunkPlan(geometry, size)
    interval = auto_resume_interval(plan)
    tokens = max(131_072 // size * size, 8 * interval)
    exact = tokens // size * plan.full_chunk_bytes
    loft = make_loft(geometry, 4 * exact + 20 * plan.resume_bytes, size)
    hashes = [n.to_bytes(8, "little") for n in range(tokens // size + 1)]
    tables = [list(range(1, tokens // g.tokens_per_block + 1)) for g in geometry.groups]
    loft.track("held", lambda at: hashes[at // size], tokens)
    loft.match("held", tokens, 0)
    for reach in range(size, tokens + 1, size):
        if (job := loft.begin_store("held", reach, tables)) is not None:
            loft.report(job.id, 0, True)
    stats = loft.stats()
    for boundary in _resume_points(loft, tokens, size, hashes):
        for group in geometry.cacheable:
            if group.kind != "full":
                exact += (
                    len(group.resume_blocks(boundary)) * group.block_bytes * geometry.copies(group)
                )
    return {
        "name": name,
        "tokens": tokens,
        "resume_points": stats.resume_points,
        "bytes_per_token": round(stats.slot_bytes / tokens, 2),
        "exact_bytes_per_token": round(exact / tokens, 2),
        "ratio": round(stats.slot_bytes / exact, 4),
    }


def _resume_points(loft: Loft, tokens: int, size: int, hashes: list[bytes]) -> Iterator[int]:
    """Boundaries that are resume points, found by asking from the end for ever shorter prompts."""
    at = tokens
    while at > 0:
        loft.track("ask", lambda boundary: hashes[boundary // size], tokens)
        at = loft.match("ask", at + 1, 0)
        loft.forget("ask")
        if at:
            yield at
            at -= 1


# ---------------------------------------------------------------------------------- for a person


def lines(result: Result) -> Iterator[str]:
    """The result for a person."""
    found = result["lookup"]
    yield f"Longest resume of a prefix that is resident, {found['groups']} groups; microseconds"
    yield ""
    yield from table(
        ["tokens", "kvloft", "vLLM", "vLLM, first time", "ratio"],
        [
            [f"{row['tokens']:,}", *(_number(row.get(key)) for key in
             ("kvloft_us", "vllm_us", "vllm_first_us", "ratio"))]
            for row in found["rows"]
        ],
    )  # fmt: skip
    yield f"(budget: a ratio of {BUDGET_LOOKUP:.0f} at a million tokens)"
    yield ""
    books = result["bookkeeping"]
    theirs = books.get("vllm_manager_us_per_chunk")
    yield (
        f"Store bookkeeping per chunk: kvloft {books['kvloft_us_per_chunk']} us, "
        f"vLLM's manager alone {_number(theirs)} us"
    )
    for name, part in result["tail"].items():
        if part is None:
            continue
        yield ""
        yield f"Single calls, {name}, {part['resident_chunks']:,} chunks resident; milliseconds"
        yield ""
        yield from table(
            ["call", "calls", "p50", "p99", "p99.9", "max"],
            [
                [call, f"{got['calls']:,}", *(f"{got[key] / 1000:.3f}" for key in
                 ("p50_us", "p99_us", "p999_us", "max_us"))]
                for call, got in part["calls"].items()
            ],
        )  # fmt: skip
    yield f"(budget: p99.9 {BUDGET_P999_MS:.0f} ms, max {BUDGET_MAX_MS:.0f} ms)"
    yield ""
    yield "Bytes held per token, against the exact sum of what is retained"
    yield ""
    yield from table(
        ["model", "tokens", "resume points", "held", "exact", "ratio"],
        [
            [
                row["name"],
                f"{row['tokens']:,}",
                f"{row['resume_points']:,}",
                f"{row['bytes_per_token']:,}",
                f"{row['exact_bytes_per_token']:,}",
                f"{row['ratio']:.4f}",
            ]
            for row in result["held"]
        ],
    )
    yield f"(budget: {BUDGET_HELD})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"
