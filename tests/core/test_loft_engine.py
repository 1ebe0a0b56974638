"""The whole core against the reference engine: every byte that a resume restores, on every rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.errors import TransferError
from kvloft.geometry import Group, Layers, make_geometry
from kvloft.plan import ChunkPlan
from kvloft.testing import Engine, EngineError, audit
from kvloft.testing.engine import LOADING, RUNNING, Request
from kvloft.testing.geometries import plans, shipped
from kvloft.testing.pages import PAGES_LAYOUTS, PagesLayout
from kvloft.testing.scenario import explore

SHIPPED = shipped()
SEEDS = st.integers(0, 2**32 - 1)
FAILURES = st.sampled_from([0.0, 0.0, 0.04])


def make(
    *groups: Group,
    tokens_per_hash: int = 4,
    tensor_parallel: int = 1,
    blocks_per_chunk: int = 1,
    arena_pages: int = 400,
    **options: object,
) -> Engine:
    """An engine with room for everything, which steps through four chunks at a time."""
    geometry = make_geometry(groups, tokens_per_hash, tensor_parallel=tensor_parallel)
    plan = ChunkPlan(geometry, blocks_per_chunk * geometry.unit_tokens)
    chosen: dict[str, object] = {
        "num_blocks": 600,
        "arena_bytes": arena_pages * 4096,
        "step_tokens": 4 * plan.tokens_per_chunk,
        "resume_interval": 1000 * plan.tokens_per_chunk,
        "prefix_caching": False,
    }
    return Engine(plan, random.Random(0), **{**chosen, **options})  # type: ignore[arg-type]


def pages(count: int, size: int) -> tuple[Layers, ...]:
    return (Layers(count, size, size + 3),)


def full(id: int, tokens: int = 4) -> Group:
    return Group(id, "full", tokens, pages(2, 16))


def window(id: int, tokens: int, size: int, extra: int = 0) -> Group:
    return Group(id, "window", tokens, pages(1, 8), window=size, extra_retained_tokens=extra)


def local(id: int, tokens: int, chunk: int) -> Group:
    return Group(id, "chunked_local", tokens, pages(1, 8), attention_chunk=chunk)


def state(id: int, tokens: int) -> Group:
    return Group(id, "state", tokens, pages(2, 12))


def text(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


def ask(engine: Engine, tokens: list[int], generate: int = 1) -> int:
    """Run one request to its end; the tokens that were restored for it."""
    before = engine.totals.restored_tokens
    engine.submit(tokens, generate)
    engine.run()
    engine.check()
    return engine.totals.restored_tokens - before


# --- random interleavings ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
@settings(max_examples=examples(0.2))
@given(seed=SEEDS, units=st.integers(1, 3), failures=FAILURES)
def test_known_models_restore_every_byte(name: str, seed: int, units: int, failures: float) -> None:
    geometry = SHIPPED[name]
    explore(ChunkPlan(geometry, units * geometry.unit_tokens), seed, failures=failures)


@settings(max_examples=examples(4))
@given(plan=plans(), seed=SEEDS, failures=FAILURES)
def test_any_geometry_restores_every_byte(plan: ChunkPlan, seed: int, failures: float) -> None:
    explore(plan, seed, actions=80, failures=failures)


@pytest.mark.slow
@settings(max_examples=4000, derandomize=False)
@given(plan=plans(), seed=SEEDS, failures=FAILURES)
def test_many_geometries_restore_every_byte(plan: ChunkPlan, seed: int, failures: float) -> None:
    explore(plan, seed, actions=150, failures=failures)


def test_scenarios_reach_what_they_are_for() -> None:
    """Random runs prove nothing unless they get as far as hits, failures and preemptions."""
    geometry = SHIPPED["gpt-oss-120b"]
    runs = [
        explore(ChunkPlan(geometry, 2 * geometry.unit_tokens), seed, failures=0.04)
        for seed in range(60)
    ]
    for name in ("hits", "local_hits", "preemptions", "aborts", "failed_loads", "failed_stores"):
        assert sum(getattr(run, name) for run in runs) > 5, name


# --- what a repeat finds, exactly -----------------------------------------------------------------

GEOMETRIES: dict[str, tuple[Group, ...]] = {
    "full": (full(0),),
    "window": (window(0, 2, 7), full(1)),
    "window shorter than a block": (window(0, 4, 3), full(1)),
    "window over many chunks": (window(0, 2, 21, extra=2), full(1)),
    "local": (local(0, 4, 20), full(1)),
    "local that ends with chunks": (local(0, 2, 8), full(1, 2)),
    "state": (state(0, 4), full(1)),
    "windows alone": (window(0, 2, 7), window(1, 4, 9)),
    "states alone": (state(0, 4), state(1, 4)),
    "states and windows": (state(0, 8), window(1, 2, 9), full(2, 8)),
}


@pytest.mark.parametrize("layout", PAGES_LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_repeated_prompt_resumes_at_its_last_boundary(name: str, layout: PagesLayout) -> None:
    engine = make(*GEOMETRIES[name], tensor_parallel=2, layout=layout)
    size = engine.plan.tokens_per_chunk
    for length in (5 * size - 1, 5 * size, 5 * size + 1):
        tokens = text(length, seed=length)
        assert ask(engine, tokens) == 0
        assert ask(engine, tokens) == (length - 1) // size * size
    engine.close()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_longer_prompt_resumes_where_the_shorter_one_ended(name: str) -> None:
    engine = make(*GEOMETRIES[name])
    size = engine.plan.tokens_per_chunk
    tokens = text(4 * size)
    ask(engine, tokens)
    assert ask(engine, tokens + text(size + 1, seed=2)) == 4 * size
    engine.close()


def test_a_prompt_shorter_than_a_chunk_is_neither_stored_nor_found() -> None:
    engine = make(full(0))
    assert ask(engine, text(3)) == ask(engine, text(3)) == 0
    assert engine.loft.stats().chunks == 0


def test_a_shared_beginning_gets_a_resume_point_the_second_time() -> None:
    """Windows of a boundary inside a long prompt are not kept until somebody branches off there."""
    engine = make(window(0, 2, 7), full(1))
    system = text(40)
    assert ask(engine, system + text(21, seed=2)) == 0
    assert ask(engine, system + text(21, seed=3)) == 0
    assert ask(engine, system + text(21, seed=4)) == 40
    engine.close()


def test_a_boundary_that_overlapping_windows_cover_needs_no_point_of_its_own() -> None:
    """Chunks kept for the resumes at 24 and 32 hold all that one at 28 needs, whole."""
    engine = make(window(0, 4, 16), full(1))
    tokens = text(60)
    ask(engine, tokens[:25])
    ask(engine, tokens[:33])
    assert ask(engine, [*tokens[:30], 1, 2, 3]) == 28
    engine.close()


def test_a_local_chunk_that_ends_on_a_boundary_needs_no_resume_point() -> None:
    engine = make(local(0, 4, 20), full(1))
    tokens = text(70)
    ask(engine, tokens)
    assert ask(engine, [*tokens[:50], 1, 2, 3]) == 40
    engine.close()


def test_generated_tokens_are_kept_if_asked_for() -> None:
    for prompt_only, restored in ((True, 8), (False, 20)):
        engine = make(full(0), prompt_only=prompt_only)
        request = engine.submit(text(10), 13)
        engine.run()
        assert len(request.tokens) == 23
        assert ask(engine, [*request.tokens, 1]) == restored
        engine.close()


def test_resume_points_come_at_the_interval() -> None:
    engine = make(window(0, 2, 7), full(1), resume_interval=16)
    tokens = text(70)
    ask(engine, tokens)
    assert ask(engine, [*tokens[:41], 1, 2]) == 32
    engine.close()


def test_memory_held_is_the_exact_sum_of_live_bytes() -> None:
    """Padding of 3 bytes a page, one copy of the replicated group, two of the other."""
    shared = Group(0, "full", 4, (Layers(3, 10, 13),), replicated=True)
    engine = make(shared, window(1, 2, 7), tensor_parallel=2)
    ask(engine, text(21))
    chunks = 5 * 3 * 10  # one copy, five chunks
    windows = 2 * 3 * 8  # two ranks, the three blocks that tokens 14 to 19 lie in
    assert engine.loft.stats().live_bytes == chunks + windows
    engine.close()


# --- what can go wrong ----------------------------------------------------------------------------


def loading(engine: Engine, tokens: list[int]) -> Request:
    """A request whose load is under way, of a prompt that has been stored."""
    engine.submit(tokens, 0)
    engine.run()
    request = engine.submit(tokens, 0)
    for _ in range(200):
        engine.step()
        if request.status == LOADING:
            return request
    raise AssertionError("no load")


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing() -> None:
    engine = make(window(0, 2, 7), full(1), tensor_parallel=3)
    engine.abort(loading(engine, text(21)))
    engine.close()


def test_a_reset_while_loading_keeps_the_bytes_until_they_are_read() -> None:
    engine = make(window(0, 2, 7), full(1), tensor_parallel=2)
    tokens = text(21)
    request = loading(engine, tokens)
    engine.reset(connector=True)
    used = engine.loft.stats().live_bytes
    assert used > 0
    assert engine.stored() == (set(), set(), set())
    # Others may store the same again meanwhile, in other slots.
    assert ask(engine, tokens) == 0
    assert request.status == "ended"
    assert ask(engine, tokens) == 20
    engine.close()


def test_what_began_before_a_reset_is_not_stored_after_it() -> None:
    """New weights may be why the cache was reset; the request's own blocks are from before."""
    engine = make(full(0), step_tokens=4)
    request = engine.submit(text(21), 0)
    while request.computed < 8:
        engine.step()
    engine.reset(connector=True)
    engine.run()
    assert engine.loft.stats().chunks == 0
    assert ask(engine, text(21)) == 0
    assert ask(engine, text(21)) == 20
    engine.close()


def test_a_reset_while_storing_publishes_nothing() -> None:
    engine = make(window(0, 2, 7), full(1))
    engine.submit(text(21), 0)
    while engine.requests:
        engine.step()
    assert engine.loft.pending
    engine.reset(connector=True)
    engine.close()
    assert engine.loft.stats().counters.stored_chunks == 0


def test_a_failed_load_is_computed_instead_and_not_tried_again() -> None:
    engine = make(full(0), tensor_parallel=2, failures=1.0)
    tokens = text(21)
    engine._failures = 0.0
    ask(engine, tokens)
    engine._failures = 1.0
    assert ask(engine, tokens, generate=3) > 0
    assert engine.totals.failed_loads == 1
    assert engine.totals.finished == 2
    assert engine.loft.stats().failed_loads == 1
    engine.close()


def test_a_failed_store_is_forgotten_with_all_that_was_built_on_it() -> None:
    engine = make(full(0), failures=1.0, step_tokens=4)
    tokens = text(21)
    engine.submit(tokens, 0)
    while engine.requests:
        engine.step()
    engine.run()
    assert engine.loft.stats().chunks == 0
    engine._failures = 0.0
    assert ask(engine, tokens) == 0
    assert ask(engine, tokens) == 20
    engine.close()


def test_late_and_repeated_reports_change_nothing() -> None:
    engine = make(full(0), tensor_parallel=2)
    ask(engine, text(21))
    pending = engine.loft.stats()
    for job in range(5):
        for rank in range(4):
            engine.loft.report(job, rank, ok=False)
    assert engine.loft.stats() == pending
    assert ask(engine, text(21)) == 20


@pytest.mark.parametrize("change", ["drop", "short", "extra"])
def test_tables_that_do_not_fit_the_resume_are_refused_and_the_pin_is_given_up(change: str) -> None:
    engine = make(window(0, 2, 7), full(1))
    ask(engine, text(21))
    request = engine.submit(text(21), 0)
    loft = engine.loft
    loft.track("x", request.key, 21)
    assert loft.match("x", 21, 0) == 20
    tables = [[0] * 7 + [1, 2, 3], [4, 5, 6, 7, 8]]
    if change == "drop":
        tables[0][8] = 0
    elif change == "short":
        tables[1].pop()
    else:
        tables[0][6] = 9
    with pytest.raises(TransferError, match=f"group {int(change == 'short')}"):
        loft.begin_load("x", 0, tables)
    assert loft.match("x", 21, 0) == 0
    engine.abort(request)
    audit.check_idle(loft.catalog)


def test_the_engine_notices_a_corrupt_slot() -> None:
    """The test of the tests: wrong bytes in the arena must not pass."""
    engine = make(window(0, 2, 7), full(1))
    ask(engine, text(21))
    chunk = next(h for h in audit.held(engine.loft.catalog) if h.kind == "window")
    engine.memory[chunk.slot] ^= 1
    with pytest.raises(EngineError, match="wrong bytes"):
        engine.check()
    engine.submit(text(21), 0)
    with pytest.raises(EngineError, match="group 0"):
        engine.run()


def test_preempted_while_others_run_starts_over_from_the_loft() -> None:
    engine = make(window(0, 2, 7), full(1))
    request = engine.submit(text(21), 30)
    while len(request.tokens) < 30:
        engine.step()
        engine.deliver()
    assert request.status == RUNNING
    while engine.deliver():
        pass
    engine.preempt(request)
    engine.run()
    assert engine.totals.restored_tokens == 20
    engine.close()
