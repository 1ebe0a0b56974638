"""Random engines under vLLM's own scheduler; and proof that wrong bytes would be seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvloft.catalog.catalog import Catalog, Chunks
from kvloft.engines.vllm import setup
from kvloft.engines.vllm.messages import Orders
from kvloft.engines.vllm.rig import RIG_MODELS, RigOptions
from kvloft.engines.vllm.worker import WorkerHalf
from kvloft.jobs import Copy, Job, Part
from kvloft.loft import Loft
from kvloft.seals import Seals
from kvloft.testing import stress
from kvloft.testing.audit import AuditError
from kvloft.testing.stress import (
    DEFAULT_FAULTS,
    MODELS,
    NO_FAULTS,
    Faults,
    Stress,
    StressError,
    StressTotals,
    run_stress,
)

pytestmark = pytest.mark.timeout(300)

STEPS = 700
OFF = dataclasses.asdict(NO_FAULTS)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong on purpose need not be told."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("model", MODELS)
def test_no_byte_is_wrong_and_nothing_is_left_over(model: str) -> None:
    totals = run_stress(model, 11, STEPS)
    totals.add(run_stress(model, 12, STEPS))
    assert totals.steps >= 2 * STEPS
    for name in (
        "hits", "restored_tokens", "checked_contexts", "checked_bytes", "aborted", "ended",
        "failed_stores", "late_reports", "repeated_reports",
    ):  # fmt: skip
        assert getattr(totals, name) > 0, name


RARE = ("load_pauses", "dropped_stores", "hung_jobs", "broken_calls")


# --- one fault at a time --------------------------------------------------------------------------

# Each name is a row of the table in docs/resilience.md, each model one of its columns. The second
# entry is the counter that shows that the fault has happened.
ONE_FAULT: dict[str, tuple[Faults, str]] = {
    "store_fails": (Faults(**{**OFF, "store_error": 0.3}), "failed_stores"),
    "load_fails": (Faults(**{**OFF, "load_error": 0.4}), "failed_loads"),
    "load_late": (Faults(**{**OFF, "late_load": 0.9}), "hits"),
    "report_late": (Faults(**{**OFF, "late_report": 0.7}), "late_reports"),
    "report_repeated": (Faults(**{**OFF, "repeated_report": 0.7}), "repeated_reports"),
    "slot_corrupt": (Faults(**{**OFF, "rot": 0.5}), "rotten_chunks_found"),
    "no_room": (NO_FAULTS, "evicted_chunks"),
    "tier_fails": (Faults(**{**OFF, "tier": 0.4}), "failed_promotions"),
    "tier_hangs": (Faults(**{**OFF, "tier_hangs": 0.2}), "hung_jobs"),
    "tier_raises": (Faults(**{**OFF, "tier_breaks": 0.2}), "broken_calls"),
}
TIER_FAULTS = ("tier_fails", "tier_hangs", "tier_raises")


def faced_with(fault: str, overlap: bool, options: RigOptions) -> RigOptions:
    """Engines that meet the fault: whatever can be restored comes from KVLoft."""
    tight = fault == "no_room"
    states = any(group.kind == "state" for group in options.model.groups)
    unit = options.model.unit
    extra = {
        "cpu_bytes_to_use": 160 << 10 if tight else 1 << 20,
        "blocks_per_chunk": 1,
        "offload_prompt_only": False,
        "resume_interval": unit,
        "verify": "always" if fault == "slot_corrupt" else "tiers",
    }
    # vLLM's own cache must be on for states; a small pool keeps it from having all answers.
    blocks = 8 * unit // options.model.groups[-1].tokens_per_block * 2 + 12 if states else 200
    return dataclasses.replace(
        options, max_model_len=8 * unit, step_tokens=4 * unit, num_blocks=blocks, max_requests=4,
        prefix_caching=states, retention=None, extra=extra,
        overlap=overlap and not options.model.has_drafter,
        drafts=options.drafts if options.model.has_drafter else 0,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapping"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fault", ONE_FAULT)
def test_each_fault_ends_in_computing(fault: str, model: str, overlap: bool) -> None:
    faults, counter = ONE_FAULT[fault]
    totals = StressTotals()
    for seed in range(1, 9):
        change = partial(faced_with, fault, overlap)
        tiers = 1 if fault in TIER_FAULTS else 0
        lives = 2 if tiers else 1
        totals.add(
            run_stress(model, seed, 200, faults=faults, change=change, tiers=tiers, lives=lives)
        )
        if getattr(totals, counter) and totals.checked_contexts and totals.restored_tokens:
            break
    assert getattr(totals, counter) > 0
    assert totals.restored_tokens > 0
    assert totals.ended == totals.requests


def test_runs_reach_what_they_are_for() -> None:
    """Random runs prove nothing unless they get as far as everything that may happen."""
    totals = StressTotals()
    for seed in range(20, 24):
        totals.add(run_stress("windows", seed, STEPS))
    totals.add(
        run_stress(
            "mla", 20, STEPS, change=lambda o: dataclasses.replace(o, drafts=3, overlap=False)
        )
    )
    untouched = [
        field.name
        for field in dataclasses.fields(totals)
        if not getattr(totals, field.name) and field.name not in RARE
    ]
    assert not untouched


def test_the_same_seed_does_the_same() -> None:
    first, second = (dataclasses.asdict(run_stress("windows", 5, 300)) for _ in range(2))
    for clock in ("seconds", "connector_seconds", "scheduler_seconds", "slowest_call"):
        del first[clock], second[clock]
    del first["canaries"], first["compared_chunks"], second["canaries"], second["compared_chunks"]
    assert first == second


# --- broken on purpose ----------------------------------------------------------------------------


Break = Callable[[pytest.MonkeyPatch], None]


def late_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store reads its pages one step too late."""
    real = WorkerHalf.save
    before: dict[int, Orders] = {}

    def save(self: WorkerHalf, orders: Orders) -> None:
        late = before.pop(id(self), None)
        before[id(self)] = Orders(stores=orders.stores, idle=orders.idle)
        if late is not None:
            real(self, late)

    monkeypatch.setattr(WorkerHalf, "save", save)


def early_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store reads its pages before the step's forward pass."""
    real = stress.StressHands.forward

    def forward(self: Any, step: Any) -> Any:
        for connector in self.connectors:
            connector.worker.save(step.kv_connector_metadata)
        out = real(self, step)
        step.kv_connector_metadata.stores = []
        return out

    monkeypatch.setattr(stress.StressHands, "forward", forward)


def early_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is reported before it is done."""
    real = WorkerHalf.results

    def results(self: WorkerHalf) -> tuple[set[str], set[str]]:
        finished, failed = real(self)
        early = {request for request, _ in self._loading.values()}
        self._loading.clear()
        return finished | early, failed

    monkeypatch.setattr(WorkerHalf, "results", results)


def swapped_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are loaded in the wrong order."""
    real = Loft.begin_load

    def begin_load(self: Loft, *arguments: Any) -> Job:
        job = real(self, *arguments)
        copies = [
            Copy(c.offsets, c.counts, [Part(p.group, p.first, p.block_ids[::-1]) for p in c.parts])
            for c in job.copies
        ]
        return Job(job.id, copies)

    monkeypatch.setattr(Loft, "begin_load", begin_load)


def ignored_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has failed on a rank is published."""
    real = Loft.report

    def report(self: Loft, job: int, rank: int, ok: bool, *more: Any) -> None:
        real(self, job, rank, True)

    monkeypatch.setattr(Loft, "report", report)


def no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read may be evicted."""
    monkeypatch.setattr(Catalog, "pin", lambda self, node: None)
    monkeypatch.setattr(Catalog, "unpin", lambda self, node: None)


def no_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that have changed are taken for sound."""
    monkeypatch.setattr(Seals, "intact", lambda self, slot, layout, rank: True)


def stale_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a window are stored in the wrong order."""
    real = Loft._blocks_of

    def blocks_of(self: Loft, chunks: Chunks, *more: Any) -> Any:
        parts = real(self, chunks, *more)
        if parts is None or chunks.kind != "window":
            return parts
        return [Part(part.group, part.first, part.block_ids[::-1]) for part in parts]

    monkeypatch.setattr(Loft, "_blocks_of", blocks_of)


def final_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drafter has left at the end is taken for final."""
    monkeypatch.setattr(setup, "volatile_tokens", lambda vllm_config: 0)


CALM = dataclasses.replace(NO_FAULTS, late_load=0.6)
LATE = dataclasses.replace(NO_FAULTS, late_load=0.9)
ROT = dataclasses.replace(NO_FAULTS, rot=0.3)

BREAKS: list[tuple[Break, str, Faults]] = [
    (late_stores, "windows", CALM),
    (early_stores, "uniform", CALM),
    (early_reports, "uniform", CALM),
    (swapped_blocks, "long_windows", CALM),
    (ignored_failures, "mla", DEFAULT_FAULTS),
    (no_pins, "uniform", LATE),
    (no_seals, "uniform", ROT),
    (stale_windows, "only_windows", CALM),
    (final_tails, "drafter", CALM),
]


def crowded(options: RigOptions) -> RigOptions:
    """Little host memory and many requests: slots change hands all the time."""
    extra = {**options.extra, "cpu_bytes_to_use": 160 << 10, "verify": "always", "canary": 0.0}
    return dataclasses.replace(options, num_blocks=200, max_requests=8, extra=extra)


@pytest.mark.parametrize(
    ("breaks", "model", "faults"), BREAKS, ids=[case[0].__name__ for case in BREAKS]
)
def test_a_broken_rule_is_noticed(
    breaks: Break, model: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)

    def run() -> None:
        for seed in range(100, 112):
            run_stress(model, seed, STEPS, faults=faults, change=change)

    change = crowded if breaks is no_pins else dataclasses.replace
    with pytest.raises((StressError, AuditError)):
        run()


def test_the_crowd_is_served_right_with_all_rules_in_force() -> None:
    """What is noticed above are the breaks, not the crowd."""
    assert run_stress("uniform", 101, 2 * STEPS, faults=LATE, change=crowded).restored_tokens > 0


# --- defects --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["match", "begin_load", "begin_store", "step", "report", "release", "forget", "stats"]
)
def test_a_defect_never_ends_or_garbles_the_engine(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From some call on the loft is broken; requests end as if there were none."""
    extra = {"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1}
    options = RigOptions(RIG_MODELS["windows"], prefix_caching=False, extra=extra)
    run = Stress(options, 3, faults=CALM, folder=tmp_path)
    for _ in range(40):
        run.submit()
    for _ in range(60):
        run.rig.step()
    assert run.loft.stats().hits > 0

    def broken(*arguments: Any, **more: Any) -> Any:
        raise KeyError("a defect")

    monkeypatch.setattr(run.loft, method, broken)
    for _ in range(20):
        run.submit()
    connector = run.rig.connector
    for _ in range(3000):
        if run.rig.idle and connector.scheduler.defect is not None:
            break
        if run.rig.idle:
            run.submit()
        run.rig.step()
    assert isinstance(connector.scheduler.defect, KeyError)
    assert not run.rig.unfinished
    assert run.rig.reset(running=False, connector=True)
    free, blocks = run.rig.free_blocks()
    assert free == blocks
    monkeypatch.setattr(run.loft, "close", broken)
    run.rig.close()
    assert not list(Path("/dev/shm").glob(connector.scheduler._mapping._path.name))
