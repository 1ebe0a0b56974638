"""How everything here is timed: the sides of a comparison take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Side = Callable[[], object]


def take_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one round that is not counted.

    Sides run one after the other in every round, so that what else the machine does hits all of
    them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def speed_ratio(of: Sequence[float], against: Sequence[float]) -> float:
    """How many times as fast ``of`` is: the median over rounds of ``against / of``."""
    return statistics.median(b / a for a, b in zip(of, against, strict=True))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The distribution of single calls, in microseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1

    def at(fraction: float) -> float:
        return round(ordered[round(fraction * last)] * 1e6, 2)

    return {
        "calls": len(ordered),
        "p50_us": at(0.5),
        "p99_us": at(0.99),
        "p999_us": at(0.999),
        "max_us": at(1.0),
    }
