"""The disk tier on the real engine; run and judged like ``scenarios.py``.

``python disk_scenarios.py NAME CACHE DIRECTORY`` prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import compare
from kvloft.engines.vllm.models import SHAPES, checkpoint
from kvloft.engines.vllm.trial import (
    close_engine,
    leave_answers,
    make_engine,
    read_answers,
    run_life,
    run_pass,
    shape_prompts,
    with_disk,
)

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path, Path], Result]] = {}
PATIENT = 60.0
"""Seconds to wait for the disk: these tests ask whether, not how fast."""


def scenario(function: Callable[[Path, Path], Result]) -> Callable[[Path, Path], Result]:
    """Register a scenario by its name."""
    SCENARIOS[function.__name__] = function
    return function


def loft_of(llm: Any) -> Any:
    """The loft behind the engine's connector."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.loft


def flush(llm: Any, seconds: float = 20) -> None:
    """Let what has been stored reach the disk."""
    loft = loft_of(llm)
    deadline = time.monotonic() + seconds
    while any(w.pending or w.writing for w in loft._writers) and time.monotonic() < deadline:
        loft.step()
        time.sleep(0.005)


def tier_stats(llm: Any) -> Result:
    """What the first tier has to say."""
    stats = loft_of(llm).stats()
    tier = stats.tiers[0].tier
    return {
        "faults": dict(tier.faults),
        "gets": dict(tier.gets),
        "puts": dict(tier.puts),
        "chunks": tier.chunks,
        "used": tier.used_bytes,
        "promoted": stats.counters.promoted_chunks,
        "late": stats.promotions.late,
        "failed": stats.promotions.failed,
    }


class Log(logging.Handler):
    """What KVLoft has logged, by the cause in brackets at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.causes: Counter[str] = Counter()
        logging.getLogger("vllm.kvloft").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and text.endswith(")"):
            self.causes[text.rpartition("(")[2].rstrip(")")] += 1


def size_of(folder: Path) -> int:
    """Bytes of all files and directories in a folder."""
    total = 0
    for path in [folder, *folder.rglob("*")]:
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


# --- restarts -------------------------------------------------------------------------------------


def _life(name: str, cache: Path, folder: Path, **overrides: Any) -> Result:
    connector = with_disk(folder / "disk", wait=PATIENT)
    return run_life(SHAPES[name], cache, connector, folder / "answers", **overrides)


for _name in ("uniform", "gemma4", "qwen3next"):
    SCENARIOS[f"life_{_name}"] = lambda cache, folder, name=_name: _life(name, cache, folder)  # type: ignore[misc]
SCENARIOS["life_two_ranks"] = lambda cache, folder: _life(
    "gemma4", cache, folder, tensor_parallel_size=2
)


@scenario
def until_killed(cache: Path, folder: Path) -> Result:
    """Serves everything, says so, and goes on until it is killed."""
    llm = make_engine(SHAPES["gemma4"], cache, with_disk(folder / "disk", wait=PATIENT))
    prompts = shape_prompts(llm)
    leave_answers(folder / "answers", run_pass(llm, "cold", prompts, cold=True))
    print("serving", flush=True)
    while True:
        run_pass(llm, "again", prompts, empty_first=True)


# --- sharing --------------------------------------------------------------------------------------


@scenario
def until_told(cache: Path, folder: Path) -> Result:
    """One of several engines on one small disk, above which host memory is smaller still: serves
    prompts over and over, until told."""
    shape = SHAPES["gemma4"]
    connector = with_disk(folder / "disk", "12MiB", wait=PATIENT)
    options = {**connector["kv_connector_extra_config"], "cpu_bytes_to_use": "8MiB"}
    llm = make_engine(shape, cache, {**connector, "kv_connector_extra_config": options})
    prompts = shape_prompts(llm)[:7]
    answers = folder / "answers"
    if first := not answers.exists():
        leave_answers(answers, run_pass(llm, "cold", prompts, cold=True, new_tokens=4))
    cold = read_answers(answers)
    flush(llm)
    print("ready", flush=True)
    agrees, restored = True, []
    while not (folder / "stop").exists():
        again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=4)
        agrees = agrees and compare(cold, again.outputs, shape.tolerance).agrees
        restored.append(again.restored_tokens)
    out = {"first": first, "agrees": agrees, "restored": restored, **tier_stats(llm)}
    close_engine(llm)
    return out


def _restored_in_a_life(cache: Path, folder: Path, model: Path, **extra: Any) -> int:
    """Tokens that one engine restores of three prompts."""
    shape = SHAPES["uniform"]
    connector = with_disk(folder / "disk", wait=PATIENT)
    options = {**connector["kv_connector_extra_config"], **extra}
    llm = make_engine(
        shape, cache, {**connector, "kv_connector_extra_config": options}, model=str(model)
    )
    done = run_pass(llm, "life", shape_prompts(llm)[:3])
    close_engine(llm)
    return done.restored_tokens


@scenario
def other_weights(cache: Path, folder: Path) -> Result:
    """New weights under the old path miss; the same ones under a new path hit."""
    import safetensors.torch

    model = folder / "model"
    shutil.copytree(checkpoint(SHAPES["uniform"], cache), model)
    out = {"first": _restored_in_a_life(cache, folder, model)}
    moved = model.rename(folder / "moved")
    out["moved"] = _restored_in_a_life(cache, folder, moved)
    file = next(moved.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    name = max(tensors, key=lambda n: tensors[n].numel() * ("mlp" in n))
    tensors[name] = tensors[name] * 1.01
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    out["new_weights"] = _restored_in_a_life(cache, folder, moved)
    return out


@scenario
def namespaces(cache: Path, folder: Path) -> Result:
    """A name that the user vouches for."""
    model = checkpoint(SHAPES["uniform"], cache)
    return {
        step: _restored_in_a_life(cache, folder, model, namespace=name)
        for step, name in (
            ("first", "mine"), ("again", "mine"), ("other", "another"), ("other_again", "another"),
        )
    }  # fmt: skip


@scenario
def resets(cache: Path, folder: Path) -> Result:
    """After a reset nothing from before is found, on disk either; the next engine finds it."""
    shape = SHAPES["uniform"]
    connector = with_disk(folder / "disk", wait=PATIENT)
    llm = make_engine(shape, cache, connector)
    prompts = shape_prompts(llm)[:3]
    run_pass(llm, "cold", prompts, cold=True)
    flush(llm)
    llm.reset_prefix_cache(reset_connector=True)
    out = {"after_reset": run_pass(llm, "first", prompts[:1]).restored_tokens}
    flush(llm)
    close_engine(llm)
    llm = make_engine(shape, cache, connector)
    out["after_restart"] = run_pass(llm, "restarted", prompts).restored_tokens
    close_engine(llm)
    return out


# --- faults ---------------------------------------------------------------------------------------

Damage = Callable[[list[Path]], None]


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def _flip_all_over(files: list[Path]) -> None:
    for path in files:
        size = path.stat().st_size
        for at in range(1, size, max(1, size // 200)):
            _flip(path, at)


def _truncate(files: list[Path]) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size * 2 // 3)


def _extend(files: list[Path]) -> None:
    for path in files:
        with path.open("ab") as file:
            file.write(b"x" * 5000)


def _swap(files: list[Path]) -> None:
    """Segments get each other's bytes; in each, chunks get the places of their neighbours."""
    segments = [path for path in files if path.suffix == ".seg"]
    contents = []
    for path in segments:
        data, stride = path.read_bytes(), int(path.name.split("-")[1])
        contents.append(data[stride:] + data[:stride])
    for path, data in zip(segments, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)


def _zero(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(bytes(path.stat().st_size))


def _empty(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(b"")


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink()


def _nothing(files: list[Path]) -> None:
    pass


AT_REST: dict[str, Damage] = {
    "none": _nothing, "flipped": _flip_all_over, "truncated": _truncate, "extended": _extend,
    "swapped": _swap, "zeroed": _zero, "emptied": _empty, "removed": _remove,
}  # fmt: skip


def _broken_call(name: str, error: int) -> Callable[[], Callable[[], None]]:
    """Make a system call fail from now on; gives the function that mends it."""

    def install() -> Callable[[], None]:
        real = getattr(os, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(error, os.strerror(error))

        setattr(os, name, fail)
        return lambda: setattr(os, name, real)

    return install


def _slow_call(name: str, seconds: float) -> Callable[[], Callable[[], None]]:
    def install() -> Callable[[], None]:
        real = getattr(os, name)

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return real(*args, **kwargs)

        setattr(os, name, late)
        return lambda: setattr(os, name, real)

    return install


def _hanging_call(name: str) -> Callable[[], None]:
    """A system call that does not return until it is mended, as on a dead network file system."""
    real, mended = getattr(os, name), threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        mended.wait()
        return real(*args, **kwargs)

    def mend() -> None:
        setattr(os, name, real)
        mended.set()

    setattr(os, name, hang)
    return mend


def _damaged(cache: Path, folder: Path, shape_name: str, kinds: Iterable[str]) -> Result:
    """Damage to a disk that another engine has filled, before the start."""
    shape = SHAPES[shape_name]
    source = folder / "source"
    llm = make_engine(shape, cache, with_disk(source, wait=PATIENT))
    prompts = shape_prompts(llm)[:4]
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=4)
    flush(llm)
    close_engine(llm)
    out: Result = {}
    for name in kinds:
        disk = folder / name
        shutil.copytree(source, disk)
        AT_REST[name]([path for path in sorted(disk.rglob("*")) if path.is_file()])
        log = Log()
        llm = make_engine(shape, cache, with_disk(disk, wait=PATIENT))
        done = run_pass(llm, "damaged", prompts, empty_first=True, new_tokens=4)
        again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=4)
        flush(llm)
        out[name] = {
            "agrees": compare(cold.outputs, done.outputs, shape.tolerance).agrees
            and compare(cold.outputs, again.outputs, shape.tolerance).agrees,
            "restored": done.restored_tokens,
            "restored_again": again.restored_tokens,
            "log": dict(log.causes),
            **tier_stats(llm),
        }
        close_engine(llm)
        shutil.rmtree(disk, ignore_errors=True)
    return out


@scenario
def damaged_full(cache: Path, folder: Path) -> Result:
    """Full attention alone: whatever is still good may be restored."""
    return _damaged(cache, folder, "uniform", AT_REST)


@scenario
def damaged_windows(cache: Path, folder: Path) -> Result:
    """Windows: a resume point is whole or not there."""
    return _damaged(cache, folder, "gemma4", AT_REST)


@scenario
def damaged(cache: Path, folder: Path) -> Result:
    """The kinds that differ most, on windows."""
    return _damaged(cache, folder, "gemma4", ("none", "flipped", "truncated", "swapped"))


@scenario
def failing(cache: Path, folder: Path) -> Result:
    """All of :func:`_failing`."""
    names = ("reads_fail", "writes_fail", "read_only", "full", "slow", "hangs", "vanished")
    return _failing(cache, folder, names)


@scenario
def failing_most(cache: Path, folder: Path) -> Result:
    """Those that differ most."""
    return _failing(cache, folder, ("reads_fail", "full", "hangs", "vanished"))


def _failing(cache: Path, folder: Path, names: Iterable[str]) -> Result:
    """The disk fails, fills up, slows down or vanishes under a running engine."""
    import errno

    shape = SHAPES["gemma4"]
    source = folder / "source"
    llm = make_engine(shape, cache, with_disk(source, wait=PATIENT))
    prompts = shape_prompts(llm)[:4]
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=4)
    flush(llm)
    close_engine(llm)
    troubles: dict[str, tuple[Callable[[Path], Callable[[], None]], Any]] = {
        "reads_fail": (lambda d: _broken_call("preadv", errno.EIO)(), PATIENT),
        "writes_fail": (lambda d: _broken_call("pwritev", errno.EIO)(), PATIENT),
        "read_only": (lambda d: _broken_call("pwritev", errno.EROFS)(), PATIENT),
        "full": (lambda d: _broken_call("pwritev", errno.ENOSPC)(), PATIENT),
        "slow": (lambda d: _slow_call("preadv", 1.0)(), 0.2),
        "hangs": (lambda d: _hanging_call("preadv"), 0.2),
        "vanished": (_vanish, PATIENT),
    }
    out: Result = {}
    for name in names:
        trouble, wait = troubles[name]
        disk = folder / name
        shutil.copytree(source, disk)
        log = Log()
        llm = make_engine(shape, cache, with_disk(disk, wait=wait))
        mend = trouble(disk)
        started = time.monotonic()
        new = [[*p[::-1]] for p in prompts[:2]]
        done = run_pass(llm, name, prompts, empty_first=True, new_tokens=4)
        run_pass(llm, name, new, empty_first=True, new_tokens=4)
        flush(llm, 2)
        seconds = time.monotonic() - started
        if name != "hangs":
            mend()
        out[name] = {
            "agrees": compare(cold.outputs, done.outputs, shape.tolerance).agrees,
            "restored": done.restored_tokens,
            "seconds": seconds,
            "log": dict(log.causes),
            **tier_stats(llm),
        }
        started = time.monotonic()
        close_engine(llm)
        out[name]["seconds_to_end"] = time.monotonic() - started
        mend()
        shutil.rmtree(disk, ignore_errors=True)
    return out


def _vanish(disk: Path) -> Callable[[], None]:
    shutil.rmtree(disk)
    return lambda: None


@scenario
def refusals(cache: Path, folder: Path) -> Result:
    """Disks that make no sense end the start-up with a reason and leave nothing behind."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    file = folder / "file"
    file.write_text("x")
    cases = {
        "file": with_disk(file),
        "tiny": with_disk(folder / "tiny", "64KiB"),
        "type": with_disk(folder / "type", type="tape"),
        "relative": with_disk(Path("here")),
    }
    out = {}
    for name, connector in cases.items():
        try:
            close_engine(make_engine(SHAPES["gemma4"], cache, connector))
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
            # An engine that fails this late leaves its worker's half behind in the process.
            ensure_kv_transfer_shutdown()
        else:
            out[name] = ""
    return {"errors": out, "shared_memory": [p.name for p in Path("/dev/shm").glob("kvloft-*")]}


@scenario
def random_seed(cache: Path, folder: Path) -> Result:
    """Hashes that start from a random seed in each process would never be found again."""
    try:
        make_engine(
            SHAPES["uniform"], cache, with_disk(folder / "disk"),
            prefix_caching_hash_algo="xxhash",
        )  # fmt: skip
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


if __name__ == "__main__":
    name, cache, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(SCENARIOS[name](cache, folder)), flush=True)
