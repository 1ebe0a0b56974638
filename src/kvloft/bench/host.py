"""Copies between engine pages and the arena, against a plain memcpy of the same bytes."""

from __future__ import annotations

import mmap
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloft.bench.report import Result, header, progress, table
from kvloft.bench.timing import speed_ratio, take_turns
from kvloft.config import resolve_chunk
from kvloft.geometry import Geometry, Group, Layers, make_geometry
from kvloft.jobs import Copy, Job, Part
from kvloft.plan import ChunkPlan
from kvloft.seals import Seals, seal_bytes
from kvloft.transfer import CpuCopier
from kvloft.units import format_size

Bytes = npt.NDArray[np.uint8]

BUDGET = 0.9
"""Of a plain memcpy, for pages of 32 KiB and more."""
BUDGET_FROM = 32 << 10
PADDING = 64
_BLOCK_TOKENS = 16
_STEP_BYTES = 64 << 20
"""Chunks of about this many bytes make one job, as one step of the engine would."""


@dataclass(frozen=True)
class _Case:
    page_bytes: int
    layers: int
    ids: str
    """``runs`` as an engine's free list gives them, or ``shuffled``, which is the worst."""
    padded: bool


def run(*, quick: bool) -> Result:
    """Measure every case; 256 MiB each, far above the last-level cache."""
    total, rounds = (16 << 20, 1) if quick else (256 << 20, 9)
    pages = (4 << 10, 64 << 10) if quick else tuple(1 << n for n in range(12, 21))
    result = header("host", quick=quick)
    result["bytes"] = total
    result["cases"] = []
    for page_bytes in pages:
        for ids in ("runs", "shuffled"):
            for padded in (False, True):
                case = _Case(page_bytes, 16, ids, padded)
                progress(f"pages of {format_size(page_bytes)}, {ids}{', padded' * padded}")
                result["cases"].append(_measure(case, total, rounds))
    return result


def _measure(case: _Case, total: int, rounds: int) -> Result:
    stride = case.page_bytes + PADDING * case.padded
    blocks = total // case.page_bytes // case.layers + 1  # Block 0 is the null block.
    layers = Layers(case.layers, case.page_bytes, stride)
    geometry = make_geometry([Group(0, "full", _BLOCK_TOKENS, (layers,))], _BLOCK_TOKENS)
    plan = ChunkPlan(geometry, resolve_chunk(geometry))
    layout = plan.full_layout
    assert layout is not None
    per_chunk = layout.counts[0][1]
    chunks = (blocks - 1) // per_chunk
    moved = chunks * layout.nbytes

    pool = _memory(case.layers * blocks * stride, mmap.MAP_PRIVATE)
    arena_bytes = chunks * layout.slot_bytes
    memory = _memory(arena_bytes + seal_bytes(plan, arena_bytes), mmap.MAP_SHARED)
    arena, seals = memory[:arena_bytes], Seals(plan, memory, arena_bytes)
    views = [
        layer.reshape(blocks, stride)[:, : case.page_bytes] for layer in np.split(pool, case.layers)
    ]
    copier = CpuCopier(plan, {0: views}, arena, rank=0)
    ids = list(_engine_ids(blocks) if case.ids == "runs" else _shuffled_ids(blocks))
    jobs = list(_jobs(ids, per_chunk, chunks, layout.slot_bytes, geometry))

    def each(copy: object) -> None:
        for job in jobs:
            (copier.store if copy == "store" else copier.load)(job)

    def verified(copy: object) -> None:
        """As a rank does it with ``verify: always``."""
        for job in jobs:
            if copy == "store":
                copier.store(job)
                for made in job.copies:
                    for offset in made.offsets:
                        seals.seal(offset, layout, 0)
            else:
                offsets = [offset for made in job.copies for offset in made.offsets]
                if not all(seals.intact(offset, layout, 0) for offset in offsets):
                    raise RuntimeError("a slot has changed by itself")
                copier.load(job)

    seconds = take_turns(
        {
            "memcpy in": lambda: np.copyto(arena[:moved], pool[:moved]),
            "store": lambda: each("store"),
            "verified store": lambda: verified("store"),
            "memcpy out": lambda: np.copyto(pool[:moved], arena[:moved]),
            "load": lambda: each("load"),
        },
        rounds,
    )
    # By themselves: a copy into the arena from anywhere else breaks the seals.
    verified("store")
    loads = take_turns({"load": lambda: each("load"), "verified": lambda: verified("load")}, rounds)
    return {
        "page_bytes": case.page_bytes,
        "layers": case.layers,
        "stride_bytes": stride,
        "ids": case.ids,
        "chunk_bytes": layout.nbytes,
        "memcpy_gb_per_s": round(moved / statistics.median(seconds["memcpy in"]) / 1e9, 2),
        "store": round(speed_ratio(seconds["store"], seconds["memcpy in"]), 3),
        "load": round(speed_ratio(seconds["load"], seconds["memcpy out"]), 3),
        "verified_store": round(speed_ratio(seconds["verified store"], seconds["store"]), 3),
        "verified_load": round(speed_ratio(loads["verified"], loads["load"]), 3),
    }


def _memory(nbytes: int, kind: int) -> Bytes:
    """Memory of the kind that engines (private) and arenas (shared) live in, all pages present."""
    array = np.frombuffer(mmap.mmap(-1, nbytes, flags=kind | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    array[:] = 1
    return array


def _shuffled_ids(blocks: int) -> Sequence[int]:
    ids = list(range(1, blocks))
    random.Random(1).shuffle(ids)
    return ids


def _engine_ids(blocks: int) -> Iterator[int]:
    """Every id once, in runs: upwards where blocks are fresh, downwards where a request that has
    ended gave them back (engines free a request's last block first)."""
    rng = random.Random(1)
    runs = []
    start = 1
    while start < blocks:
        stop = min(blocks, start + rng.randint(1, 64))
        run_ids = range(start, stop)
        runs.append(run_ids if rng.random() < 0.5 else run_ids[::-1])
        start = stop
    rng.shuffle(runs)
    for run_ids in runs:
        yield from run_ids


def _jobs(
    ids: list[int], per_chunk: int, chunks: int, slot_bytes: int, geometry: Geometry
) -> Iterator[Job]:
    per_job = max(1, _STEP_BYTES // slot_bytes)
    counts = ((geometry.groups[0].id, per_chunk),)
    for number, first in enumerate(range(0, chunks, per_job)):
        stop = min(chunks, first + per_job)
        offsets = [n * slot_bytes for n in range(first, stop)]
        part = Part(0, 0, ids[first * per_chunk : stop * per_chunk])
        yield Job(number + 1, [Copy(offsets, counts, [part])])


def lines(result: Result) -> Iterator[str]:
    """The result for a person."""
    yield "Copies as a share of the speed of memcpy on the same bytes (1.00 is as fast);"
    yield "verified ones (verify: always) as a share of the speed of those that are not"
    yield ""
    yield from table(
        ["pages", "block ids", "stride", "memcpy GB/s", "store", "load", "verified: store", "load"],
        [
            [
                format_size(case["page_bytes"]),
                case["ids"],
                "padded" if case["stride_bytes"] > case["page_bytes"] else "tight",
                f"{case['memcpy_gb_per_s']:.1f}",
                f"{case['store']:.2f}",
                f"{case['load']:.2f}",
                f"{case['verified_store']:.2f}",
                f"{case['verified_load']:.2f}",
            ]
            for case in result["cases"]
        ],
    )
    yield ""
    for ids in ("runs", "shuffled"):
        large = [c for c in result["cases"] if c["page_bytes"] >= BUDGET_FROM and c["ids"] == ids]
        for way in ("store", "load"):
            ratios = sorted(case[way] for case in large)
            yield (
                f"{way}, {ids}, pages of 32 KiB and more: least {ratios[0]:.2f}, "
                f"median {ratios[len(ratios) // 2]:.2f} (budget {BUDGET})"
            )
