"""What the benchmarks have in common when they tell: the machine, tables, progress."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""Plain values: what ``--json`` writes."""


def header(name: str, *, quick: bool) -> Result:
    """Where and when; a quick run only shows that a benchmark works, its figures mean nothing."""
    return {
        "benchmark": name,
        "quick": quick,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def progress(text: str) -> None:
    """One line for the person who waits."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
