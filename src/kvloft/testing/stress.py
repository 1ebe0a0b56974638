"""The real connector under vLLM's real engine core, on pages whose right content is known.

No model runs. A step "computes" a token by writing a hash of the whole prefix that ends with it
(and of layer, group, rank and cache salt), so what any page must hold follows from tokens alone.
Whenever a request begins to compute upon what a cache has given it, KVLoft's or vLLM's own, all
that its next tokens attend to is compared, on every rank. Before a load, its blocks are filled with
junk.

Meanwhile everything happens that may: prompts that share prefixes, preemptions, aborts, resets,
copies that fail or come late, ranks that report late and twice, tiers that fail, slots that rot.
All of it follows from the seed.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.catalog.policies import POLICIES
from kvloft.engines.vllm.messages import Reports
from kvloft.engines.vllm.rig import (
    RIG_MODELS,
    Rig,
    RigConnector,
    RigGroup,
    RigModel,
    RigOptions,
    layer_names,
    page_bytes,
)
from kvloft.engines.vllm.setup import Setup
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier
from kvloft.testing import audit
from kvloft.testing.jobs import half
from kvloft.testing.manual import ManualPlace, ManualTier
from kvloft.testing.pages import extend_hash
from kvloft.testing.scenario import VOCABULARY, vary
from kvloft.testing.wrappers import FailingTier, WrapperTier
from kvloft.tiers.base import Chunk, Outcome, Tier
from kvloft.transfer import Copier

Words = npt.NDArray[np.uint64]

MODELS = tuple(RIG_MODELS)
"""Names that :func:`run_stress` takes."""
POISON = 0xA7
_SALTS = (None, None, None, "one tenant", "another one")
_PATIENCE = 1e9
"""Seconds that requests wait for lower tiers, whose time is the driver's."""


class StressError(AssertionError):
    """A page does not hold what its prefix says, or something is left over."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How often something goes wrong; chances per copy, report or call."""

    store_error: float = 0.02
    """A rank's store fails, half of it done."""
    load_error: float = 0.03
    """A rank's load fails, half of it done."""
    late_load: float = 0.6
    """A load that could be done in a step is not."""
    late_report: float = 0.3
    repeated_report: float = 0.1
    tier: float = 0.05
    """A put or get of a lower tier ends as anything but DONE."""
    tier_hangs: float = 0.0
    """A put or get of a lower tier never ends; requests then wait for 10 ms at most."""
    tier_breaks: float = 0.0
    """A lower tier raises, against its contract."""
    rot: float = 0.02
    """A slot that a store has filled changes later on; only with ``verify: always``, as nothing
    else could notice."""


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0, 0, 0, 0)
DEFAULT_FAULTS = Faults()


@dataclass(slots=True)
class StressTotals:
    """What a run has seen."""

    steps: int = 0
    """In which vLLM's scheduler scheduled tokens."""
    idle_steps: int = 0
    computed_tokens: int = 0
    requests: int = 0
    ended: int = 0
    aborted: int = 0
    preemptions: int = 0
    hits: int = 0
    restored_tokens: int = 0
    checked_contexts: int = 0
    """Times that all a request attends to was compared."""
    checked_bytes: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    late_reports: int = 0
    repeated_reports: int = 0
    rotten_slots: int = 0
    engine_resets: int = 0
    connector_resets: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evicted_chunks: int = 0
    dropped_stores: int = 0
    promoted_chunks: int = 0
    rotten_chunks_found: int = 0
    """By loads and by writes to lower tiers."""
    hung_jobs: int = 0
    broken_calls: int = 0
    """In which a lower tier raised."""
    failed_promotions: int = 0
    load_pauses: int = 0
    canaries: int = 0
    compared_chunks: int = 0
    ignored_hints: int = 0
    """Of those wrong ones that were sent along on purpose."""
    pinned: int = 0
    """Prefixes that were pinned by hints at the end."""
    declined_stores: int = 0
    audits: int = 0
    seconds: float = 0.0
    scheduler_seconds: float = 0.0
    """On vLLM's side of the steps, the connector's calls included."""
    connector_seconds: float = 0.0
    """In the connector's calls on the scheduler's thread."""
    slowest_call: float = 0.0
    """Seconds of the longest of them."""

    def add(self, other: StressTotals) -> None:
        """Add up; of the slowest calls, the slower one."""
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "slowest_call" else mine + value)


@dataclass(eq=False)
class _Sequence:
    """What the ranks know of a request."""

    tokens: list[int]
    hashes: Words
    """``hashes[n]``: of the first n + 1 tokens; as many as there are tokens."""
    seed: int
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    fresh: bool = True
    """Nothing has been computed upon what is in its blocks yet."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        at = len(self.tokens)
        value = int(self.hashes[at - 1]) if at else self.seed
        for token in tokens:
            value = extend_hash(value, token)
            self.hashes[at] = value
            at += 1
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget what was generated beyond ``length`` tokens."""
        del self.tokens[length:]


def _next_token(prefix_hash: int) -> int:
    return (prefix_hash >> 7) % VOCABULARY


class _Group:
    """The pages of one group on one rank as words: ``(num_blocks, layers, tokens, words)``."""

    def __init__(self, spec: RigGroup, words: Words, salts: Words) -> None:
        self.spec = spec
        self.words = words
        self.salts = salts

    def write(self, table: Sequence[int], hashes: Words, start: int, end: int) -> None:
        """Compute tokens ``[start, end)``."""
        size = self.spec.tokens_per_block
        if self.spec.kind == "state":
            self.words[table[(end - 1) // size]] = self._state(hashes, end)
            return
        at = np.arange(start, end)
        blocks = np.asarray(table[start // size : (end - 1) // size + 1])
        ids = blocks[at // size - start // size]
        if not ids.all():
            raise StressError(f"{self.spec.kind}: a token is computed into the null block")
        right = hashes[start:end, None] ^ self.salts[None, :]
        self.words[ids, :, at % size] = right[:, :, None]

    def _state(self, hashes: Words, end: int) -> Words:
        return np.broadcast_to((hashes[end - 1] ^ self.salts)[:, None, None], self.words.shape[1:])

    def attended(self, computed: int) -> int:
        """The first token that the next one attends to."""
        match self.spec.kind:
            case "window":
                return max(0, computed - self.spec.reach + 1)
            case "chunked_local":
                return computed // self.spec.reach * self.spec.reach
            case "ring":
                return computed
        return 0

    def wrong(
        self, table: Sequence[int], hashes: Words, computed: int, volatile: int = 0
    ) -> str:  # fmt: skip
        """What is wrong with the pages that token ``computed`` attends to; empty if nothing is.
        The last ``volatile`` tokens are not looked at."""
        size, start = self.spec.tokens_per_block, self.attended(computed)
        computed -= volatile
        if start >= computed:
            return ""
        if self.spec.kind == "state":
            block = table[(computed - 1) // size]
            if not block:
                return "has no state"
            if not np.array_equal(self.words[block], self._state(hashes, computed)):
                return f"holds another state in block {block}"
            return ""
        ids = table[start // size : (computed - 1) // size + 1]
        if 0 in ids:
            return "lacks a block"
        rows = self.words[ids].transpose(0, 2, 1, 3)
        rows = rows.reshape(-1, *rows.shape[2:])
        base = start // size * size
        found = rows[start - base : computed - base]
        right = hashes[start:computed, None] ^ self.salts[None, :]
        bad = np.flatnonzero((found != right[:, :, None]).any(axis=(1, 2)))
        if not len(bad):
            return ""
        first = int(bad[0]) + start
        return (
            f"holds wrong bytes of {len(bad)} tokens of [{start}, {computed}), the first is "
            f"{first} in block {table[first // size]}"
        )

    def bytes_attended(self, computed: int) -> int:
        """How many bytes :meth:`wrong` compares."""
        tokens = 1 if self.spec.kind == "state" else computed - self.attended(computed)
        return tokens * int(self.words[0, :, 0].nbytes)


class _Rank:
    """The memory of one rank."""

    def __init__(self, model: RigModel, num_blocks: int, rank: int) -> None:
        self._names = layer_names(model)
        self._page = page_bytes(model)
        places = max(map(len, self._names))
        self.rows = np.full((num_blocks, places, self._page), POISON, dtype=np.uint8)
        self.groups: list[_Group] = []
        self._live: list[tuple[int, int]] = []
        for index, spec in enumerate(model.groups):
            tokens = 1 if spec.kind == "state" else spec.tokens_per_block
            live = tokens * spec.words * 8
            words = np.ndarray(
                (num_blocks, spec.layers, tokens, spec.words), np.uint64, self.rows.data,
                strides=(places * self._page, self._page, spec.words * 8, 8),
            )  # fmt: skip
            shared = spec.kind == "mla" and model.ranks > 1
            salts = [
                extend_hash(extend_hash(index, n), 0 if shared else rank)
                for n in range(spec.layers)
            ]
            self.groups.append(_Group(spec, words, np.array(salts, dtype=np.uint64)))
            self._live.append((spec.layers, live))

    def pages(self) -> dict[str, npt.NDArray[np.uint8]]:
        """By layer, ``(num_blocks, live bytes)``."""
        return {
            name: self.rows[:, place, : self._live[index][1]]
            for index, names in enumerate(self._names)
            for place, name in enumerate(names)
        }

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with junk."""
        if len(blocks):
            self.rows[list(blocks)] = POISON

    def padding_intact(self, group: int, blocks: Sequence[int]) -> bool:
        """Whether nothing but live bytes of the group has been written since :meth:`poison`."""
        layers, live = self._live[group]
        rows = self.rows[list(blocks)]
        return bool(
            (rows[:, layers:] == POISON).all() and (rows[:, :layers, live:] == POISON).all()
        )


class _Copies:
    """A rank's copier that fails, is late, and is watched."""

    def __init__(self, hands: StressHands, rank: int, copier: Copier) -> None:
        self._hands = hands
        self._rank = rank
        self._copier = copier

    def store(self, job: Job) -> None:
        """Copy, or fail half-way."""
        hands = self._hands
        if hands.rng.random() < hands.faults.store_error:
            self._copier.store(half(job))
            raise OSError("a store that fails on purpose")
        self._copier.store(job)
        if hands.rots and hands.rng.random() < hands.faults.rot:
            # Of the slots, not of the copies: a run of many is one copy.
            slots = [(offset, copy.counts) for copy in job.copies for offset in copy.offsets]
            offset, counts = hands.rng.choice(slots)
            hands.rotting.append((offset, hands.plan.layout(counts).nbytes))

    def difference(self, job: Job) -> float:
        """As the copier says."""
        return self._copier.difference(job)

    def load(self, job: Job) -> None:
        """Copy into blocks full of junk, or fail half-way."""
        hands, rank = self._hands, self._hands.ranks[self._rank]
        blocks: dict[int, list[int]] = {}
        for copy in job.copies:
            for part in copy.parts:
                blocks.setdefault(part.group, []).extend(part.block_ids)
        ids = [block for found in blocks.values() for block in found]
        rank.poison(ids)
        if hands.rng.random() < hands.faults.load_error:
            self._copier.load(half(job))
            raise OSError("a load that fails on purpose")
        before = rank.rows.copy() if hands.rng.random() < 0.1 else None
        self._copier.load(job)
        if before is not None:
            changed = set(np.flatnonzero((before != rank.rows).any(axis=(1, 2))).tolist())
            if stray := changed - set(ids):
                raise StressError(f"load {job.id} has written to blocks {sorted(stray)}")
            for group, found in blocks.items():
                if not rank.padding_intact(group, found):
                    raise StressError(f"load {job.id} has written beside pages of group {group}")


class _Loader:
    """In place of a rank's thread: loads are done when the driver says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[float], Callable[..., float], tuple[Any, ...]]] = []

    def submit(self, call: Callable[..., float], *arguments: Any) -> Future[float]:
        future: Future[float] = Future()
        self.waiting.append((future, call, arguments))
        return future

    def work(self, index: int) -> None:
        """Do one of the loads."""
        future, call, arguments = self.waiting.pop(index)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call(*arguments))
        except StressError:
            raise
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.waiting:
            if cancel_futures:
                self.waiting.pop()[0].cancel()
            else:
                self.work(0)


class _SplitTier(WrapperTier):
    """Gives some puts and gets to another tier on the same place, in which nobody works."""

    def __init__(self, inner: Tier, apart: Tier, strays: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._apart = apart
        self._strays = strays

    def put(
        self, chunk: Chunk, data: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return (self._apart if self._strays() else self.inner).put(chunk, data, deadline)

    def get(
        self, chunk: Chunk, into: memoryview, deadline: float | None = None
    ) -> Future[Outcome] | None:
        return (self._apart if self._strays() else self.inner).get(chunk, into, deadline)


class StressHands:
    """What the ranks do: hashes for keys and values, and a look at everything they read."""

    def __init__(
        self, options: RigOptions, rng: random.Random, faults: Faults,
        places: Sequence[ManualPlace], totals: StressTotals,
    ) -> None:  # fmt: skip
        self.options = options
        self.rng = rng
        self.faults = faults
        self.totals = totals
        self.ranks = [
            _Rank(options.model, options.num_blocks, rank) for rank in range(options.model.ranks)
        ]
        self.sequences: dict[str, _Sequence] = {}
        self.lower: list[ManualTier] = []
        self.hanging: list[ManualTier] = []
        """Lower tiers' jobs that never end."""
        self._places = places
        self._held_back: list[Reports | None] = [None] * options.model.ranks
        self._loaders: list[_Loader] = []
        self.connectors: list[RigConnector] = []
        self.plan: Any = None
        self.rots = options.extra.get("verify") == "always"
        self.rotting: list[tuple[int, int]] = []
        """Slots that are about to change: offset and bytes."""
        self._memory: Any = None

    def take_over(self, workers: Sequence[RigConnector]) -> None:
        """Put the driver between the workers' halves and their copies."""
        self.connectors = list(workers)
        for rank, connector in enumerate(workers):
            half = connector.worker
            half._loader.shutdown()
            loader = _Loader()
            self._loaders.append(loader)
            half._loader = loader  # type: ignore[assignment]
            copier = half._ready()
            half._copier = _Copies(self, rank, copier)
            half.idle_wait_seconds = 0.0
            self.plan = half._setup.plan
            self._memory = half._setup.mapping.data

    def rot(self) -> None:
        """Flip a bit in each slot whose time has come."""
        for slot, nbytes in self.rotting:
            self._memory[slot + self.rng.randrange(nbytes)] ^= 1 << self.rng.randrange(8)
            self.totals.rotten_slots += 1
        self.rotting.clear()

    # ---------------------------------------------------------------- asked by the rig

    def pages(self, rank: int) -> dict[str, npt.NDArray[np.uint8]]:
        return self.ranks[rank].pages()

    def tiers(self, setup: Setup) -> list[LowerTier]:
        rng = self.rng
        self.lower = [
            ManualTier(
                place, rng, has_full=setup.plan.full_layout is not None, faults=self.faults.tier,
                limit=rng.choice([30, 300, 1 << 60]), queue=rng.choice([2, 16, 1 << 60]),
            )
            for place in self._places
        ]  # fmt: skip
        patience = 0.01 if self.faults.tier_hangs else _PATIENCE
        out: list[LowerTier] = []
        for number, manual in enumerate(self.lower):
            tier: Tier = manual
            if self.faults.tier_hangs:
                apart = ManualTier(self._places[number], rng, has_full=manual.has_full)
                self.hanging.append(apart)
                tier = _SplitTier(manual, apart, lambda: rng.random() < self.faults.tier_hangs)
            if self.faults.tier_breaks:
                tier = FailingTier(
                    tier, lambda call: rng.random() < self.faults.tier_breaks, "raises"
                )
            out.append(LowerTier(tier, rng.random() < 0.7, patience))
        return out

    def allocated(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        for spec, table in zip(self.options.model.groups, tables, strict=True):
            if spec.kind != "ring":
                ids = [block for block in table[computed // spec.tokens_per_block :] if block]
                for rank in self.ranks:
                    rank.poison(ids)

    def between(self, rank: int, connector: RigConnector, *, idle: bool) -> None:
        loader, rng = self._loaders[rank], self.rng
        for index in reversed(range(len(loader.waiting))):
            if rng.random() >= self.faults.late_load or (idle and rng.random() < 0.5):
                loader.work(index)

    def reported(self, rank: int, reports: Reports | None) -> Reports | None:
        rng, held = self.rng, self._held_back[rank]
        if held is not None:
            reports = held.aggregate(reports) if reports is not None else held
            self._held_back[rank] = None
        if reports is None:
            return None
        if rng.random() < self.faults.late_report:
            self._held_back[rank] = reports
            self.totals.late_reports += 1
            return None
        if rng.random() < self.faults.repeated_report:
            self._held_back[rank] = reports
            self.totals.repeated_reports += 1
        return reports

    # ---------------------------------------------------------------- computing

    def forward(self, step: Any) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        for name in step.finished_req_ids:
            self.totals.ended += self.sequences.pop(name, None) is not None
        self._follow(step)
        for copy in step.kv_cache_block_copies or ():
            for rank in self.ranks:
                rank.rows[copy.dst_block_id] = rank.rows[copy.src_block_id]
        sampled: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        for name, count in step.num_scheduled_tokens.items():
            sequence = self.sequences[name]
            drafted = step.scheduled_spec_decode_tokens.get(name, [])
            self._compute(name, sequence, count, drafted)
            self.totals.computed_tokens += count
            known = sequence.computed + count - len(drafted)
            if known < len(sequence.tokens):
                continue
            found = self._sample(sequence, drafted)
            self._spoil(sequence, known - 1 + len(found) - 1, sequence.computed + count)
            sequence.extend(found)
            sampled[name] = found
            self.totals.drafted_tokens += len(drafted)
            self.totals.accepted_tokens += len(found) - 1
            if self.options.drafts:
                drafts[name] = self._draft(sequence)
        return sampled, drafts

    def _follow(self, step: Any) -> None:
        """Keep up with what the scheduler says of requests and their blocks."""
        for new in step.scheduled_new_reqs:
            sequence = self.sequences[new.req_id]
            sequence.tables = [list(table) for table in new.block_ids]
            sequence.computed, sequence.fresh = new.num_computed_tokens, True
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            sequence = self.sequences[name]
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                sequence.tables = [list(table) for table in blocks]
                sequence.fresh = True
                self.totals.preemptions += 1
                if (tokens := cached.all_token_ids.get(name)) is not None:
                    sequence.cut(len(tokens))
            elif blocks is not None:
                for table, more in zip(sequence.tables, blocks, strict=True):
                    table.extend(more)
            sequence.computed = cached.num_computed_tokens[at]

    def _compute(self, name: str, sequence: _Sequence, count: int, drafted: list[int]) -> None:
        start, end = sequence.computed, sequence.computed + count
        if start and (sequence.fresh or self.rng.random() < 0.05):
            self.check(name, sequence)
        sequence.fresh = False
        known = len(sequence.tokens)
        if end - len(drafted) > known:
            raise StressError(f"{name}: {end} tokens are computed, {known} are known")
        hashes = sequence.hashes
        if drafted:
            value, hashes = int(hashes[known - 1]), hashes.copy()
            for at, token in enumerate(drafted, known):
                value = extend_hash(value, token)
                hashes[at] = value
        for rank in self.ranks:
            for group, table in zip(rank.groups, sequence.tables, strict=True):
                if group.spec.kind == "ring":
                    continue
                first = max(0, start - 1) if group.spec.draft else start
                group.write(table, hashes, max(first, group.attended(start)), end)

    def _spoil(self, sequence: _Sequence, last: int, end: int) -> None:
        """What a drafter has for the last token that was not rejected, ``last``, and for those
        behind it up to ``end``, is not final: it computes the former again in the next step."""
        for rank in self.ranks:
            for group, table in zip(rank.groups, sequence.tables, strict=True):
                if group.spec.draft:
                    group.write(table, ~sequence.hashes, last, end)

    def check(self, name: str, sequence: _Sequence) -> None:
        """Compare all that a request's next token attends to."""
        self.totals.checked_contexts += 1
        for number, rank in enumerate(self.ranks):
            for index, (group, table) in enumerate(zip(rank.groups, sequence.tables, strict=True)):
                # A drafter's last token is about to be computed again.
                last = group.spec.draft and sequence.computed == len(sequence.tokens) - 1
                if problem := group.wrong(table, sequence.hashes, sequence.computed, last):
                    raise StressError(
                        f"{name} at token {sequence.computed}: group {index} "
                        f"({group.spec.kind}) on rank {number} {problem}"
                    )
                self.totals.checked_bytes += group.bytes_attended(sequence.computed)

    def _sample(self, sequence: _Sequence, drafted: Sequence[int]) -> list[int]:
        """The drafts that are right, and the token behind them."""
        value, out = int(sequence.hashes[len(sequence.tokens) - 1]), []
        for draft in [*drafted, -1]:
            out.append(_next_token(value))
            if draft != out[-1]:
                break
            value = extend_hash(value, draft)
        return out

    def _draft(self, sequence: _Sequence) -> list[int]:
        value, out = int(sequence.hashes[len(sequence.tokens) - 1]), []
        for _ in range(self.rng.randrange(self.options.drafts + 1)):
            right = _next_token(value)
            out.append(right if self.rng.random() < 0.7 else (right + 1) % VOCABULARY)
            value = extend_hash(value, out[-1])
        return out


class Stress:
    """One engine, its users, and everything that befalls them."""

    def __init__(
        self,
        options: RigOptions,
        seed: int,
        *,
        faults: Faults = DEFAULT_FAULTS,
        places: Sequence[ManualPlace] = (),
        folder: Path,
        texts: list[tuple[list[int], str | None]] | None = None,
    ) -> None:
        """``texts``: what has been said before, with its salt; what is said now is added."""
        self.totals = StressTotals()
        self.rng = random.Random(seed)
        self.faults = faults
        self.hands = StressHands(options, self.rng, faults, places, self.totals)
        self.rig = Rig(options, self.hands, folder)
        self.hands.take_over(self.rig.workers)
        self.texts = texts if texts is not None else []
        self._options = options
        self._connector = self.rig.connector

    @property
    def loft(self) -> Loft:
        """The loft under test."""
        return self._connector.scheduler.loft

    # ---------------------------------------------------------------- what users do

    def submit(self) -> None:
        """Ask something: a known text, its beginning, its continuation, or something new."""
        rng, options = self.rng, self._options
        unit, longest = options.model.unit, options.max_model_len - 8
        text: list[int] = []
        salt = rng.choice(_SALTS)
        if self.texts and rng.random() < 0.85:
            text, first_salt = rng.choice(self.texts)
            if rng.random() < 0.9:
                salt = first_salt
        text = vary(text, rng, unit, longest)
        generate = rng.choice([1, 2, 5, rng.randrange(1, 2 * unit), 3 * unit])
        generate = min(generate, options.max_model_len - len(text))
        params = random_hints(rng, unit) if rng.random() < 0.2 else None
        name = self.rig.submit(
            text, generate, salt=salt, priority=rng.randrange(3), params=params
        )  # fmt: skip
        sequence = _Sequence(
            [], np.zeros(options.max_model_len + options.drafts + 2, dtype=np.uint64),
            seed=hash_of(salt),
        )  # fmt: skip
        sequence.extend(text)
        self.hands.sequences[name] = sequence
        self.totals.requests += 1
        if len(self.texts) < 60:
            self.texts.append((sequence.tokens, salt))
        else:
            self.texts[rng.randrange(60)] = (sequence.tokens, salt)

    def act(self) -> None:
        """One step of the engine, after whatever users do before it."""
        rng, rig = self.rng, self.rig
        waiting = len(rig.scheduler.requests)
        if waiting < 2 * self._options.max_requests and rng.random() < (
            0.5 if waiting < 4 else 0.2
        ):
            self.submit()
        if rng.random() < 0.01 and (names := rig.unfinished):
            names = rng.sample(names, min(len(names), rng.choice([1, 1, 3])))
            rig.abort(names)
            self.totals.aborted += len(names)
        chance = rng.random()
        if chance < 0.002:
            connector = rng.random() < 0.5
            rig.reset(running=rng.random() < 0.3, connector=connector)
            self.totals.engine_resets += 1
            self.totals.connector_resets += connector
        self._step()

    def _step(self) -> None:
        before = self.totals.computed_tokens
        self.hands.rot()
        self.rig.step()
        for tier in self.hands.lower:
            while tier.pending and self.rng.random() < 0.6:
                tier.work()
        if self.totals.computed_tokens > before:
            self.totals.steps += 1
        else:
            self.totals.idle_steps += 1
        if defect := self._connector.scheduler.defect:
            raise StressError("a defect, which the engine has been spared") from defect
        calls, self._connector.calls = self._connector.calls, []
        self.totals.connector_seconds += sum(calls)
        self.totals.slowest_call = max([self.totals.slowest_call, *calls])

    def audit(self) -> None:
        """Compare the loft's books with each other."""
        audit.check(self.loft.catalog, self.loft.promoter.reserved())
        self.totals.audits += 1

    # ---------------------------------------------------------------- the whole

    def run(self, steps: int) -> Iterator[int]:
        """Run until ``steps`` steps have computed something; tells the number now and then."""
        start, told = time.perf_counter(), 0
        before = self.totals.seconds
        while self.totals.steps < steps:
            self.act()
            if self.rng.random() < 0.002:
                self.audit()
            if self.totals.steps - told >= 500:
                told = self.totals.steps
                self.totals.seconds = before + time.perf_counter() - start
                yield told
        self.totals.seconds = before + time.perf_counter() - start

    def finish(self) -> StressTotals:
        """Let everything end, look for what is left over, and close the engine."""
        try:
            self._drain()
            self._look_for_leftovers()
            self._count()
        finally:
            self.rig.close()
        self.totals.scheduler_seconds = self.rig.scheduler_seconds
        return self.totals

    def _drain(self) -> None:
        for _ in range(20_000):
            if self.rig.idle:
                return
            self._step()
        raise StressError(
            f"the engine does not come to rest: {self.rig.unfinished} unfinished, "
            f"{self.loft.pending} jobs pending"
        )

    def _look_for_leftovers(self) -> None:
        loft = self.loft
        self.totals.pinned = loft.stats().pins
        loft.release_pins()
        lower, hanging = self.hands.lower, self.hands.hanging
        for _ in range(10_000):
            for tier in hanging:
                self.totals.hung_jobs += tier.pending
                tier.close()  # So that the buffers come back.
            worked = sum(tier.work() for tier in lower)
            loft.step()  # Which may begin more: what has come back from one tier goes to the next.
            if not (worked or any(tier.pending for tier in (*lower, *hanging))):
                break
        if loft.pending or loft._requests:
            raise StressError(f"{loft.pending} jobs, {list(loft._requests)} are left")
        audit.check_idle(loft.catalog)
        free, blocks = self.rig.free_blocks()
        if free != blocks:
            raise StressError(f"{blocks - free} of vLLM's blocks are in use by nobody")

    def _count(self) -> None:
        stats, totals = self.loft.stats(), self.totals
        totals.hits, totals.restored_tokens = stats.hits, stats.restored_tokens
        totals.failed_loads = stats.failed_loads
        totals.failed_stores = stats.counters.failed_stores
        totals.evicted_chunks = stats.counters.evicted_chunks
        totals.dropped_stores = stats.counters.dropped_stores
        totals.promoted_chunks = stats.counters.promoted_chunks
        totals.rotten_chunks_found = sum(
            count for (_, cause), count in stats.failures.items() if cause == "checksum"
        )
        totals.load_pauses = stats.load_pauses
        totals.broken_calls = sum(tier.broken_calls for tier in stats.tiers)
        totals.failed_promotions = stats.promotions.failed_chunks
        totals.ignored_hints = stats.ignored_hints
        totals.declined_stores = stats.counters.declined_stores
        totals.canaries, totals.compared_chunks = stats.canaries, stats.compared_chunks
        if stats.canary_differences:
            raise StressError("a canary has differed")
        self.loft.reset()
        audit.check_empty(self.loft.catalog)


def random_hints(rng: random.Random, unit: int) -> dict[str, Any]:
    """What a request may say in its ``kv_transfer_params``, right and wrong."""
    choices: dict[str, Sequence[Any]] = {
        "do_not_store": (True, False, "no"),
        "do_not_load": (True, False),
        "max_load_tokens": (0, unit, 3 * unit + 1, -1),
        "max_offload_tokens": (0, unit, 2 * unit + 1, True),
        "priority": (-2, 2, 9),
        "pin_seconds": (0.001, 3600, float("nan")),
        "somebody_else's": ("business",),
    }
    return {key: rng.choice(choices[key]) for key in rng.sample(list(choices), 2)}


def hash_of(salt: str | None) -> int:
    """What the hashes of a tenant's prefixes begin with."""
    return extend_hash(0, sum(map(ord, salt))) if salt else 0


def options_for(model: RigModel, rng: random.Random) -> tuple[RigOptions, int]:
    """A random engine for a model, and how many lower tiers it has."""
    unit = model.unit
    longest = unit * rng.choice([6, 10, 16])
    states = any(group.kind == "state" for group in model.groups)
    blocks = sum(
        4 if g.kind in ("state", "ring") else -(-longest // g.tokens_per_block) + 2
        for g in model.groups
    )
    keeps_some = any(g.kind in ("window", "state") for g in model.groups)
    sliding = all(g.kind not in ("chunked_local",) for g in model.groups)
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": rng.choice([1 << 18, 1 << 19, 1 << 20, 1 << 22]),
        "blocks_per_chunk": rng.choice([1, 1, 2]),
        "offload_prompt_only": rng.random() < 0.5,
        "eviction_policy": rng.choice(list(POLICIES)),
        "resume_interval": unit * rng.choice([1, 2, 4, 1000]),
        "verify": rng.choice(["tiers", "always"]),
        "canary": rng.choice([0.0, 0.0, 0.2]),
    }
    drafts = rng.choice([0, 0, 3]) if sliding and not states else 0
    options = RigOptions(
        model,
        num_blocks=1 + int(blocks * rng.choice([1, 1.2, 2, 4])),
        max_model_len=longest,
        step_tokens=rng.choice([unit * 2, unit * 4, longest]),
        max_requests=rng.choice([2, 4, 8]),
        priorities=rng.random() < 0.3,
        overlap=rng.random() < 0.3,
        # vLLM's own cache takes what a drafter has left at a request's end for final.
        prefix_caching=states or (rng.random() < 0.7 and not model.has_drafter),
        retention=rng.choice([None, 0, 4 * unit]) if keeps_some else None,
        drafts=3 if model.has_drafter else drafts,
        extra=extra,
    )
    if options.drafts:
        options = replace(options, overlap=False)
    return options, rng.choice([0, 0, 1, 2])


def run_stress(
    model: str,
    seed: int,
    steps: int,
    *,
    faults: Faults = DEFAULT_FAULTS,
    tell: Callable[[int], None] = lambda done: None,
    lives: int = 2,
    change: Callable[[RigOptions], RigOptions] = lambda options: options,
    tiers: int | None = None,
) -> StressTotals:
    """Run ``steps`` steps on engines of random size, one after the other.

    ``lives``: of them follow upon each other on the same lower tiers. ``tell``: told how many
    steps are done. ``change``, ``tiers``: what is not to be random. Raises :class:`StressError` or
    :class:`kvloft.testing.audit.AuditError`; a note says how to run the same again.
    """
    rng = random.Random(seed)
    totals = StressTotals()
    with tempfile.TemporaryDirectory() as folder:
        options, random_tiers = options_for(RIG_MODELS[model], rng)
        tiers = random_tiers if tiers is None else tiers
        options = change(options)
        places = [ManualPlace() for _ in range(tiers)]
        texts: list[tuple[list[int], str | None]] = []
        for life in range(lives):
            done = totals.steps
            share = (steps - done) // (lives - life)
            try:
                stress = Stress(
                    options, rng.randrange(1 << 30), faults=faults, places=places,
                    folder=Path(folder), texts=texts,
                )  # fmt: skip
                for now in stress.run(share):
                    tell(done + now)
                totals.add(stress.finish())
            except Exception as error:
                error.add_note(f"run_stress({model!r}, {seed}, {steps}): {options}")
                raise
            texts = [(list(text), salt) for text, salt in stress.texts]
    return totals
