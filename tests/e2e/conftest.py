"""Runs scenarios on the real engine in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cache() -> Path:
    """Where small checkpoints are kept between runs; their names change with their content."""
    path = HERE.parents[1] / "build" / "checkpoints"
    path.mkdir(parents=True, exist_ok=True)
    return path


def engine_environment(**more: str) -> dict[str, str]:
    """The trial's environment over this process's.

    Where tests run side by side, each has a core of its own: the engine's threads wait for each
    other busily, and two engines on all cores take several times as long as one after the other.
    """
    from kvloft.engines.vllm.trial import environment

    core = {}
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        core["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[int(worker[2:]) % len(cores)])
    # vLLM's workers and the scenarios import parts of these tests.
    root = {"PYTHONPATH": str(HERE.parents[1])}
    return {**os.environ, **environment(), **core, **root, **more}


def run_script(
    file: str, *arguments: object, environment: Mapping[str, str], timeout: float = 360
) -> Any:
    """Run a file of scenarios in a process of its own; what it prints on its last line."""
    done = subprocess.run(
        [sys.executable, str(HERE / file), *map(str, arguments)],
        env=engine_environment(**environment), capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{arguments[0]} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def run_scenario(cache: Path) -> Callable[..., Any]:
    """Run one of ``scenarios.py`` and return what it prints."""

    def run(name: str, **more: str) -> Any:
        return run_script("scenarios.py", name, cache, timeout=240, environment=more)

    return run


def unused_mappings() -> set[Path]:
    """Mappings in shared memory that no process holds; other tests' engines hold theirs."""
    unused = set()
    for path in Path("/dev/shm").glob("kvloft-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An empty one belongs to a process that is about to lock it.
            if os.fstat(file.fileno()).st_size:
                unused.add(path)
    return unused


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Any:
    """No mapping outlives its engine."""
    before = unused_mappings()
    yield
    assert unused_mappings() <= before
