"""Counters and gauges, from both halves to vLLM's ``/metrics`` and its periodic log line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.plan import ChunkPlan

PREFIX = "vllm:kvloft_"
"""vLLM's own snapshot of metrics leaves out what does not begin with ``vllm:``."""

COUNTERS = {
    "load_bytes": "Bytes copied from host memory to engine pages, all ranks.",
    "load_seconds": "Time spent in these copies, added up over ranks.",
    "loads": "Loads done, counted on every rank.",
    "store_bytes": "Bytes copied from engine pages to host memory, all ranks.",
    "store_seconds": "Time spent in these copies, added up over ranks.",
    "stores": "Stores done, counted on every rank.",
    "load_failures": "Loads that failed on a rank; their requests are computed instead.",
    "store_failures": "Stores that failed on a rank; their chunks are forgotten.",
    "lookups": "Look-ups for a longest resume.",
    "hits": "Requests for which a load was started.",
    "restored_tokens": "Tokens that those loads restore.",
    "dropped_stores": "Chunks or resume points not stored because no room could be made.",
    "evicted_bytes": "Bytes of chunks evicted from host memory.",
    "evicted_resume_points": "Resume points evicted from host memory.",
}
GAUGES = {
    "budget_bytes": "Host memory given to KVLoft, less its header.",
    "live_bytes": "Exact bytes of the chunks held in host memory.",
    "slab_bytes": "Host memory in slabs that serve a chunk class.",
    "chunks": "Boundaries with a full chunk in host memory.",
    "resume_points": "Resume points in host memory.",
    "pending_stores": "Stores that some rank has not reported.",
    "pending_loads": "Loads that some rank has not reported.",
}


@dataclass
class LoftStats(KVConnectorStats):
    """One interval's counts, and the latest gauges. ``data`` maps names without the prefix."""

    def reset(self) -> None:
        """Start over."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counts; of gauges, the other's are later."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows."""
        return {name: round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class WorkerMeter:
    """Counts a rank's copies."""

    def __init__(self) -> None:
        self._data: dict[str, float] = {}

    def _add(self, name: str, value: float) -> None:
        self._data[name] = self._data.get(name, 0) + value

    def stored(self, job: Job, plan: ChunkPlan, seconds: float) -> None:
        """A store is done."""
        self._moved("store", job, plan, seconds)

    def loaded(self, job: Job, plan: ChunkPlan, seconds: float) -> None:
        """A load is done."""
        self._moved("load", job, plan, seconds)

    def _moved(self, kind: str, job: Job, plan: ChunkPlan, seconds: float) -> None:
        groups = plan.geometry.groups
        self._add(
            f"{kind}_bytes",
            sum(
                groups[part.group].block_bytes * len(part.block_ids)
                for copy in job.copies
                for part in copy.parts
            ),
        )
        self._add(f"{kind}_seconds", seconds)
        self._add(f"{kind}s", 1)

    def failed(self, kind: str) -> None:
        """A copy has failed."""
        self._add(f"{kind}_failures", 1)

    def take(self) -> LoftStats | None:
        """The counts since the last call."""
        if not self._data:
            return None
        data, self._data = self._data, {}
        return LoftStats(data)


class SchedulerMeter:
    """Turns a loft's totals into counts per interval."""

    def __init__(self, loft: Loft) -> None:
        self._loft = loft
        self._last: dict[str, float] = {}
        self._version = -1

    def take(self) -> LoftStats | None:
        """What has changed since the last call; cheap where nothing has."""
        if self._loft.version == self._version:
            return None
        self._version = self._loft.version
        stats = self._loft.stats()
        now: dict[str, float] = {
            "lookups": stats.lookups,
            "hits": stats.hits,
            "restored_tokens": stats.restored_tokens,
            "dropped_stores": stats.counters.dropped_stores,
            "evicted_bytes": stats.counters.evicted_bytes,
            "evicted_resume_points": stats.counters.evicted_resume_points,
        }
        data = {k: v - self._last.get(k, 0) for k, v in now.items() if v != self._last.get(k, 0)}
        self._last = now
        data.update({name: getattr(stats, name) for name in GAUGES})
        return LoftStats(data)


class PromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's Prometheus registry, one label set per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for names, kind in ((COUNTERS, Counter), (GAUGES, Gauge)):
            for name, text in names.items():
                extra = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
                metric = metric_types[kind](
                    name=PREFIX + name, documentation=text, labelnames=labelnames, **extra
                )
                self._metrics[name] = {
                    engine: metric.labels(*values)
                    for engine, values in per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
