"""``kvloft store``, with and without engines on the same directory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvloft.cli import progress
from kvloft.cli.main import main
from kvloft.testing.tiers import Checked, chain, namespace, with_all
from kvloft.tiers.base import Namespace
from kvloft.tiers.disk import DiskTier
from kvloft.tiers.options import DiskOptions

CHUNKS = with_all(chain("x", 5))
FIRST, SECOND = b"\x0a" * 16, b"\x0b" * 16


def names(digest: bytes, model: str) -> Namespace:
    return replace(namespace(digest), about={"model": model, "vllm": "0.32"})


def opened(path: Path, of: Namespace) -> Checked:
    return Checked(DiskTier(DiskOptions(path, 16 << 20, threads=1), of), of, 20.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Chunks of two models."""
    for of in (names(FIRST, "org/First-7B"), names(SECOND, "org/second\x1b[31m")):
        checked = opened(tmp_path, of)
        checked.fill(CHUNKS)
        checked.tier.close()
    return tmp_path


@pytest.fixture
def engine(store: Path) -> Iterator[Checked]:
    """A tier that is open on the store."""
    checked = opened(store, names(FIRST, "org/First-7B"))
    yield checked
    checked.tier.close()


class Shell:
    """Runs commands as a shell would."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def text(self, *args: object, code: int = 0) -> str:
        assert main(["store", *map(str, args)]) == code
        out, self.err = self._capsys.readouterr()
        return out

    def json(self, *args: object, code: int = 0) -> Any:
        return json.loads(self.text(*args, "--json", code=code))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def damage(path: Path) -> str:
    """Flip a bit in the first chunk of a segment; the file's name."""
    [file, *_] = sorted(path.glob("kvloft-1/*.seg"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    return file.name


# --- looking --------------------------------------------------------------------------------------


def test_ls(store: Path, shell: Shell) -> None:
    [one, two] = shell.json("ls", store)["namespaces"]
    assert {one["about"]["model"], two["about"]["model"]} == {
        "org/First-7B", "org/second\x1b[31m",
    }  # fmt: skip
    for space in (one, two):
        assert space["chunks"] == len(CHUNKS)
        assert space["bytes"] == sum(c.nbytes for c in CHUNKS)
        assert {c["class"]: c["chunks"] for c in space["classes"]} == dict.fromkeys(
            ("f", "s", "w0", "W0"), 5
        )
        assert space["disk_bytes"] == sum(c["disk_bytes"] for c in space["classes"])
    text = shell.text("ls", store)
    assert "org/First-7B  namespace 0a0a0a0a0a0a" in text
    assert "\x1b" not in text, "a name is obeyed by the terminal"
    assert "window 0, short" in text
    assert shell.text("ls", store / "kvloft-1") == text


def test_ls_of_a_part(store: Path, shell: Shell) -> None:
    [space] = shell.json("ls", store, "--model", "first", "--class", "state")["namespaces"]
    assert (space["namespace"], space["chunks"]) == (FIRST.hex(), 5)
    [space] = shell.json("ls", store, "--namespace", "0B")["namespaces"]
    assert space["namespace"] == SECOND.hex()
    assert shell.json("ls", store, "--older-than", "1h")["namespaces"] == []
    assert shell.text("ls", store, "--older-than", "1h") == "nothing\n"


def test_ls_of_single_chunks(store: Path, shell: Shell) -> None:
    listed = shell.json("ls", store, "--chunks", "--model", "first")["chunks"]
    assert {(c["key"], c["class"], c["depth"], c["bytes"]) for c in listed} == {
        (c.key[:16].hex(), c.code, c.depth, c.nbytes) for c in CHUNKS
    }
    assert {c["namespace"] for c in listed} == {FIRST.hex()}
    lines = shell.text("ls", store, "--chunks").splitlines()
    assert len(lines) == 2 * len(CHUNKS)
    assert CHUNKS[0].key[:16].hex() in "".join(lines)


def test_stat(store: Path, engine: Checked, shell: Shell) -> None:
    got = shell.json("stat", store)
    files = [store / "kvloft-1", *(store / "kvloft-1").rglob("*")]
    assert got["total_bytes"] == sum(path.lstat().st_size for path in files)
    assert (got["chunks"], got["namespaces"], got["writers"]) == (2 * len(CHUNKS), 2, 1)
    assert sum(size["chunks"] for size in got["sizes"]) == got["chunks"]
    text = shell.text("stat", store)
    assert "engines          1\n" in text
    assert "20.0 KiB" in text


# --- verification ---------------------------------------------------------------------------------


def test_verify_and_repair(store: Path, shell: Shell) -> None:
    got = shell.json("verify", store)
    assert (got["chunks"], got["flaws"]) == (2 * len(CHUNKS), [])
    assert "nothing is wrong" in shell.text("verify", store)
    file = damage(store)
    got = shell.json("verify", store, code=1)
    [flaw] = got["flaws"]
    assert (flaw["cause"], flaw["file"]) == ("checksum", file)
    assert file in shell.text("verify", store, code=1)
    namespace_ = flaw["namespace"]
    other = "0a" if namespace_ == SECOND.hex() else "0b"
    assert shell.json("verify", store, "--namespace", other)["flaws"] == []
    assert ": removed" in shell.text("verify", store, "--repair")
    got = shell.json("verify", store)
    assert got["flaws"] == []
    assert len(CHUNKS) <= got["chunks"] < 2 * len(CHUNKS)


def test_verify_says_how_far_it_is(
    store: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.text("verify", store)
    assert shell.err == "", "short work is told of"
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    shell.text("verify", store)
    assert "verified: " in shell.err
    assert "\x1b" not in shell.err
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    shell.text("verify", store)
    assert "verified" in terminal.getvalue()
    assert "\x1b" in terminal.getvalue()


def test_a_damaged_record_is_mended(store: Path, shell: Shell) -> None:
    [file, *_] = sorted(store.glob("kvloft-1/*.tab"))
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    assert shell.json("stat", store)["damaged_records"] == 1
    [flaw] = shell.json("verify", store, code=1)["flaws"]
    assert flaw == {"cause": "record", "file": file.name, "slot": 0}
    assert shell.json("gc", store)["mended_records"] == 1
    got = shell.json("verify", store)
    assert (got["chunks"], got["flaws"]) == (2 * len(CHUNKS), [])


# --- clearing out ---------------------------------------------------------------------------------


def test_gc(store: Path, shell: Shell) -> None:
    assert shell.json("gc", store, "--older-than", "1h")["chunks"] == 0
    assert shell.json("gc", store, "--down-to", "600KiB")["chunks"] > 0
    assert shell.json("stat", store)["total_bytes"] <= 600 << 10
    assert "removed 0 chunks" in shell.text("gc", store)


def test_clear(store: Path, engine: Checked, shell: Shell) -> None:
    got = shell.json("clear", store, "--model", "second", "--yes")
    assert got["chunks"] == len(CHUNKS)
    assert engine.check(CHUNKS) == CHUNKS
    got = shell.json("clear", store, "--class", "state", "--yes")
    assert got["chunks"] == 5
    got = shell.json("clear", store, "--yes")
    assert got["chunks"] == 15
    assert shell.json("stat", store)["sizes"] == []
    # The engine that has it open goes on.
    engine.fill(with_all(chain("new", 2)))
    assert shell.json("stat", store)["chunks"] == 8


def test_clear_asks(store: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.text("clear", store, code=2)
    assert "add --yes" in shell.err
    assert "40 chunks" in shell.err
    for answer, code, left in (("\n", 2, 40), ("n\n", 2, 40), ("y\n", 0, 0)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)
        shell.text("clear", store, code=code)
        assert "Remove 40 chunks" in shell.err
        assert shell.json("stat", store)["chunks"] == left


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "gc", "clear"])
def test_no_store(tmp_path: Path, shell: Shell, action: str) -> None:
    shell.text(action, tmp_path, *(["--yes"] if action == "clear" else []), code=2)
    assert "no store" in shell.err
    assert str(tmp_path) in shell.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("ls", "--older-than", "7"), "'7d'"),
        (("ls", "--class", "big"), "state"),
        (("ls", "--namespace", "xyz"), "hexadecimal"),
        (("gc", "--down-to", "much"), "64GiB"),
        (("gc", "--model", "first"), "--older-than"),
    ],
)
def test_options_that_make_no_sense(
    store: Path, shell: Shell, args: tuple[str, ...], words: str
) -> None:
    shell.text(args[0], store, *args[1:], code=2)
    assert words in shell.err


def test_a_lock_that_is_held(store: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloft.tiers.disk import control, survey, tools

    for module in (survey, tools):
        monkeypatch.setattr(module, "_LOCK_SECONDS", 0.05)
    with control.locked(str(store / "kvloft-1" / "control"), 1.0):
        assert shell.json("stat", store)["writers"] is None
        assert len(shell.json("ls", store)["namespaces"]) == 2
        assert shell.json("verify", store)["flaws"] == []
        shell.text("gc", store, code=2)
    assert "lock" in shell.err


def test_it_works_without_an_engine_or_a_terminal(store: Path) -> None:
    """As a person runs it; torch and vLLM must not be loaded for it."""
    code = (
        "import sys; from kvloft.cli.main import main; code = main(); "
        "sys.exit(code or 10 * any(m in sys.modules for m in ('torch', 'vllm', 'hypothesis')))"
    )
    for action in ("ls", "stat", "verify", "gc"):
        done = subprocess.run(
            [sys.executable, "-c", code, "store", action, str(store)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), action
        assert done.stdout
