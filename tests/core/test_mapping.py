"""The shared mapping: who finds it, who is refused, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloft import mapping
from kvloft.errors import ArenaError
from kvloft.mapping import SCHEDULER, SHARED_MEMORY, Mapping, header_bytes

MIB = 1 << 20
DIGEST = b"d" * 16

WORKER = """
import sys
from pathlib import Path
from kvloft.mapping import Mapping
nbytes, rank, ranks = map(int, sys.argv[2:5])
there = Mapping("test", nbytes, rank=rank, ranks=ranks, digest=sys.argv[5].encode(), note=b"hello",
                directory=Path(sys.argv[1]))
print("attached", flush=True)
for line in sys.stdin:
    at = int(line)
    there.data[at] = rank + 1
    print(int(there.data.sum(dtype="u8")), flush=True)
there.close()
"""


class Worker:
    """A rank in a process of its own."""

    def __init__(
        self, place: Path, rank: int, ranks: int, nbytes: int = MIB, digest: bytes = DIGEST
    ) -> None:
        arguments = [str(place), str(nbytes), str(rank), str(ranks), digest.decode()]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, at: int) -> int:
        """Set a byte to rank + 1; the sum over the arena as the worker sees it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at}\n")
        self.process.stdin.flush()
        return int(self.line())

    def end(self) -> str:
        """Let it close; its errors."""
        _, errors = self.process.communicate(timeout=60)
        return errors


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of one's own, as engines sweep the system's one; it must be empty in the end."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "a file was left behind"


def attach(
    place: Path,
    nbytes: int = MIB,
    *,
    rank: int = SCHEDULER,
    ranks: int = 1,
    name: str = "test",
) -> Mapping:
    return Mapping(name, nbytes, rank=rank, ranks=ranks, digest=DIGEST, directory=place)


def file_of(place: Path, name: str = "test") -> Path:
    return place / f"kvloft-{name}"


def test_it_lies_in_shared_memory_unless_told_otherwise() -> None:
    name = f"test-{os.getpid()}"
    there = Mapping(name, MIB, rank=0, ranks=1, digest=DIGEST)
    assert file_of(SHARED_MEMORY, name).exists()
    there.close()
    assert not file_of(SHARED_MEMORY, name).exists()


def test_processes_share_one_memory_and_the_name_goes_once_all_are_there(place: Path) -> None:
    scheduler = attach(place, ranks=2)
    assert scheduler.attached() == [None, None]
    assert not scheduler.agree()
    workers = [Worker(place, 1, 2)]
    assert workers[0].line() == "attached"
    assert scheduler.attached() == [None, DIGEST]
    assert not scheduler.agree()
    workers.insert(0, Worker(place, 0, 2))
    assert workers[0].line() == "attached"
    assert scheduler.attached() == [DIGEST, DIGEST]
    assert file_of(place).exists()
    assert scheduler.agree()
    assert not file_of(place).exists()
    assert scheduler.note() == b"hello"
    assert workers[0].write(0) == 1
    assert workers[1].write(MIB - header_bytes(2) - 1) == 3
    assert int(scheduler.data.sum(dtype="u8")) == 3
    assert len(scheduler.data) == MIB - header_bytes(2)
    assert [worker.end() for worker in workers] == ["", ""]
    assert scheduler.agree(), "asking again is harmless"
    scheduler.close()


def test_any_process_may_come_first(place: Path) -> None:
    workers = [Worker(place, rank, 3) for rank in (2, 0, 1)]
    assert [worker.line() for worker in workers] == ["attached"] * 3
    scheduler = attach(place, ranks=3)
    assert scheduler.agree()
    scheduler.close()
    assert "".join(worker.end() for worker in workers) == ""


def test_a_rank_with_another_geometry_is_named(place: Path) -> None:
    scheduler = attach(place, ranks=2)
    worker = Worker(place, 1, 2, digest=b"e" * 16)
    assert worker.line() == "attached"
    with pytest.raises(ArenaError, match=f"rank 1 .*{(b'e' * 16).hex()}.*{DIGEST.hex()}"):
        scheduler.agree()
    worker.end()
    scheduler.close()


def test_a_process_with_another_size_is_refused(place: Path) -> None:
    scheduler = attach(place)
    errors = Worker(place, 0, 1, nbytes=2 * MIB).end()
    assert f"has {MIB} bytes, this process expects {2 * MIB}" in errors
    scheduler.close()


def test_a_process_that_counts_other_ranks_is_refused(place: Path) -> None:
    scheduler = attach(place)
    assert "is not a mapping for 3 ranks" in Worker(place, 0, 3).end()
    scheduler.close()


def test_closing_twice_is_harmless_and_views_may_live_on(place: Path) -> None:
    scheduler = attach(place)
    view = scheduler.data[:10]
    scheduler.close()
    scheduler.close()
    assert len(scheduler.data) == 0
    assert not file_of(place).exists()
    assert view.sum() == 0


def test_a_budget_that_is_no_multiple_of_a_page_is_rounded_down(place: Path) -> None:
    scheduler = attach(place, MIB + 4095)
    assert len(scheduler.data) == MIB - header_bytes(1)
    scheduler.close()


@pytest.mark.parametrize("nbytes", [1, 4096, header_bytes(1), header_bytes(1) + 4096])
def test_a_budget_for_nothing_is_refused(place: Path, nbytes: int) -> None:
    with pytest.raises(ArenaError, match="too little"):
        attach(place, nbytes)


# --- not enough memory ----------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this may be made."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "kvloft-test", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_somebody_else_has_made_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kvloft-test")
    with pytest.raises(ArenaError, match="somebody else"):
        attach(tmp_path, MIB)


def test_a_mapping_is_private_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "kvloft-test"
    path.touch(0o666)
    path.chmod(0o666)
    there = attach(tmp_path, MIB)
    assert os.fstat(there._fd).st_mode & 0o777 == 0o600
    there.close()


def test_a_shared_memory_that_is_too_small_is_refused(small_tmpfs: Path) -> None:
    with pytest.raises(ArenaError, match=r"1\.00 MiB free.*asks for 2\.00 MiB.*--shm-size"):
        attach(small_tmpfs, 2 * MIB)
    assert list(small_tmpfs.iterdir()) == []
    there = attach(small_tmpfs, MIB)
    with pytest.raises(ArenaError, match="0 B free"):
        attach(small_tmpfs, MIB, name="more")
    there.close()
    assert list(small_tmpfs.iterdir()) == []


def test_a_free_figure_that_was_wrong_is_noticed(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take the memory between the look and the claim."""
    real = os.fstatvfs

    class Generous:
        f_frsize = 4096
        f_bavail = 1 << 40

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Generous())
    with pytest.raises(ArenaError, match=r"could not give 2\.00 MiB"):
        attach(small_tmpfs, 2 * MIB)
    monkeypatch.setattr(os, "fstatvfs", real)
    assert list(small_tmpfs.iterdir()) == []
    room = os.statvfs(small_tmpfs)
    assert room.f_bavail == room.f_blocks, "pages are still taken"


def test_little_room_is_refused_where_no_tmpfs_can_be_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_frsize = 4096
        f_bavail = 3

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full())
    with pytest.raises(ArenaError, match=r"12\.0 KiB free"):
        attach(place)


def test_more_than_the_machine_has_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_available_memory", lambda: iter([MIB // 2, 1 << 62]))
    with pytest.raises(ArenaError, match="the machine has 512 KiB of memory available"):
        attach(place)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="no shared memory can be made"):
        attach(tmp_path / "none")


# --- crashes --------------------------------------------------------------------------------------


def test_nothing_is_left_if_all_are_killed_after_they_have_met(place: Path) -> None:
    worker = Worker(place, 0, 1)
    assert worker.line() == "attached"
    scheduler = attach(place)
    assert scheduler.agree()
    worker.process.send_signal(signal.SIGKILL)
    worker.end()
    assert not file_of(place).exists()
    scheduler.close()


def test_what_was_killed_before_that_is_swept_at_the_next_start(place: Path) -> None:
    worker = Worker(place, 0, 2)
    assert worker.line() == "attached"
    alive = attach(place, name="alive")
    assert file_of(place).exists(), "somebody still holds it"
    worker.process.send_signal(signal.SIGKILL)
    worker.end()
    assert file_of(place).exists()
    after = attach(place, name="next")
    assert not file_of(place).exists()
    assert file_of(place, "alive").exists(), "a mapping in use is not stale"
    after.close()
    alive.close()


def test_a_name_is_taken_over_from_processes_that_were_killed(place: Path) -> None:
    """An engine with a fixed id comes back after a crash, with other options."""
    workers = [Worker(place, rank, 3) for rank in range(2)]
    assert [worker.line() for worker in workers] == ["attached"] * 2
    workers[0].write(0)
    for worker in workers:
        worker.process.send_signal(signal.SIGKILL)
        worker.end()
    again = attach(place, 2 * MIB, rank=0, ranks=2)
    assert again.attached() == [DIGEST, None]
    assert not again.data.any()
    again.close()


def test_many_processes_that_start_at_once_get_one_mapping(place: Path) -> None:
    """Whoever comes first creates it; nobody sees it half made."""
    workers = [Worker(place, rank, 4) for rank in range(4)]
    assert [worker.line() for worker in workers] == ["attached"] * 4
    scheduler = attach(place, ranks=4)
    deadline = time.monotonic() + 30
    while not scheduler.agree() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [worker.write(rank) for rank, worker in enumerate(workers)] == [1, 3, 6, 10]
    for worker in workers:
        worker.end()
    scheduler.close()


def test_a_lock_that_is_never_given_up_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_LOCK_SECONDS", 0.02)
    monkeypatch.setattr(mapping, "_try_lock", lambda fd: 0)
    with pytest.raises(ArenaError, match="locked by another process"):
        attach(place)
    file_of(place).unlink()
