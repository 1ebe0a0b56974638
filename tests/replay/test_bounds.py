"""What no policy can exceed: against every plan there is, on instances small enough to try them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from kvloft.geometry import Geometry, Group, Layers, make_geometry
from kvloft.plan import ChunkPlan
from kvloft.replay.bounds import block_optimum, resume_bound
from kvloft.replay.trace import Request, Trace, boundary_ids

G = 4


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts that share prefixes; an id names a whole prefix."""
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(count):
        tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, longest)))
        prompts.append([names.setdefault(tokens[: n + 1], len(names)) for n in range(len(tokens))])
    return prompts


def hits_of(prompt: Sequence[int], resident: frozenset[int]) -> int:
    found = 0
    while found < len(prompt) and prompt[found] in resident:
        found += 1
    return found


def best_by_search(prompts: list[list[int]], capacity: int, measured_from: int) -> int:
    """The most hits over all that could be kept after every prompt."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for index, prompt in enumerate(prompts):
        after: dict[frozenset[int], int] = {}
        for resident, hits in states.items():
            if index >= measured_from:
                hits += hits_of(prompt, resident)
            everything = sorted(resident | set(prompt))
            for size in range(min(capacity, len(everything)) + 1):
                for kept in map(frozenset, itertools.combinations(everything, size)):
                    after[kept] = max(after.get(kept, 0), hits)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_of_blocks_is_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(2, 7), 3)
    capacity, first = rng.randint(1, 4), rng.randint(0, 2)
    hits = block_optimum(prompts, capacity, measured_from=first)
    assert sum(hits) == sum(hits[first:]) == best_by_search(prompts, capacity, first)


def lru_hits(prompts: list[list[int]], capacity: int) -> list[int]:
    resident: dict[int, None] = {}
    out = []
    for prompt in prompts:
        out.append(hits_of(prompt, frozenset(resident)))
        for name in reversed(prompt):
            resident.pop(name, None)
            resident[name] = None
        while len(resident) > capacity:
            del resident[next(iter(resident))]
    return out


def test_the_optimum_is_no_less_than_lru_and_no_more_than_keeping_everything() -> None:
    prompts = random_prompts(random.Random(5), 400, 12)
    everything = sum(block_optimum(prompts, 10_000)[100:])
    assert everything == sum(lru_hits(prompts, 10_000)[100:])
    for capacity in (1, 5, 20, 80):
        best = sum(block_optimum(prompts, capacity, measured_from=100)[100:])
        assert sum(lru_hits(prompts, capacity)[100:]) <= best <= everything
        assert sum(block_optimum(prompts, capacity)[100:]) <= best


def test_nothing_is_hit_without_room() -> None:
    assert block_optimum([[1, 2], [1, 2]], 0) == [0, 0]
    assert block_optimum([[1, 2], [1, 2]], 1) == [0, 1]
    assert block_optimum([], 3) == []


# ---------------------------------------------------------------------------------- resume points


def layers(size: int) -> tuple[Layers, ...]:
    return (Layers(1, size, size),)


def mixed(window: int) -> Geometry:
    groups = [
        Group(0, "full", 4, layers(3)),
        Group(1, "window", 2, layers(1), window=window),
        Group(2, "state", 4, layers(2)),
    ]
    return make_geometry(groups, 2)


def uniform() -> Geometry:
    return make_geometry([Group(0, "full", 4, layers(3))], 4)


def make_trace(prompts: Sequence[Sequence[int]], tails: Sequence[int]) -> Trace:
    """Blocks of G tokens, and some tokens more behind the last whole one."""
    requests = [
        Request(float(n), len(prompt) * G + tail, 1, [*prompt, -1 - n] if tail else list(prompt))
        for n, (prompt, tail) in enumerate(zip(prompts, tails, strict=True))
    ]
    return Trace("made", G, requests)


Chunk = tuple[str, int, int]
"""Kind, boundary, bytes."""


class Rules:
    """What a resume needs, told again: from the groups' own rules instead of a plan's pieces."""

    def __init__(self, geometry: Geometry, trace: Trace) -> None:
        self._groups = geometry.groups
        self.prompts = [list(boundary_ids(r, G, G)) for r in trace.requests]
        self.limits = [(r.prompt_tokens - 1) // G for r in trace.requests]

    def needs(self, prompt: Sequence[int], depth: int) -> Iterator[Chunk]:
        """Chunks behind a resume at ``depth`` chunks of a prompt."""
        for group in self._groups:
            per_chunk = G // group.tokens_per_block
            needed = group.resume_blocks(depth * G)
            for at in range(depth):
                blocks = range(at * per_chunk, (at + 1) * per_chunk)
                count = len([block for block in blocks if block in needed])
                if count:
                    kind = f"{group.id}, {'whole' if count == per_chunk else 'short'}"
                    yield kind, prompt[at], count * group.block_bytes

    def passed(self, prompt: Sequence[int]) -> set[Chunk]:
        """All that a policy could store while this prompt is served."""
        return {chunk for depth in range(1, len(prompt) + 1) for chunk in self.needs(prompt, depth)}


def best_resumes(rules: Rules, budget: int, measured_from: int) -> int:
    """The most tokens restored, over all that could be kept after every prompt."""
    states: dict[frozenset[Chunk], int] = {frozenset(): 0}
    for index, (prompt, limit) in enumerate(zip(rules.prompts, rules.limits, strict=True)):
        wanted = {chunk for later in rules.prompts[index + 1 :] for chunk in rules.passed(later)}
        after: dict[frozenset[Chunk], int] = {}
        for resident, tokens in states.items():
            if index >= measured_from:
                depths = range(min(limit, len(prompt)), 0, -1)
                tokens += G * next(
                    (d for d in depths if resident.issuperset(rules.needs(prompt, d))), 0
                )
            for kept in _subsets(sorted((resident | rules.passed(prompt)) & wanted), budget):
                after[kept] = max(after.get(kept, 0), tokens)
        states = after
    return max(states.values())


def _subsets(chunks: Sequence[Chunk], budget: int) -> Iterator[frozenset[Chunk]]:
    for size in range(len(chunks) + 1):
        for kept in itertools.combinations(chunks, size):
            if sum(chunk[2] for chunk in kept) <= budget:
                yield frozenset(kept)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("window", [3, 6])
def test_no_plan_exceeds_the_bound(seed: int, window: int) -> None:
    rng = random.Random(seed)
    geometry = mixed(window)
    prompts = random_prompts(rng, rng.randint(3, 5), 2)
    trace = make_trace(prompts, [rng.randint(0, 2) for _ in prompts])
    first, budget = rng.randint(0, 2), rng.randint(4, 15)
    best = best_resumes(Rules(geometry, trace), budget, first)
    asked = sum(r.prompt_tokens for r in trace.requests[first:])
    found = resume_bound(trace, ChunkPlan(geometry, G), budget, measured_from=first, rounds=150)
    assert found * asked >= best - 1e-6


def test_the_bound_is_met_where_everything_fits() -> None:
    geometry = mixed(6)
    trace = make_trace([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 9]], [1, 1, 0, 0])
    found = resume_bound(trace, ChunkPlan(geometry, G), 10_000, measured_from=1)
    # No token is left behind the second last prompt's third boundary; the last one's is new.
    assert found * (13 + 12 + 12) == pytest.approx(12 + 8 + 8)


def test_a_window_chunk_between_two_resumes_is_counted_once() -> None:
    trace = make_trace([[1, 2], [1], [1], [1], [1, 2]], [1] * 5)
    first = 3 + 2 + 2  # What a resume at the first boundary needs: full, state, window.
    second = 3 + 2 + 2  # At the second one besides; it needs a block of the first window, too.
    plan = ChunkPlan(mixed(6), G)
    found = resume_bound(trace, plan, first + second, measured_from=1)
    assert found * (3 * 5 + 9) == pytest.approx(3 * 4 + 8)
    found = resume_bound(trace, plan, first + second - 1, measured_from=1)
    assert found * (3 * 5 + 9) < 3 * 4 + 8 - 0.1


def test_the_bound_is_near_where_requests_are_small_beside_the_budget() -> None:
    """Two prompts of one length take turns and only one of them has room: half of the hits."""
    geometry = mixed(6)
    prompts = [[10 * (n % 2) + k for k in range(3)] for n in range(40)]
    trace, plan = make_trace(prompts, [1] * 40), ChunkPlan(geometry, G)
    one = 3 * 3 + 2 + 3  # Full chunks, a state, three blocks of the window.
    found = resume_bound(trace, plan, one, measured_from=20)
    assert found == pytest.approx(0.5 * 12 / 13, rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_without_windows_and_states_it_is_the_optimum_of_blocks(seed: int) -> None:
    prompts = random_prompts(random.Random(seed), 60, 6)
    plan = ChunkPlan(uniform(), G)
    trace = make_trace(prompts, [1] * len(prompts))
    hits = block_optimum(prompts, 5, measured_from=30)
    asked = sum(r.prompt_tokens for r in trace.requests[30:])
    assert resume_bound(trace, plan, 5 * plan.full_chunk_bytes + 1) == sum(hits) * G / asked


def test_prices_come_close_to_that_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxation is exact for blocks alone, so what is missing is the search for prices."""
    prompts = random_prompts(random.Random(3), 300, 6)
    plan = ChunkPlan(uniform(), G)
    trace = make_trace(prompts, [1] * len(prompts))
    exact = resume_bound(trace, plan, 10 * plan.full_chunk_bytes)
    monkeypatch.setattr(ChunkPlan, "has_resume_points", True)
    found = resume_bound(trace, plan, 10 * plan.full_chunk_bytes)
    assert exact <= found <= exact * 1.02


def test_nothing_to_measure_is_no_hit() -> None:
    plan = ChunkPlan(mixed(3), G)
    assert resume_bound(Trace("none", G, []), plan, 100) == 0.0
    trace = make_trace([[1], [1]], [0, 0])
    assert resume_bound(trace, plan, 0) == 0.0
    assert resume_bound(trace, plan, 100, measured_from=2) == 0.0
