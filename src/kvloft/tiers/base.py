"""What a lower tier is: a place that keeps chunks by name and brings them back.

No call blocks, whatever the medium does: what takes time answers with a future, and ``None`` in its
place means that the tier's queue is full, nothing has been taken on, and the caller is to go on
without (a store) or try again later (a load). A tier never raises from these calls and its futures
hold no exceptions: a cache that fails is a cache that misses, so everything ends as an
:class:`Outcome`. Futures are done in any order, on any thread; they can't be cancelled, since the
buffer behind one is in use until it is done.

A tier belongs to one *namespace*: the digest of everything that gives the bytes of a chunk their
meaning. Chunks of other namespaces in the same place can't be seen through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """A chunk's name, and what a tier has to know to keep it. Equal for all who share a namespace.

    ``key`` and ``code`` alone tell chunks apart; the rest follows from them.
    """

    key: bytes
    """The engine's hash of the whole prefix up to the boundary: 16 to 64 bytes."""
    code: str
    """The class: ``f`` full, ``s`` state, ``w3`` and ``W3`` the short and the whole window chunk of
    window set 3."""
    parent: bytes
    """The key of the boundary before this one; empty at the first."""
    depth: int
    """Chunks from the start of the prefix to the boundary; 1 at the first."""
    nbytes: int
    """Exact length."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose chunks a tier sees."""

    digest: bytes
    """16 bytes; see :func:`kvloft.keys.geometry_digest`."""
    slot_bytes: tuple[int, ...]
    """Of every class of chunk (:meth:`kvloft.plan.ChunkPlan.slot_sizes`), greatest first."""
    has_full: bool = True
    """Whether the model has full chunks. The tier is prefix-closed then."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What a person wants to know: ``model``, ``kv_dtype``, ``tokens_per_chunk`` and so on."""


class Outcome(Enum):
    """How a put or a get has ended."""

    DONE = "done"
    MISSING = "missing"
    """A get: not there, or not any more."""
    DAMAGED = "damaged"
    """A get: torn, foreign, short, long or corrupt; it is removed, and what depends on it. The
    buffer holds rubbish."""
    REFUSED = "refused"
    """A put: no room could be made within the limit."""
    LATE = "late"
    """The deadline had passed before the work was begun, or the tier was closed."""
    FAILED = "failed"
    """The medium failed."""


CLASSES = {"f": "full", "w": "window", "W": "window", "s": "state"}
"""What people call a class of chunk, by the first letter of its code."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot; totals are since the tier was opened, by this process alone."""

    limit_bytes: int
    """Of whatever is in the place, all namespaces included; one that was lowered holds from the
    next opening on."""
    used_bytes: int
    """What the tier takes of its limit now, all namespaces and processes included."""
    chunks: int
    """Of this namespace, as far as this process knows."""
    queued_puts: int
    queued_put_bytes: int
    queued_gets: int
    puts: Mapping[str, int] = field(default_factory=dict)
    """Ended puts by :class:`Outcome` value."""
    gets: Mapping[str, int] = field(default_factory=dict)
    put_bytes: int = 0
    """Exact bytes of the puts that are done."""
    get_bytes: int = 0
    evicted_chunks: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    """What has gone wrong, by cause: ``checksum``, ``foreign``, ``short``, ``no_space`` …"""
    held: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of this namespace, by class (:data:`CLASSES`): chunks, and their exact bytes."""


class Tier(Protocol):
    """One namespace's view of a place. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """For logs and metrics: the type and where it is."""

    def holds(self, key: bytes, code: str) -> bool:
        """Whether the chunk is there, from memory and at once.

        Knows what was there when the tier was opened and what has come and gone since; what other
        processes do may show a little later. Full chunks are prefix-closed: where one is held, so
        are its ancestors.
        """

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Keep a copy of ``data[:chunk.nbytes]``; ``None`` if the queue is full.

        ``data`` is the whole slot, ``page_aligned(chunk.nbytes)`` bytes, best at an address that
        is a multiple of a page: then nothing has to be copied. It belongs to the tier
        until the future is done; its bytes beyond the chunk's may be overwritten. DONE means that
        every later get, by any process, finds all of the chunk or nothing of it; a chunk that is
        there already is DONE at once, whatever the queue. To keep the tier prefix-closed, a full
        chunk goes to REFUSED if its parent is neither held nor put before it and not yet done; so
        do window and state chunks with the full chunk of their own key, in a namespace that has
        full chunks.
        ``deadline`` is a time of ``time.monotonic()``: a put that has not begun by then is LATE.
        """

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        """Fill ``into[:chunk.nbytes]``; ``None`` if the queue is full.

        ``into`` is a whole slot like a put's ``data`` and belongs to the tier until the future is
        done, the deadline notwithstanding. DONE means that the bytes are, verified, those that were
        put. Gets go before puts; the queue that may be full is their own. A get is a use.
        """

    def contains(
        self, chunks: Sequence[Chunk], deadline: float | None = None
    ) -> Future[list[bool]] | None:
        """Whether each chunk is there, asking the place itself; ``None`` if the queue is full.

        All False where that can't be told by the deadline.
        """

    def delete(self, chunks: Sequence[Chunk]) -> Future[int] | None:
        """Remove chunks, and with each full chunk all that depends on it; ``None`` if the queue is
        full. The number of chunks that are gone for it."""

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """A hint: these were used just now."""

    def demote(self, chunks: Sequence[Chunk]) -> None:
        """A hint: these are worth less than all others and should go first."""

    def scan(self) -> Iterator[Chunk]:
        """Every chunk of the namespace, parents before children, as :meth:`holds` knows them.

        ``key`` and ``parent`` may be shortened to their first 16 bytes. Meant for tools and tests.
        """

    def stats(self) -> TierStats:
        """What the tier holds and has done."""

    def close(self, timeout: float = 5.0) -> None:
        """End: what is queued becomes LATE, what is under way is waited for, at most ``timeout``
        seconds. Idempotent. Afterwards, buffers of futures that are not done may still be in use;
        every call is answered as if nothing were held and the queue were full."""
