"""The format of Alibaba's anonymised traces of Qwen on Bailian.

Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025; the README of
github.com/alibaba-edu/qwen-bailian-usagetraces-anon specifies the files
(``qwen_traceA_blksz_16.jsonl`` and its siblings). Every line is a request: ``chat_id``,
``parent_chat_id`` (-1 for a conversation's first), ``timestamp`` in seconds since the trace began,
``input_length`` and ``output_length`` in tokens, ``type`` (text, search, image, file; later files
have more), ``turn``, and ``hash_ids``: one number for every 16 tokens of the prompt.

The README says that the salted SipHash is applied "to each block": a number stands for the tokens
of one block, not for what comes before it, and the same number may turn up after different
beginnings. Reading therefore chains them. ``docs/qa-context-growth-pattern.md`` in the same place
says that the last block of a prompt is padded before it is hashed, so a follow-up rarely repeats
its parent's last number; nothing is made up for that here.

Only times, lengths and numbers are used: what prompts share is in the numbers already.
"""

from __future__ import annotations

import msgspec

from kvloft.replay.formats.base import Count, Row, Ticks


class _Line(msgspec.Struct):
    timestamp: Ticks
    input_length: Count
    hash_ids: list[int]
    chat_id: int
    output_length: Count = 0
    parent_chat_id: int = -1


_decode = msgspec.json.Decoder(_Line).decode


class Bailian:
    """``FORMATS["bailian"]``."""

    name = "bailian"
    marks = frozenset({"timestamp", "input_length", "hash_ids", "chat_id"})
    fields = (
        "chat_id, timestamp (seconds), input_length, output_length (tokens), hash_ids (integers)"
    )
    tokens_per_block = 16
    ticks_per_second = 1

    def decode(self, line: bytes) -> Row:
        """Read one line."""
        it = _decode(line)
        return Row(it.timestamp, it.input_length, it.output_length, it.hash_ids)
