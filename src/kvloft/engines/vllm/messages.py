"""What the two halves of the connector send each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvloft.jobs import Job


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """From the scheduler to every rank: what to copy in this step."""

    loads: list[tuple[str, Job | None]] = field(default_factory=list)
    """Request and its load; ``None``: it can't be loaded, report it as failed."""
    stores: list[Job] = field(default_factory=list)
    comparisons: list[Job] = field(default_factory=list)
    idle: bool = False
    """No forward pass in this step: the worker has time to wait for copies."""


class Done(NamedTuple):
    """A rank's share of a job has ended."""

    job: int
    rank: int
    cause: str = ""
    """Why it has failed: ``copy``, ``checksum`` or ``difference``; empty if it has not."""
    bad_slots: tuple[int, ...] = ()
    """Slots that do not hold what was written to them."""


@dataclass(slots=True)
class Reports(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler."""

    done: list[Done]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of both."""
        if not isinstance(other, Reports):
            raise TypeError(f"can't join reports with {type(other).__name__}")
        return Reports(self.done + other.done)
