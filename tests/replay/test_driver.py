"""Replays against counts made by hand, by brute force and by the loft's own books."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloft.catalog.policies import POLICIES
from kvloft.cli.main import main
from kvloft.errors import KVLoftError
from kvloft.geometry import load
from kvloft.plan import ChunkPlan
from kvloft.replay import study as study_module
from kvloft.replay.driver import EngineCache, Setting, replay
from kvloft.replay.formats import read_trace
from kvloft.replay.study import Study, everything, study
from kvloft.replay.trace import Request, Trace, boundary_ids, fitted
from kvloft.testing import audit

GIB = 1 << 30
LLAMA = ChunkPlan(load("llama-3.1-8b"), 512)
GEMMA = ChunkPlan(load("gemma-4-31b"), 512)
QWEN = ChunkPlan(load("qwen3-next-80b"), 544)


def trace_of(prompts: list[list[int]], size: int = 512) -> Trace:
    """One request for each prompt, one token longer than its blocks."""
    requests = [
        Request(float(at), len(blocks) * size + 1, 10, blocks) for at, blocks in enumerate(prompts)
    ]
    return Trace("made by hand", size, requests)


def chained(choices: list[list[int]]) -> list[list[int]]:
    """Prompts as ids that name their prefixes, from what is said at each place."""
    names: dict[tuple[int, ...], int] = {}
    return [
        [names.setdefault(tuple(said[: at + 1]), len(names)) for at in range(len(said))]
        for said in choices
    ]


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(choices=PROMPTS, policy=st.sampled_from(list(POLICIES)))
def test_with_room_for_all_every_known_prefix_is_restored(
    choices: list[list[int]], policy: str
) -> None:
    prompts = chained(choices)
    run = replay(trace_of(prompts), Setting(LLAMA, policy, 64 * GIB), measured_from=0)
    known: set[int] = set()
    expected = 0
    for blocks in prompts:
        depth = 0
        while depth < len(blocks) and blocks[depth] in known:
            depth += 1
        expected += depth
        known.update(blocks)
    assert run.counts.restored_tokens == expected * 512
    assert run.counts.prompt_tokens == sum(len(blocks) * 512 + 1 for blocks in prompts)
    trace = trace_of(prompts)
    assert everything(trace, LLAMA, 0) == pytest.approx(expected * 512 / trace.prompt_tokens)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", [LLAMA, GEMMA, QWEN], ids=["llama", "gemma", "qwen"])
def test_books_agree_and_the_budget_holds(plan: ChunkPlan, policy: str) -> None:
    trace = fitted(read_trace("conversation", limit=300), plan.geometry.unit_tokens)
    budget = 24 * GIB
    run = replay(trace, Setting(plan, policy, budget), measured_from=0)
    assert run.loft.catalog.counters.evicted_chunks
    assert run.most_bytes <= budget
    assert run.fit >= 0.98
    audit.check_idle(run.loft.catalog)
    exact = sum(chunk.layout.nbytes for chunk in audit.held(run.loft.catalog))
    assert run.loft.catalog.live_bytes == exact
    assert run.counts.restored_tokens > 0
    assert run.restored_bytes > 0


def test_resume_points_restore_prompts_that_go_on() -> None:
    prompts = chained([[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
    run = replay(trace_of(prompts), Setting(GEMMA, "adaptive", 64 * GIB), measured_from=0)
    assert run.counts.restored_tokens == (3 + 5) * 512
    # The windows of the last 1,023 tokens and all full chunks.
    assert run.restored_bytes == sum(
        sum(piece.layout.nbytes for piece in GEMMA.pieces(depth)) + depth * GEMMA.full_chunk_bytes
        for depth in (3, 5)
    )


def test_what_the_engine_has_is_not_restored() -> None:
    prompts = chained([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]])
    setting = Setting(LLAMA, "lru", 64 * GIB, engine_blocks=100)
    run = replay(trace_of(prompts), setting, measured_from=0)
    assert run.counts.restored_tokens == 0
    assert run.counts.engine_tokens == (3 + 4) * 512
    few = dataclasses.replace(setting, engine_blocks=1)
    run = replay(trace_of(prompts), few, measured_from=0)
    assert run.counts.engine_tokens + run.counts.restored_tokens == (3 + 4) * 512


def test_the_engine_s_cache_is_an_lru_of_chunks() -> None:
    cache = EngineCache(3)
    assert cache.serve([1, 2, 3, 4], 4) == 0
    assert cache.serve([1, 2, 3, 4], 4) == 3
    assert cache.serve([9], 1) == 0
    assert cache.serve([1, 2, 3], 3) == 2
    assert EngineCache(0).serve([1], 1) == 0


def test_a_disk_brings_back_what_memory_has_lost() -> None:
    trace = read_trace("conversation", limit=400)
    small = Setting(LLAMA, "lru", 8 * GIB)
    without = replay(trace, small, measured_from=0)
    with_disk = replay(
        trace, dataclasses.replace(small, disk_bytes=1 << 42), measured_from=0
    )  # fmt: skip
    assert with_disk.counts.restored_tokens > without.counts.restored_tokens
    assert with_disk.loft.catalog.counters.promoted_chunks


def test_half_of_a_trace_fills_the_cache() -> None:
    prompts = chained([[1], [2], [1], [2]])
    run = replay(trace_of(prompts), Setting(LLAMA, "lru", 64 * GIB))
    assert run.counts.prompt_tokens == 2 * 513
    assert run.counts.restored_tokens == 2 * 512


def test_empty_prompts_and_traces_are_no_trouble() -> None:
    requests = [Request(0.0, 0, 1, []), Request(1.0, 5, 1, [7]), Request(2.0, 600, 1, [8])]
    run = replay(Trace("short", 512, requests), Setting(LLAMA, "adaptive", GIB), measured_from=0)
    assert run.counts.prompt_tokens == 605
    assert replay(Trace("none", 512, []), Setting(LLAMA, "adaptive", GIB)).counts.prompt_tokens == 0


def test_blocks_are_stretched_to_units_where_they_do_not_fit() -> None:
    trace = read_trace("conversation", limit=20)
    assert fitted(trace, 512) is trace
    assert fitted(trace, 16) is trace
    assert fitted(trace, 3584) is trace
    longer = fitted(trace, 544)
    assert longer.tokens_per_block == 544
    for before, after in zip(trace.requests, longer.requests, strict=True):
        whole = len(boundary_ids(before, 512, 512))
        assert len(boundary_ids(after, 544, 544)) == whole


# --- studies and the command ----------------------------------------------------------------------


def test_a_study_has_all_runs_bounds_and_figures() -> None:
    trace = read_trace("conversation", limit=150)
    plans = Study(Setting(LLAMA, "lru", 0), ["lru", "adaptive"], [GIB, 8 * GIB], peers=False)
    begun: list[str] = []

    def begin(what: str) -> Any:
        begun.append(what)
        return lambda done, total: None

    result = study(trace, plans, begin)
    assert [(r["policy"], r["budget_bytes"]) for r in result["runs"]] == [
        (policy, budget) for budget in (GIB, 8 * GIB) for policy in ("lru", "adaptive")
    ]
    assert len(begun) == 6
    bounds = {b["budget_bytes"]: b["token_hit_rate"] for b in result["bounds"]}
    for run in result["runs"]:
        assert run["token_hit_rate"] <= bounds[run["budget_bytes"]] + 1e-9
        assert bounds[run["budget_bytes"]] <= result["everything"] + 1e-9
        assert run["most_slot_bytes"] <= run["budget_bytes"]
        assert run["timeline"][-1]["full_bytes"] == run["bytes_held"]
    assert json.loads(json.dumps(result)) == result


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["replay", *arguments])
    out, error = capsys.readouterr()
    assert code == 0, error
    return out


BASE = ("conversation", "--limit", "120", "--geometry", "llama-3.1-8b", "--no-peers")


def test_the_command_prints_a_table_json_and_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, file = tmp_path / "page.html", tmp_path / "result.json"
    out = run_command(
        capsys, *BASE, "--cpu", "1GiB,4GiB", "--policy", "lru", "--policy", "adaptive",
        "--html", str(page), "--json", str(file),
    )  # fmt: skip
    assert "adaptive" in out
    assert "optimum" in out
    assert "<svg" in page.read_text()
    result = json.loads(file.read_text())
    assert result["benchmark"] == "replay"
    assert len(result["traces"][0]["runs"]) == 4
    printed = json.loads(run_command(capsys, *BASE, "--cpu", "1GiB", "--policy", "lru", "--json"))
    assert printed["traces"][0]["runs"][0]["policy"] == "lru"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cpu", "many"), "is not a size"),
        (("--cpu", "1GiB", "--policy", "best"), "not one of adaptive"),
        (("--cpu", "1GiB", "--last", "0"), "a share above 0"),
        (("--cpu", "1GiB", "--block-size", "500"), "a multiple of the unit, 16"),
        (("--cpu", "1GiB", "--engine-blocks", "-1"), "negative"),
    ],
)
def test_wrong_options_are_told(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["replay", *BASE, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_told() -> None:
    with pytest.raises(KVLoftError, match="one chunk of each class"):
        replay(read_trace("conversation", limit=5), Setting(GEMMA, "lru", 1 << 20))


def test_bounds_are_named_for_what_they_are() -> None:
    trace = read_trace("conversation", limit=60)
    full = study_module.bound(trace, LLAMA, GIB, 30)
    mixed = study_module.bound(trace, GEMMA, 8 * GIB, 30)
    assert (full["kind"], mixed["kind"]) == ("optimum", "upper bound")
    assert 0 <= mixed["token_hit_rate"] <= 1
