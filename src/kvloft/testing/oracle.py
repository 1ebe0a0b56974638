"""What a resume restores, by brute force: one look at every token, no arithmetic to get wrong.

Written from the definitions alone and sharing no code with the planner, so that the two can be
compared. It is quadratic and meant for small geometries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import lru_cache

from kvloft.geometry import Geometry, Group

PAGE = 4096
"""Bytes of a page of memory, to which a chunk's slot is rounded up."""

StoredBlock = tuple[int, int, Hashable]
"""``(group, index in the block table, name of the prefix that ends with the block)``."""

PrefixName = Callable[[int], Hashable]
"""Something that names the first so many tokens of a request, and no other prefix."""


def is_attended(group: Group, position: int, token: int) -> bool:
    """Whether a request that goes on at ``position`` (its next token) needs an earlier ``token``.

    For a ``state`` group: whether the token lies in the block whose state is needed.
    """
    if not group.cacheable or token >= position:
        return False
    match group.kind:
        case "full":
            return True
        case "window":
            distance = position - token
            return distance < group.window + group.extra_retained_tokens
        case "chunked_local":
            return token // group.attention_chunk == position // group.attention_chunk
        case "state":
            return token == position - 1
        case _:
            return False


@lru_cache(maxsize=1 << 16)
def resume_blocks(group: Group, boundary: int) -> frozenset[int]:
    """Indices of the blocks of ``group`` that a resume at ``boundary`` restores."""
    return frozenset(
        token // group.tokens_per_block
        for token in range(boundary)
        if is_attended(group, boundary, token)
    )


def unit_tokens(geometry: Geometry) -> int:
    """The least positive number of tokens that is whole in hashes and in every group's blocks."""
    sizes = [g.tokens_per_block for g in geometry.groups if g.cacheable]
    sizes.append(geometry.tokens_per_hash)
    unit = max(sizes)
    while any(unit % size for size in sizes):
        unit += max(sizes)
    return unit


def can_resume(
    geometry: Geometry, boundary: int, prefix: PrefixName, stored: Collection[StoredBlock]
) -> bool:
    """Whether every block that a resume at ``boundary`` needs is in ``stored``."""
    return all(
        (group.id, index, prefix((index + 1) * group.tokens_per_block)) in stored
        for group in geometry.groups
        for index in resume_blocks(group, boundary)
    )


def greatest_boundary(
    geometry: Geometry,
    tokens_per_chunk: int,
    tokens: int,
    prefix: PrefixName,
    stored: Collection[StoredBlock],
    known: Collection[Hashable],
    pending: Collection[Hashable] = (),
) -> int:
    """The greatest boundary at which a prompt of ``tokens`` tokens can be resumed; 0 for none.

    ``known``: names of the boundaries that the store has heard of. Without ``full`` groups they are
    all that tells a boundary that needs no bytes from one that was never computed.
    ``pending``: names of boundaries at which a store under way will publish a resume point; they do
    not count before it has, whatever else happens to be there.
    """
    best = 0
    for boundary in range(tokens_per_chunk, tokens, tokens_per_chunk):
        if prefix(boundary) not in known:
            break
        if prefix(boundary) not in pending and can_resume(geometry, boundary, prefix, stored):
            best = boundary
    return best


def copies(geometry: Geometry, group: Group) -> int:
    """How many ranks' bytes of ``group`` differ."""
    return 1 if group.replicated else geometry.tensor_parallel


def chunk_bytes(geometry: Geometry, blocks: Iterable[tuple[int, int]]) -> int:
    """Exact live bytes, over all ranks, of ``(group, number of blocks)``."""
    total = 0
    for group_id, count in blocks:
        group = geometry.groups[group_id]
        for run in group.layers:
            for _ in range(run.count):
                total += count * run.page_bytes * copies(geometry, group)
    return total


def slot_bytes(nbytes: int) -> int:
    """``nbytes`` in whole pages of memory."""
    return math.ceil(nbytes / PAGE) * PAGE


def full_chunk_bytes(geometry: Geometry, tokens_per_chunk: int) -> int:
    """Exact live bytes, over all ranks, of the chunk of all ``full`` groups."""
    return chunk_bytes(
        geometry,
        [
            (group.id, len({token // group.tokens_per_block for token in range(tokens_per_chunk)}))
            for group in geometry.groups
            if group.cacheable and group.kind == "full"
        ],
    )


def greatest_resume_blocks(group: Group, tokens_per_chunk: int) -> int:
    """The most blocks that a resume at any boundary restores of ``group``; 0 for ``full``.

    Looks at boundaries until windows are as long as they get and local chunks have gone round.
    """
    if group.kind == "full" or not group.cacheable:
        return 0
    span = group.window + group.extra_retained_tokens + tokens_per_chunk
    if group.attention_chunk:
        span = max(span, math.lcm(group.attention_chunk, tokens_per_chunk))
    return max(
        len(resume_blocks(group, boundary))
        for boundary in range(tokens_per_chunk, span + tokens_per_chunk, tokens_per_chunk)
    )


def resume_bytes(geometry: Geometry, tokens_per_chunk: int) -> int:
    """Exact live bytes, over all ranks, of the most that a resume needs besides full chunks."""
    return chunk_bytes(
        geometry,
        [(g.id, greatest_resume_blocks(g, tokens_per_chunk)) for g in geometry.groups],
    )
