"""One lower tier behind the names that this engine gives to chunks.

The tier's contract says that it never raises. An engine must not end because a tier, perhaps
somebody else's, breaks its word: whatever comes out of a call here is counted, and answered as if
the tier were empty and its queue full.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from kvloft.catalog.catalog import STATE, Catalog
from kvloft.catalog.tree import ROOT, gallop
from kvloft.keys import Keys
from kvloft.plan import ChunkPlan, Piece
from kvloft.tiers.base import Chunk, Outcome, Tier, TierStats

FULL = "f"
_STATE_CODE = "s"
_MAX_STEPS_UP = 4096
"""How far above the longest path a resume point is looked for: bounds the time of a look-up."""

_T = TypeVar("_T")

log = logging.getLogger("vllm.kvloft")


def code_of(column: int) -> str:
    """The class of the window or state chunk in a column of the catalog."""
    if column == STATE:
        return _STATE_CODE
    return f"{'W' if column % 2 else 'w'}{column // 2}"


def ended_well(future: Future[Outcome]) -> bool:
    """Whether a future that is done is DONE, whatever else it may be."""
    if future.cancelled() or future.exception() is not None:
        return False
    return future.result() is Outcome.DONE


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier and how to use it."""

    tier: Tier
    write_all: bool = True
    """Write every chunk that is stored, not only those that are found again."""
    wait: float | None = None
    """Seconds a request may wait for this tier; ``None``: no longer than computing its prefix would
    take, as far as that is known."""


class Shelf:
    """One tier, from the scheduler's thread."""

    def __init__(self, lower: LowerTier, catalog: Catalog) -> None:
        self.tier = lower.tier
        self.write_all = lower.write_all
        self.wait = lower.wait
        self.writing: set[tuple[bytes, str]] = set()
        """By tier key and code, the chunks that are being written."""
        self.broken_calls = 0
        """Calls in which the tier broke its contract."""
        self.read_rate = 0.0
        """Bytes a second that promotions have brought back; 0 before the first."""
        self._plan: ChunkPlan = catalog.plan
        self._tree = catalog.tree
        self._catalog = catalog
        self._salt = b""
        self._columns = [code_of(column) for column in range(2 * len(catalog.plan.window_sets))]

    # ---------------------------------------------------------------- names

    def rename(self, salt: bytes) -> None:
        """Find nothing any more of what has been written so far, and give new names from now on.

        After a reset the engine may go on with other weights than those that its namespace stands
        for. What has been written stays for the next start, which has the weights of the files.
        """
        self._salt = salt

    def key(self, key: bytes) -> bytes:
        """The tier's name for a boundary."""
        return xxhash.xxh3_128_digest(self._salt + key) if self._salt else key

    def full_chunk(self, key: bytes, parent: bytes, depth: int) -> Chunk:
        """The name of a full chunk; ``parent`` is empty at the first boundary."""
        above = self.key(parent) if parent else b""
        return Chunk(self.key(key), FULL, above, depth, self._plan.full_chunk_bytes)

    def full_chunk_of(self, node: int) -> Chunk:
        """The name of a node's full chunk."""
        tree = self._tree
        parent = tree.parent[node]
        above = tree.key(parent) if parent != ROOT else b""
        return self.full_chunk(tree.key(node), above, tree.depth[node])

    def chunk_of(self, holder: int, column: int, nbytes: int) -> Chunk:
        """The name of a window or state chunk."""
        return self.full_chunk_of(holder)._replace(code=code_of(column), nbytes=nbytes)

    def piece_code(self, key: bytes, piece: Piece) -> str | None:
        """The class under which the tier has the bytes of ``piece``; ``key`` is its boundary's."""
        key, whole = self.key(key), self._columns[2 * piece.window_set + 1]
        if not piece.whole and self.holds(key, short := self._columns[2 * piece.window_set]):
            return short
        return whole if self.holds(key, whole) else None

    def has_or_writes(self, key: bytes, code: str) -> bool:
        """Whether the tier has a chunk or is about to; ``key`` is the tier's."""
        return (key, code) in self.writing or self.holds(key, code)

    # ---------------------------------------------------------------- calls that never raise

    def holds(self, key: bytes, code: str) -> bool:
        """As :meth:`kvloft.tiers.base.Tier.holds`; ``key`` is the tier's."""
        try:
            return self.tier.holds(key, code)
        except Exception:
            return self._broken(False)

    def put(self, chunk: Chunk, data: memoryview) -> Future[Outcome] | None:
        return self._guard(lambda: self.tier.put(chunk, data), None)

    def get(self, chunk: Chunk, into: memoryview, deadline: float) -> Future[Outcome] | None:
        return self._guard(lambda: self.tier.get(chunk, into, deadline), None)

    def delete(self, chunks: Sequence[Chunk]) -> None:
        self._guard(lambda: self.tier.delete(chunks), None)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        self._guard(lambda: self.tier.touch(chunks), None)

    def demote(self, chunks: Sequence[Chunk]) -> None:
        self._guard(lambda: self.tier.demote(chunks), None)

    def close(self) -> None:
        self._guard(self.tier.close, None)

    def stats(self) -> TierStats | None:
        return self._guard(self.tier.stats, None)

    @property
    def name(self) -> str:
        return self._guard(lambda: self.tier.name, "broken")

    def outcome(self, future: Future[Outcome]) -> Outcome:
        """What a future that is done has come to."""
        return self._guard(future.result, Outcome.FAILED)

    def _guard(self, call: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return call()
        except Exception:
            return self._broken(otherwise)

    def _broken(self, otherwise: _T) -> _T:
        self.broken_calls += 1
        if self.broken_calls == 1:
            log.exception(
                "KVLoft: a lower tier has raised, which it must not; this counts as a miss, and so "
                "will all that follow"
            )
        return otherwise

    # ---------------------------------------------------------------- look-up

    def find(self, keys: Keys, limit: int, above: int) -> int:
        """The greatest depth in ``(above, limit]`` chunks at which the tier alone can let a request
        resume; 0 for none. O(log n) for full chunks, then a walk up to a resume point."""
        size = self._plan.tokens_per_chunk
        depth = limit
        if self._plan.full_layout is not None:
            depth = gallop(limit, lambda d: self.holds(self.key(keys(d * size)), FULL))
        if self._plan.has_resume_points:
            least = max(above, depth - _MAX_STEPS_UP)
            while depth > least and not self._resumes(keys, depth):
                depth -= 1
            if depth == least:
                return 0
        return depth if depth > above else 0

    def _resumes(self, keys: Keys, depth: int) -> bool:
        plan, pieces = self._plan, self._plan.pieces(depth)
        if not (pieces or plan.full_layout or plan.state_layout):
            return False  # It needs no bytes at all, which a tier has no more of than anybody.
        size = self._plan.tokens_per_chunk
        if plan.state_layout is not None and not self.holds(
            self.key(keys(depth * size)), _STATE_CODE
        ):
            return False
        return all(
            self.piece_code(keys((depth - piece.chunks_back) * size), piece) is not None
            for piece in pieces
        )

    def resume_names(self, node: int) -> Iterator[Chunk]:
        """What the tier should have of a resident resume point besides full chunks."""
        for holder, column, _, layout in self._catalog.resume_chunks(node):
            yield self.chunk_of(holder, column, layout.nbytes)
