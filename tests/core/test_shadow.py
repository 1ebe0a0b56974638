"""Shadows find what a cache finds; the default follows the better policy."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvloft.catalog.policies import LRU, Adaptive, Room
from kvloft.catalog.policies.shadow import ChunkShadow, PromptShadow
from kvloft.catalog.sightings import Sightings

MIB = 1 << 20
SIZE = 512


def prompts(rng: random.Random, count: int) -> list[list[bytes]]:
    """Chats: half of them go on from one of the latest ones."""
    recent: list[list[bytes]] = []
    out = []
    for _ in range(count):
        head = rng.choice(recent[-40:]) if recent and rng.random() < 0.5 else []
        prompt = [*head, *(rng.randbytes(16) for _ in range(rng.randint(1, 8)))]
        recent.append(prompt)
        out.append(prompt)
    return out


def lru_hits(stream: list[list[bytes]], room: int) -> int:
    """Chunks found by an LRU of chunks, the beginning of a prompt used last."""
    held, found = OrderedDict[bytes, None](), 0
    for prompt in stream:
        depth = 0
        while depth < len(prompt) and prompt[depth] in held:
            depth += 1
        found += depth
        for name in reversed(prompt):
            held[name] = None
            held.move_to_end(name)
        while len(held) > room:
            held.popitem(last=False)
    return found


@pytest.mark.parametrize(("room", "tolerance"), [(200, 0.03), (1500, 0.03), (6000, 0.15)])
def test_a_shadow_finds_what_the_cache_would_find(room: int, tolerance: float) -> None:
    stream = prompts(random.Random(room), 6000)
    shadow = ChunkShadow(LRU(), Room(room * MIB, MIB, 0, SIZE))
    sightings, found = Sightings(1 << 18, SIZE), 0.0
    for prompt in stream:
        _, seen = sightings.visit(lambda tokens, p=prompt: p[tokens // SIZE - 1], len(prompt))  # type: ignore[misc]
        found += shadow.serve(seen)
    assert found == pytest.approx(lru_hits(stream, room), rel=tolerance)


def test_a_prompt_that_goes_on_replaces_the_one_before() -> None:
    shadow = PromptShadow(LRU(), Room(100 * MIB, MIB, 10 * MIB, SIZE))
    sightings = Sightings(1 << 10, SIZE)
    rng = random.Random(1)
    prompt: list[bytes] = []
    gains = []
    for _ in range(3):
        prompt = [*prompt, *(rng.randbytes(16) for _ in range(5))]
        _, seen = sightings.visit(lambda tokens, p=prompt: p[tokens // SIZE - 1], len(prompt))  # type: ignore[misc]
        gains.append(shadow.serve(seen))
    assert gains == [0.0, 5.0, 10.0]
    assert shadow._held == (10 + 15) * MIB


def test_the_default_follows_the_better_policy_and_changes_back() -> None:
    policy, sightings = Adaptive(Room(100 * MIB, MIB, 0, SIZE)), Sightings(1 << 16, SIZE)

    def serve(stream: list[list[bytes]]) -> None:
        for prompt in stream:
            _, seen = sightings.visit(lambda tokens, p=prompt: p[tokens // SIZE - 1], len(prompt))  # type: ignore[misc]
            policy.saw(seen)

    policy._found[:] = [0.0, 0.0]
    rng = random.Random(2)
    serve(prompts(rng, 300))
    for better, worse in ((1, 0), (0, 1)):
        policy._found[better], policy._found[worse] = 1000.0, 10.0
        serve(prompts(rng, 1))
        assert policy._leader == better
        assert policy._order is policy._orders[better]


def test_all_orders_hold_the_same() -> None:
    policy, rng = Adaptive(Room(100 * MIB, MIB, 0, SIZE)), random.Random(4)
    for step in range(2000):
        entry = rng.randrange(50)
        match rng.randrange(5):
            case 0:
                policy.remove(entry)
            case 1:
                policy.demote(entry)
            case 2:
                policy.victim(lambda e: e % 3 > 0, 5)
            case _:
                policy.insert(entry, None)
        policy._leader = step // 100 % 2
        policy._order = policy._orders[policy._leader]
        first, second = policy._orders
        assert len(first) == len(second)
        assert all((e in first) == (e in second) for e in range(50))
