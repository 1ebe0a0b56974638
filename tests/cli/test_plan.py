"""``kvloft plan`` against arithmetic of its own, and against whatever a person may get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloft.arena import Arena
from kvloft.cli.main import main
from kvloft.geometry import Geometry, from_dict, known_names, load
from kvloft.plan import ChunkPlan, Piece

Run = Callable[..., tuple[int, str, str]]
MIB = 1 << 20


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        try:
            code = main(["plan", *map(str, args)])
        except SystemExit as leaving:
            code = int(str(leaving.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# ------------------------------------------------------------------- arithmetic of its own


def cached(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [g for g in data["groups"] if g["kind"] != "ring" and g.get("cacheable", True)]


def smallest_unit(data: dict[str, Any]) -> int:
    sizes = [group["tokens_per_block"] for group in cached(data)]
    unit = int(data["tokens_per_hash"])
    while any(unit % size for size in sizes):
        unit += data["tokens_per_hash"]
    return unit


def block_bytes(data: dict[str, Any], group: dict[str, Any]) -> int:
    ranks = 1 if group.get("replicated") else data.get("tensor_parallel", 1)
    return ranks * sum(int(run["count"]) * int(run["page_bytes"]) for run in group["layers"])


def needed_blocks(group: dict[str, Any], boundary: int) -> int:
    """Blocks that hold a token which a resume at ``boundary`` needs; DESIGN section 3, rule 3."""
    match group["kind"]:
        case "window":
            behind = group["window"] - 1 + group.get("extra_retained_tokens", 0)
            first = max(0, boundary - behind)
        case "chunked_local":
            first = boundary - boundary % group["attention_chunk"]
        case "state":
            return 1
        case _:
            return 0
    return len({token // group["tokens_per_block"] for token in range(first, boundary)})


def expected(data: dict[str, Any], tokens: int | None = None) -> dict[str, Any]:
    unit = smallest_unit(data)
    per_unit = sum(
        unit // g["tokens_per_block"] * block_bytes(data, g)
        for g in cached(data)
        if g["kind"] == "full"
    )
    if tokens is None:
        tokens = unit
        while per_unit and tokens // unit * per_unit < MIB:
            tokens += unit
    groups = []
    resume_bytes = 0
    for index, group in enumerate(data["groups"]):
        most = 0
        if group in cached(data):
            far = sum(
                group.get(key, 0) for key in ("window", "extra_retained_tokens", "attention_chunk")
            )
            boundaries = range(tokens, (far // tokens + 2) * tokens + 1, tokens)
            if chunk := group.get("attention_chunk"):
                boundaries = range(tokens, tokens * chunk + 1, tokens)
            most = max(needed_blocks(group, boundary) for boundary in boundaries)
            resume_bytes += most * block_bytes(data, group)
        kept = group in cached(data)
        groups.append(
            {
                "id": index,
                "kind": group["kind"],
                "blocks_per_chunk": tokens // group["tokens_per_block"] if kept else None,
                "resume_blocks": most,
            }
        )
    return {
        "unit_tokens": unit,
        "tokens_per_chunk": tokens,
        "full_chunk_bytes": tokens // unit * per_unit,
        "resume_bytes": resume_bytes,
        "groups": groups,
    }


def check(report: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if key != "groups":
            assert report[key] == value, key
    assert len(report["groups"]) == len(wanted["groups"])
    for got, group in zip(report["groups"], wanted["groups"], strict=True):
        assert {key: got[key] for key in group} == group


@pytest.mark.parametrize("factor", [None, 1, 2, 7])
@pytest.mark.parametrize("name", known_names())
def test_agrees_on_the_models_that_ship(run: Run, name: str, factor: int | None) -> None:
    data = load(name).to_dict()
    unit = smallest_unit(data)
    wanted = expected(data, factor and factor * unit)
    options: list[tuple[object, ...]] = [()]
    if factor:
        options = [("--blocks-per-chunk", factor), ("--block-size", factor * unit)]
    for given_options in options:
        code, out, err = run(name, "--json", *given_options)
        assert (code, err) == (0, "")
        check(json.loads(out), wanted)


def test_the_figures_that_are_known_for_deepseek_v4_flash(run: Run) -> None:
    report = json.loads(run("deepseek-v4-flash", "--json", "--blocks-per-chunk", 1)[1])
    assert report["unit_tokens"] == 256
    assert report["full_chunk_bytes"] == 985_664
    assert report["bytes_per_token"] == 3850.25
    assert report["resume_bytes"] == 15_420_416
    assert [g["blocks_per_chunk"] for g in report["groups"]] == [1, 4, 4, 64, 32]
    assert [g["resume_blocks"] for g in report["groups"]] == [0, 2, 2, 2, 16]


BLOCKS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24])


@st.composite
def group_data(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["full", "window", "chunked_local", "state", "ring"]))
    group: dict[str, Any] = {"kind": kind, "tokens_per_block": draw(BLOCKS), "layers": []}
    for _ in range(draw(st.integers(1, 3))):
        page = draw(st.integers(1, 40_000))
        stride = page + draw(st.integers(0, 100))
        run = {"count": draw(st.integers(1, 30)), "page_bytes": page, "stride_bytes": stride}
        group["layers"].append(run)
    if kind == "window":
        group["window"] = draw(st.integers(1, 200))
        if draw(st.booleans()):
            group["extra_retained_tokens"] = draw(st.integers(0, 20))
    if kind == "chunked_local":
        group["attention_chunk"] = draw(st.integers(1, 60))
    if kind == "ring":
        group["cacheable"] = False
    for flag in ("draft", "replicated"):
        if draw(st.booleans()):
            group[flag] = draw(st.booleans())
    return group


@st.composite
def geometry_data(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.lists(group_data(), min_size=1, max_size=5))
    if all(group["kind"] == "ring" for group in groups):
        groups[0] = {**groups[0], "kind": "full", "cacheable": True}
    data: dict[str, Any] = {"schema": "kvloft-geometry/1", "groups": groups}
    data["tokens_per_hash"] = draw(BLOCKS)
    if draw(st.booleans()):
        data["tensor_parallel"] = draw(st.integers(1, 8))
    return data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=geometry_data(), factor=st.one_of(st.none(), st.integers(1, 3)))
def test_agrees_on_any_geometry(
    run: Run, tmp_path: Path, data: dict[str, Any], factor: int | None
) -> None:
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps(data))
    unit = smallest_unit(data)
    options = ("--block-size", factor * unit) if factor else ()
    code, out, err = run(path, "--json", *options)
    assert (code, err) == (0, "")
    check(json.loads(out), expected(data, factor and factor * unit))
    assert run(path, *options)[0] == 0


@settings(deadline=None)
@given(data=geometry_data())
def test_a_geometry_survives_writing_and_reading(data: dict[str, Any]) -> None:
    geometry = from_dict(data)
    assert from_dict(geometry.to_dict()) == geometry
    assert json.loads(json.dumps(geometry.to_dict())) == geometry.to_dict()


@pytest.mark.parametrize("name", known_names())
def test_saving_gives_the_shipped_geometry_back(tmp_path: Path, name: str) -> None:
    load(name).save(tmp_path / "saved.json")
    assert load(tmp_path / "saved.json") == load(name)


# ------------------------------------------------------------------- what fits


def fill(geometry: Geometry, report: dict[str, Any], pieces: Callable[[int], Iterator[int]]) -> int:
    """How many rounds of slots a real arena of that size takes; ``pieces(n)`` is the n-th's."""
    held = report["capacity"]
    arena = Arena(held["arena_bytes"], held["slab_bytes"])
    for round_ in range(1, 1_000_000):
        for size in pieces(round_):
            if arena.allocate(size) is None:
                return round_ - 1
    raise AssertionError(f"{geometry.name} never fills the arena")


@pytest.mark.parametrize("name", [n for n in known_names() if n != "llama-3.1-8b"])
def test_what_is_said_to_fit_does_fit_a_real_arena(run: Run, name: str) -> None:
    geometry = load(name)
    report = json.loads(run(name, "--json", "--cpu-bytes", "24GiB")[1])
    held = report["capacity"]
    size, interval = report["tokens_per_chunk"], report["resume_interval"]
    plan = ChunkPlan(geometry, size)
    assert plan.full_layout is not None
    full = plan.full_layout.slot_bytes

    def resume(depth: int, since: int) -> Iterator[int]:
        def new(piece: Piece) -> bool:
            return not piece.whole or piece.chunks_back < since

        yield from (p.layout.slot_bytes for p in plan.pieces(depth) if new(p))
        if plan.state_layout is not None:
            yield plan.state_layout.slot_bytes

    far = 1 << 20
    assert fill(geometry, report, lambda n: iter([full])) * size == held["tokens"]
    assert fill(geometry, report, lambda n: resume(far, far)) == held["resume_points"]
    chunks = interval // size

    def both(depth: int) -> Iterator[int]:
        yield full
        if depth % chunks == 0:
            yield from resume(far, chunks)

    assert fill(geometry, report, both) * size == held["tokens_at_interval"]
    assert held["resume_points_at_interval"] == held["tokens_at_interval"] // interval
    assert held["tokens_at_interval"] < held["tokens"]


def test_what_fits_where_full_chunks_are_all_there_is(run: Run) -> None:
    held = json.loads(run("llama-3.1-8b", "--json", "--cpu-bytes", "1GiB")[1])["capacity"]
    assert held["cpu_bytes"] == 1 << 30
    assert held["resume_points"] is None
    assert held["tokens"] == held["tokens_at_interval"] == 511 * 16
    out = run("llama-3.1-8b", "--cpu-bytes", "1GiB")[1]
    assert "1.00 GiB hold\n  8,176 tokens\n" in out


def test_what_fits_where_no_group_is_full(run: Run, tmp_path: Path) -> None:
    layers = [{"count": 2, "page_bytes": 4096, "stride_bytes": 4096}]
    group = {"kind": "window", "tokens_per_block": 16, "window": 33, "layers": layers}
    path = tmp_path / "window.json"
    data = {"schema": "kvloft-geometry/1", "tokens_per_hash": 16, "groups": [group]}
    path.write_text(json.dumps(data))
    code, out, err = run(path, "--json", "--cpu-bytes", "10MiB")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["full_chunk_bytes"], report["resume_bytes"]) == (0, 2 * 8192)
    assert report["capacity"]["tokens"] is None
    assert "none: no group attends to the whole prefix" in run(path, "--cpu-bytes", "10MiB")[1]


def test_a_person_sees_who_causes_the_unit(run: Run, tmp_path: Path) -> None:
    code, out, err = run("gemma-4-31b")
    assert (code, err) == (0, "")
    assert "unit           32 tokens, set by group 5\n" in out
    assert "set by the hash and group 0" in run("llama-3.1-8b")[1]
    path = tmp_path / "odd.json"
    layers = [{"count": 1, "page_bytes": 1, "stride_bytes": 1}]
    groups = [{"kind": "full", "tokens_per_block": n, "layers": layers} for n in (6, 4, 2)]
    data = {"schema": "kvloft-geometry/1", "tokens_per_hash": 9, "groups": groups}
    path.write_text(json.dumps({**data, "name": "gröss\x1b[31m"}))
    out = run(path)[1]
    assert "36 tokens, the least common multiple of 9 of the hash; 6 of group 0; 4 of group" in out
    assert out.isascii()
    assert "\x1b" not in out


# ------------------------------------------------------------------- what a person gets wrong


def check_refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("kvloft: error: ")
    assert err.count("\n") == 1, err
    assert len(err) < 700
    for part in parts:
        assert part in err, err


LONG = "9" * 5000
BAD_COUNTS = [
    "0", "-1", "-0.5", "1.5", "1e3", "", " ", "x", "True", "nan", "inf", "½", "٣", "0x10", "1_000",
    "1,000", "9" * 19, LONG, "-" + LONG,
]  # fmt: skip


@pytest.mark.parametrize("option", ["--blocks-per-chunk", "--block-size"])
@pytest.mark.parametrize("value", BAD_COUNTS, ids=lambda v: v[:8] or "empty")
def test_a_bad_count_is_refused(run: Run, option: str, value: str) -> None:
    name = option[2:].replace("-", "_")
    check_refused(run("gemma-4-31b", f"{option}={value}"), name, repr(value)[:50])
    if not value.startswith("-"):
        check_refused(run("gemma-4-31b", option, value, "--json"), name, repr(value)[:50])


def test_a_block_size_off_the_unit_is_refused_with_the_nearest_valid_ones(run: Run) -> None:
    result = run("gemma-4-31b", "--block-size", "48")
    check_refused(result, "48 tokens", "unit of 32", "group 5", "32 or 64")
    check_refused(run("glm-5.3-flash-tp2", "--block-size", 16), "3584 or 7168", "groups 0, 2")


def test_both_options_at_once_are_refused(run: Run) -> None:
    result = run("gemma-4-31b", "--block-size", "64", "--blocks-per-chunk", "2")
    check_refused(result, "'64'", "'2'", "block_size", "blocks_per_chunk")


BAD_SIZES = ["0", "-1", "64 GB/s", "", "GiB", "1.5", "nan", "1e9", "0.3KiB", LONG, "½GiB"]


@pytest.mark.parametrize("value", BAD_SIZES, ids=lambda v: v[:8] or "empty")
def test_a_bad_size_is_refused(run: Run, value: str) -> None:
    check_refused(run("gemma-4-31b", f"--cpu-bytes={value}"), "--cpu-bytes", repr(value)[:50])


@pytest.mark.parametrize("value", ["1", "4096", "1MiB", "4MiB"])
def test_memory_for_less_than_one_chunk_of_each_class_is_refused(run: Run, value: str) -> None:
    check_refused(run("gemma-4-31b", "--cpu-bytes", value), "--cpu-bytes", repr(value))


def valid() -> dict[str, Any]:
    layers = [{"count": 3, "page_bytes": 100, "stride_bytes": 128}]
    return {
        "schema": "kvloft-geometry/1",
        "tokens_per_hash": 16,
        "groups": [
            {"kind": "full", "tokens_per_block": 16, "layers": [dict(layers[0])]},
            {"kind": "window", "tokens_per_block": 16, "window": 40, "layers": [dict(layers[0])]},
            {"kind": "chunked_local", "tokens_per_block": 16, "attention_chunk": 40,
             "layers": [dict(layers[0])]},
            {"kind": "ring", "tokens_per_block": 4, "cacheable": False,
             "layers": [dict(layers[0])]},
        ],
    }  # fmt: skip


def at(*path: str | int) -> Callable[[dict[str, Any], object], None]:
    def put(data: dict[str, Any], value: object) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        if value is MISSING:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return put


MISSING = object()
DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]
NOT_COUNTS = [0, -1, 1.5, 2.0, True, "16", float("nan"), float("inf"), 10**30, [16], {}, DEEP]

INTEGERS: list[tuple[tuple[str | int, ...], tuple[str, ...]]] = [
    (("tokens_per_hash",), ("'tokens_per_hash'",)),
    (("tensor_parallel",), ("'tensor_parallel'",)),
    (("groups", 0, "tokens_per_block"), ("group 0", "'tokens_per_block'")),
    (("groups", 1, "window"), ("group 1", "'window'")),
    (("groups", 1, "extra_retained_tokens"), ("group 1", "'extra_retained_tokens'")),
    (("groups", 2, "attention_chunk"), ("group 2", "'attention_chunk'")),
    (("groups", 3, "layers", 0, "count"), ("group 3", "layers 0", "'count'")),
    (("groups", 0, "layers", 0, "page_bytes"), ("group 0", "'page_bytes'")),
    (("groups", 0, "layers", 0, "stride_bytes"), ("group 0", "'stride_bytes'")),
]


@pytest.mark.parametrize("place", INTEGERS, ids=lambda place: ".".join(map(str, place[0])))
def test_what_is_no_count_is_refused_wherever_it_stands(
    run: Run, tmp_path: Path, place: tuple[tuple[str | int, ...], tuple[str, ...]]
) -> None:
    path = tmp_path / "broken.json"
    for value in NOT_COUNTS:
        if place[0][-1] == "extra_retained_tokens" and value == 0:
            continue  # The one field for which 0 is a value.
        data = valid()
        at(*place[0])(data, value)
        path.write_text(json.dumps(data))
        shown = repr(value) if len(repr(value)) < 40 else ""
        check_refused(run(path), "broken.json", *place[1], shown)


OTHERS: list[tuple[tuple[str | int, ...], object, tuple[str, ...]]] = [
    (("schema",), MISSING, ("'schema'", "None", "kvloft-geometry/1")),
    (("schema",), "kvloft-geometry/2", ("'schema'", "'kvloft-geometry/2'")),
    (("schema",), 1, ("'schema'", "1")),
    (("tokens_per_hash",), MISSING, ("'tokens_per_hash'", "missing")),
    (("name",), 3, ("'name'", "3")),
    (("model",), None, ("'model'", "None")),
    (("surprise",), 1, ("'surprise'", "unknown")),
    (("groups",), MISSING, ("'groups'",)),
    (("groups",), [], ("'groups'", "[]")),
    (("groups",), {}, ("'groups'", "{}")),
    (("groups",), "x", ("'groups'", "'x'")),
    (("groups", 1), None, ("group 1", "None")),
    (("groups", 1), [1], ("group 1", "[1]")),
    (("groups", 1, "kind"), MISSING, ("group 1", "'kind'", "None")),
    (("groups", 1, "kind"), "sliding", ("group 1", "'kind'", "'sliding'", "window")),
    (("groups", 1, "kind"), "Window", ("group 1", "'kind'", "'Window'")),
    (("groups", 1, "kind"), ["full"], ("group 1", "'kind'", "['full']")),
    (("groups", 1, "kind"), "full", ("group 1", "'window'", "'full'")),
    (("groups", 1, "window"), MISSING, ("group 1", "'window'", "missing")),
    (("groups", 1, "window"), None, ("group 1", "'window'")),
    (("groups", 0, "window"), 5, ("group 0", "'window'", "'full'")),
    (("groups", 0, "attention_chunk"), 5, ("group 0", "'attention_chunk'")),
    (("groups", 0, "extra_retained_tokens"), 5, ("group 0", "'extra_retained_tokens'")),
    (("groups", 2, "attention_chunk"), MISSING, ("group 2", "'attention_chunk'", "missing")),
    (("groups", 0, "tokens_per_block"), MISSING, ("group 0", "'tokens_per_block'", "missing")),
    (("groups", 0, "blocks"), 5, ("group 0", "'blocks'", "unknown")),
    (("groups", 0, "id"), 1, ("group 0", "'id'", "1")),
    (("groups", 0, "id"), "0", ("group 0", "'id'", "'0'")),
    (("groups", 0, "id"), False, ("group 0", "'id'", "False")),
    (("groups", 0, "cacheable"), 1, ("group 0", "'cacheable'", "1")),
    (("groups", 0, "draft"), "yes", ("group 0", "'draft'", "'yes'")),
    (("groups", 0, "replicated"), None, ("group 0", "'replicated'", "None")),
    (("groups", 3, "cacheable"), True, ("group 3", "'cacheable'", "True")),
    (("groups", 0, "layers"), MISSING, ("group 0", "'layers'", "None")),
    (("groups", 0, "layers"), [], ("group 0", "'layers'", "[]")),
    (("groups", 0, "layers", 0), 7, ("group 0", "layers 0", "7")),
    (("groups", 0, "layers", 0, "count"), MISSING, ("group 0", "'count'", "missing")),
    (("groups", 0, "layers", 0, "page_bytes"), 129, ("group 0", "'page_bytes'", "129", "128")),
    (("groups", 0, "layers", 0, "size"), 1, ("group 0", "layers 0", "'size'")),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "parts"), OTHERS)
def test_a_file_that_breaks_a_rule_is_refused(
    run: Run, tmp_path: Path, place: tuple[str | int, ...], value: object, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "broken.json"
    data = valid()
    path.write_text(json.dumps(data))
    assert run(path)[0] == 0
    at(*place)(data, value)
    path.write_text(json.dumps(data))
    for options in ((), ("--json",), ("--cpu-bytes", "1GiB")):
        check_refused(run(path, *options), "broken.json", *parts)


def test_a_model_without_a_cacheable_group_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "scratch.json"
    data = valid()
    data["groups"] = data["groups"][3:]
    path.write_text(json.dumps(data))
    check_refused(run(path), "scratch.json", "'groups'", "no cacheable group")
    data["groups"].append({**valid()["groups"][0], "cacheable": False})
    path.write_text(json.dumps(data))
    check_refused(run(path), "scratch.json", "'groups'", "no cacheable group")


def test_a_unit_beyond_all_bounds_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "primes.json"
    data = valid()
    data["tokens_per_hash"] = 2**52
    data["groups"][0]["tokens_per_block"] = 3**33
    path.write_text(json.dumps(data))
    check_refused(run(path), "primes.json", str(2**52), str(3**33), "group")


def test_greatest_values_are_reckoned_at_once(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "great.json"
    data = valid()
    most = 2**53 - 1
    data["tensor_parallel"] = most
    data["groups"][1]["window"] = most
    data["groups"][2]["attention_chunk"] = most
    data["groups"][0]["layers"][0] = {"count": most, "page_bytes": most, "stride_bytes": most}
    path.write_text(json.dumps(data))
    for options in ((), ("--json",), ("--block-size", 2**52)):
        assert run(path, *options)[0] == 0
    check_refused(run(path, "--cpu-bytes", "64GiB"), "--cpu-bytes", "'64GiB'")


NOT_JSON = {
    "empty": b"",
    "text": b"a model",
    "cut": b'{"schema": "kvloft-geometry/1", "groups": [',
    "binary": bytes(range(256)) * 10,
    "zeros": b"\0" * 5000,
    "latin": b'{"name": "\xe9"}',
    "number": b"3",
    "null": b"null",
    "list": b"[]",
    "nan": b"NaN",
    "digits": b"9" * 10_000,
    "deep": b"[" * 100_000,
    "deep-object": b'{"schema":' * 50_000,
    "twice": b'{"schema": "kvloft-geometry/1", "schema": "kvloft-geometry/1"}',
    "yaml": b"schema: kvloft-geometry/1\ngroups: []\n",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_no_geometry_at_all_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    path.write_bytes(NOT_JSON[name])
    check_refused(run(path), f"{name}.json")
    if name == "twice":
        check_refused(run(path), "'schema'", "twice")


def test_what_can_not_be_read_is_refused(run: Run, tmp_path: Path) -> None:
    check_refused(run(tmp_path), str(tmp_path), "directory")
    check_refused(run(tmp_path / "absent.json"), "absent.json", "gemma-4-31b")
    check_refused(run("gemma-4"), "'gemma-4'", "gemma-4-31b")
    check_refused(run(""), "''")
    check_refused(run("x" * 300), "x" * 300)
    check_refused(run("a\0b"), "a\\x00b")
    check_refused(run("/dev/zero"), "/dev/zero", "bytes")
