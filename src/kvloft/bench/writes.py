"""Which chunks are worth writing to disk: all that are stored, or only those that are found again.

Request traces go through the real loft, writer and promoter; memory and disk are books alone, so a
trace of an hour takes seconds. Half-way the engine is restarted: host memory is lost, the disk is
not. What each rule has written is compared with what the second half of the trace gets back.

The traces are those published with Mooncake (Qin et al., FAST 2025; kvcache-ai/Mooncake,
``FAST25-release/traces``, Apache-2.0); a block of theirs is a chunk of 512 tokens here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib.resources import files

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.bench.report import Result, header, progress, table
from kvloft.catalog.policies import LRU
from kvloft.geometry import load
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.plan import ChunkPlan
from kvloft.tiers.base import Chunk, Outcome, TierStats
from kvloft.units import format_size

TRACES = ("conversation", "synthetic")
RULES = ("all", "reused")
_TOKENS = 512
_GEOMETRY = "llama-3.1-8b"
_MEMORY = 64 << 30
_DISKS = (256 << 30, 1 << 40)


class BookTier:
    """A tier that keeps names only and answers at once; evicts the leaf unused for the longest."""

    def __init__(self, limit: int) -> None:
        self.written = 0
        """Bytes."""
        self._limit = limit
        self._used = 0
        self._chunks: dict[bytes, Chunk] = {}
        """The least recently used first."""
        self._children: dict[bytes, int] = {}

    name = "books"

    def holds(self, key: bytes, code: str) -> bool:
        """As every tier does."""
        return key in self._chunks

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Keep the name."""
        future: Future[Outcome] = Future()
        if chunk.parent and chunk.parent not in self._chunks:
            future.set_result(Outcome.REFUSED)
            return future
        self._chunks[chunk.key] = chunk
        self._used += chunk.nbytes
        self.written += chunk.nbytes
        self._children[chunk.parent] = self._children.get(chunk.parent, 0) + 1
        while self._used > self._limit:
            self._evict()
        future.set_result(Outcome.DONE)
        return future

    def _evict(self) -> None:
        key = next(k for k in self._chunks if not self._children.get(k))
        chunk = self._chunks.pop(key)
        self._used -= chunk.nbytes
        self._children[chunk.parent] -= 1

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Nothing is copied."""
        future: Future[Outcome] = Future()
        future.set_result(Outcome.DONE if chunk.key in self._chunks else Outcome.MISSING)
        return future

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """These, and all that they build upon, were used."""
        for chunk in chunks:
            path = []
            key = chunk.key
            while (found := self._chunks.get(key)) is not None:
                path.append(found)
                key = found.parent
            for found in path:
                self._chunks[found.key] = self._chunks.pop(found.key)

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        """Never asked here."""
        return None

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        """Never asked here."""
        return None

    def demote(self, chunks: Sequence[Chunk]) -> None:
        """Without windows and states there are no resume points to give up."""

    def scan(self) -> Iterator[Chunk]:
        """All names."""
        yield from self._chunks.values()

    def stats(self) -> TierStats:
        """Nothing of it is asked here."""
        return TierStats(self._limit, self._used, len(self._chunks), 0, 0, 0)

    def close(self, timeout: float = 5.0) -> None:
        """Nothing to do: the books stay for the next engine."""


Prompt = Sequence[int]
"""One id per chunk; an id names the whole prefix up to there."""


def read_trace(name: str) -> list[Prompt]:
    """The prompts of a trace, whole chunks only, in order."""
    data = gzip.decompress((files("kvloft.bench") / "traces" / f"{name}.jsonl.gz").read_bytes())
    prompts = []
    for line in data.decode().splitlines():
        request = json.loads(line)
        prompts.append(request["hash_ids"][: request["input_length"] // _TOKENS])
    return [prompt for prompt in prompts if prompt]


class _Engine:
    """One life of an engine."""

    def __init__(self, tier: BookTier, *, write_all: bool) -> None:
        geometry = load(_GEOMETRY)
        self._plan = ChunkPlan(geometry, _TOKENS)
        arena = Arena(_MEMORY, choose_slab_bytes(_MEMORY, self._plan.slot_sizes()))
        self._loft = Loft(
            self._plan, arena, LRU(), ranks=1, resume_interval=_TOKENS,
            tiers=[LowerTier(tier, write_all, 1e9)], memory=memoryview(b""),
        )  # fmt: skip
        self._blocks = _TOKENS // geometry.groups[0].tokens_per_block
        self._count = 0

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Chunks restored, and how many of them came from disk."""
        self._count += 1
        loft, name = self._loft, str(self._count)
        keys = [chunk.to_bytes(8, "little") * 2 for chunk in prompt]
        tokens = len(prompt) * _TOKENS + 1
        tables = [list(range(1, len(prompt) * self._blocks + 1))]
        promoted = loft.catalog.counters.promoted_chunks
        loft.track(name, lambda boundary: keys[boundary // _TOKENS - 1], tokens)
        while (boundary := loft.match(name, tokens, 0)) is None:
            loft.step()
        if boundary:
            self._done(loft.begin_load(name, 0, tables))
        while loft.wants(name, tokens - 1):
            self._done(loft.begin_store(name, tokens - 1, tables))
        loft.forget(name)
        while loft.pending:
            loft.step()
        loft.step()
        return boundary // _TOKENS, loft.catalog.counters.promoted_chunks - promoted

    def _done(self, job: Job | None) -> None:
        if job is not None:
            self._loft.report(job.id, 0, True)


def replay(prompts: Sequence[Prompt], rule: str, disk: int) -> Result:
    """One trace under one rule, with a restart half-way."""
    tier = BookTier(disk)
    asked = restored = from_disk = 0
    half = len(prompts) // 2
    for life in (prompts[:half], prompts[half:]):
        engine = _Engine(tier, write_all=rule == "all")
        asked = restored = from_disk = 0
        for prompt in life:
            found, promoted = engine.serve(prompt)
            asked += len(prompt)
            restored += found
            from_disk += promoted
    return {
        "rule": rule,
        "disk_bytes": disk,
        "written_bytes": tier.written,
        "asked_chunks": asked,
        "restored_chunks": restored,
        "chunks_read_from_disk": from_disk,
    }


def run(*, quick: bool) -> Result:
    """All traces, rules and sizes."""
    result = header("writes", quick=quick)
    result |= {"geometry": _GEOMETRY, "tokens_per_chunk": _TOKENS, "memory_bytes": _MEMORY}
    rows: list[Result] = []
    for trace in TRACES:
        prompts = read_trace(trace)[: 300 if quick else None]
        for disk in _DISKS:
            for rule in RULES:
                progress(f"{trace}, {format_size(disk)} of disk, {rule}")
                rows.append({"trace": trace, **replay(prompts, rule, disk)})
    result["rows"] = rows
    return result


def lines(result: Result) -> Iterator[str]:
    """The table."""
    yield (
        f"{result['geometry']}, chunks of {result['tokens_per_chunk']} tokens, "
        f"{format_size(result['memory_bytes'])} of host memory, a restart half-way; "
        "the second half's prompts:"
    )
    yield from table(
        ("trace", "disk", "rule", "written", "restored", "read from disk"),
        [
            (
                row["trace"],
                format_size(row["disk_bytes"]),
                row["rule"],
                format_size(row["written_bytes"]),
                f"{row['restored_chunks'] / row['asked_chunks']:.1%}",
                f"{row['chunks_read_from_disk'] / row['asked_chunks']:.1%}",
            )
            for row in result["rows"]
        ],
    )
