"""What no policy can exceed: the optimum of the block problem, a bound for that of resume points.

Both know the future. In both, what must lie in memory for a hit is told by *intervals*: a chunk
that request j finds was there ever since the last request i < j whose prompt has it, because nobody
else could have brought it. Intervals of one chunk never overlap, each belongs to the request that
it ends at, and in every gap between two requests those that are kept have to fit. A plan is thus a
choice of intervals, and those of different requests don't interact but for the room they take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvloft.plan import ChunkPlan
from kvloft.replay.trace import Trace, boundary_ids

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def block_optimum(
    prompts: Sequence[Sequence[int]], capacity: int, *, measured_from: int = 0
) -> list[int]:
    """Chunks that each prompt hits under a plan that no other one beats.

    Every chunk takes one place, a prompt hits its longest prefix that is resident, and nothing has
    to be stored. ``prompts``: one id per whole chunk, which names the whole prefix. ``capacity``:
    chunks. What is greatest is the sum over the prompts from ``measured_from`` on; those before
    hit nothing here, as it would earn nothing.

    This is Belady's rule (1966) with bypassing, and exactly optimal for prefixes too. Forget for a
    moment that a hit needs all of its prefix. Then the most hits are the most intervals of which
    no more than ``capacity`` overlap, and to drop the one that ends last whenever there are too
    many is optimal (Faigle and Nawijn 1995; Carlisle and Lloyd 1995): any plan that keeps it can
    swap it for one that ends earlier. Dropping the requirement can only gain, so this bounds the
    real problem. And it is attained: of two intervals that end at one prompt, the deeper chunk's
    begins no later, as whoever has the deeper chunk has both. If of equal ends the deeper one goes
    first, then whenever the shallower one is dropped, the deeper one was there and went before.
    """
    return _optimum(prompts, [len(prompt) for prompt in prompts], capacity, measured_from)


def _optimum(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], capacity: int, measured_from: int
) -> list[int]:
    """As `block_optimum`, where a prompt hits no more chunks than its limit."""
    kept = [0] * len(prompts)
    heap: list[tuple[int, int]] = []  # What has ended sinks to where nothing is taken from.
    resident = 0
    for index, intervals in enumerate(_intervals(prompts, limits, measured_from)):
        resident += len(intervals) - kept[index]
        for interval in intervals:
            heapq.heappush(heap, interval)
            kept[-interval[0]] += 1
        while resident > capacity:
            end, _ = heapq.heappop(heap)
            kept[-end] -= 1
            resident -= 1
    return kept


def _intervals(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], measured_from: int
) -> list[list[tuple[int, int]]]:
    """By prompt where they begin: the end and the depth of each, both negated."""
    last: dict[int, int] = {}
    begins: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        for depth, name in enumerate(prompt):
            before = last.get(name)
            if before is not None and index >= measured_from and depth < limits[index]:
                begins[before].append((-index, -depth))
            last[name] = index
    return begins


# ---------------------------------------------------------------------------------- resume points


def resume_bound(
    trace: Trace,
    plan: ChunkPlan,
    budget_bytes: int,
    *,
    measured_from: int | None = None,
    rounds: int = 800,
) -> float:
    """A token hit rate that no policy exceeds which resumes at multiples of the chunk length.

    Over the requests from ``measured_from`` on, by default the second half: restored tokens by all
    tokens of their prompts. ``rounds``: how often prices are improved; the answer is a bound
    whatever they are.

    What a request j needs in order to resume at e are the full chunks of every boundary up to e and
    the window and state chunks that :meth:`ChunkPlan.pieces` names. Each of them lay in memory ever
    since the last earlier request whose prompt has that boundary, or it could not be there: so it
    took its bytes in every gap between the two. As intervals of one chunk don't overlap, a piece of
    memory serves one request at a time, and in each gap the needs of all later requests add up to
    no more than the budget. Of all that a policy must obey only this is kept. A plan chooses one
    boundary (or none) for each request; the most tokens of all plans that fit is what a policy that
    knew the future, and could store any chunk whenever a prompt passes it, would restore.

    To find that plan is hard (with one gap it is a knapsack problem); to bound it is not. Let a
    byte cost p(t) >= 0 in gap t, and let a plan that takes more than the budget pay for the excess
    and one that takes less be paid for the rest. Plans that fit do not lose by that, so the
    most of

        budget * sum of p  +  sum over requests of the most that a boundary earns after its costs

    is at least the most tokens of plans that fit, for any p (Everett 1963; Held and Karp 1971); and
    requests choose by themselves, as they interact through prices alone. Prices come from the
    volume algorithm (Barahona and Anbil 2000), first equal in long stretches of the trace, then
    finer. Their best is the linear relaxation of the choice, which is near because one request's
    needs are small beside a budget. Without windows and states it is `block_optimum`, exactly.
    """
    size, count = plan.tokens_per_chunk, len(trace.requests)
    first = count // 2 if measured_from is None else measured_from
    total = sum(request.prompt_tokens for request in trace.requests[first:])
    if not total or budget_bytes < 1:
        return 0.0
    if not plan.has_resume_points:
        prompts = [boundary_ids(r, trace.tokens_per_block, size) for r in trace.requests]
        limits = [max(0, (r.prompt_tokens - 1) // size) for r in trace.requests]
        hits = _optimum(prompts, limits, budget_bytes // plan.full_chunk_bytes, first)
        return sum(hits) * size / total
    choices = _choices(trace, size, first)
    if not len(choices.starts):
        return 0.0
    return _lowest(_Dual(choices, plan, budget_bytes), total / choices.gaps, rounds) / total


_STRETCHES = ((0.0, 4), (0.05, 32), (0.12, 256), (0.3, 2048), (0.5, 1 << 62))
"""From which part of the rounds on prices may differ between how many stretches of the trace."""
_PATIENCE = 10
_LEAST_STEP = 1e-5


def _lowest(dual: _Dual, scale: float, rounds: int) -> float:
    """The least value found of a convex function of prices; ``scale``: of a price that matters."""
    search = _Search(dual, min(_uniform(dual.gaps, scale), key=lambda prices: dual(prices)[0]))
    finer = {int(rounds * share): parts for share, parts in _STRETCHES}
    for turn in range(rounds):
        if turn in finer:
            search.divide(finer[turn])
        if not search.turn() and turn >= max(finer):
            break
    return search.best


class _Search:
    """The volume algorithm: a step against an average of slopes, taken back if it does not help."""

    def __init__(self, dual: _Dual, prices: _Floats) -> None:
        self._dual = dual
        self._prices = prices
        self.best, self._slope = dual(prices)
        self._average = self._slope
        self._step = 0.05
        """Which part of the value a step would take away, if the function were flat."""
        self._stride = 1.0
        self._failures = 0
        self._cuts = np.zeros(1, dtype=np.int64)

    def divide(self, parts: int) -> None:
        """Let prices differ between this many stretches."""
        gaps = self._dual.gaps
        ends = np.linspace(0, gaps, min(parts, gaps), endpoint=False)
        self._cuts = np.unique(ends.astype(np.int64))
        self._average, self._step = self._slope, max(self._step, 0.025)

    def turn(self) -> bool:
        """Try other prices; whether there is hope for more."""
        way = self._way(self._average)
        if not way.any():
            self._average = self._slope
            way = self._way(self._average)
        if not way.any() or self._step < _LEAST_STEP:
            return False
        length = self._stride * self._step * self.best / float(way @ way)
        tried = np.maximum(0.0, self._prices - length * way)
        value, slope = self._dual(tried)
        self._average = 0.95 * self._average + 0.05 * slope
        if value < self.best:
            if value < self.best * (1 - 1e-5):
                self._failures = 0
            self.best, self._prices, self._slope = value, tried, slope
            self._stride = min(2.0, self._stride * 1.1)
            return True
        self._failures += 1
        self._stride = max(0.05, self._stride * 0.97)
        if self._failures >= _PATIENCE:
            self._step, self._failures = self._step * 0.66, 0
        return True

    def _way(self, slope: _Floats) -> _Floats:
        """The slope as far as prices may follow it: none falls below 0."""
        sizes = np.diff(np.append(self._cuts, len(slope)))
        way = np.repeat(np.add.reduceat(slope, self._cuts) / sizes, sizes)
        way[(self._prices <= 0) & (way > 0)] = 0.0
        return way


def _uniform(gaps: int, scale: float) -> Iterator[_Floats]:
    yield np.zeros(gaps)
    for exponent in range(-8, 2):
        yield np.full(gaps, scale * 10 ** (exponent / 2))


@dataclass(frozen=True, slots=True)
class _Choices:
    """Every boundary that a measured request could resume at, if all were kept for ever.

    Those of a request lie together, the shallowest first.
    """

    gaps: int
    """Between requests; gap t is the one behind request t."""
    starts: _Ints
    """By request that has any: index of its first choice."""
    request: _Ints
    """By choice, as the two below."""
    depth: _Ints
    """Chunks."""
    since: _Ints
    """The last request before whose prompt reaches this boundary."""


def _choices(trace: Trace, tokens_per_chunk: int, measured_from: int) -> _Choices:
    last: dict[int, int] = {}
    starts: list[int] = []
    request: list[int] = []
    depth: list[int] = []
    since: list[int] = []
    for index, each in enumerate(trace.requests):
        ids = boundary_ids(each, trace.tokens_per_block, tokens_per_chunk)
        if index >= measured_from:
            begun = len(since)
            for at in range(min(len(ids), (each.prompt_tokens - 1) // tokens_per_chunk)):
                if (before := last.get(ids[at])) is None:
                    break
                request.append(index)
                depth.append(at + 1)
                since.append(before)
            if len(since) > begun:
                starts.append(begun)
        last.update(dict.fromkeys(ids, index))
    return _Choices(
        max(1, len(trace.requests) - 1),
        *(np.array(values, dtype=np.int64) for values in (starts, request, depth, since)),
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes, as shares of the budget, that a choice needs behind its full chunks, of chunks that
    end the same number of chunks before it."""

    choice: _Ints
    source: _Ints
    """The choice of the same request that the chunks belong to."""
    share: _Floats


def _needs(plan: ChunkPlan, choices: _Choices, budget: int) -> list[_Needs]:
    state = plan.state_layout.nbytes if plan.state_layout else 0
    by_back: dict[int, _Floats] = {}
    for depth in np.unique(choices.depth).tolist():
        nbytes = {0: state} if state else {}
        for piece in plan.pieces(depth):
            nbytes[piece.chunks_back] = nbytes.get(piece.chunks_back, 0) + piece.layout.nbytes
        for back, size in nbytes.items():
            if back not in by_back:
                by_back[back] = np.zeros(len(choices.depth))
            by_back[back][choices.depth == depth] = size / budget
    out = []
    for back, share in sorted(by_back.items()):
        choice = np.flatnonzero(share)
        out.append(_Needs(choice, choice - back, share[choice]))
    return out


class _Dual:
    """Tokens that nobody can exceed, by what a byte costs in each gap; see `resume_bound`."""

    def __init__(self, choices: _Choices, plan: ChunkPlan, budget: int) -> None:
        self._choices = choices
        self._full = plan.full_chunk_bytes / budget
        self._needs = _needs(plan, choices, budget)
        self._tokens = choices.depth * float(plan.tokens_per_chunk)
        counts = np.diff(np.append(choices.starts, len(choices.depth)))
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self.gaps = choices.gaps

    def __call__(self, prices: _Floats) -> tuple[float, _Floats]:
        """The bound at these prices, and its slope by each of them: 1 less the share in use."""
        choices = self._choices
        spent = np.concatenate(([0.0], np.cumsum(prices)))
        held = spent[choices.request] - spent[choices.since]
        cost = np.cumsum(held)
        cost -= (cost - held)[choices.starts][self._owner]
        worth = self._tokens - self._full * cost
        for need in self._needs:
            worth[need.choice] -= need.share * held[need.source]
        best = np.maximum.reduceat(worth, choices.starts)
        places = np.where(worth == best[self._owner], np.arange(len(worth)), len(worth))
        chosen = np.minimum.reduceat(places, choices.starts)[best > 0]
        value = float(prices.sum() + best[best > 0].sum())
        return value, 1.0 - self._in_use(chosen)

    def _in_use(self, chosen: _Ints) -> _Floats:
        """By gap, the share of the budget that these choices need."""
        choices = self._choices
        reach = np.full(len(choices.starts), -1)
        reach[self._owner[chosen]] = chosen
        taken = np.arange(len(self._owner)) <= reach[self._owner]
        change = np.bincount(choices.since[taken], minlength=self.gaps + 1).astype(float)
        change -= np.bincount(choices.request[taken], minlength=self.gaps + 1)
        change *= self._full
        is_chosen = np.zeros(len(self._owner), dtype=bool)
        is_chosen[chosen] = True
        for need in self._needs:
            used = is_chosen[need.choice]
            begin, end = choices.since[need.source[used]], choices.request[need.choice[used]]
            share = need.share[used]
            change += np.bincount(begin, share, self.gaps + 1)
            change -= np.bincount(end, share, self.gaps + 1)
        return np.cumsum(change)[: self.gaps]
