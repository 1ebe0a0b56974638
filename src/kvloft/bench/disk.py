"""The disk tier: chunks written and read against raw direct I/O, look-ups, and opening again.

*Raw* is what the device does for the same bytes from the same memory: a preallocated file, the same
number of threads, one ``pwrite`` or ``preadv`` with ``O_DIRECT`` for each chunk, no header, no
checksum, no books. *Fresh* means that a byte range is written for the first time since its file was
preallocated, *again* that it is overwritten, which is what a full store does all the time.

Peers, where their files are to be found (``bench/peers/`` in the source tree), store and load the
same number of bytes in the same rounds, on the same directory. They write into files that are new,
so it is *fresh* that their stores compare with.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from threading import Thread

import numpy as np

from kvloft.bench.report import Result, header, progress, table
from kvloft.errors import KVLoftError
from kvloft.tiers.base import Chunk, Namespace, Outcome
from kvloft.tiers.disk import DiskTier
from kvloft.tiers.disk.format import ON_NOTHING, ON_PARENT, READY, Record, Segment, pack_record
from kvloft.tiers.disk.segments import Files
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES, format_size

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTH = 4
_TOTAL = 1 << 30
_ROUNDS = 5
_PEER_ROUNDS = 3
"""In which peers take part: most of their time goes into starting."""
_PEERS = ("vllm_fs", "lmcache_fs")
_INDEX_CHUNKS = 1_000_000
_DIGEST = bytes(range(16))


def run(path: Path, *, quick: bool) -> Result:
    """All of it, in a directory of its own below ``path``, which is removed afterwards."""
    if not path.is_dir():
        raise KVLoftError(f"{path} is no directory; give one on the disk that is to be measured")
    total = 32 << 20 if quick else _TOTAL
    rounds = 1 if quick else _ROUNDS
    result = header("disk", quick=quick)
    result |= {"total_bytes": total, "depth": DEPTH, "rounds": rounds}
    free = shutil.disk_usage(path).free
    if free < 4 * total:
        raise KVLoftError(
            f"{path} has {format_size(free)} free, this needs {format_size(4 * total)}"
        )
    with tempfile.TemporaryDirectory(prefix="kvloft-bench-", dir=path) as folder:
        memory = _Memory(total)
        sizes = SIZES[:2] if quick else SIZES
        measured = [_transfers(Path(folder), memory, size, rounds) for size in sizes]
        result["transfers"] = [row for row, _ in measured]
        result["peers"] = [peer for _, peers in measured for peer in peers]
        result["index"] = _index(Path(folder) / "index", 20_000 if quick else _INDEX_CHUNKS)
    return result


class _Memory:
    """Shared memory as the arena's: one half is written from, the other one read into."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.source = memoryview(mmap.mmap(-1, nbytes, flags=flags))
        self.target = memoryview(mmap.mmap(-1, nbytes, flags=flags))
        words = np.frombuffer(self.source, dtype=np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 1 << 63, 1 << 16).repeat(len(words) >> 16)


def _threads(count: int, work: Callable[[int], None]) -> float:
    """Seconds for ``work`` on 0 … count - 1, shared out among the threads of a raw run."""

    def share(first: int) -> None:
        for index in range(first, count, DEPTH):
            work(index)

    threads = [Thread(target=share, args=(first,)) for first in range(DEPTH)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def _transfers(
    folder: Path, memory: _Memory, size: int, rounds: int
) -> tuple[Result, list[Result]]:
    """Store and load of chunks of one size, and what peers make of it; the sides take turns."""
    count = memory.nbytes // size
    seconds: dict[str, list[float]] = {}
    peers: dict[str, list[Result]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    for turn in range(rounds):
        progress(f"chunks of {format_size(size)}, round {turn + 1} of {rounds}")
        raw = folder / "raw"
        fd = os.open(raw, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, count * size)

        def write(index: int, fd: int = fd) -> None:
            os.pwrite(fd, memory.source[index * size : (index + 1) * size], index * size)

        def read(index: int, fd: int = fd) -> None:
            os.preadv(fd, [memory.target[index * size : (index + 1) * size]], index * size)

        note("raw_fresh", _threads(count, write))
        before = _threads(count, write), _threads(count, read)
        os.sync()

        # Room for all chunks and the files around them: a second set pushes out the first.
        limit = count * (size + PAGE_BYTES) * 103 // 100 + (8 << 20)
        place = folder / "disk"
        options = DiskOptions(place, limit, threads=DEPTH)
        tier = DiskTier(options, Namespace(_DIGEST, (size,)))
        note("fresh", _put(tier, memory, size, count, 1))
        note("again", _put(tier, memory, size, count, 2))
        memory.target[:] = bytes(len(memory.target))
        note("load", _get(tier, memory, size, count, 2))
        same = bool(
            np.array_equal(
                np.frombuffer(memory.source, np.uint64), np.frombuffer(memory.target, np.uint64)
            )
        )
        tier.close()
        # The device drifts by more than is to be seen, so raw access comes on both sides.
        note("raw_again", (before[0] + _threads(count, write)) / 2)
        note("raw_load", (before[1] + _threads(count, read)) / 2)
        os.close(fd)
        raw.unlink()
        shutil.rmtree(place)
        os.sync()  # What removing them costs must not be paid for by the next round.
        if not same:
            raise RuntimeError("what was read is not what was written")
        for script in _peer_scripts() if turn < _PEER_ROUNDS else ():
            done = peers.setdefault(script.stem, [])
            if not done or "error" not in done[0]:
                done.append(_peer(script, folder / "peer", size, memory.nbytes))
    gbps = {name: round(count * size / median(s) / 1e9, 3) for name, s in seconds.items()}
    ratios = {
        name: round(median(r / o for r, o in zip(seconds[raw], seconds[name], strict=True)), 3)
        for name, raw in (("fresh", "raw_fresh"), ("again", "raw_again"), ("load", "raw_load"))
    }
    row = {"chunk_bytes": size, "chunks": count, "gbps": gbps, "ratios": ratios}
    ours = [(count * size / s / 1e9, count * size / g / 1e9)
            for s, g in zip(seconds["fresh"], seconds["load"], strict=True)]  # fmt: skip
    return row, [_compare(size, runs, ours) for runs in peers.values()]


def _chunks(size: int, count: int, generation: int) -> Iterator[Chunk]:
    """One long prefix."""
    parent = b""
    for depth in range(1, count + 1):
        key = generation.to_bytes(8, "little") + depth.to_bytes(8, "little")
        yield Chunk(key, "f", parent, depth, size)
        parent = key


def _put(tier: DiskTier, memory: _Memory, size: int, count: int, generation: int) -> float:
    return _all(tier.put, memory.source, size, count, generation)


def _get(tier: DiskTier, memory: _Memory, size: int, count: int, generation: int) -> float:
    return _all(tier.get, memory.target, size, count, generation)


def _all(
    call: Callable[[Chunk, memoryview], Future[Outcome] | None],
    memory: memoryview,
    size: int,
    count: int,
    generation: int,
) -> float:
    """Seconds until every chunk has been taken on and is done."""
    start = time.perf_counter()
    futures: list[Future[Outcome]] = []
    waiting = 0
    for index, chunk in enumerate(_chunks(size, count, generation)):
        part = memory[index * size : (index + 1) * size]
        while (future := call(chunk, part)) is None:
            futures[waiting].result()
            waiting += 1
        futures.append(future)
    outcomes = [future.result() for future in futures]
    seconds = time.perf_counter() - start
    if any(outcome is not Outcome.DONE for outcome in outcomes):
        raise RuntimeError(f"not all was done: {sorted({o.value for o in outcomes})}")
    return seconds


# --- peers ----------------------------------------------------------------------------------------


def _peer_scripts() -> list[Path]:
    scripts = (Path(__file__).parents[3] / "bench" / "peers" / f"{name}.py" for name in _PEERS)
    return [script for script in scripts if script.is_file()]


def _peer(script: Path, folder: Path, size: int, total: int) -> Result:
    """What a peer makes of the same bytes; one that can't be run says why."""
    command = [
        _interpreter(script), str(script), str(folder), "--chunk-bytes", str(size),
        "--total-bytes", str(total), "--depth", str(DEPTH), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: Result = json.loads(lines[-1])
        return found
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"peer": script.stem, "chunk_bytes": size, "error": error[:300]}


def _compare(size: int, runs: list[Result], ours: list[tuple[float, float]]) -> Result:
    """A peer's rounds in one; the ratios say how many times as fast this project is."""
    if "error" in runs[0]:
        return runs[0]
    out = {"peer": runs[0]["peer"], "version": runs[0]["version"], "chunk_bytes": size}
    for at, name in enumerate(("store", "load")):
        theirs = [run[f"{name}_gbps"] for run in runs]
        out[f"{name}_gbps"] = round(median(theirs), 3)
        out[f"{name}_ratio"] = round(
            median(mine[at] / other for mine, other in zip(ours, theirs, strict=False)), 3
        )
    return out


def _interpreter(script: Path) -> str:
    """A peer's own environment if there is one beside its script, or else this one."""
    own = script.with_name(f"{script.stem}.venv") / "bin" / "python"
    return str(own) if own.exists() else sys.executable


# --- the index ------------------------------------------------------------------------------------


def _index(folder: Path, chunks: int) -> Result:
    """Opening a store that has many chunks, and asking for them. Their bytes are never read, so
    the segments are sparse."""
    progress(f"a store of {chunks:,} chunks")
    _make_store(folder, chunks)
    options = DiskOptions(folder, 1 << 50)
    namespace = Namespace(_DIGEST, (PAGE_BYTES,))
    opened = []
    for _ in range(3):
        start = time.perf_counter()
        tier = DiskTier(options, namespace)
        opened.append(time.perf_counter() - start)
        held = tier.stats().chunks
        keys = [_key(n) for n in range(0, chunks, max(1, chunks // 50_000))]
        start = time.perf_counter()
        found = sum(tier.holds(key, "f") for key in keys)
        lookup = (time.perf_counter() - start) / len(keys)
        tier.close()
        if held != chunks or found != len(keys):
            raise RuntimeError(f"{held} chunks are known, {chunks} were there")
    return {
        "chunks": chunks,
        "open_seconds": [round(s, 3) for s in opened],
        "holds_microseconds": round(lookup * 1e6, 3),
    }


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big") + (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big")


_PER_SEGMENT = 16_384
_PER_PREFIX = 64


def _make_store(folder: Path, chunks: int) -> None:
    """A store of prefixes of 64 chunks, made by writing its tables alone."""
    DiskTier(DiskOptions(folder, 1 << 50), Namespace(_DIGEST, (PAGE_BYTES,))).close()
    (place,) = (path for path in folder.iterdir() if path.is_dir())
    files = Files(place)
    for number in range((chunks + _PER_SEGMENT - 1) // _PER_SEGMENT):
        segment = Segment(number + 1, 2 * PAGE_BYTES, _PER_SEGMENT)
        records = bytearray()
        for slot in range(min(_PER_SEGMENT, chunks - number * _PER_SEGMENT)):
            n = number * _PER_SEGMENT + slot
            first = n % _PER_PREFIX == 0
            record = Record(
                READY, ON_NOTHING if first else ON_PARENT, n % _PER_PREFIX + 1, 1, _DIGEST, _key(n),
                b"f\0\0\0", PAGE_BYTES, bytes(16) if first else _key(n - 1), 0, 1, 1000 + n,
            )  # fmt: skip
            records += pack_record(record, segment.number, slot)
        (place / segment.table_name).write_bytes(records.ljust(segment.table_bytes, b"\0"))
        with (place / segment.data_name).open("wb") as data:
            data.truncate(segment.data_bytes)
    del files


def lines(result: Result) -> Iterator[str]:
    """The tables."""
    yield (
        f"GB/s, {format_size(result['total_bytes'])} for each size, {result['depth']} in flight; "
        "in brackets the share of raw direct I/O:"
    )
    rows = []
    for row in result["transfers"]:
        speed, ratio = row["gbps"], row["ratios"]
        cells = [f"{speed[n]:.2f} ({ratio[n]:.2f})" for n in ("fresh", "again", "load")]
        raw = [f"{speed[n]:.2f}" for n in ("raw_fresh", "raw_again", "raw_load")]
        rows.append((format_size(row["chunk_bytes"]), *cells, *raw))
    yield from table(
        ("chunk", "store, fresh", "store, again", "load", "raw fresh", "raw again", "raw load"),
        rows,
    )
    yield ""
    if result["peers"]:
        yield "Peers; in brackets, how many times as fast this project is (store: fresh):"
        peers = [
            (
                row["peer"], format_size(row["chunk_bytes"]),
                *(f"{row[f'{n}_gbps']:.2f} ({row[f'{n}_ratio']:.2f})" for n in ("store", "load")),
            )
            for row in result["peers"] if "error" not in row
        ]  # fmt: skip
        yield from table(("peer", "chunk", "store", "load"), peers)
        for name, error in {r["peer"]: r["error"] for r in result["peers"] if "error" in r}.items():
            yield f"{name}: {error}"
        yield ""
    index = result["index"]
    yield (
        f"{index['chunks']:,} chunks: opened in {median(index['open_seconds']):.2f} s, "
        f"a look-up takes {index['holds_microseconds']:.2f} us"
    )
