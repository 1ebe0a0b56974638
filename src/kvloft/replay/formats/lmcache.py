"""The log of look-ups that an LMCache server writes.

``lmcache server --lookup-hash-log-dir DIR`` writes files ``lookup_hashes_*.jsonl`` of one line for
each look-up: ``timestamp`` (seconds, Unix time), ``request_id``, ``model_name``, ``chunk_size``
(tokens; 256 unless set), ``seq_len`` (tokens of the prompt), ``dtypes``, ``shapes`` and
``chunk_hashes``. Described in ``lmcache/tools/cache_simulator/README.md`` of
github.com/LMCache/LMCache and written by ``lmcache/v1/mp_observability/subscribers/logging/
lookup_hash.py`` there.

Hashes are hexadecimal text; integers are taken too. ``lmcache/v1/multiprocess/token_hasher.py``
rolls them: each covers the one before it, so it names its whole prefix. There is one for each whole
chunk: a rest is in ``seq_len`` alone, and a prompt shorter than one chunk is not logged at all.
The model is no part of a hash but of what LMCache looks up, so prompts of two models share nothing.
A request's ``cache_salt`` is not logged: prompts that it kept apart in LMCache share here.
The log does not say what was answered; ``answer_tokens`` is 0.
"""

from __future__ import annotations

import msgspec

from kvloft.replay.formats.base import Count, Row, Ticks


class _Line(msgspec.Struct):
    timestamp: Ticks
    chunk_hashes: list[int | str]
    model_name: str = ""
    chunk_size: Count = 0
    seq_len: Count | None = None


_decode = msgspec.json.Decoder(_Line).decode


class LMCache:
    """``FORMATS["lmcache"]``."""

    name = "lmcache"
    marks = frozenset({"timestamp", "chunk_hashes"})
    fields = (
        "timestamp (seconds), seq_len, chunk_size (tokens), "
        "chunk_hashes (hexadecimal text or integers)"
    )
    tokens_per_block = 256
    ticks_per_second = 1

    def decode(self, line: bytes) -> Row:
        """Read one line."""
        it = _decode(line)
        return Row(it.timestamp, it.seq_len, 0, it.chunk_hashes, it.chunk_size, it.model_name)
