"""vLLM's own offloading on traces: its slots, its keys, and that the short cuts change nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvloft.engines.vllm.replay_peer import (
    VLLMManager,
    blocks_per_chunk,
    hash_ids,
    replay_vllm,
)
from kvloft.geometry import Geometry, Group, Layers, load, make_geometry
from kvloft.plan import ChunkPlan
from kvloft.replay.bounds import resume_bound
from kvloft.replay.trace import Request, Trace, boundary_ids

PAGE = 4096
SIZE = 32
"""Tokens of a trace's block, and of a chunk."""


def uniform() -> Geometry:
    return make_geometry([Group(0, "full", 16, (Layers(1, PAGE, PAGE),))], 16)


def windows() -> Geometry:
    groups = [
        Group(0, "full", 16, (Layers(2, PAGE, PAGE), Layers(1, PAGE // 2, PAGE))),
        Group(1, "window", 4, (Layers(2, PAGE, PAGE),), window=8),
        Group(2, "window", 16, (Layers(3, PAGE, PAGE),), window=40),
    ]
    return make_geometry(groups, 4)


def states() -> Geometry:
    groups = [
        Group(0, "state", 32, (Layers(1, PAGE - 64, PAGE),)),
        Group(1, "full", 32, (Layers(1, PAGE, PAGE),)),
    ]
    return make_geometry(groups, 32)


def make_trace(count: int = 60, seed: int = 1) -> Trace:
    """Prompts that go on from one another, of up to six whole blocks and some tokens."""
    rng = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for number in range(count):
        path = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 6)))
        blocks = [names.setdefault(path[: n + 1], len(names)) for n in range(len(path))]
        tail = rng.randint(0, SIZE - 1)
        if tail:
            blocks.append(1000 + number)
        requests.append(Request(float(number), len(path) * SIZE + tail, 1, blocks))
    return Trace("made", SIZE, requests)


def serve(manager: VLLMManager, trace: Trace) -> list[int]:
    return [
        manager.serve(hash_ids(r, SIZE, manager.tokens_per_hash), r.prompt_tokens)
        for r in trace.requests
    ]


def lru_tokens(trace: Trace, capacity: int) -> list[int]:
    """Blocks alone under LRU, as vLLM applies it; a whole prompt hits less its last token.

    What a prompt has used is marked at its end, from its last block to its first. So what it has
    loaded may be evicted by its own store. A store that finds no room for all is left out.
    """
    resident: dict[int, None] = {}
    out = []
    for request in trace.requests:
        ids = boundary_ids(request, SIZE, SIZE)
        found = 0
        while found < len(ids) and ids[found] in resident:
            found += 1
        out.append(min(found * SIZE, request.prompt_tokens - 1))
        offered = set(ids[found:])
        new = [name for name in ids[found:] if name not in resident]
        excess = max(0, len(resident) + len(new) - capacity)
        victims = [name for name in resident if name not in offered][:excess]
        if len(victims) == excess:
            for name in victims:
                del resident[name]
            resident |= dict.fromkeys(new)
        for name in reversed(ids):
            if name in resident:
                del resident[name]
                resident[name] = None
    return out


def test_one_group_under_lru_is_lru_of_blocks() -> None:
    trace = make_trace(200)
    for capacity in (8, 20, 60, 500):
        manager = VLLMManager(uniform(), SIZE, capacity * 2 * PAGE + 1, "lru")
        assert (manager.num_slots, manager.slot_bytes) == (capacity, 2 * PAGE)
        assert serve(manager, trace) == lru_tokens(trace, capacity)
        assert manager.held_bytes <= manager.num_slots * manager.slot_bytes


def test_hashes_are_named_as_chunks_are() -> None:
    for request in make_trace(20).requests:
        assert hash_ids(request, SIZE, 4).tolist() == list(boundary_ids(request, SIZE, 4))


@pytest.mark.parametrize(
    ("name", "tokens", "per_chunk", "slot", "slots"),
    [
        # The widest group's block by blocks_per_chunk, and how many of them 64 GiB hold.
        ("llama-3.1-8b", 512, 32, 64 << 20, 1024),
        ("gemma-4-31b", 512, 16, 10 * 262144 * 16, 1638),
        ("qwen3-next-80b", 544, 1, 12 * 1114112, 5140),
        ("deepseek-v4-flash", 512, 2, 2007040, 34239),
        ("gpt-oss-120b", 512, 32, None, None),
        ("glm-5.3-flash-tp2", 512, None, None, None),
    ],
)
def test_slots_of_known_models(
    name: str, tokens: int, per_chunk: int | None, slot: int | None, slots: int | None
) -> None:
    manager = VLLMManager(load(name), tokens, 64 << 30, "arc")
    assert per_chunk in (None, manager.blocks_per_chunk)
    assert slot in (None, manager.slot_bytes)
    assert slots in (None, manager.num_slots)
    assert manager.num_slots == (64 << 30) // manager.slot_bytes


def test_a_slot_is_the_widest_groups_whatever_lies_in_it() -> None:
    manager = VLLMManager(windows(), SIZE, 100 * PAGE, "lru")
    assert manager.blocks_per_chunk == 2
    assert manager.slot_bytes == 2 * 3 * PAGE
    assert blocks_per_chunk(windows(), 8) == 1


@pytest.mark.parametrize("geometry", [uniform(), windows(), states()], ids=["one", "win", "state"])
def test_keys_are_those_that_vllm_makes(geometry: Geometry) -> None:
    manager = VLLMManager(geometry, SIZE, 1000 * PAGE, "lru")
    request = make_trace(3).requests[0]
    scheduler: Any = manager._scheduler
    made: dict[str, Any] = {}

    def look(asked: Any, computed: int) -> tuple[int, bool]:
        status = scheduler._req_status[asked.request_id]
        made["ours"] = [list(state.offload_keys) for state in status.group_states]
        made["places"] = dict(status.req_context._offload_key_positions)
        for state in status.group_states:
            state.offload_keys = []
        status.req_context._offload_key_positions.clear()
        asked.block_hashes = _hashes(ids)
        status.update_offload_keys()
        made["theirs"] = [list(state.offload_keys) for state in status.group_states]
        made["their places"] = dict(status.req_context._offload_key_positions)
        return 0, False

    ids = hash_ids(request, SIZE, manager.tokens_per_hash)
    scheduler.get_num_new_matched_tokens = look
    manager.serve(ids, request.prompt_tokens)
    assert made["ours"] == made["theirs"]
    assert made["places"] == made["their places"]
    assert any(made["ours"])


def _hashes(ids: Any) -> list[bytes]:
    return [int(each).to_bytes(8, "big") for each in ids]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("geometry", [windows(), states()], ids=["windows", "states"])
def test_block_tables_with_fewer_blocks_change_nothing(
    geometry: Geometry, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace(120, seed=4)
    manager = VLLMManager(geometry, SIZE, 120 * PAGE, policy, step_tokens=64)
    few = serve(manager, trace), manager.evicted_chunks, manager.held_slots

    def full(self: VLLMManager, tables: list[list[int]], stored: object, end: int) -> Any:
        for group, table in zip(self.geometry.groups, tables, strict=True):
            start, have = (1 << 24) * group.id + 1, len(table)
            fresh = list(range(start + have, start + -(-end // group.tokens_per_block)))
            if group.kind == "state":
                fresh[:-1] = [0] * (len(fresh) - 1)
            table.extend(fresh)
            yield fresh

    monkeypatch.setattr(VLLMManager, "_extend", full)
    manager = VLLMManager(geometry, SIZE, 120 * PAGE, policy, step_tokens=64)
    assert (serve(manager, trace), manager.evicted_chunks, manager.held_slots) == few
    assert few[1]
    assert sum(few[0])


def repeated(blocks: Sequence[int], tail: int) -> Trace:
    prompt = Request(0.0, len(blocks) * SIZE + tail, 1, [*blocks, 99])
    return Trace("twice", SIZE, [prompt, prompt])


def test_states_are_there_where_a_step_ends() -> None:
    """A prompt of six blocks in steps of two leaves states at 2, 4 and 6 blocks."""
    manager = VLLMManager(states(), SIZE, 1000 * PAGE, "lru", step_tokens=70)
    trace = repeated([1, 2, 3, 4, 5, 6], 9)
    assert serve(manager, trace) == [0, 6 * SIZE]
    parting = [Request(0.0, n * SIZE + 3, 1, [*range(1, n + 1), 50 + n]) for n in range(2, 6)]
    # What parts at 3 blocks finds the state at 2, and leaves one of its own behind, at 3.
    found = serve(manager, Trace("parts", SIZE, parting))
    assert found == [2 * SIZE, 2 * SIZE, 4 * SIZE, 4 * SIZE]
    assert serve(manager, Trace("again", SIZE, parting[1:2])) == [3 * SIZE]


def test_a_window_is_there_where_a_chunk_of_the_full_group_ends() -> None:
    manager = VLLMManager(windows(), SIZE, 1000 * PAGE, "lru")
    assert serve(manager, repeated([1, 2, 3, 4], 9)) == [0, 4 * SIZE]
    parting = Trace("parts", SIZE, [Request(0.0, 3 * SIZE + 8, 1, [1, 2, 3, 77])])
    assert serve(manager, parting) == [3 * SIZE]


def test_a_replay_tells_what_came_of_it() -> None:
    trace, told = make_trace(120), list[tuple[int, int]]()
    out = replay_vllm(
        trace, windows(), 200 * PAGE, "lru", tokens_per_chunk=SIZE, measured_from=60,
        tell=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    manager = VLLMManager(windows(), SIZE, 200 * PAGE, "lru")
    found = serve(manager, trace)
    assert out["tokens_restored"] == sum(found[60:])
    assert out["hit_requests"] == np.count_nonzero(found[60:])
    asked = sum(r.prompt_tokens for r in trace.requests[60:])
    assert out["token_hit_rate"] == pytest.approx(sum(found[60:]) / asked)
    assert out["bytes_held"] == manager.held_bytes
    assert out["evicted_chunks"] == manager.evicted_chunks > 0
    assert told[-1] == (120, 120)
    assert set(out) >= {"seconds", "call_p999_ms", "call_max_ms", "num_slots", "slot_bytes"}


def test_a_prompt_whose_blocks_are_not_all_named_is_served_as_far_as_they_are() -> None:
    trace = Trace("short", SIZE, [Request(0.0, 5 * SIZE, 1, [1, 2])] * 2)
    for geometry in (uniform(), windows()):
        out = replay_vllm(
            trace, geometry, 500 * PAGE, "lru", tokens_per_chunk=SIZE, measured_from=1
        )
        assert out["tokens_restored"] == 2 * SIZE


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("geometry", [windows(), states()], ids=["windows", "states"])
def test_it_stays_below_the_bound(geometry: Geometry, policy: str) -> None:
    trace = make_trace(120, seed=2)
    for budget in (60 * PAGE, 200 * PAGE, 2000 * PAGE):
        bound = resume_bound(trace, ChunkPlan(geometry, SIZE), budget, rounds=200)
        out = replay_vllm(trace, geometry, budget, policy, tokens_per_chunk=SIZE)
        # A hit of a whole prompt, which it may have less one token, is no multiple of the chunk.
        slack = sum(SIZE for r in trace.requests[60:] if r.prompt_tokens % SIZE == 0)
        asked = sum(r.prompt_tokens for r in trace.requests[60:])
        assert out["token_hit_rate"] <= bound + slack / asked
