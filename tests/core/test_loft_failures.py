"""What the loft makes of failures: nobody meets the same one for ever, and canaries end loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.catalog.policies import LRU
from kvloft.geometry import Group, Layers, make_geometry
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan
from kvloft.testing import audit

SIZE = 16
GEOMETRY = make_geometry([Group(0, "full", SIZE, (Layers(1, 4096, 4096),))], SIZE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Users:
    """Requests on one loft; a text is a string of letters, a chunk each."""

    def __init__(self, ranks: int = 1, canary: float = 0.0) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        plan = ChunkPlan(GEOMETRY, SIZE)
        arena = Arena(1 << 20, choose_slab_bytes(1 << 20, plan.slot_sizes()))
        self.loft = Loft(
            plan, arena, LRU(), ranks=ranks, resume_interval=SIZE, clock=self.clock,
            canary=canary, tell=lambda cause, message: self.told.append(cause),
        )  # fmt: skip
        self._ranks = ranks
        self._numbers = iter(range(1 << 30))

    def ask(self, text: str) -> str:
        name = f"r{next(self._numbers)}"
        self.loft.track(name, lambda end: text[: end // SIZE].encode().ljust(16), len(text) * SIZE)
        return name

    def report(self, job: Job | None, *more: Any, ok: bool = True) -> None:
        assert job is not None
        for rank in range(self._ranks):
            self.loft.report(job.id, rank, ok, *more)

    def compute(self, name: str, text: str) -> None:
        job = self.loft.begin_store(name, len(text) * SIZE, [list(range(1, len(text) + 1))])
        if job is not None:
            self.report(job)

    def store(self, text: str) -> None:
        name = self.ask(text)
        self.loft.match(name, len(text) * SIZE + 1, 0)
        self.compute(name, text)
        self.loft.forget(name)

    def find(self, text: str) -> tuple[str, int]:
        """A request and the chunks that it could be restored."""
        name = self.ask(text)
        return name, (self.loft.match(name, len(text) * SIZE + 1, 0) or 0) // SIZE

    def load(self, text: str) -> tuple[str, Job]:
        name, found = self.find(text)
        assert found
        return name, self.loft.begin_load(name, 0, [list(range(1, found + 1))])

    def fails(self, text: str, *more: Any) -> None:
        name, job = self.load(text)
        self.report(job, *more, ok=False)
        self.loft.forget(name)


@pytest.fixture
def users() -> Iterator[Users]:
    made = Users()
    yield made
    for name in list(made.loft._requests):
        made.loft.forget(name)
    audit.check_idle(made.loft.catalog)


def test_what_only_a_failed_load_has_read_is_forgotten(users: Users) -> None:
    users.store("abcd")
    users.store("abxyz")
    users.fails("abcd")
    assert users.find("abcd")[1] == 2
    assert users.find("abxyz")[1] == 5
    assert users.loft.stats().forgotten_chunks == 2


def test_a_prefix_that_fails_again_and_again_is_given_up_in_the_end(users: Users) -> None:
    users.store("abcd")
    users.store("abxyz")
    failures = 0
    while (found := users.find("abcd"))[1]:
        users.loft.forget(found[0])
        users.fails("abcd")
        failures += 1
    assert failures <= 3


def test_a_corrupt_slot_takes_what_rests_on_it_and_no_more(users: Users) -> None:
    users.store("abcd")
    users.store("abxyz")
    name, job = users.load("abcd")
    users.report(job, "checksum", [job.copies[0].offsets[1]], ok=False)
    assert users.find("abcd")[1] == 1
    assert users.find("abxyz")[1] == 1
    # Who has met it computes the prefix and stores it again.
    users.compute(name, "abcd")
    assert users.find("abcd")[1] == 4
    assert users.loft.stats().failures == {("load", "checksum"): 1}


def test_a_request_is_not_restored_twice_after_a_failure(users: Users) -> None:
    users.store("abcd")
    users.store("zz")
    name, job = users.load("abcd")
    users.report(job, ok=False)
    users.store("abcd")
    assert users.loft.match(name, 4 * SIZE + 1, 0) == 0
    assert users.find("abcd")[1] == 4


def test_what_others_read_meanwhile_stays_until_they_are_done(users: Users) -> None:
    users.store("abcd")
    _, first = users.load("abcd")
    _, second = users.load("abcd")
    users.report(first, ok=False)
    assert users.find("abcd")[1] == 0
    audit.check(users.loft.catalog)
    assert users.loft.stats().live_bytes > 0
    users.report(second)
    assert users.loft.stats().live_bytes == 0


def test_failures_in_a_row_pause_loading(users: Users) -> None:
    for letter in "abcde":
        users.store(letter * 3)
    users.store("good")
    for letter in "abcde":
        users.fails(letter * 3)
    assert users.told == ["load_pause"]
    assert not users.loft.stats().loading
    assert users.find("good")[1] == 0
    users.clock.now += 61
    assert users.find("good")[1] == 4


def test_a_load_that_works_ends_the_row(users: Users) -> None:
    users.store("good")
    for letter in "abcdefgh":
        users.store(letter * 3)
        users.fails(letter * 3)
        name, job = users.load("good")
        users.report(job)
        users.loft.forget(name)
    assert not users.told


def test_stores_under_way_below_what_is_forgotten_are_given_up(users: Users) -> None:
    users.store("ab")
    _, load = users.load("ab")
    name = users.ask("abcd")
    users.loft.match(name, 4 * SIZE + 1, 0)
    store = users.loft.begin_store(name, 4 * SIZE, [[1, 2, 3, 4]])
    users.report(load, ok=False)
    users.report(store)
    assert users.find("abcd")[1] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_canary_is_computed_and_compared_and_a_difference_ends_loading(ranks: int) -> None:
    users = Users(ranks, canary=1.0)
    users.store("abcd")
    name, found = users.find("abcd")
    assert found == 0
    table = [[5, 6, 7, 8]]
    sound = users.loft.begin_comparison(name, 2 * SIZE, table)
    assert sound is not None
    assert [copy.parts[0].block_ids for copy in sound.copies] == [[5, 6]]
    users.report(sound)
    assert users.loft.begin_comparison(name, 2 * SIZE + 1, table) is None
    wrong = users.loft.begin_comparison(name, 4 * SIZE, table)
    assert wrong is not None
    assert users.loft.stats().loading
    for rank in range(ranks):
        users.loft.report(wrong.id, rank, rank < ranks - 1, "difference")
    users.loft.forget(name)
    stats = users.loft.stats()
    assert users.told == ["canary"]
    assert (stats.loading, stats.canary_differences, stats.canaries) == (False, 1, 1)
    users.clock.now += 1e6
    assert users.find("abcd")[1] == 0
    audit.check_idle(users.loft.catalog)
