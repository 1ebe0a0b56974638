"""What has gone wrong, counted by cause and told to people without flooding them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

_QUIET_SECONDS = 600.0


class Faults:
    """Counts by cause; ``report`` is told of a cause's first fault, later at most every 10 minutes.

    Thread-safe. What ``report`` raises is swallowed: nobody here could do anything about it.
    """

    def __init__(self, report: Callable[[str, str], None] | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: dict[str, tuple[float, int]] = {}
        """When a cause was reported last, and its count then."""

    def add(self, cause: str, message: str) -> None:
        """One more fault."""
        now = time.monotonic()
        with self._lock:
            self._counts[cause] += 1
            count = self._counts[cause]
            last, before = self._told.get(cause, (None, 0))
            if last is not None and now - last < _QUIET_SECONDS:
                return
            self._told[cause] = now, count
        if count - before > 1:
            message = f"{message} ({count - before} times since the last report)"
        if self._report is not None:
            try:
                self._report(cause, message)
            except Exception:
                return

    def counts(self) -> dict[str, int]:
        """Faults by cause."""
        with self._lock:
            return dict(self._counts)
