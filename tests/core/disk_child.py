"""An engine's disk tier in a process of its own, which puts and gets until it is killed.

``python disk_child.py DIRECTORY MAX_BYTES SEED`` writes a line when it has begun.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from kvloft.testing.tiers import Checked, chain, namespace, with_all
from kvloft.tiers.base import Chunk
from kvloft.tiers.disk import DiskTier
from kvloft.tiers.options import DiskOptions

PATHS = 24


def chunks_of(number: int) -> list[Chunk]:
    """One of the paths that all processes put, which share their first boundaries."""
    trunk = chain(("trunk", number % 4), 2)
    return with_all([*trunk, *chain(("path", number), 1 + number % 5, above=trunk[-1])])


def everything() -> list[Chunk]:
    """All chunks that may be there, each once."""
    return list(dict.fromkeys(c for number in range(PATHS) for c in chunks_of(number)))


def main() -> None:
    """Put and get at random, checking all that comes back, for ever or until a check fails."""
    path, max_bytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    names = namespace()
    tier = Checked(DiskTier(DiskOptions(path, max_bytes, threads=3), names), names, 30.0)
    for turn in itertools.count():
        chunks = chunks_of(rng.randrange(PATHS))
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                tier.put_all(chunks)
            case 4 | 5 | 6:
                for chunk in tier.held(chunks):
                    tier.get(chunk)
            case _:
                tier.delete([rng.choice(chunks)])
        if turn == 0:
            sys.stdout.write("begun\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
