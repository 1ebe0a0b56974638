"""Traces, sizes and policies against each other, and beside what is possible at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvloft.errors import ConfigError
from kvloft.plan import ChunkPlan
from kvloft.replay.bounds import resume_bound
from kvloft.replay.driver import Run, Setting, replay
from kvloft.replay.trace import Trace, boundary_ids, fitted

Tell = Callable[[int, int], None]
Result = dict[str, Any]

PEER_POLICIES = ("lru", "arc")


@dataclass(frozen=True, slots=True)
class Study:
    """What to replay."""

    setting: Setting
    """Of all runs, but for policy and budget."""
    policies: Sequence[str]
    budgets: Sequence[int]
    peers: bool = True
    """vLLM's own offloading at the same budgets."""
    bounds: bool = True
    measured_share: float = 0.5
    """Which part of a trace counts: the last one."""


def study(
    trace: Trace, plans: Study, begin: Callable[[str], Tell] = lambda what: lambda done, total: None
) -> Result:
    """Replay one trace in every way that is asked for.

    ``begin``: told what is about to be run; what it returns is told how far it has come.
    """
    plan = plans.setting.plan
    trace = fitted(trace, plan.geometry.unit_tokens)
    first = round(len(trace.requests) * (1 - plans.measured_share))
    result: Result = {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.prompt_tokens,
            "answer_tokens": sum(r.answer_tokens for r in trace.requests),
            "tokens_per_block": trace.tokens_per_block,
            "seconds": trace.requests[-1].time if trace.requests else 0.0,
        },
        "geometry": plan.geometry.name,
        "tokens_per_chunk": plan.tokens_per_chunk,
        "engine_blocks": plans.setting.engine_blocks,
        "measured_from": first,
        "everything": everything(trace, plan, first),
        "bounds": [],
        "runs": [],
    }
    for budget in plans.budgets:
        for policy in plans.policies:
            tell = begin(f"{policy}, {budget / 2**30:.4g} GiB")
            setting = replace(plans.setting, policy=policy, budget_bytes=budget)
            result["runs"].append(describe(replay(trace, setting, measured_from=first, tell=tell)))
        if plans.peers:
            result["runs"].extend(_peers(trace, plan, budget, first, begin))
        if plans.bounds:
            tell = begin(f"bound, {budget / 2**30:.4g} GiB")
            result["bounds"].append(bound(trace, plan, budget, first))
    return result


def describe(run: Run) -> Result:
    """A run in plain values."""
    counts, loft, setting = run.counts, run.loft, run.setting
    catalog = loft.catalog.counters
    calls = np.frombuffer(run.calls) * 1e3 if run.calls else np.zeros(1)
    prompts = max(1, counts.prompt_tokens)
    return {
        "policy": setting.policy,
        "system": "kvloft",
        "budget_bytes": setting.budget_bytes,
        "disk_bytes": setting.disk_bytes,
        "token_hit_rate": (counts.engine_tokens + counts.restored_tokens) / prompts,
        "engine_hit_rate": counts.engine_tokens / prompts,
        "tokens_restored": counts.restored_tokens,
        "hit_requests": counts.hit_requests,
        "bytes_held": loft.catalog.live_bytes,
        "most_slot_bytes": run.most_bytes,
        "least_fit": run.fit,
        "bytes_stored": catalog.stored_bytes,
        "bytes_restored": run.restored_bytes,
        "resume_points_kept": loft.catalog.resume_points,
        "resume_points_used": counts.hit_requests if setting.plan.has_resume_points else 0,
        "resume_points_stored": catalog.stored_resume_points,
        "evicted_chunks": catalog.evicted_chunks,
        "evicted_resume_points": catalog.evicted_resume_points,
        "dropped_stores": catalog.dropped_stores,
        "declined_stores": catalog.declined_stores,
        "prefill_seconds_saved": counts.saved_seconds,
        "calls": len(run.calls),
        "call_p50_ms": round(float(np.quantile(calls, 0.5)), 4),
        "call_p99_ms": round(float(np.quantile(calls, 0.99)), 4),
        "call_p999_ms": round(float(np.quantile(calls, 0.999)), 3),
        "call_max_ms": round(float(calls.max()), 3),
        "seconds": round(run.seconds, 2),
        "timeline": [
            {
                "request": point.request,
                "time": point.time,
                **{f"{name}_bytes": held[1] for name, held in point.held.items()},
                "token_hit_rate": point.token_hit_rate,
            }
            for point in run.points
        ],
    }


def _peers(
    trace: Trace, plan: ChunkPlan, budget: int, first: int, begin: Callable[[str], Tell]
) -> Iterator[Result]:
    from kvloft.engines.vllm.replay_peer import replay_vllm

    for policy in PEER_POLICIES:
        tell = begin(f"vLLM's {policy}, {budget / 2**30:.4g} GiB")
        found = replay_vllm(
            trace, plan.geometry, budget, policy, tokens_per_chunk=plan.tokens_per_chunk,
            measured_from=first, tell=tell,
        )  # fmt: skip
        yield {"policy": policy, "system": "vllm", "budget_bytes": budget, "disk_bytes": 0, **found}


def check_peers() -> None:
    """Raise :class:`ConfigError` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("comparing with vLLM's own offloading needs vLLM; write --no-peers")


def everything(trace: Trace, plan: ChunkPlan, first: int) -> float:
    """The token hit rate if all were kept for ever, and one could resume at every boundary."""
    size, known = plan.tokens_per_chunk, set[int]()
    asked = found = 0
    for index, request in enumerate(trace.requests):
        ids = boundary_ids(request, trace.tokens_per_block, size)
        limit = max(0, (request.prompt_tokens - 1) // size)
        depth = 0
        while depth < min(limit, len(ids)) and ids[depth] in known:
            depth += 1
        known.update(ids)
        if index >= first:
            asked += request.prompt_tokens
            found += depth * size
    return found / max(1, asked)


def bound(trace: Trace, plan: ChunkPlan, budget: int, first: int) -> Result:
    """What no policy can exceed; what can be reached at best, where no resume points are needed."""
    return {
        "budget_bytes": budget,
        "token_hit_rate": resume_bound(trace, plan, budget, measured_from=first),
        "kind": "upper bound" if plan.has_resume_points else "optimum",
    }
