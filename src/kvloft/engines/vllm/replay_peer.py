"""A request trace through vLLM's own offloading: its scheduler half, spec, manager and policies.

What decides is vLLM's code alone: ``build_offloading_config`` and ``CPUOffloadingSpec`` say how
many slots a budget has, ``OffloadingConnectorScheduler`` looks up, loads and stores, and
``CPUOffloadingManager`` evicts. Here is what these read from an engine, as little as they ask for:
block tables, steps of a prompt, answers of workers that are always done. Requests come one after
the other, and the engine's own cache holds nothing, so that every hit is the offloading's.

What is counted: a slot for each key, one key for each group and chunk, and a slot has the bytes of
the widest group's block times ``blocks_per_chunk`` whichever group the chunk is of.
"""

from __future__ import annotations

import gc
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from kvloft.geometry import Geometry, Group, Layers
    from kvloft.replay.trace import Request, Trace

STEP_TOKENS = 8192
"""Tokens of a prompt that the engine computes at once."""

_MEMORY = 1 << 44
"""Bytes of a GPU that is never filled; only what one block of it takes matters."""
_IDS_PER_GROUP = 1 << 24


class _Spec(CPUOffloadingSpec):
    """The CPU tier as it is on a GPU, where the ranks share one region of memory."""

    def _uses_shared_region(self) -> bool:
        return True


@dataclass(slots=True)
class _Block:
    """What the scheduler half reads of a ``KVCacheBlock`` that has just been allocated."""

    block_id: int
    is_null: bool = False
    block_hash: None = None


_NULL = _Block(0, is_null=True)


@dataclass(slots=True)
class _Request:
    """What the scheduler half reads of a vLLM ``Request``."""

    request_id: str
    block_hashes: list[bytes]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.RUNNING
    kv_transfer_params: None = None
    kv_hints: None = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0

    @property
    def num_tokens(self) -> int:
        """A request is over when its prompt is computed: by default vLLM stores prompts alone."""
        return self.num_prompt_tokens

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


@dataclass(slots=True)
class _Step:
    """What the scheduler half reads of a ``SchedulerOutput``."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: Sequence[Any] = ()
    scheduled_cached_reqs: Any = field(
        default_factory=lambda: SimpleNamespace(req_ids=(), new_block_ids=(), resumed_req_ids=())
    )
    finished_req_ids: Sequence[str] = ()
    preempted_req_ids: Sequence[str] = ()
    kv_cache_block_copies: Sequence[Any] = ()
    kv_connector_block_state: Any = None


# ---------------------------------------------------------------------------------- configuration


def _layer_spec(group: Group, run: Layers) -> Any:
    """vLLM's spec of a layer; its page has the bytes that the geometry says, padding included."""
    size = group.tokens_per_block
    if group.kind == "state":
        return MambaSpec(
            block_size=size, shapes=((run.page_bytes,),), dtypes=(torch.uint8,),
            page_size_padded=run.stride_bytes, mamba_cache_mode="align",
            tp_replicated=group.replicated,
        )  # fmt: skip
    common: dict[str, Any] = {
        "block_size": size,
        "num_kv_heads": 1,
        "head_size": 1,
        "head_size_v": 0,
        "dtype": torch.uint8,
        "page_size_padded": run.stride_bytes,
        "max_tp_shards": 1 if group.replicated else None,
    }
    match group.kind:
        case "window":
            return SlidingWindowSpec(
                **common, sliding_window=group.window,
                extra_retained_tokens=group.extra_retained_tokens,
            )  # fmt: skip
        case "chunked_local":
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.attention_chunk)
        case "ring":
            return CircularBufferSpec(**common)
        case _:
            return FullAttentionSpec(**common)


def _group_spec(group: Group) -> KVCacheGroupSpec:
    specs = {
        f"group{group.id}.run{n}.layer{i}": _layer_spec(group, run)
        for n, run in enumerate(group.layers)
        for i in range(run.count)
    }
    names = list(specs)
    if len({run.stride_bytes for run in group.layers}) > 1:
        spec: Any = UniformTypeKVCacheSpecs(block_size=group.tokens_per_block, kv_cache_specs=specs)
    else:
        spec = specs[names[0]]
    return KVCacheGroupSpec(names, spec, is_eagle_group=group.draft)


def _vllm_config(geometry: Geometry, extra: dict[str, Any]) -> Any:
    """What the offloading's set-up reads of a ``VllmConfig``."""
    ranks = geometry.tensor_parallel
    blocks = [g.tokens_per_block for g in geometry.groups]
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id="replay"),
        kv_events_config=None,
        speculative_config=None,
        use_v2_model_runner=False,
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            block_size=blocks[0],
            prefix_match_unit=geometry.tokens_per_hash if len(blocks) > 1 else None,
            enable_prefix_caching=True,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=None,
            cache_dtype="auto",
            kv_cache_layout=KVCacheLayout.BLHNC.name,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        ),
        model_config=SimpleNamespace(
            model=geometry.model,
            dtype="bfloat16",
            use_mla=all(g.replicated for g in geometry.groups),
            get_total_num_kv_heads=lambda: ranks,
        ),
        parallel_config=SimpleNamespace(
            rank=0, world_size=ranks, tensor_parallel_size=ranks, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            distributed_executor_backend="mp", nnodes_within_dp=1,
        ),
    )  # fmt: skip


def blocks_per_chunk(geometry: Geometry, tokens_per_chunk: int) -> int:
    """The option of vLLM's for which a chunk of its ``full`` groups has about these tokens.

    vLLM counts blocks, the same number for every group; ``block_size``, which counts tokens, it
    refuses where the groups' blocks differ. Look-ups go by the coarsest ``full`` group, and what a
    window stores between its chunks is masked, so that group decides here. Never less than 1.
    """
    sizes = [g.tokens_per_block for g in geometry.cacheable if g.kind == "full"]
    coarsest = max(sizes or [g.tokens_per_block for g in geometry.cacheable])
    return max(1, tokens_per_chunk // coarsest)


# ---------------------------------------------------------------------------------- the manager


class VLLMManager:
    """vLLM's CPU offloading with one policy and budget, serving prompts one after the other."""

    def __init__(
        self,
        geometry: Geometry,
        tokens_per_chunk: int,
        budget_bytes: int,
        policy: str,
        *,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """``policy``: ``lru`` or ``arc``. Whatever vLLM refuses raises what it raises."""
        self.geometry = geometry
        self.blocks_per_chunk = blocks_per_chunk(geometry, tokens_per_chunk)
        extra = {
            "cpu_bytes_to_use": budget_bytes,
            "blocks_per_chunk": self.blocks_per_chunk,
            "eviction_policy": policy,
        }
        vllm_config = _vllm_config(geometry, extra)
        with _quiet():
            worker = get_kv_cache_config_from_groups(
                vllm_config, [_group_spec(g) for g in geometry.groups], _MEMORY
            )
            config = build_offloading_config(vllm_config, worker)
            spec = _Spec(config)
            flat = generate_scheduler_kv_cache_config([worker])
            self._scheduler = OffloadingConnectorScheduler(spec, vllm_config, flat)
        self.tokens_per_hash: int = config.cache.tokens_per_hash
        self.num_slots: int = spec.num_chunks
        self.slot_bytes: int = spec.kv_bytes_per_chunk
        self.evicted_chunks = 0
        self.calls = array("d")
        """Seconds of each call on the scheduler's thread."""
        self._manager: Any = self._scheduler.manager
        self._count_evictions(self._manager)
        self._states = [g.id for g in geometry.cacheable if g.kind == "state"]
        self._step = _step_rule(geometry, step_tokens)
        self._served = 0

    def _count_evictions(self, manager: CPUOffloadingManager) -> None:
        prepare = manager.prepare_store

        def counted(*arguments: Any) -> Any:
            out = prepare(*arguments)
            if out is not None:
                self.evicted_chunks += len(out.evicted_keys)
            return out

        manager.prepare_store = counted

    @property
    def held_slots(self) -> int:
        """Slots that hold a chunk."""
        return int(self._manager._num_allocated_chunks - len(self._manager._free_list))

    @property
    def held_bytes(self) -> int:
        """Bytes of these slots."""
        return self.held_slots * self.slot_bytes

    def serve(self, request_ids: NDArray[np.int64], prompt_tokens: int) -> int:
        """Serve a prompt from its look-up to its end; the tokens that were restored.

        ``request_ids``: one for each ``tokens_per_hash`` tokens that the prompt has whole; equal
        ids mean equal prefixes. A hit of the whole prompt is counted less one token, which vLLM
        computes again (``Scheduler._update_waiting_for_remote_kv``).
        """
        self._served += 1
        # Keys are made below; only states are stored under hashes that are looked up again.
        hashes = _names(request_ids) if self._states else []
        request = _Request(str(self._served), hashes, prompt_tokens)
        self._call(self._scheduler.on_new_request, request)
        self._make_keys(request, request_ids)
        found, _ = self._call(self._scheduler.get_num_new_matched_tokens, request, 0)
        if found:
            self._load(request, found)
        restored = min(found or 0, prompt_tokens - 1)
        request.num_computed_tokens = restored
        self._compute(request)
        request.status = RequestStatus.FINISHED_STOPPED
        self._call(self._scheduler.request_finished, request)
        self._run(_Step(finished_req_ids=(request.request_id,)))
        return restored

    def _make_keys(self, request: _Request, ids: NDArray[np.int64]) -> None:
        """What ``RequestOffloadState.update_offload_keys`` would make, ten times as fast; it finds
        nothing left to do. A prompt has thousands of keys where blocks have four tokens."""
        status = self._scheduler._req_status[request.request_id]
        positions = status.req_context._offload_key_positions
        for config, state in zip(
            self._scheduler.config.kv_group_configs, status.group_states, strict=True
        ):
            ends = ids[config.hashes_per_chunk - 1 :: config.hashes_per_chunk]
            state.offload_keys = _names(ends, config.group_idx)
            size = config.tokens_per_chunk
            ends_at = range(size, len(ends) * size + 1, size)
            positions.update(zip(state.offload_keys, ends_at, strict=True))

    def _load(self, request: _Request, found: int) -> None:
        """Blocks as ``allocate_new_computed_blocks`` leaves them: null where a window has passed
        (``get_num_skipped_tokens``), fresh ones behind."""
        blocks = []
        for group in self.geometry.groups:
            first = _first_needed(group, found)
            start = _IDS_PER_GROUP * group.id + 1
            end = -(-found // group.tokens_per_block)
            fresh = [_Block(start + n) for n in range(first, end)]
            blocks.append([_NULL] * min(first, end) + fresh)
        self._call(
            self._scheduler.update_state_after_alloc, request, SimpleNamespace(blocks=blocks), found
        )
        self._run(_Step())

    def _compute(self, request: _Request) -> None:
        """The steps of a prompt, from what was restored to its end."""
        done, name = request.num_computed_tokens, request.request_id
        tables, stored = self._tables(done), self._stored(request)
        is_new = True
        while done < request.num_prompt_tokens:
            end = self._step(done, request.num_prompt_tokens)
            fresh = tuple(self._extend(tables, stored, end))
            step = _Step({name: end - done})
            if is_new:
                step.scheduled_new_reqs = (SimpleNamespace(req_id=name, block_ids=tuple(tables)),)
            else:
                step.scheduled_cached_reqs = SimpleNamespace(
                    req_ids=(name,), new_block_ids=(fresh,), resumed_req_ids=()
                )
            step.kv_connector_block_state = self._states_of(request, tables, end)
            request.num_computed_tokens = done
            self._run(step)
            done, is_new = end, False
        request.num_computed_tokens = done

    def _tables(self, restored: int) -> list[list[int]]:
        """Block tables of a request that was restored so far: 0 where a window has passed."""
        tables = []
        for group in self.geometry.groups:
            start, end = _IDS_PER_GROUP * group.id + 1, -(-restored // group.tokens_per_block)
            first = min(_first_needed(group, restored), end)
            tables.append([0] * first + list(range(start + first, start + end)))
        return tables

    def _stored(self, request: _Request) -> list[Sequence[bool]]:
        """Of each group, which chunks of the prompt vLLM's mask lets it store."""
        out: list[Sequence[bool]] = [()] * len(self.geometry.groups)
        for config in self._scheduler.config.kv_group_configs:
            chunks = request.num_prompt_tokens // config.tokens_per_chunk
            mask = None
            if not config.is_eagle_group:
                mask = self._scheduler._reachable_store_block_mask(config, 0, chunks, chunks, ())
            if mask is None or not chunks:
                out[config.group_idx] = [True] * chunks
            else:
                each = np.asarray(np.array(mask).reshape(chunks, -1).any(axis=1))
                out[config.group_idx] = list(map(bool, each))
        return out

    def _extend(
        self, tables: list[list[int]], stored: list[Sequence[bool]], end: int
    ) -> Iterable[list[int]]:
        """Blocks for a step up to ``end`` tokens. A state group in mode ``align`` gets one, at the
        end, and null ones before it (``MambaManager.allocate_new_blocks``).

        Of the other groups only the last block of a chunk that may be stored is given a number: it
        alone decides (``OffloadingConnectorScheduler._build_store_jobs``), and more of them would
        only make the lists for the workers longer.
        """
        for group, table in zip(self.geometry.groups, tables, strict=True):
            start, have = _IDS_PER_GROUP * group.id + 1, len(table)
            need = -(-end // group.tokens_per_block)
            fresh = [0] * (need - have)
            if group.kind == "state":
                if fresh:
                    fresh[-1] = start + need - 1
            else:
                size, mask = self.blocks_per_chunk, stored[group.id]
                for chunk in range(have // size, min(need // size, len(mask))):
                    if mask[chunk]:
                        last = chunk * size + size - 1
                        fresh[last - have] = start + last
            table.extend(fresh)
            yield fresh

    def _states_of(self, request: _Request, tables: list[list[int]], end: int) -> Any:
        """States that the step offers (``MambaManager.cache_blocks``): of each group the one at its
        end, if a block ends there."""
        offers = [
            (g, tables[g][end // self.geometry.groups[g].tokens_per_block - 1], end)
            for g in self._states
            if end % self.geometry.groups[g].tokens_per_block == 0
        ]
        return SimpleNamespace(boundary_state_offloads={request.request_id: offers})

    def _run(self, step: _Step) -> None:
        """One step of the engine, at whose end the workers have done all that was ordered."""
        meta = self._call(self._scheduler.build_connector_meta, step)
        jobs = [*meta.load_jobs, *meta.store_jobs]
        if jobs:
            done = OffloadingWorkerMetadata()
            done.completed_jobs = dict.fromkeys(jobs, self.geometry.tensor_parallel)
            output = KVConnectorOutput(kv_connector_worker_meta=done)
            self._call(self._scheduler.update_connector_output, output)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        out = function(*arguments)
        self.calls.append(time.perf_counter() - start)
        return out


def _first_needed(group: Group, boundary: int) -> int:
    """Index of the first block that is not null in a request that goes on at ``boundary``.

    ``boundary`` need not be a block's end: vLLM also restores part of a chunk.
    """
    if group.kind == "state":
        return max(0, boundary - 1) // group.tokens_per_block
    return group.resume_start(boundary) // group.tokens_per_block


def _step_rule(geometry: Geometry, step_tokens: int) -> Callable[[int, int], int]:
    """Where a step that begins at a token ends, in a prompt of so many tokens.

    With states it ends at a block's end, and once at the last one of the prompt
    (``Scheduler._mamba_block_aligned_split``).
    """
    block = max((g.tokens_per_block for g in geometry.groups if g.kind == "state"), default=0)

    def plain(start: int, prompt: int) -> int:
        return min(start + step_tokens, prompt)

    def aligned(start: int, prompt: int) -> int:
        end, last = plain(start, prompt), prompt // block * block
        if start < last:
            end = min(end, last)
        if end < prompt and end // block * block > start:
            end = end // block * block
        return end

    return aligned if block else plain


_NAME = np.dtype([("id", ">i8"), ("group", ">u4")])


def _names(ids: NDArray[np.int64], group: int | None = None) -> list[Any]:
    """A prefix hash for each id; with a group, the key that ``make_offload_key`` makes of it."""
    named = np.empty(len(ids), dtype=_NAME if group is not None else ">i8")
    if group is None:
        named[:] = ids
    else:
        named["id"], named["group"] = ids, group
    return named.view(f"V{named.itemsize}").tolist()


@contextmanager
def _quiet() -> Any:
    """vLLM tells at length about a configuration that is made up."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------------------------- a whole trace


def hash_ids(request: Request, tokens_per_block: int, tokens_per_hash: int) -> NDArray[np.int64]:
    """As ``kvloft.replay.trace.boundary_ids``, for thousands of hashes in a prompt."""
    ends = np.arange(tokens_per_hash, request.prompt_tokens + 1, tokens_per_hash) - 1
    blocks = np.asarray(request.blocks, dtype=np.int64)
    at = ends // tokens_per_block
    ends, at = ends[at < len(blocks)], at[at < len(blocks)]
    named: NDArray[np.int64] = blocks[at] * tokens_per_block + ends % tokens_per_block
    return named


def replay_vllm(
    trace: Trace,
    geometry: Geometry,
    budget_bytes: int,
    policy: str,
    *,
    tokens_per_chunk: int = 512,
    measured_from: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Replay a whole trace; what came of it, in the words of KVLoft's own runs.

    ``measured_from``: the first request that counts, by default the one half-way. ``tell``: told
    requests done and in all.
    """
    manager = VLLMManager(geometry, tokens_per_chunk, budget_bytes, policy)
    total = len(trace.requests)
    first = total // 2 if measured_from is None else measured_from
    size = manager.tokens_per_hash
    asked = restored = hits = 0
    # An engine does the same when it has started, so that the collector looks at what is new alone.
    gc.collect()
    gc.freeze()
    begun = time.perf_counter()
    for index, request in enumerate(trace.requests):
        ids = hash_ids(request, trace.tokens_per_block, size)
        tokens = request.prompt_tokens
        if tokens // size > len(ids):  # A trace may name fewer blocks than the prompt has.
            tokens = len(ids) * size + min(1, size - 1)
        found = manager.serve(ids, tokens) if tokens else 0
        if index >= first:
            asked += request.prompt_tokens
            restored += found
            hits += found > 0
        if index % 100 == 99 or index == total - 1:
            tell(index + 1, total)
    seconds = time.perf_counter() - begun
    gc.unfreeze()
    calls = np.frombuffer(manager.calls) if manager.calls else np.zeros(1)
    return {
        "token_hit_rate": restored / max(1, asked),
        "tokens_restored": restored,
        "hit_requests": hits,
        "evicted_chunks": manager.evicted_chunks,
        "bytes_held": manager.held_bytes,
        "seconds": round(seconds, 2),
        "call_p999_ms": round(float(np.quantile(calls, 0.999)) * 1e3, 3),
        "call_max_ms": round(float(calls.max()) * 1e3, 3),
        "num_slots": manager.num_slots,
        "slot_bytes": manager.slot_bytes,
        "blocks_per_chunk": manager.blocks_per_chunk,
    }
