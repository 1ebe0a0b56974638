"""The tier on disk: the suite, and what only a disk can do to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvloft.testing.tiers import TierTests
from kvloft.tiers.base import Chunk, Namespace, Tier
from kvloft.tiers.disk import DiskTier
from kvloft.tiers.disk.format import chunk_name
from kvloft.tiers.disk.segments import Slots
from kvloft.tiers.disk.store import Store
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES


@contextmanager
def stuck() -> Iterator[None]:
    """A device that takes no request, until it is mended."""
    mended = threading.Event()
    real = Slots._access

    def late(*args: Any) -> int:
        mended.wait()
        return real(*args)

    with mock.patch.object(Slots, "_access", late):
        try:
            yield
        finally:
            mended.set()


class TestDiskTier(TierTests[Path]):
    """The suite."""

    # So that a limit lowered to it leaves some of the segments made under a high one.
    small_bytes = 4 << 20

    def new_place(self, path: Path) -> Path:
        return path / "disk"

    def open_tier(self, place: Path, names: Namespace, *, max_bytes: int, queue_bytes: int) -> Tier:
        return DiskTier(DiskOptions(place, max_bytes, queue_bytes=queue_bytes), names)

    def stalled(self, place: Path, tier: Tier) -> AbstractContextManager[object]:
        return stuck()

    def damage(self, place: Path, names: Namespace, chunk: Chunk) -> bool:
        store = Store(place)
        store.load()
        found = store.find(names.digest, chunk_name(chunk.key, chunk.code))
        assert found is not None
        path = store.folder / found.segment.data_name
        with path.open("r+b") as file:
            at = found.slot * found.segment.stride + PAGE_BYTES + chunk.nbytes - 1
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
        return True
