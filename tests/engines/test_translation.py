"""vLLM's KV-cache configurations as geometries, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvloft.engines.vllm.geometry import translate, volatile_tokens  # noqa: E402
from kvloft.errors import GeometryError  # noqa: E402

ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def engine(**changes: Any) -> Any:
    """What of vLLM's configuration is read."""
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "nnodes_within_dp": 1,
        "tensor_parallel_size": changes.pop("ranks", 1),
    }
    model = SimpleNamespace(use_mla=changes.pop("mla", False), model="m", dtype=torch.bfloat16)
    on = changes.pop("chunked_prefill", True)
    lookahead, method = changes.pop("lookahead", 0), changes.pop("method", None)
    speculative = method and SimpleNamespace(
        method=method, uses_draft_kv_cache=lambda: method in ("eagle", "mtp", "draft_model")
    )
    parallel.update(changes)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=model,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=on),
        cache_config=SimpleNamespace(enable_prefix_caching=on, cache_dtype="auto"),
        speculative_config=speculative,
        num_prefill_lookahead_tokens=lookahead,
    )


def config(*specs: Any, hash_unit: int = 16, **changes: Any) -> Any:
    """A KV-cache configuration with one group of two layers for each spec."""
    groups = [
        KVCacheGroupSpec(layer_names=[f"g{n}.l0", f"g{n}.l1"], kv_cache_spec=spec)
        for n, spec in enumerate(specs)
    ]
    made = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    made.hash_block_size = hash_unit
    for key, value in changes.items():
        setattr(made, key, value)
    return made


STATE = MambaSpec(
    block_size=64, shapes=((8, 8),), dtypes=(torch.float32,), page_size_padded=4096,
    mamba_cache_mode="align",
)  # fmt: skip


def test_every_kind() -> None:
    geometry = translate(
        engine(),
        config(
            FullAttentionSpec(block_size=32, **ATTENTION),
            SlidingWindowSpec(
                block_size=16, sliding_window=100, extra_retained_tokens=3, **ATTENTION
            ),
            ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=512, **ATTENTION),
            STATE,
            CircularBufferSpec(block_size=4, **ATTENTION),
        ),
    )
    assert [g.kind for g in geometry.groups] == [
        "full", "window", "chunked_local", "state", "ring",
    ]  # fmt: skip
    assert geometry.unit_tokens == 64
    assert geometry.groups[0].block_bytes == 2 * 32 * 2 * 64 * 2 * 2
    assert (geometry.groups[1].window, geometry.groups[1].extra_retained_tokens) == (100, 3)
    assert geometry.groups[2].attention_chunk == 512
    assert geometry.groups[3].layers[0].page_bytes == 256
    assert geometry.groups[3].layers[0].stride_bytes == 4096
    assert not geometry.groups[4].cacheable


def test_layers_of_different_sizes_keep_their_order() -> None:
    small = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    large = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    layers = {"g0.l0": large, "g0.l1": small}
    tensors = [
        KVCacheTensor(size=1 << 20, layers=["g0.l0"], layer_stride=1 << 20, block_stride=90112),
        KVCacheTensor(size=1 << 20, layers=["g0.l1"], layer_stride=1 << 20, block_stride=90112),
    ]
    geometry = translate(
        engine(),
        config(
            UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=layers), kv_cache_tensors=tensors
        ),
    )
    runs = geometry.groups[0].layers
    assert [(r.count, r.page_bytes, r.stride_bytes) for r in runs] == [
        (1, 64 * 576 * 2, 90112),
        (1, 64 * 128 * 2, 90112),
    ]


def test_what_all_ranks_hold_alike_is_stored_once() -> None:
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )
    geometry = translate(engine(ranks=2), config(latent, STATE))
    assert [g.replicated for g in geometry.groups] == [True, False]
    alone = translate(engine(), config(latent, STATE))
    assert not any(g.replicated for g in alone.groups)
    alike = translate(engine(ranks=2), config(STATE, kv_tp_replicas=2))
    assert alike.groups[0].replicated


FULL = FullAttentionSpec(block_size=32, **ATTENTION)

REFUSED = [
    (engine(pipeline_parallel_size=2), config(FULL), "pipeline-parallel size 2"),
    (engine(decode_context_parallel_size=2), config(FULL), "decode-context-parallel size 2"),
    (engine(prefill_context_parallel_size=4), config(FULL), "prefill-context-parallel size 4"),
    (engine(nnodes_within_dp=2), config(FULL), "2 nodes"),
    (engine(mla=True, chunked_prefill=False), config(FULL), "continue from cached context"),
    (engine(), config(FULL, hisparse_host_num_blocks=4), "HiSparse"),
    (engine(method="dflash"), config(FULL), "'dflash'.*final"),
    (engine(), config(CrossAttentionSpec(block_size=32, **ATTENTION)), "CrossAttentionSpec"),
    (
        engine(),
        config(
            MambaSpec(
                block_size=64, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="none"
            )
        ),
        "enable_prefix_caching",
    ),
    (engine(), config(CircularBufferSpec(block_size=4, **ATTENTION)), "no"),
]


@pytest.mark.parametrize(("vllm_config", "kv_cache_config", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(
    vllm_config: Any, kv_cache_config: Any, words: str
) -> None:
    with pytest.raises(GeometryError, match=words):
        translate(vllm_config, kv_cache_config)


def test_a_drafter_s_group_is_marked_where_vllm_says_so() -> None:
    cache = config(FULL, FULL)
    cache.kv_cache_groups[1].is_eagle_group = True
    assert [g.draft for g in translate(engine(method="mtp"), cache).groups] == [False, True]


@pytest.mark.parametrize(
    ("method", "lookahead", "tokens"),
    [(None, 0, 0), ("ngram", 0, 0), ("eagle", 1, 1), ("draft_model", 0, 1), ("mtp", 3, 3)],
)
def test_a_drafter_s_tail_is_volatile_whether_or_not_its_group_is_marked(
    method: str | None, lookahead: int, tokens: int
) -> None:
    assert volatile_tokens(engine(method=method, lookahead=lookahead)) == tokens


def test_mla_is_served_where_the_platform_can_continue() -> None:
    translate(engine(mla=True), config(FULL))
