"""Byte views of every layout in which vLLM can register a KV cache."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from kvloft.engines.vllm.pages import page_view  # noqa: E402
from kvloft.errors import TransferError  # noqa: E402
from kvloft.geometry import Group, Layers, make_geometry  # noqa: E402
from kvloft.jobs import Copy, Job, Part  # noqa: E402
from kvloft.plan import ChunkPlan  # noqa: E402
from kvloft.transfer import CpuCopier  # noqa: E402

BLOCKS, LAYERS, TOKENS = 5, 3, 8


def caches(layout: KVCacheLayout, kernel: int | None = None, padded: int | None = None):  # type: ignore[no-untyped-def]
    """A poisoned allocation, and vLLM's own views of its layers."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=4, dtype=torch.bfloat16,
        page_size_padded=padded,
    )  # fmt: skip
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout, None)
    size = max(LAYERS * strides[0], BLOCKS * strides[1])
    raw = torch.full((size,), 0x5A, dtype=torch.int8)
    tensor = KVCacheTensor(
        size=size, layers=[f"l{n}" for n in range(LAYERS)],
        layer_stride=strides[0], block_stride=strides[1],
    )  # fmt: skip
    return spec, raw, create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel)


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("kernel", [None, TOKENS // 2])
def test_blocks_move_between_all_layouts(layout: KVCacheLayout, kernel: int | None) -> None:
    try:
        spec, raw, views = caches(layout, kernel)
    except ValueError:
        pytest.skip("vLLM can't split blocks in this layout")
    live = spec.unpadded_page_size_bytes
    geometry = make_geometry(
        [Group(0, "full", TOKENS, (Layers(LAYERS, live, live),))], tokens_per_hash=TOKENS
    )
    plan = ChunkPlan(geometry, 2 * TOKENS)
    arena = np.zeros(1 << 16, dtype=np.uint8)
    copier = CpuCopier(plan, {0: [page_view(view, BLOCKS) for view in views]}, arena, rank=0)
    assert plan.full_layout is not None
    counts = plan.full_layout.counts
    generator = torch.Generator().manual_seed(0)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
    before = [view.clone() for view in views]
    copier.store(Job(1, [Copy([0], counts, [Part(0, 0, [3, 1])])]))
    raw.fill_(0x5A)
    # Into other blocks, in the other order.
    copier.load(Job(2, [Copy([0], counts, [Part(0, 0, [2, 4])])]))
    per_block = views[0].shape[0] // BLOCKS
    for view, old in zip(views, before, strict=True):
        for source, target in ((3, 2), (1, 4)):
            for row in range(per_block):
                found = view[target * per_block + row]
                assert torch.equal(found, old[source * per_block + row])
    written = 2 * LAYERS * live
    assert int((raw != 0x5A).sum()) <= written
    for view in views:
        view[2 * per_block : 3 * per_block] = view[4 * per_block :] = 0
    untouched = torch.where(raw == 0, 0x5A, raw)
    assert bool((untouched == 0x5A).all())


def test_padding_is_neither_read_nor_written() -> None:
    spec, raw, views = caches(KVCacheLayout.LBHNC, padded=1024)
    view = page_view(views[1], BLOCKS)
    assert view.shape == (BLOCKS, spec.unpadded_page_size_bytes)
    assert view.strides == (1024, 1)
    view[:] = 0
    assert int((raw == 0).sum()) == BLOCKS * spec.unpadded_page_size_bytes


def test_states() -> None:
    spec = MambaSpec(
        block_size=TOKENS, shapes=((3, 5), (2, 2)), dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=64, mamba_cache_mode="align",
    )  # fmt: skip
    raw = torch.zeros(64 * BLOCKS, dtype=torch.int8)
    tensor = KVCacheTensor(
        size=64 * BLOCKS, layers=["l"], layer_stride=64 * BLOCKS, block_stride=64
    )
    (cache,) = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout.LBHNC, tensor)
    assert page_view(cache, BLOCKS).shape == (BLOCKS, 46)


def test_what_has_no_view_is_refused() -> None:
    cache = torch.zeros(6, 4)
    with pytest.raises(TransferError, match="do not divide"):
        page_view(cache, 4)
    with pytest.raises(TransferError, match=r"overlapping|leaves"):
        page_view(torch.zeros(1, 4).expand(6, 4), 6)
    with pytest.raises(TransferError, match="CPU memory only"):
        page_view(torch.zeros(6, 4, device="meta"), 6)
