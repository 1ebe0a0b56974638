"""Looking into a store and clearing it out, with other users on it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.core.test_disk_store import (
    DIGEST,
    OTHER,
    User,
    at_time,
    filled,
    flaws,
    still_right,
    used,
)

from kvloft.errors import ConfigError
from kvloft.testing.tiers import chain, with_all
from kvloft.tiers.base import Outcome
from kvloft.tiers.disk import StoreTools
from kvloft.tiers.disk.format import RECORD_BYTES
from kvloft.tiers.disk.survey import (
    Progress,
    Selection,
    Survey,
    class_name,
    locate,
    parse_age,
)
from kvloft.units import PAGE_BYTES

ALL = Selection()


def older_than(seconds: float) -> Selection:
    return Selection(unused_since=time.time() - seconds)


# --- looking --------------------------------------------------------------------------------------


def test_a_store_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no store"):
        locate(tmp_path)
    filled(tmp_path)
    assert locate(tmp_path) == tmp_path
    assert locate(tmp_path / "kvloft-1") == tmp_path


def test_all_that_is_there_is_seen(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    other = User(tmp_path, 1 << 20, OTHER)
    other.put(chunks[0])
    other.reserve(chunks[1])
    survey = Survey(tmp_path)
    entries = list(survey.entries(Selection(namespace=DIGEST.hex())))
    assert {(e.key, e.code, e.depth, e.nbytes) for e in entries} == {
        (c.key[:16], c.code, c.depth, c.nbytes) for c in chunks
    }
    assert all(abs(entry.used - time.time()) < 60 for entry in entries)
    assert {e.name for e in entries} == {other.name(c)._replace(digest=DIGEST) for c in chunks}
    [new, old] = sorted(survey.spaces(ALL), key=lambda space: space.use.chunks)
    assert (new.digest, new.use.chunks, old.digest, old.use.chunks) == (OTHER, 1, DIGEST, 24)
    assert old.use.nbytes == sum(c.nbytes for c in chunks)
    assert old.about["model"] == "test"
    for code, use in old.classes.items():
        mine = [c for c in chunks if c.code == code]
        assert (use.chunks, use.nbytes) == (len(mine), sum(c.nbytes for c in mine))
    totals = survey.totals()
    assert (totals.chunks, totals.writers, totals.namespaces) == (25, 1, 2)
    assert sum(size.reserved for size in totals.sizes) == 1
    assert totals.total_bytes == used(tmp_path)
    assert sum(size.chunks for size in totals.sizes) == 25
    told: list[tuple[int, int, int]] = []

    def tell(progress: Progress) -> None:
        told.append((progress.done_bytes, progress.total_bytes, progress.chunks))

    assert list(survey.unreadable(ALL, tell)) == []
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == old.use.slot_bytes + new.use.slot_bytes
    assert told[-1][2] == 25
    assert StoreTools(tmp_path).collect().chunks == 0
    assert other.get(chunks[0]) is Outcome.DONE
    other.leave()


@pytest.mark.parametrize(
    ("selection", "codes"),
    [
        (Selection(), {"f", "s", "w0", "W0"}),
        (Selection(code="full"), {"f"}),
        (Selection(code="f"), {"f"}),
        (Selection(code="state"), {"s"}),
        (Selection(code="window"), {"w0", "W0"}),
        (Selection(code="short"), {"w0"}),
        (Selection(code="whole"), {"W0"}),
        (Selection(code="W0"), {"W0"}),
        (Selection(code="w1"), set()),
        (Selection(model="TES"), {"f", "s", "w0", "W0"}),
        (Selection(model="other"), set()),
        (Selection(namespace="01"), {"f", "s", "w0", "W0"}),
        (Selection(namespace="02"), set()),
        (older_than(3600), set()),
        (older_than(-3600), {"f", "s", "w0", "W0"}),
    ],
)
def test_selections(tmp_path: Path, selection: Selection, codes: set[str]) -> None:
    filled(tmp_path)
    survey = Survey(tmp_path)
    assert {entry.code for entry in survey.entries(selection)} == codes
    assert {code for space in survey.spaces(selection) for code in space.classes} == codes


def test_selections_that_make_no_sense() -> None:
    for namespace in ("", "xyz", "0" * 33, "0x1"):
        with pytest.raises(ConfigError, match="hexadecimal"):
            Selection(namespace=namespace)
    for code in ("", "F", "w", "windows", "w0000"):
        with pytest.raises(ConfigError, match="class"):
            Selection(code=code)
    for age in ("", "7", "7x", "-1d", "1.5h"):
        with pytest.raises(ValueError, match="age"):
            parse_age(age)
    assert [parse_age(age) for age in ("5s", "5m", "5 min", "5h", "5d", "5w")] == [
        5, 300, 300, 18_000, 432_000, 3_024_000,
    ]  # fmt: skip
    assert [class_name(c) for c in ("f", "s", "w0", "W12", "zz")] == [
        "full", "state", "window 0, short", "window 12, whole", "zz",
    ]  # fmt: skip


def test_what_others_say_of_namespaces_is_not_trusted(tmp_path: Path) -> None:
    filled(tmp_path)
    names = tmp_path / "kvloft-1" / "names"
    file = names / f"{DIGEST.hex()}.json"
    for text in ("", "[]", "{", "[" * 100_000, "1", '{"model": 5}', "\x00" * 1000):
        file.write_text(text)
        [space] = Survey(tmp_path).spaces(ALL)
        assert dict(space.about) == {}
    file.write_text('{"model": "' + "x" * 1000 + '", "five": 5}')
    [space] = Survey(tmp_path).spaces(ALL)
    assert space.about == {"model": "x" * 300}
    file.unlink()
    file.symlink_to("/etc/passwd")
    (names / "strange").write_text("{}")
    [space] = Survey(tmp_path).spaces(ALL)
    assert dict(space.about) == {}


# --- verification ---------------------------------------------------------------------------------


def damage(path: Path, entry_file: str, at: int) -> None:
    with (path / "kvloft-1" / entry_file).open("r+b") as file:
        file.seek(at)
        before = file.read(2)
        file.seek(at)
        file.write(bytes(b ^ 0x55 for b in before))


def test_every_flaw_is_found_and_removed(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    survey = Survey(tmp_path)
    places = [
        (table.segment, slot, table.record(slot))
        for table in survey.tables()
        for slot in table.ready.nonzero()[0].tolist()
    ]
    victims = [(s, slot, r) for s, slot, r in places if r is not None and r.code == b"W0\0\0"][:4]
    for i, (segment, slot, _) in enumerate(victims):
        offset = (0, 4000, PAGE_BYTES, segment.stride - 2)[i]
        damage(tmp_path, segment.data_name, slot * segment.stride + offset)
    found = flaws(tmp_path)
    assert {f.entry.name for f in found if f.entry} == {(r.digest, r.name) for _, _, r in victims}
    assert {f.cause for f in found} == {"header", "checksum"}
    names = [f.entry.name for f in found if f.entry]
    assert StoreTools(tmp_path).remove(names) == len(names) == 4
    assert flaws(tmp_path) == []
    assert still_right(tmp_path, chunks) == len(chunks) - len(names)


def test_damaged_records_are_found_and_mended(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    [table, *_] = Survey(tmp_path).tables()
    damage(tmp_path, table.segment.table_name, 0 * RECORD_BYTES + 40)
    assert [f.cause for f in flaws(tmp_path)] == ["record"]
    assert Survey(tmp_path).totals().damaged_records == 1
    assert StoreTools(tmp_path).collect().mended_records == 1
    assert flaws(tmp_path) == []
    assert still_right(tmp_path, chunks) == len(chunks)


def test_a_short_segment_is_found_and_removed(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    [table, *_] = Survey(tmp_path).tables()
    file = tmp_path / "kvloft-1" / table.segment.data_name
    with file.open("r+b") as opened:
        opened.truncate(table.segment.data_bytes - 1)
    found = flaws(tmp_path)
    assert {f.cause for f in found} == {"short"}
    assert len(found) == int(table.ready.sum())
    collected = StoreTools(tmp_path).collect()
    assert collected.leftover_files == 2
    assert collected.freed_bytes > table.segment.data_bytes
    assert flaws(tmp_path) == []
    still_right(tmp_path, chunks)


# --- clearing out ---------------------------------------------------------------------------------


def test_what_is_removed_takes_along_what_rests_on_it(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    user = User(tmp_path, 1 << 20)
    half = len(chunks) // 2
    assert StoreTools(tmp_path).remove([user.name(chunks[0])]) == half
    assert user.held(chunks) == chunks[half:]
    assert StoreTools(tmp_path).remove([user.name(chunks[0])]) == 0
    user.leave()


@pytest.mark.parametrize("how", ["collect", "clear"])
def test_old_chunks_go_but_not_what_younger_ones_rest_on(tmp_path: Path, how: str) -> None:
    chunks = filled(tmp_path)
    user = User(tmp_path, 1 << 20)
    tools = StoreTools(tmp_path)
    act = getattr(tools, how)
    assert act(older_than(3600)).chunks == 0
    last = chunks[-1]
    with at_time(time.time() + 7200):
        user.store.hint(user.name(last), touched=True)
        user.store.upkeep()
        kept = [c for c in chunks[len(chunks) // 2 :] if c.code == "f" or c is last]
        # Only of one class, then all.
        assert act(Selection(code="state", unused_since=time.time() - 3600)).chunks == 6
        assert act(older_than(3600)).chunks == len(chunks) - 6 - len(kept)
    assert user.held(chunks) == kept
    user.leave()


def test_demoted_chunks_are_as_old_as_they_are(tmp_path: Path) -> None:
    """That they are to go first is noted by a time of last use long ago."""
    chunks = filled(tmp_path)
    user = User(tmp_path, 1 << 20)
    user.store.hint(user.name(chunks[-1]), touched=False)
    user.store.upkeep()
    user.store.change(lambda _: None)
    assert StoreTools(tmp_path).collect(older_than(3600)).chunks == 0
    assert min(e.used for e in Survey(tmp_path).entries(ALL)) > time.time() - 60
    user.leave()


def test_clearing_a_namespace_leaves_the_others(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    other = User(tmp_path, 1 << 20, OTHER)
    for chunk in chunks:
        assert other.put(chunk) is Outcome.DONE
    tools, before = StoreTools(tmp_path), used(tmp_path)
    assert tools.clear(Selection(namespace="02")).chunks == len(chunks)
    assert other.held(chunks) == []
    # Its engine is running, and may fill it again.
    assert (tmp_path / "kvloft-1" / "names" / f"{OTHER.hex()}.json").exists()
    assert still_right(tmp_path, chunks) == len(chunks)
    other.leave()
    cleared = tools.clear(ALL)
    assert cleared.chunks == len(chunks)
    assert 0 < cleared.freed_bytes <= before
    totals = tools.survey.totals()
    assert (totals.chunks, totals.sizes, totals.leftovers) == (0, [], 0)
    assert list((tmp_path / "kvloft-1" / "names").iterdir()) == []
    assert still_right(tmp_path, chunks) == 0


def test_a_store_is_made_smaller(tmp_path: Path) -> None:
    user = User(tmp_path, 8 << 20)
    chunks = [chain(i, 1)[0] for i in range(300)]
    for chunk in chunks:
        user.put(chunk)
    collected = StoreTools(tmp_path).collect(down_to=2 << 20)
    assert used(tmp_path) <= 2 << 20
    held = user.held(chunks)
    assert collected.chunks == len(chunks) - len(held)
    assert 0 < len(held) < len(chunks)
    user.leave()


def test_what_the_dead_have_left_is_collected(tmp_path: Path) -> None:
    chunks = with_all(chain("x", 3))
    user = User(tmp_path, 1 << 20)
    for chunk in chunks[:8]:
        user.put(chunk)
    for chunk in chunks[8:]:
        user.reserve(chunk)
    (tmp_path / "kvloft-1" / "000099-8192-4.tab").write_bytes(b"x")
    user.die()
    collected = StoreTools(tmp_path).collect()
    assert collected.leftover_files == 1
    totals = Survey(tmp_path).totals()
    assert (totals.chunks, totals.leftovers, totals.writers) == (8, 0, 0)
    assert sum(size.reserved for size in totals.sizes) == 0
    assert flaws(tmp_path) == []
