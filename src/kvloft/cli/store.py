"""``kvloft store``: what is in a disk tier's directory, whether it is whole, and clearing it out.

All of it works beside engines that use the directory. Looking takes no lock; removing takes the
store's lock a little at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloft.errors import ConfigError, KVLoftError

if TYPE_CHECKING:
    from kvloft.tiers.disk.survey import Entry, Flaw, Selection, Space, Totals, Use
    from kvloft.tiers.disk.tools import Collected

FLAWS = 1
"""Exit code of ``verify`` when it has found something and not removed it."""
_SHOWN_FLAWS = 20

Report = dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``store`` and its subcommands."""
    parser = subparsers.add_parser(
        "store",
        help="look into the directory of a disk tier, check it, clear it out",
        description=(
            "Look into the directory of a tier of type 'disk', check it, or clear it out. Engines "
            "that use it may go on meanwhile."
        ),
    )
    choices = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, about in (
        ("ls", "list what it has, by model and class"),
        ("stat", "show what it takes and how that is shared out"),
        ("verify", "read every byte and compare checksums"),
        (
            "gc",
            "remove what is of no use: leftovers of crashes, orphans, and on request old chunks",
        ),
        ("clear", "remove chunks"),
    ):
        one = choices.add_parser(name, help=about, description=f"{about.capitalize()}.")
        one.add_argument("path", type=Path, metavar="PATH", help="the 'path' of the tier")
        one.add_argument("--json", action="store_true", help="print JSON: bytes and unix seconds")
        if name != "stat":
            _add_filters(one, age=name != "verify")
        if name == "ls":
            one.add_argument("--chunks", action="store_true", help="list single chunks")
        if name == "verify":
            one.add_argument("--repair", action="store_true", help="remove what is damaged")
        if name == "gc":
            one.add_argument(
                "--down-to", metavar="SIZE", help="then drop the coldest until it fits, e.g. 100GiB"
            )
        if name == "clear":
            one.add_argument("--yes", action="store_true", help="don't ask")
        one.set_defaults(run=run)


def _add_filters(parser: argparse.ArgumentParser, *, age: bool) -> None:
    parser.add_argument("--model", metavar="TEXT", help="only models with this in their name")
    parser.add_argument("--namespace", metavar="HEX", help="only namespaces that begin so")
    parser.add_argument(
        "--class", dest="code", metavar="CLASS",
        help="only full, state, window, short or whole, or a class such as w0",
    )  # fmt: skip
    if age:
        parser.add_argument(
            "--older-than", metavar="AGE", help="only what was last used so long ago: 30m, 12h, 7d"
        )


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; raises :class:`kvloft.errors.KVLoftError` for what the user can
    mend."""
    from kvloft.tiers.disk.control import LockedError
    from kvloft.tiers.disk.survey import locate

    path = locate(args.path)
    try:
        code: int = globals()[f"_{args.action}"](path, args)
    except LockedError as error:
        raise KVLoftError(
            f"another process holds the lock in {path} and does not let go; is an engine hung?"
        ) from error
    return code


def _selection(args: argparse.Namespace) -> Selection:
    from kvloft.tiers.disk.survey import Selection, parse_age

    since = None
    if getattr(args, "older_than", None) is not None:
        try:
            since = time.time() - parse_age(args.older_than)
        except ValueError as error:
            raise ConfigError(f"'--older-than': {error}") from error
    return Selection(args.model, args.namespace, args.code, since)


# --- looking --------------------------------------------------------------------------------------


def _ls(path: Path, args: argparse.Namespace) -> int:
    from kvloft.tiers.disk.survey import Survey

    survey, selection = Survey(path), _selection(args)
    if args.chunks:
        entries = survey.entries(selection)
        if args.json:
            print(json.dumps({"chunks": [_entry_report(entry) for entry in entries]}, indent=1))
        else:
            for entry in entries:
                print(_entry_line(entry))
        return 0
    spaces = survey.spaces(selection)
    if args.json:
        print(json.dumps({"namespaces": [_space_report(space) for space in spaces]}, indent=1))
    elif not spaces:
        print("nothing")
    else:
        for line in _space_lines(spaces):
            print(line)
    return 0


def _entry_report(entry: Entry) -> Report:
    return {
        "namespace": entry.digest.hex(), "key": entry.key.hex(), "class": entry.code,
        "depth": entry.depth, "bytes": entry.nbytes, "used": entry.used,
    }  # fmt: skip


def _entry_line(entry: Entry) -> str:
    from kvloft.tiers.disk.survey import class_name
    from kvloft.units import format_size

    return (
        f"{entry.digest.hex()[:12]}  {entry.key.hex()}  depth {entry.depth:<5}  "
        f"{format_size(entry.nbytes):>8}  used {_ago(entry.used):<14}  {class_name(entry.code)}"
    )


def _use_report(use: Use) -> Report:
    return {
        "chunks": use.chunks, "bytes": use.nbytes, "disk_bytes": use.slot_bytes,
        "oldest_use": use.oldest, "newest_use": use.newest,
    }  # fmt: skip


def _space_report(space: Space) -> Report:
    from kvloft.tiers.disk.survey import class_name

    return {
        "namespace": space.digest.hex(),
        "about": dict(space.about),
        **_use_report(space.use),
        "classes": [
            {"class": code, "name": class_name(code), **_use_report(use)}
            for code, use in sorted(space.classes.items())
        ],
    }


def _space_lines(spaces: list[Space]) -> Iterator[str]:
    from kvloft.bench.report import table
    from kvloft.tiers.disk.survey import class_name
    from kvloft.units import format_size

    for at, space in enumerate(spaces):
        if at:
            yield ""
        about = dict(space.about)
        yield f"{_plain(about.pop('model', '(unnamed)'))}  namespace {space.digest.hex()[:12]}"
        about.pop("digest", None)
        if about:
            yield "  " + ", ".join(f"{_plain(k)} {_plain(v)}" for k, v in about.items())
        rows = [
            (
                f"  {class_name(code)}", f"{use.chunks:,}", format_size(use.nbytes),
                format_size(use.slot_bytes), _ago(use.newest), _ago(use.oldest),
            )
            for code, use in (*sorted(space.classes.items()), ("all", space.use))
        ]  # fmt: skip
        yield from table(("  class", "chunks", "size", "on disk", "last used", "oldest use"), rows)


def _stat(path: Path, args: argparse.Namespace) -> int:
    from kvloft.tiers.disk.survey import Survey

    totals = Survey(path).totals()
    if args.json:
        print(json.dumps({"path": str(path), **asdict(totals)}, indent=1))
    else:
        for line in _total_lines(path, totals):
            print(line)
    return 0


def _total_lines(path: Path, totals: Totals) -> Iterator[str]:
    from kvloft.bench.report import table
    from kvloft.units import format_size

    engines = "unknown, the lock can't be had" if totals.writers is None else str(totals.writers)
    for name, value in (
        ("path", _plain(str(path))),
        ("takes", f"{format_size(totals.total_bytes)} ({totals.total_bytes:,} bytes)"),
        ("free beside it", format_size(totals.free_bytes)),
        ("chunks", f"{totals.chunks:,}, {format_size(totals.chunk_bytes)}"),
        ("namespaces", str(totals.namespaces)),
        ("engines", engines),
        ("damaged records", str(totals.damaged_records)),
        ("leftover files", str(totals.leftovers)),
    ):
        yield f"{name:<16} {value}"
    if totals.sizes:
        yield ""
        rows = [
            (
                format_size(size.slot_bytes), f"{size.segments:,}", format_size(size.nbytes),
                f"{size.slots:,}", f"{size.chunks:,}", f"{size.reserved:,}",
            )
            for size in totals.sizes
        ]  # fmt: skip
        yield from table(("slot", "segments", "on disk", "slots", "chunks", "being written"), rows)


# --- verification ---------------------------------------------------------------------------------


def _verify(path: Path, args: argparse.Namespace) -> int:
    from kvloft.cli.progress import bytes_done
    from kvloft.tiers.disk.survey import Progress, Survey
    from kvloft.tiers.disk.tools import StoreTools

    survey, selection = Survey(path), _selection(args)
    progress = Progress(0)
    with bytes_done("verified") as tell:

        def note(now: Progress) -> None:
            nonlocal progress
            progress = now
            tell(now.done_bytes, now.total_bytes)

        flaws = [*survey.broken(selection), *survey.unreadable(selection, note)]
    report: Report = {
        "chunks": progress.chunks,
        "bytes": progress.done_bytes,
        "evicted_meanwhile": progress.gone,
        "flaws": [_flaw_report(flaw) for flaw in flaws],
    }
    if args.repair and flaws:
        tools = StoreTools(path)
        tools.collect()
        tools.remove([flaw.entry.name for flaw in flaws if flaw.entry is not None])
        report["left"] = len([*survey.broken(selection)])
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for line in _flaw_lines(report, flaws, repaired=args.repair):
            print(line)
    return FLAWS if flaws and (not args.repair or report["left"]) else 0


def _flaw_report(flaw: Flaw) -> Report:
    where = {"cause": flaw.cause, "file": flaw.file, "slot": flaw.slot}
    return where | ({} if flaw.entry is None else _entry_report(flaw.entry))


def _flaw_lines(report: Report, flaws: list[Flaw], *, repaired: bool) -> Iterator[str]:
    from kvloft.units import format_size

    yield f"{report['chunks']:,} chunks, {format_size(report['bytes'])}: read and compared"
    if report["evicted_meanwhile"]:
        yield f"{report['evicted_meanwhile']:,} were evicted meanwhile"
    if not flaws:
        yield "nothing is wrong"
        return
    for flaw in flaws[:_SHOWN_FLAWS]:
        what = "" if flaw.entry is None else f"  {_entry_line(flaw.entry)}"
        yield f"{flaw.cause:<9} {flaw.file} slot {flaw.slot}{what}"
    if len(flaws) > _SHOWN_FLAWS:
        yield f"… and {len(flaws) - _SHOWN_FLAWS:,} more; --json lists them all"
    counts = Counter(flaw.cause for flaw in flaws)
    listed = ", ".join(f"{n:,} {cause}" for cause, n in sorted(counts.items()))
    if not repaired:
        yield f"{listed}: damaged. Engines take them for missing; --repair removes them"
    elif report["left"]:
        yield f"{listed}: removed, but {report['left']:,} are left"
    else:
        yield f"{listed}: removed"


# --- changes --------------------------------------------------------------------------------------


def _gc(path: Path, args: argparse.Namespace) -> int:
    from kvloft.tiers.disk.tools import StoreTools
    from kvloft.units import parse_size

    selection, down_to = _selection(args), None
    if selection.unused_since is None and not selection.everything:
        raise ConfigError(
            "'gc' needs '--older-than' beside '--model', '--namespace' or '--class'; to remove "
            "chunks whatever their age, use 'kvloft store clear'"
        )
    if args.down_to is not None:
        try:
            down_to = parse_size(args.down_to)
        except ValueError as error:
            raise ConfigError(f"'--down-to': {error}") from error
    return _collected(StoreTools(path).collect(selection, down_to=down_to), args)


def _clear(path: Path, args: argparse.Namespace) -> int:
    from kvloft.tiers.disk.survey import Survey, Use
    from kvloft.tiers.disk.tools import StoreTools
    from kvloft.units import format_size

    selection = _selection(args)
    if not args.yes:
        use = Use()
        for space in Survey(path).spaces(selection):
            use.add(space.use)
        what = f"{use.chunks:,} chunks, {format_size(use.nbytes)}, in {_plain(str(path))}"
        if not sys.stdin.isatty():
            raise ConfigError(f"this would remove {what}, and nobody is there to ask: add --yes")
        sys.stderr.write(f"Remove {what}? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise KVLoftError("nothing was removed")
    return _collected(StoreTools(path).clear(selection), args)


def _collected(done: Collected, args: argparse.Namespace) -> int:
    from kvloft.units import format_size

    if args.json:
        print(json.dumps(asdict(done), indent=1))
        return 0
    print(f"removed {done.chunks:,} chunks and {done.segments:,} segments")
    if done.mended_records:
        print(f"mended {done.mended_records:,} records")
    if done.leftover_files:
        print(f"removed {done.leftover_files:,} leftover files")
    print(f"the store takes {format_size(done.freed_bytes)} less")
    return 0


# --- text -----------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Text from a disk without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _ago(then: int | None) -> str:
    """How long ago a time was."""
    if then is None:
        return "-"
    seconds = max(0, int(time.time()) - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
