"""What anybody who can write to the store's folder, or to the directory around it, can do to us:
cost chunks. Nothing is executed, followed, hung on, or allocated because a file says so."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.test_disk_format import HEADERS, RECORDS, SAMPLE, words
from tests.core.test_disk_store import DIGEST, OTHER, User, filled, still_right
from tests.effort import examples

import kvloft
from kvloft.cli.main import main
from kvloft.errors import ArenaError, ConfigError
from kvloft.mapping import Mapping
from kvloft.testing.tiers import chain, content, namespace, with_all
from kvloft.tiers.base import Outcome
from kvloft.tiers.disk import DiskTier, Store, StoreTools, control, survey
from kvloft.tiers.disk.control import CONTROL_BYTES, RING, Position
from kvloft.tiers.disk.format import (
    FULL_CODE,
    ON_NOTHING,
    ON_SELF,
    RECORD_BYTES,
    Header,
    Record,
    Segment,
    is_sound,
    least_segment_bytes,
    pack_header,
    pack_record,
    segment_of,
    sound_rows,
)
from kvloft.tiers.disk.places import Place, flaw
from kvloft.tiers.disk.room import FIXED_BYTES
from kvloft.tiers.disk.segments import Files, aligned
from kvloft.tiers.disk.survey import Selection, Survey, locate, names_in
from kvloft.tiers.disk.view import NONE, View
from kvloft.tiers.options import DiskOptions
from kvloft.units import PAGE_BYTES

SOURCES = sorted(Path(kvloft.__file__).parent.rglob("*.py"))
ALL = Selection()
STORE = "kvloft-1"
NAMES_FILE = f"names/{DIGEST.hex()}.json"
T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises; fails if it takes longer. A thread that hangs is left."""
    out: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return out[0]


@contextlib.contextmanager
def no_more_memory_than(nbytes: int) -> Iterator[None]:
    """Fails if Python and numpy together have taken more than so much at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= nbytes, f"{peak >> 20} MiB"


def sparse(path: Path, nbytes: int) -> None:
    """A file that is long and takes nothing."""
    with path.open("wb") as file:
        file.truncate(nbytes)


# --- nothing is executed --------------------------------------------------------------------------

LOADERS = {
    "cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve", "torch.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load",
}  # fmt: skip
BUILTINS = {"__import__", "compile", "eval", "exec"}


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def executes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that could run what they read, and with what."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name in LOADERS)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            yield from ((node.lineno, name) for name in names & LOADERS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BUILTINS | LOADERS or name in ("os.system", "os.popen"):
                yield node.lineno, name
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "shell") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, keyword.arg


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parent)))
def test_nothing_that_is_read_is_executed(source: Path) -> None:
    assert list(executes(ast.parse(source.read_text()))) == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "eval(x)", "exec(open(p).read())",
     "from yaml import load", "np.load(p, allow_pickle=True)", "torch.load(p)",
     "subprocess.run(x, shell=True)", "__import__(name)", "import marshal as m"],
)  # fmt: skip
def test_what_executes_is_seen(text: str) -> None:
    assert list(executes(ast.parse(text)))


# --- everything is private ------------------------------------------------------------------------


@pytest.fixture(params=[0, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> dict[str, str]:
    """The permissions of everything below, and of the folder itself."""
    return {str(p): oct(stat.S_IMODE(p.lstat().st_mode)) for p in (root, *sorted(root.rglob("*")))}


def assert_private(root: Path) -> None:
    found = modes(root)
    assert len(found) > 5
    for path, mode in found.items():
        assert mode == ("0o700" if Path(path).is_dir() else "0o600"), path


def test_what_a_tier_makes_is_private(tmp_path: Path, umask: int) -> None:
    """The directories above it too, where it has to make them."""
    tier = DiskTier(DiskOptions(tmp_path / "a" / "b" / "c", 1 << 20), namespace())
    future = tier.put(chain("x", 1)[0], memoryview(bytearray(1 << 16)))
    assert future is not None
    assert future.result(20) is Outcome.DONE
    assert_private(tmp_path / "a")
    tier.close()


def test_what_is_mended_is_private(tmp_path: Path, umask: int) -> None:
    filled(tmp_path)
    folder = tmp_path / STORE
    shutil.rmtree(folder / "writers")
    shutil.rmtree(folder / "names")
    (folder / "control").unlink()
    for table in folder.glob("*.tab"):
        table.unlink()
    StoreTools(tmp_path).collect()
    User(tmp_path, 1 << 20).leave()
    assert_private(folder)


def test_folders_that_others_could_write_to_are_closed(tmp_path: Path) -> None:
    """They may have been made by hand, or the mount may have changed them."""
    chunks = filled(tmp_path)
    for path in (tmp_path / STORE, tmp_path / STORE / "writers", tmp_path / STORE / "names"):
        path.chmod(0o777)
    assert still_right(tmp_path, chunks) == len(chunks)
    assert_private(tmp_path / STORE)


def test_a_folder_that_others_can_write_to_and_we_can_not_close_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STORE).mkdir()
    (tmp_path / STORE).chmod(0o777)
    real = os.fstat

    def as_of_another(fd: int) -> os.stat_result:
        values = list(real(fd))
        values[4] = os.geteuid() + 1
        return os.stat_result(values)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(os, "fstat", as_of_another)
    with pytest.raises(ConfigError, match="another user"):
        DiskTier(DiskOptions(tmp_path, 1 << 20), namespace())
    assert list((tmp_path / STORE).rglob("*")) == []


def test_the_shared_mapping_is_private(tmp_path: Path, umask: int) -> None:
    mapping = Mapping("test", 1 << 20, rank=0, ranks=1, digest=b"d" * 16, directory=tmp_path)
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    mapping.close()


# --- nothing is followed, nothing hangs -----------------------------------------------------------

OUTSIDE = b"mine " * 20_000
"""What lies outside of the store. Longer than any file of a small store has to be."""


class Yard:
    """A place outside of the store, which must stay as it is."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self.file = place / "file"
        self.file.write_bytes(OUTSIDE * 8)
        (place / "folder").mkdir()
        (place / "folder" / "inner").write_bytes(OUTSIDE)

    def untouched(self) -> bool:
        return (
            self.file.read_bytes() == OUTSIDE * 8
            and sorted(p.name for p in self.place.rglob("*")) == ["file", "folder", "inner"]
            and (self.place / "folder" / "inner").read_bytes() == OUTSIDE
        )


def _socket(path: Path, _: Yard) -> None:
    # Bound by a short relative name: the system takes no more than 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path, _: Yard) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root may make devices")


def _folder(path: Path, _: Yard) -> None:
    path.mkdir()
    (path / "inner").write_text("x")


PLANTS: dict[str, Callable[[Path, Yard], object]] = {
    "link": lambda path, yard: path.symlink_to(yard.file),
    "link to nothing": lambda path, yard: path.symlink_to(yard.place / "made"),
    "link to a folder": lambda path, yard: path.symlink_to(yard.place / "folder"),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "device": _device,
    "folder": _folder,
    "hard link": lambda path, yard: path.hardlink_to(yard.file),
}


def segment_files(folder: Path, ending: str) -> list[str]:
    return [path.name for path in sorted(folder.glob(f"*{ending}"))]


def following(folder: Path, ending: str) -> list[str]:
    """The files that the next segments of all sizes that are in use would have."""
    found = [s for path in folder.glob("*.seg") if (s := segment_of(path.name))]
    number = max(s.number for s in found) + 1
    return [
        one.data_name if ending == ".seg" else one.table_name
        for s in found
        for one in (Segment(number, s.stride, s.slots), Segment(number + 1, s.stride, s.slots))
    ]


PLACES: dict[str, Callable[[Path], list[str]]] = {
    "data": lambda folder: segment_files(folder, ".seg")[:1],
    "table": lambda folder: segment_files(folder, ".tab")[:1],
    "data to come": lambda folder: following(folder, ".seg"),
    "table to come": lambda folder: following(folder, ".tab"),
    "writer": lambda _: [f"writers/{'a' * 16}"],
    "name": lambda _: [NAMES_FILE],
    "name to come": lambda _: [NAMES_FILE.replace(".json", ".tmp")],
    "control": lambda _: ["control"],
}


def plant(folder: Path, place: str, kind: str, yard: Yard) -> list[Path]:
    paths = [folder / name for name in dict.fromkeys(PLACES[place](folder))]
    for path in paths:
        path.unlink(missing_ok=True)
        PLANTS[kind](path, yard)
    return paths


def uproot(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kind", "place"),
    # A control file that is linked from elsewhere has a test of its own.
    [(k, p) for k in PLANTS for p in PLACES if (k, p) != ("hard link", "control")],
)
def test_what_is_planted_before_the_start(tmp_path: Path, kind: str, place: str) -> None:
    yard = Yard(tmp_path / "yard")
    chunks = filled(tmp_path)
    plant(tmp_path / STORE, place, kind, yard)
    if place == "control":
        for attempt in (
            lambda: User(tmp_path, 1 << 20),
            lambda: StoreTools(tmp_path).collect(),
            lambda: DiskTier(DiskOptions(tmp_path, 1 << 20), namespace()),
        ):
            with pytest.raises((OSError, ConfigError), match="control"):
                within(20, attempt)
        assert within(20, lambda: Survey(tmp_path).totals()).writers is None
    else:
        within(20, lambda: list(Survey(tmp_path).broken(ALL)))
        within(20, lambda: list(Survey(tmp_path).unreadable(ALL, lambda _: None)))
        found = within(20, lambda: still_right(tmp_path, chunks, 2 << 20))
        assert found == len(chunks) or place == "data"
        within(20, lambda: StoreTools(tmp_path).clear(ALL))
    assert kind == "hard link" or yard.untouched()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", PLANTS)
def test_what_is_planted_under_a_running_process(tmp_path: Path, kind: str, place: str) -> None:
    yard = Yard(tmp_path / "yard")
    chunks = [c for i in range(2) for c in with_all(chain(("filled", i), 3))]
    more = with_all(chain("more", 2))
    user = User(tmp_path, 2 << 20, seconds=0.2)
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    planted = plant(tmp_path / STORE, place, kind, yard)

    def go_on() -> None:
        for _ in range(2):
            for chunk in (*chunks, *more):
                with contextlib.suppress(OSError):
                    user.put(chunk)
                with contextlib.suppress(OSError):
                    user.get(chunk)  # Which compares the bytes.
            with contextlib.suppress(OSError):
                user.store.upkeep()
        user.leave()

    within(30, go_on)
    assert kind == "hard link" or yard.untouched()
    for path in planted:
        uproot(path)
    still_right(tmp_path, [*chunks, *more], 2 << 20)


def test_a_file_that_is_linked_from_elsewhere_does_not_become_the_control_file(
    tmp_path: Path,
) -> None:
    """A copy made of hard links shares the control file; that is no reason to stop."""
    chunks = filled(tmp_path)
    yard = Yard(tmp_path / "yard")
    file = tmp_path / STORE / "control"
    shutil.copytree(tmp_path / STORE, tmp_path / "copy", copy_function=os.link)
    assert still_right(tmp_path, chunks) == len(chunks)
    shutil.rmtree(tmp_path / "copy")
    plant(tmp_path / STORE, "control", "hard link", yard)
    with pytest.raises(OSError, match="control"):
        User(tmp_path, 1 << 20)
    assert yard.untouched()
    file.unlink()
    assert still_right(tmp_path, chunks) == len(chunks)


@pytest.mark.parametrize("name", ["", "writers", "names"])
@pytest.mark.parametrize("kind", ["link to a folder", "link", "pipe", "socket", "link to nothing"])
def test_a_folder_that_is_something_else(tmp_path: Path, name: str, kind: str) -> None:
    yard = Yard(tmp_path / "yard")
    filled(tmp_path)
    target = tmp_path / STORE / name
    shutil.rmtree(target)
    PLANTS[kind](target, yard)
    for attempt in (
        lambda: DiskTier(DiskOptions(tmp_path, 1 << 20), namespace()),
        lambda: Survey(locate(tmp_path)).spaces(ALL),
        lambda: StoreTools(locate(tmp_path)).clear(ALL),
    ):
        # The tools may go on without what only people want to read.
        with contextlib.suppress(OSError, ConfigError):
            within(20, attempt)
    with pytest.raises(ConfigError, match="path"):
        DiskTier(DiskOptions(tmp_path, 1 << 20), namespace())
    assert yard.untouched()


@pytest.mark.parametrize("name", ["", "writers", "names"])
def test_a_folder_that_becomes_a_link(tmp_path: Path, name: str) -> None:
    """Under a running process; what has the right names in there must not be touched either."""
    yard = Yard(tmp_path / "yard")
    user = User(tmp_path, 2 << 20)
    chunks = with_all(chain("x", 3))
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * len(chunks)
    target, elsewhere = tmp_path / STORE / name, tmp_path / "elsewhere"
    target.rename(elsewhere)
    (elsewhere / ("f" * 16)).write_text("x")
    target.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}

    def go_on() -> None:
        for chunk in with_all(chain("y", 3)):
            with contextlib.suppress(OSError):
                user.put(chunk)
        with contextlib.suppress(OSError):
            user.store.upkeep()
        with contextlib.suppress(OSError):
            user.store.join(OTHER, {"model": "other"})
        with contextlib.suppress(OSError):
            StoreTools(tmp_path).collect()

    within(20, go_on)
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before
    assert yard.untouched()


def test_a_path_that_is_a_link_is_what_its_owner_wants(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    chunks = filled(tmp_path / "link")
    assert still_right(tmp_path / "real", chunks) == len(chunks)
    assert locate(tmp_path / "link") == tmp_path / "link"


def test_a_file_that_becomes_a_link_is_not_cut(tmp_path: Path) -> None:
    """Between the look at its size and the cut."""
    yard = Yard(tmp_path / "yard")
    filled(tmp_path)
    folder = tmp_path / STORE
    segment = segment_of(segment_files(folder, ".seg")[0])
    assert segment is not None
    # The size of a link is the length of what it points to.
    target = yard.place / Path(*["."] * 2000) / "file"
    (folder / segment.table_name).unlink()
    (folder / segment.table_name).symlink_to(f"{yard.place}/{'./' * 1900}file")
    real = Path.lstat

    def longer(path: Path) -> os.stat_result:
        values = list(real(path))
        values[6] += 1 << 20
        return os.stat_result(values)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(Path, "lstat", longer)
        Files(folder).trim(segment)
    assert target.read_bytes() == OUTSIDE * 8


def test_folders_in_folders_in_folders(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    fd = os.open(tmp_path / STORE, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    try:
        user = within(20, lambda: User(tmp_path, 16 << 20))
        assert within(20, lambda: user.held(chunks)) == chunks
        more = with_all(chain("more", 3))
        assert within(20, lambda: [user.put(c) for c in more]) == [Outcome.DONE] * len(more)
        user.leave()
        within(20, lambda: Survey(tmp_path).totals())
    finally:
        # Neither pathlib nor shutil gets to the bottom of it.
        subprocess.run(["rm", "-rf", str(tmp_path / STORE)], check=True)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "link to a folder", "folder"])
def test_the_shared_mapping_follows_nothing(tmp_path: Path, kind: str) -> None:
    yard = Yard(tmp_path / "yard")
    (tmp_path / "shm").mkdir()
    PLANTS[kind](tmp_path / "shm" / "kvloft-test", yard)
    with pytest.raises(ArenaError):
        within(
            20,
            lambda: Mapping(
                "test", 1 << 20, rank=0, ranks=1, digest=b"d" * 16, directory=tmp_path / "shm"
            ),
        )
    assert yard.untouched()


# --- names ----------------------------------------------------------------------------------------

NASTY = "../../x/..\\\n  full  99\r\x1b[2J\x00\u202e\u2028\x85 end"


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\udc80\ud800"])
def test_paths_that_no_file_system_can_have(path: str) -> None:
    with pytest.raises(ConfigError, match="path"):
        DiskTier(DiskOptions(Path(path), 1 << 20), namespace())


def output(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    """The lines that a command prints."""
    assert main(["store", *command]) in (0, 1)
    out = capsys.readouterr().out
    assert all(c.isprintable() for c in out.replace("\n", "")), repr(out)
    return out.split("\n")


def test_names_stay_in_their_folder_and_on_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, text in enumerate(("plain", NASTY)):
        path = tmp_path / ("plain", "nasty\n  full  99\x1b[2J")[at]
        user = User(path, 1 << 20)
        user.store.join(DIGEST, {"model": text, text: text, "namespace": text, "digest": text})
        assert user.put(chain("x", 1)[0]) is Outcome.DONE
        user.leave()
    nasty = tmp_path / "nasty\n  full  99\x1b[2J"
    names = [p.relative_to(tmp_path).parts for p in tmp_path.rglob("*")]
    assert {parts[0] for parts in names} == {"plain", nasty.name}
    assert not {part for parts in names for part in parts[1:] if "\n" in part or "x" in part}
    for command in (["ls"], ["ls", "--chunks"], ["stat"], ["verify"]):
        plain = output(capsys, *command, str(tmp_path / "plain"))
        assert len(output(capsys, *command, str(nasty))) == len(plain)
    assert main(["store", "ls", "--json", str(nasty)]) == 0
    [space] = json.loads(capsys.readouterr().out)["namespaces"]
    assert space["about"]["model"] == NASTY


CODES = [b"\n\x1b[m", b"\r\n\0\0", b"\0\0\0f", b"\xff\xfe\0\0", b"\x9b2J\0", b"w0\n\0", b"    "]


@pytest.mark.parametrize("code", CODES)
def test_classes_stay_on_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: bytes
) -> None:
    """They come from records, which anybody may have made."""
    user = User(tmp_path, 1 << 20)
    [chunk] = chain("x", 1)
    assert user.put(chunk) is Outcome.DONE
    place = user.store.find(*user.name(chunk))
    assert place is not None
    record = SAMPLE._replace(rests=ON_NOTHING, digest=DIGEST, nbytes=100)
    lines = []
    for one in (b"zz\0\0", code):
        forge(tmp_path, place, record._replace(code=one), slot=place.slot)
        lines.append([len(output(capsys, *c, str(tmp_path))) for c in (["ls"], ["ls", "--chunks"])])
        output(capsys, "verify", str(tmp_path))
    assert lines[0] == lines[1]
    user.leave()


# --- forged tables, pages and control files -------------------------------------------------------


def forge(path: Path, place: Place, record: Record, slot: int) -> None:
    """Put a record into a table, with all its checksums."""
    with (path / STORE / place.segment.table_name).open("r+b") as table:
        table.seek(slot * RECORD_BYTES)
        table.write(pack_record(record, place.segment.number, slot))


KEYS = st.sampled_from([b"k" * 16, b"p" * 16, bytes(16)])
FORGED = st.builds(
    Record._replace,
    RECORDS,
    key=KEYS,
    parent=KEYS,
    digest=st.sampled_from([DIGEST, OTHER]),
    code=st.sampled_from([FULL_CODE, b"s\0\0\0", b"w0\0\0", b"\n\0\xff\0"]),
    nbytes=st.sampled_from([0, 1, 4096, 8192, 1 << 40, (1 << 64) - 1]),
    depth=st.sampled_from([0, 1, 2, 3, (1 << 32) - 1]),
)
"""Records that may rest on each other, or on themselves."""


def template(path: Path) -> tuple[Segment, int]:
    """A store with one segment of 8 slots and 4 chunks, and a limit that lets few more in."""
    user = User(path, 64 * 8 * (4 * PAGE_BYTES))
    [chunk] = chain("x", 1)
    chunk = chunk._replace(nbytes=8192)
    for number in range(4):
        assert user.put(chunk._replace(key=bytes([number]) * 32)) is Outcome.DONE
    [segment] = [extent.segment for extent in user.store.view.extents.values()]
    user.leave()
    assert segment.slots >= 8
    return segment, FIXED_BYTES + segment.total_bytes + 2 * least_segment_bytes(4096)


def survives(path: Path, limit: int) -> None:
    """Whatever has been done to a store, all of it can be used: free slots, new segments, and what
    is there already, which has to make room."""
    user = User(path, limit, seconds=5)
    try:
        chunks = [c._replace(nbytes=8192) for c in chain("new", 4)]
        chunks += [chain(("new", i), 1)[0]._replace(nbytes=4096) for i in range(3)]
        chunks += [chain(("other", i), 1)[0]._replace(nbytes=8192) for i in range(8)]
        for chunk in chunks:
            assert user.put(chunk) is Outcome.DONE
            assert user.get(chunk) is Outcome.DONE
        user.store.upkeep()
        for slot_id in user.store.view.all_ids():
            segment, slot = user.store.view.place(slot_id)
            assert 0 <= slot < segment.slots
    finally:
        user.leave()
    report = Survey(path)
    assert report.spaces(ALL)
    for _ in report.entries(ALL):
        pass
    assert report.totals().damaged_records == 0


@settings(max_examples=examples(0.4))
@given(records=st.lists(FORGED, min_size=1, max_size=8))
def test_forged_records_cost_chunks_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    path = tmp_path_factory.mktemp("forged")
    segment, limit = template(path)
    for slot, record in enumerate(records):
        forge(path, Place(segment, slot), record, slot)
    within(20, lambda: survives(path, limit))
    shutil.rmtree(path)


@settings(max_examples=examples(0.2))
@given(records=st.lists(FORGED, min_size=1, max_size=8))
def test_forged_records_under_a_running_process(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    """As if another engine had written them, and had said so."""
    path = tmp_path_factory.mktemp("forged")
    segment, limit = template(path)
    user = User(path, limit)
    for slot, record in enumerate(records):
        forge(path, Place(segment, slot), record, slot)
    with control.locked(f"{path / STORE}/control", 1.0) as fd:
        position = control.read_position(fd)
        assert position is not None
        changes = [(segment.number, slot) for slot in range(len(records))]
        control.write_changes(fd, position.sequence, changes)
        control.write_position(
            fd, Position(position.epoch, position.sequence + len(changes), False, 1000)
        )

    def go_on() -> None:
        user.store.peek()
        for i in range(8):
            [chunk] = chain(("other", i), 1)
            user.put(chunk._replace(nbytes=8192))
            user.get(chunk._replace(nbytes=8192))
        user.store.upkeep()
        user.leave()
        survives(path, limit)

    within(20, go_on)
    shutil.rmtree(path)


def test_a_chunk_that_rests_on_itself_is_none(tmp_path: Path) -> None:
    """What rests on it would have no end. By its record, and by its page."""
    segment, limit = template(tmp_path)
    record = SAMPLE._replace(rests=ON_SELF, digest=DIGEST, code=FULL_CODE, nbytes=100)
    assert not is_sound(record, segment)
    assert is_sound(record._replace(code=b"s\0\0\0"), segment)
    rows = np.zeros((segment.slots, RECORD_BYTES), np.uint8)
    rows[1] = np.frombuffer(pack_record(record, segment.number, 1), np.uint8)
    assert np.flatnonzero(~sound_rows(rows, segment)).tolist() == [1]
    page = aligned(PAGE_BYTES)
    header = Header(
        ON_SELF, 1, DIGEST, FULL_CODE, 1, bytes(16), 100, segment.slot_bytes, segment.number, 0, 1,
        1, b"k" * 32,
    )  # fmt: skip
    pack_header(page, header)
    with (tmp_path / STORE / segment.data_name).open("r+b") as data:
        data.write(page)
    (tmp_path / STORE / segment.table_name).unlink()
    within(20, lambda: survives(tmp_path, limit))


@settings(max_examples=examples(0.2))
@given(headers=st.lists(HEADERS, min_size=8, max_size=8), records=st.lists(FORGED, min_size=8))
def test_forged_pages_are_no_better(
    tmp_path_factory: pytest.TempPathFactory, headers: list[Header], records: list[Record]
) -> None:
    """A damaged table is made anew from them."""
    path = tmp_path_factory.mktemp("forged")
    segment, limit = template(path)
    (path / STORE / segment.table_name).unlink()
    page = aligned(PAGE_BYTES)
    with (path / STORE / segment.data_name).open("r+b") as data:
        for slot, (header, record) in enumerate(zip(headers, records, strict=False)):
            if slot == segment.slots:
                break
            pack_header(
                page,
                header._replace(
                    segment=segment.number, slot=slot, slot_bytes=segment.slot_bytes,
                    digest=record.digest, code=record.code, key=record.key, parent=record.parent,
                    depth=record.depth, nbytes=record.nbytes,
                ),
            )  # fmt: skip
            data.seek(slot * segment.stride)
            data.write(page)
    within(20, lambda: survives(path, limit))
    shutil.rmtree(path)


def test_a_namespace_takes_memory_in_proportion_to_its_chunks(tmp_path: Path) -> None:
    User(tmp_path, 1 << 20).leave()
    segment = Segment(90, 2 * PAGE_BYTES, 1500)
    sparse(tmp_path / STORE / segment.data_name, segment.data_bytes)
    records = (
        SAMPLE._replace(digest=slot.to_bytes(16, "little"), rests=ON_NOTHING, nbytes=4096)
        for slot in range(segment.slots)
    )
    raw = b"".join(pack_record(record, 90, slot) for slot, record in enumerate(records))
    (tmp_path / STORE / segment.table_name).write_bytes(raw)
    store = Store(tmp_path)
    with no_more_memory_than(segment.slots * 4096):
        store.load()
    assert len(store.view.all_ids()) == segment.slots


def test_there_may_be_more_namespaces_than_two_bytes_can_count() -> None:
    view, segment = View(), Segment(1, 2 * PAGE_BYTES, 1)
    view.add_segment(segment)
    for number in range(1 << 16):
        view.space_of(number.to_bytes(16, "little"))
    view.publish(0, SAMPLE, NONE)
    assert view.digest(0) == SAMPLE.digest
    assert view.find(SAMPLE.digest, SAMPLE.name) == 0


POSITIONS = st.builds(
    Position,
    epoch=words(64),
    sequence=st.sampled_from([0, 1, RING, (1 << 63) - 1, (1 << 64) - 1]) | words(64),
    dirty=st.booleans(),
    next_segment=st.sampled_from([0, 1, (1 << 32) - 1]) | words(32),
)


@settings(max_examples=examples(0.4))
@given(position=POSITIONS, ring=st.binary(max_size=200), running=st.booleans())
@example(Position(1, 0, False, 0), b"", False)
@example(Position(1, 0, False, (1 << 32) - 1), b"", False)
@example(Position(1, (1 << 64) - 1, False, 9), b"", False)
def test_forged_control_files_cost_chunks_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, position: Position, ring: bytes, running: bool
) -> None:
    path = tmp_path_factory.mktemp("forged")
    _, limit = template(path)
    user = User(path, limit) if running else None
    file = path / STORE / "control"
    with file.open("r+b") as one:
        if user is not None:  # So that it believes the ring.
            known = control.read_position(one.fileno())
            assert known is not None
            position = Position(known.epoch, position.sequence, position.dirty, 9)
        control.write_position(one.fileno(), position)
        one.seek(PAGE_BYTES)
        one.write((ring * (RING * 8))[: RING * 8] if ring else bytes(8))

    def go_on() -> None:
        if user is not None:
            user.store.peek()
            user.store.upkeep()
            user.store.upkeep()
            user.leave()
        survives(path, limit)

    within(20, go_on)
    shutil.rmtree(path)


@settings(max_examples=examples(2))
@given(raw=st.binary(max_size=2 * PAGE_BYTES), size=st.sampled_from([0, CONTROL_BYTES, 1 << 40]),
       since=st.integers(-5, 1 << 64), length=st.integers(-5, 2 * RING))  # fmt: skip
def test_no_bytes_make_the_control_file_raise(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, size: int, since: int, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "some-control"
    path.write_bytes(raw)
    if size:
        os.truncate(path, size)
    with path.open("r+b") as file:
        assert control.read_position(file.fileno()) is None
        changes = control.read_changes(file.fileno(), since, since + length)
    assert changes is None or len(changes) == length


# --- names and sizes of segments ------------------------------------------------------------------


@settings(max_examples=examples(3))
@given(name=st.text(max_size=60) | st.from_regex(r"\d{1,12}-\d{1,15}-\d{1,9}\.(seg|tab)"))
def test_no_name_makes_more_of_a_segment_than_there_can_be(name: str) -> None:
    segment = segment_of(name)
    if segment is not None:
        assert name in (segment.data_name, segment.table_name)
        assert segment.number < 1 << 32
        assert segment.total_bytes < 1 << 61


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("000090-8192-1048576.seg", 0),
        ("000090-8192-1048576.seg", 8192 << 20),
        ("000090-8192-1048576.tab", 128 << 20),
        ("000090-1099511627776-1.seg", 0),
        ("000090-1099511627776-1.seg", 1 << 40),
        ("000090-1099511627776-1048576.seg", 1 << 42),
        ("4294967295-8192-1.seg", 8192),
        ("4294967294-8192-1.seg", 8192),
        ("4294967295-8192-1.tab", 4096),
    ],
)
def test_a_forged_size_takes_no_memory_and_a_forged_number_no_others(
    tmp_path: Path, name: str, size: int
) -> None:
    chunks = filled(tmp_path)
    (tmp_path / STORE / "control").unlink()  # So that numbers are counted anew.
    sparse(tmp_path / STORE / name, size)
    with no_more_memory_than(32 << 20):
        within(30, lambda: list(Survey(tmp_path).broken(ALL)))
        within(30, lambda: list(Survey(tmp_path).unreadable(ALL, lambda _: None)))
        within(30, lambda: Survey(tmp_path).totals())
        user = within(30, lambda: User(tmp_path, 1 << 20))
    user.leave()
    within(30, lambda: still_right(tmp_path, chunks))


def test_a_forged_chunk_takes_no_memory_to_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    segment = Segment(90, 1 << 30, 1)
    sparse(tmp_path / STORE / segment.data_name, segment.data_bytes)
    record = SAMPLE._replace(rests=ON_NOTHING, digest=DIGEST, nbytes=segment.slot_bytes)
    (tmp_path / STORE / segment.table_name).write_bytes(pack_record(record, 90, 0))
    sizes = []
    real = aligned

    def note(nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(survey, "aligned", note)
    flaws = list(Survey(tmp_path).unreadable(ALL, lambda _: None))
    assert [flaw.cause for flaw in flaws] == ["header"]
    assert max(sizes, default=0) <= 16 << 20


# --- bytes ----------------------------------------------------------------------------------------

CHUNK = chain("x", 1)[0]._replace(nbytes=8000)
PLACE = Place(Segment(3, 3 * PAGE_BYTES, 4), 2)


def whole() -> tuple[bytes, bytes]:
    """The page and the bytes of a chunk as they are on disk."""
    import xxhash

    data = content(CHUNK, DIGEST).ljust(2 * PAGE_BYTES, b"\0")
    page = aligned(PAGE_BYTES)
    header = Header(
        ON_NOTHING, 1, DIGEST, FULL_CODE, 1, bytes(16), 8000, 2 * PAGE_BYTES, 3, 2,
        xxhash.xxh3_64_intdigest(data), 1, CHUNK.key,
    )  # fmt: skip
    pack_header(page, header)
    return bytes(page), data


GOOD = b"".join(whole())
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "copy", "insert"]),
        st.integers(0, len(GOOD) - 1), st.integers(0, len(GOOD) - 1), st.binary(max_size=64),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


def edited(edits: list[tuple[str, int, int, bytes]]) -> bytes:
    raw = bytearray(GOOD)
    for kind, at, other, data in edits:
        match kind:
            case "flip" if at < len(raw):
                raw[at] ^= 1 << other % 8
            case "set":
                raw[at : at + len(data)] = data
            case "cut":
                del raw[at:]
            case "copy":
                raw[at : at + other % 4096] = raw[other : other + other % 4096]
            case _:
                raw[at:at] = data
    return bytes(raw)


@settings(max_examples=examples(10))
@given(edits=EDITS)
def test_bytes_that_were_altered_are_never_the_chunk(
    edits: list[tuple[str, int, int, bytes]],
) -> None:
    raw = edited(edits)
    got = min(len(raw), len(GOOD))
    filled_up = raw[: len(GOOD)].ljust(len(GOOD), b"\0")
    page, data = memoryview(filled_up[:PAGE_BYTES]), memoryview(filled_up[PAGE_BYTES:])
    cause = flaw(DIGEST, CHUNK, PLACE, page, data, got, verify=True)
    assert (cause is None) == (raw[: len(GOOD)] == GOOD)


@settings(max_examples=examples(0.5))
@given(edits=EDITS)
def test_bytes_that_were_altered_on_disk_are_never_served(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, int, bytes]]
) -> None:
    """The same through a store, whose slot and whose neighbour are overwritten."""
    path = tmp_path_factory.mktemp("altered")
    user = User(path, 160 << 10)
    chunks = [c._replace(nbytes=8000) for i in range(3) for c in chain(i, 1)]
    assert [user.put(c) for c in chunks] == [Outcome.DONE] * 3
    place = user.store.find(*user.name(chunks[0]))
    assert place is not None
    file = path / STORE / place.segment.data_name
    with file.open("r+b") as data:
        data.seek(place.slot * place.segment.stride)
        data.write(edited(edits))
        if any(kind == "cut" for kind, *_ in edits):
            data.truncate()
    for _ in range(2):
        for chunk in chunks:
            assert user.get(chunk) in (Outcome.DONE, Outcome.MISSING, Outcome.DAMAGED)
        assert user.get(chunks[0]) is not Outcome.DONE
        with contextlib.suppress(OSError):
            user.store.upkeep()
    user.leave()
    shutil.rmtree(path)


@settings(max_examples=examples(2))
@given(
    raw=st.binary(max_size=300)
    | st.recursive(
        st.none() | st.text() | st.floats() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_bytes_make_a_name_anything_but_text(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "some-names"
    folder.mkdir(exist_ok=True)
    (folder / f"{DIGEST.hex()}.json").write_bytes(raw)
    found: dict[Any, Any] = dict(names_in(folder))
    assert list(found) == [DIGEST]
    assert all(isinstance(text, str) for pair in found[DIGEST].items() for text in pair)
