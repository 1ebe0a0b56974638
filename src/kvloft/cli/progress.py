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
"""To be called with what is done and what there is to do, as often as you like."""


@contextmanager
def bytes_done(what: str) -> Iterator[Tell]:
    """Tell of work on standard error; a bar needs ``rich``, which ``kvloft[cli]`` brings."""
    with _done(what, format_size, of_bytes=True) as tell:
        yield tell


@contextmanager
def steps_done(what: str) -> Iterator[Tell]:
    """The same of something that is counted."""
    with _done(what, lambda count: f"{count:,.0f}", of_bytes=False) as tell:
        yield tell


@contextmanager
def _done(what: str, show: Callable[[float], str], *, of_bytes: bool) -> Iterator[Tell]:
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bar(what, of_bytes=of_bytes) as tell:
            yield tell
    else:
        yield _lines(what, show)


@contextmanager
def _bar(what: str, *, of_bytes: bool) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: list[ProgressColumn] = [MofNCompleteColumn()]
    if of_bytes:
        amounts = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    columns = (
        TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str, show: Callable[[float], str]) -> Tell:
    begun = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LINE_SECONDS:
            return
        last = now
        rate = show(done / (now - begun))
        sys.stderr.write(f"{what}: {show(done)} of {show(total)}, {rate}/s\n")
        sys.stderr.flush()

    return tell
