"""Faults in host memory, canaries, drafters, features and the life cycle, on the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import run_script
from tests.e2e.test_engine import at_rest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
Run = Callable[..., Any]


@pytest.fixture
def run(cache: Path, tmp_path: Path) -> Run:
    """Run one of ``fault_scenarios.py`` in a process of its own; what it prints."""

    def run_scenario(name: str, **more: str) -> Any:
        return run_script("fault_scenarios.py", name, cache, tmp_path, environment=more)

    return run_scenario


FAILS = {
    "load_fails": {"load/copy"},
    "load_fails_half_way": {"load/copy"},
    "slot_corrupt": {"load/checksum"},
    "blocks_wrong": {"load/blocks"},
    "store_fails": {"store/copy"},
}
"""What is counted for each fault; nothing for those that are only late or said twice."""
TOLD = {"load_fails": "copy", "slot_corrupt": "checksum", "blocks_wrong": "blocks",
        "store_fails": "store"}  # fmt: skip
"""The cause of the one line in the log; that of ``load_fails_half_way`` has been told already."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("host_full", marks=pytest.mark.slow),
        "host_windows",
        "host_states",
        pytest.param("host_local", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_host_memory_never_shows_in_an_answer(name: str, run: Run) -> None:
    result = run(name)
    for fault, row in result.items():
        assert row["agrees"], fault
        assert row["agrees_again"], fault
        assert at_rest(row), (fault, row)
        assert set(row["failures"]) == FAILS.get(fault, set()), (fault, row)
        assert row["log"] == ({TOLD[fault]: 1} if fault in TOLD else {}), (fault, row)
        # What has failed is stored again and restored from then on.
        assert row["restored_again"] > 0, fault
        if fault in FAILS and fault != "store_fails":
            assert row["failed_loads"] > 0, fault
            assert row["hits"] > 0, fault


def test_one_rank_of_two_fails(run: Run) -> None:
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    result = run("one_rank_fails", **more)
    assert result["agrees"] == [True, True]
    assert set(result["failures"]) == {"copy"}
    assert result["failures"]["copy"] >= 3


@pytest.mark.parametrize("name", ["canaries", pytest.param("canaries_all", marks=pytest.mark.slow)])
def test_canaries_tell_wrong_bytes_from_rounding(name: str, run: Run) -> None:
    for shape, row in run(name).items():
        assert row["agrees"], shape
        assert row["restored"] == 0, shape
        assert row["compared"] > 10, shape
        assert row["differences"] == 0, shape
        assert row["differences_when_wrong"] > 0, shape
        assert not row["loading"], shape
        assert at_rest(row), shape


def test_drafters_with_kv_of_their_own(run: Run) -> None:
    result = run("drafters")
    for method, row in result.items():
        assert row["agrees"], method
        assert row["restored"] > row["tokens"] * 0.8, method
        assert at_rest(row), method
    # The draft model is the target itself: unless its KV were restored rightly, it would be wrong.
    assert result["draft_model"]["accepted_when_restored"] >= 40


def test_priorities_pieces_retention_and_structured_output(run: Run) -> None:
    result = run("features")
    assert all(verdict["agrees"] for verdict in result["agree"]), result["agree"]
    assert result["preemptions"] > 0
    assert result["restored"] > 0
    first, second = result["structured"]
    assert first == second
    assert first in ("the and", "and the", "the the", "and and")
    assert at_rest(result)


def test_life_cycle(run: Run) -> None:
    result = run("life_cycle")
    assert result["loads_at_reset"] > 0
    assert not result["reset_under_load"]
    assert at_rest(result["after_reset"])
    assert result["reset"]
    for name in ("new_weights", "reloaded_weights"):
        assert result[name]["restored_at_first"] == 0, name
        assert result[name]["agrees"], name
        assert result[name]["restored"] > 0, name
    assert result["new_weights"]["matter"]
    assert result["after_sleep"]["agrees"]
    assert at_rest(result["after_sleep"])
    assert result["loads_at_end"] > 0
    assert result["seconds_to_end"] < 15
    assert not result["threads"]
