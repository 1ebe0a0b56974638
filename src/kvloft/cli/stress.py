"""``kvloft stress``: the connector under vLLM's scheduler, with faults; every byte is checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloft.cli.progress import steps_done
from kvloft.errors import ConfigError

if TYPE_CHECKING:
    from kvloft.testing.stress import StressTotals

_STEPS_PER_ENGINE = 2000
WRONG = 1
"""Exit code when a page was wrong or something was left over."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``stress``."""
    parser = subparsers.add_parser(
        "stress",
        help="run the connector under vLLM's scheduler, with faults, and look at every byte",
        description=(
            "Run the connector under vLLM's own engine core on made-up models: random prompts, "
            "preemptions, aborts, resets, and copies, ranks and tiers that fail. No model computes "
            "anything; pages hold what follows from their tokens, and everything that is restored "
            "is compared. Needs vLLM, and no GPU."
        ),
    )
    parser.add_argument(
        "--steps", type=int, default=14_000, metavar="N",
        help="steps in which vLLM schedules tokens, over all models (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="one of several models (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of all that is random (default: 1)"
    )
    parser.add_argument("--no-faults", action="store_true", help="nothing fails or is late")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write JSON, to standard output unless a file is named",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run engines until there were enough steps; the table or JSON goes to standard output."""
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least 1 is needed")
    if args.json not in (None, "-"):
        Path(args.json).touch()  # A wrong path must show now, not after minutes.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # Read by vLLM when it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from kvloft.testing.stress import DEFAULT_FAULTS, MODELS, NO_FAULTS, run_stress
    except ModuleNotFoundError as error:
        raise ConfigError(f"'kvloft stress' needs vLLM: {error}") from error
    names = args.model or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        raise ConfigError(f"--model {unknown[0]}: not one of {', '.join(MODELS)}")
    faults = NO_FAULTS if args.no_faults else DEFAULT_FAULTS
    totals: dict[str, StressTotals] = {}
    done, number, trouble = 0, 0, ""
    with steps_done("stress") as tell:
        while done < args.steps and not trouble:
            name = names[number % len(names)]
            left = args.steps - done
            share = min(_STEPS_PER_ENGINE, -(-left // max(1, len(names) - number)))
            before = done
            try:
                found = run_stress(
                    name, args.seed + number // len(names), share, faults=faults,
                    tell=lambda now, before=before: tell(before + now, args.steps),  # type: ignore[misc]
                )  # fmt: skip
            except Exception:
                trouble = f"{name}, seed {args.seed + number // len(names)}"
                traceback.print_exc()
                break
            done += found.steps
            number += 1
            if name in totals:
                totals[name].add(found)
            else:
                totals[name] = found
    result = {
        "seed": args.seed,
        "faults": asdict(faults),
        "trouble": trouble,
        "models": {name: asdict(total) for name, total in totals.items()},
    }
    _write(result, args.json)
    return WRONG if trouble else 0


def _write(result: dict[str, Any], json_file: str | None) -> None:
    text = json.dumps(result, indent=1)
    if json_file == "-":
        print(text)
        return
    if json_file is not None:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
        sys.stderr.write(f"wrote {json_file}\n")
    for line in lines(result):
        print(line)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The result for a person."""
    from kvloft.bench.report import table

    columns = {
        "steps": "steps", "requests": "requests", "restored_tokens": "restored",
        "checked_bytes": "bytes checked", "failed_loads": "failed loads",
        "failed_stores": "failed stores", "rotten_chunks_found": "rotten", "aborted": "aborts",
        "preemptions": "preemptions", "connector_resets": "resets",
    }  # fmt: skip
    rows = []
    for name, total in result["models"].items():
        per_step = 1e6 * total["connector_seconds"] / max(1, total["steps"])
        share = total["connector_seconds"] / max(1e-9, total["scheduler_seconds"])
        rows.append(
            [name, *(f"{total[key]:,}" for key in columns), f"{per_step:,.0f} us", f"{share:.0%}"]
        )
    yield from table(["model", *columns.values(), "connector/step", "of scheduling"], rows)
    yield ""
    if result["trouble"]:
        yield f"WRONG: {result['trouble']}; the message above says how to run the same again"
    else:
        steps = sum(total["steps"] for total in result["models"].values())
        yield f"{steps:,} steps: no byte was wrong, and nothing was left over"
