"""Multi-turn conversations over the package's own documents, as token ids.

The prompts of a trial look like what a chat server sees: two sets of instructions, conversations
that grow turn by turn on top of them, and forks at several depths. They are given to the engine as
token ids, so that the lengths are exact: 640 to 3,500 tokens, ending before, at and behind block
edges.
"""

from collections.abc import Callable, Sequence

Encode = Callable[[str], Sequence[int]]

LONGEST = 3500


def conversations(encode: Encode, documents: Sequence[str]) -> list[list[int]]:
    """Return the prompts of one trial, in the order in which they would arrive.

    Args:
        encode: Text to token ids.
        documents: Texts to cut turns from; together at least 7,000 tokens.

    Raises:
        ValueError: The documents are too short.
    """
    source = _Source(encode, documents)
    support = source.take(640)
    first = support + source.take(270)
    second = first + source.take(690)
    third = second + source.take(809)
    other = support + source.take(513)
    retried = other + source.take(400)
    asked = other + source.take(447)
    manual = source.take(1700)
    long = manual + source.take(LONGEST - 1700)
    late = manual + source.take(221)
    return [support, first, other, second, manual, retried, asked, third, long, late]


class _Source:
    """Hands out successive pieces of the documents, so that no two turns repeat each other."""

    def __init__(self, encode: Encode, documents: Sequence[str]) -> None:
        self._tokens = list(encode("\n".join(documents)))
        self._next = 0

    def take(self, count: int) -> list[int]:
        piece = self._tokens[self._next : self._next + count]
        if len(piece) < count:
            raise ValueError(
                f"the documents have {len(self._tokens)} tokens, fewer than the conversations need"
            )
        self._next += count
        return piece
