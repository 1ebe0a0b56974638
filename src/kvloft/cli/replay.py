"""``kvloft replay``: request traces through the real catalog, beside what else is possible."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvloft.cli.progress import steps_done
from kvloft.errors import ConfigError
from kvloft.units import ceil_div, format_size, parse_size


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``replay``."""
    parser = subparsers.add_parser(
        "replay",
        help="replay request traces: what a size of memory and a policy would restore",
        description=(
            "Replay request traces through KVLoft's own catalog, retention and policies, without "
            "an engine or memory: how many tokens of prompts a size of host memory would restore. "
            "Beside it what vLLM's own offloading restores with the same bytes, and what no policy "
            "can exceed."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE",
        help="a file, 'conversation' or 'synthetic', or a workload to make such as "
        "'chat:requests=5000' (docs/traces.md)",
    )  # fmt: skip
    parser.add_argument(
        "--geometry", required=True, metavar="FILE_OR_NAME",
        help="a geometry file, or a model known by name (see 'kvloft plan')",
    )  # fmt: skip
    parser.add_argument(
        "--cpu", required=True, metavar="SIZE[,SIZE...]", help="host memory, e.g. 64GiB,256GiB"
    )
    parser.add_argument("--disk", metavar="SIZE", help="a disk below it (default: none)")
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help="one of several policies (default: all)"
    )
    parser.add_argument(
        "--engine-blocks", type=int, default=0, metavar="N",
        help="chunks that the engine's own prefix cache holds (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=int, metavar="N",
        help="tokens in a chunk (default: the trace's blocks, in whole units of the model)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-rate", type=float, default=10_000.0, metavar="TOKENS",
        help="tokens of prompts that the engine computes in a second (default: 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--link-rate", default="25GB", metavar="SIZE",
        help="bytes a second from host memory to the engine's (default: 25GB)",
    )  # fmt: skip
    parser.add_argument(
        "--last", type=float, default=0.5, metavar="SHARE",
        help="the part of each trace that counts, its end; the rest fills the cache (default: 0.5)",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="only a trace's first N requests")
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own offloading out")
    parser.add_argument("--no-bounds", action="store_true", help="leave out what is possible")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write JSON, to standard output unless a file is named",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="write a page with curves")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay; progress goes to standard error, tables or JSON to standard output."""
    from kvloft.bench.report import header
    from kvloft.catalog.policies import POLICIES
    from kvloft.geometry import load
    from kvloft.plan import ChunkPlan
    from kvloft.replay.driver import Setting
    from kvloft.replay.formats import read_trace
    from kvloft.replay.report import html
    from kvloft.replay.study import Study, study
    from kvloft.replay.trace import fitted

    for path in (args.json, args.html):
        if path not in (None, "-"):
            Path(path).touch()  # A wrong path must show now, not after minutes.
    policies = args.policy or list(POLICIES)
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ConfigError(f"--policy {unknown[0]}: not one of {', '.join(POLICIES)}")
    budgets = [_size("--cpu", text) for text in args.cpu.split(",")]
    if not 0 < args.last <= 1:
        raise ConfigError(f"--last {args.last}: write a share above 0 and up to 1")
    if args.engine_blocks < 0 or args.prefill_rate <= 0:
        raise ConfigError("--engine-blocks and --prefill-rate can't be negative, the latter not 0")
    peers = not args.no_peers and importlib.util.find_spec("vllm") is not None
    if not (peers or args.no_peers):
        sys.stderr.write("vLLM is not installed: its own offloading is left out\n")
    if peers and (args.disk or args.engine_blocks):
        peers = False
        sys.stderr.write("vLLM's own offloading is left out: no disk and no engine's cache there\n")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # Read by vLLM when it is imported.
    geometry = load(args.geometry)
    result: dict[str, Any] = {**header("replay", quick=False), "version": _version(), "traces": []}
    for name in args.traces:
        trace = fitted(read_trace(name, limit=args.limit), geometry.unit_tokens)
        if not trace.requests:
            raise ConfigError(f"{name}: there are no requests in it")
        unit = geometry.unit_tokens
        size = args.block_size or ceil_div(trace.tokens_per_block, unit) * unit
        if size < 1 or size % unit:
            raise ConfigError(f"--block-size {size}: write a multiple of the unit, {unit} tokens")
        plan = ChunkPlan(geometry, size)
        setting = Setting(
            plan, policies[0], budgets[0], engine_blocks=args.engine_blocks,
            disk_bytes=_size("--disk", args.disk) if args.disk else 0,
            prefill_rate=args.prefill_rate, link_rate=_size("--link-rate", args.link_rate),
        )  # fmt: skip
        wanted = Study(
            setting, policies, budgets, peers=peers,
            bounds=not (args.no_bounds or args.disk or args.engine_blocks),
            measured_share=args.last,
        )  # fmt: skip
        with _Progress(trace.name) as progress:
            result["traces"].append(study(trace, wanted, progress.begin))
    if args.html is not None:
        Path(args.html).write_text(html(result), encoding="utf-8")
        sys.stderr.write(f"wrote {args.html}\n")
    if args.json == "-":
        print(json.dumps(result, indent=1))
        return 0
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        sys.stderr.write(f"wrote {args.json}\n")
    for line in lines(result):
        print(line)
    return 0


class _Progress:
    """A bar for each run in turn."""

    def __init__(self, trace: str) -> None:
        self._trace = trace
        self._stack = ExitStack()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, what: str) -> Callable[[int, int], None]:
        """End the bar before and show the next one."""
        self._stack.close()
        if not sys.stderr.isatty():
            sys.stderr.write(f"{self._trace}: {what}\n")
            sys.stderr.flush()
        return self._stack.enter_context(steps_done(f"{self._trace}: {what}"))


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _version() -> str:
    from importlib.metadata import version

    return version("kvloft")


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The tables."""
    from kvloft.bench.report import table

    for number, one in enumerate(result["traces"]):
        if number:
            yield ""
        yield (
            f"{one['trace']['name']}: {one['trace']['requests']:,} requests, of which those from "
            f"the {one['measured_from'] + 1:,}th on count; {one['geometry']}, chunks of "
            f"{one['tokens_per_chunk']} tokens"
        )
        yield f"everything kept for ever: {one['everything']:.1%} of the tokens of prompts"
        yield ""
        yield from table(_HEAD, list(_rows(one)))


_HEAD = (
    "memory", "policy", "tokens hit", "restored", "stored", "read", "resume points", "evicted",
    "saved s", "p99.9 ms", "max ms",
)  # fmt: skip


def _rows(one: dict[str, Any]) -> Iterator[Sequence[str]]:
    bounds = {bound["budget_bytes"]: bound for bound in one["bounds"]}
    told = set[int]()
    for run in one["runs"]:
        budget = run["budget_bytes"]
        if budget in bounds and budget not in told:
            told.add(budget)
            bound = bounds[budget]
            rate = f"{bound['token_hit_rate']:.1%}"
            yield format_size(budget), bound["kind"], rate, *("",) * 8
        system = "vLLM's " if run["system"] == "vllm" else ""
        yield (
            format_size(budget),
            f"{system}{run['policy']}",
            f"{run['token_hit_rate']:.1%}",
            f"{run['tokens_restored']:,}",
            *(_optional(run, name, format_size) for name in ("bytes_stored", "bytes_restored")),
            _optional(run, "resume_points_kept", lambda count: f"{count:,}"),
            _optional(run, "evicted_chunks", lambda count: f"{count:,}"),
            _optional(run, "prefill_seconds_saved", lambda seconds: f"{seconds:,.0f}"),
            _optional(run, "call_p999_ms", lambda ms: f"{ms:.2f}"),
            _optional(run, "call_max_ms", lambda ms: f"{ms:.2f}"),
        )


def _optional(run: dict[str, Any], name: str, show: Callable[[Any], str]) -> str:
    value = run.get(name)
    return "-" if value is None else show(value)
