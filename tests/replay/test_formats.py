"""Traces from files: what is read, what is refused, and what equal ids promise."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.errors import TraceError
from kvloft.replay.formats import BUNDLED, FORMATS, read_trace
from kvloft.replay.formats.chain import Chain
from kvloft.replay.trace import Request, boundary_ids

MOONCAKE = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.114,
    "input_length": 41,
    "output_length": 132,
    "type": "text",
    "turn": 2,
    "hash_ids": [1089, 1090, 6326],
}
LMCACHE = {
    "timestamp": 1711929600.123,
    "request_id": "req-001",
    "model_name": "DeepSeek-V3",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["float8_e4m3fn"],
    "shapes": [[32, 256, 128]],
    "chunk_hashes": ["0xabcd1234", "0xef567890"],
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    ).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def refused(source: str | Path, **arguments: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(source, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# ----------------------------------------------------------------- as they are published


def test_mooncake(file: Path) -> None:
    """The two lines that its README shows."""
    shared = list(range(46, 58))
    write(
        file,
        {
            "timestamp": 27482,
            "input_length": 6955,
            "output_length": 52,
            "hash_ids": [*shared, 2353, 2354],
        },
        {
            "timestamp": 30535,
            "input_length": 6472,
            "output_length": 26,
            "hash_ids": [*shared, 2366],
        },
    )
    trace = read_trace(file)
    assert (trace.name, trace.tokens_per_block) == ("trace", 512)
    assert trace.requests == (
        Request(0.0, 6955, 52, array("q", range(14))),
        Request(3.053, 6472, 26, array("q", [*range(12), 14])),
    )


def test_bailian_hashes_stand_for_blocks_not_prefixes(file: Path) -> None:
    """The README's line, shortened; a second prompt has one of its blocks elsewhere."""
    write(file, BAILIAN, BAILIAN | {"timestamp": 62.5, "hash_ids": [1090, 6326, 1089]})
    trace = read_trace(file)
    assert trace.tokens_per_block == 16
    assert [list(request.blocks) for request in trace.requests] == [[0, 1, 2], [3, 4, 5]]
    assert [request.time for request in trace.requests] == [0.0, 1.386]
    assert trace.requests[0].answer_tokens == 132


def test_lmcache(file: Path) -> None:
    """The README's line, shortened; the rest of a prompt has no hash, and models share nothing."""
    write(
        file,
        LMCACHE,
        LMCACHE | {"timestamp": 1711929601.0, "model_name": "other"},
        LMCACHE | {"timestamp": 1711929602.0, "chunk_hashes": [2**300, "0xef567890"]},
        {"timestamp": 1711929603.0, "chunk_hashes": ["0xabcd1234"], "model_name": "DeepSeek-V3"},
    )
    trace = read_trace(file)
    assert trace.tokens_per_block == 256
    assert [list(it.blocks) for it in trace.requests] == [[0, 1], [2, 3], [4, 5], [0]]
    assert [it.time for it in trace.requests] == [0.0, 0.877, 1.877, 2.877]
    assert [it.prompt_tokens for it in trace.requests] == [600, 600, 600, 256]
    assert all(it.answer_tokens == 0 for it in trace.requests)
    assert isinstance(trace.requests[0].blocks, array)


def test_a_directory_of_logs_is_one_trace(tmp_path: Path) -> None:
    later = LMCACHE | {"timestamp": 1711929700.123}
    write(tmp_path / "lookup_hashes_20240401_000140_000001.jsonl", later)
    write(tmp_path / "lookup_hashes_20240401_000000_000000.jsonl.gz", LMCACHE)
    write(tmp_path / "unrelated.jsonl", "{}")
    trace = read_trace(tmp_path)
    assert [request.time for request in trace.requests] == [0.0, 100.0]
    assert trace.requests[0].blocks == trace.requests[1].blocks
    assert trace.name == tmp_path.name
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "without lookup_hashes_*.jsonl*" in refused(empty)


@pytest.mark.parametrize(("name", "requests"), [("conversation", 12031), ("synthetic", 3993)])
def test_bundled_traces_are_read_as_they_are(name: str, requests: int) -> None:
    trace = read_trace(name)
    path = Path(__file__).parents[2] / "src/kvloft/replay/traces" / f"{name}.jsonl.gz"
    with gzip.open(path) as lines:
        raw = [json.loads(line) for line in lines]
    assert len(trace.requests) == len(raw) == requests
    assert f"{requests:,} requests" in BUNDLED[name]
    for request, line in zip(trace.requests, raw, strict=True):
        assert list(request.blocks) == line["hash_ids"]
        assert request.time == pytest.approx(line["timestamp"] / 1000)
        assert request.prompt_tokens == line["input_length"]
        assert request.answer_tokens == line["output_length"]
    assert read_trace(name, limit=7, format="mooncake").requests == trace.requests[:7]


def test_a_bundled_name_is_a_file_if_written_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("conversation"), MOONCAKE)
    assert len(read_trace("conversation", limit=3).requests) == 3
    assert len(read_trace("./conversation").requests) == 1
    assert len(read_trace(Path("conversation")).requests) == 1


def test_specs_are_made() -> None:
    trace = read_trace("chat:requests=30,users=3", tokens_per_block=32, limit=20)
    assert trace.tokens_per_block == 32
    assert len(trace.requests) == 20
    assert "Write it once" in refused("chat:tokens_per_block=16", tokens_per_block=32)
    assert "Leave it out" in refused("chat", format="mooncake")
    assert "'requests'" in refused("chat:request=5")


# ------------------------------------------------------------------------ round trips


@st.composite
def token_traces(draw: st.DrawFn, size: int) -> list[tuple[int, list[int], int]]:
    """Times in milliseconds, prompts as tokens that often begin alike, answers."""
    prompts: list[list[int]] = []
    made = []
    time = 0
    for _ in range(draw(st.integers(1, 8))):
        known = draw(st.sampled_from(prompts)) if prompts else []
        prompt = known[: draw(st.integers(0, len(known)))]
        prompt += draw(st.lists(st.integers(0, 1), max_size=3 * size))
        prompts.append(prompt)
        made.append((time, prompt, draw(st.integers(0, 9))))
        time += draw(st.integers(0, 5000))
    return made


def blocks_of(tokens: Sequence[int], size: int, partial: bool) -> list[tuple[int, ...]]:
    blocks = [tuple(tokens[n : n + size]) for n in range(0, len(tokens), size)]
    if blocks and len(blocks[-1]) < size and not partial:
        blocks.pop()
    return blocks


def lines_of(
    kind: str, made: list[tuple[int, list[int], int]], size: int, chained: bool, salt: str
) -> Iterator[dict[str, Any]]:
    """How each format writes a trace; hashes are those of real bytes."""

    def digest(value: object) -> int:
        return hash((salt, value)) if kind != "lmcache" else hash((salt, value)) ** 5

    for number, (time, tokens, answer) in enumerate(made):
        blocks = blocks_of(tokens, size, partial=kind != "lmcache")
        ends = [tuple(blocks[: n + 1]) for n in range(len(blocks))] if chained else blocks
        hashes = [digest(end) for end in ends]
        lengths = {"input_length": len(tokens), "output_length": answer, "hash_ids": hashes}
        if kind == "mooncake":
            yield {"timestamp": time, **lengths}
        elif kind == "bailian":
            yield {"chat_id": number, "timestamp": time / 1000, **lengths}
        else:
            yield LMCACHE | {
                "timestamp": 1.7e9 + time / 1000,
                "chunk_size": size,
                "seq_len": len(tokens),
                "chunk_hashes": [hex(h) for h in hashes],
            }


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chained", [True, False])
@given(data=st.data())
def test_what_is_written_is_read(kind: str, chained: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    made = data.draw(token_traces(size))
    order = data.draw(st.permutations(range(len(made))))
    lines = list(lines_of(kind, made, size, chained, "salt"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / data.draw(st.sampled_from(["a.jsonl", "a.jsonl.gz", "a"]))
        write(path, *(lines[n] for n in order))
        trace = read_trace(path, tokens_per_block=None if kind == "lmcache" else size)
    # Requests of one time stay in the order of the file.
    expected = [made[n] for n in sorted(order, key=lambda n: made[n][0])]
    assert trace.tokens_per_block == size
    assert [r.time for r in trace.requests] == [t / 1000 for t, _, _ in expected]
    assert [r.prompt_tokens for r in trace.requests] == [len(p) for _, p, _ in expected]
    if kind != "lmcache":
        assert [r.answer_tokens for r in trace.requests] == [a for _, _, a in expected]
    check_ids(trace.requests, [tuple(p) for _, p, _ in expected], size, kind != "lmcache")
    for chunk in range(1, 2 * size + 2):
        check_boundaries(trace.requests, [p for _, p, _ in expected], size, chunk)


def check_ids(
    requests: Sequence[Request], prompts: Sequence[tuple[int, ...]], size: int, partial: bool
) -> None:
    """Ids are equal if and only if the prefixes are that they name."""
    names: dict[tuple[int, ...], int] = {}
    for request, prompt in zip(requests, prompts, strict=True):
        blocks = blocks_of(prompt, size, partial)
        assert len(request.blocks) == len(blocks)
        for n, name in enumerate(request.blocks):
            assert names.setdefault(prompt[: (n + 1) * size], name) == name
    assert len(set(names.values())) == len(names)


def check_boundaries(
    requests: Sequence[Request], prompts: Sequence[list[int]], size: int, chunk: int
) -> None:
    """Chunks are shared if and only if the blocks they end in are known to begin alike."""
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    names: dict[tuple[int, int], int] = {}
    for request, prompt in zip(requests, prompts, strict=True):
        ids = boundary_ids(request, size, chunk)
        every = range(chunk, len(prompt) + 1, chunk)
        ends = [end for end in every if (end - 1) // size < len(request.blocks)]
        assert len(ids) == len(ends)
        for end, name in zip(ends, ids, strict=True):
            assert seen.setdefault(name, (end, tuple(prompt[:end]))) == (end, tuple(prompt[:end]))
            known = request.blocks[(end - 1) // size], end
            assert names.setdefault(known, name) == name
    assert len(set(names.values())) == len(names)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-2, 3), max_size=6), st.booleans(), st.sampled_from("ab")),
        max_size=12,
    )
)
def test_a_number_names_hashes_from_the_first(prompts: list[tuple[list[int], bool, str]]) -> None:
    chain = Chain()
    names: dict[tuple[object, ...], int] = {}
    for hashes, partial, root in prompts:
        tail = 3 if partial and hashes else 0
        numbers = chain.numbers(hashes, tail, root)
        assert len(numbers) == len(hashes)
        for n, number in enumerate(numbers):
            end = tail if n == len(hashes) - 1 else 0
            fresh = len(names)
            assert names.setdefault((root, end, *hashes[: n + 1]), number) == number
            assert number < fresh or number == fresh
    assert sorted(names.values()) == list(range(len(names)))


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": -1}, ["Expected `int` >= 0", "input_length"]),
        ({"input_length": True}, ["got `bool`"]),
        ({"input_length": 1000.5}, ["got `float`"]),
        ({"input_length": "1000"}, ["got `str`"]),
        ({"input_length": None}, ["got `null`"]),
        ({"input_length": 2**31}, ["<= 2147483647"]),
        ({"input_length": 2**80}, ["input_length"]),
        ({"output_length": -1}, ["output_length"]),
        ({"timestamp": -0.5}, [">= 0", "timestamp"]),
        ({"timestamp": True}, ["got `bool`"]),
        ({"timestamp": float("nan")}, ["malformed"]),
        ({"timestamp": float("inf")}, ["malformed"]),
        ({"hash_ids": [0, True]}, ["got `bool`", "hash_ids[1]"]),
        ({"hash_ids": [0, 1.5]}, ["got `float`"]),
        ({"hash_ids": [0, None]}, ["got `null`"]),
        ({"hash_ids": None}, ["got `null`"]),
        ({"hash_ids": []}, ["0 hashes", "1000 tokens", "1 or 2"]),
        ({"hash_ids": [0, 1, 2]}, ["3 hashes", "1 or 2", "tokens_per_block"]),
        ({"hash_ids": list(range(63))}, ["63 hashes", "tokens_per_block=16 would fit"]),
        ({"input_length": 1024, "hash_ids": [0]}, ["1 hashes", "make it 2"]),
    ],
)
def test_wrong_values_are_refused_with_their_line(
    file: Path, change: dict[str, Any], words: list[str]
) -> None:
    write(file, MOONCAKE, "", MOONCAKE | change, MOONCAKE)
    message = refused(file)
    assert message.startswith(f"{file}:3: ")
    assert all(word in message for word in words), message


def test_hashes_of_any_size_are_taken(file: Path) -> None:
    hashes = [2**63 - 1, 2**63, 2**64, 10**77, -(2**63), -(10**30)]
    write(
        file,
        *(MOONCAKE | {"hash_ids": [0, h]} for h in hashes),
        MOONCAKE | {"hash_ids": [0, 2**64]},
    )
    ids = [list(request.blocks) for request in read_trace(file).requests]
    assert ids == [[0, n + 1] for n in range(6)] + [[0, 3]]


@pytest.mark.parametrize(
    "line",
    [
        "x", "{", "[]", "[" * 100_000, "1", "null", '"timestamp"', "{}{}", "\x00",
        '{"timestamp": 0, "input_length": 0, "hash_ids": [' + "9" * 5000 + "]}",
        '{"timestamp": 1e999, "input_length": 0, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 0, "hash_ids": [], "x": ' + "[" * 100_000 + "}",
    ],
    ids=lambda line: line[:12],
)  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_lines_that_are_none_are_refused(file: Path, line: str, first: bool) -> None:
    write(file, *([] if first else [MOONCAKE]), line)
    message = refused(file)
    assert message.startswith(f"{file}:{1 if first else 2}: ")
    assert repr(line[:10])[1:-1] in message or "fields" in message or "hashes" in message


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.binary(max_size=60))
def test_bytes_are_read_or_refused(kind: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise"
        for content in (data, b"\x1f\x8b" + data, gzip.compress(data)):
            path.write_bytes(content)
            message = refused(path, format=kind)
            assert str(path) in message


def test_missing_fields_are_named(file: Path) -> None:
    write(file, MOONCAKE, {"timestamp": 0, "hash_ids": []})
    assert "missing required field `input_length`" in refused(file)
    write(file, {k: v for k, v in MOONCAKE.items() if k != "output_length"})
    assert read_trace(file).requests[0].answer_tokens == 0


def test_formats_are_found_by_the_first_line(file: Path) -> None:
    for name, line in (("mooncake", MOONCAKE), ("bailian", BAILIAN), ("lmcache", LMCACHE)):
        write(file, "", line)
        assert read_trace(file) == read_trace(file, format=name)
    write(file, MOONCAKE | LMCACHE)
    message = refused(file)
    assert "mooncake or lmcache" in message
    assert "format='mooncake'" in message
    assert read_trace(file, format="mooncake").tokens_per_block == 512
    write(file, {"prompt": "x"})
    assert "(prompt) are those of no format" in refused(file)
    write(file, json.dumps([MOONCAKE]))
    assert "one JSON object a line" in refused(file)
    assert "mooncake, bailian, lmcache" in refused(file, format="csv")
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(MOONCAKE).encode())
    assert len(read_trace(file).requests) == 1


def test_a_file_that_git_lfs_left_out_is_told(file: Path) -> None:
    write(file, "version https://git-lfs.github.com/spec/v1", "oid sha256:00", "size 1")
    assert "git lfs pull" in refused(file)
    assert "git lfs pull" in refused(file, format="bailian")


def test_blocks_have_one_length(file: Path) -> None:
    write(file, LMCACHE, LMCACHE | {"chunk_size": 512, "chunk_hashes": ["0xa"]})
    message = refused(file)
    assert message.startswith(f"{file}:2: ")
    assert "blocks of 512 tokens" in message
    assert f"{file}:1 says 256" in message
    write(file, LMCACHE)
    assert "tokens_per_block says 128" in refused(file, tokens_per_block=128)
    unsaid = {"timestamp": 1.0, "chunk_hashes": [1, 2], "chunk_size": 0}
    write(file, unsaid)
    assert read_trace(file).prompt_tokens == 512
    assert read_trace(file, tokens_per_block=128).prompt_tokens == 256
    write(file, MOONCAKE | {"hash_ids": [0, 1, 2, 3]})
    assert read_trace(file, tokens_per_block=256).tokens_per_block == 256


def test_files_without_requests_are_refused(file: Path) -> None:
    for content in (b"", b"\n\n", gzip.compress(b"")):
        file.write_bytes(content)
        assert "no requests" in refused(file)
        assert "input_length" in refused(file, format="bailian")


def test_damaged_compression_is_refused(file: Path) -> None:
    whole = gzip.compress(json.dumps(MOONCAKE).encode() * 100)
    file.write_bytes(whole[:-20])
    assert f"{file}: the compressed file is damaged" in refused(file)
    file.write_bytes(whole[:12] + b"\xff" * 20)
    assert "damaged" in refused(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conversatoin", "Did you mean 'conversation'?"),
        ("chta:requests=5", "Did you mean 'chat'?"),
        ("nothing/like/this.jsonl", "there is no such file"),
        ("x" * 5000, "there is no such file"),
        ("a\x00b", "there is no such file"),
    ],
)
def test_names_that_are_none_are_refused(name: str, words: str) -> None:
    assert words in refused(name)


def test_pipes_are_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(json.dumps(MOONCAKE).encode()))
    os.close(writing)
    try:
        assert len(read_trace(f"/dev/fd/{reading}").requests) == 1
    finally:
        os.close(reading)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "5"])
@pytest.mark.parametrize("name", ["limit", "tokens_per_block"])
def test_wrong_counts_are_refused(name: str, value: object) -> None:
    assert name in refused("conversation", **{name: value})
    assert "most" in refused("conversation", tokens_per_block=1 << 21)


def test_no_more_is_read_than_the_limit(file: Path) -> None:
    write(file, MOONCAKE, MOONCAKE, "not a line")
    assert len(read_trace(file, limit=2).requests) == 2
    assert f"{file}:3: " in refused(file, limit=3)
