"""vLLM's throughput with the connector, when no prompt ever hits, against vLLM alone.

That is the price of storing: whoever has no repeated prefixes should not notice that KVLoft is
there. The models are tiny, which makes it a hard case: they produce far more bytes of KV cache for
each second of computing than a real model does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvloft.bench.report import Result, header, progress, table
from kvloft.bench.timing import speed_ratio
from kvloft.errors import KVLoftError

BUDGET = 0.97

SHAPES = ("uniform", "gemma4")
MIXES = {
    "prefill": (8, 2048, 8),
    "decode": (8, 64, 192),
}
"""Prompts, tokens in each, tokens to generate for each."""

_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Threads of a side that waits for its turn must sleep instead of spinning on the other's cores."""


class _Side:
    """An engine in a process of its own."""

    def __init__(self, shape: str, cache: Path, *, connector: bool) -> None:
        from kvloft.engines.vllm.trial import environment

        command = [sys.executable, "-m", "kvloft.engines.vllm.bench_engine", shape, str(cache)]
        self._process = subprocess.Popen(
            [*command, "--connector"] if connector else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment(), **_ENVIRONMENT},
        )  # fmt: skip
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def run(self, mix: tuple[int, int, int], seed: int) -> tuple[float, float]:
        """Seconds on the wall and of the processor, all threads."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (*mix, seed))) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return float(answer["seconds"]), float(answer["processor"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        _, log = self._process.communicate()
        raise KVLoftError(f"the engine ended early; the end of its log:\n{log[-2000:]}")

    def close(self) -> None:
        self._process.communicate()


def run(*, quick: bool) -> Result:
    """Let both sides take turns; about five minutes, one if ``quick``."""
    if importlib.util.find_spec("vllm") is None:
        raise KVLoftError("vLLM is not installed; this benchmark runs its engine")
    result = header("engine", quick=quick)
    result["cases"] = []
    rounds = 1 if quick else 8
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES[:1] if quick else SHAPES:
            progress(f"{shape}: starting one engine alone and one with the connector")
            sides = {"alone": _Side(shape, Path(folder), connector=False)}
            try:
                sides["kvloft"] = _Side(shape, Path(folder), connector=True)
                for name, mix in MIXES.items():
                    progress(f"{shape}: {name}")
                    result["cases"].append({"shape": shape, **_compare(name, mix, sides, rounds)})
            finally:
                for side in sides.values():
                    side.close()
    return result


def _compare(
    name: str, mix: tuple[int, int, int], sides: dict[str, _Side], rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        # Each side goes first in every other round, should it matter who was there before.
        for side in sorted(sides, reverse=bool(turn % 2)):
            took = sides[side].run(mix, seed=turn * 1000 + mix[1])
            if turn:
                seconds[side].append(took[0])
                processor[side].append(took[1])
    tokens = mix[0] * (mix[1] + mix[2])
    return {
        "mix": name,
        "tokens": tokens,
        **{
            f"{side}_tokens_per_s": round(tokens / statistics.median(took))
            for side, took in seconds.items()
        },
        "ratio": round(speed_ratio(seconds["kvloft"], seconds["alone"]), 4),
        "processor_ratio": round(speed_ratio(processor["kvloft"], processor["alone"]), 4),
    }


def lines(result: Result) -> Iterator[str]:
    """The result for a person."""
    yield "Throughput with the connector and no hits, as a share of vLLM alone"
    yield ""
    yield from table(
        ["model", "mix", "vLLM tokens/s", "with kvloft", "ratio", "by processor time"],
        [
            [
                case["shape"],
                case["mix"],
                f"{case['alone_tokens_per_s']:,}",
                f"{case['kvloft_tokens_per_s']:,}",
                f"{case['ratio']:.3f}",
                f"{case['processor_ratio']:.3f}",
            ]
            for case in result["cases"]
        ],
    )
    yield f"(budget: {BUDGET})"
