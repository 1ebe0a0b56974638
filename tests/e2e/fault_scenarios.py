"""Faults, life cycle and features on the real engine; run and judged like ``scenarios.py``.

``python fault_scenarios.py NAME CACHE DIRECTORY`` prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import compare
from kvloft.engines.vllm.messages import Reports
from kvloft.engines.vllm.models import SHAPES, checkpoint
from kvloft.engines.vllm.trial import (
    CONNECTOR,
    close_engine,
    empty_engine_cache,
    make_engine,
    output_of,
    run_pass,
    shape_prompts,
    with_disk,
)
from kvloft.errors import TransferError
from kvloft.testing import audit
from kvloft.testing.jobs import half as half_of
from tests.e2e.disk_scenarios import Log, flush
from tests.e2e.scenarios import arena_memory, leftovers, loft_of, options, random_prompt, settle

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path, Path], Result]] = {}
NEW_TOKENS = 4


def scenario(function: Callable[[Path, Path], Result]) -> Callable[[Path, Path], Result]:
    """Register a scenario by its name."""
    SCENARIOS[function.__name__] = function
    return function


# --- faults of host memory ------------------------------------------------------------------------


class _Copier:
    """A copier with another way to load or to store."""

    def __init__(self, copier: Any, **changes: Any) -> None:
        self.load = changes.get("load", copier.load)
        self.store = changes.get("store", copier.store)
        self.difference = copier.difference


def _raises(job: Any) -> None:
    raise OSError("a copy that fails on purpose")


Undo = Callable[[], None]


def _with_copier(worker: Any, **changes: Any) -> Undo:
    copier = worker._copier
    worker._copier = _Copier(copier, **changes)

    def undo() -> None:
        worker._copier = copier

    return undo


def _load_fails(llm: Any, worker: Any) -> Undo:
    return _with_copier(worker, load=_raises)


def _load_fails_half_way(llm: Any, worker: Any) -> Undo:
    load = worker._copier.load

    def half(job: Any) -> None:
        load(half_of(job))
        raise OSError("a copy that fails half-way")

    return _with_copier(worker, load=half)


def _load_late(llm: Any, worker: Any) -> Undo:
    load = worker._copier.load

    def late(job: Any) -> None:
        time.sleep(0.2)
        load(job)

    return _with_copier(worker, load=late)


def _slot_corrupt(llm: Any, worker: Any) -> Undo:
    memory, catalog = arena_memory(llm), loft_of(llm).catalog
    for number, chunk in enumerate(audit.held(catalog)):
        memory[chunk.slot + number % chunk.layout.nbytes] ^= 1 << number % 8
    return lambda: None


def _report_late(llm: Any, worker: Any) -> Undo:
    real, held, calls = worker.reports, list[Any](), [0]

    def late() -> Any:
        if (reports := real()) is not None:
            held.extend(reports.done)
        calls[0] += 1
        if calls[0] % 5 or not held:
            return None
        done, held[:] = list(held), []
        return Reports(done)

    worker.reports = late
    return lambda: worker.__dict__.pop("reports", None)


def _report_repeated(llm: Any, worker: Any) -> Undo:
    real, before = worker.reports, list[Any]()

    def repeated() -> Any:
        reports = real()
        again = list(before)
        before[:] = reports.done if reports is not None else []
        return Reports([*again, *before, *before]) if again or before else None

    worker.reports = repeated
    return lambda: worker.__dict__.pop("reports", None)


def _blocks_wrong(llm: Any, worker: Any) -> Undo:
    loft = loft_of(llm)

    def refuse(*arguments: Any) -> Any:
        raise TransferError("other blocks than those that were asked for")

    loft._load_copies = refuse
    return lambda: loft.__dict__.pop("_load_copies", None)


def _store_fails(llm: Any, worker: Any) -> Undo:
    llm.reset_prefix_cache(reset_connector=True)
    return _with_copier(worker, store=_raises)


HOST_FAULTS: dict[str, Callable[[Any, Any], Undo]] = {
    "none": lambda llm, worker: lambda: None,
    "load_fails": _load_fails,
    "load_fails_half_way": _load_fails_half_way,
    "load_late": _load_late,
    "slot_corrupt": _slot_corrupt,
    "report_late": _report_late,
    "report_repeated": _report_repeated,
    "blocks_wrong": _blocks_wrong,
    "store_fails": _store_fails,
}


def _host_faults(cache: Path, name: str) -> Result:
    """One engine, one fault after the other; each time what was lost is stored again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    shape = SHAPES[name]
    llm = make_engine(shape, cache, options(verify="always"))
    worker = get_kv_transfer_group().worker
    prompts = shape_prompts(llm)[:4]
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=NEW_TOKENS)
    out: Result = {}
    for fault, begin in HOST_FAULTS.items():
        before, log = loft_of(llm).stats(), Log()
        undo = begin(llm, worker)
        faulty = run_pass(llm, fault, prompts, empty_first=True, new_tokens=NEW_TOKENS)
        undo()
        settle(llm)
        again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=NEW_TOKENS)
        settle(llm)
        after = loft_of(llm).stats()
        out[fault] = {
            "agrees": compare(cold.outputs, faulty.outputs, shape.tolerance).agrees,
            "agrees_again": compare(cold.outputs, again.outputs, shape.tolerance).agrees,
            "hits": after.hits - before.hits,
            "failed_loads": after.failed_loads - before.failed_loads,
            "failures": {
                "/".join(key): count - before.failures.get(key, 0)
                for key, count in after.failures.items()
                if count > before.failures.get(key, 0)
            },
            "restored_again": again.restored_tokens,
            "log": dict(log.causes),
            **leftovers(llm),
        }
    close_engine(llm)
    return out


for _kind, _shape in (
    ("full", "uniform"), ("windows", "gemma4"), ("states", "qwen3next"), ("local", "llama4"),
):  # fmt: skip
    SCENARIOS[f"host_{_kind}"] = lambda cache, folder, shape=_shape: _host_faults(cache, shape)  # type: ignore[misc]


@scenario
def one_rank_fails(cache: Path, folder: Path) -> Result:
    """Two workers in processes of their own; one of them can't load."""
    shape = SHAPES["gemma4"]
    connector = {
        **CONNECTOR,
        "kv_connector": "OneRankFails",
        "kv_connector_module_path": "tests.e2e.faulty_connector",
    }
    llm = make_engine(shape, cache, connector, tensor_parallel_size=2)
    prompts = shape_prompts(llm)[:4]
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=NEW_TOKENS)
    passes = [
        run_pass(llm, "again", prompts, empty_first=True, new_tokens=NEW_TOKENS) for _ in range(2)
    ]
    failures = {
        m.labels["cause"]: m.value
        for m in llm.get_metrics()
        if m.name == "vllm:kvloft_failures" and m.labels["operation"] == "load"
    }
    close_engine(llm)
    return {
        "agrees": [compare(cold.outputs, p.outputs, shape.tolerance).agrees for p in passes],
        "failures": failures,
    }


# --- canaries -------------------------------------------------------------------------------------


def _canaries(cache: Path, names: tuple[str, ...]) -> Result:
    """Requests that could be restored are computed instead, and compared; at last with bytes that
    belong to other tokens."""
    out: Result = {}
    for name in names:
        shape = SHAPES[name]
        llm = make_engine(shape, cache, options(canary=1.0))
        prompts = shape_prompts(llm)[:6]
        cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=NEW_TOKENS)
        sound = run_pass(llm, "sound", prompts, empty_first=True, new_tokens=NEW_TOKENS)
        first, memory = loft_of(llm).stats(), arena_memory(llm)
        by_class: dict[int, list[int]] = {}
        for chunk in audit.held(loft_of(llm).catalog):
            by_class.setdefault(chunk.layout.nbytes, []).append(chunk.slot)
        for nbytes, slots in by_class.items():
            # Every slot gets what belongs to another prefix.
            bytes_of = [memory[slot : slot + nbytes].copy() for slot in slots]
            for slot, other in zip(slots, bytes_of[1:] + bytes_of[:1], strict=True):
                memory[slot : slot + nbytes] = other
        wrong = run_pass(llm, "wrong", prompts, empty_first=True, new_tokens=NEW_TOKENS)
        loft_of(llm)._canary = 0.0
        off = run_pass(llm, "off", prompts, empty_first=True, new_tokens=NEW_TOKENS)
        settle(llm)
        last = loft_of(llm).stats()
        out[name] = {
            "agrees": all(
                compare(cold.outputs, p.outputs, shape.tolerance).agrees
                for p in (sound, wrong, off)
            ),
            "restored": sound.restored_tokens + wrong.restored_tokens + off.restored_tokens,
            "compared": first.compared_chunks,
            "differences": first.canary_differences,
            "differences_when_wrong": last.canary_differences,
            "loading": last.loading,
            **leftovers(llm),
        }
        close_engine(llm)
    return out


@scenario
def canaries(cache: Path, folder: Path) -> Result:
    """The kinds of groups that differ most."""
    return _canaries(cache, ("gemma4", "qwen3next"))


@scenario
def canaries_all(cache: Path, folder: Path) -> Result:
    """All shapes."""
    return _canaries(cache, tuple(SHAPES))


# --- drafters -------------------------------------------------------------------------------------


def _eagle_head(target: Path, folder: Path) -> Path:
    """A random EAGLE head for a Llama: its drafts are mostly wrong, which is what is wanted."""
    import safetensors.torch
    import torch

    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    head = folder / "eagle"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "fc": (width, 2 * width),
        "layers.0.self_attn.q_proj": (queries, width),
        "layers.0.self_attn.k_proj": (keys, width),
        "layers.0.self_attn.v_proj": (keys, width),
        "layers.0.self_attn.o_proj": (width, queries),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
    }
    weights = {
        f"{name}.weight": (torch.randn(*shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(width).bfloat16()
    safetensors.torch.save_file(weights, head / "model.safetensors", metadata={"format": "pt"})
    return head


@scenario
def drafters(cache: Path, folder: Path) -> Result:
    """An EAGLE head and a draft model, each with KV of its own beside the target's."""
    shape = SHAPES["uniform"]
    target = checkpoint(shape, cache)
    heads = {"eagle": _eagle_head(target, folder), "draft_model": target}
    out: Result = {}
    for method, model in heads.items():
        llm = make_engine(
            shape, cache, options(offload_prompt_only=False),
            speculative_config={
                "method": method, "model": str(model), "num_speculative_tokens": 2,
            },
        )  # fmt: skip
        prompts = shape_prompts(llm)[:5]
        cold = run_pass(llm, "cold", prompts, cold=True)
        longer = [p + list(o.tokens) for p, o in zip(prompts, cold.outputs, strict=True)]
        fresh = run_pass(llm, "fresh", longer, cold=True)
        accepted = _accepted(llm)
        restored = run_pass(llm, "restored", longer, empty_first=True)
        settle(llm)
        out[method] = {
            "agrees": compare(fresh.outputs, restored.outputs, shape.tolerance).agrees,
            "restored": restored.restored_tokens,
            "tokens": sum(map(len, longer)),
            "accepted": accepted,
            "accepted_when_restored": _accepted(llm) - accepted,
            **leftovers(llm),
        }
        close_engine(llm)
    return out


def _accepted(llm: Any) -> int:
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)


# --- scheduling and sampling ----------------------------------------------------------------------


@scenario
def features(cache: Path, folder: Path) -> Result:
    """Priorities and preemption, prefill in small pieces, sparse retention in vLLM's own cache, and
    structured output, all in one engine."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    shape = SHAPES["gemma4"]
    llm = make_engine(
        shape, cache, options(offload_prompt_only=False), scheduling_policy="priority",
        num_gpu_blocks_override=49, max_model_len=1024, max_num_batched_tokens=192, max_num_seqs=4,
        prefix_cache_retention_interval=0,
    )  # fmt: skip
    rng = random.Random(5)
    prompts = [random_prompt(rng, n) for n in (750, 748, 746, 744, 600, 600)]
    alone = run_pass(llm, "alone", prompts, cold=True, new_tokens=30)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=5)
    together = []
    for _ in range(2):
        empty_engine_cache(llm)
        together.append(
            llm.generate(
                [TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False,
                priority=[5, 4, 3, 2, 1, 0],
            )
        )  # fmt: skip
    settle(llm)
    agree = [
        compare(alone.outputs, [output_of(r) for r in results], shape.tolerance).as_json()
        for results in together
    ]
    choice = SamplingParams(
        temperature=0.0, max_tokens=8,
        structured_outputs=StructuredOutputsParams(regex="(the|and) (the|and)"),
    )  # fmt: skip
    answers = []
    for _ in range(2):
        empty_engine_cache(llm)
        (result,) = llm.generate(
            [TokensPrompt(prompt_token_ids=prompts[0])], choice, use_tqdm=False
        )
        answers.append(result.outputs[0].text)
    settle(llm)
    stats = loft_of(llm).stats()
    preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    out = {
        "agree": agree,
        "structured": answers,
        "preemptions": preemptions,
        "restored": stats.restored_tokens,
        **leftovers(llm),
    }
    close_engine(llm)
    return out


# --- life cycle -----------------------------------------------------------------------------------


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kvloft")]


def _slow(worker: Any, seconds: float) -> Undo:
    load = worker._copier.load

    def late(job: Any) -> None:
        time.sleep(seconds)
        load(job)

    return _with_copier(worker, load=late)


@scenario
def life_cycle(cache: Path, folder: Path) -> Result:
    """New weights in a running engine, resets and sleep in the middle of loads, and an end under
    load."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    shape = SHAPES["uniform"]
    llm = make_engine(shape, cache, with_disk(folder / "disk", wait=60.0))
    worker = get_kv_transfer_group().worker
    prompts = shape_prompts(llm)[:4]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def ask_all(prefix: str) -> list[str]:
        names = [f"{prefix}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        return names

    out: Result = {}
    old = run_pass(llm, "old", prompts, cold=True, new_tokens=NEW_TOKENS)
    flush(llm)

    # A reset while loads are under way: vLLM says that it could not do all of it.
    empty_engine_cache(llm)
    undo = _slow(worker, 0.3)
    ask_all("reset")
    for _ in range(3):
        llm.llm_engine.step()
    out["loads_at_reset"] = loft_of(llm).stats().pending_loads
    out["reset_under_load"] = llm.reset_prefix_cache(reset_connector=True)
    undo()
    settle(llm)
    out["after_reset"] = leftovers(llm)
    out["reset"] = llm.reset_prefix_cache(reset_connector=True)

    # Other weights: nothing of before may be found, in host memory or on disk.
    llm.apply_model(_scale)
    llm.reset_prefix_cache(reset_connector=True)
    first = run_pass(llm, "first", prompts[:1], new_tokens=NEW_TOKENS)
    new = run_pass(llm, "new", prompts, cold=True, new_tokens=NEW_TOKENS)
    again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=NEW_TOKENS)
    out["new_weights"] = {
        "restored_at_first": first.restored_tokens,
        "matter": not compare(old.outputs, new.outputs, shape.tolerance).agrees,
        "agrees": compare(new.outputs, again.outputs, shape.tolerance).agrees,
        "restored": again.restored_tokens,
    }

    # The old ones again, by vLLM's own call.
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache(reset_connector=True)
    first = run_pass(llm, "first", prompts[:1], new_tokens=NEW_TOKENS)
    filled = run_pass(llm, "filled", prompts, empty_first=True, new_tokens=NEW_TOKENS)
    again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=NEW_TOKENS)
    out["reloaded_weights"] = {
        "restored_at_first": first.restored_tokens,
        "agrees": compare(old.outputs, filled.outputs, shape.tolerance).agrees
        and compare(old.outputs, again.outputs, shape.tolerance).agrees,
        "restored": again.restored_tokens,
    }

    llm.sleep(level=1)
    llm.wake_up()
    again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=NEW_TOKENS)
    out["after_sleep"] = {
        "agrees": compare(old.outputs, again.outputs, shape.tolerance).agrees,
        "restored": again.restored_tokens,
        **leftovers(llm),
    }

    # The end, in the middle of loads and writes.
    empty_engine_cache(llm)
    _slow(worker, 0.3)
    ask_all("end")
    for _ in range(3):
        llm.llm_engine.step()
    out["loads_at_end"] = loft_of(llm).stats().pending_loads
    started = time.monotonic()
    close_engine(llm)
    out["seconds_to_end"] = time.monotonic() - started
    out["threads"] = _threads()
    return out


def _scale(model: Any) -> None:
    """Change what the model computes, keys and values included."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(1.3)


if __name__ == "__main__":
    name, cache, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(SCENARIOS[name](cache, folder)), flush=True)
