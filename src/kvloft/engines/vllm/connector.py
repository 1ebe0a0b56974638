"""The class that vLLM loads: one instance in the scheduler's process, one in each worker's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvloft.engines.vllm.log import logger
from kvloft.engines.vllm.messages import Orders, Reports
from kvloft.engines.vllm.metrics import LoftStats, PromMetrics
from kvloft.engines.vllm.scheduler import SchedulerHalf
from kvloft.engines.vllm.setup import Setup, set_up_scheduler, set_up_worker
from kvloft.engines.vllm.worker import WorkerHalf
from kvloft.lower import LowerTier

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVLoftConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV caches of all groups in host memory. A thin shell: see the two halves."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises :class:`kvloft.errors.KVLoftError` for options or models that can't be served."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "KVLoft: kv_load_failure_policy is 'fail', so a request whose cached prefix "
                    "can't be read ends in an error; set it to 'recompute' in the "
                    "kv-transfer-config to have it computed instead"
                )
            setup = set_up_scheduler(vllm_config, kv_cache_config)
            try:
                tiers = self._open_tiers(setup, vllm_config)
                self._scheduler = SchedulerHalf(setup, vllm_config.cache_config, tiers)
            except BaseException:
                setup.mapping.close()
                raise
        else:
            setup = set_up_worker(vllm_config, kv_cache_config)
            rank = vllm_config.parallel_config.rank % setup.ranks
            self._worker = WorkerHalf(setup, kv_cache_config, rank)

    def _open_tiers(self, setup: Setup, vllm_config: VllmConfig) -> list[LowerTier]:
        """The lower tiers; they belong to the scheduler's half from then on."""
        return setup.open_tiers(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped is a miss later on, nothing worse."""
        return False

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler's half; only in the scheduler's process."""
        if self._scheduler is None:
            raise RuntimeError("this is a worker's instance")
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The worker's half; only in a worker's process."""
        if self._worker is None:
            raise RuntimeError("this is the scheduler's instance")
        return self._worker

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages."""
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads."""
        self.worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: nothing in this step waits for them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Stores are done in one piece, by :meth:`wait_for_save`."""

    def wait_for_save(self) -> None:
        """Do this step's stores."""
        self.worker.save(self._orders())

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        if not isinstance(orders, Orders):
            raise TypeError(f"{type(orders).__name__} is not KVLoft's metadata")
        return orders

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended; a failed one is in both sets."""
        finished, failed = self.worker.results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> Reports | None:
        """Jobs done since the last step."""
        return self.worker.reports()

    # ---------------------------------------------------------------- scheduler

    def on_new_request(self, request: Request) -> None:
        """Nothing to do before a request is scheduled."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The longest resume beyond what the engine has itself."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks are there for a load."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders to the workers."""
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' reports."""
        self.scheduler.reported(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may be freed: whatever was worth storing has been."""
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for any number of groups."""
        self.scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must go on stepping."""
        return self.scheduler.pending()

    def reset_cache(self) -> bool:
        """Forget all chunks."""
        return self.scheduler.reset()

    # ---------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> LoftStats | None:
        """Counts since the last step."""
        half = self._scheduler or self._worker
        return half.stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoftStats:
        """Counts from their serialised form."""
        return LoftStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """The metrics for vLLM's Prometheus registry."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End everything under way and let go of the memory. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
