"""vLLM's KV-cache configuration as a geometry, or the reason why it is refused."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvloft.errors import GeometryError
from kvloft.geometry import Geometry, Group, Kind, Layers, make_geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

# Exact classes: a subclass may forget or share blocks in a way that is not known here.
_KINDS: dict[type, Kind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "window",
    SlidingWindowMLASpec: "window",
    ChunkedLocalAttentionSpec: "chunked_local",
    MambaSpec: "state",
    CircularBufferSpec: "ring",
}

_UNKNOWN_DRAFTERS = ("dflash", "dspark", "extract_hidden_states")


def check_servable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine that could not continue correctly from what KVLoft restores.

    Raises :class:`GeometryError` with the reason and, where there is one, the way out.
    """
    parallel = vllm_config.parallel_config
    for what, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("prefill-context", parallel.prefill_context_parallel_size),
        ("decode-context", parallel.decode_context_parallel_size),
    ):
        if size > 1:
            raise GeometryError(
                f"{what}-parallel size {size}: this version serves tensor parallelism only; "
                "use size 1 or run without KVLoft"
            )
    if parallel.nnodes_within_dp > 1:
        raise GeometryError(
            f"one engine over {parallel.nnodes_within_dp} nodes: its ranks must share one host's "
            "memory; use one node per engine"
        )
    if (
        vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise GeometryError(
            "the attention backend of this platform can't continue from cached context (vLLM has "
            "switched off chunked prefill and prefix caching for it), so a restored prefix would "
            "give wrong outputs; run this model on a platform that can, or without KVLoft"
        )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise GeometryError("HiSparse host pools are not supported; run without KVLoft")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in _UNKNOWN_DRAFTERS:
        raise GeometryError(
            f"speculative method {speculative.method!r}: this version does not know which bytes of "
            "such a drafter's KV cache are final; use another method, or run without KVLoft"
        )
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in _layer_specs(group):
            if type(spec) not in _KINDS:
                raise GeometryError(
                    f"group {index} ({', '.join(group.layer_names[:2])}, …) caches in a way that "
                    f"this version does not know: {type(spec).__name__}"
                )
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
                raise GeometryError(
                    f"group {index} keeps recurrent state in cache mode {spec.mamba_cache_mode!r}; "
                    "states can be stored in mode 'align' only: enable prefix caching "
                    "(enable_prefix_caching=True) and leave mamba_cache_mode alone or at 'align'"
                )


def volatile_tokens(vllm_config: VllmConfig) -> int:
    """How many tokens at the end of what a request knows may be computed again.

    A drafter with KV of its own (EAGLE, MTP, a draft model) computes a token's from the next token
    too, module k of several from the k next ones: final is what those were known for. vLLM does
    not always say which groups are a drafter's, and may join its layers with the target's, so this
    is a property of the engine and not of a group. 0 without such a drafter.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return 0
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def translate(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """The geometry that a worker's configuration describes. Raises :class:`GeometryError`.

    The scheduler's copy of the configuration won't do: vLLM flattens there a group of layers with
    pages of different sizes to one of them.
    """
    check_servable(vllm_config, kv_cache_config)
    tokens_per_hash = kv_cache_config.hash_block_size
    if tokens_per_hash is None:
        tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
    strides = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    ranks = vllm_config.parallel_config.tensor_parallel_size
    all_alike = ranks > 1 and kv_cache_config.kv_tp_replicas == ranks
    groups = [
        _translate_group(index, group, index in cacheable, strides, ranks, all_alike)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    if not cacheable:
        raise GeometryError("this model has no KV-cache group whose prefixes can be stored")
    return make_geometry(
        groups,
        tokens_per_hash,
        tensor_parallel=ranks,
        model=str(vllm_config.model_config.model),
        dtype=kv_dtype(vllm_config),
        where="this model's KV cache",
    )


def kv_dtype(vllm_config: VllmConfig) -> str:
    """The element type of the KV cache, by name."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype == "auto":
        cache_dtype = vllm_config.model_config.dtype
    return str(cache_dtype).removeprefix("torch.")


def _layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """One spec for each layer of the group, in order."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec] * len(group.layer_names)


def _live_bytes(spec: Any) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.real_page_size_bytes)


def _replicated(spec: KVCacheSpec, ranks: int) -> bool:
    if ranks == 1:
        return False
    if isinstance(spec, AttentionSpec):
        return bool(spec.max_tp_shards == 1)
    return isinstance(spec, MambaSpec) and bool(spec.tp_replicated)


def _translate_group(
    index: int,
    group: KVCacheGroupSpec,
    cacheable: bool,
    strides: dict[str, int],
    ranks: int,
    all_alike: bool,
) -> Group:
    specs = _layer_specs(group)
    pages = [
        (_live_bytes(spec), strides.get(name, spec.page_size_bytes))
        for name, spec in zip(group.layer_names, specs, strict=True)
    ]
    first: Any = specs[0]
    kind = _KINDS[type(first)]
    if any(_KINDS[type(spec)] != kind for spec in specs):
        raise GeometryError(f"group {index} mixes layers that forget differently")
    return Group(
        id=index,
        kind=kind,
        tokens_per_block=first.block_size,
        layers=tuple(
            Layers(len(list(run)), size, stride) for (size, stride), run in groupby(pages)
        ),
        window=first.sliding_window if kind == "window" else 0,
        attention_chunk=first.attention_chunk_size if kind == "chunked_local" else 0,
        extra_retained_tokens=first.extra_retained_tokens if kind == "window" else 0,
        cacheable=cacheable and kind != "ring",
        draft=group.is_eagle_group,
        replicated=all_alike or all(_replicated(spec, ranks) for spec in specs),
    )
