"""Whether pages computed twice hold the same numbers, whatever type these are of.

Computing a prefix again gives the same keys and values up to rounding, in other words other bytes.
What rounding hardly touches is the byte with the sign and the exponent: the highest one of a bf16,
fp16 or fp32 number, the only one of an fp8 number. So bytes are compared in four lanes, by their
place modulo 4, and the best lane counts. Of equal numbers nearly all of its bytes are equal; of
unrelated ones about a quarter is, as their signs are a coin's and their sizes alike.

Pieces of a page are judged one by one, and a page by its pieces: a token that a router has sent to
another expert is not a wrong page; a page that belongs to other tokens has hardly a piece right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_LANES = 4
_PIECE = 512
"""Bytes: 128 numbers in a lane, for a standard deviation of the share of about 0.04."""
_LEAST_EQUAL = 0.5
MOST_UNLIKE = 0.25
"""Share of a page's pieces that may be unlike before the page is."""


def unlike(found: Bytes, expected: Bytes) -> float:
    """The share of unlike pieces in the page that differs most; both ``(pages, bytes)``."""
    pages, nbytes = expected.shape
    if not pages or not nbytes:
        return 0.0
    piece = _PIECE if nbytes >= _PIECE else nbytes
    pieces = nbytes // piece
    # A rest shorter than a piece is left out, unless it is all there is.
    equal = found[:, : pieces * piece] == expected[:, : pieces * piece]
    equal = equal.reshape(pages, pieces, piece)
    whole = piece // _LANES * _LANES
    if whole:
        lanes = equal[:, :, :whole].reshape(pages, pieces, whole // _LANES, _LANES)
        best = lanes.mean(axis=2).max(axis=2)
    else:
        best = equal.mean(axis=2)
    return float((best < _LEAST_EQUAL).mean(axis=1).max())
