"""Many processes on one path, killed at any moment: the limit, the bytes, and what is left."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.core.disk_child import everything
from tests.core.test_disk_store import used

from kvloft.testing.tiers import Checked, namespace
from kvloft.tiers.base import Outcome
from kvloft.tiers.disk import DiskTier, StoreTools
from kvloft.tiers.disk.survey import Selection, Survey
from kvloft.tiers.options import DiskOptions

CHILD = Path(__file__).with_name("disk_child.py")
LIMIT = 2 << 20
"""A third of what the children put."""


@contextmanager
def children(path: Path, count: int, seed: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have begun to use the store; killed at the end."""
    running = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(path), str(LIMIT), f"{seed + i}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for child in running:
            assert child.stdout is not None
            if child.stdout.readline() != "begun\n":
                pytest.fail(child.communicate()[1])
        yield running
    finally:
        for child in running:
            child.kill()
            child.communicate(timeout=30)


def watch(path: Path, running: list[subprocess.Popen[str]], seconds: float) -> int:
    """Look at the limit for a while; the most that was in use."""
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, used(path))
        for child in running:
            if child.poll() is not None:
                pytest.fail(child.communicate()[1])
    assert most <= LIMIT
    return most


def check(path: Path) -> int:
    """Open what dead processes have left; how many chunks it holds, all of them right."""
    names = namespace()
    tier = DiskTier(DiskOptions(path, LIMIT, threads=1), names)
    checked = Checked(tier, names, 30.0)
    try:
        held = checked.check(everything())
        stats = tier.stats()
        assert not stats.faults
        assert used(path) <= LIMIT
        totals = Survey(path).totals()
        assert sum(size.reserved for size in totals.sizes) == 0, "slots have leaked"
        assert totals.leftovers == 0
        assert len(list((path / "kvloft-1" / "writers").iterdir())) == 1
    finally:
        tier.close()
    return len(held)


def kill_and_restart(path: Path, rounds: int) -> None:
    """Let two processes work, kill them at random moments, and look at what they leave."""
    rng = random.Random(rounds)
    held = 0
    for turn in range(rounds):
        with children(path, 2, seed=turn * 2) as running:
            # Not only in the middle of things: also right after the start, in the first mend.
            watch(path, running, rng.choice([0.0, rng.random() * 0.1, rng.random() * 0.5]))
            first, second = rng.sample(running, 2)
            first.kill()
            if rng.random() < 0.5:
                watch(path, [second], rng.random() * 0.2)
        held += check(path)
    assert held > rounds * 20


def test_killed_at_any_moment(tmp_path: Path) -> None:
    kill_and_restart(tmp_path, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    kill_and_restart(tmp_path, 200)


def test_four_processes_keep_one_limit(tmp_path: Path) -> None:
    with children(tmp_path, 4, seed=100) as running:
        assert watch(tmp_path, running, 3.0) > LIMIT / 2
    assert check(tmp_path) > 20


def test_a_killed_process_is_missed_by_the_others(tmp_path: Path) -> None:
    """Its reservations do not stay, and the others go on."""
    with children(tmp_path, 3, seed=200) as running:
        for child in running[:2]:
            child.kill()
            child.wait()
            watch(tmp_path, running[2:], 1.5)
        assert StoreTools(tmp_path).survey.totals().writers == 1
    check(tmp_path)


def test_the_clean_up_beside_processes(tmp_path: Path) -> None:
    """Tools remove chunks and segments under the hands of three engines."""
    with children(tmp_path, 3, seed=300) as running:
        tools = StoreTools(tmp_path)
        for turn in range(10):
            watch(tmp_path, running, 0.1)
            if turn % 3 == 0:
                tools.clear(Selection())
            elif turn % 3 == 1:
                tools.collect(down_to=LIMIT // 2)
            faults = list(Survey(tmp_path).unreadable(Selection(), lambda _: None))
            assert faults == []
    check(tmp_path)


def test_a_forked_process_does_not_take_the_lock_along(tmp_path: Path) -> None:
    """A fork while the tier is open, as ``multiprocessing`` may do it, keeps nobody waiting."""
    names = namespace()
    tier = Checked(DiskTier(DiskOptions(tmp_path, LIMIT), names), names, 10.0)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        [first, *rest] = everything()[:8]
        assert tier.put(first) is Outcome.DONE
        tier.fill(rest)
        tier.tier.close()
        assert check(tmp_path) == 8
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
