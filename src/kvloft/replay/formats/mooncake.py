"""The format of the traces published with Mooncake.

Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025; the files lie in
``FAST25-release/traces`` of github.com/kvcache-ai/Mooncake, the fields are explained in the README
beside them and in the paper's section on the trace. Every line is a request: ``timestamp`` in
milliseconds since the trace began, ``input_length`` and ``output_length`` in tokens, ``hash_ids``:
one number for every 512 tokens of the prompt, the last of which may be partial.

A published number stands for the block and all before it (each has one predecessor throughout the
published files); numbers come in the order in which they first appear, and reading leaves them as
they are. Other tools write the same fields with blocks of other lengths; the user has to say so.
"""

from __future__ import annotations

import msgspec

from kvloft.replay.formats.base import Count, Row, Ticks


class _Line(msgspec.Struct):
    timestamp: Ticks
    input_length: Count
    hash_ids: list[int]
    output_length: Count = 0


_decode = msgspec.json.Decoder(_Line).decode


class Mooncake:
    """``FORMATS["mooncake"]``."""

    name = "mooncake"
    marks = frozenset({"timestamp", "input_length", "hash_ids"})
    fields = "timestamp (milliseconds), input_length, output_length (tokens), hash_ids (integers)"
    tokens_per_block = 512
    ticks_per_second = 1000

    def decode(self, line: bytes) -> Row:
        """Read one line."""
        it = _decode(line)
        return Row(it.timestamp, it.input_length, it.output_length, it.hash_ids)
