"""Whether two runs of the same prompts gave the same answers, up to rounding.

A restored cache holds the very bytes that were stored, yet a resumed run isn't bit-identical to
one that read the whole prompt: matrices have other heights and attention other tile edges, so sums
of 16-bit numbers are formed in another order. The same happens when the engine hits its own prefix
cache, with no connector at all. That run is the yardstick: what it differs by is noise, and a
restored run may differ by a small multiple of it.

So each shape states a tolerance in units of log-probability, chosen from a measurement of the noise
and below what a wrong cache causes (:mod:`kvloft.engines.vllm.models` has both numbers). Two
rules turn it into a verdict:

* At each step the candidates for the next token are compared, in both directions. A candidate which
  only one side lists has, on the other side, at most the probability of the least one listed there,
  which bounds the difference from below.
* Where the sampled tokens differ, this step is the last one compared: from there on the runs
  continue different texts. If the reference's log-probabilities of both tokens are within twice the
  tolerance, rounding may have exchanged them; the flip is reported and the verdict stands. Any
  other flip is a mismatch.

Nothing here imports the engine, so that the rules can be tested without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """What one request produced."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Per generated token, the log-probabilities of the likeliest candidates by token id."""


@dataclass(frozen=True, slots=True)
class Flip:
    """The first step of one request at which the two runs sampled different tokens."""

    request: int
    step: int
    expected: int
    found: int
    margin: float | None
    """By how much the reference preferred ``expected``; None if it didn't list ``found`` at all."""
    near_tie: bool
    """Whether rounding alone can explain it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a run is from its reference."""

    tolerance: float
    requests: int
    steps: int
    """Generated tokens whose log-probabilities were compared."""
    steps_not_compared: int
    """Generated tokens behind a flip."""
    max_difference: float
    mean_difference: float
    """Mean over steps of the step's largest difference."""
    flips: tuple[Flip, ...] = field(default=())

    @property
    def tokens_identical(self) -> bool:
        """Whether every request produced exactly the reference's tokens."""
        return not self.flips

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        return self.max_difference <= self.tolerance and all(f.near_tie for f in self.flips)

    def as_json(self) -> dict[str, Any]:
        """The fields and verdicts as plain values."""
        return {
            "agrees": self.agrees,
            "tokens_identical": self.tokens_identical,
            "tolerance": self.tolerance,
            "requests": self.requests,
            "steps": self.steps,
            "steps_not_compared": self.steps_not_compared,
            "max_difference": self.max_difference,
            "mean_difference": self.mean_difference,
            "flips": [
                {
                    "request": f.request,
                    "step": f.step,
                    "expected": f.expected,
                    "found": f.found,
                    "margin": f.margin,
                    "near_tie": f.near_tie,
                }
                for f in self.flips
            ],
        }


def compare(
    reference: Sequence[Output], candidate: Sequence[Output], tolerance: float
) -> Comparison:
    """Compare ``candidate`` with ``reference``, request by request.

    Raises:
        ValueError: The runs have different numbers of requests, or one stopped early although its
            tokens are the same: then they weren't runs of the same prompts and settings.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"{len(reference)} reference outputs but {len(candidate)} candidates")
    differences: list[float] = []
    flips: list[Flip] = []
    skipped = 0
    for number, (expected, found) in enumerate(zip(reference, candidate, strict=True)):
        flip = _flip(number, expected, found, tolerance)
        if flip is not None:
            flips.append(flip)
        compared = len(expected.tokens) if flip is None else flip.step + 1
        skipped += len(expected.tokens) - compared
        differences.extend(
            _difference(expected.logprobs[step], found.logprobs[step]) for step in range(compared)
        )
    return Comparison(
        tolerance=tolerance,
        requests=len(reference),
        steps=len(differences),
        steps_not_compared=skipped,
        max_difference=max(differences, default=0.0),
        mean_difference=sum(differences) / len(differences) if differences else 0.0,
        flips=tuple(flips),
    )


def _flip(number: int, expected: Output, found: Output, tolerance: float) -> Flip | None:
    for step, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        if a == b:
            continue
        listed = expected.logprobs[step]
        margin = listed[a] - listed[b] if a in listed and b in listed else None
        near_tie = margin is not None and abs(margin) <= 2 * tolerance
        return Flip(number, step, a, b, margin, near_tie)
    if len(expected.tokens) != len(found.tokens):
        raise ValueError(
            f"request {number}: {len(expected.tokens)} reference tokens but {len(found.tokens)}"
        )
    return None


def _difference(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """The largest difference over all candidates that either side lists."""
    floor_a, floor_b = min(a.values()), min(b.values())
    shared = (abs(a[token] - b[token]) for token in a.keys() & b.keys())
    only_a = (a[token] - floor_b for token in a.keys() - b.keys())
    only_b = (b[token] - floor_a for token in b.keys() - a.keys())
    return max(0.0, *shared, *only_a, *only_b)
