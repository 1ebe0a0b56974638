"""Names for chunks and for the geometry that gives their bytes a meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import xxhash

from kvloft.plan import ChunkPlan

Keys = Callable[[int], bytes]
"""The engine's hash of a whole prefix, by its length (tokens, a multiple of the hash unit)."""

FORMAT_VERSION = 1
"""Of the bytes in a chunk; part of the digest."""


def geometry_digest(plan: ChunkPlan, identity: Mapping[str, object]) -> bytes:
    """16 bytes that change with anything that changes the bytes of a chunk or their meaning.

    ``identity`` is what the engine knows beyond the geometry: model and weights, KV dtype, layout,
    parallel sizes, hash algorithm and seed. All ranks must agree on the digest before the first
    store. xxh3-128 of canonical JSON.
    """
    geometry = plan.geometry.to_dict()
    for name in ("name", "model", "source"):  # Whatever a model is called, its bytes are the same.
        geometry.pop(name, None)
    record = {
        "format": FORMAT_VERSION,
        "geometry": geometry,
        "tokens_per_chunk": plan.tokens_per_chunk,
        "identity": dict(identity),
    }
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_digest(text.encode())
