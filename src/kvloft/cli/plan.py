"""``kvloft plan``: what a model's KV-cache geometry means for chunks, resume points and memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft.geometry import Geometry
    from kvloft.plan import ChunkPlan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` and its options. Values are text here: :mod:`kvloft.config` checks them."""
    parser = subparsers.add_parser(
        "plan",
        help="show the chunks and resume points of a model's KV cache",
        description=(
            "Show the unit of a model's KV cache and which groups cause it, the chunk that is "
            "stored as one piece, and what it costs to be able to resume at a boundary."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "geometry", metavar="FILE_OR_NAME", help="a geometry file, or a model known by name"
    )
    parser.add_argument(
        "--blocks-per-chunk", metavar="K", help="units in a chunk (default: a chunk of 1 MiB)"
    )
    parser.add_argument("--block-size", metavar="N", help="tokens in a chunk")
    parser.add_argument(
        "--cpu-bytes", metavar="SIZE", help="host memory of the node, e.g. 64GiB: show what fits"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; raises :class:`kvloft.errors.KVLoftError` for what the user can mend."""
    from kvloft.config import auto_in_engine, resolve_chunk
    from kvloft.geometry import load
    from kvloft.plan import ChunkPlan

    geometry = load(args.geometry)
    tokens = resolve_chunk(
        geometry, blocks_per_chunk=args.blocks_per_chunk, block_size=args.block_size
    )
    plan = ChunkPlan(geometry, tokens)
    report = describe(plan)
    if args.cpu_bytes is not None:
        report["capacity"] = _capacity(plan, args.cpu_bytes, report["resume_interval"])
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        chosen = args.blocks_per_chunk is not None or args.block_size is not None
        for line in _lines(report, chosen=chosen):
            print(line)
        if not chosen and (shorter := auto_in_engine(geometry)) != tokens:
            print(f"\nAn engine left to choose takes chunks of {shorter:,} tokens for this model;")
            print(f"to have {tokens:,}, give it 'block_size': {tokens}.")
    return 0


def describe(plan: ChunkPlan) -> dict[str, Any]:
    """The plan as plain values; bytes are exact live bytes over all ranks."""
    from kvloft.plan import auto_resume_interval

    geometry, tokens = plan.geometry, plan.tokens_per_chunk
    interval = auto_resume_interval(plan) if plan.has_resume_points else None
    per_token = plan.full_chunk_bytes / tokens
    return {
        "name": geometry.name or geometry.where,
        "model": geometry.model,
        "dtype": geometry.dtype,
        "tensor_parallel": geometry.tensor_parallel,
        "tokens_per_hash": geometry.tokens_per_hash,
        "unit_tokens": geometry.unit_tokens,
        "unit_causes": _causes(geometry),
        "tokens_per_chunk": tokens,
        "full_chunk_bytes": plan.full_chunk_bytes,
        "bytes_per_token": _whole(per_token),
        "resume_bytes": plan.resume_bytes,
        "resume_interval": interval,
        "bytes_per_token_at_interval": _whole(
            per_token + (plan.resume_bytes / interval if interval else 0)
        ),
        "groups": [
            {
                "id": group.id,
                "kind": group.kind,
                "draft": group.draft,
                "layers": sum(run.count for run in group.layers),
                "tokens_per_block": group.tokens_per_block,
                "block_bytes": group.block_bytes * geometry.copies(group),
                "blocks_per_chunk": plan.blocks_per_chunk(group) if group.cacheable else None,
                "resume_blocks": plan.greatest_resume_blocks(group) if group.cacheable else 0,
            }
            for group in geometry.groups
        ],
    }


def _causes(geometry: Geometry) -> list[dict[str, Any]]:
    """The sizes that the unit is the least common multiple of, without those that divide others."""
    sizes: dict[int, list[int]] = {geometry.tokens_per_hash: []}
    for group in geometry.cacheable:
        sizes.setdefault(group.tokens_per_block, []).append(group.id)
    return [
        {"tokens": size, "hash": size == geometry.tokens_per_hash, "groups": ids}
        for size, ids in sizes.items()
        if not any(other != size and other % size == 0 for other in sizes)
    ]


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else round(value, 3)


def _capacity(plan: ChunkPlan, cpu_bytes: str, interval: int | None) -> dict[str, Any]:
    from kvloft.capacity import capacity
    from kvloft.config import size_option
    from kvloft.errors import ArenaError, ConfigError
    from kvloft.mapping import header_bytes
    from kvloft.units import PAGE_BYTES

    size = size_option("--cpu-bytes", cpu_bytes)
    arena = size // PAGE_BYTES * PAGE_BYTES - header_bytes(plan.geometry.tensor_parallel)
    try:
        held = capacity(plan, arena, interval or plan.tokens_per_chunk)
    except ArenaError as error:
        raise ConfigError(f"'--cpu-bytes': {cpu_bytes!r}: {error}") from error
    return {"cpu_bytes": size, "arena_bytes": arena, **asdict(held)}


# ---------------------------------------------------------------------------------- for a person


def _lines(report: dict[str, Any], *, chosen: bool) -> Iterator[str]:
    from kvloft.units import format_size

    def size(value: float) -> str:
        return f"{value:,} bytes" + (f" ({format_size(value)})" if value >= 1024 else "")

    about = [report["model"], report["dtype"], f"tensor parallel {report['tensor_parallel']}"]
    yield f"{_plain(report['name'])}: {', '.join(_plain(part) for part in about if part)}"
    yield ""
    unit, tokens = report["unit_tokens"], report["tokens_per_chunk"]
    yield f"unit           {unit:,} tokens, {_because(report['unit_causes'], unit)}"
    yield (
        f"chunk          {tokens:,} tokens: {_count(tokens // unit, 'unit')}"
        + ("" if chosen else " (automatic)")
    )
    if report["full_chunk_bytes"]:
        yield f"full chunk     {size(report['full_chunk_bytes'])}"
        yield f"per token      {report['bytes_per_token']:,} bytes"
    else:
        yield "full chunk     none: no group attends to the whole prefix"
    if interval := report["resume_interval"]:
        yield f"resume point   {size(report['resume_bytes'])}"
        yield (
            f"kept every     {interval:,} tokens (automatic), which makes "
            f"{report['bytes_per_token_at_interval']:,} bytes per token"
        )
    else:
        yield "resume point   costs nothing: full chunks are all that a resume needs"
    yield ""
    yield from _table(
        [["group", "kind", "layers", "tokens/block", "bytes/block", "blocks/chunk", "to resume"]]
        + [
            [
                str(group["id"]),
                group["kind"] + (" (draft)" if group["draft"] else ""),
                f"{group['layers']:,}",
                f"{group['tokens_per_block']:,}",
                f"{group['block_bytes']:,}",
                "not kept" if group["blocks_per_chunk"] is None
                else f"{group['blocks_per_chunk']:,}",
                _to_resume(group),
            ]
            for group in report["groups"]
        ]
    )  # fmt: skip
    if held := report.get("capacity"):
        yield ""
        yield from _fits(held, format_size(held["cpu_bytes"]))


def _fits(held: dict[str, Any], size: str) -> Iterator[str]:
    yield f"{size} hold"
    if held["tokens"] is not None:
        alone = " in full chunks alone" if held["resume_points"] is not None else ""
        yield f"  {held['tokens']:,} tokens{alone}"
    if held["resume_points"] is not None:
        yield f"  {_count(held['resume_points'], 'resume point')} alone"
        yield (
            f"  {held['tokens_at_interval']:,} tokens with "
            f"{_count(held['resume_points_at_interval'], 'resume point')}, "
            f"one every {held['resume_interval']:,} tokens"
        )


def _because(causes: Sequence[dict[str, Any]], unit: int) -> str:
    parts = []
    for cause in causes:
        who = ["the hash"] if cause["hash"] else []
        if ids := cause["groups"]:
            who.append(f"group{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}")
        size = "" if cause["tokens"] == unit else f"{cause['tokens']:,} of "
        parts.append(size + " and ".join(who))
    if len(parts) == 1:
        return f"set by {parts[0]}"
    return f"the least common multiple of {'; '.join(parts)}"


def _to_resume(group: dict[str, Any]) -> str:
    if group["kind"] == "full":
        return "all"
    if group["blocks_per_chunk"] is None:
        return "-"
    if group["kind"] == "chunked_local":
        return f"{_count(group['resume_blocks'], 'block')} at most"
    return _count(group["resume_blocks"], "block")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 2 <= index < len(row) - 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _plain(text: str) -> str:
    """Text from a file, harmless on a terminal of any encoding."""
    return "".join(c if c.isprintable() and c.isascii() else ascii(c)[1:-1] for c in text)
