"""What a user says about one lower tier, after validation (:mod:`kvloft.config` does that)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """One entry of ``secondary_tiers`` with ``"type": "disk"``."""

    path: Path
    """An absolute path; the directory is made if it is missing."""
    max_bytes: int
    """What all files in it may take together, whoever has written them."""
    write: str = "all"
    """Which chunks are written: ``all``, or ``reused`` for those that have been found again."""
    wait_seconds: float | None = None
    """How long a request waits for its prefix; ``None``: no longer than computing it would take."""
    queue_bytes: int = 256 << 20
    """Chunks that may wait to be written; they stay pinned in host memory for so long."""
    threads: int = 4
    """Requests in flight."""
