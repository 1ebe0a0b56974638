"""A cache of names alone, to see how a policy would do on the prompts that come in."""

from __future__ import annotations

from collections.abc import Sequence

from kvloft.catalog.policies.base import EvictionPolicy
from kvloft.catalog.sightings import seen_of
from kvloft.catalog.uses import Room, Sighting, Use

_MAX_NAMES = 2048
_MIB = 1 << 20


def _any(entry: int) -> bool:
    return True


class _Names:
    """Small numbers for names, used again once a name is gone."""

    def __init__(self) -> None:
        self.number: dict[int, int] = {}
        self._name: list[int] = []
        self._unused: list[int] = []

    def add(self, name: int) -> int:
        if self._unused:
            number = self._unused.pop()
            self._name[number] = name
        else:
            number = len(self._name)
            self._name.append(name)
        self.number[name] = number
        return number

    def drop(self, number: int) -> None:
        del self.number[self._name[number]]
        self._unused.append(number)


class ChunkShadow:
    """For models where every boundary is a resume point: a sample of chunks, each by itself, in a
    cache that is as much smaller as the sample is (Waldspurger et al., FAST 2015)."""

    def __init__(self, policy: EvictionPolicy, room: Room) -> None:
        self.policy = policy
        chunks = max(1, room.budget // max(1, room.chunk_bytes))
        self._share = min(1.0, _MAX_NAMES / chunks)
        self._limit = max(1, round(chunks * self._share))
        self._threshold = int(self._share * (1 << 32))
        self._names = _Names()

    def serve(self, sightings: Sequence[Sighting]) -> float:
        """What a prompt would have found; the prompt is kept as the policy sees fit."""
        names, policy = self._names, self.policy
        sample = [s for s in sightings if s.name >> 32 < self._threshold]
        found = 0
        for sighting in sample:
            if sighting.name not in names.number:
                break
            found += 1
        gain = sum(sighting.weight for sighting in sample[:found])
        stop = found
        for sighting in sample[found:]:
            use = Use(sighting.name, seen_of(sighting.group), sighting.group)
            if not policy.admits(use) and len(names.number) >= self._limit:
                break
            if sighting.name not in names.number:
                if not self._make_room(use):
                    break
                names.add(sighting.name)
            stop += 1
        for sighting in reversed(sample[:stop]):
            number = names.number.get(sighting.name)
            if number is not None:
                use = Use(sighting.name, seen_of(sighting.group), sighting.group)
                policy.insert(number, use)
        return gain / self._share

    def _make_room(self, newcomer: Use) -> bool:
        while len(self._names.number) >= self._limit:
            # The prompt's own new chunks are in no order yet, so they can't be taken.
            entry = self.policy.victim(_any, 1, newcomer)
            if entry is None:
                return False
            self.policy.remove(entry)
            self._names.drop(entry)
        return True


class PromptShadow:
    """For models with resume points: whole prompts, each with one at its end."""

    def __init__(self, policy: EvictionPolicy, room: Room) -> None:
        self.policy = policy
        self._room = room
        self._names = _Names()
        self._bytes: dict[int, int] = {}
        self._held = 0

    def serve(self, sightings: Sequence[Sighting]) -> float:
        """As :meth:`ChunkShadow.serve`. A prompt that goes on where another ended replaces it."""
        if not sightings:
            return 0.0
        names, policy = self._names, self.policy
        gain, left = 0.0, sum(sighting.weight for sighting in sightings)
        total = left
        for sighting in reversed(sightings):
            number = names.number.get(sighting.name)
            if number is not None:
                gain = left
                self._drop(number)
                break
            left -= sighting.weight
        last = sightings[-1]
        chunks = int(total * 512 / self._room.tokens_per_chunk)
        nbytes = self._room.resume_bytes + chunks * self._room.chunk_bytes
        use = Use(
            last.name, seen_of(last.group), last.group, max(1e-9, total) * 512 * _MIB / nbytes
        )
        fits = self._held + nbytes <= self._room.budget
        if (fits or policy.admits(use)) and self._make_room(use, nbytes):
            number = names.add(last.name)
            self._bytes[number] = nbytes
            self._held += nbytes
            policy.insert(number, use)
        return gain

    def _make_room(self, newcomer: Use, nbytes: int) -> bool:
        while self._held + nbytes > self._room.budget:
            entry = self.policy.victim(_any, 1, newcomer)
            if entry is None:
                return False
            self._drop(entry)
        return True

    def _drop(self, number: int) -> None:
        self.policy.remove(number)
        self._held -= self._bytes.pop(number)
        self._names.drop(number)
