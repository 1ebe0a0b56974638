"""Room is made for a resume point however many small chunks must go for it."""

from __future__ import annotations

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.catalog.policies import LRU
from kvloft.geometry import Group, Layers, make_geometry
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan
from kvloft.units import PAGE_BYTES


def test_a_resume_point_worth_thousands_of_chunks_is_stored_in_a_full_arena() -> None:
    small, large = Layers(1, PAGE_BYTES, PAGE_BYTES), Layers(1, 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    geometry = make_geometry(
        [Group(0, "full", 16, (small,)), Group(1, "window", 16, (large,), window=16 * 300 + 1)], 16
    )
    plan = ChunkPlan(geometry, 16)
    assert plan.resume_bytes // plan.full_chunk_bytes == 2400
    budget = 6000 * PAGE_BYTES
    arena = Arena(budget, choose_slab_bytes(budget, plan.slot_sizes()))
    loft = Loft(plan, arena, LRU(), ranks=1, resume_interval=1 << 30)

    def serve(name: str, tokens: int, *, windows: bool) -> None:
        loft.track(name, lambda boundary: f"{name}{boundary:>20}".encode(), tokens)
        loft.match(name, tokens, 0)
        table = list(range(1, tokens // 16 + 1))
        while loft.wants(name, tokens):
            tables = [table, table if windows else [0] * len(table)]
            job = loft.begin_store(name, tokens, tables)
            if job is not None:
                loft.report(job.id, 0, ok=True)
        loft.forget(name)

    for number in range(8):
        serve(f"f{number}", 16 * 1000 + 1, windows=False)
    assert loft.stats().resume_points == 0
    assert loft.stats().slab_bytes > budget * 0.95
    serve("w0", 16 * 400 + 1, windows=True)
    assert loft.stats().resume_points == 1
    loft.track("again", lambda boundary: f"w0{boundary:>20}".encode(), 16 * 400 + 1)
    assert loft.match("again", 16 * 400 + 1, 0) == 16 * 400
