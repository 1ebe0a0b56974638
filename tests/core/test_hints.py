"""What requests say of themselves: read without ever failing, and heeded."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.arena import Arena
from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import POLICIES
from kvloft.geometry import load
from kvloft.hints import KEYS, MAX_PIN_SECONDS, NO_HINTS, Hints, parse_hints
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan
from kvloft.replay.driver import chunk_names
from kvloft.testing import audit

SIZE = 16
PLAN = ChunkPlan(load("llama-3.1-8b"), SIZE)

HUGE = st.integers(300, 6000).map(lambda digits: (-10) ** digits)


class Unshowable:
    """What only a program that runs vLLM itself can pass."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class Unreadable(UserDict[str, Any]):
    """A mapping that fails when it is read."""

    def get(self, *_: Any) -> Any:
        raise RuntimeError("no")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | HUGE
    | st.floats()
    | st.text(max_size=5)
    | st.text(min_size=200, max_size=300)
    | st.builds(Unshowable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(params=st.dictionaries(st.sampled_from([*KEYS, "other"]), JSON) | JSON)
def test_nothing_that_is_said_raises(params: Any) -> None:
    hints, complaints = parse_hints(params)
    assert abs(hints.priority) <= 2
    assert 0 <= hints.pin_seconds <= MAX_PIN_SECONDS
    assert hints.max_load_tokens is None or hints.max_load_tokens >= 0
    assert all(len(complaint) < 200 for complaint in complaints)
    if isinstance(params, dict):
        said = sum(params.get(key) is not None for key in KEYS)
        heeded = sum(
            parse_hints({key: params.get(key)})[1] == [] and params.get(key) is not None
            for key in KEYS
        )
        assert len(complaints) == said - heeded
    else:
        assert (hints, complaints) == (NO_HINTS, [])


def test_what_cannot_be_read_is_told() -> None:
    hints, complaints = parse_hints(Unreadable(priority=1))
    assert hints == NO_HINTS
    assert len(complaints) == len(KEYS)


def test_what_is_right_is_taken_and_what_is_wrong_is_told() -> None:
    right = {
        "do_not_store": True, "do_not_load": False, "max_load_tokens": 0,
        "max_offload_tokens": 512, "priority": -2, "pin_seconds": 60, "do_remote_prefill": True,
    }  # fmt: skip
    assert parse_hints(right) == (Hints(True, False, 0, 512, -2, 60.0), [])
    hints, complaints = parse_hints({"priority": 7, "pin_seconds": "long", "do_not_load": 1})
    assert hints == NO_HINTS
    assert [c.split("'")[1] for c in complaints] == ["do_not_load", "priority", "pin_seconds"]
    assert "7; write a whole number from -2 to 2" in complaints[1]


class Lofts:
    """A loft, and whole requests on it."""

    def __init__(self, chunks: int, policy: str = "lru", **options: Any) -> None:
        self.now = 0.0
        self.told: list[str] = []
        budget = chunks * PLAN.full_chunk_bytes
        self.loft = Loft(
            PLAN, Arena(budget, PLAN.full_chunk_bytes), POLICIES[policy](room_of(PLAN, budget)),
            ranks=1, resume_interval=SIZE, clock=lambda: self.now,
            tell=lambda cause, message: self.told.append(message), **options,
        )  # fmt: skip
        self.count = 0

    def ask(self, ids: list[int], params: object = None, computed: int = 0) -> int:
        """Chunks restored for a prompt of these chunks."""
        self.count += 1
        loft, name = self.loft, str(self.count)
        keys = chunk_names(ids)
        tokens = len(ids) * SIZE + 1
        loft.track(name, lambda boundary: keys[boundary // SIZE - 1], tokens, params)
        found = loft.match(name, tokens, computed) or 0
        tables = [list(range(1, len(ids) + 1))]
        if found:
            done(loft, loft.begin_load(name, computed, tables))
        while loft.wants(name, tokens - 1):
            job = loft.begin_store(name, tokens - 1, tables)
            if job is not None:
                done(loft, job)
        loft.forget(name)
        loft.step()
        return max(0, found - computed) // SIZE


def done(loft: Loft, job: Job) -> None:
    """The only rank has done its part."""
    loft.report(job.id, 0, True)


A, B = list(range(1, 9)), list(range(101, 109))


def test_do_not_store() -> None:
    lofts = Lofts(100)
    assert lofts.ask(A, {"do_not_store": True}) == 0
    assert lofts.loft.stats().chunks == 0
    lofts.ask(A)
    assert lofts.ask(A, {"do_not_store": True}) == 8


def test_do_not_load() -> None:
    lofts = Lofts(100)
    lofts.ask(A)
    assert lofts.ask(A, {"do_not_load": True}) == 0
    assert lofts.ask(A) == 8


@pytest.mark.parametrize(
    ("most", "computed", "chunks"),
    [(0, 0, 0), (15, 0, 0), (16, 0, 1), (40, 0, 2), (9999, 0, 8), (32, 32, 2), (0, 32, 0)],
)
def test_a_cap_on_loading_counts_from_what_the_engine_has(
    most: int, computed: int, chunks: int
) -> None:
    lofts = Lofts(100)
    lofts.ask(A)
    assert lofts.ask(A, {"max_load_tokens": most}, computed) == chunks


@pytest.mark.parametrize(("most", "chunks"), [(0, 0), (15, 0), (16, 1), (47, 2), (9999, 8)])
def test_a_cap_on_storing_counts_from_the_beginning(most: int, chunks: int) -> None:
    for prompt_only in (True, False):
        lofts = Lofts(100, prompt_only=prompt_only)
        lofts.ask(A, {"max_offload_tokens": most})
        assert lofts.loft.stats().chunks == chunks


@pytest.mark.parametrize("policy", ["adaptive", "density", "cost"])
def test_priority_decides_who_goes(policy: str) -> None:
    for first, second, stays in ((2, -2, A), (-2, 2, B)):
        lofts = Lofts(16, policy)
        lofts.ask(A, {"priority": first})
        lofts.ask(B, {"priority": second})
        lofts.ask([*range(201, 209)])
        assert lofts.ask(stays, {"do_not_store": True}) == 8
        assert lofts.ask(B if stays is A else A, {"do_not_store": True}) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pin_lasts_as_long_as_it_says(policy: str) -> None:
    lofts = Lofts(20, policy)
    lofts.ask(A, {"pin_seconds": 60})
    stats = lofts.loft.stats()
    assert (stats.pins, stats.pinned_bytes) == (1, 8 * PLAN.full_chunk_bytes)
    for number in range(2, 40):
        other = list(range(1000 * number, 1000 * number + 12))
        lofts.ask(other)
        lofts.ask(other)
    assert lofts.ask(A, {"do_not_store": True}) == 8
    lofts.now = 61.0
    lofts.loft.step()
    assert lofts.loft.stats().pins == 0
    audit.check_idle(lofts.loft.catalog)
    if policy == "lru":
        for number in range(50, 60):
            lofts.ask(list(range(1000 * number, 1000 * number + 12)))
        assert lofts.ask(A) == 0


def test_pins_hold_half_of_the_budget_at_most() -> None:
    lofts = Lofts(30)
    lofts.ask(A, {"pin_seconds": 60})
    lofts.ask(B, {"pin_seconds": 60})
    lofts.ask([7777], {"pin_seconds": 60, "do_not_store": True})
    stats = lofts.loft.stats()
    assert (stats.pins, stats.refused_pins) == (1, 2)
    assert stats.pinned_bytes <= stats.budget_bytes // 2


def test_a_reset_ends_pins() -> None:
    lofts = Lofts(100)
    lofts.ask(A, {"pin_seconds": 60})
    lofts.loft.reset()
    assert lofts.loft.stats().pins == 0
    audit.check_empty(lofts.loft.catalog)


def test_a_failed_load_ends_the_pins_of_what_it_has_read() -> None:
    lofts = Lofts(100)
    lofts.ask(A, {"pin_seconds": 60})
    lofts.ask(A[:4] + B, {"pin_seconds": 60})
    lofts.ask([999], {"pin_seconds": 60})
    loft, keys = lofts.loft, chunk_names(A)
    loft.track("fails", lambda b: keys[b // SIZE - 1], 8 * SIZE + 1)
    loft.match("fails", 8 * SIZE + 1, 0)
    job = loft.begin_load("fails", 0, [list(range(1, 9))])
    loft.report(job.id, 0, False, "checksum", job.copies[0].offsets[2:3])
    loft.forget("fails")
    stats = loft.stats()
    assert (stats.pins, stats.chunks) == (1, 3)
    assert stats.pinned_bytes == PLAN.full_chunk_bytes
    lofts.now = 61.0
    loft.step()
    assert loft.stats().pins == 0
    audit.check_idle(loft.catalog)


def test_a_pin_waits_for_the_store_that_it_is_about() -> None:
    lofts = Lofts(100)
    loft, keys = lofts.loft, chunk_names(A)
    loft.track("slow", lambda b: keys[b // SIZE - 1], 8 * SIZE + 1, {"pin_seconds": 60})
    loft.match("slow", 8 * SIZE + 1, 0)
    job = loft.begin_store("slow", 8 * SIZE, [list(range(1, 9))])
    assert job is not None
    loft.forget("slow")
    loft.step()
    assert loft.stats().pins == 0
    done(loft, job)
    loft.step()
    assert loft.stats().pins == 1


def test_wrong_hints_are_counted_and_told() -> None:
    lofts = Lofts(100)
    lofts.ask(A, {"priority": "high", "max_load_tokens": 1.5})
    assert lofts.loft.stats().ignored_hints == 2
    assert lofts.ask(A) == 8
    assert "'high'" in lofts.told[1]


def test_figures_taken_earlier_do_not_move() -> None:
    lofts = Lofts(100)
    before = lofts.loft.stats()
    lofts.ask(A)
    after = lofts.loft.stats()
    assert before.counters.stored_chunks == 0
    assert after.counters.stored_chunks == 8
