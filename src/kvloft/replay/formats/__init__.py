"""Request traces from files, from the package and from the generator, by one function."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from kvloft.errors import TraceError
from kvloft.replay.formats.bailian import Bailian
from kvloft.replay.formats.base import Format, Row
from kvloft.replay.formats.lmcache import LMCache
from kvloft.replay.formats.mooncake import Mooncake
from kvloft.replay.formats.reading import LOG_PATTERN, Reader
from kvloft.replay.generate import KINDS, generate, is_spec, parse_spec
from kvloft.replay.trace import Trace

__all__ = ["BUNDLED", "FORMATS", "Format", "Row", "read_trace"]

FORMATS: Mapping[str, Format] = MappingProxyType(
    {each.name: each for each in (Mooncake(), Bailian(), LMCache())}
)

BUNDLED: Mapping[str, str] = MappingProxyType(
    {
        "conversation": "an hour of a chat service, 12,031 requests",
        "synthetic": "a mix made for Mooncake's paper, 3,993 requests",
    }
)
"""Traces that come with the package (Mooncake's, Apache-2.0), and what they are."""

MAX_BLOCK = 1 << 20
"""Tokens of a block, at most."""


def read_trace(
    path_or_name: str | os.PathLike[str],
    *,
    format: str | None = None,
    tokens_per_block: int | None = None,
    limit: int | None = None,
) -> Trace:
    """Read a trace, in the order of its times; the first request is at 0 seconds.

    Args:
        path_or_name: a file, compressed with gzip or not; a directory of LMCache's logs; a name in
            ``BUNDLED``; or what ``kvloft.replay.generate.parse_spec`` takes, such as
            ``"chat:requests=5000"``. Names come before files: write ``./conversation`` for a file
            of that name.
        format: a key of ``FORMATS``; found by the first line unless given.
        tokens_per_block: tokens; where the file has blocks of another length than its format says.
        limit: no more requests than this, the first ones of the file; the rest isn't read.

    Raises:
        TraceError: if anything is wrong with the trace or the arguments.
    """
    if format is not None and format not in FORMATS:
        raise TraceError(
            f"format={format!r} is not known; write one of {', '.join(FORMATS)}, or leave it out."
        )
    _check_count("tokens_per_block", tokens_per_block, MAX_BLOCK)
    _check_count("limit", limit, None)
    text = os.fspath(path_or_name)
    if isinstance(path_or_name, str):
        if text in BUNDLED:
            source = files("kvloft") / "replay" / "traces" / f"{text}.jsonl.gz"
            with as_file(source) as path:
                reader = Reader(FORMATS, format or Mooncake.name, tokens_per_block)
                return reader.read(text, [path], limit)
        if is_spec(text):
            return _generate(text, format, tokens_per_block, limit)
    path = Path(text)
    reader = Reader(FORMATS, format, tokens_per_block)
    return reader.read(_name(path), _find(path), limit)


def _generate(
    text: str, format: str | None, tokens_per_block: int | None, limit: int | None
) -> Trace:
    if format is not None:
        raise TraceError(
            f"{text!r} is made, not read, so format={format!r} means nothing. Leave it out."
        )
    spec = parse_spec(text)
    if tokens_per_block is not None:
        given = spec.options.get("tokens_per_block", tokens_per_block)
        if given != tokens_per_block:
            raise TraceError(
                f"{text!r}: tokens_per_block is {given} there and {tokens_per_block} beside it. "
                "Write it once."
            )
        spec = replace(spec, options={**spec.options, "tokens_per_block": tokens_per_block})
    trace = generate(spec.kind, **spec.options)
    if limit is not None:
        trace = replace(trace, requests=trace.requests[:limit])
    return trace


def _find(path: Path) -> list[Path]:
    """The files of a trace, in the order in which they were written."""
    try:
        found = sorted(path.glob(LOG_PATTERN)) if path.is_dir() else [path]
        there = path.exists()
    except OSError:  # a name longer than any file's, or a directory that may not be looked at
        there = False
    if not there:
        names = [*BUNDLED, *KINDS]
        near = difflib.get_close_matches(str(path).partition(":")[0], names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TraceError(
            f"{str(path)[:200]!r}: there is no such file.{hint} Give a file, one of the names "
            f"{', '.join(BUNDLED)}, or what to make, such as 'chat:requests=5000' "
            f"({', '.join(KINDS)})."
        )
    if not found:
        raise TraceError(
            f"{path}: a directory without {LOG_PATTERN}, which LMCache writes. Give a file, or a "
            "directory that has some."
        )
    return found


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl") or str(path)


def _check_count(name: str, value: object, most: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TraceError(f"{name}={value!r} is not a whole number from 1 up; write one.")
    if most is not None and value > most:
        raise TraceError(f"{name}={value!r} is more than {most}, the most there may be.")
