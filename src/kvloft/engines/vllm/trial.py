"""Run one model shape on the real engine, cold and with its cache restored; compare the answers.

A trial sends the same conversations to the engine three times:

``cold``
    Every request reads its whole prompt. ``skip_reading_prefix_cache`` makes sure of it although
    the conversations share prefixes; what is computed is cached and stored all the same.
``engine``
    The engine's own prefix cache is warm: the best that any offloading can hope for, and the
    yardstick for what rounding alone does to outputs.
``restored``
    The engine's cache is emptied before each request while the connector keeps its store, so
    whatever isn't read again has been restored from KVLoft.

Without a connector a ``shared`` pass takes the place of the last: the engine's cache is emptied
once, so that requests resume where earlier ones of the same pass left off. Other resume points mean
other rounding, and both passes together are the measurement behind ``Shape.tolerance``.

A trial of a *restart* takes two processes, one after the other, and a directory for the disk tier:
the first one reads every prompt and leaves its answers in a file, the second one, whose host memory
is empty, asks the same and compares (:func:`run_life`).

Requests are sent one by one, so that a time to first token is the request's own, without a queue.

``python -m kvloft.engines.vllm.trial --shape NAME --cache DIR --json FILE`` runs one trial in this
process and writes the result; the process needs the environment of :func:`environment`, which vLLM
reads when it is imported. ``kvloft demo`` spawns it, and the end-to-end tests use the functions one
by one.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import Comparison, Output, compare
from kvloft.engines.vllm.models import MAX_MODEL_LEN, SHAPES, Shape, checkpoint, texts
from kvloft.engines.vllm.prompts import conversations

CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "KVLoftConnector",
    "kv_connector_module_path": "kvloft.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "512MiB", "blocks_per_chunk": 1},
}
"""``kv_transfer_config`` of a trial."""

PROGRESS = "trial: "
"""What lines of progress begin with, among the engine's own output."""

NEW_TOKENS = 16
CANDIDATES = 5

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOADED_BYTES = "vllm:kvloft_load_bytes"
STORED_BYTES = "vllm:kvloft_store_bytes"

Report = Callable[[str], None]


def environment(kv_cache_gib: int = 1) -> dict[str, str]:
    """Environment of a process that runs trials, to be laid over its parent's.

    Scheduler and worker stay in one process, nothing is looked up online, the log holds warnings.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the process started; None where nothing exports the counter."""

    restored_tokens: int
    loaded_bytes: int | None
    stored_bytes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's output and what it took."""

    output: Output
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that weren't read, from whichever cache."""
    first_token_s: float
    """Seconds from arrival to the first token."""


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests, sent once."""

    name: str
    answers: tuple[Answer, ...]
    restored_tokens: int
    """Prompt tokens that came from the connector, by the engine's own count."""
    loaded_bytes: int | None
    stored_bytes: int | None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the requests produced, for :func:`kvloft.engines.vllm.compare.compare`."""
        return tuple(a.output for a in self.answers)

    def as_json(self, comparison: Comparison | None) -> dict[str, Any]:
        """The numbers as plain values, with the comparison against the cold pass if any."""
        return {
            "prompt_tokens": sum(a.prompt_tokens for a in self.answers),
            "cached_tokens": sum(a.cached_tokens for a in self.answers),
            "restored_tokens": self.restored_tokens,
            "loaded_bytes": self.loaded_bytes,
            "stored_bytes": self.stored_bytes,
            "first_token_s": [round(a.first_token_s, 6) for a in self.answers],
            "comparison": None if comparison is None else comparison.as_json(),
        }


def make_engine(
    shape: Shape,
    cache: Path,
    kv_transfer_config: Mapping[str, Any] | None = CONNECTOR,
    **overrides: Any,
) -> Any:
    """Start ``vllm.LLM`` on the shape's checkpoint.

    Args:
        shape: What to run.
        cache: Directory that holds checkpoints.
        kv_transfer_config: The connector, or None to run without one.
        overrides: Arguments for ``vllm.LLM`` that replace the trial's.
    """
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(checkpoint(shape, cache)),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_model_len": MAX_MODEL_LEN,
        # Less than the longest prompts, which are thus read in several steps, as in service.
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "seed": 0,
        # Counters and times per request come with the statistics.
        "disable_log_stats": False,
        **shape.engine,
        **overrides,
    }
    if kv_transfer_config is not None:
        arguments["kv_transfer_config"] = dict(kv_transfer_config)
    return LLM(**arguments)


def close_engine(llm: Any) -> None:
    """Shut the engine down, so that this process can start another."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def shape_prompts(llm: Any) -> list[list[int]]:
    """The conversations of :mod:`kvloft.engines.vllm.prompts`, in the model's tokens."""
    tokenizer = llm.get_tokenizer()
    return conversations(lambda text: tokenizer.encode(text, add_special_tokens=False), texts())


def run_pass(
    llm: Any,
    name: str,
    prompts: Sequence[Sequence[int]],
    *,
    cold: bool = False,
    empty_first: bool = False,
    new_tokens: int = NEW_TOKENS,
) -> Pass:
    """Send the prompts one by one and gather outputs, times and counters.

    Args:
        llm: An engine from :func:`make_engine`.
        name: What to call this pass.
        prompts: Token ids.
        cold: Read every prompt in full, whatever is cached.
        empty_first: Empty the engine's own cache before each request; the connector's store stays.
        new_tokens: How many tokens to generate for each.
    """
    before = read_counters(llm)
    answers = []
    for prompt in prompts:
        if empty_first:
            empty_engine_cache(llm)
        answers.append(ask(llm, prompt, cold=cold, new_tokens=new_tokens))
    after = read_counters(llm)
    return Pass(
        name=name,
        answers=tuple(answers),
        restored_tokens=after.restored_tokens - before.restored_tokens,
        loaded_bytes=_increase(before.loaded_bytes, after.loaded_bytes),
        stored_bytes=_increase(before.stored_bytes, after.stored_bytes),
    )


def ask(
    llm: Any, prompt: Sequence[int], *, cold: bool = False, new_tokens: int = NEW_TOKENS
) -> Answer:
    """Send one prompt and wait for its answer."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=CANDIDATES,
        skip_reading_prefix_cache=cold,
    )
    (result,) = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt))], sampling, use_tqdm=False
    )
    return Answer(
        output=output_of(result),
        prompt_tokens=len(prompt),
        cached_tokens=result.num_cached_tokens or 0,
        first_token_s=result.metrics.first_token_latency,
    )


def output_of(result: Any) -> Output:
    """What one of vLLM's results has produced."""
    completion = result.outputs[0]
    return Output(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(
            {token: entry.logprob for token, entry in step.items()} for step in completion.logprobs
        ),
    )


def empty_engine_cache(llm: Any, patience_s: float = 10.0) -> None:
    """Empty the engine's own prefix cache.

    The engine refuses while blocks are in use, and a store that is still being written uses them;
    it is given a moment to finish.

    Raises:
        RuntimeError: Blocks were still in use after ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine's cache was still in use after {patience_s:g} s")
        llm.llm_engine.step()
        time.sleep(0.01)


def read_counters(llm: Any) -> Counters:
    """Read the counters that the engine and the connector export."""
    totals: dict[str, int] = {}
    for metric in llm.get_metrics():
        if metric.name in (EXTERNAL_HITS, LOADED_BYTES, STORED_BYTES):
            totals[metric.name] = totals.get(metric.name, 0) + int(metric.value)
    return Counters(
        restored_tokens=totals.get(EXTERNAL_HITS, 0),
        loaded_bytes=totals.get(LOADED_BYTES),
        stored_bytes=totals.get(STORED_BYTES),
    )


def _increase(before: int | None, after: int | None) -> int | None:
    return None if after is None else after - (before or 0)


def run_trial(
    shape: Shape,
    cache: Path,
    kv_transfer_config: Mapping[str, Any] | None = CONNECTOR,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Run all passes on one shape and return the result as plain values.

    Args:
        shape: What to run.
        cache: Directory that holds checkpoints.
        kv_transfer_config: The connector; None measures the engine alone.
        report: Told what is being done, one line at a time.
    """
    report("starting the engine")
    started = time.monotonic()
    llm = make_engine(shape, cache, kv_transfer_config)
    start_s = time.monotonic() - started
    prompts = shape_prompts(llm)
    # First use of memory and kernels is not what is being measured. The prompt shares no prefix.
    ask(llm, list(reversed(prompts[-1])), cold=True)

    count = f"{len(prompts)} requests"
    report(f"{count}, reading every prompt")
    passes = [run_pass(llm, "cold", prompts, cold=True)]
    report(f"{count}, from the engine's own cache")
    passes.append(run_pass(llm, "engine", prompts))
    if kv_transfer_config is not None:
        report(f"{count}, restored from KVLoft")
        passes.append(run_pass(llm, "restored", prompts, empty_first=True))
    else:
        report(f"{count}, from what the same pass has cached")
        empty_engine_cache(llm)
        passes.append(run_pass(llm, "shared", prompts))
    close_engine(llm)

    cold = passes[0].outputs
    return {
        "shape": shape.name,
        "description": shape.description,
        "connector": kv_transfer_config is not None,
        "engine_start_s": round(start_s, 3),
        "requests": len(prompts),
        "passes": {
            p.name: p.as_json(
                None if p.name == "cold" else compare(cold, p.outputs, shape.tolerance)
            )
            for p in passes
        },
    }


def with_disk(path: Path, max_bytes: str = "1GiB", **more: Any) -> dict[str, Any]:
    """The trial's connector with a disk tier at ``path``; ``more``: options of the tier."""
    tier = {"type": "disk", "path": str(path), "max_bytes": max_bytes, **more}
    extra = {**CONNECTOR["kv_connector_extra_config"], "secondary_tiers": [tier]}
    return {**CONNECTOR, "kv_connector_extra_config": extra}


def run_life(
    shape: Shape,
    cache: Path,
    kv_transfer_config: Mapping[str, Any],
    answers: Path,
    report: Report = lambda line: None,
    **overrides: Any,
) -> dict[str, Any]:
    """Run one of the two engines of a restart; return what it did as plain values.

    Args:
        shape: What to run.
        cache: Directory that holds checkpoints.
        kv_transfer_config: The connector, with a tier that outlives this process.
        answers: Where the first engine leaves its answers; if it is there, this is the second one.
        report: Told what is being done, one line at a time.
        overrides: Arguments for ``vllm.LLM`` that replace the trial's.
    """
    first = not answers.exists()
    report("starting the engine" if first else "starting another engine on the same directory")
    started = time.monotonic()
    llm = make_engine(shape, cache, kv_transfer_config, **overrides)
    start_s = time.monotonic() - started
    prompts = shape_prompts(llm)
    ask(llm, list(reversed(prompts[-1])), cold=True)
    report(f"{len(prompts)} requests, {'reading every prompt' if first else 'prefixes from disk'}")
    if first:
        done = run_pass(llm, "cold", prompts, cold=True)
    else:
        done = run_pass(llm, "restarted", prompts, empty_first=True)
    close_engine(llm)
    comparison = None
    if first:
        leave_answers(answers, done)
    else:
        comparison = compare(read_answers(answers), done.outputs, shape.tolerance)
    return {
        "shape": shape.name,
        "engine_start_s": round(start_s, 3),
        "requests": len(prompts),
        "passes": {done.name: done.as_json(comparison)},
    }


def leave_answers(file: Path, done: Pass) -> None:
    """Write what a pass has produced, for another process to compare with."""
    _write(file, [[o.tokens, o.logprobs] for o in done.outputs])


def read_answers(file: Path) -> list[Output]:
    """What :func:`leave_answers` has written."""
    return [
        Output(tuple(tokens), tuple({int(t): p for t, p in step.items()} for step in logprobs))
        for tokens, logprobs in json.loads(file.read_text())
    ]


def run_refusal(cache: Path, tokens: int = 256) -> dict[str, Any]:
    """Start vLLM's own offloading with a ``block_size`` on the mixed model; return what it said.

    Args:
        cache: Directory that holds checkpoints.
        tokens: The ``block_size``.
    """
    shape = next(s for s in SHAPES.values() if s.mixed_blocks)
    options = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29, "block_size": tokens},
    }
    message = None
    try:
        close_engine(make_engine(shape, cache, options))
    except Exception as error:
        # Whatever it raises is the answer.
        message = f"{type(error).__name__}: {error}"
    return {"shape": shape.name, "options": options, "error": message}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one trial as a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m kvloft.engines.vllm.trial")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="uniform")
    parser.add_argument("--cache", type=Path, required=True, help="directory for checkpoints")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--disk", type=Path, help="directory for a disk tier: run one of two lives")
    parser.add_argument("--answers", type=Path, help="what the first life leaves to the second")
    parser.add_argument("--no-connector", action="store_true", help="measure the engine alone")
    parser.add_argument(
        "--refusal",
        action="store_true",
        help="start vLLM's own offloading on the mixed model instead",
    )
    args = parser.parse_args(argv)

    def report(line: str) -> None:
        sys.stdout.write(f"{PROGRESS}{line}\n")
        sys.stdout.flush()

    if (args.disk is None) != (args.answers is None):
        parser.error("--disk and --answers go together")
    if args.refusal:
        result = run_refusal(args.cache)
    elif args.disk is not None:
        shape, disk = SHAPES[args.shape], with_disk(args.disk)
        result = run_life(shape, args.cache, disk, args.answers, report)
    else:
        connector = None if args.no_connector else CONNECTOR
        result = run_trial(SHAPES[args.shape], args.cache, connector, report)
    _write(args.json, result)
    return 0


def _write(path: Path, result: Any) -> None:
    """Write the result so that a reader finds all of it or none."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(result, file, indent=2)
    Path(draft).replace(path)


if __name__ == "__main__":
    sys.exit(main())
