"""Sizes as people write them, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.units import PAGE_BYTES, ceil_div, format_size, page_aligned, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (2**70, 2**70),
        ("4096", 4096),
        ("1B", 1),
        ("1b", 1),
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        (" 64GIB ", 64 << 30),
        ("64G", 64 << 30),
        ("64Gi", 64 << 30),
        ("64GB", 64 * 10**9),
        ("1K", 1024),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("500MB", 500 * 10**6),
        ("1.5 GiB", 3 << 29),
        ("0.5KiB", 512),
        ("1.50TB", 15 * 10**11),
        ("2PiB", 2 << 50),
        ("007", 7),
    ],
)
def test_what_a_size_means(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    [
        0, -1, True, False, 1.0, 1.5, None, [], {}, b"1GiB", float("nan"), float("inf"),
        "", " ", "GiB", "0", "0GiB", "-1", "+1", "1.5", "0.3KiB", "1e9", "1,000", "1_000", "1.GiB",
        ".5GiB", "1 G iB", "1XiB", "1EiB", "0x10", "64GiB/s", "٣", "½GiB", "inf", "nan", "9" * 5000,
        "1." + "0" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_size(value)
    assert repr(value)[:40] in str(caught.value)
    assert len(str(caught.value)) < 150


@given(st.integers(1, 2**40), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_binary_units_are_powers_of_1024(number: int, unit: str) -> None:
    power = ["", "K", "M", "G", "T", "P"].index(unit[:1] if unit != "B" else "")
    assert parse_size(f"{number}{unit}") == number * 1024**power


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (15 << 20, "15.0 MiB"),
        (800 << 20, "800 MiB"),
        (64 << 30, "64.0 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_how_a_size_is_shown(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**80), st.integers(1, 2**40))
def test_ceil_div_is_the_least_multiple_that_covers(a: int, b: int) -> None:
    n = ceil_div(a, b)
    assert (n - 1) * b < a <= n * b


@given(st.integers(0, 2**60))
def test_pages_are_whole_and_no_more_than_needed(size: int) -> None:
    aligned = page_aligned(size)
    assert aligned % PAGE_BYTES == 0
    assert 0 <= aligned - size < PAGE_BYTES
