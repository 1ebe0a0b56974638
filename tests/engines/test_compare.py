"""The verdict on two runs: right where only rounding differs, wrong where anything else does."""

from __future__ import annotations

import math

import pytest

from kvloft.engines.vllm.compare import Output, compare

TOLERANCE = 0.1


def output(*steps: dict[int, float]) -> Output:
    """A run that samples the likeliest token of each step."""
    return Output(tuple(max(step, key=step.__getitem__) for step in steps), steps)


COLD = output({1: -0.5, 2: -1.5, 3: -2.0}, {4: -0.1, 5: -3.0, 6: -4.0})


def test_equal_runs_agree() -> None:
    verdict = compare([COLD], [COLD], TOLERANCE)
    assert verdict.agrees
    assert verdict.tokens_identical
    assert (verdict.steps, verdict.max_difference) == (2, 0.0)


def test_rounding_agrees_and_more_does_not() -> None:
    near = output({1: -0.55, 2: -1.45, 3: -2.0}, {4: -0.1, 5: -3.05, 6: -4.0})
    far = output({1: -0.7, 2: -1.5, 3: -2.0}, {4: -0.1, 5: -3.0, 6: -4.0})
    assert compare([COLD], [near], TOLERANCE).agrees
    verdict = compare([COLD], [far], TOLERANCE)
    assert verdict.tokens_identical
    assert math.isclose(verdict.max_difference, 0.2)
    assert not verdict.agrees


def test_a_candidate_that_only_one_side_lists_counts() -> None:
    other = output({1: -0.5, 2: -1.5, 9: -1.6}, {4: -0.1, 5: -3.0, 6: -4.0})
    assert not compare([COLD], [other], TOLERANCE).agrees


def test_a_near_tie_may_flip_and_ends_the_comparison() -> None:
    tie = output({1: -0.70, 2: -0.71, 3: -2.0}, {4: -0.1, 5: -3.0})
    flipped = output({1: -0.72, 2: -0.70, 3: -2.0}, {7: -0.1, 8: -3.0})
    verdict = compare([tie], [flipped], TOLERANCE)
    assert verdict.agrees
    assert not verdict.tokens_identical
    assert (verdict.flips[0].step, verdict.steps_not_compared) == (0, 1)


def test_any_other_flip_is_a_mismatch() -> None:
    flipped = output({1: -1.5, 2: -0.5, 3: -2.0}, {4: -0.1, 5: -3.0, 6: -4.0})
    assert not compare([COLD], [flipped], TOLERANCE).agrees
    unlisted = output({9: -0.5, 1: -0.5, 2: -1.5}, {4: -0.1, 5: -3.0, 6: -4.0})
    assert not compare([COLD], [unlisted], TOLERANCE).agrees


def test_runs_that_are_not_of_the_same_requests_are_an_error() -> None:
    with pytest.raises(ValueError, match="1 reference outputs but 2"):
        compare([COLD], [COLD, COLD], TOLERANCE)
    with pytest.raises(ValueError, match="2 reference tokens but 1"):
        compare([COLD], [output(dict(COLD.logprobs[0]))], TOLERANCE)
