"""A rank's half: copies between the engine's pages and the arena, and reports what is done.

Order. A store runs in :meth:`WorkerHalf.save`, after the step's forward pass has returned and
before the next step can begin, on the thread that runs both: its pages are final when it reads them
and nothing can reuse them before it is done. A load runs beside the forward passes, on a thread of
its own; its blocks are its request's alone, and vLLM neither reads nor frees them before the load
is reported. Slots that a load reads are pinned, those that a store writes are not yet visible.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvloft.engines.vllm.log import logger
from kvloft.engines.vllm.messages import Orders, Reports
from kvloft.engines.vllm.metrics import LoftStats, WorkerMeter
from kvloft.engines.vllm.pages import page_view
from kvloft.engines.vllm.setup import Setup
from kvloft.errors import TransferError
from kvloft.jobs import Job
from kvloft.transfer import Copier, CpuCopier

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

_IDLE_WAIT_SECONDS = 0.01


class WorkerHalf:
    """One per rank."""

    def __init__(self, setup: Setup, kv_cache_config: KVCacheConfig, rank: int) -> None:
        self._setup = setup
        self._rank = rank
        self._num_blocks = kv_cache_config.num_blocks
        # vLLM may add layers that share another one's cache to these lists later on.
        self._layers = {
            group.id: tuple(kv_cache_config.kv_cache_groups[group.id].layer_names)
            for group in setup.plan.geometry.cacheable
        }
        self._copier: Copier | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvloft-load")
        self._loading: dict[Future[float], tuple[str, Job]] = {}
        self._failed: set[str] = set()
        self._done: list[tuple[int, int, bool]] = []
        self._idle = False
        self._meter = WorkerMeter()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's pages. Raises :class:`TransferError` where they are not as expected."""
        views = {
            group: [page_view(kv_caches[name], self._num_blocks) for name in names]
            for group, names in self._layers.items()
        }
        self._copier = CpuCopier(self._setup.plan, views, self._setup.mapping.data, rank=self._rank)

    def _ready(self) -> Copier:
        if self._copier is None:
            raise TransferError("no KV caches have been registered")
        return self._copier

    def load(self, orders: Orders) -> None:
        """Start this step's loads; without a forward pass beside them, do them here and now."""
        self._idle = orders.idle
        for request, job in orders.loads:
            if job is None:
                self._failed.add(request)
            else:
                future = self._loader.submit(self._load, job)
                self._loading[future] = (request, job)

    def _load(self, job: Job) -> float:
        start = time.perf_counter()
        self._ready().load(job)
        return time.perf_counter() - start

    def save(self, orders: Orders) -> None:
        """Do this step's stores."""
        for job in orders.stores:
            start = time.perf_counter()
            try:
                self._ready().store(job)
                ok = True
                self._meter.stored(job, self._setup.plan, time.perf_counter() - start)
            except Exception:
                # Whatever it was, the engine must not end for want of a cache entry.
                logger.exception("KVLoft: store %d failed on rank %d", job.id, self._rank)
                ok = False
                self._meter.failed("store")
            self._done.append((job.id, self._rank, ok))

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those among them whose load has failed."""
        failed, self._failed = self._failed, set()
        finished = set(failed)
        if self._loading and self._idle:
            wait(self._loading, timeout=_IDLE_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        for future in [f for f in self._loading if f.done()]:
            request, job = self._loading.pop(future)
            error = future.exception()
            if error is None:
                self._meter.loaded(job, self._setup.plan, future.result())
            else:
                logger.error(
                    "KVLoft: load %d failed on rank %d; request %s is computed instead",
                    job.id, self._rank, request, exc_info=error,
                )  # fmt: skip
                failed.add(request)
                self._meter.failed("load")
            finished.add(request)
            self._done.append((job.id, self._rank, error is None))
        return finished, failed

    def reports(self) -> Reports | None:
        """Jobs done since the last call."""
        if not self._done:
            return None
        done, self._done = self._done, []
        return Reports(done)

    def stats(self) -> LoftStats | None:
        """What has been moved since the last call; ``None`` for nothing."""
        return self._meter.take()

    def close(self) -> None:
        """End the loads under way and let go of the mapping."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._copier = None
        self._setup.mapping.close()
