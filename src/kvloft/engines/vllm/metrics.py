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
from kvloft.loft import Loft, LowerStats
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
    "promoted_bytes": "Bytes of chunks brought back to host memory from lower tiers.",
    "promotion_waits": "Requests that waited for a lower tier.",
    "promotions_declined": "Requests that did not, as computing is quicker.",
    "promotions_late": "Requests that gave up waiting, as it took longer than computing.",
    "promotions_failed": "Requests that waited for what could not be read or had no room.",
    "tier_dropped_chunks": "Chunks or paths not written to a lower tier because a queue was full.",
}
TIER_COUNTERS = {
    "tier_puts": ("Chunks that were to be written, by how that ended.", "outcome"),
    "tier_gets": ("Chunks that were to be read, by how that ended.", "outcome"),
    "tier_put_bytes": ("Exact bytes of the chunks written.", ""),
    "tier_get_bytes": ("Exact bytes of the chunks read.", ""),
    "tier_evicted_chunks": ("Chunks evicted by this engine, anybody's.", ""),
    "tier_faults": ("What has gone wrong, by cause.", "cause"),
}
"""With a label for the tier and, where named, one more."""
TIER_GAUGES = {
    "tier_limit_bytes": ("What the tier may take.", ""),
    "tier_used_bytes": ("What it takes, whoever has written it.", ""),
    "tier_chunks": ("Chunks of this engine's namespace.", ""),
    "tier_queued_put_bytes": ("Bytes of the chunks that wait to be written.", ""),
    "tier_queued_gets": ("Chunks that wait to be read.", ""),
}
_SEPARATOR = "\t"
"""Between the parts of a labelled name, which has to be one string for vLLM."""

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
            if _is_gauge(name):
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows."""
        return {" ".join(name.split(_SEPARATOR)): round(v, 4) for name, v in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


def _is_gauge(name: str) -> bool:
    return name in GAUGES or name.partition(_SEPARATOR)[0] in TIER_GAUGES


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
            "promoted_bytes": stats.counters.promoted_bytes,
            "promotion_waits": stats.promotions.waited,
            "promotions_declined": stats.promotions.declined,
            "promotions_late": stats.promotions.late,
            "promotions_failed": stats.promotions.failed,
            "tier_dropped_chunks": sum(t.writes.dropped_chunks for t in stats.tiers),
        }
        gauges: dict[str, float] = {name: getattr(stats, name) for name in GAUGES}
        for tier in stats.tiers:
            now.update(_tier_counts(tier))
            for name in TIER_GAUGES:
                gauges[_labelled(name, tier.name)] = getattr(tier.tier, name.removeprefix("tier_"))
        data = {k: v - self._last.get(k, 0) for k, v in now.items() if v != self._last.get(k, 0)}
        self._last = now
        return LoftStats(data | gauges)


def _labelled(name: str, *labels: str) -> str:
    return _SEPARATOR.join((name, *labels))


def _tier_counts(lower: LowerStats) -> dict[str, float]:
    tier = lower.tier
    counts: dict[str, float] = {
        _labelled("tier_put_bytes", lower.name): tier.put_bytes,
        _labelled("tier_get_bytes", lower.name): tier.get_bytes,
        _labelled("tier_evicted_chunks", lower.name): tier.evicted_chunks,
        _labelled("tier_faults", lower.name, "broken_contract"): lower.broken_calls,
    }
    for name, by_label in (
        ("tier_puts", tier.puts), ("tier_gets", tier.gets), ("tier_faults", tier.faults),
    ):  # fmt: skip
        for label, count in by_label.items():
            counts[_labelled(name, lower.name, label)] = count
    return counts


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
        self._values = per_engine_labelvalues
        self._labelled: dict[str, Any] = {}
        for tier_names, kind in ((TIER_COUNTERS, Counter), (TIER_GAUGES, Gauge)):
            for name, (text, label) in tier_names.items():
                extra = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
                labels = [*labelnames, "tier", *([label] if label else [])]
                self._labelled[name] = metric_types[kind](
                    name=PREFIX + name, documentation=text, labelnames=labels, **extra
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        for key, value in transfer_stats_data.items():
            name, *labels = key.split(_SEPARATOR)
            if labels:
                metric = self._labelled[name].labels(*self._values[engine_idx], *labels)
            else:
                metric = self._metrics[name][engine_idx]
            if _is_gauge(key):
                metric.set(value)
            else:
                metric.inc(value)
