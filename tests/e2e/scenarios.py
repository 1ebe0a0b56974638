"""What the end-to-end tests run on the real engine, each scenario in a process of its own.

``python scenarios.py NAME CACHE`` prints one JSON object on its last line; the test judges it.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import compare
from kvloft.engines.vllm.models import SHAPES
from kvloft.engines.vllm.trial import (
    CONNECTOR,
    ask,
    close_engine,
    empty_engine_cache,
    make_engine,
    output_of,
    run_pass,
    shape_prompts,
)

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path], Result]] = {}


def scenario(function: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """Register a scenario by its name."""
    SCENARIOS[function.__name__] = function
    return function


def options(**extra: Any) -> dict[str, Any]:
    """The trial's connector with other options."""
    given = {"cpu_bytes_to_use": "512MiB", "blocks_per_chunk": 1, **extra}
    return {
        **CONNECTOR,
        "kv_connector_extra_config": {k: v for k, v in given.items() if v is not None},
    }


def scheduler_of(llm: Any) -> Any:
    """vLLM's scheduler, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def loft_of(llm: Any) -> Any:
    """The loft behind the engine's connector."""
    return scheduler_of(llm).connector.scheduler.loft


def arena_memory(llm: Any) -> Any:
    """The worker's view of the arena's bytes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker._setup.mapping.data


def leftovers(llm: Any) -> Result:
    """What an idle engine should not have."""
    loft = loft_of(llm)
    tree = loft.catalog.tree
    scheduler = scheduler_of(llm)
    return {
        "pending": loft.pending,
        "pins": sum(tree.pins[node] for node in range(1, tree.capacity)),
        "requests": len(loft._requests),
        "unfinished": scheduler.get_num_unfinished_requests(),
        "pending_push": bool(scheduler.connector.has_pending_push_work()),
        "chunks": len(tree),
        "live_bytes": loft.stats().live_bytes,
        "budget_bytes": loft.stats().budget_bytes,
        "slab_bytes": loft.stats().slab_bytes,
    }


def settle(llm: Any) -> None:
    """Let the engine step until it has nothing to do."""
    for _ in range(1000):
        if not scheduler_of(llm).has_requests():
            return
        llm.llm_engine.step()
    raise RuntimeError("the engine does not come to rest")


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids without any structure."""
    return [rng.randrange(4, 2000) for _ in range(tokens)]


@scenario
def lengths(cache: Path) -> Result:
    """Prompts of C-1, C and C+1 tokens and around 3C restore what they should, to the token."""
    rows = []
    llm = make_engine(SHAPES["gemma4"], cache, options(blocks_per_chunk=None, block_size=512))
    rng = random.Random(1)
    for chunk in (512,):
        for tokens in (chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 3 * chunk + 1):
            prompt = random_prompt(rng, tokens)
            cold = run_pass(llm, "cold", [prompt])
            restored = run_pass(llm, "restored", [prompt], empty_first=True)
            verdict = compare(cold.outputs, restored.outputs, SHAPES["gemma4"].tolerance)
            rows.append(
                {
                    "tokens": tokens,
                    "restored": restored.restored_tokens,
                    "expected": (tokens - 1) // chunk * chunk,
                    "agrees": verdict.agrees,
                }
            )
    return {"rows": rows, **leftovers(llm)}


@scenario
def corrupted(cache: Path) -> Result:
    """The comparison notices wrong bytes: what all other tests rest on."""
    return _corrupted(cache, ("gemma4",))


@scenario
def corrupted_all(cache: Path) -> Result:
    """The same for each kind of group."""
    return _corrupted(cache, ("uniform", "gemma4", "qwen3next", "oddwindow"))


def _corrupted(cache: Path, names: tuple[str, ...]) -> Result:
    out = {}
    for name in names:
        shape = SHAPES[name]
        llm = make_engine(shape, cache)
        prompts = shape_prompts(llm)[:4]
        cold = run_pass(llm, "cold", prompts, cold=True)
        memory = arena_memory(llm)
        # Plausible values in wrong places: every page is another one's.
        step = 1 << 16
        pages = memory[: len(memory) // step * step].reshape(-1, step)
        pages[:] = pages[::-1].copy()
        memory[: 64 << 20] = memory[: 64 << 20][::-1]
        restored = run_pass(llm, "restored", prompts, empty_first=True)
        verdict = compare(cold.outputs, restored.outputs, shape.tolerance)
        out[name] = {"agrees": verdict.agrees, "restored": restored.restored_tokens}
        close_engine(llm)
    return out


@scenario
def restored_bytes(cache: Path) -> Result:
    """Windows and full attention."""
    return _restored_bytes(cache, ("gemma4",))


@scenario
def restored_bytes_all(cache: Path) -> Result:
    """States and local chunks as well."""
    return _restored_bytes(cache, ("gemma4", "qwen3next", "llama4"))


def _restored_bytes(cache: Path, names: tuple[str, ...]) -> Result:
    """Every page that is restored holds, byte for byte, what it held when it was stored.

    Read through torch's own indexing, not through the code under test.
    """
    import hashlib

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    out = {}
    for name in names:
        llm = make_engine(SHAPES[name], cache)
        worker = get_kv_transfer_group().worker
        tensors = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        caches = tensors.model_runner.compilation_config.static_forward_context
        stored: dict[tuple[int, int, int], str] = {}
        counts = {"compared": 0, "different": 0}

        def digest(group: int, block: int, *, worker: Any = worker, caches: Any = caches) -> str:
            state = hashlib.sha256()
            for layer in worker._layers[group]:
                cache = caches[layer].kv_cache
                cache = cache[0] if isinstance(cache, (list, tuple)) else cache
                state.update(cache[block].contiguous().view(-1).view(dtype=_byte()).numpy().data)
            return state.hexdigest()

        def pieces(job: Any) -> Any:
            for copy in job.copies:
                for part in copy.parts:
                    count = dict(copy.counts)[part.group]
                    for index, block in enumerate(part.block_ids, part.first):
                        slot, place = divmod(index, count)
                        yield (copy.offsets[slot], part.group, place), part.group, block

        copier = worker._copier
        store, load = copier.store, copier.load

        def watched_store(job: Any, *, store: Any = store, stored: Any = stored) -> None:
            store(job)
            for key, group, block in pieces(job):
                stored[key] = digest(group, block)

        def watched_load(
            job: Any, *, load: Any = load, stored: Any = stored, counts: Any = counts
        ) -> None:
            load(job)
            for key, group, block in pieces(job):
                counts["compared"] += 1
                counts["different"] += stored[key] != digest(group, block)

        worker._copier = _Watched(watched_store, watched_load)
        prompts = shape_prompts(llm)
        run_pass(llm, "cold", prompts, cold=True, new_tokens=2)
        run_pass(llm, "restored", prompts, empty_first=True, new_tokens=2)
        out[name] = counts
        close_engine(llm)
    return out


def _byte() -> Any:
    import torch

    return torch.uint8


class _Watched:
    """A copier whose copies are looked at."""

    def __init__(self, store: Any, load: Any) -> None:
        self.store, self.load = store, load


@scenario
def small_budget(cache: Path) -> Result:
    """Windows."""
    return _small_budget(cache, {"gemma4": "6MiB"})


@scenario
def small_budget_states(cache: Path) -> Result:
    """States."""
    return _small_budget(cache, {"qwen3next": "4MiB"})


def _small_budget(cache: Path, budgets: dict[str, str]) -> Result:
    """Far more conversations than fit: evictions all the time, right answers, within the budget."""
    out = {}
    for name, budget in budgets.items():
        shape = SHAPES[name]
        llm = make_engine(shape, cache, options(cpu_bytes_to_use=budget))
        prompts = shape_prompts(llm)[:7]
        cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=4)
        most = 0
        worst = True
        for _ in range(2):
            again = run_pass(llm, "again", prompts, empty_first=True, new_tokens=4)
            worst = worst and compare(cold.outputs, again.outputs, shape.tolerance).agrees
            most = max(most, loft_of(llm).stats().slab_bytes)
        stats = loft_of(llm).stats()
        out[name] = {
            "agrees": worst,
            "evicted": stats.counters.evicted_chunks,
            "restored": stats.restored_tokens,
            "most_bytes": most,
            **leftovers(llm),
        }
        close_engine(llm)
    return out


@scenario
def preemption(cache: Path) -> Result:
    """Too few engine blocks for the batch: requests are preempted, restored and go on right."""
    from vllm import SamplingParams, TokensPrompt

    shape = SHAPES["gemma4"]
    llm = make_engine(
        shape, cache, options(offload_prompt_only=False),
        num_gpu_blocks_override=49, max_model_len=1024, max_num_batched_tokens=512, max_num_seqs=4,
    )  # fmt: skip
    rng = random.Random(2)
    # All grow into new blocks of every group at the same time, a few tokens on.
    prompts = [random_prompt(rng, n) for n in (750, 748, 746, 744)]
    alone = run_pass(llm, "alone", prompts, cold=True, new_tokens=60)
    llm.reset_prefix_cache(reset_connector=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=5)
    results = llm.generate(
        [TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False
    )
    together = [output_of(result) for result in results]
    settle(llm)
    verdict = compare(alone.outputs, together, shape.tolerance)
    preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return {
        "verdict": verdict.as_json(),
        "preemptions": sum(preemptions),
        "restored": loft_of(llm).stats().restored_tokens,
        **leftovers(llm),
    }


@scenario
def aborts(cache: Path) -> Result:
    """Requests are aborted at every stage, loads in flight included; nothing stays behind."""
    from vllm import SamplingParams, TokensPrompt

    shape = SHAPES["gemma4"]
    llm = make_engine(shape, cache, max_num_batched_tokens=512)
    prompts = shape_prompts(llm)
    cold = run_pass(llm, "cold", prompts, cold=True)
    rng = random.Random(3)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    aborted = 0
    for turn in range(40):
        empty_engine_cache(llm)
        ids = []
        for number in rng.sample(range(len(prompts)), 3):
            request = f"abort-{turn}-{number}"
            llm.llm_engine.add_request(
                request, TokensPrompt(prompt_token_ids=prompts[number]), sampling
            )
            ids.append(request)
        for _ in range(rng.randrange(4)):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(ids)
        aborted += len(ids)
        settle(llm)
    after = leftovers(llm)
    again = run_pass(llm, "again", prompts, empty_first=True)
    verdict = compare(cold.outputs, again.outputs, shape.tolerance)
    return {"aborted": aborted, "agrees": verdict.agrees, "after": after, **leftovers(llm)}


@scenario
def resets(cache: Path) -> Result:
    """The engine's reset keeps the loft; with ``reset_connector`` both are empty."""
    shape = SHAPES["qwen3next"]
    llm = make_engine(shape, cache)
    prompts = shape_prompts(llm)[:4]
    cold = run_pass(llm, "cold", prompts, cold=True)
    kept = llm.reset_prefix_cache()
    held = loft_of(llm).stats().live_bytes
    emptied = llm.reset_prefix_cache(reset_connector=True)
    empty = leftovers(llm)
    first = run_pass(llm, "first", prompts[:1])
    fill = run_pass(llm, "fill", prompts)
    restored = run_pass(llm, "restored", prompts, empty_first=True)
    return {
        "kept": kept,
        "held_bytes": held,
        "emptied": emptied,
        "empty": empty,
        "restored_after_reset": first.restored_tokens,
        "restored": restored.restored_tokens,
        "agrees": compare(cold.outputs, restored.outputs, shape.tolerance).agrees
        and compare(cold.outputs, fill.outputs, shape.tolerance).agrees,
    }


@scenario
def speculation(cache: Path) -> Result:
    """n-gram drafts, most of them rejected: what is restored is right all the same."""
    shape = SHAPES["gemma4"]
    llm = make_engine(
        shape, cache, options(offload_prompt_only=False),
        speculative_config={
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )  # fmt: skip
    rng = random.Random(4)
    words = [rng.randrange(4, 2000) for _ in range(40)]
    prompts = [[rng.choice(words) for _ in range(n)] for n in (700, 1000)]
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=150)
    longer = [p + list(o.tokens) for p, o in zip(prompts, cold.outputs, strict=True)]
    fresh = run_pass(llm, "fresh", longer, cold=True)
    restored = run_pass(llm, "restored", longer, empty_first=True)
    settle(llm)
    return {
        "agrees": compare(fresh.outputs, restored.outputs, shape.tolerance).agrees,
        "restored": restored.restored_tokens,
        "tokens": sum(map(len, longer)),
        **leftovers(llm),
    }


@scenario
def refusals(cache: Path) -> Result:
    """What can't be served ends the start-up with a reason, and leaves no memory behind."""
    cases: dict[str, dict[str, Any]] = {
        "unknown_option": {"block_per_chunk": 2},
        "both_sizes": {"block_size": 512},
        "bad_block_size": {"blocks_per_chunk": None, "block_size": 300},
        "zero_chunk": {"blocks_per_chunk": 0},
        "too_little": {"cpu_bytes_to_use": "256KiB"},
        "too_much": {"cpu_bytes_to_use": "100TiB"},
        "no_size": {"cpu_bytes_to_use": None},
    }
    out = {}
    for name, extra in cases.items():
        try:
            close_engine(make_engine(SHAPES["gemma4"], cache, options(**extra)))
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
        else:
            out[name] = ""
    return {"errors": out, "shared_memory": [p.name for p in Path("/dev/shm").glob("kvloft-*")]}


@scenario
def states_without_caching(cache: Path) -> Result:
    """States can't be stored where the engine keeps none."""
    try:
        make_engine(SHAPES["qwen3next"], cache, enable_prefix_caching=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


@scenario
def mla(cache: Path) -> Result:
    """An engine whose attention can't continue from cached context is refused."""
    from vllm import LLM

    path = cache / "mla-test"
    if not path.exists():
        draft = Path(tempfile.mkdtemp(prefix=".mla-", dir=cache))
        _make_mla(draft)
        draft.rename(path)  # Whole or not at all, whoever is killed meanwhile.
    try:
        LLM(model=str(path), enforce_eager=True, max_model_len=1024, kv_transfer_config=options())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def _make_mla(path: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerFast

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
        n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
        first_k_dense_replace=2, n_shared_experts=1, max_position_embeddings=2048,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    words = {f"w{n}": n for n in range(64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)


def _tensor_parallel(cache: Path, name: str) -> Result:
    shape = SHAPES[name]
    llm = make_engine(shape, cache, tensor_parallel_size=2)
    prompts = shape_prompts(llm)
    cold = run_pass(llm, "cold", prompts, cold=True, new_tokens=4)
    shared = [p.name for p in Path("/dev/shm").glob("kvloft-*")]
    restored = run_pass(llm, "restored", prompts, empty_first=True, new_tokens=4)
    close_engine(llm)
    return {
        "agrees": compare(cold.outputs, restored.outputs, shape.tolerance).agrees,
        "restored": restored.restored_tokens,
        "tokens": sum(map(len, prompts)),
        "names_while_running": shared,
    }


@scenario
def two_ranks(cache: Path) -> Result:
    """Tensor parallelism: two workers in their own processes, one arena, windows."""
    return _tensor_parallel(cache, "gemma4")


@scenario
def two_ranks_states(cache: Path) -> Result:
    """The same with recurrent states, which need prefill steps that end on their blocks."""
    return _tensor_parallel(cache, "qwen3next")


@scenario
def until_killed(cache: Path) -> Result:
    """Serves one request, says so, and waits to be killed."""
    llm = make_engine(SHAPES["uniform"], cache)
    ask(llm, list(range(4, 900)))
    print("serving", flush=True)
    sys.stdin.read()
    return {}


if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))), flush=True)
