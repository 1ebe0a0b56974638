"""Every policy honours its protocol; each one does what its name says."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.effort import examples

from kvloft.catalog.policies import POLICIES, Density, EvictionPolicy, Room, Use
from kvloft.catalog.reuse import BUCKETS, bucket_of
from kvloft.catalog.sightings import GROUPS, Sightings, group_of, seen_of

ROOM = Room(1 << 30, 1 << 20, 0, 16)
MIXED_ROOM = Room(1 << 30, 1 << 20, 1 << 24, 16)
ENTRIES = st.integers(0, 30)
USES = st.builds(
    lambda name, group, worth: Use(name, seen_of(group), group, worth),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([group_of(0, 0, 0, 0), group_of(0, 1, 2, 4000), group_of(2, 2, 1, 99999)]),
    st.sampled_from([0.0, 0.5, 1.0, 100.0]),
)


class PolicyMachine(RuleBasedStateMachine):
    """Any calls in any order, beside a set of what must be held."""

    make: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make()
        self.held: set[int] = set()
        self.demoted: list[int] = []
        self.sightings = Sightings(64, 16)
        self.gone = 0

    def forget(self, entry: int) -> None:
        self.held.discard(entry)
        if entry in self.demoted:
            self.demoted.remove(entry)

    @rule(entry=ENTRIES, use=USES)
    def insert(self, entry: int, use: Use) -> None:
        assume(use.worth > 0)
        self.forget(entry)
        self.policy.insert(entry, use)
        self.held.add(entry)

    @rule(entry=ENTRIES)
    def insert_again(self, entry: int) -> None:
        self.forget(entry)
        self.policy.insert(entry, None)
        self.held.add(entry)

    @rule(entries=st.lists(ENTRIES, min_size=1, max_size=5, unique=True), use=USES)
    def insert_path(self, entries: list[int], use: Use) -> None:
        assume(use.worth > 0)
        for entry in entries:
            self.forget(entry)
        self.policy.insert_path(entries, lambda entry: use.name + entry, use)
        self.held.update(entries)

    @rule(entry=ENTRIES)
    def demote(self, entry: int) -> None:
        self.forget(entry)
        self.policy.demote(entry)
        self.held.add(entry)
        self.demoted.append(entry)

    @rule(entry=ENTRIES, after=ENTRIES)
    def revive(self, entry: int, after: int) -> None:
        assume(entry not in self.held and after not in self.held)
        self.policy.revive(entry, after)
        self.held.add(entry)

    @rule(entry=ENTRIES)
    def remove(self, entry: int) -> None:
        self.policy.remove(entry)
        self.forget(entry)

    @rule(names=st.lists(st.binary(min_size=16, max_size=16), max_size=5))
    def saw(self, names: list[bytes]) -> None:
        keys = [*names]
        _, seen = self.sightings.visit(lambda tokens: keys[tokens // 16 - 1], len(keys))
        self.policy.saw(seen)

    @rule(stuck=st.sets(ENTRIES), limit=st.integers(0, 40))
    def victim(self, stuck: set[int], limit: int) -> None:
        met: list[int] = []

        def evictable(entry: int) -> bool:
            met.append(entry)
            return entry not in stuck

        demoted = set(self.demoted)
        found = self.policy.victim(evictable, limit)
        assert len(met) <= limit
        assert set(met) <= self.held
        if found is None:
            assert set(met) <= stuck
            assert len(met) == min(limit, len(self.held)) or limit > len(met)
        else:
            assert met[-1] == found
            assert found in demoted or not demoted - set(met)
        for entry in met:
            assert entry not in self.policy
            self.forget(entry)

    @rule(entry=ENTRIES, use=USES)
    def follow(self, entry: int, use: Use) -> None:
        """What goes with another one goes at once, and nothing else does."""
        after = self.policy.victim(lambda entry: True, 1)
        if after is None:
            return
        self.forget(after)
        assume(entry != after)
        known = {held: held in self.policy for held in self.held}
        if self.policy.follow(entry, after):
            assert entry not in self.policy
            assert not self.demoted
            self.forget(entry)
            known.pop(entry, None)
        assert known == {held: held in self.policy for held in known}

    @rule()
    def make_room_for_something_worthless(self) -> None:
        demoted = set(self.demoted)
        found = self.policy.victim(lambda entry: True, 100, Use(worth=0.0))
        assert (found is not None) == bool(demoted)
        if found is not None:
            assert found in demoted
            self.forget(found)

    @precondition(lambda self: len(self.held) > 3)
    @rule()
    def empty(self) -> None:
        found = set()
        while (entry := self.policy.victim(lambda entry: True, 1000)) is not None:
            found.add(entry)
        assert found == self.held
        self.held.clear()
        self.demoted.clear()

    @invariant()
    def the_same_is_held(self) -> None:
        assert len(self.policy) == len(self.held)
        assert all((entry in self.policy) == (entry in self.held) for entry in range(32))


def machine(name: str, room: Room) -> Any:
    """The test case of one policy."""
    cls: Any = type(
        f"Machine_{name}", (PolicyMachine,), {"make": staticmethod(lambda: POLICIES[name](room))}
    )
    cls.TestCase.settings = settings(max_examples=examples(1), stateful_step_count=40)
    return cls.TestCase


TestAdaptive = machine("adaptive", ROOM)
TestAdaptiveMixed = machine("adaptive", MIXED_ROOM)
TestARC = machine("arc", ROOM)
TestCost = machine("cost", ROOM)
TestDensity = machine("density", ROOM)
TestLRU = machine("lru", ROOM)
TestS3FIFO = machine("s3fifo", ROOM)
TestTwice = machine("twice", ROOM)


def hits(policy: EvictionPolicy, stream: list[int], room: int) -> list[bool]:
    """A cache of ``room`` entries without a tree under a policy."""
    numbers: dict[int, int] = {}
    names: dict[int, int] = {}
    free = list(range(room))
    out = []
    for name in stream:
        out.append(name in numbers)
        if name not in numbers:
            if not free:
                gone = policy.victim(lambda entry: True, 10**6)
                assert gone is not None
                policy.remove(gone)
                del numbers[names.pop(gone)]
                free.append(gone)
            numbers[name] = free.pop()
            names[numbers[name]] = name
        policy.insert(numbers[name], Use(name))
    return out


def zipf(seed: int, length: int = 4000) -> list[int]:
    """A stream with a popular head, a long tail and a scan now and then."""
    rng = random.Random(seed)
    out: list[int] = []
    while len(out) < length:
        if rng.random() < 0.005:
            start = rng.randrange(10**6, 10**9)
            out.extend(range(start, start + 60))
        out.append(int(300 * rng.paretovariate(1.0)) % 5000)
    return out[:length]


def test_lru_is_an_ordered_dictionary() -> None:
    stream, order, expected = zipf(1), OrderedDict[int, None](), []
    for name in stream:
        expected.append(name in order)
        order[name] = None
        order.move_to_end(name)
        if len(order) > 100:
            order.popitem(last=False)
    assert hits(POLICIES["lru"](ROOM), stream, 100) == expected


def s3fifo(stream: list[int], room: int) -> int:
    """The paper's three queues, plainly."""
    small, main, ghost = OrderedDict[int, int](), OrderedDict[int, int](), OrderedDict[int, None]()
    found = 0
    for name in stream:
        queue = small if name in small else main if name in main else None
        if queue is not None:
            found += 1
            queue[name] = min(3, queue[name] + 1)
            continue
        while len(small) + len(main) >= room:
            if small and (len(small) > 0.1 * (len(small) + len(main)) or not main):
                old, uses = small.popitem(last=False)
                if uses:
                    main[old] = 0
                else:
                    ghost[old] = None
                    if len(ghost) > room:
                        ghost.popitem(last=False)
            else:
                old, uses = main.popitem(last=False)
                if uses:
                    main[old] = uses - 1
        if ghost.pop(name, 0) is None:
            main[name] = 0
        else:
            small[name] = 0
    return found


def arc(stream: list[int], room: int) -> int:
    """The paper's algorithm, plainly."""
    t1, t2 = OrderedDict[int, None](), OrderedDict[int, None]()
    b1, b2 = OrderedDict[int, None](), OrderedDict[int, None]()
    target, found = 0.0, 0

    def replace(in_b2: bool) -> None:
        if t1 and (len(t1) > target or (in_b2 and len(t1) == target)):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for name in stream:
        if name in t1 or name in t2:
            found += 1
            t1.pop(name, None)
            t2.pop(name, None)
            t2[name] = None
        elif name in b1 or name in b2:
            late = name in b2
            ratio = max(1.0, len(b1) / len(b2) if late else len(b2) / len(b1))
            target = max(0.0, target - ratio) if late else min(room, target + ratio)
            replace(late)
            b1.pop(name, None)
            b2.pop(name, None)
            t2[name] = None
        else:
            if len(t1) + len(b1) >= room:
                if len(t1) < room:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= room:
                if len(t1) + len(t2) + len(b1) + len(b2) >= 2 * room:
                    b2.popitem(last=False)
                if len(t1) + len(t2) >= room:
                    replace(False)
            t1[name] = None
    return found


@pytest.mark.parametrize("seed", range(3))
def test_published_policies_find_what_the_papers_find(seed: int) -> None:
    stream = zipf(seed)
    for name, oracle in (("arc", arc), ("s3fifo", s3fifo)):
        ours = sum(hits(POLICIES[name](ROOM), stream, 100))
        assert ours == pytest.approx(oracle(stream, 100), rel=0.1), name
        assert ours > 1.1 * sum(hits(POLICIES["lru"](ROOM), stream, 100))


def test_the_cost_aware_one_keeps_what_saves_more_per_byte() -> None:
    policy = POLICIES["cost"](ROOM)
    policy.insert(1, Use(1, worth=8.0))
    policy.insert(2, Use(2, worth=1.0))
    policy.insert(3, Use(3, worth=1.0))
    assert [policy.victim(lambda entry: True, 9) for _ in range(3)] == [2, 3, 1]


def test_twice_wants_what_is_known() -> None:
    policy = POLICIES["twice"](ROOM)
    assert not policy.admits(Use(1, seen=0))
    assert policy.admits(Use(1, seen=1))


def test_density_evicts_the_least_value_of_all() -> None:
    rng = random.Random(5)
    policy, sightings = Density(), Sightings(1 << 14, 16)
    held: dict[int, tuple[int, int]] = {}
    prompts: list[list[bytes]] = [[rng.randbytes(16)] for _ in range(20)]
    unused = list(range(400, 0, -1))
    for _ in range(1500):
        prompt = rng.choice(prompts)
        if rng.random() < 0.7:
            prompt.append(rng.randbytes(16))
        visit, seen = sightings.visit(lambda tokens, p=prompt: p[tokens // 16 - 1], len(prompt))  # type: ignore[misc]
        policy.saw(seen)
        now = policy.reuse.now
        if not unused:
            for _ in range(20):
                values = {
                    entry: policy.reuse.index[group][bucket_of(now - last)]
                    for entry, (group, last) in held.items()
                }
                gone = policy.victim(lambda entry: True, 10**6)
                assert gone is not None
                # Ranks lag behind by less than an eighth of a bucket.
                near = {
                    policy.reuse.index[group][bucket_of(now - last + late)]
                    for group, last in [held[gone]]
                    for late in range(-(now - last) // 8, (now - last) // 8 + 1)
                }
                least = min(values.values())
                assert min(near) <= least * 1.0001 or values[gone] <= least * 1.5
                del held[gone]
                unused.append(gone)
        entry = unused.pop()
        use = visit.use(len(prompt), prompt[-1])
        policy.insert(entry, use)
        held[entry] = (use.group, now)
    assert any(len(set(index)) > BUCKETS // 2 for index in policy.reuse.index)
    assert len(policy.reuse.index) == GROUPS
