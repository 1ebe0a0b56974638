"""The benchmarks run and say what they promise; what they measure is not for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloft.bench.timing import percentiles, speed_ratio, take_turns
from kvloft.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    assert main(["bench", *args, "--quick", "--json"]) == 0
    captured = capsys.readouterr()
    result: dict[str, Any] = json.loads(captured.out)
    assert result["benchmark"] == args[0]
    assert result["quick"] is True
    assert result["machine"]["cores"] >= 1
    return result, captured.err


def test_host(capsys: pytest.CaptureFixture[str]) -> None:
    result, progress = run(capsys, "host")
    assert {case["ids"] for case in result["cases"]} == {"runs", "shuffled"}
    assert {case["page_bytes"] for case in result["cases"]} == {4096, 65536}
    for case in result["cases"]:
        assert case["stride_bytes"] >= case["page_bytes"]
        assert min(case["store"], case["load"], case["memcpy_gb_per_s"]) > 0
    assert "64.0 KiB" in progress


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn of what is not ours to mend.
def test_lookup(capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = run(capsys, "lookup")
    assert result["lookup"]["groups"] == 9
    assert [row["tokens"] for row in result["lookup"]["rows"]] == [10_000, 50_000]
    assert result["bookkeeping"]["kvloft_us_per_chunk"] > 0
    for name in ("uniform", "mixed"):
        part = result["tail"][name]
        assert part["resident_chunks"] >= 19_000
        assert part["evicted_chunks"] > 0
        assert part["hits"] > 0
        for clock in ("wall", "processor"):
            calls = part["calls"][clock]
            assert {"all", "match", "begin_load", "begin_store", "report store"} <= set(calls)
            assert calls["all"]["p50_us"] <= calls["all"]["p999_us"] <= calls["all"]["max_us"]
    for row in result["held"]:
        assert 1 <= row["ratio"] < 1.02


def test_a_table_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert main(["bench", "host", "--quick", "--json", str(path)]) == 0
    assert "memcpy GB/s" in capsys.readouterr().out
    assert json.loads(path.read_text())["benchmark"] == "host"


def test_a_file_that_can_not_be_written_shows_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "host", "--json", str(tmp_path / "no" / "host.json")]) == 2
    assert "no/host.json" in capsys.readouterr().err


def test_sides_take_turns() -> None:
    order: list[str] = []
    seconds = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert order == ["a", "b"] * 3
    assert [len(s) for s in seconds.values()] == [2, 2]


def test_the_ratio_is_the_median_over_rounds() -> None:
    assert speed_ratio([1.0, 1.0, 1.0], [2.0, 3.0, 100.0]) == 3.0


def test_percentiles_are_of_single_calls() -> None:
    found = percentiles([n / 1e6 for n in range(1001)])
    assert found == {"calls": 1001, "p50_us": 500, "p99_us": 990, "p999_us": 999, "max_us": 1000}
