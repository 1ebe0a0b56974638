"""What users may say (DESIGN section 2): every option, every wrong value, in one place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.config import KNOWN_KEYS, parse_options, resolve_chunk
from kvloft.errors import ConfigError, KVLoftError
from kvloft.geometry import Geometry, Group, Layers, known_names, load, make_geometry
from kvloft.tiers.options import DiskOptions

GEMMA = load("gemma-4-31b")
UNIFORM = load("llama-3.1-8b")
GPT_OSS = load("gpt-oss-120b")
GLM = load("glm-5.3-flash-tp2")

NOT_COUNTS: list[object] = [
    0, -1, True, False, 1.5, -2.0, float("nan"), float("inf"), -float("inf"), 1e300, 2**53,
    "", " ", "0", "-1", "1.5", "1e3", "x", "0x10", "1_0", "true", "٣", "½", "9" * 5000,
    [4], (4,), {}, b"4", object(),
]  # fmt: skip


def refused(extra: dict[str, object], geometry: Geometry = GEMMA) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(extra, geometry)
    message = str(caught.value)
    assert len(message) < 600
    assert "\n" not in message
    return message


def options(**extra: object) -> Any:
    return parse_options({"cpu_bytes_to_use": "1GiB", **extra}, GEMMA)


def test_errors_are_of_the_family_that_the_command_line_reports() -> None:
    assert issubclass(ConfigError, KVLoftError)
    assert issubclass(ConfigError, ValueError)


# ------------------------------------------------------------------- the chunk


@pytest.mark.parametrize("value", [3, "3", " 3 ", 3.0, "003"])
def test_blocks_per_chunk_counts_units(value: object) -> None:
    assert resolve_chunk(GEMMA, blocks_per_chunk=value) == 96
    # On a model with one block size that is vLLM's meaning to the block.
    assert resolve_chunk(UNIFORM, blocks_per_chunk=value) == 48
    assert options(blocks_per_chunk=value).tokens_per_chunk == 96


@pytest.mark.parametrize("value", [64, "64", 64.0])
def test_block_size_counts_tokens(value: object) -> None:
    assert resolve_chunk(GEMMA, block_size=value) == 64
    assert options(block_size=value).tokens_per_chunk == 64


@pytest.mark.parametrize("key", ["blocks_per_chunk", "block_size"])
@pytest.mark.parametrize("value", NOT_COUNTS, ids=lambda v: repr(v)[:12])
def test_what_is_no_count_is_refused_with_the_value(key: str, value: object) -> None:
    message = refused({"cpu_bytes_to_use": "1GiB", key: value})
    assert key in message
    assert repr(value)[:50] in message


@pytest.mark.parametrize(
    ("geometry", "value", "unit", "causes", "nearest"),
    [
        (GEMMA, 16, 32, "32 (group 5)", "32 or 64"),
        (GEMMA, 1, 32, "16 (groups 0, 1, 2, 3, 4)", "32 or 64"),
        (GEMMA, 100, 32, "16 (hash)", "96 or 128"),
        (GLM, 3585, 3584, "3584 (groups 0, 2, 3, 4, 5)", "3584 or 7168"),
        (UNIFORM, 2**53 - 2, 16, "16 (group 0)", f"{2**53 - 16} or {2**53}"),
    ],
)
def test_a_block_size_off_the_unit_names_the_unit_its_causes_and_the_way_out(
    geometry: Geometry, value: int, unit: int, causes: str, nearest: str
) -> None:
    message = refused({"cpu_bytes_to_use": 1 << 30, "block_size": value}, geometry)
    for part in (f"{value} tokens", f"unit of {unit}", causes, nearest):
        assert part in message


@given(st.integers(1, 10_000))
def test_block_size_is_accepted_exactly_where_the_unit_divides_it(tokens: int) -> None:
    if tokens % 32 == 0:
        assert resolve_chunk(GEMMA, block_size=tokens) == tokens
    else:
        with pytest.raises(ConfigError) as caught:
            resolve_chunk(GEMMA, block_size=tokens)
        lower = max(32, tokens // 32 * 32)
        assert f"write {lower} or {lower + 32}" in str(caught.value)


def test_both_at_once_are_refused_even_where_they_agree() -> None:
    message = refused({"cpu_bytes_to_use": 1, "block_size": 64, "blocks_per_chunk": "2"})
    assert "64" in message
    assert "'2'" in message


@pytest.mark.parametrize("name", known_names())
def test_auto_is_the_smallest_chunk_of_a_mebibyte_over_all_ranks(name: str) -> None:
    geometry = load(name)
    unit = math.lcm(geometry.tokens_per_hash, *(g.tokens_per_block for g in geometry.cacheable))
    per_unit = sum(
        unit // g.tokens_per_block
        * sum(run.count * run.page_bytes for run in g.layers)
        * (1 if g.replicated else geometry.tensor_parallel)
        for g in geometry.groups
        if g.kind == "full"
    )  # fmt: skip
    tokens = resolve_chunk(geometry)
    assert tokens % unit == 0
    assert tokens // unit * per_unit >= 1 << 20
    assert tokens == unit or (tokens // unit - 1) * per_unit < 1 << 20


def small(kind: Any, *, page: int = 1024, **more: Any) -> Geometry:
    return make_geometry([Group(0, kind, 16, (Layers(1, page, page),), **more)], 64)


def test_auto_without_a_full_group_is_the_unit() -> None:
    assert resolve_chunk(small("window", window=40)) == 64
    assert resolve_chunk(small("state")) == 64


def test_auto_counts_all_ranks() -> None:
    one = make_geometry([Group(0, "full", 16, (Layers(1, 1024, 1024),))], 16)
    four = make_geometry([Group(0, "full", 16, (Layers(1, 1024, 1024),))], 16, tensor_parallel=4)
    assert resolve_chunk(one) == 16 * 1024
    assert resolve_chunk(four) == 16 * 256


# ------------------------------------------------------------------- memory


@pytest.mark.parametrize("value", [1 << 30, "1GiB", "1024 MiB", float(1 << 30), str(1 << 30)])
def test_cpu_bytes_are_for_the_whole_node(value: object) -> None:
    for geometry in (GEMMA, GLM):
        assert parse_options({"cpu_bytes_to_use": value}, geometry).cpu_bytes == 1 << 30


@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 1.5, float("nan"), float("inf"), "", "lots", "-1GiB", "1.5", [], {}],
    ids=repr,
)
def test_what_is_no_size_is_refused_with_the_value(value: object) -> None:
    message = refused({"cpu_bytes_to_use": value})
    assert "cpu_bytes_to_use" in message
    assert repr(value) in message


@pytest.mark.parametrize("extra", [{}, {"cpu_bytes_to_use": None}])
def test_memory_must_be_given(extra: dict[str, object]) -> None:
    assert "'cpu_bytes_to_use' is missing" in refused(extra)


# ------------------------------------------------------------------- the rest


def test_defaults() -> None:
    found = options()
    assert found.eviction_policy == "adaptive"
    assert found.offload_prompt_only is True
    assert found.tokens_per_chunk == 32
    # 800 MiB of windows against 2.5 MiB of full chunk: as much for one as for the other.
    assert found.resume_interval == 320 * 32


@pytest.mark.parametrize("value", ["LRU", "lfu", "", None, 1, True, ["lru"]], ids=repr)
def test_an_unknown_policy_is_refused(value: object) -> None:
    message = refused({"cpu_bytes_to_use": 1, "eviction_policy": value})
    assert "eviction_policy" in message
    assert repr(value) in message
    assert "lru" in message


@pytest.mark.parametrize("value", ["true", 0, 1, None, "False"], ids=repr)
def test_offload_prompt_only_is_true_or_false(value: object) -> None:
    message = refused({"cpu_bytes_to_use": 1, "offload_prompt_only": value})
    assert "offload_prompt_only" in message
    assert repr(value) in message
    assert options(offload_prompt_only=False).offload_prompt_only is False


def disk(**more: object) -> dict[str, object]:
    return {"type": "disk", "path": "/cache", "max_bytes": "2GiB", **more}


def test_no_tiers_is_the_default() -> None:
    assert options(secondary_tiers=[]) == options(secondary_tiers=None) == options()
    assert options().tiers == ()


def test_a_disk_tier_has_a_path_a_limit_and_defaults() -> None:
    (tier,) = options(secondary_tiers=[disk()]).tiers
    assert tier == DiskOptions(Path("/cache"), 2 << 30)
    first, second = options(
        secondary_tiers=[
            disk(path="/a/../b/", write="reused", wait=0.5, queue_bytes="1MiB", threads="2"),
            disk(path=Path("/c"), max_bytes=12345678, wait="auto"),
        ]
    ).tiers
    assert first == DiskOptions(Path("/b"), 2 << 30, "reused", 0.5, 1 << 20, 2)
    assert second == DiskOptions(Path("/c"), 12345678)


@pytest.mark.parametrize(
    ("tiers", "parts"),
    [
        ("disk", ["secondary_tiers", "'disk'", '"max_bytes"']),
        ({"type": "disk"}, ["secondary_tiers", '"path"']),
        (["disk"], ["secondary_tiers[0]", "'disk'"]),
        ([{}], ["'secondary_tiers[0].type'", "None", "disk"]),
        ([disk(), disk(path="/d", type="s3")], ["'secondary_tiers[1].type'", "'s3'", "disk"]),
        ([{"type": "fs", "root_dir": "/c"}], ["'fs'", '"type": "disk"']),
        ([{"type": ["disk"]}], ["['disk']"]),
        ([disk(max_byte=1)], ["'max_byte'", "did you mean 'max_bytes'"]),
        ([disk(path="cache")], ["'secondary_tiers[0].path'", "'cache'", "absolute"]),
        ([disk(path=7)], ["'secondary_tiers[0].path'", "7"]),
        ([disk(path="")], ["'secondary_tiers[0].path'", "''"]),
        ([disk(max_bytes=None)], ["'secondary_tiers[0].max_bytes'", "missing", "500GiB"]),
        ([disk(max_bytes="much")], ["'secondary_tiers[0].max_bytes'", "'much'"]),
        ([disk(max_bytes=0)], ["'secondary_tiers[0].max_bytes'", "0"]),
        ([disk(max_bytes=-5)], ["'secondary_tiers[0].max_bytes'", "-5"]),
        ([disk(write="some")], ["'secondary_tiers[0].write'", "'some'", "all, reused"]),
        ([disk(write=["all"])], ["'secondary_tiers[0].write'", "['all']"]),
        ([disk(wait="long")], ["'secondary_tiers[0].wait'", "'long'", "auto"]),
        ([disk(wait=-1)], ["'secondary_tiers[0].wait'", "-1"]),
        ([disk(wait=float("nan"))], ["'secondary_tiers[0].wait'", "nan"]),
        ([disk(wait=True)], ["'secondary_tiers[0].wait'", "True"]),
        ([disk(queue_bytes="x")], ["'secondary_tiers[0].queue_bytes'", "'x'"]),
        ([disk(threads=0)], ["'secondary_tiers[0].threads'", "0"]),
        ([disk(threads=1000)], ["'secondary_tiers[0].threads'", "1000", "64"]),
        ([disk(), disk(path="/x/../cache")], ["two tiers", "'/cache'"]),
    ],
)
def test_tiers_that_make_no_sense_are_refused(tiers: object, parts: list[str]) -> None:
    message = refused({"cpu_bytes_to_use": 1, "secondary_tiers": tiers})
    for part in parts:
        assert part in message


def test_a_namespace_is_short_text() -> None:
    assert options().namespace is None
    assert options(namespace=" my model ").namespace == "my model"
    for wrong in ("", "  ", "a\nb", "x" * 201, 7, ["x"], True):
        message = refused({"cpu_bytes_to_use": 1, "namespace": wrong})
        assert "namespace" in message


@pytest.mark.parametrize(
    ("value", "tokens"), [(1, 32), (32, 32), (33, 64), ("100", 128), (4096, 4096)]
)
def test_the_resume_interval_is_rounded_up_to_chunks(value: object, tokens: int) -> None:
    assert options(resume_interval=value).resume_interval == tokens


@pytest.mark.parametrize("value", NOT_COUNTS, ids=lambda v: repr(v)[:12])
def test_what_is_no_interval_is_refused_with_the_value(value: object) -> None:
    message = refused({"cpu_bytes_to_use": 1, "resume_interval": value})
    assert "resume_interval" in message
    assert repr(value)[:50] in message


@pytest.mark.parametrize("name", known_names())
def test_the_automatic_interval_balances_resume_points_and_full_chunks(name: str) -> None:
    geometry = load(name)
    found = parse_options({"cpu_bytes_to_use": "1TiB"}, geometry)
    assert found.resume_interval % found.tokens_per_chunk == 0
    assert parse_options(
        {"cpu_bytes_to_use": "1TiB", "resume_interval": "auto"}, geometry
    ) == found  # fmt: skip


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("block_per_chunk", "blocks_per_chunk"),
        ("blocksize", "block_size"),
        ("cpu_bytes", "cpu_bytes_to_use"),
        ("eviction-policy", "eviction_policy"),
        ("secondary_tier", "secondary_tiers"),
        ("resume_intervall", "resume_interval"),
        ("offload_prompts_only", "offload_prompt_only"),
        ("name_space", "namespace"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, meant: str) -> None:
    message = refused({"cpu_bytes_to_use": 1, key: 1})
    assert repr(key) in message
    assert f"did you mean {meant!r}" in message


def test_an_unknown_key_unlike_all_others_is_refused_with_the_list() -> None:
    message = refused({"cpu_bytes_to_use": 1, "zzz": 1})
    assert "did you mean" not in message
    assert all(key in message for key in KNOWN_KEYS)
