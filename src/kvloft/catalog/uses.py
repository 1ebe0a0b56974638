"""What the catalog tells its policy of prompts, prefixes and room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of an entry when it is stored or used."""

    name: int = 0
    """64 bits of the hash of its prefix: the same whenever the same bytes come back."""
    seen: int = 0
    """Earlier requests whose prompts are known to have begun with this prefix, 2 for more."""
    group: int = 0
    """Its kind of prefix (:mod:`kvloft.catalog.sightings`)."""
    worth: float = 1.0
    """Tokens that need not be computed if it is found, per byte that is kept for it. 0: it may
    take what is free, and the place of what has been demoted, but of nothing else."""


NO_USE = Use()


class Sighting(NamedTuple):
    """A prompt has begun with a known prefix again, or with a new one."""

    name: int
    weight: float
    """How much of the prompt this prefix stands for, in units of 512 tokens."""
    before: int
    """Its group until now; negative if the prefix is new."""
    age: int
    """Prompts that have come in since it was last seen."""
    group: int
    """Its group from now on."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much there is to give away, and what it is given to."""

    budget: int
    """Bytes."""
    chunk_bytes: int
    """Of a full chunk."""
    resume_bytes: int
    """Of all else that one resume point needs; 0 where every boundary is one."""
    tokens_per_chunk: int
