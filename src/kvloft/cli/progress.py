"""How far long work has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloft.units import format_size

_LINE_SECONDS = 5.0

Tell = Callable[[int, int], None]
"""To be called with the bytes that are done and those that there are, as often as you like."""


@contextmanager
def bytes_done(what: str) -> Iterator[Tell]:
    """Tell of work on standard error; a bar needs ``rich``, which ``kvloft[cli]`` brings."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bar(what) as tell:
            yield tell
    else:
        yield _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str) -> Tell:
    begun = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LINE_SECONDS:
            return
        last = now
        rate = format_size(done / (now - begun))
        sys.stderr.write(f"{what}: {format_size(done)} of {format_size(total)}, {rate}/s\n")
        sys.stderr.flush()

    return tell
