"""Which chunks are worth writing to disk: all that are stored, or only those that are found again.

Request traces go through the real loft, writer and promoter; memory and disk are books alone, so a
trace of an hour takes seconds. Half-way the engine is restarted: host memory is lost, the disk is
not. What each rule has written is compared with what the second half of the trace gets back.

The traces are those published with Mooncake (Qin et al., FAST 2025; kvcache-ai/Mooncake,
``FAST25-release/traces``, Apache-2.0); a block of theirs is a chunk of 512 tokens here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.bench.report import Result, header, progress, table
from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import DEFAULT_POLICY, POLICIES
from kvloft.geometry import load
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.plan import ChunkPlan
from kvloft.replay.books import BookTier
from kvloft.replay.driver import chunk_names
from kvloft.replay.formats import read_trace
from kvloft.units import format_size

TRACES = ("conversation", "synthetic")
RULES = ("all", "reused")
_TOKENS = 512
_GEOMETRY = "llama-3.1-8b"
_MEMORY = 64 << 30
_DISKS = (256 << 30, 1 << 40)


Prompt = Sequence[int]
"""One id per chunk; an id names the whole prefix up to there."""


def read_prompts(name: str) -> list[Prompt]:
    """The prompts of a trace, whole chunks only, in order."""
    prompts = [
        request.blocks[: request.prompt_tokens // _TOKENS] for request in read_trace(name).requests
    ]
    return [prompt for prompt in prompts if prompt]


class _Engine:
    """One life of an engine."""

    def __init__(self, tier: BookTier, *, write_all: bool) -> None:
        geometry = load(_GEOMETRY)
        self._plan = ChunkPlan(geometry, _TOKENS)
        arena = Arena(_MEMORY, choose_slab_bytes(_MEMORY, self._plan.slot_sizes()))
        self._loft = Loft(
            self._plan, arena, POLICIES[DEFAULT_POLICY](room_of(self._plan, _MEMORY)), ranks=1,
            resume_interval=_TOKENS,
            tiers=[LowerTier(tier, write_all, 1e9)], memory=memoryview(b""),
        )  # fmt: skip
        self._blocks = _TOKENS // geometry.groups[0].tokens_per_block
        self._count = 0

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Chunks restored, and how many of them came from disk."""
        self._count += 1
        loft, name = self._loft, str(self._count)
        keys = chunk_names(prompt)
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
        prompts = read_prompts(trace)[: 300 if quick else None]
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
