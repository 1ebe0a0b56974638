"""The disk tier keeps the contract that all tiers share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloft.testing.tiers import TierTests
from kvloft.tiers.base import Chunk, Namespace, Tier
from kvloft.tiers.disk import DiskTier, segments
from kvloft.tiers.disk.format import chunk_name
from kvloft.tiers.disk.store import FOLDER, Store
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES


class TestDiskTier(TierTests[Path]):
    """The suite; two tiers on one directory learn of each other within a second or so."""

    small_bytes = 2 << 20
    examples = 15

    def new_place(self, path: Path) -> Path:
        return path / "disk"

    def open_tier(self, place: Path, names: Namespace, *, max_bytes: int, queue_bytes: int) -> Tier:
        options = DiskOptions(place, max_bytes, queue_bytes=queue_bytes, threads=2)
        return DiskTier(options, names)

    @contextmanager
    def stalled(self, place: Path, tier: Tier) -> Iterator[None]:
        """Chunks are neither read nor written, as on a device that hangs."""
        go_on = threading.Event()
        real = segments._transfer

        def wait(fd: int, mode: int, parts: list[memoryview], offset: int) -> int:
            go_on.wait(60)
            return real(fd, mode, parts, offset)

        segments._transfer = wait
        try:
            yield
        finally:
            segments._transfer = real
            go_on.set()

    def damage(self, place: Path, names: Namespace, chunk: Chunk) -> bool:
        store = Store(place)
        store.load()
        found = store.find(names.digest, chunk_name(chunk.key, chunk.code))
        if found is None:
            return False
        path = place / FOLDER / found.segment.data_name
        with path.open("r+b") as file:
            file.seek(found.slot * found.segment.stride + PAGE_BYTES + chunk.nbytes // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x20]))
        return True
