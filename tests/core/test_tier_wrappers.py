"""Wrapper tiers: transparent where they don't apply, and where they do exactly what they say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from tests.core.test_memory_tier import MemoryTierTests

from kvloft.testing.tiers import Checked, Slot, beside, chain, content, namespace
from kvloft.testing.wrappers import (
    Call,
    CorruptingTier,
    DelayedTier,
    FailingTier,
    FullTier,
    ShortTier,
    TierFaultError,
    WrapperTier,
    always,
    every,
    on,
)
from kvloft.tiers.base import Namespace, Outcome, Tier
from kvloft.tiers.memory import MemoryPlace, MemoryTier

PATH = chain("wrapped", 4)


class Wrapped(MemoryTierTests):
    """The suite, for wrappers that don't break the contract."""

    examples = 10

    def wrap(self, tier: Tier) -> Tier:
        raise NotImplementedError

    def open_tier(
        self, place: MemoryPlace, names: Namespace, *, max_bytes: int, queue_bytes: int
    ) -> Tier:
        tier = super().open_tier(place, names, max_bytes=max_bytes, queue_bytes=queue_bytes)
        return self.wrap(tier)


class TestTransparent(Wrapped):
    """All of them at once, none of which applies."""

    def wrap(self, tier: Tier) -> Tier:
        for wrapper in (CorruptingTier, DelayedTier, FailingTier, FullTier, ShortTier, WrapperTier):
            tier = wrapper(tier, on())
        return tier


class TestDelayed(Wrapped):
    """A tier that is only late is a good tier."""

    def wrap(self, tier: Tier) -> Tier:
        # The suite wants a second put of this one done at once.
        there = chain("there", 1)[0]
        return DelayedTier(
            tier,
            lambda call: call.operation != "put" or call.chunks[0] != there,
            seconds=0.0005,
        )


@pytest.fixture
def inner() -> Iterator[MemoryTier]:
    tier = MemoryTier(namespace(), max_bytes=1 << 20)
    Checked(tier, namespace(), 10.0).fill(PATH[:3])
    yield tier
    tier.close()


def checked(tier: Tier) -> Checked:
    return Checked(tier, namespace(), 10.0)


# --- predicates -----------------------------------------------------------------------------------


def test_predicates() -> None:
    calls = [Call(operation, (), number) for operation in ("get", "put") for number in range(4)]
    assert all(map(always, calls))
    assert not any(map(on(), calls))
    assert [c.operation for c in calls if on("put", "scan")(c)] == ["put"] * 4
    assert [c for c in calls if every(2, "get")(c)] == [Call("get", (), 1), Call("get", (), 3)]
    assert sum(map(every(4), calls)) == 2


def test_predicates_see_the_chunks(inner: MemoryTier) -> None:
    seen: list[Call] = []
    tier = FullTier(inner, lambda call: bool(seen.append(call)))  # type: ignore[func-returns-value]
    checked(tier).get(PATH[0])
    checked(tier).get(PATH[1])
    checked(tier).delete(PATH[2:])
    assert seen == [
        Call("get", (PATH[0],), 0),
        Call("get", (PATH[1],), 1),
        Call("delete", tuple(PATH[2:]), 0),
    ]
    assert tier.calls == {"get": 2, "delete": 1}


# --- delays ---------------------------------------------------------------------------------------


def test_held_futures_end_when_they_are_released(inner: MemoryTier) -> None:
    tier = DelayedTier(inner, on("get", "put"))
    slots = [Slot(chunk) for chunk in PATH]
    gets = [tier.get(c, slot.view) for c, slot in zip(PATH[:3], slots, strict=False)]
    put = checked(tier).try_put(PATH[3])
    assert checked(tier).contains(PATH[:1]) == [True]
    futures = [future for future in (*gets, put) if future is not None]
    assert len(futures) == 4
    # The tier is done with all of them when it is done with the put, which is the last.
    wait_until(lambda: tier.held == 4)
    assert not any(future.done() for future in futures)
    assert not any(future.cancel() for future in futures)
    assert tier.release(1) == 1
    assert [future.done() for future in futures] == [True, False, False, False]
    assert tier.release() == 3
    assert {future.result() for future in futures} == {Outcome.DONE}
    assert tier.release() == tier.held == 0


def test_held_futures_end_at_the_latest_when_the_tier_is_closed(inner: MemoryTier) -> None:
    tier = DelayedTier(inner)
    put = checked(tier).try_put(PATH[3])
    asked = tier.contains(PATH)
    tier.close()
    assert put is not None
    assert asked is not None
    assert put.result(0) in (Outcome.DONE, Outcome.LATE)
    assert asked.result(0)
    assert tier.put(PATH[3], Slot(PATH[3]).view) is None


def test_what_is_delayed_ends_by_itself(inner: MemoryTier) -> None:
    tier = DelayedTier(inner, seconds=0.01)
    checked(tier).expect(PATH[:3])
    tier.close()


def wait_until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(2000):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("it never happens")


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "late"])
def test_failures_that_the_contract_allows(
    inner: MemoryTier, how: Literal["failed", "late"]
) -> None:
    tier = checked(FailingTier(inner, how=how))
    outcome = Outcome(how)
    assert tier.put(PATH[3]) is outcome
    tier.expect(PATH, outcome)
    assert tier.contains(PATH) == [False] * 4
    assert tier.delete(PATH) == 0
    assert not tier.held(PATH)
    assert list(tier.tier.scan()) == []
    assert tier.tier.stats().chunks == 0
    tier.tier.touch(PATH)
    tier.tier.demote(PATH)
    tier.tier.close()
    assert not inner.holds(PATH[0].key, "f")


def test_some_calls_fail(inner: MemoryTier) -> None:
    tier = checked(FailingTier(inner, every(2, "get")))
    assert [tier.get(PATH[0]) for _ in range(4)] == [Outcome.DONE, Outcome.FAILED] * 2
    tier.fill(PATH)


def calls(tier: Tier) -> list[tuple[str, Callable[[], object]]]:
    slot = Slot(PATH[0], content(PATH[0]))
    return [
        ("holds", lambda: tier.holds(PATH[0].key, "f")),
        ("put", lambda: tier.put(PATH[0], slot.view)),
        ("get", lambda: tier.get(PATH[0], slot.view)),
        ("contains", lambda: tier.contains(PATH)),
        ("delete", lambda: tier.delete(PATH)),
        ("touch", lambda: tier.touch(PATH)),
        ("demote", lambda: tier.demote(PATH)),
        ("scan", lambda: list(tier.scan())),
        ("stats", lambda: tier.stats()),
        ("close", lambda: tier.close()),
    ]


def test_calls_that_raise(inner: MemoryTier) -> None:
    for operation, call in calls(FailingTier(inner, how="raises")):
        with pytest.raises(TierFaultError, match=operation):
            call()
    assert not inner.holds(PATH[0].key, "f")  # It was closed even so.


def test_futures_that_hold_exceptions_or_never_end(inner: MemoryTier) -> None:
    with_future = ("put", "get", "contains", "delete")
    for operation, call in calls(FailingTier(inner, on(*with_future), "exception")):
        if operation in with_future:
            assert isinstance(call().exception(0), TierFaultError)  # type: ignore[attr-defined]
    for operation, call in calls(FailingTier(inner, on(*with_future), "never")):
        if operation in with_future:
            assert not call().done()  # type: ignore[attr-defined]
    assert checked(inner).held(PATH) == PATH[:3]


# --- lies -----------------------------------------------------------------------------------------


def test_a_bit_is_flipped(inner: MemoryTier) -> None:
    for bit in (0, 13, None):
        tier = CorruptingTier(inner, bit=bit)
        for _ in range(3):
            slot = Slot(PATH[0])
            assert checked(tier).wait(tier.get(PATH[0], slot.view)) is Outcome.DONE
            got = int.from_bytes(slot.view[: PATH[0].nbytes], "little")
            wrong = got ^ int.from_bytes(content(PATH[0]), "little")
            assert wrong.bit_count() == 1
            assert bit is None or wrong == 1 << bit
        assert tier.corrupted == 3
    with pytest.raises(AssertionError, match="wrong bytes"):
        checked(CorruptingTier(inner)).get(PATH[0])
    checked(CorruptingTier(inner)).expect(PATH[3:], Outcome.MISSING)


def test_half_is_missing(inner: MemoryTier) -> None:
    [state] = beside(PATH[0], "s")
    checked(inner).fill([state])
    for chunk, outcome in (
        (state, Outcome.DONE),
        (state, Outcome.DAMAGED),
        (PATH[2], Outcome.MISSING),
    ):
        tier = ShortTier(inner, outcome=outcome)
        slot = Slot(chunk)
        assert checked(tier).wait(tier.get(chunk, slot.view)) is outcome
        half = chunk.nbytes // 2
        assert bytes(slot.view[:half]) == content(chunk)[:half]
        assert set(slot.view[half:]) == {0xDB}
        assert tier.holds(chunk.key, chunk.code) == (outcome is Outcome.DONE)
    assert checked(ShortTier(inner)).get(PATH[3]) is Outcome.MISSING


def test_the_queue_is_full(inner: MemoryTier) -> None:
    tier = FullTier(inner)
    slot = Slot(PATH[0])
    assert tier.put(PATH[3], slot.view) is None
    assert tier.get(PATH[0], slot.view) is None
    assert tier.contains(PATH) is None
    assert tier.delete(PATH) is None
    assert checked(tier).held(PATH) == PATH[:3]


def test_wrappers_nest(inner: MemoryTier) -> None:
    tier = checked(
        FullTier(FailingTier(DelayedTier(inner, seconds=0.0), every(3)), every(2, "put"))
    )
    assert tier.tier.name == f"FullTier(FailingTier(DelayedTier({inner.name})))"
    assert [tier.get(PATH[0]).value for _ in range(3)] == ["done", "done", "failed"]
    assert tier.try_put(PATH[3]) is not None
    assert tier.try_put(PATH[3]) is None
    tier.tier.close()
