"""The connector on the real engine: same answers, hits where there should be, nothing left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloft.engines.vllm.models import SHAPES
from tests.e2e.conftest import HERE, engine_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
Run = Callable[..., Any]


def at_rest(result: dict[str, Any]) -> bool:
    """Whether an engine that has nothing to do holds nothing but chunks."""
    keys = ("pending", "pins", "requests", "unfinished", "pending_push")
    return not any(result[key] for key in keys)


QUICK = ("gemma4", "llama4")
"""Shapes whose tests are not slow ones; other tests restore on ``uniform`` and ``qwen3next``."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(SHAPES)
    ],
)
def test_restored_answers_agree_with_cold_ones(name: str, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "kvloft.engines.vllm.trial", "--shape", name]
    done = subprocess.run(
        [*command, "--cache", str(cache), "--json", str(out)],
        env=engine_environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    restored = json.loads(out.read_text())["passes"]["restored"]
    assert restored["comparison"]["agrees"], restored["comparison"]
    assert restored["restored_tokens"] > restored["prompt_tokens"] * 0.5
    assert restored["loaded_bytes"] > 0


@pytest.mark.parametrize(
    "name", ["corrupted", pytest.param("corrupted_all", marks=pytest.mark.slow)]
)
def test_corrupted_slots_are_noticed(name: str, run_scenario: Run) -> None:
    for shape, row in run_scenario(name).items():
        assert row["restored"] > 0, shape
        assert not row["agrees"], shape


@pytest.mark.parametrize(
    "name", ["restored_bytes", pytest.param("restored_bytes_all", marks=pytest.mark.slow)]
)
def test_restored_bytes_are_the_stored_ones(name: str, run_scenario: Run) -> None:
    for shape, row in run_scenario(name).items():
        assert row["compared"] > 40, shape
        assert row["different"] == 0, shape


@pytest.mark.slow
def test_prompts_around_a_chunk(run_scenario: Run) -> None:
    result = run_scenario("lengths")
    for row in result["rows"]:
        assert row["restored"] == row["expected"], row
        assert row["agrees"], row
    assert at_rest(result)


@pytest.mark.parametrize(
    "name", ["small_budget", pytest.param("small_budget_states", marks=pytest.mark.slow)]
)
def test_eviction_under_a_small_budget(name: str, run_scenario: Run) -> None:
    for shape, row in run_scenario(name).items():
        assert row["agrees"], shape
        assert row["evicted"] > 0, shape
        assert row["restored"] > 0, shape
        assert row["most_bytes"] <= row["budget_bytes"], shape
        assert at_rest(row), shape


@pytest.mark.slow
def test_preemption_under_memory_pressure(run_scenario: Run) -> None:
    result = run_scenario("preemption")
    assert result["preemptions"] > 0
    assert result["restored"] > 0
    assert result["verdict"]["agrees"], result["verdict"]
    assert at_rest(result)


def test_aborts_at_every_stage(run_scenario: Run) -> None:
    result = run_scenario("aborts")
    assert result["aborted"] > 100
    assert at_rest(result["after"]), result["after"]
    assert result["agrees"]
    assert at_rest(result), result


@pytest.mark.slow
def test_resets(run_scenario: Run) -> None:
    result = run_scenario("resets")
    assert result["kept"]
    assert result["held_bytes"] > 0
    assert result["emptied"]
    assert result["empty"]["live_bytes"] == 0
    assert result["empty"]["chunks"] == 0
    assert result["restored_after_reset"] == 0
    assert result["restored"] > 0
    assert result["agrees"]


def test_ngram_speculation(run_scenario: Run) -> None:
    result = run_scenario("speculation")
    assert result["agrees"]
    assert result["restored"] > result["tokens"] / 3
    assert at_rest(result), result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_ranks", "two_ranks_states"])
def test_tensor_parallel(name: str, run_scenario: Run) -> None:
    result = run_scenario(name, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert result["agrees"]
    assert result["restored"] > result["tokens"] / 3
    assert not result["names_while_running"]


EXPECTED_IN_ERRORS = {
    "unknown_option": ("block_per_chunk", "blocks_per_chunk"),
    "both_sizes": ("blocks_per_chunk", "block_size"),
    "bad_block_size": ("300", "256", "512"),
    "zero_chunk": ("blocks_per_chunk", "0"),
    "too_little": ("cpu_bytes_to_use", "256 KiB"),
    "too_much": ("100 TiB",),
    "no_size": ("cpu_bytes_to_use",),
}


def test_refusals(run_scenario: Run) -> None:
    result = run_scenario("refusals")
    for name, words in EXPECTED_IN_ERRORS.items():
        message = result["errors"][name]
        assert all(word in message for word in words), (name, message)
    assert not result["shared_memory"]


def test_an_engine_that_cannot_resume_is_refused(run_scenario: Run) -> None:
    assert "can't continue from cached context" in run_scenario("mla")["error"]


def test_states_need_prefix_caching(run_scenario: Run) -> None:
    assert "enable_prefix_caching=True" in run_scenario("states_without_caching")["error"]


def test_nothing_is_left_of_a_killed_engine(cache: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "scenarios.py"), "until_killed", str(cache)],
        env=engine_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline()) and "serving" not in line:
            pass
        assert "serving" in line
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
