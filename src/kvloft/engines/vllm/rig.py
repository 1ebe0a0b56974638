"""vLLM's engine core, scheduler and block pool over workers that compute nothing.

What runs is vLLM's own: ``EngineCore``, its scheduler, its hashing of blocks and its joining of
the ranks' outputs, with both halves of the connector. Only the executor is exchanged: instead of a
model, :class:`Hands` decide what a step leaves in the pages, and look at what they read. So
hundreds of steps a second can be run, on geometries for which there is no model small enough.

The order of calls on a rank is that of ``KVConnectorModelRunnerMixin``: forward pass, loads,
stores, results.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvloft.engines.vllm.connector import KVLoftConnector
from kvloft.engines.vllm.messages import Reports
from kvloft.engines.vllm.setup import Setup
from kvloft.lower import LowerTier

WORD = 8
"""Bytes: a token takes whole words in each layer, and so does a state."""


@dataclass(frozen=True, slots=True)
class RigGroup:
    """One KV-cache group of a rig's model."""

    kind: str
    """``full``, ``mla``, ``window``, ``chunked_local``, ``state`` or ``ring``."""
    tokens_per_block: int
    layers: int = 1
    words: int = 1
    """Words that a token (or a state) takes in a layer."""
    reach: int = 0
    """Tokens of the window, or of the local chunk."""
    draft: bool = False
    """The group belongs to a drafter, which computes a token again once it knows the next one."""
    annotated: bool = True
    """Of a drafter's group: whether vLLM says so."""


@dataclass(frozen=True, slots=True)
class RigModel:
    """What stands for a model."""

    name: str
    groups: tuple[RigGroup, ...]
    ranks: int = 1

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter has KV of its own."""
        return any(group.draft for group in self.groups)

    @property
    def unit(self) -> int:
        """Least common multiple of its blocks, without rings."""
        return math.lcm(*(g.tokens_per_block for g in self.groups if g.kind != "ring"))


RIG_MODELS = {
    model.name: model
    for model in (
        RigModel("uniform", (RigGroup("full", 16, layers=3, words=2),)),
        RigModel(
            "windows",
            (
                RigGroup("window", 32, layers=2, reach=24),
                RigGroup("window", 32, layers=2, reach=24),
                RigGroup("full", 16, layers=2, words=2),
            ),
        ),
        RigModel(
            "long_windows",
            (
                RigGroup("full", 8, words=3),
                RigGroup("window", 8, layers=2, reach=45),
                RigGroup("window", 16, reach=70, words=2),
            ),
            ranks=2,
        ),
        RigModel(
            "local",
            (
                RigGroup("chunked_local", 16, layers=2, reach=64),
                RigGroup("chunked_local", 16, layers=2, reach=64),
                RigGroup("full", 16, layers=2),
            ),
        ),
        RigModel(
            "states",
            (
                RigGroup("state", 32, layers=2, words=5),
                RigGroup("state", 32, layers=2, words=5),
                RigGroup("full", 32, layers=1, words=2),
            ),
        ),
        RigModel(
            "mla",
            (
                RigGroup("mla", 16, layers=3, words=4),
                RigGroup("window", 16, layers=2, reach=20),
                RigGroup("ring", 4, layers=1),
            ),
            ranks=2,
        ),
        RigModel(
            "drafter",
            (
                RigGroup("full", 16, layers=2),
                RigGroup("window", 16, layers=2, reach=20),
                RigGroup("full", 16, draft=True),
                RigGroup("window", 16, reach=20, draft=True, annotated=False),
            ),
        ),
        RigModel(
            "only_windows",
            (RigGroup("window", 16, layers=2, reach=40), RigGroup("window", 8, reach=9, words=2)),
        ),
    )
}


def _spec(group: RigGroup, page: int, ranks: int) -> Any:
    """The vLLM spec of a group's layers; ``page``: bytes that a block of any layer occupies."""
    own = group.tokens_per_block * group.words * WORD
    if group.kind == "state":
        return MambaSpec(
            block_size=group.tokens_per_block, shapes=((group.words * WORD,),),
            dtypes=(torch.uint8,), page_size_padded=page, mamba_cache_mode="align",
        )  # fmt: skip
    common: dict[str, Any] = {
        "block_size": group.tokens_per_block,
        "num_kv_heads": 1,
        "dtype": torch.uint8,
        "page_size_padded": page if own != page else None,
    }
    if group.kind == "mla":
        shared = {"max_tp_shards": 1} if ranks > 1 else {}
        return MLAAttentionSpec(**common, **shared, head_size=group.words * WORD)
    common["head_size"] = group.words * WORD // 2
    match group.kind:
        case "full":
            return FullAttentionSpec(**common)
        case "window":
            return SlidingWindowSpec(**common, sliding_window=group.reach)
        case "chunked_local":
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.reach)
        case "ring":
            return CircularBufferSpec(**common)
    raise ValueError(f"no such kind of group: {group.kind!r}")


def page_bytes(model: RigModel) -> int:
    """What a block of any layer occupies: the most that one needs, and a word of padding."""
    needs = [
        g.words * (1 if g.kind == "state" else g.tokens_per_block) * WORD for g in model.groups
    ]
    return max(needs) + WORD


def layer_names(model: RigModel) -> list[list[str]]:
    """By group, the names of its layers."""
    return [
        [f"model.group{i}.layers.{n}" for n in range(group.layers)]
        for i, group in enumerate(model.groups)
    ]


def kv_cache_config(
    model: RigModel, num_blocks: int, retention: int | None = None
) -> KVCacheConfig:
    """As vLLM lays a mixed model out: the n-th layers of all groups share one tensor, since no two
    groups ever have the same block."""
    page, names = page_bytes(model), layer_names(model)
    tensors = [
        KVCacheTensor(
            size=page * num_blocks,
            layers=[group[place]],
            layer_stride=page * num_blocks,
            block_stride=page,
        )
        for place in range(max(map(len, names)))
        for group in names
        if place < len(group)
    ]
    groups = [
        KVCacheGroupSpec(
            names[i], _spec(g, page, model.ranks), is_eagle_group=g.draft and g.annotated
        )
        for i, g in enumerate(model.groups)
    ]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups,
        prefix_cache_retention_interval=retention,
    )  # fmt: skip


class Hands(Protocol):
    """What the rig's ranks do in place of a model."""

    def pages(self, rank: int) -> dict[str, Any]:
        """The KV caches of a rank by layer, numpy arrays of ``(num_blocks, bytes)`` of uint8."""

    def forward(self, step: Any) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Do a step's computing on all ranks: by request, the tokens sampled and those drafted."""

    def between(self, rank: int, connector: RigConnector, *, idle: bool) -> None:
        """Called after the orders have reached a rank and before its results are asked for."""

    def reported(self, rank: int, reports: Reports | None) -> Reports | None:
        """Reports on their way to the scheduler: hold them back, or repeat some."""

    def allocated(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Blocks have been allocated for a load of what lies behind ``computed`` tokens."""

    def tiers(self, setup: Setup) -> list[LowerTier]:
        """The lower tiers."""


@dataclass
class RigOptions:
    """How a rig's engine is set up."""

    model: RigModel
    num_blocks: int = 200
    max_model_len: int = 512
    step_tokens: int = 128
    """Tokens that all requests together may compute in a step."""
    max_requests: int = 8
    priorities: bool = False
    """Requests have priorities, and those with a higher one preempt others."""
    overlap: bool = False
    """The scheduler plans a step before it has seen the outcome of the last one."""
    drafts: int = 0
    """Tokens drafted by n-gram speculation in each decoding step."""
    prefix_caching: bool = True
    retention: int | None = None
    """Tokens between the windows and states that vLLM's own cache keeps; ``None``: it keeps all."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The connector's own options."""


class RigConnector(KVLoftConnector):
    """The connector, with the rig's hands between vLLM and its two halves."""

    hands: Hands
    """Set before an engine is made; one rig at a time in a process."""
    calls: list[float]
    """Seconds of the latest scheduler-side calls."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls = []

    def _open_tiers(self, setup: Setup, vllm_config: VllmConfig) -> list[LowerTier]:
        return self.hands.tiers(setup)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            computed = self.scheduler.loft.matched(request.request_id) - num_external_tokens
            self.hands.allocated(blocks.get_block_ids(), computed)
        self._timed(super().update_state_after_alloc, request, blocks, num_external_tokens)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found, later = self._timed(super().get_num_new_matched_tokens, request, num_computed_tokens)
        if found and not later:
            raise RuntimeError("a load that this step would have to wait for")
        return found, later

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._timed(super().build_connector_meta, scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._timed(super().update_connector_output, connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self._timed(super().request_finished_all_groups, request, block_ids)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.calls.append(time.perf_counter() - start)


class _Executor(Executor):
    """One rank after the other in this thread."""

    hands: Hands

    def _init_executor(self) -> None:
        self.ranks: list[RigConnector] = []
        self.seconds = 0.0
        """Spent on the ranks' side."""
        self._sampled: ModelRunnerOutput | None = None
        self._drafts: DraftTokenIds | None = None

    def start_ranks(self, config: KVCacheConfig) -> None:
        for rank in range(self.parallel_config.tensor_parallel_size):
            self.parallel_config.rank = rank
            connector = RigConnector(self.vllm_config, _role("WORKER"), config)
            pages = self.hands.pages(rank)
            connector.register_kv_caches({n: torch.from_numpy(a) for n, a in pages.items()})
            self.ranks.append(connector)
        self.parallel_config.rank = 0

    def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> Any:
        return []

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        began = time.perf_counter()
        try:
            return self._execute(scheduler_output, non_block)
        finally:
            self.seconds += time.perf_counter() - began

    def _execute(self, scheduler_output: Any, non_block: bool) -> Any:
        self._sampled = None
        sampled, drafts = self.hands.forward(scheduler_output)
        outputs: list[ModelRunnerOutput | None] = []
        ids = list(scheduler_output.num_scheduled_tokens)
        for rank, connector in enumerate(self.ranks):
            output = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: index for index, name in enumerate(ids)},
                sampled_token_ids=[sampled.get(name, []) for name in ids],
            )
            output.kv_connector_output = self._transfer(rank, connector, scheduler_output)
            outputs.append(output)
        self._drafts = DraftTokenIds(list(drafts), list(drafts.values()))
        result = outputs[0]
        if self.kv_output_aggregator is not None:
            result = self.kv_output_aggregator.aggregate(outputs)
        if ids:
            # As a model runner does: sampling is a call of its own.
            self._sampled, result = result, None
        return _answer(result, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        result, self._sampled = self._sampled, None
        return _answer(result, non_block)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self._drafts

    def _transfer(self, rank: int, connector: RigConnector, step: Any) -> KVConnectorOutput:
        output = KVConnectorOutput()
        connector.bind_connector_metadata(step.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        self.hands.between(rank, connector, idle=not step.total_num_scheduled_tokens)
        results = connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.hands.reported(
            rank, connector.build_connector_worker_meta()
        )
        connector.clear_connector_metadata()
        return output

    def shutdown(self) -> None:
        for connector in self.ranks:
            connector.shutdown()
        self.ranks.clear()


def _answer(result: ModelRunnerOutput | None, non_block: bool) -> Any:
    """``result``, as a future that is done if vLLM wants one."""
    if not non_block:
        return result
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(result)
    return future


class _Core(EngineCore):
    """The engine core on a given cache instead of one derived from a model's layers."""

    rig: Rig

    def shutdown(self) -> None:
        """All that is there: no process group, no device."""
        self.model_executor.shutdown()
        self.scheduler.shutdown()

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig:
        options = self.rig.options
        config = kv_cache_config(options.model, options.num_blocks, options.retention)
        blocks = [g.tokens_per_block for g in options.model.groups if g.kind != "ring"]
        vllm_config.cache_config.num_gpu_blocks = options.num_blocks
        vllm_config.cache_config.block_size = min(blocks)
        config.hash_block_size = resolve_kv_cache_block_sizes(config, vllm_config)[1]
        executor = self.model_executor
        if not isinstance(executor, _Executor):
            raise TypeError(f"the rig's executor is a {type(executor).__name__}")
        executor.start_ranks(config)
        return config


def _role(name: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorRole[name]


class Rig:
    """One engine."""

    def __init__(self, options: RigOptions, hands: Hands, folder: Path) -> None:
        """``folder``: where a model's configuration is written, which vLLM wants to read."""
        self.options = options
        self.hands = hands
        RigConnector.hands = hands
        _Executor.hands = hands
        _Core.rig = self
        self._numbers = 0
        self.vllm_config = self._configure(folder)
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        # A real core freezes the heap of its process, which is its own; this one belongs to others.
        with mock.patch("vllm.v1.engine.core.freeze_gc_heap"):
            self.core: Any = _Core(self.vllm_config, _Executor, log_stats=True)

    def _configure(self, folder: Path) -> VllmConfig:
        options, ranks = self.options, self.options.model.ranks
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
            "hidden_size": 16 * ranks, "intermediate_size": 16 * ranks, "num_hidden_layers": 1,
            "num_attention_heads": ranks, "num_key_value_heads": ranks, "head_dim": 16,
            "max_position_embeddings": options.max_model_len, "torch_dtype": "float32",
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        transfer = KVTransferConfig(
            kv_connector="RigConnector",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=dict(options.extra),
        )
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=options.max_model_len, max_num_batched_tokens=options.step_tokens,
            max_num_seqs=options.max_requests, enable_prefix_caching=options.prefix_caching,
            scheduling_policy="priority" if options.priorities else "fcfs",
            async_scheduling=options.overlap, kv_transfer_config=transfer,
            generation_config="vllm",
            speculative_config=(
                {"method": "ngram", "num_speculative_tokens": options.drafts,
                 "prompt_lookup_max": 2}
                if options.drafts else None
            ),
        )  # fmt: skip
        made = arguments.create_engine_config()
        # Ranks without processes; nothing of what vLLM checks for those applies.
        made.parallel_config.tensor_parallel_size = ranks
        made.parallel_config.world_size = ranks
        if options.model.has_drafter:
            # Its drafts come from the hands; all else is as with a drafter that has KV of its own.
            made.speculative_config.method = "eagle"
        if any(group.kind == "state" for group in options.model.groups):
            made.cache_config.mamba_cache_mode = "align"
        return made

    # ---------------------------------------------------------------- what a user can do

    def submit(
        self,
        tokens: Sequence[int],
        generate: int,
        *,
        salt: str | None = None,
        priority: int = 0,
        params: dict[str, Any] | None = None,
    ) -> str:
        """A new request's id. ``params``: its ``kv_transfer_params``."""
        self._numbers += 1
        name = f"r{self._numbers}"
        request, _ = self.core.preprocess_add_request(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=list(tokens), mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=generate, ignore_eos=True,
                    extra_args={"kv_transfer_params": params} if params else None,
                ),
                pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=salt,
                data_parallel_rank=None, priority=priority,
            )
        )  # fmt: skip
        self.core.add_request(request)
        return name

    def abort(self, names: Iterable[str]) -> None:
        """End requests at once, as when a client goes away."""
        self.core.abort_requests(list(names))

    def reset(self, *, running: bool, connector: bool) -> bool:
        """As ``reset_prefix_cache``; whether vLLM says that it has worked."""
        try:
            return bool(self.core.reset_prefix_cache(running, connector))
        except RuntimeError:
            # vLLM refuses this while a load is under way, after it has preempted what was running.
            return False

    # ---------------------------------------------------------------- running

    def step(self) -> None:
        """One step of the engine's loop."""
        began, ranks = time.perf_counter(), self.core.model_executor.seconds
        _, executed = self.core.step_fn()
        self.core.post_step(executed)
        ranks = self.core.model_executor.seconds - ranks
        self.scheduler_seconds += time.perf_counter() - began - ranks

    scheduler_seconds = 0.0
    """Spent in steps, but for the ranks' side."""

    @property
    def scheduler(self) -> Any:
        """vLLM's."""
        return self.core.scheduler

    @property
    def connector(self) -> RigConnector:
        """The scheduler's instance."""
        found: RigConnector = self.scheduler.get_kv_connector()
        return found

    @property
    def workers(self) -> list[RigConnector]:
        """The ranks' instances."""
        executor: _Executor = self.core.model_executor
        return executor.ranks

    @property
    def idle(self) -> bool:
        """Whether the engine's loop would go to sleep."""
        return not self.scheduler.has_requests() and not self.core.batch_queue

    @property
    def unfinished(self) -> list[str]:
        """Requests that have not ended."""
        return [n for n, request in self.scheduler.requests.items() if not request.is_finished()]

    def free_blocks(self) -> tuple[int, int]:
        """Blocks of vLLM's pool that nobody uses, and all but its null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1

    def close(self) -> None:
        """End the engine."""
        self.core.shutdown()
