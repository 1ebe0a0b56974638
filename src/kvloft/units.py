"""Sizes and counts as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

PAGE_BYTES = 4096
"""Slots start and end on multiples of this: the unit of direct I/O and of the system's memory."""

_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmgtp]i?b?|b)?\s*", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(value: object) -> int:
    """Bytes of an integer or of text such as ``"64GiB"``, ``"1.5 GiB"``, ``"500MB"`` or ``"4096"``.

    ``KiB``, ``MiB``, … and the bare letters ``K``, ``M``, … are powers of 1,024; ``KB``, ``MB``, …
    are powers of 1,000. Raises ``ValueError`` for everything else, booleans and floats included,
    and for text that does not come to a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value > 0:
            return value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, suffix = Fraction(match[1]), (match[2] or "").lower()
        base = 1000 if len(suffix) == 2 and suffix[1] == "b" else 1024
        size = number * base ** _POWERS[suffix[:1]]
        if size.denominator == 1 and size > 0:
            return int(size)
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise ValueError(f"{shown} is not a size: write whole bytes or text such as '64GiB'")


def format_size(size: int | float) -> str:
    """A size in bytes with a binary unit and three significant digits: ``1.50 MiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{int(value)} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up; ``b`` is positive."""
    return -(-a // b)


def page_aligned(size: int) -> int:
    """``size`` rounded up to whole pages of memory."""
    return ceil_div(size, PAGE_BYTES) * PAGE_BYTES
