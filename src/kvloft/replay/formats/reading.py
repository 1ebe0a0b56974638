"""From files to a trace: finds the format, checks every line, and says where something is wrong."""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import msgspec

from kvloft.errors import TraceError
from kvloft.replay.formats.base import Format, Row
from kvloft.replay.formats.chain import Chain
from kvloft.replay.trace import Request, Trace
from kvloft.units import ceil_div

LOG_PATTERN = "lookup_hashes_*.jsonl*"
"""The files of a directory that LMCache has written to."""

_GZIP = b"\x1f\x8b"
_LFS = b"version https://git-lfs"
_BOM = b"\xef\xbb\xbf"


class Reader:
    """Reads the files of one trace, which go on from one another."""

    def __init__(
        self, formats: Mapping[str, Format], name: str | None, tokens_per_block: int | None
    ) -> None:
        """``name``: of the format; ``None`` finds it by the first line."""
        self._formats = formats
        self._format = None if name is None else formats[name]
        self._tokens_per_block = tokens_per_block or 0
        """0 until it is known."""
        self._stated = ""
        """Who has said the block length."""
        if tokens_per_block:
            self._stated = "tokens_per_block"
        self._chain = Chain()

    def read(self, name: str, paths: Sequence[Path], limit: int | None) -> Trace:
        """All files as one trace; of ``limit`` requests at most, the first ones of the files."""
        rows: list[tuple[float, int, int, array[int]]] = []
        for path in paths:
            self._read_file(path, rows, limit)
        if self._format is None or not rows:
            wanted = "" if self._format is None else f" with {self._format.fields}"
            raise TraceError(
                f"{', '.join(map(str, paths))}: no requests. A trace has one JSON object a line"
                f"{wanted}; give a file that has some."
            )
        rows.sort(key=itemgetter(0))  # stable, and quick where they are in order
        begin, unit = rows[0][0], self._format.ticks_per_second
        # Unix times lose digits when they are subtracted; microseconds are what is left for sure.
        requests = tuple(
            Request(round((ticks - begin) / unit, 6), prompt, answer, blocks)
            for ticks, prompt, answer, blocks in rows
        )
        return Trace(name, self._tokens_per_block, requests)

    def _read_file(
        self, path: Path, rows: list[tuple[float, int, int, array[int]]], limit: int | None
    ) -> None:
        with _lines(path) as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(rows) >= limit:
                    return
                text = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
                if not text:
                    continue
                row = self._decode(path, number, text)
                prompt, tail = self._check(path, number, row)
                blocks = self._chain.numbers(row.hashes, tail, row.root)
                rows.append((row.ticks, prompt, row.answer_tokens, blocks))

    def _decode(self, path: Path, number: int, line: bytes) -> Row:
        if self._format is None:
            self._format = _detect(self._formats, path, number, line)
        try:
            return self._format.decode(line)
        except (ValueError, RecursionError) as error:
            if line.startswith(_LFS):
                _refuse_pointer(path, number, error)
            raise TraceError(
                f"{path}:{number}: {error}; given: {_shown(line)}. A line of the format "
                f"{self._format.name!r} is a JSON object with {self._format.fields}. Mend or "
                "remove that line, or name another format."
            ) from error

    def _check(self, path: Path, number: int, row: Row) -> tuple[int, int]:
        """The prompt's tokens, and those in its last block if it is partial, else 0."""
        stated = row.tokens_per_block
        if not self._tokens_per_block:
            known = self._format.tokens_per_block if self._format else 0
            self._tokens_per_block = stated or known
            self._stated = f"{path}:{number}" if stated else "the format"
        size = self._tokens_per_block
        if stated and stated != size:
            raise TraceError(
                f"{path}:{number}: blocks of {stated} tokens, but {self._stated} says {size}. A "
                "trace has blocks of one length; read files of different lengths separately, and "
                "leave tokens_per_block out where the file says it."
            )
        given = len(row.hashes)
        tokens = given * size if row.prompt_tokens is None else row.prompt_tokens
        whole, tail = divmod(tokens, size)
        if given == whole:
            return tokens, 0
        if tail and given == whole + 1:
            return tokens, tail
        allowed = f"{whole} or {whole + 1} (the last one partial)" if tail else str(whole)
        hint = "Mend the line." if stated else _block_length(tokens, given)
        raise TraceError(
            f"{path}:{number}: {given} hashes for a prompt of {tokens} tokens; blocks of {size} "
            f"tokens make it {allowed}. {hint}"
        )


def _block_length(tokens: int, hashes: int) -> str:
    """What to write if the file has blocks of another length."""
    if hashes and tokens:
        size = 1 << (ceil_div(tokens, hashes) - 1).bit_length()
        if ceil_div(tokens, size) == hashes:
            return f"If the file has other blocks, say so: tokens_per_block={size} would fit."
    return "If the file has other blocks, say so with tokens_per_block; otherwise mend the line."


def _detect(formats: Mapping[str, Format], path: Path, number: int, line: bytes) -> Format:
    """The format whose marks the line has; of two, the one that asks for more."""
    known = "; ".join(f"{each.name}: {', '.join(sorted(each.marks))}" for each in formats.values())
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except (ValueError, RecursionError) as error:
        if line.startswith(_LFS):
            _refuse_pointer(path, number, error)
        raise TraceError(
            f"{path}:{number}: {error}; given: {_shown(line)}. A trace has one JSON object a "
            f"line, with the fields of a format ({known}). Convert the file to one of them."
        ) from error
    fitting = [each for each in formats.values() if each.marks <= fields]
    best = [each for each in fitting if not any(each.marks < other.marks for other in fitting)]
    if len(best) == 1:
        return best[0]
    given = ", ".join(sorted(fields))[:200] or "none"
    if best:
        names = " or ".join(each.name for each in best)
        raise TraceError(
            f"{path}:{number}: the fields ({given}) could be {names}. Say which: "
            f"format={best[0].name!r}."
        )
    raise TraceError(
        f"{path}:{number}: the fields ({given}) are those of no format. Known are: {known}. "
        "Convert the file to one of them, or name the format."
    )


def _refuse_pointer(path: Path, number: int, cause: Exception) -> NoReturn:
    raise TraceError(
        f"{path}:{number}: this is what Git LFS leaves in place of a large file, not the trace. "
        "Run `git lfs pull` where the file comes from, and give the file that it fetches."
    ) from cause


def _shown(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return f"{text!r}{'...' if len(line) > 60 else ''}"


@contextmanager
def _lines(path: Path) -> Iterator[io.BufferedIOBase]:
    """The lines of a file, which may be compressed; what the system says becomes our error."""
    try:
        with path.open("rb") as file:
            # By its first bytes, not by its name; and without seeking, so that pipes will do.
            if file.peek(2)[:2] == _GZIP:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the compressed file is damaged ({error}). Fetch or write it again."
        ) from error
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror or error}. Give a file that can be read."
        ) from error
