"""What a request trace says: when somebody asked, and which prefixes the prompts share."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    time: float
    """Seconds since the trace began."""
    prompt_tokens: int
    answer_tokens: int
    blocks: Sequence[int]
    """One id for each block of the prompt, from its beginning; the last block may be partial. An id
    names the whole prefix that ends with its block: equal ids mean equal tokens up to there."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they were asked."""

    name: str
    tokens_per_block: int
    requests: Sequence[Request] = field(repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(request.prompt_tokens for request in self.requests)


def boundary_ids(request: Request, tokens_per_block: int, tokens_per_chunk: int) -> array[int]:
    """One id for each whole chunk of the prompt; equal ids mean equal prefixes.

    A chunk's end need not be a block's: a prefix that ends within a block is known to be shared
    only by prompts that share that whole block, so it is named by the block and where it ends.
    Prompts that part inside a block are thus taken to part at its beginning, never later.
    """
    out = array("q")
    for end in range(tokens_per_chunk, request.prompt_tokens + 1, tokens_per_chunk):
        block = (end - 1) // tokens_per_block
        if block >= len(request.blocks):
            break
        out.append(request.blocks[block] * tokens_per_block + end - 1 - block * tokens_per_block)
    return out


def fitted(trace: Trace, unit_tokens: int) -> Trace:
    """The trace with blocks whose ends are ends of units too, or the other way round.

    Where neither length divides the other, nearly no end of a unit would be the end of a block, and
    prompts that share blocks would seem to share less than they do. So the blocks are stretched to
    whole units, and the prompts with them.
    """
    size = trace.tokens_per_block
    if size % unit_tokens == 0 or unit_tokens % size == 0:
        return trace
    longer = -(-size // unit_tokens) * unit_tokens
    requests = [
        Request(r.time, r.prompt_tokens * longer // size, r.answer_tokens, r.blocks)
        for r in trace.requests
    ]
    return Trace(trace.name, longer, requests)
