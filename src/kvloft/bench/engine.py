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

    def run(self, mix: tuple[int, int, int], seed: int) -> dict[str, float]:
        """``seconds`` that a round took, and those of them spent in the ``connector``."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (*mix, seed))) + "\n")
        self._process.stdin.flush()
        return {key: float(value) for key, value in self._read().items()}

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
    """Let pairs of engines take turns; about six minutes, one if ``quick``."""
    if importlib.util.find_spec("vllm") is None:
        raise KVLoftError("vLLM is not installed; this benchmark runs its engine")
    result = header("engine", quick=quick)
    result["cases"] = []
    pairs, rounds = (1, 1) if quick else (4, 4)
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES[:1] if quick else SHAPES:
            runs: dict[str, list[_Pair]] = {name: [] for name in MIXES}
            for number in range(pairs):
                progress(f"{shape}: pair {number + 1} of {pairs}")
                for name, found in _run_pair(shape, Path(folder), rounds).items():
                    runs[name].append(found)
            for name, found_pairs in runs.items():
                result["cases"].append({"shape": shape, **_summary(name, found_pairs)})
    return result


_Pair = dict[str, list[dict[str, float]]]
"""The rounds of each side."""


def _run_pair(shape: str, cache: Path, rounds: int) -> dict[str, _Pair]:
    """All mixes on one engine alone and one with the connector, both fresh.

    Fresh ones each time: where a process's memory lies makes one engine up to a third faster than
    another for as long as they live, with the connector or without.
    """
    sides = {"alone": _Side(shape, cache, connector=False)}
    try:
        sides["kvloft"] = _Side(shape, cache, connector=True)
        out: dict[str, _Pair] = {}
        for name, mix in MIXES.items():
            found: _Pair = {side: [] for side in sides}
            for turn in range(rounds + 1):
                # Each side goes first in every other round, should it matter who was before.
                for side in sorted(sides, reverse=bool(turn % 2)):
                    took = sides[side].run(mix, seed=turn * 1000 + mix[1])
                    if turn:
                        found[side].append(took)
            out[name] = found
        return out
    finally:
        for engine in sides.values():
            engine.close()


def _summary(name: str, pairs: list[_Pair]) -> dict[str, Any]:
    tokens = MIXES[name][0] * (MIXES[name][1] + MIXES[name][2])

    def all_of(side: str, key: str) -> list[float]:
        return [took[key] for pair in pairs for took in pair[side]]

    ratios = [
        speed_ratio([t["seconds"] for t in pair["kvloft"]], [t["seconds"] for t in pair["alone"]])
        for pair in pairs
    ]
    spent = [took["connector"] / took["seconds"] for pair in pairs for took in pair["kvloft"]]
    return {
        "mix": name,
        "tokens": tokens,
        **{
            f"{side}_tokens_per_s": round(tokens / statistics.median(all_of(side, "seconds")))
            for side in ("alone", "kvloft")
        },
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "own_ratio": round(1 - statistics.median(spent), 4),
    }


def lines(result: Result) -> Iterator[str]:
    """The result for a person."""
    yield "Throughput with the connector and no hits, as a share of vLLM alone"
    yield ""
    yield from table(
        ["model", "mix", "vLLM tokens/s", "with kvloft", "ratio", "least to most", "by own time"],
        [
            [
                case["shape"],
                case["mix"],
                f"{case['alone_tokens_per_s']:,}",
                f"{case['kvloft_tokens_per_s']:,}",
                f"{case['ratio']:.3f}",
                f"{min(case['ratios']):.2f} to {max(case['ratios']):.2f}",
                f"{case['own_ratio']:.3f}",
            ]
            for case in result["cases"]
        ],
    )
    yield f"(budget: {BUDGET})"
