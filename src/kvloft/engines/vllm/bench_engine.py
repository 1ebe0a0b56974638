"""One side of ``kvloft bench engine``: an engine in a process of its own, run round by round.

``python -m kvloft.engines.vllm.bench_engine SHAPE CACHE [--connector]`` starts the engine and says
``{}``, then answers each line ``PROMPTS PROMPT_TOKENS NEW_TOKENS SEED`` with the seconds it took.
Both sides live at the same time, so that they can take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.models import SHAPES, VOCABULARY
from kvloft.engines.vllm.trial import CONNECTOR, close_engine, make_engine


def main() -> int:
    """Serve rounds until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--connector", action="store_true")
    args = parser.parse_args()
    # The engine writes what it likes to standard output; answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = make_engine(SHAPES[args.shape], args.cache, CONNECTOR if args.connector else None)
    stopwatch = Stopwatch()
    if args.connector:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        stopwatch.watch(scheduler.connector, get_kv_transfer_group())
    _answer(answers, {})
    for line in sys.stdin:
        prompts, prompt_tokens, new_tokens, seed = map(int, line.split())
        stopwatch.seconds = 0.0
        seconds = _round(llm, prompts, prompt_tokens, new_tokens, seed)
        _answer(answers, {"seconds": seconds, "connector": stopwatch.seconds})
    close_engine(llm)
    return 0


class Stopwatch:
    """Adds up the time that the engine's thread spends in the connector."""

    CALLS = (
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
        "update_connector_output", "request_finished_all_groups", "get_kv_connector_stats",
        "has_pending_push_work", "handle_preemptions", "bind_connector_metadata", "start_load_kv",
        "wait_for_save", "get_transfer_results", "build_connector_worker_meta",
    )  # fmt: skip

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, *connectors: Any) -> None:
        """Time all calls of these instances from now on."""
        for connector in connectors:
            for name in self.CALLS:
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def _answer(answers: Any, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _round(llm: Any, prompts: int, prompt_tokens: int, new_tokens: int, seed: int) -> float:
    """Seconds for a batch of prompts that share nothing with any other."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    batch = [
        {"prompt_token_ids": [rng.randrange(4, VOCABULARY - 8) for _ in range(prompt_tokens)]}
        for _ in range(prompts)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(batch, sampling, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
