"""Lower tiers from the loft's side: promotion, write-behind, and engines that follow each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_loft_engine import GEOMETRIES, ask, text
from tests.effort import examples

from kvloft.geometry import Geometry, make_geometry
from kvloft.plan import ChunkPlan
from kvloft.testing import Engine, EngineError
from kvloft.testing.geometries import plans, shipped
from kvloft.testing.manual import ManualPlace, ManualTier
from kvloft.testing.scenario import explore

SHIPPED = shipped()
SEEDS = st.integers(0, 2**32 - 1)
NAMES = sorted(GEOMETRIES)


def plan_of(name: str) -> ChunkPlan:
    geometry = make_geometry(GEOMETRIES[name], 4)
    return ChunkPlan(geometry, geometry.unit_tokens)


def make(
    plan: ChunkPlan, *tiers: ManualTier, arena_pages: int = 400, write_all: bool = True,
    step_chunks: int = 4,
) -> Engine:  # fmt: skip
    return Engine(
        plan, random.Random(0), num_blocks=600, arena_bytes=arena_pages * 4096,
        step_tokens=step_chunks * plan.tokens_per_chunk, resume_interval=3 * plan.tokens_per_chunk,
        prefix_caching=False, tiers=tiers, write_all=write_all,
    )  # fmt: skip


def tier_on(place: ManualPlace, plan: ChunkPlan, **options: float) -> ManualTier:
    return ManualTier(
        place,
        random.Random(1),
        has_full=plan.full_layout is not None,
        **options,  # type: ignore[arg-type]
    )


# --- what a new engine finds ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(0.2))
@given(chunks=st.integers(1, 12), beyond=st.integers(0, 6), write_all=st.booleans())
def test_a_new_engine_restores_what_the_old_one_could(
    name: str, chunks: int, beyond: int, write_all: bool
) -> None:
    plan = plan_of(name)
    prompt = text(chunks * plan.tokens_per_chunk + beyond)
    place = ManualPlace()
    old = make(plan, tier_on(place, plan), write_all=write_all)
    assert ask(old, prompt) == 0
    expected = ask(old, prompt)
    ask(old, prompt)
    old.close()
    new = make(plan, tier_on(place, plan))
    assert ask(new, prompt) == expected
    assert ask(new, prompt) == expected
    new.close()
    assert not expected or new.totals.waits
    # Each chunk is read once, and nothing is written again.
    assert new.tiers[0].reads <= len(place.held)
    if write_all:
        assert new.tiers[0].writes == 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written_at_first_sight_if_only_reused_chunks_are(name: str) -> None:
    plan = plan_of(name)
    place = ManualPlace()
    engine = make(plan, tier_on(place, plan), write_all=False)
    ask(engine, text(6 * plan.tokens_per_chunk + 1))
    engine.close()
    assert not place.held


@pytest.mark.parametrize("name", NAMES)
def test_wrong_bytes_from_a_tier_would_be_noticed(name: str) -> None:
    """The proof that the tests here can fail."""
    plan = plan_of(name)
    prompt = text(6 * plan.tokens_per_chunk + 1)
    place = ManualPlace()
    old = make(plan, tier_on(place, plan))
    ask(old, prompt)
    old.close()
    for key, (chunk, data) in list(place.held.items()):
        place.held[key] = (chunk, bytes([data[0] ^ 1]) + data[1:])
    new = make(plan, tier_on(place, plan))
    with pytest.raises(EngineError):
        ask(new, prompt)


# --- random interleavings -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
@settings(max_examples=examples(0.1))
@given(seed=SEEDS, units=st.integers(1, 3), failures=st.sampled_from([0.0, 0.1]))
def test_known_models_restore_every_byte_from_lower_tiers(
    name: str, seed: int, units: int, failures: float
) -> None:
    geometry: Geometry = SHIPPED[name]
    plan = ChunkPlan(geometry, units * geometry.unit_tokens)
    explore(plan, seed, failures=failures, tiers=1 + seed % 2, lives=2, actions=80)


@settings(max_examples=examples(1.5))
@given(plan=plans(), seed=SEEDS, failures=st.sampled_from([0.0, 0.1]))
def test_any_geometry_restores_every_byte_from_lower_tiers(
    plan: ChunkPlan, seed: int, failures: float
) -> None:
    explore(plan, seed, failures=failures, tiers=1 + seed % 2, lives=3, actions=60)
