"""A rank's half: copies between the engine's pages and the arena, and reports what is done.

Order, and why no copy can meet a page or a slot at the wrong time:

- *A store reads pages after the computing that wrote them.* It runs in :meth:`WorkerHalf.save`,
  which vLLM calls when the step's forward passes, a drafter's included, have returned, on the
  thread that runs them. Orders name only tokens that are final by then (the scheduler's half leaves
  out drafts).
- *A store reads pages before they are used again.* It is done when :meth:`WorkerHalf.save` returns.
  What the scheduler frees while a step runs, or plans ahead, is written by a later step, and the
  next one begins on this same thread after the return.
- *A load writes pages that nobody else writes.* Its blocks were allocated for it, and vLLM frees
  none of a request that waits for a load, not even an aborted one's, before every rank has reported
  the load. Where steps overlap, vLLM keeps freed blocks from being allocated until the steps that
  may still write them are done (``defer_block_free``).
- *A load is finished before its request computes.* It is reported once the copy has returned, in
  :meth:`WorkerHalf.results`, and only a reported request is scheduled; with several ranks, one that
  all have reported. Loads are never synchronous: vLLM 0.32 has no way to take back one that fails
  on a model with several groups (``Scheduler._handle_invalid_blocks`` raises).
- *Slots.* Those that a load or a comparison reads are pinned until all ranks have reported; those
  that a store writes can be found by nobody until then.

``tests/engines/test_stress.py`` breaks each of these on purpose, and sees wrong bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvloft.engines.vllm.log import logger, tell, warn
from kvloft.engines.vllm.messages import Done, Orders, Reports
from kvloft.engines.vllm.metrics import LoftStats, WorkerMeter
from kvloft.engines.vllm.pages import page_view
from kvloft.engines.vllm.setup import Setup
from kvloft.errors import CorruptSlotError, TransferError
from kvloft.faults import Faults
from kvloft.jobs import Job
from kvloft.transfer import MOST_UNLIKE, Copier, CpuCopier

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerHalf:
    """One per rank."""

    idle_wait_seconds = 0.01
    """How long an engine with nothing else to do waits for a load."""

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
        self._done: list[Done] = []
        self._idle = False
        self._meter = WorkerMeter()
        self._seals = setup.make_seals()
        self._faults = Faults(warn)

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
        if self._seals is not None:
            plan, seals = self._setup.plan, self._seals
            bad = [
                offset
                for copy in job.copies
                for offset in copy.offsets
                if not seals.intact(offset, plan.layout(copy.counts), self._rank)
            ]
            if bad:
                raise CorruptSlotError(bad)
        self._ready().load(job)
        return time.perf_counter() - start

    def save(self, orders: Orders) -> None:
        """Do this step's stores, and compare what is to be compared."""
        for job in orders.comparisons:
            self._done.append(Done(job.id, self._rank, self._compare(job)))
        for job in orders.stores:
            self._done.append(Done(job.id, self._rank, self._store(job)))

    def _store(self, job: Job) -> str:
        start = time.perf_counter()
        try:
            self._ready().store(job)
            if self._seals is not None:
                for copy in job.copies:
                    layout = self._setup.plan.layout(copy.counts)
                    for offset in copy.offsets:
                        self._seals.seal(offset, layout, self._rank)
        except Exception as error:
            # Whatever it was, the engine must not end for want of a cache entry.
            self._faults.add("store", f"a store has failed on rank {self._rank}: {tell(error)}")
            return "copy"
        self._meter.moved("store", job, self._setup.plan, time.perf_counter() - start)
        return ""

    def _compare(self, job: Job) -> str:
        try:
            difference = self._ready().difference(job)
        except Exception as error:
            self._faults.add("canary", f"a comparison has failed on {self._rank}: {tell(error)}")
            return "copy"
        if difference <= MOST_UNLIKE:
            return ""
        logger.error(
            "KVLoft: comparison %d, rank %d: a page and its copy differ in %.0f %% of their parts",
            job.id, self._rank, 100 * difference,
        )  # fmt: skip
        return "difference"

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those among them whose load has failed."""
        failed, self._failed = self._failed, set()
        finished = set(failed)
        if self._loading and self._idle:
            wait(self._loading, timeout=self.idle_wait_seconds, return_when=FIRST_COMPLETED)
        for future in [f for f in self._loading if f.done()]:
            request, job = self._loading.pop(future)
            error = future.exception()
            cause, bad = "", tuple[int, ...]()
            if error is None:
                self._meter.moved("load", job, self._setup.plan, future.result())
            else:
                cause = "copy"
                if isinstance(error, CorruptSlotError):
                    cause, bad = "checksum", tuple(error.slots)
                self._faults.add(
                    cause,
                    f"a load has failed on rank {self._rank}, request {request} is computed "
                    f"instead: {tell(error)}",
                )
                failed.add(request)
            finished.add(request)
            self._done.append(Done(job.id, self._rank, cause, bad))
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
