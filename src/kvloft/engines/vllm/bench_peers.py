"""vLLM's own offloading, scheduler half and CPU manager, set up alone to be measured beside KVLoft.

The classes are vLLM's; only what they read from the engine's configuration is made up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvloft.geometry import Geometry, Group


def _spec(group: Group) -> Any:
    size: dict[str, Any] = {
        "block_size": group.tokens_per_block,
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    if group.kind == "window":
        return SlidingWindowSpec(**size, sliding_window=group.window)
    return FullAttentionSpec(**size)


class Peer:
    """vLLM's scheduler half and manager for a geometry of ``full`` and ``window`` groups."""

    def __init__(self, geometry: Geometry, num_chunks: int) -> None:
        """``num_chunks``: the manager's capacity, in chunks of one block of any group."""
        self.manager = CPUOffloadingManager(num_chunks=num_chunks)
        self._groups = len(geometry.groups)
        groups = [
            SimpleNamespace(group_id=g.id, tokens_per_block=g.tokens_per_block)
            for g in geometry.groups
        ]
        spec = SimpleNamespace(
            config=SimpleNamespace(groups=groups),
            blocks_per_chunk=1,
            tokens_per_block=[g.tokens_per_block for g in geometry.groups],
            tokens_per_hash=geometry.tokens_per_hash,
            offload_prompt_only=True,
            kv_events_config=OffloadingKVEventsConfig(False, False),
            get_manager=lambda: self.manager,
        )
        cache_config = SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        )
        vllm_config = SimpleNamespace(
            cache_config=cache_config,
            speculative_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        )
        kv_cache_config = KVCacheConfig(
            num_blocks=1,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{g.id}"], _spec(g)) for g in geometry.groups
            ],
        )
        self.scheduler = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)

    def store(self, request: str, hashes: Sequence[bytes], group: int = 0) -> bool:
        """Book the store of one group's chunks from begin to end; whether there was room."""
        context = ReqContext(req_id=request)
        self.manager.on_new_request(context)
        keys = [make_offload_key(key, group) for key in hashes]
        return self.end_store(context, keys, self.begin_store(context, keys))

    def context(self, request: str) -> ReqContext:
        """What the manager keeps about a request."""
        context = ReqContext(req_id=request)
        self.manager.on_new_request(context)
        return context

    def keys(self, hashes: Sequence[bytes], group: int = 0) -> list[OffloadKey]:
        """The manager's keys for chunks."""
        return [make_offload_key(key, group) for key in hashes]

    def begin_store(self, context: ReqContext, keys: Sequence[OffloadKey]) -> Any:
        """The call that evicts and allocates."""
        return self.manager.prepare_store(keys, context)

    def end_store(self, context: ReqContext, keys: Sequence[OffloadKey], began: Any) -> bool:
        """The call that publishes; whether anything had been stored."""
        if began is None:
            return False
        self.manager.complete_store(keys, context)
        return True

    def finish(self, context: ReqContext) -> None:
        """The call that records what a request has used."""
        self.manager.on_request_finished(context)

    def new_request(self, request: str, hashes: list[bytes], tokens: int) -> Any:
        """Make a request known to the scheduler half; the object that its calls take."""
        new = SimpleNamespace(
            request_id=request,
            kv_transfer_params=None,
            kv_hints=None,
            block_hashes=hashes,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            skip_reading_prefix_cache=False,
        )
        self.scheduler.on_new_request(new)
        return new

    def match(self, request: Any) -> int:
        """The scheduler's question: how many tokens can be loaded for a request."""
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        return int(tokens or 0)

    def match_again(self, request: Any) -> int:
        """The look-up alone, with the keys of the request made before."""
        return int(self.scheduler._lookup(self.scheduler._req_status[request.request_id]) or 0)

    def forget(self, request: Any) -> None:
        """Drop a request that has only asked."""
        del self.scheduler._req_status[request.request_id]
