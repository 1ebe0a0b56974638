"""What both halves of the connector derive from vLLM's configuration before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping as Dict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from kvloft.arena import Arena, choose_slab_bytes
from kvloft.capacity import capacity
from kvloft.config import Options, parse_options, size_option
from kvloft.engines.vllm.geometry import check_servable, kv_dtype, translate, volatile_tokens
from kvloft.engines.vllm.identity import check_hash_seed, hash_seed, identity, unread
from kvloft.engines.vllm.log import logger, warn
from kvloft.errors import ArenaError
from kvloft.geometry import Geometry, from_dict
from kvloft.keys import geometry_digest
from kvloft.lower import LowerTier
from kvloft.mapping import SCHEDULER, Mapping, header_bytes
from kvloft.plan import ChunkPlan
from kvloft.seals import Seals, seal_bytes
from kvloft.tiers.base import Namespace
from kvloft.tiers.disk import DiskTier
from kvloft.units import PAGE_BYTES, format_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Setup:
    """One half's view: the geometry cut into chunks, the options and the attached mapping."""

    plan: ChunkPlan
    options: Options
    mapping: Mapping
    ranks: int
    digest: bytes
    identity: Dict[str, object]
    volatile_tokens: int
    """Known tokens at a request's end whose bytes are not final."""

    def open_tiers(self, vllm_config: VllmConfig) -> list[LowerTier]:
        """The lower tiers, in order. Raises :class:`kvloft.errors.KVLoftError`; then none is open.

        Only the scheduler's half opens them: one process reads and writes for all ranks.
        """
        if not self.options.tiers:
            return []
        check_hash_seed(vllm_config)
        if doubt := unread(self.identity):
            logger.warning("KVLoft: %s", doubt)
        seeded = self.digest + hash_seed(vllm_config).encode()
        namespace = Namespace(
            digest=xxhash.xxh3_128_digest(seeded),
            slot_bytes=self.plan.slot_sizes(),
            has_full=self.plan.full_layout is not None,
            about={
                "model": str(vllm_config.model_config.model),
                "namespace": self.options.namespace or "",
                "kv_dtype": kv_dtype(vllm_config),
                "tensor_parallel": str(self.ranks),
                "tokens_per_chunk": str(self.plan.tokens_per_chunk),
            },
        )
        opened: list[LowerTier] = []
        try:
            for options in self.options.tiers:
                tier = DiskTier(
                    options, namespace, report=warn, verify=self.options.verify != "off"
                )
                opened.append(LowerTier(tier, options.write == "all", options.wait_seconds))
        except BaseException:
            for lower in opened:
                lower.tier.close()
            raise
        return opened

    def make_arena(self) -> Arena:
        """The allocator of the mapping's memory."""
        budget = arena_bytes(self.plan, self.options)
        return Arena(budget, choose_slab_bytes(budget, self.plan.slot_sizes()))

    def make_seals(self) -> Seals | None:
        """Checksums of slots, if the user wants them."""
        if self.options.verify != "always":
            return None
        return Seals(self.plan, self.mapping.data, arena_bytes(self.plan, self.options))


def arena_bytes(plan: ChunkPlan, options: Options) -> int:
    """What of the budget is for chunks: all but the mapping's header and, with ``verify: always``,
    the seals."""
    left = options.cpu_bytes // PAGE_BYTES * PAGE_BYTES
    left -= header_bytes(plan.geometry.tensor_parallel)
    return left - seal_bytes(plan, left) if options.verify == "always" else left


def set_up_worker(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Check the options, then attach as this rank. Raises :class:`kvloft.errors.KVLoftError`."""
    geometry = translate(vllm_config, kv_cache_config)
    options = parse_options(_extra_config(vllm_config), geometry)
    plan = ChunkPlan(geometry, options.tokens_per_chunk)
    _check_capacity(plan, options)
    parallel = vllm_config.parallel_config
    meaning = _identity(vllm_config, kv_cache_config, options)
    digest = geometry_digest(plan, meaning)
    note = json.dumps(geometry.to_dict(), separators=(",", ":")).encode()
    mapping = Mapping(
        _name(vllm_config),
        options.cpu_bytes,
        rank=parallel.rank % geometry.tensor_parallel,
        ranks=geometry.tensor_parallel,
        digest=digest,
        note=note,
    )
    return Setup(
        plan, options, mapping, geometry.tensor_parallel, digest, meaning,
        volatile_tokens(vllm_config),
    )  # fmt: skip


def set_up_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Attach to what the workers have set up, and agree with every one of them on the geometry.

    vLLM starts all workers before the scheduler. Raises :class:`kvloft.errors.KVLoftError`.
    """
    check_servable(vllm_config, kv_cache_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    # All that is needed to find the mapping; the rest is checked against the workers' geometry.
    cpu_bytes = size_option("cpu_bytes_to_use", _extra_config(vllm_config).get("cpu_bytes_to_use"))
    mapping = Mapping(_name(vllm_config), cpu_bytes, rank=SCHEDULER, ranks=ranks, digest=b"")
    try:
        if not (note := mapping.note()):
            raise ArenaError("the scheduler has been started before the workers")
        geometry = _read_geometry(note)
        options = parse_options(_extra_config(vllm_config), geometry)
        plan = ChunkPlan(geometry, options.tokens_per_chunk)
        meaning = _identity(vllm_config, kv_cache_config, options)
        digest = geometry_digest(plan, meaning)
        if not mapping.agree(digest):
            missing = [r for r, left in enumerate(mapping.attached()) if left is None]
            raise ArenaError(f"ranks {missing} have not attached; did their start-up fail?")
    except BaseException:
        mapping.close()
        raise
    return Setup(plan, options, mapping, ranks, digest, meaning, volatile_tokens(vllm_config))


def _read_geometry(note: bytes) -> Geometry:
    return from_dict(json.loads(note), where="the workers' KV cache")


def _check_capacity(plan: ChunkPlan, options: Options) -> None:
    try:
        choose_slab_bytes(arena_bytes(plan, options), plan.slot_sizes())
    except ArenaError as error:
        raise ArenaError(
            f"'cpu_bytes_to_use': {error} (chunks of {plan.tokens_per_chunk} tokens, full chunk "
            f"{format_size(plan.full_chunk_bytes)}, resume point {format_size(plan.resume_bytes)})"
        ) from error


def _extra_config(vllm_config: VllmConfig) -> Dict[str, object]:
    extra: Dict[str, object] = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return extra


def _name(vllm_config: VllmConfig) -> str:
    """A file name that is the same in all processes of one engine and in no other engine."""
    engine = vllm_config.kv_transfer_config.engine_id
    rank = vllm_config.parallel_config.data_parallel_index
    return xxhash.xxh3_128_hexdigest(f"{engine}/{rank}".encode())


def _identity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
) -> Dict[str, object]:
    persistent = bool(options.tiers)
    return identity(
        vllm_config, kv_cache_config, namespace=options.namespace, persistent=persistent
    )


def describe(setup: Setup, arena: Arena) -> str:
    """The line a user checks at start: groups, chunk, resume cost, what the budget holds."""
    plan = setup.plan
    kinds: dict[str, int] = {}
    for group in plan.geometry.groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + 1
    groups = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    line = (
        f"groups {groups}; unit {plan.geometry.unit_tokens} tokens, chunk "
        f"{plan.tokens_per_chunk} tokens = {format_size(plan.full_chunk_bytes)}"
    )
    holds = capacity(plan, arena.budget, setup.options.resume_interval)
    if plan.has_resume_points:
        line += f"; a resume point costs {format_size(plan.resume_bytes)}"
    line += f"; {format_size(setup.options.cpu_bytes)} of host memory hold "
    line += f"{holds.tokens_at_interval:,} tokens"
    if plan.has_resume_points:
        line += (
            f" with {holds.resume_points_at_interval:,} resume points, one every "
            f"{holds.resume_interval:,} tokens"
        )
    return line
