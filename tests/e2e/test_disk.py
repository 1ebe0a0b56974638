"""The disk tier on the real engine: restarts, sharing, damage, trouble; answers stay the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import HERE, engine_environment, run_script
from tests.e2e.disk_scenarios import size_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TWO_RANKS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def command(name: str, cache: Path, folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "disk_scenarios.py"), name, str(cache), str(folder)]


def run(name: str, cache: Path, folder: Path, **more: str) -> Any:
    """Run one scenario in a process of its own; what it prints."""
    return run_script("disk_scenarios.py", name, cache, folder, timeout=300, environment=more)


def start(name: str, cache: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(name, cache, folder), env=engine_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) and word not in line:
        pass
    assert word in line


# --- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("uniform", marks=pytest.mark.slow),
        pytest.param("gemma4", marks=pytest.mark.slow),  # As after a kill, below.
        "qwen3next",
    ],
)
def test_a_new_engine_restores_from_disk(name: str, cache: Path, tmp_path: Path) -> None:
    run(f"life_{name}", cache, tmp_path)
    passed = run(f"life_{name}", cache, tmp_path)["passes"]["restarted"]
    assert passed["comparison"]["agrees"], passed["comparison"]
    assert passed["restored_tokens"] > passed["prompt_tokens"] * 0.6


@pytest.mark.slow
def test_two_ranks_restore_from_disk(cache: Path, tmp_path: Path) -> None:
    run("life_two_ranks", cache, tmp_path, **TWO_RANKS)
    passed = run("life_two_ranks", cache, tmp_path, **TWO_RANKS)["passes"]["restarted"]
    assert passed["comparison"]["agrees"], passed["comparison"]
    assert passed["restored_tokens"] > passed["prompt_tokens"] * 0.6


def test_a_killed_engine_leaves_what_it_has_written(cache: Path, tmp_path: Path) -> None:
    process = start("until_killed", cache, tmp_path)
    try:
        wait_for(process, "serving")
        time.sleep(1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    passed = run("life_gemma4", cache, tmp_path)["passes"]["restarted"]
    assert passed["comparison"]["agrees"], passed["comparison"]
    assert passed["restored_tokens"] > passed["prompt_tokens"] * 0.6


# --- sharing and identity -------------------------------------------------------------------------


def test_two_engines_share_one_directory(cache: Path, tmp_path: Path) -> None:
    limit = 12 << 20
    first = start("until_told", cache, tmp_path)
    second = None
    sizes = []
    try:
        wait_for(first, "ready")
        second = start("until_told", cache, tmp_path)
        wait_for(second, "ready")
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            sizes.append(size_of(tmp_path / "disk"))
            time.sleep(0.02)
        (tmp_path / "stop").touch()
        results = [
            json.loads(p.communicate(timeout=60)[0].splitlines()[-1]) for p in (first, second)
        ]
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate(timeout=30)
    assert max(sizes) <= limit
    assert max(sizes) > limit / 2
    for result in results:
        assert result["agrees"]
        assert result["promoted"] > 0
    # The second engine has computed none of it before it found it.
    assert (results[0]["first"], results[1]["first"]) == (True, False)
    assert results[1]["restored"][0] > 0


def test_other_weights_under_the_same_path_miss(cache: Path, tmp_path: Path) -> None:
    result = run("other_weights", cache, tmp_path)
    assert result["first"] == 0
    assert result["moved"] > 0
    assert result["new_weights"] == 0


@pytest.mark.slow
def test_a_namespace_stands_for_the_weights(cache: Path, tmp_path: Path) -> None:
    result = run("namespaces", cache, tmp_path)
    assert result["first"] == 0
    assert result["again"] > 0
    assert result["other"] == 0
    assert result["other_again"] > 0


@pytest.mark.slow
def test_a_reset_hides_what_is_on_disk_until_the_next_start(cache: Path, tmp_path: Path) -> None:
    result = run("resets", cache, tmp_path)
    assert result["after_reset"] == 0
    assert result["after_restart"] > 0


# --- damage and trouble ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "damaged",
        pytest.param("damaged_full", marks=pytest.mark.slow),
        pytest.param("damaged_windows", marks=pytest.mark.slow),
    ],
)
def test_damage_is_a_miss(name: str, cache: Path, tmp_path: Path) -> None:
    result = run(name, cache, tmp_path)
    whole = result.pop("none")
    assert whole["agrees"]
    assert whole["restored"] > 0
    assert not whole["faults"]
    for damage, row in result.items():
        assert row["agrees"], damage
        assert row["restored"] < whole["restored"] or damage == "extended", damage
        assert row["restored_again"] >= row["restored"], damage
        # Each cause is said once, however many chunks and requests it has met.
        assert all(count == 1 for count in row["log"].values()), (damage, row["log"])
        # A record of zeros is that of a free slot; what it hides is lost, but nothing is wrong.
        if damage not in ("removed", "zeroed"):
            assert row["faults"], damage
            assert set(row["log"]) == set(row["faults"]), damage


@pytest.mark.parametrize("name", ["failing_most", pytest.param("failing", marks=pytest.mark.slow)])
def test_trouble_never_shows_in_an_answer(name: str, cache: Path, tmp_path: Path) -> None:
    result = run(name, cache, tmp_path)
    for trouble, row in result.items():
        assert row["agrees"], trouble
        assert all(count == 1 for count in row["log"].values()), (trouble, row["log"])
        assert row["seconds"] < 60, trouble
        assert row["seconds_to_end"] < 20, trouble
        if trouble not in ("slow", "hangs"):
            assert row["faults"], trouble
    for trouble in {"slow", "hangs"} & result.keys():
        assert result[trouble]["late"] > 0, trouble
    assert result["reads_fail"]["promoted"] == 0
    assert result["vanished"]["promoted"] == 0


# --- refusals -------------------------------------------------------------------------------------


def test_disks_that_make_no_sense_are_refused(cache: Path, tmp_path: Path) -> None:
    result = run("refusals", cache, tmp_path)
    for name, words in {
        "file": ("path", str(tmp_path / "file")),
        "tiny": ("max_bytes", "64"),
        "type": ("'tape'", "disk"),
        "relative": ("path", "'here'", "absolute"),
    }.items():
        assert all(word in result["errors"][name] for word in words), result["errors"][name]
    assert not result["shared_memory"]


def test_a_random_hash_seed_is_refused(cache: Path, tmp_path: Path) -> None:
    error = run("random_seed", cache, tmp_path)["error"]
    assert "PYTHONHASHSEED" in error
    assert "sha256" in error
