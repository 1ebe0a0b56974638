"""A digest of a weight file from small reads, the same for the same bytes anywhere.

A file is *sampled*, since reading hundreds of gigabytes twice would double the start. Of a
safetensors file these are read: the header (names, shapes, positions of all tensors), every tensor
of up to 16 KiB whole (norms, biases, KV scales), 4 KiB from the middle of each larger one and 4 KiB
at 64 even distances, at most about 260 reads. So a tensor that was trained, merged or quantized
again is noticed wherever it is. Of any other file: 4 KiB at 192 even distances and the last 256
KiB, which in PyTorch's zip format hold a CRC-32 of every tensor. Files up to 1 MiB are read whole.

It can't see an edit to a few rows of a large tensor that misses its samples, or to some tensors of
a file that has several hundred large ones. xxh3 is no defence against someone who forges a file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

WHOLE_BYTES = 1 << 20
"""Files up to this size are read whole."""
SAMPLE_BYTES = 4 << 10
SMALL_TENSOR_BYTES = 16 << 10
TENSOR_SAMPLES = 192
EVEN_SAMPLES = 64
TAIL_BYTES = 256 << 10
HEADER_BYTES = 100 << 20
"""The safetensors format's own limit for its header."""


def fingerprint(path: Path) -> tuple[int, str]:
    """Size of a file in bytes, and a digest of samples of it. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if size <= WHOLE_BYTES:
            ranges = [(0, size)]
        elif (header := _read_header(file.fileno(), size)) is not None:
            ranges = _tensor_ranges(header, size)
        else:
            ranges = [*_even(0, size, TENSOR_SAMPLES), (size - TAIL_BYTES, size)]
        for begin, end in _merge(ranges):
            digest.update(struct.pack("<QQ", begin, end))
            digest.update(_read(file.fileno(), begin, end))
    return size, digest.hexdigest()


Range = tuple[int, int]
"""First byte, and the one after the last."""


def _read(fd: int, begin: int, end: int) -> bytes:
    parts = []
    while begin < end:
        if not (part := os.pread(fd, end - begin, begin)):
            raise OSError("the file became shorter while it was being read")
        parts.append(part)
        begin += len(part)
    return b"".join(parts)


def _read_header(fd: int, size: int) -> list[Range] | None:
    """Where the header and the tensors of a safetensors file are; None if it isn't one."""
    (length,) = struct.unpack("<Q", _read(fd, 0, 8))
    start = 8 + length
    if length > HEADER_BYTES or start > size:
        return None
    try:
        header = json.loads(_read(fd, 8, start))
        header.pop("__metadata__", None)
        tensors = [(start + begin, start + end) for begin, end in map(_offsets, header.values())]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if any(not start <= begin <= end <= size for begin, end in tensors):
        return None
    return [(0, start), *tensors]


def _offsets(entry: Any) -> Range:
    begin, end = entry["data_offsets"]
    return int(begin), int(end)


def _tensor_ranges(header: list[Range], size: int) -> list[Range]:
    (_, start), *tensors = header
    samples = _merge(map(_sample, tensors))
    if (count := len(samples)) > TENSOR_SAMPLES:
        samples = [samples[n * count // TENSOR_SAMPLES] for n in range(TENSOR_SAMPLES)]
    return [(0, start), *samples, *_even(start, size, EVEN_SAMPLES)]


def _sample(tensor: Range) -> Range:
    begin, end = tensor
    if end - begin <= SMALL_TENSOR_BYTES:
        return tensor
    middle = (begin + end - SAMPLE_BYTES) // 2
    return middle, middle + SAMPLE_BYTES


def _even(begin: int, end: int, count: int) -> list[Range]:
    """Samples at even distances, the first and the last bytes among them."""
    room = max(0, end - begin - SAMPLE_BYTES)
    starts = (begin + room * n // (count - 1) for n in range(count))
    return [(start, min(start + SAMPLE_BYTES, end)) for start in starts]


def _merge(ranges: Iterable[Range]) -> list[Range]:
    """In order, with neighbours so near that one read is cheaper made one."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if begin == end:
            continue
        if merged and begin - merged[-1][1] <= SAMPLE_BYTES:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
