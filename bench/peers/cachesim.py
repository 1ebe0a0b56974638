"""The bundled traces' blocks through libCacheSim's policies, to check figures about plain blocks.

libCacheSim (Yang et al., 2020) knows nothing of prefixes: it is asked block by block. A prompt hits
the blocks at its beginning that are there when it comes; then it asks for all of them, the last
one first, so that what ends a prompt is forgotten before what begins it.

    python bench/peers/cachesim.py [--trace conversation] [--blocks 352,1409,5637,22550] [--json]

The first time, it makes ``cachesim.venv`` beside itself and installs libCacheSim into it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "0.3.5"
HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[1] / "src" / "kvloft" / "bench" / "traces"
TOKENS = 512
_NEVER = (1 << 63) - 1
POLICIES = ("LRU", "LFU", "ARC", "S3FIFO", "Belady")

try:
    import libcachesim
except ImportError:
    libcachesim = None


def in_own_venv() -> None:
    """Go on in an environment that has libCacheSim; does not return."""
    place = HERE / "cachesim.venv"
    python = place / "bin" / "python"
    if Path(sys.prefix) == place:
        sys.exit("cachesim.venv has no libcachesim; remove it and start again")
    if not python.exists():
        venv.create(place, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"libcachesim=={VERSION}"],
            check=True,
            stdout=sys.stderr,
        )
    os.execv(python, [str(python), str(HERE / "cachesim.py"), *sys.argv[1:]])


def read(name: str) -> list[list[int]]:
    """The prompts of a trace, as ids of whole blocks."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    return [r["hash_ids"][: r["input_length"] // TOKENS] for r in requests]


def next_uses(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of every block that is asked for, when it is asked for again: the place among all uses, each
    prompt from its end to its beginning."""
    times: list[list[int]] = []
    later: dict[int, int] = {}
    clock = sum(map(len, prompts))
    for prompt in reversed(prompts):
        row = []
        for block in prompt:  # The clock runs backwards, and so does a prompt: its first one last.
            row.append(later.get(block, _NEVER))
            later[block] = clock
            clock -= 1
        times.append(row)
    return times[::-1]


def replay(
    prompts: Sequence[Sequence[int]], policy: str, blocks: int, *, forwards: bool = False
) -> list[int]:
    """Blocks that each prompt hits."""
    cache: Any = getattr(libcachesim, policy)(cache_size=blocks)
    asked: Any = libcachesim.Request()
    asked.obj_size = 1
    hits = []
    for prompt, uses in zip(prompts, next_uses(prompts), strict=True):
        found = 0
        for block in prompt:
            asked.obj_id = block + 1
            if cache.find(asked, update_cache=False) is None:
                break
            found += 1
        hits.append(found)
        order = list(zip(prompt, uses, strict=True))
        for block, use in order if forwards else reversed(order):
            asked.obj_id, asked.next_access_vtime = block + 1, use
            cache.get(asked)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain blocks through libCacheSim's policies.")
    parser.add_argument("--trace", choices=("conversation", "synthetic"), default="conversation")
    parser.add_argument("--blocks", default="352,1409,5637,22550", help="sizes of the cache")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument(
        "--forwards", action="store_true", help="a prompt asks for its first block first"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    if libcachesim is None:
        in_own_venv()
    prompts = read(args.trace)
    half = len(prompts) // 2
    asked = sum(map(len, prompts[half:]))
    rows = []
    for policy in args.policies.split(","):
        for blocks in map(int, args.blocks.split(",")):
            rate = sum(replay(prompts, policy, blocks, forwards=args.forwards)[half:]) / asked
            rows.append({"policy": policy, "blocks": blocks, "hit_rate": round(rate, 5)})
            if not args.json:
                sys.stdout.write(f"{policy:8} {blocks:8,} {rate:7.2%}\n")
    if args.json:
        answer = {"trace": args.trace, "libcachesim": VERSION, "rows": rows}
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
