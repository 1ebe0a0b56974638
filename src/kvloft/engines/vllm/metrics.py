"""What both halves count, on its way to vLLM's ``/metrics`` and its periodic log line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvloft.jobs import Job
from kvloft.loft import Loft, LowerStats
from kvloft.plan import ChunkPlan

PREFIX = "vllm:kvloft_"
"""vLLM's own snapshot of metrics leaves out what does not begin with ``vllm:``."""

HOST = "host"
"""The label ``tier`` of host memory."""

_BYTES_BUCKETS = [float(1 << n) for n in range(12, 37, 2)]
_SECONDS_BUCKETS = [10 ** (n / 2) for n in range(-9, 4)]
_MOST_OBSERVATIONS = 1000
"""Of one histogram between two steps."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A family of metrics. Counters count since the start of the engine."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    """Beside those that vLLM gives to all metrics of an engine."""
    buckets: tuple[float, ...] = ()


def _counter(text: str, *labels: str) -> Metric:
    return Metric("counter", text, labels)


def _gauge(text: str, *labels: str) -> Metric:
    return Metric("gauge", text, labels)


METRICS: dict[str, Metric] = {
    # Hits.
    "lookups": _counter("Look-ups for a longest resume."),
    "hits": _counter("Requests for which a load was started."),
    "restored_tokens": _counter("Tokens that those loads restore."),
    # Copies between engine pages and host memory.
    "loads": _counter("Loads done, counted on every rank."),
    "load_bytes": _counter("Bytes copied from host memory to engine pages, all ranks."),
    "load_seconds": _counter("Time spent in these copies, added up over ranks."),
    "stores": _counter("Stores done, counted on every rank."),
    "store_bytes": _counter("Bytes copied from engine pages to host memory, all ranks."),
    "store_seconds": _counter("Time spent in these copies, added up over ranks."),
    "transfer_size_bytes": Metric(
        "histogram",
        "Bytes of one load or store on one rank.",
        ("operation",),
        tuple(_BYTES_BUCKETS),
    ),
    "transfer_time_seconds": Metric(
        "histogram",
        "Seconds that one load or store takes on one rank.",
        ("operation",),
        tuple(_SECONDS_BUCKETS),
    ),
    "pending_stores": _gauge("Stores that some rank has not reported."),
    "pending_loads": _gauge("Loads and comparisons that some rank has not reported."),
    # What went wrong.
    "failures": _counter(
        "Jobs that failed, by what they were to do and why.", "operation", "cause"
    ),
    "forgotten_chunks": _counter("Boundaries forgotten as their bytes could not be trusted."),
    "load_pauses": _counter("Times that loading was left alone, after failures in a row."),
    "loading_enabled": _gauge("1 while requests are restored, 0 while they are not."),
    "canaries": _counter("Requests computed in order to compare, instead of restored."),
    "compared_chunks": _counter("Chunks compared with what such requests computed."),
    "canary_differences": _counter("Such requests that computed other numbers; loading is off."),
    # What requests ask for.
    "ignored_hints": _counter("Hints in kv_transfer_params that were wrong and so ignored."),
    "pins": _gauge("Prefixes that a request's hint keeps in host memory."),
    "pinned_bytes": _gauge("Bytes of these; what several share counts for each."),
    "refused_pins": _counter("Pins that would hold too much, or for which nothing was there."),
    # What is in host memory.
    "dropped_stores": _counter("Chunks or resume points not stored as no room could be made."),
    "declined_stores": _counter("The same, as all that is held is worth more."),
    "evicted_chunks": _counter("Chunks evicted from host memory."),
    "evicted_bytes": _counter("Bytes of chunks evicted from host memory."),
    "evicted_resume_points": _counter("Resume points evicted from host memory."),
    "budget_bytes": _gauge("Host memory given to KVLoft, less its header."),
    "live_bytes": _gauge("Exact bytes of the chunks held in host memory."),
    "slab_bytes": _gauge("Host memory in slabs that serve a chunk class."),
    "chunks": _gauge("Boundaries with a full chunk in host memory."),
    "resume_points": _gauge("Resume points in host memory."),
    "resident_chunks": _gauge("Chunks held, by tier and class.", "tier", "chunk_class"),
    "resident_bytes": _gauge(
        "Exact bytes of chunks held, by tier and class.", "tier", "chunk_class"
    ),
    # Promotion from lower tiers.
    "promoted_chunks": _counter("Chunks brought back to host memory from lower tiers."),
    "promoted_bytes": _counter("Bytes of these chunks."),
    "promotion_waits": _counter("Requests that waited for a lower tier."),
    "promotions_declined": _counter("Requests that did not, as computing is quicker."),
    "promotions_late": _counter("Requests that gave up waiting, as it took longer than computing."),
    "promotions_failed": _counter(
        "Requests that waited for what could not be read or had no room."
    ),
    "promotions_pending": _gauge("Parts of prefixes that are being read from lower tiers."),
    # Lower tiers.
    "tier_dropped_chunks": _counter(
        "Chunks or paths not written to a lower tier because a queue was full."
    ),
    "tier_puts": _counter("Chunks that were to be written, by how that ended.", "tier", "outcome"),
    "tier_gets": _counter("Chunks that were to be read, by how that ended.", "tier", "outcome"),
    "tier_put_bytes": _counter("Exact bytes of the chunks written.", "tier"),
    "tier_get_bytes": _counter("Exact bytes of the chunks read.", "tier"),
    "tier_evicted_chunks": _counter("Chunks evicted by this engine, anybody's.", "tier"),
    "tier_faults": _counter("What has gone wrong, by cause.", "tier", "cause"),
    "tier_limit_bytes": _gauge("What the tier may take.", "tier"),
    "tier_used_bytes": _gauge("What it takes, whoever has written it.", "tier"),
    "tier_chunks": _gauge("Chunks of this engine's namespace.", "tier"),
    "tier_queued_paths": _gauge("Paths that wait to be named to the tier.", "tier"),
    "tier_queued_put_bytes": _gauge("Bytes of the chunks that wait to be written.", "tier"),
    "tier_queued_gets": _gauge("Chunks that wait to be read.", "tier"),
}
"""Without :data:`PREFIX`; docs/metrics.md has them all."""

_SEPARATOR = "\t"
"""Between a name and its labels, which have to be one string for vLLM."""


def labelled(name: str, *labels: str) -> str:
    """A metric of a family with labels, as a key of :class:`LoftStats`."""
    return _SEPARATOR.join((name, *labels))


def _kind(key: str) -> str:
    return METRICS[key.partition(_SEPARATOR)[0]].kind


@dataclass
class LoftStats(KVConnectorStats):
    """One interval's counts and observations, and the latest gauges. ``data`` maps names without
    the prefix, followed by their labels, to numbers, or to lists of them for histograms."""

    def reset(self) -> None:
        """Start over."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counts and observations; of gauges, the other's are later."""
        for key, value in other.data.items():
            match _kind(key):
                case "gauge":
                    self.data[key] = value
                case "counter":
                    self.data[key] = self.data.get(key, 0) + value
                case _:
                    self.data[key] = [*self.data.get(key, ()), *value][-_MOST_OBSERVATIONS:]
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows."""
        return {
            " ".join(key.split(_SEPARATOR)): round(value, 4)
            for key, value in self.data.items()
            if _kind(key) != "histogram"
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class WorkerMeter:
    """Counts a rank's copies."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}

    def moved(self, operation: str, job: Job, plan: ChunkPlan, seconds: float) -> None:
        """A ``load`` or a ``store`` is done."""
        groups, data = plan.geometry.groups, self._data
        nbytes = sum(
            groups[part.group].block_bytes * len(part.block_ids)
            for copy in job.copies
            for part in copy.parts
        )
        for name, value in (("s", 1), ("_bytes", nbytes), ("_seconds", seconds)):
            data[operation + name] = data.get(operation + name, 0) + value
        for name, value in (("transfer_size_bytes", nbytes), ("transfer_time_seconds", seconds)):
            seen = data.setdefault(labelled(name, operation), [])
            if len(seen) < _MOST_OBSERVATIONS:
                seen.append(value)

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
        data: dict[str, float] = {}
        for key, value in self._values():
            if _kind(key) == "gauge":
                data[key] = value
            elif change := value - self._last.get(key, 0):
                data[key] = change
                self._last[key] = value
        return LoftStats(data)

    def _values(self) -> Iterator[tuple[str, float]]:
        """Everything that the scheduler's side knows."""
        stats = self._loft.stats()
        for name in (
            "lookups", "hits", "restored_tokens", "forgotten_chunks", "load_pauses", "canaries",
            "compared_chunks", "canary_differences", "ignored_hints", "pins", "pinned_bytes",
            "refused_pins", "budget_bytes", "live_bytes", "slab_bytes",
            "chunks", "resume_points", "pending_stores", "pending_loads",
        ):  # fmt: skip
            yield name, getattr(stats, name)
        for name in (
            "dropped_stores", "declined_stores", "evicted_chunks", "evicted_bytes",
            "evicted_resume_points", "promoted_chunks", "promoted_bytes",
        ):  # fmt: skip
            yield name, getattr(stats.counters, name)
        yield "loading_enabled", int(stats.loading)
        yield "promotion_waits", stats.promotions.waited
        yield "promotions_declined", stats.promotions.declined
        yield "promotions_late", stats.promotions.late
        yield "promotions_failed", stats.promotions.failed
        yield "promotions_pending", stats.pending_promotions
        for (operation, cause), count in stats.failures.items():
            yield labelled("failures", operation, cause), count
        for chunk_class, (chunks, nbytes) in stats.held.items():
            yield labelled("resident_chunks", HOST, chunk_class), chunks
            yield labelled("resident_bytes", HOST, chunk_class), nbytes
        yield "tier_dropped_chunks", sum(tier.writes.dropped_chunks for tier in stats.tiers)
        for tier in stats.tiers:
            yield from self._tier_values(tier)

    def _tier_values(self, lower: LowerStats) -> Iterator[tuple[str, float]]:
        tier, name = lower.tier, lower.name
        for key in (
            "put_bytes", "get_bytes", "evicted_chunks", "limit_bytes", "used_bytes", "chunks",
            "queued_put_bytes", "queued_gets",
        ):  # fmt: skip
            yield labelled(f"tier_{key}", name), getattr(tier, key)
        yield labelled("tier_queued_paths", name), lower.queued_paths
        yield labelled("tier_faults", name, "broken_contract"), lower.broken_calls
        for family, by_label in (
            ("tier_puts", tier.puts), ("tier_gets", tier.gets), ("tier_faults", tier.faults),
        ):  # fmt: skip
            for label, count in by_label.items():
                yield labelled(family, name, label), count
        for chunk_class, (chunks, nbytes) in tier.held.items():
            yield labelled("resident_chunks", name, chunk_class), chunks
            yield labelled("resident_bytes", name, chunk_class), nbytes


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
        types = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._values = per_engine_labelvalues
        self._families: dict[str, Any] = {}
        for name, metric in METRICS.items():
            extra: dict[str, Any] = {}
            if metric.kind == "gauge":
                extra["multiprocess_mode"] = "mostrecent"
            if metric.buckets:
                extra["buckets"] = list(metric.buckets)
            family = metric_types[types[metric.kind]](
                name=PREFIX + name, documentation=metric.text,
                labelnames=[*labelnames, *metric.labels], **extra,
            )  # fmt: skip
            self._families[name] = family
            if not metric.labels:
                for values in per_engine_labelvalues.values():
                    family.labels(*values)  # Shows as 0 until there is something to count.

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval."""
        for key, value in transfer_stats_data.items():
            name, *labels = key.split(_SEPARATOR)
            metric = self._families[name].labels(*self._values[engine_idx], *labels)
            match METRICS[name].kind:
                case "gauge":
                    metric.set(value)
                case "counter":
                    metric.inc(value)
                case _:
                    for one in value:
                        metric.observe(one)
