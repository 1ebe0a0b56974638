"""What a request waits for, for how long, and what becomes of tiers that misbehave."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.core.test_loft_engine import GEOMETRIES, full, window

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.catalog.policies import LRU
from kvloft.geometry import Group, make_geometry
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.plan import ChunkPlan
from kvloft.testing import Engine, audit
from kvloft.testing.manual import ManualPlace, ManualTier
from kvloft.testing.wrappers import FailingTier, FullTier, on
from kvloft.tiers.base import Tier

SIZE = 4


class Bench:
    """A loft over chunks of four tokens, whose clock and tiers the test moves."""

    def __init__(
        self, *tiers: Tier, wait: float | None = None, write_all: bool = True,
        groups: Sequence[Group] = (full(0),), pages: int = 600,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.plan = ChunkPlan(make_geometry(groups, SIZE), SIZE)
        nbytes = pages * 4096
        self.memory = bytearray(nbytes)
        self.loft = Loft(
            self.plan, Arena(nbytes, choose_slab_bytes(nbytes, self.plan.slot_sizes())), LRU(),
            ranks=1, resume_interval=SIZE, clock=lambda: self.now,
            tiers=[LowerTier(tier, write_all, wait) for tier in tiers],
            memory=memoryview(self.memory),
        )  # fmt: skip
        self._count = 0

    def new(self, prompt: int, chunks: int) -> str:
        """A request; prompts of one number share their beginning."""
        self._count += 1
        name = f"r{self._count}"
        self.loft.track(
            name, lambda end: bytes([prompt]) * 8 + end.to_bytes(8, "big"), chunks * SIZE + 1
        )
        return name

    def ask(self, name: str, chunks: int) -> int | None:
        return self.loft.match(name, chunks * SIZE + 1, 0)

    def store(self, prompt: int, chunks: int) -> None:
        """Compute a prompt and publish it."""
        name = self.new(prompt, chunks)
        tables = [
            list(range(1, chunks * SIZE // group.tokens_per_block + 1))
            for group in self.plan.geometry.groups
        ]
        job = self.loft.begin_store(name, chunks * SIZE, tables)
        if job is not None:
            for copy in job.copies:
                nbytes = self.plan.layout(copy.counts).nbytes
                for offset in copy.offsets:
                    self.memory[offset : offset + nbytes] = bytes([prompt]) * nbytes
            self.loft.report(job.id, 0, True)
        self.loft.forget(name)

    def settle(self, *tiers: ManualTier) -> None:
        """Let everything under way come to its end."""
        self.loft.step()
        while any(tier.work() for tier in tiers) or self.loft.pending:
            self.loft.step()
        self.loft.step()

    def counters(self) -> dict[str, int]:
        c = self.loft.promoter.counters
        names = ("waited", "shared", "declined", "late", "failed")
        return {name: value for name in names if (value := getattr(c, name))}

    def check(self) -> None:
        audit.check(self.loft.catalog, self.loft.promoter.reserved())


def filled(chunks: int = 8, prompts: int = 2, groups: Sequence[Group] = (full(0),)) -> ManualPlace:
    """A place in which another engine has left some prompts."""
    place = ManualPlace()
    tier = ManualTier(place, random.Random(0))
    bench = Bench(tier, groups=groups)
    for prompt in range(1, prompts + 1):
        bench.store(prompt, chunks)
        bench.settle(tier)
    assert place.held
    return place


def tier_on(place: ManualPlace, queue: int = 1 << 60) -> ManualTier:
    return ManualTier(place, random.Random(1), queue=queue)


# --- waiting --------------------------------------------------------------------------------------


def test_a_request_waits_until_its_prefix_is_there() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    assert bench.ask(name, 8) is None
    while tier.work():
        assert bench.ask(name, 8) is None
    bench.loft.step()
    assert bench.ask(name, 8) == 8 * SIZE
    job = bench.loft.begin_load(name, 0, [list(range(1, 9))])
    assert all(bench.memory[offset] == 1 for copy in job.copies for offset in copy.offsets)
    assert tier.reads == 8
    assert bench.counters() == {"waited": 1}
    bench.check()


def test_other_requests_are_not_held_up() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    waiting = bench.new(1, 8)
    assert bench.ask(waiting, 8) is None
    assert bench.ask(bench.new(9, 8), 8) == 0
    bench.store(5, 3)
    assert bench.ask(bench.new(5, 3), 3) == 3 * SIZE


def test_requests_for_the_same_prefix_share_one_promotion() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    names = [bench.new(1, 8) for _ in range(3)]
    longer = bench.new(1, 12)
    for name in names:
        assert bench.ask(name, 8) is None
    assert bench.ask(longer, 12) is None
    bench.settle(tier)
    for name in names:
        assert bench.ask(name, 8) == 8 * SIZE
    assert bench.ask(longer, 12) == 8 * SIZE
    assert tier.reads == 8
    assert bench.counters() == {"waited": 4, "shared": 3}


def test_a_longer_prompt_reads_only_what_the_shorter_one_does_not() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    short, long = bench.new(1, 3), bench.new(1, 8)
    assert bench.ask(short, 3) is None
    assert bench.ask(long, 8) is None
    assert tier.pending == 8
    bench.settle(tier)
    assert bench.ask(short, 3) == 3 * SIZE
    assert bench.ask(long, 8) == 8 * SIZE
    assert tier.reads == 8
    bench.check()


def test_what_memory_has_is_not_read_again() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    bench.store(1, 5)
    bench.settle(tier)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    bench.settle(tier)
    assert bench.ask(name, 8) == 8 * SIZE
    assert tier.reads == 3
    assert tier.writes == 0


def test_a_long_prefix_comes_in_parts() -> None:
    tier = tier_on(filled(chunks=500, prompts=1))
    bench = Bench(tier)
    name = bench.new(1, 500)
    for _ in range(20):
        assert bench.ask(name, 500) is None
    assert tier.pending == 500
    assert len(bench.loft.promoter._parts) > 1
    bench.settle(tier)
    assert bench.ask(name, 500) == 500 * SIZE
    assert tier.reads == 500
    bench.check()


def test_a_full_queue_of_the_tier_only_takes_longer() -> None:
    tier = tier_on(filled(chunks=20), queue=2)
    bench = Bench(tier, wait=1e9)
    name = bench.new(1, 20)
    for _ in range(60):
        if (boundary := bench.ask(name, 20)) is not None:
            break
        tier.work()
        bench.loft.step()
    assert boundary == 20 * SIZE


def test_an_abandoned_promotion_is_there_for_the_next_request() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    gone = bench.new(1, 8)
    assert bench.ask(gone, 8) is None
    bench.loft.forget(gone)
    bench.settle(tier)
    assert bench.ask(bench.new(1, 8), 8) == 8 * SIZE
    assert tier.reads == 8


# --- for how long ---------------------------------------------------------------------------------


def test_waiting_ends_at_the_given_time() -> None:
    tier = tier_on(filled())
    bench = Bench(tier, wait=3.0)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    bench.now += 2.9
    assert bench.ask(name, 8) is None
    bench.now += 0.2
    assert bench.ask(name, 8) == 0
    assert bench.counters() == {"waited": 1, "late": 1}
    # It does not try again, whatever comes.
    bench.settle(tier)
    assert bench.ask(bench.new(1, 8), 8) == 8 * SIZE
    bench.check()


def test_by_itself_waiting_ends_when_computing_would_have() -> None:
    tier = tier_on(filled())
    bench = Bench(tier)
    bench.loft.promoter.measured_compute(tokens=16, seconds=1.0)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    bench.now += 1.9
    assert bench.ask(name, 8) is None
    bench.now += 0.2
    assert bench.ask(name, 8) == 0


def test_a_tier_slower_than_computing_is_not_waited_for() -> None:
    tier = tier_on(filled(chunks=300))
    bench = Bench(tier)
    bench.loft.promoter.measured_compute(tokens=1_000_000, seconds=1.0)
    shelf = bench.loft._shelves[0]
    shelf.read_rate = 1000.0
    assert bench.ask(bench.new(1, 300), 300) == 0
    assert bench.counters() == {"declined": 1}
    assert not tier.pending
    # What is never read is never measured: in time it gets another chance.
    for _ in range(400):
        if bench.ask(bench.new(1, 300), 300) is None:
            break
    else:
        pytest.fail("a tier that was slow once is never asked again")


def test_a_hung_tier_holds_up_no_second_request() -> None:
    tier = tier_on(filled())
    bench = Bench(tier, wait=3.0)
    first = bench.new(1, 8)
    assert bench.ask(first, 8) is None
    bench.now += 4
    assert bench.ask(first, 8) == 0
    for prompt in (1, 2):
        assert bench.ask(bench.new(prompt, 8), 8) == 0
    bench.settle(tier)
    assert bench.ask(bench.new(2, 8), 8) is None


def test_reads_are_measured() -> None:
    tier = tier_on(filled(chunks=60))
    bench = Bench(tier)
    assert bench.ask(bench.new(1, 60), 60) is None
    bench.now += 2.0
    bench.settle(tier)
    expected = 60 * bench.plan.full_chunk_bytes / 2.0
    assert bench.loft._shelves[0].read_rate == pytest.approx(expected)


# --- room -----------------------------------------------------------------------------------------


def test_a_prefix_larger_than_memory_is_restored_as_far_as_it_fits() -> None:
    tier = tier_on(filled(chunks=40, prompts=1))
    bench = Bench(tier, pages=12)
    name = bench.new(1, 40)
    for _ in range(10):
        if (boundary := bench.ask(name, 40)) is not None:
            break
        bench.settle(tier)
    assert boundary
    assert 0 < boundary < 40 * SIZE
    bench.check()


def test_a_resume_point_larger_than_memory_is_computed() -> None:
    groups = (window(0, 2, 33), full(1))
    tier = tier_on(filled(chunks=20, prompts=1, groups=groups))
    bench = Bench(tier, groups=groups, pages=8)
    name = bench.new(1, 20)
    for _ in range(10):
        if (boundary := bench.ask(name, 20)) is not None:
            break
        bench.settle(tier)
    assert boundary == 0
    bench.settle(tier)
    bench.check()


# --- tiers that misbehave -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "late", "raises", "exception"])
@pytest.mark.parametrize("operation", ["get", "put", "touch", "demote", "stats", "holds", "close"])
def test_whatever_a_tier_does_requests_go_on(how: str, operation: str) -> None:
    inner = tier_on(filled())
    bench = Bench(FailingTier(inner, when=on(operation), how=how))  # type: ignore[arg-type]
    for prompt in (1, 2, 7):
        name = bench.new(prompt, 8)
        for _ in range(20):
            if (boundary := bench.ask(name, 8)) is not None:
                break
            bench.settle(inner)
            bench.now += 1
        assert boundary in (0, 8 * SIZE)
        if boundary:
            job = bench.loft.begin_load(name, 0, [list(range(1, 9))])
            bench.loft.report(job.id, 0, True)
        bench.store(prompt, 8)
        bench.settle(inner)
        bench.loft.stats()
        bench.loft.forget(name)
        bench.check()
    bench.loft.close(timeout=0.1)


def test_a_future_that_never_ends_only_costs_its_slots() -> None:
    inner = tier_on(filled())
    bench = Bench(FailingTier(inner, when=on("get"), how="never"), wait=1.0)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    bench.now += 2
    assert bench.ask(name, 8) == 0
    bench.check()
    assert len(bench.loft.promoter.reserved()) == 8
    bench.loft.close(timeout=0.1)


def test_writes_that_never_end_drop_the_rest() -> None:
    inner = tier_on(ManualPlace())
    bench = Bench(FullTier(inner, when=on("put")))
    bench.store(1, 8)
    bench.settle(inner)
    assert bench.loft.pending == 0
    assert bench.loft.stats().tiers[0].writes.dropped_chunks == 1
    audit.check_idle(bench.loft.catalog)


# --- two tiers, resets ----------------------------------------------------------------------------


def test_the_tier_with_the_longer_prefix_is_asked_and_the_other_one_made_good() -> None:
    near, far = tier_on(filled(chunks=3, prompts=1)), tier_on(filled(chunks=8, prompts=1))
    bench = Bench(near, far)
    name = bench.new(1, 8)
    assert bench.ask(name, 8) is None
    bench.settle(near, far)
    assert bench.ask(name, 8) == 8 * SIZE
    assert (near.reads, far.reads) == (0, 8)
    bench.settle(near, far)
    assert len(near.place.held) == 8


def test_after_a_reset_nothing_from_before_is_found() -> None:
    place = filled()
    tier = tier_on(place)
    bench = Bench(tier)
    waiting = bench.new(1, 8)
    assert bench.ask(waiting, 8) is None
    bench.loft.reset()
    bench.settle(tier)
    assert bench.ask(waiting, 8) == 0
    assert bench.ask(bench.new(2, 8), 8) == 0
    # What is stored from now on is for this engine alone.
    bench.store(2, 8)
    bench.settle(tier)
    bench.loft.catalog.reset()
    assert bench.ask(bench.new(2, 8), 8) is None
    other = Bench(tier_on(place))
    assert other.ask(other.new(2, 8), 8) is None
    bench.check()


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_superseded_resume_points_are_demoted(name: str) -> None:
    """A longer turn makes the resume point of the one before worth less, on disk too."""
    demoted: list[str] = []

    class Watched(ManualTier):
        def demote(self, chunks: Sequence[object]) -> None:
            demoted.extend(chunk.code for chunk in chunks)  # type: ignore[attr-defined]

    geometry = make_geometry(GEOMETRIES[name], 4)
    plan = ChunkPlan(geometry, geometry.unit_tokens)
    tier = Watched(ManualPlace(), random.Random(0), has_full=plan.full_layout is not None)
    engine = Engine(
        plan, random.Random(0), num_blocks=600, arena_bytes=400 * 4096,
        step_tokens=4 * plan.tokens_per_chunk, resume_interval=1000 * plan.tokens_per_chunk,
        prefix_caching=False, tiers=[tier],
    )  # fmt: skip
    rng = random.Random(3)
    prompt = [rng.randrange(50) for _ in range(40 * plan.tokens_per_chunk + 1)]
    for chunks in (4, 20, 40):
        engine.submit(prompt[: chunks * plan.tokens_per_chunk + 1], 1)
        engine.run()
        while tier.work():
            engine.loft.step()
        engine.loft.step()
    assert bool(demoted) == bool(plan.pieces(4) or plan.state_layout)
    assert "f" not in demoted
    engine.close()
