"""Pins by hints against a list of who was promised what until when."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.core.test_hints import PLAN, SIZE, Lofts
from tests.effort import examples

from kvloft.catalog.tree import READY
from kvloft.replay.driver import chunk_names
from kvloft.testing import audit

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""What prompts share is decided by their beginnings."""
SECONDS = st.sampled_from([0, 0, 1, 10, 100])


def path(prompt: list[int]) -> list[int]:
    """Ids of a prompt's chunks: each names the whole prefix that ends with it."""
    ids, name = [], 0
    for letter in prompt:
        name = name * 3 + letter + 1
        ids.append(name)
    return ids


class PinsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lofts = Lofts(20, "adaptive")
        self.promised: list[tuple[float, list[int]]] = []

    @rule(prompt=PROMPTS, seconds=SECONDS)
    def ask(self, prompt: list[int], seconds: int) -> None:
        lofts, ids = self.lofts, path(prompt)
        before = lofts.loft.stats()
        lofts.ask(ids, {"pin_seconds": seconds})
        after = lofts.loft.stats()
        assert after.pins + after.refused_pins == (
            before.pins + before.refused_pins + (seconds > 0)
        )
        if after.pins > before.pins:
            nbytes = after.pinned_bytes - before.pinned_bytes
            held = nbytes // PLAN.full_chunk_bytes
            assert 0 < held <= len(ids)
            self.promised.append((lofts.now + seconds, ids[:held]))

    @rule(prompt=st.lists(st.integers(100, 200), min_size=6, max_size=14))
    def ask_for_much(self, prompt: list[int]) -> None:
        self.lofts.ask(path(prompt))

    @rule(seconds=st.sampled_from([0.5, 5, 50]))
    def wait(self, seconds: float) -> None:
        self.lofts.now += seconds
        self.promised = [held for held in self.promised if held[0] > self.lofts.now]
        self.lofts.loft.step()

    @rule()
    def reset(self) -> None:
        self.lofts.loft.reset()
        self.promised = []

    @rule(prompt=PROMPTS, bad=st.integers(0, 5))
    def fail(self, prompt: list[int], bad: int) -> None:
        """A load finds a chunk rotten: it and all below it are gone, and the promises with them."""
        loft, ids = self.lofts.loft, path(prompt)
        names = chunk_names(ids)
        tokens = len(ids) * SIZE + 1
        loft.track("fails", lambda boundary: names[boundary // SIZE - 1], tokens)
        found = loft.match("fails", tokens, 0) or 0
        if found:
            job = loft.begin_load("fails", 0, [list(range(1, found // SIZE + 1))])
            offsets = job.copies[0].offsets
            at = bad % len(offsets)
            loft.report(job.id, 0, False, "checksum", [offsets[at]])
            self.promised = [held for held in self.promised if ids[at] not in held[1]]
        loft.forget("fails")
        loft.step()

    @invariant()
    def promises_are_kept(self) -> None:
        loft = self.lofts.loft
        for until, ids in self.promised:
            names = chunk_names(ids)
            node = loft.catalog.tree.find(names[-1])
            assert loft.catalog.tree.state[node] == READY
            assert loft.catalog.tree.depth[node] == len(ids), (until, self.lofts.now)

    @invariant()
    def books_agree(self) -> None:
        stats = self.lofts.loft.stats()
        assert stats.pins == len(self.promised)
        assert stats.pinned_bytes == sum(
            len(ids) * PLAN.full_chunk_bytes for _, ids in self.promised
        )
        assert stats.pinned_bytes <= stats.budget_bytes // 2

    def teardown(self) -> None:
        self.wait(1000.0)
        for _ in range(len(self.lofts.loft._holds)):
            self.lofts.loft.step()
        audit.check_idle(self.lofts.loft.catalog)


PinsMachine.TestCase.settings = settings(max_examples=examples(0.5), deadline=None)
TestPins = PinsMachine.TestCase
