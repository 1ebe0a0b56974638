"""What the docs say of the tests is true."""

from __future__ import annotations

import re
from pathlib import Path

from kvloft.testing.stress import MODELS
from tests.engines.test_stress import ONE_FAULT

ROOT = Path(__file__).parents[1]
RESILIENCE = (ROOT / "docs" / "resilience.md").read_text(encoding="utf-8")


def test_the_fault_matrix_has_a_test_for_every_cell() -> None:
    lines = RESILIENCE.partition("| fault | row |")[2].splitlines()
    columns = re.findall(r"`(\w+)`", lines[0])
    rows = [line for line in lines[2:] if line.startswith("|")]
    rows = rows[: next((i for i, line in enumerate(rows) if line.count("|") != 10), len(rows))]
    assert set(columns) == set(MODELS)
    assert [re.findall(r"`(\w+)` \|", row)[-1] for row in rows] == list(ONE_FAULT)
    assert all(cell.strip().startswith("✓") for row in rows for cell in row.split("|")[4:-1])


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", RESILIENCE)
    assert len(named) > 5
    for path, test in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, (path, test)
