"""What the peers' scripts share: arguments, memory, stamps, the page cache, the one JSON object.

A peer is measured on files of its own in a directory that goes away at the end. The timed parts are
its calls alone; making bytes, emptying the page cache and comparing lie outside of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PAGE = 4096
_WORDS = PAGE // 8


class Peer(Protocol):
    """A peer that has been set up; both calls return when every chunk is done, or raise."""

    name: str
    version: str
    notes: dict[str, Any]
    """Settings that belong beside the figures."""

    def store(self) -> None: ...

    def load(self) -> None: ...

    def close(self) -> None: ...


Open = Callable[[argparse.Namespace, Path, np.ndarray], Peer]
"""Arguments, an empty directory, and the memory: one row for each chunk."""


def arguments(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20)
    parser.add_argument("--total-bytes", type=int, default=1 << 30)
    parser.add_argument("--depth", type=int, default=4, help="I/O threads of the peer")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(parser: argparse.ArgumentParser, open_peer: Open) -> None:
    args = parser.parse_args()
    if args.chunk_bytes < PAGE or args.chunk_bytes % PAGE:
        parser.error(f"--chunk-bytes must be a multiple of {PAGE}")
    if args.depth < 1 or args.total_bytes < args.chunk_bytes:
        parser.error("--depth must be 1 or more and --total-bytes at least one chunk")
    # Peers log to standard output as they like; from here on that is standard error.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    result = measure(args, open_peer)
    if args.json:
        answer.write(json.dumps(result) + "\n")
    else:
        answer.writelines(f"{name}: {value}\n" for name, value in result.items())
    answer.close()


def measure(args: argparse.Namespace, open_peer: Open) -> dict[str, Any]:
    chunks = args.total_bytes // args.chunk_bytes
    moved = chunks * args.chunk_bytes
    memory = _memory(chunks, args.chunk_bytes)
    body = np.random.default_rng(1).integers(0, 256, args.chunk_bytes, dtype=np.uint8)
    for number, chunk in enumerate(memory):
        _write(chunk, body, number)

    args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peer-", dir=args.directory) as place:
        peer = open_peer(args, Path(place), memory)
        try:
            os.sync()  # What was removed before must not be paid for here.
            store_s = _timed(peer.store)
            cached = _leave_page_cache(Path(place))
            memory[:] = 0
            load_s = _timed(peer.load)
        finally:
            peer.close()
        expected = np.empty_like(body)
        for number, chunk in enumerate(memory):
            _write(expected, body, number)
            if not np.array_equal(chunk, expected):
                raise SystemExit(f"{peer.name}: chunk {number} came back with other bytes")
    os.sync()  # Nor what this has removed by whoever comes next.
    return {
        "peer": peer.name,
        "version": peer.version,
        "chunk_bytes": args.chunk_bytes,
        "total_bytes": moved,
        "depth": args.depth,
        "store_gbps": round(moved / store_s / 1e9, 3),
        "load_gbps": round(moved / load_s / 1e9, 3),
        "load_from_page_cache": cached,
        "verified": True,
        "store_seconds": round(store_s, 4),
        "load_seconds": round(load_s, 4),
        **peer.notes,
    }


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _memory(chunks: int, chunk_bytes: int) -> np.ndarray:
    """Shared memory in plain pages, all present, as vLLM's CPU tier has it."""
    area = mmap.mmap(-1, chunks * chunk_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(area, dtype=np.uint8).reshape(chunks, chunk_bytes)
    memory[:] = 1
    return memory


def _write(chunk: np.ndarray, body: np.ndarray, number: int) -> None:
    """The body, each page of it stamped with the chunk's number and its own."""
    chunk[:] = body
    stamps = chunk.view(np.uint64).reshape(-1, _WORDS)[:, 0]
    stamps[:] = np.arange(len(stamps), dtype=np.uint64) + np.uint64(number << 32)


def _leave_page_cache(place: Path) -> bool | str:
    """Drop the files from the page cache; whether any page of theirs is there all the same."""
    files = [path for path in place.rglob("*") if path.is_file() and path.stat().st_size >= PAGE]
    if not files:
        return "unknown"
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        return any(_resident(path) for path in files)
    except OSError:
        return "unknown"


def _resident(path: Path) -> bool:
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with path.open("rb") as file:
        area = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    address = np.frombuffer(area, dtype=np.uint8).ctypes.data
    present = ctypes.create_string_buffer(-(-len(area) // mmap.PAGESIZE))
    if mincore(address, len(area), present):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return any(byte & 1 for byte in present.raw)


def fail(text: str) -> SystemExit:
    """For a peer that is not there or can't do what is asked."""
    sys.stderr.write(f"{text}\n")
    return SystemExit(3)
