"""LMCache's file system adapters, without an engine: store fresh chunks, load them back.

``fs_native`` (``lmcache/v1/distributed/l2_adapters/fs_native_l2_adapter.py`` of LMCache 0.5.6)
does its input and output in C++ threads, ``fs`` (``fs_l2_adapter.py``) in those of asyncio.
LMCache's own factory makes either. They get LMCache's memory objects over our memory and tell of
finished tasks by event descriptors, which is how its store and prefetch controllers drive them.
"""

from __future__ import annotations

import argparse
import select
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from harness import Peer, arguments, fail, main

try:
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform.event_notifier import consume_fd
except ImportError as error:
    raise fail(f"LMCache 0.5.6 is not there: {error}") from error


class LmcacheFs:
    def __init__(self, args: argparse.Namespace, place: Path, memory: np.ndarray) -> None:
        self.name = f"lmcache-{args.adapter.replace('_', '-')}"
        self.version = metadata.version("lmcache")
        self._per_task = args.task_chunks
        config: dict[str, Any] = {"base_path": str(place), "use_odirect": not args.buffered}
        if args.adapter == "fs_native":
            self._adapter = create_l2_adapter(
                FSNativeL2AdapterConfig.from_dict({**config, "num_workers": args.depth})
            )
        else:
            self._adapter = create_l2_adapter(FSL2AdapterConfig.from_dict(config))
        self._keys = [
            ObjectKey(np.random.default_rng(number).bytes(32), "bench", 0)
            for number in range(len(memory))
        ]
        self._objects = [_memory_object(row) for row in memory]
        self.notes = {
            "o_direct": not args.buffered,
            "native_io": args.adapter == "fs_native",
            "task_chunks": self._per_task,
            "store_to_page_cache": args.buffered,
        }
        if args.adapter == "fs":
            self.notes["depth_used"] = "that of asyncio's default executor"

    def store(self) -> None:
        tasks = {
            self._adapter.submit_store_task(self._keys[part], self._objects[part])
            for part in self._parts()
        }

        def ended() -> Iterator[int]:
            for task, result in self._adapter.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise SystemExit(f"{self.name}: a store has failed")
                yield task

        _wait(self._adapter.get_store_event_fd(), tasks, ended)

    def load(self) -> None:
        tasks = {
            self._adapter.submit_load_task(self._keys[part], self._objects[part]): part
            for part in self._parts()
        }
        left = set(tasks)

        def ended() -> Iterator[int]:
            for task in list(left):
                loaded = self._adapter.query_load_result(task)
                if loaded is None:
                    continue
                if len(loaded.get_indices_list()) != len(self._keys[tasks[task]]):
                    raise SystemExit(f"{self.name}: a load has failed")
                yield task

        _wait(self._adapter.get_load_event_fd(), left, ended)

    def close(self) -> None:
        self._adapter.close()

    def _parts(self) -> Iterator[slice]:
        step = self._per_task or len(self._keys)
        for first in range(0, len(self._keys), step):
            yield slice(first, first + step)


def _wait(fd: int, left: set[int], ended: Callable[[], Iterator[int]]) -> None:
    """Until every task has ended. The descriptor says that some have, not which or how many."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while left:
        if not poll.poll(60_000):
            raise SystemExit("nothing has ended for a minute")
        consume_fd(fd)
        left.difference_update(ended())


def _memory_object(row: np.ndarray) -> TensorMemoryObj:
    data = torch.from_numpy(row)
    about = MemoryObjMetadata(
        shape=data.shape,
        dtype=data.dtype,
        address=0,
        phy_size=data.numel(),
        ref_count=1,
        shapes=[data.shape],
        dtypes=[data.dtype],
    )
    return TensorMemoryObj(data, about, None)


def _open(args: argparse.Namespace, place: Path, memory: np.ndarray) -> Peer:
    return LmcacheFs(args, place, memory)


if __name__ == "__main__":
    parser = arguments("Store and load with LMCache's file system adapters, without an engine.")
    parser.add_argument("--adapter", choices=("fs_native", "fs"), default="fs_native")
    parser.add_argument("--task-chunks", type=int, default=1, help="chunks of a task; 0 for all")
    parser.add_argument("--buffered", action="store_true", help="without O_DIRECT")
    main(parser, _open)
