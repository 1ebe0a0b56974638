"""What hints do on the real engine; run as ``scenarios.py`` is."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import compare
from kvloft.engines.vllm.models import SHAPES
from kvloft.engines.vllm.trial import empty_engine_cache, make_engine, output_of, run_pass
from tests.e2e.scenarios import leftovers, loft_of, options, random_prompt, settle

CHUNK = 256
"""Tokens per chunk of the shape with one block in a chunk; the scenario checks it."""
TOKENS = 4 * CHUNK + 5


def hints(cache: Path) -> dict[str, Any]:
    """Every hint is heeded, and wrong ones neither change an answer nor turn anything off."""
    shape = SHAPES["gemma4"]
    llm = make_engine(shape, cache, options(cpu_bytes_to_use="16MiB", eviction_policy="lru"))
    loft = loft_of(llm)
    rng = random.Random(11)
    out: dict[str, Any] = {"tokens_per_chunk": loft.plan.tokens_per_chunk}

    def ask(prompt: list[int], given: Any = None) -> dict[str, Any]:
        """Of one request: tokens restored, chunks stored, its answer."""
        from vllm import SamplingParams, TokensPrompt

        empty_engine_cache(llm)
        before = loft.stats()
        extra = None if given is None else {"kv_transfer_params": given}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5, extra_args=extra
        )
        (result,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        settle(llm)
        after = loft.stats()
        return {
            "restored": after.restored_tokens - before.restored_tokens,
            "stored": after.counters.stored_chunks - before.counters.stored_chunks,
            "ignored": after.ignored_hints - before.ignored_hints,
            "output": output_of(result),
        }

    def agrees(prompt: list[int], answer: dict[str, Any]) -> bool:
        cold = run_pass(llm, "cold", [prompt], cold=True, new_tokens=4)
        return compare(cold.outputs, [answer["output"]], shape.tolerance).agrees

    def counts(answer: dict[str, Any]) -> dict[str, int]:
        return {key: answer[key] for key in ("restored", "stored", "ignored")}

    prompt = random_prompt(rng, TOKENS)
    out["do_not_store"] = counts(ask(prompt, {"do_not_store": True}))
    out["stored"] = counts(ask(prompt))
    out["do_not_load"] = counts(ask(prompt, {"do_not_load": True}))
    out["restored"] = counts(ask(prompt))
    out["max_load_tokens_0"] = counts(ask(prompt, {"max_load_tokens": CHUNK - 1}))
    part = random_prompt(rng, TOKENS)
    out["max_offload_tokens"] = counts(ask(part, {"max_offload_tokens": 2 * CHUNK}))
    out["after_max_offload_tokens"] = counts(ask(part, {"do_not_store": True}))
    out["max_load_tokens"] = counts(ask(part, {"max_load_tokens": 9 * CHUNK, "do_not_store": True}))

    wrong = {
        "do_not_store": "yes", "do_not_load": 1, "max_load_tokens": -1, "max_offload_tokens": 1.5,
        "priority": 2**63, "pin_seconds": 2**63,
    }  # fmt: skip
    out["wrong"] = counts(wrong_one := ask(prompt, wrong))
    out["somebody_elses"] = counts(ask(prompt, {"remote_block_ids": [1, 2], "priority": None}))
    out["loading"] = loft.loading

    pinned, loose = random_prompt(rng, TOKENS), random_prompt(rng, TOKENS)
    ask(pinned, {"pin_seconds": 600})
    ask(loose)
    out["held"] = loft.stats().pins
    for _ in range(100):
        ask(random_prompt(rng, TOKENS))
        if loft.stats().counters.evicted_chunks > 3 * out["stored"]["stored"]:
            break
    out["pinned"] = counts(pinned_one := ask(pinned, {"do_not_store": True}))
    out["loose"] = counts(ask(loose, {"do_not_store": True}))
    out["agree"] = [agrees(prompt, wrong_one), agrees(pinned, pinned_one)]
    llm.reset_prefix_cache(reset_connector=True)
    return {**out, **leftovers(llm)}


if __name__ == "__main__":
    print(json.dumps({"hints": hints}[sys.argv[1]](Path(sys.argv[2]))))
