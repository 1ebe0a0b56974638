"""What a trace format has to say of itself, and what a line of it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta

MAX_TOKENS = 2**31 - 1
"""Of a prompt or an answer; more is a mistake in the file."""

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ticks = Annotated[float, Meta(ge=0)]


class Row(NamedTuple):
    """One request as its line has it."""

    ticks: float
    """The time in the format's own unit."""
    prompt_tokens: int | None
    """``None`` if the line has nothing but whole blocks to tell it by."""
    answer_tokens: int
    hashes: Sequence[int | str]
    """One for each block of the prompt from its beginning; the last may stand for a partial block
    or, where the format leaves partial blocks out, be missing."""
    tokens_per_block: int = 0
    """0 if the line does not say it."""
    root: str = ""
    """What a prefix belongs to besides its tokens: prompts of different roots share nothing."""


class Format(Protocol):
    """A text format of one JSON object a line."""

    @property
    def name(self) -> str:
        """As the user writes it."""

    @property
    def marks(self) -> frozenset[str]:
        """Fields that a line must have to be taken for this format unasked."""

    @property
    def fields(self) -> str:
        """What a line needs, with units; for messages."""

    @property
    def tokens_per_block(self) -> int:
        """Where neither the line nor the user says it."""

    @property
    def ticks_per_second(self) -> int:
        """The unit of the time."""

    def decode(self, line: bytes) -> Row:
        """Read one line; raises ``ValueError`` (as msgspec does) if it is none of this format."""
