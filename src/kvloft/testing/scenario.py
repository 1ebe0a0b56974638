"""Random interleavings of everything that can happen to an engine with a loft."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvloft.catalog.policies import POLICIES
from kvloft.plan import ChunkPlan
from kvloft.testing.engine import RUNNING, Engine, EngineError, Request, Totals
from kvloft.testing.manual import ManualPlace, ManualTier
from kvloft.testing.pages import PAGES_LAYOUTS

VOCABULARY = 50


def longest_prompt(plan: ChunkPlan) -> int:
    """Tokens of the longest prompt worth a try: several chunks, and well beyond every window."""
    reach = max(
        (s.groups[0].reach + s.groups[0].attention_chunk for s in plan.window_sets), default=0
    )
    size = plan.tokens_per_chunk
    return size * max(6, min(80, math.ceil(2 * reach / size)))


def make_engine(
    plan: ChunkPlan,
    rng: random.Random,
    *,
    failures: float = 0.0,
    places: Sequence[ManualPlace] = (),
) -> Engine:
    """An engine of random size: from a pool that forces preemption to one that never does, from an
    arena that holds one chunk of each class to one that holds everything."""
    longest = longest_prompt(plan)
    # The states of a step's two ends, and the blocks of one request of full length.
    enough = sum(
        4 if group.kind in ("state", "ring") else math.ceil(longest / group.tokens_per_block) + 1
        for group in plan.geometry.groups
    )
    sizes = plan.slot_sizes() or (4096,)
    least = max(sizes) * len(sizes)
    everything = 8 * least * longest // plan.tokens_per_chunk
    return Engine(
        plan,
        rng,
        num_blocks=1 + int(enough * rng.choice([1, 1.5, 2, 4])),
        arena_bytes=rng.choice([least, 2 * least, 3 * least, 6 * least, everything]),
        step_tokens=rng.choice([plan.tokens_per_chunk // 2 + 1, plan.tokens_per_chunk, longest]),
        resume_interval=plan.tokens_per_chunk * rng.choice([1, 2, 3, 1000]),
        prompt_only=rng.random() < 0.5,
        policy=rng.choice(list(POLICIES)),
        prefix_caching=rng.random() < 0.5,
        layout=rng.choice(PAGES_LAYOUTS),
        failures=failures,
        tiers=[
            ManualTier(
                place,
                rng,
                has_full=plan.full_layout is not None,
                faults=failures,
                limit=rng.choice([20, 1000, 1 << 60]),
                queue=rng.choice([1, 8, 1 << 60]),
            )
            for place in places
        ],
        write_all=rng.random() < 0.7,
    )


def vary(text: list[int], rng: random.Random, size: int, longest: int) -> list[int]:
    """A known text as it is, its beginning, or its continuation; something new without one.

    At least 1 and at most ``longest`` tokens. ``size``: at its multiples something happens.
    """
    text = list(text)
    if text:
        cut = rng.random()
        if cut < 0.3:
            text = text[: rng.randrange(len(text)) + 1]
        elif cut < 0.5:
            text = text[: len(text) // size * size]
    if not text or rng.random() < 0.6:
        more = rng.choice([1, size - 1, size, size + 1, longest // 3, rng.randrange(longest)])
        text += [rng.randrange(VOCABULARY) for _ in range(more)]
    return text[:longest] or [0]


class Scenario:
    """Users who talk to one engine, about things that others have asked before."""

    def __init__(self, engine: Engine, rng: random.Random, texts: Sequence[list[int]] = ()) -> None:
        """``texts``: what has been said before."""
        self.engine = engine
        self._rng = rng
        self.texts = list(texts)
        self._size = engine.plan.tokens_per_chunk
        self._longest = longest_prompt(engine.plan)

    def run(self, actions: int) -> Totals:
        """Take ``actions`` random actions, then finish everything and look for what is left."""
        for _ in range(actions):
            self._act()
            if self._rng.random() < 0.15:
                self.engine.check()
        self.engine.close()
        return self.engine.totals

    def _act(self) -> None:
        engine, rng = self.engine, self._rng
        choice = rng.random()
        if choice < 0.15:
            if len(engine.requests) < 4:
                self.submit()
        elif choice < 0.17:
            if engine.requests:
                engine.abort(rng.choice(engine.requests))
        elif choice < 0.20:
            running = [r for r in engine.requests if r.status == RUNNING]
            if running:
                engine.preempt(rng.choice(running))
        elif choice < 0.27:
            engine.reset(connector=rng.random() < 0.1)
        elif choice < 0.65:
            engine.step()
        else:
            engine.deliver()

    def submit(self) -> Request:
        """Ask something: a known text, its beginning, its continuation or something new."""
        rng, size, longest = self._rng, self._size, self._longest - 1
        text: list[int] = []
        if self.texts and rng.random() < 0.85:
            text = rng.choice(self.texts)
        text = vary(text, rng, size, longest)
        generate = rng.choice([0, 1, 2, rng.randrange(size + 2)])
        request = self.engine.submit(text, min(generate, longest + 1 - len(text)))
        # The request's own list: what is generated becomes part of the conversation.
        self.texts.append(request.tokens)
        return request


def explore(
    plan: ChunkPlan,
    seed: int,
    *,
    actions: int = 120,
    failures: float = 0.0,
    tiers: int = 0,
    lives: int = 1,
) -> Totals:
    """One random scenario on a random engine; the same for the same arguments.

    ``lives``: engines that run one after the other, with the same users and on the same places of
    ``tiers`` lower tiers. The totals are those of the last one.
    """
    rng = random.Random(seed)
    places = [ManualPlace() for _ in range(tiers)]
    texts: list[list[int]] = []
    totals = Totals()
    try:
        for _ in range(lives):
            scenario = Scenario(
                make_engine(plan, rng, failures=failures, places=places), rng, texts
            )
            totals = scenario.run(actions)
            texts = [list(text) for text in scenario.texts]
    except EngineError as error:
        error.add_note(
            f"explore(plan, {seed}, actions={actions}, failures={failures}, tiers={tiers}, "
            f"lives={lives})"
        )
        raise
    return totals
