"""The scheduler's side, beside vLLM's own offloading: look-ups, store bookkeeping, slow calls.

No memory is behind the arenas here; only the books are kept. Garbage collection is on, as it is in
an engine.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.bench.report import Result, header, progress, table
from kvloft.bench.timing import Side, percentiles, speed_ratio, take_turns
from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import DEFAULT_POLICY, POLICIES
from kvloft.config import resolve_chunk
from kvloft.geometry import Geometry, Group, Layers, load, make_geometry
from kvloft.keys import Keys
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan, auto_resume_interval

BUDGET_LOOKUP = 20.0
"""Times as fast as vLLM's, for a prefix of a million tokens."""
BUDGET_P999_MS = 2.0
BUDGET_MAX_MS = 10.0
BUDGET_HELD = 1.02

BLOCK = 16
STEP_TOKENS = 2048
"""What one engine step computes."""

_HASH_BYTES = 32
_REPEATS = 100
"""Of KVLoft's look-up in one measurement: a single one is too short for the clock."""

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
    policy = POLICIES[DEFAULT_POLICY](room_of(plan, budget))
    return Loft(plan, arena, policy, ranks=1, resume_interval=interval)


class Prompt:
    """A prompt's prefix hashes; random ones do, as all that matters is that they are equal."""

    def __init__(self, rng: random.Random, tokens: int, head: bytes = b"") -> None:
        self.tokens = tokens
        noise = rng.randbytes(_HASH_BYTES * (tokens // BLOCK) - len(head))
        self.blob = head + noise
        """All hashes in one piece: prompts of the past must not be what the collector walks."""

    def hashes(self) -> list[bytes]:
        """One by one, as an engine has them while a request lives."""
        return [self.blob[n : n + _HASH_BYTES] for n in range(0, len(self.blob), _HASH_BYTES)]

    def keys(self) -> Keys:
        """The same as KVLoft asks for them."""
        hashes = self.hashes()
        return lambda tokens: hashes[tokens // BLOCK - 1]


def store_all(loft: Loft, name: str, prompt: Prompt) -> None:
    """Store a prompt as the engine would compute it, step by step."""
    blocks = prompt.tokens // BLOCK
    tables = [list(range(1, blocks + 1)) for _ in loft.plan.geometry.groups]
    loft.track(name, prompt.keys(), prompt.tokens)
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


_REMEMBERED = 200
"""Prompts of the past that new ones may go on from."""


def run(*, quick: bool) -> Result:
    """All parts; about four minutes, a few seconds if ``quick``."""
    result = header("lookup", quick=quick)
    chunks, peer_chunks, requests = (20_000, 20_000, 300) if quick else (1_000_000, 410_000, 6_000)
    _peer(uniform_geometry(), 1)
    # vLLM does the same when an engine has started: what is there then is never looked at again.
    gc.collect()
    gc.freeze()
    try:
        result["lookup"] = _lookup(quick)
        result["bookkeeping"] = _bookkeeping(quick)
        result["tail"] = {
            "uniform": _tail(uniform_geometry(), chunks, requests),
            "mixed": _tail(mixed_geometry(), chunks, requests),
            "vllm": _peer_tail(peer_chunks, requests),
        }
        result["held"] = [_held(name) for name in ("gpt-oss-120b", "deepseek-v4-flash")]
    finally:
        gc.unfreeze()
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
        store_all(loft, "store", prompt)
        if peer is not None:
            for group in range(len(geometry.groups)):
                peer.store("store", prompt.hashes(), group)
        sides = _askers(loft, peer, prompt)
        seconds = take_turns(sides, 2 if quick else 7)
        each = [s / _REPEATS for s in seconds["kvloft"]]
        row: Result = {"tokens": prompt.tokens, "kvloft_us": round(min(each) * 1e6, 2)}
        if peer is not None:
            row["vllm_us"] = round(min(seconds["vllm"]) * 1e6, 2)
            row["vllm_first_us"] = round(min(seconds["vllm first"]) * 1e6, 2)
            row["ratio"] = round(speed_ratio(each, seconds["vllm"]), 1)
        rows.append(row)
    return {"groups": len(geometry.groups), "rows": rows}


def _askers(loft: Loft, peer: Any, prompt: Prompt) -> dict[str, Side]:
    """The same question to both sides, each after a check of its answer."""
    # One token more than is stored: the last one is computed in any case.
    asked, keys, hashes = prompt.tokens + 1, prompt.keys(), prompt.hashes()

    def kvloft() -> int:
        found = 0
        for _ in range(_REPEATS):
            loft.track("ask", keys, asked)
            found = loft.match("ask", asked, 0) or 0
            loft.forget("ask")
        return found

    assert kvloft() == prompt.tokens
    if peer is None:
        return {"kvloft": kvloft}
    request = peer.new_request("ask", hashes, asked)
    assert peer.match(request) == prompt.tokens
    return {
        "kvloft": kvloft,
        "vllm": lambda: peer.match_again(request),
        "vllm first": lambda: peer.match(peer.new_request("new", hashes, asked)),
    }


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
    sides: dict[str, Side] = {"kvloft": lambda: store_all(loft, "store", next(ours))}
    if peer is not None:
        sides["vllm manager"] = lambda: _peer_store_all(peer, next(theirs))
    seconds = take_turns(sides, rounds)
    out: Result = {
        f"{name.replace(' ', '_')}_us_per_chunk": round(min(s) / chunks * 1e6, 2)
        for name, s in seconds.items()
    }
    if peer is not None:
        out["ratio"] = round(speed_ratio(seconds["kvloft"], seconds["vllm manager"]), 2)
    return out


def _peer_store_all(peer: Any, prompt: Prompt) -> None:
    """:func:`store_all` for vLLM's manager; what its scheduler half does besides is left out."""
    hashes, step = prompt.hashes(), STEP_TOKENS // BLOCK
    context = peer.context("store")
    for start in range(0, len(hashes), step):
        keys = peer.keys(hashes[start : start + step])
        peer.end_store(context, keys, peer.begin_store(context, keys))
    peer.finish(context)


# ---------------------------------------------------------------------------------- slow calls


@dataclass
class _Clock:
    """Times single calls by name.

    On the wall, which is what an engine waits, and in time of the processor: on a machine that
    others use as well, the slowest calls on the wall are those during which it worked for others.
    """

    wall: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, name: str, call: Callable[..., _T], *args: Any) -> _T:
        start, began = time.perf_counter(), time.thread_time()
        out = call(*args)
        used, passed = time.thread_time() - began, time.perf_counter() - start
        self.wall.setdefault(name, []).append(passed)
        self.processor.setdefault(name, []).append(used)
        return out

    def result(self) -> Result:
        return {
            kind: {
                "all": percentiles([s for calls in seconds.values() for s in calls]),
                **{name: percentiles(calls) for name, calls in seconds.items()},
            }
            for kind, seconds in (("wall", self.wall), ("processor", self.processor))
        }


def _prompts(rng: random.Random, recent: deque[Prompt]) -> Iterator[Prompt]:
    """Half of the prompts go on from an earlier one; lengths from 1,000 to 32,000 tokens."""
    while True:
        length = round(1000 * 32 ** rng.random())
        head = b""
        if recent and rng.random() < 0.5:
            before = rng.choice(recent)
            shared = rng.randint(1, min(before.tokens, 32_000) // BLOCK)
            head = before.blob[: shared * _HASH_BYTES]
            length += shared * BLOCK
        yield Prompt(rng, length, head)


def _tail(geometry: Geometry, chunks: int, requests: int) -> Result:
    """Every call of a loft whose arena is full, so that each store must evict."""
    progress(f"single calls with {chunks:,} chunks resident, {len(geometry.groups)} groups")
    plan = ChunkPlan(geometry, BLOCK)
    assert plan.full_layout is not None
    interval = auto_resume_interval(plan)
    per_chunk = plan.full_layout.slot_bytes + plan.resume_bytes * BLOCK // interval
    loft = make_loft(geometry, chunks * per_chunk * 11 // 10, BLOCK)
    rng = random.Random(3)
    recent: deque[Prompt] = deque(maxlen=_REMEMBERED)
    prompts = _prompts(rng, recent)
    number = 0
    while loft.stats().chunks < chunks:
        prompt = Prompt(rng, 32_000)
        store_all(loft, f"fill {number}", prompt)
        recent.append(prompt)
        number += 1
    counters = loft.catalog.counters
    while not (counters.evicted_chunks or counters.declined_stores):
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
    loft.track(name, prompt.keys(), prompt.tokens)
    found = clock("match", loft.match, name, prompt.tokens, 0) or 0
    if found:
        load_job = clock("begin_load", loft.begin_load, name, 0, tables.to_load(found))
        clock("report load", loft.report, load_job.id, 0, True)
    under_way: deque[int] = deque()
    reach = found
    while reach < prompt.tokens:
        reach = min(prompt.tokens, reach + STEP_TOKENS)
        job = clock("begin_store", loft.begin_store, name, reach, tables.stored(reach))
        if job is not None:
            under_way.append(job.id)
        while len(under_way) > 2 or (under_way and reach == prompt.tokens):
            clock("report store", loft.report, under_way.popleft(), 0, True)
    clock("forget", loft.forget, name)


def _peer_tail(chunks: int, requests: int) -> Result | None:
    """The same prompts through vLLM's manager with its own LRU, which is full as well."""
    peer = _peer(uniform_geometry(), chunks)
    if peer is None:
        return None
    progress(f"the same for vLLM's manager with {chunks:,} chunks")
    rng = random.Random(3)
    recent: deque[Prompt] = deque(maxlen=_REMEMBERED)
    prompts = _prompts(rng, recent)
    filled = 0
    while filled < chunks + 10_000:
        prompt = Prompt(rng, 32_000)
        peer.store("fill", prompt.hashes())
        recent.append(prompt)
        filled += prompt.tokens // BLOCK
    gc.collect()
    clock = _Clock()
    for number in range(requests):
        prompt = next(prompts)
        _peer_serve(peer, f"request {number}", prompt, clock)
        recent.append(prompt)
    return {"resident_chunks": chunks, "calls": clock.result()}


def _peer_serve(peer: Any, name: str, prompt: Prompt, clock: _Clock) -> None:
    hashes, step = prompt.hashes(), STEP_TOKENS // BLOCK
    request = peer.new_request(name, hashes, prompt.tokens)
    found = clock("match", peer.match, request) // BLOCK
    peer.forget(request)
    context = peer.context(name)
    if found:
        keys = peer.keys(hashes[:found])
        clock("begin_load", peer.manager.prepare_load, keys, context)
        clock("report load", peer.manager.complete_load, keys, context)
    for start in range(found, len(hashes), step):
        keys = peer.keys(hashes[start : start + step])
        began = clock("begin_store", peer.begin_store, context, keys)
        clock("report store", peer.end_store, context, keys, began)
    clock("forget", peer.finish, context)


# ---------------------------------------------------------------------------------- bytes held


def _held(name: str) -> Result:
    """Memory that a prompt takes in the arena, against the sum of the live bytes it must keep."""
    geometry = load(name)
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
    kept = {*range(interval, tokens + 1, interval), tokens, tokens - size}
    assert stats.resume_points == len(kept), (stats.resume_points, len(kept))
    for group in geometry.cacheable:
        if group.kind != "full":
            blocks = {block for boundary in kept for block in group.resume_blocks(boundary)}
            exact += len(blocks) * group.block_bytes * geometry.copies(group)
    return {
        "name": name,
        "tokens": tokens,
        "resume_points": stats.resume_points,
        "bytes_per_token": round(stats.slot_bytes / tokens, 2),
        "exact_bytes_per_token": round(exact / tokens, 2),
        "ratio": round(stats.slot_bytes / exact, 4),
    }


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
        calls = part["calls"]
        keys = ("p50_us", "p99_us", "p999_us", "max_us")
        yield from table(
            ["call", "calls", "p50", "p99", "p99.9", "max", "p99.9 (processor)", "max"],
            [
                [
                    call,
                    f"{got['calls']:,}",
                    *(f"{got[key] / 1000:.3f}" for key in keys),
                    *(f"{calls['processor'][call][key] / 1000:.3f}" for key in keys[2:]),
                ]
                for call, got in calls["wall"].items()
            ],
        )
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
