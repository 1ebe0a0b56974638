"""What is learnt of prompts: chances, what keeping is worth, and which prefixes are known."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloft.catalog.reuse import BUCKETS, EDGES, Reuse, bucket_of, index_of
from kvloft.catalog.sightings import GROUPS, Sightings, group_of, seen_of
from kvloft.catalog.uses import Sighting

CHANCES = st.lists(st.floats(0, 1), min_size=BUCKETS, max_size=BUCKETS)


@given(age=st.integers(0, 1 << 20))
def test_an_age_lies_within_its_bucket(age: int) -> None:
    bucket = bucket_of(age)
    assert EDGES[bucket] <= age or age == 0
    assert bucket == BUCKETS - 1 or age < EDGES[bucket + 1]


def slowly(chances: list[float]) -> list[float]:
    """The index by trying every time that one might go on waiting."""
    out = []
    for first in range(BUCKETS):
        best = 0.0
        for last in range(first, BUCKETS):
            left, found, waited = 1.0, 0.0, 0.0
            for at in range(first, last + 1):
                width = max(1.0, EDGES[at + 1] - EDGES[at]) / (2 if at == first else 1)
                found += left * chances[at]
                waited += left * (1 - chances[at] / 2) * width
                left *= 1 - chances[at]
            best = max(best, found / waited)
        out.append(best)
    return out


@settings(max_examples=200, deadline=None)
@given(chances=CHANCES)
@example(chances=[0.95] * BUCKETS)
@example(chances=[1.0] * BUCKETS)
@example(chances=[1e-12] * BUCKETS)
def test_the_index_is_the_best_of_all_waits(chances: list[float]) -> None:
    assert index_of(chances) == pytest.approx(slowly(chances), rel=1e-6)


def stream(rng: random.Random, prompts: int) -> Iterator[list[Sighting]]:
    """Group 0: comes back after 40 to 60 prompts, with one chance in two. Group 8: never."""
    due: dict[int, list[tuple[int, int]]] = {}
    for now in range(prompts):
        out = [Sighting(0, 30.0, -1, 0, 8)]
        for then, _ in due.pop(now, []):
            out.append(Sighting(0, 30.0, 0, now - then, 72))
        out.append(Sighting(0, 30.0, -1, 0, 0))
        if rng.random() < 0.5:
            due.setdefault(now + rng.randint(40, 60), []).append((now, 0))
        yield out


def test_it_learns_who_comes_back_and_when() -> None:
    reuse = Reuse()
    for sightings in stream(random.Random(1), 4000):
        reuse.saw(sightings)
    index = reuse.index
    # One chance in two within 60 prompts, of which 50 to 60 are waited for.
    assert index[0][0] == pytest.approx(0.5 / 55, rel=0.25)
    assert index[0][bucket_of(40)] > 3 * index[0][0]
    assert index[0][bucket_of(100)] < 0.1 * index[0][0]
    assert index[8][0] < 0.05 * index[0][0]


def test_those_that_still_wait_are_not_taken_for_lost() -> None:
    reuse = Reuse()
    # All come back after 100 prompts; half of them have not had the time.
    for now in range(200):
        sightings = [Sighting(0, 30.0, -1, 0, 0)]
        if now >= 100:
            sightings.append(Sighting(0, 30.0, 0, 100, 72))
        reuse.saw(sightings)
    for _ in range(5):
        reuse.saw([])
    assert reuse.index[0][bucket_of(64)] > 0.5 / 40


def test_what_nothing_is_known_of_is_an_lru() -> None:
    index = Reuse().index
    # The first buckets are narrower than the one prompt that is the least age.
    assert all(a >= b for a, b in zip(index[5][3:], index[5][4:], strict=False))
    assert len(index) == GROUPS


def test_groups_without_data_borrow_from_their_like() -> None:
    reuse = Reuse()
    for number, sightings in enumerate(stream(random.Random(2), 3000)):
        reuse.saw([*sightings, Sighting(0, 1.0, -1, 0, 1)] if number == 2000 else sightings)
    before = Reuse().index[1][bucket_of(45)]
    assert reuse.index[1][bucket_of(45)] > 2 * before


# --- sightings ------------------------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=7), max_size=25)


class Memory:
    """All prompts, plainly."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.known: dict[tuple[int, ...], list[int]] = {}
        """By prefix: group and whether somebody went on from there."""

    def visit(self, said: list[int]) -> tuple[list[int], int, int]:
        """Groups of the known prefixes, that of the new ones, and the branch."""
        prefixes = [tuple(said[: n + 1]) for n in range(len(said))]
        known = 0
        while known < len(prefixes) and prefixes[known] in self.known:
            known += 1
        origin = turn = branch = 0
        if known:
            group, went_on = self.known[prefixes[known - 1]]
            origin, turn = 1 + went_on, min(2, group // 8 % 3 + 1)
            if known < len(prefixes):
                branch = known if went_on else 0
                self.known[prefixes[known - 1]][1] = 1
        new = (len(said) - known) * self.size
        groups = []
        for prefix in prefixes[:known]:
            old = self.known[prefix][0]
            group = group_of(seen_of(old) + 1, origin, old // 8 % 3, new)
            self.known[prefix][0] = group
            groups.append(group)
        fresh = group_of(0, origin, turn, new)
        for prefix in prefixes[known:]:
            self.known[prefix] = [fresh, 0]
        return groups, fresh, branch


@given(prompts=PROMPTS, size=st.sampled_from([512, 1024]))
def test_prompts_are_remembered_as_they_were(prompts: list[list[int]], size: int) -> None:
    sightings, memory = Sightings(1 << 12, size), Memory(size)
    names: dict[tuple[int, ...], bytes] = {}
    rng = random.Random(1)
    for said in prompts:

        def keys(tokens: int, said: list[int] = said) -> bytes:
            return names.setdefault(tuple(said[: tokens // size]), rng.randbytes(16))

        visit, seen = sightings.visit(keys, len(said))
        groups, fresh, branch = memory.visit(said)
        assert (visit.groups, visit.new_group, visit.branch) == (groups, fresh, branch)
        assert [s.before >= 0 for s in seen] == [n < len(groups) for n in range(len(said))]
        for depth in range(1, len(said) + 1):
            group = groups[depth - 1] if depth <= len(groups) else fresh
            assert visit.use(depth, b"x" * 16).group == group
            assert visit.segment(depth)[0] == group


def test_a_small_table_forgets_the_oldest_and_stays_small() -> None:
    sightings, rng = Sightings(64, 16), random.Random(3)
    first = [rng.randbytes(16) for _ in range(4)]
    sightings.visit(lambda tokens: first[tokens // 16 - 1], 4)
    for _ in range(300):
        other = [rng.randbytes(16) for _ in range(4)]
        sightings.visit(lambda tokens, o=other: o[tokens // 16 - 1], 4)  # type: ignore[misc]
    assert len(sightings._table) == 64
    visit, _ = sightings.visit(lambda tokens: first[tokens // 16 - 1], 4)
    assert visit.known == 0


@pytest.mark.parametrize("size", [16, 512, 544, 3584])
def test_a_walk_is_short(size: int) -> None:
    sightings = Sightings(64, size)
    for tokens in (1000, 100_000, 1_000_000, 10_000_000):
        grid = sightings.grid(tokens // size)
        assert grid == sorted(set(grid))
        assert len(grid) <= 16 + 256 + 256 * 5
        if grid:
            assert tokens // size - grid[-1] <= max(1, tokens // 256 // size, 512 // size)
    assert sightings.grid(0) == []
