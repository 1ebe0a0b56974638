"""Tenants and adapters never get each other's cache: in host memory, and from disk later on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def run(name: str, cache: Path, folder: Path) -> Any:
    """Run one scenario in a process of its own; what it prints."""
    return run_script("isolation_scenarios.py", name, cache, folder, environment={})


def test_salts_keep_tenants_apart(cache: Path, tmp_path: Path) -> None:
    """The same prompt with another ``cache_salt``, or with none, is another prompt."""
    result = run("salts", cache, tmp_path)
    for nobodys in ("first", "memory_other", "disk_other", "disk_unsalted"):
        assert result[nobodys] == 0, nobodys
    for own in ("memory_same", "memory_other_again", "disk_same"):
        assert result[own] > result["prompt"] * 0.8, own
    assert all(result["agrees"].values()), result["agrees"]


@pytest.mark.slow
def test_adapters_keep_to_themselves(cache: Path, tmp_path: Path) -> None:
    """Two adapters and the base model: each finds what it has left itself, and nothing else."""
    result = run("adapters", cache, tmp_path)
    assert all(result["differ"].values()), "these adapters would not show a mix-up"
    for name, restored in result["cold"].items():
        assert restored == 0, name
    assert result["unknown"] == 0
    for place in ("memory", "disk"):
        for name, restored in result[place].items():
            assert restored > result["prompt"] * 0.8, (place, name)
    assert all(result["agrees"].values()), result["agrees"]
