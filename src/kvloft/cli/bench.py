"""``kvloft bench``: the project's benchmarks, each against what it must not be slower than."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "host": "copies between engine pages and host memory, against memcpy",
    "lookup": "look-ups and books of the scheduler's side, against vLLM's own offloading",
    "disk": "the disk tier, against raw direct I/O and other disk caches",
    "writes": "what is worth writing to disk, on request traces",
    "engine": "vLLM's throughput with the connector and no hits, against vLLM alone",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with one subcommand for each benchmark."""
    parser = subparsers.add_parser(
        "bench",
        help="measure copies, look-ups and engine throughput",
        description="Measure KVLoft against its budgets; docs/benchmarks.md explains the figures.",
    )
    choices = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, about in BENCHMARKS.items():
        one = choices.add_parser(name, help=about, description=f"Measure {about}.")
        one.add_argument(
            "--json", nargs="?", const="-", metavar="FILE",
            help="write JSON, to standard output unless a file is named",
        )  # fmt: skip
        one.add_argument(
            "--quick", action="store_true", help="see that it works; the figures mean nothing"
        )
        if name == "disk":
            one.add_argument("path", type=Path, metavar="PATH", help="a directory on the disk")
        one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run one benchmark: progress goes to standard error, the table or JSON to standard output."""
    if args.json not in (None, "-"):
        Path(args.json).touch()  # A wrong path must show now, not after minutes.
    benchmark: Any = importlib.import_module(f"kvloft.bench.{args.benchmark}")
    if args.benchmark == "disk":
        result = benchmark.run(args.path, quick=args.quick)
    else:
        result = benchmark.run(quick=args.quick)
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
        return 0
    if args.json is not None:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
        sys.stderr.write(f"wrote {args.json}\n")
    for line in benchmark.lines(result):
        print(line)
    return 0
