"""Seals see every bit that changes in a slot; likeness tells rounding from other tokens."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.plan import ChunkLayout, ChunkPlan
from kvloft.seals import Seals, seal_bytes
from kvloft.testing.geometries import plans
from kvloft.transfer.likeness import MOST_UNLIKE, unlike

BYTES = 1 << 20


def layouts_of(plan: ChunkPlan) -> list[ChunkLayout]:
    """Every class of chunk at a boundary far from the start."""
    found = [plan.full_layout, plan.state_layout, *(p.layout for p in plan.pieces(60))]
    return [layout for layout in found if layout is not None]


@settings(max_examples=examples(0.5))
@given(plans(), st.integers(0, 1 << 30))
def test_every_flipped_bit_is_seen_by_those_who_read_it(plan: ChunkPlan, seed: int) -> None:
    rng = random.Random(seed)
    classes = layouts_of(plan)
    if not classes:
        return
    ranks = plan.geometry.tensor_parallel
    memory = np.frombuffer(bytearray(BYTES + seal_bytes(plan, BYTES)), dtype=np.uint8)
    memory[:BYTES] = np.frombuffer(rng.randbytes(BYTES), dtype=np.uint8)
    seals = Seals(plan, memory, BYTES)
    arena = Arena(BYTES, choose_slab_bytes(BYTES, plan.slot_sizes()))
    slots: list[tuple[int, ChunkLayout]] = []
    for _ in range(12):
        layout = rng.choice(classes)
        if (slot := arena.allocate(layout.slot_bytes)) is not None:
            slots.append((slot, layout))
            seals.seal_all(slot, layout)
    for slot, layout in slots:
        assert seals.all_intact(slot, layout)
    slot, layout = rng.choice(slots)
    at = rng.randrange(layout.nbytes)
    memory[slot + at] ^= 1 << rng.randrange(8)
    for rank in range(ranks):
        own = range(layout.rank_offset(rank), layout.rank_offset(rank) + layout.rank_bytes)
        assert seals.intact(slot, layout, rank) == (at >= layout.shared_bytes and at not in own)
    assert not seals.all_intact(slot, layout)
    for other, its_layout in slots:
        assert other == slot or seals.all_intact(other, its_layout)


NUMBERS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def as_bytes(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.uint8]:
    """Pages of numbers as the engine would hold them."""
    import torch

    types = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }  # fmt: skip
    tensor = torch.from_numpy(values.astype(np.float32)).to(types[kind])
    found: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return found.reshape(len(values), -1)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_rounding_is_alike_and_other_tokens_are_not(kind: str, noise: float) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(20, 8192))
    again = values * (1 + noise * rng.normal(size=values.shape))
    assert unlike(as_bytes(again, kind), as_bytes(values, kind)) <= MOST_UNLIKE / 5
    others = rng.normal(size=values.shape)
    assert unlike(as_bytes(others, kind), as_bytes(values, kind)) > 0.9


@pytest.mark.parametrize("kind", NUMBERS)
def test_one_wrong_page_among_many_is_found_and_a_few_tokens_are_not_enough(kind: str) -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(50, 8192))
    shifted = values.copy()
    shifted[17] = values[18]
    assert unlike(as_bytes(shifted, kind), as_bytes(values, kind)) > 0.9
    few = values.copy()
    few[:, :512] = rng.normal(size=(50, 512))
    assert 0 < unlike(as_bytes(few, kind), as_bytes(values, kind)) <= MOST_UNLIKE


def test_small_and_empty_pages() -> None:
    pages = np.arange(15, dtype=np.uint8).reshape(5, 3)
    assert unlike(pages, pages) == 0
    assert unlike(pages + 1, pages) == 1
    assert unlike(pages[:0], pages[:0]) == 0
