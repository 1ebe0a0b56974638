"""Offline generation with KVLoft: the second run of a prompt restores what the first one stored.

    python examples/offline.py [MODEL]

MODEL is a directory or a name that vLLM can load. Without it, a small model with random weights is
made: it writes nonsense, but its cache has the shape of Gemma 4's. On a machine without a GPU,
VLLM_CPU_KVCACHE_SPACE=1 keeps the engine's own cache to one GiB.
"""

import sys
import tempfile
import time
from pathlib import Path

from vllm import LLM, SamplingParams

from kvloft.engines.vllm.models import SHAPES, checkpoint, texts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else small_model(Path(folder))
        llm = LLM(
            model=model,
            enforce_eager=True,
            disable_log_stats=False,  # for the counter below
            kv_transfer_config={
                "kv_connector": "KVLoftConnector",
                "kv_role": "kv_both",
                # A prefix that can't be read is computed again, rather than failing the request.
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"},
            },
        )
        prompt = "\n".join(texts())[:8000]
        for run in ("cold", "restored"):
            before = restored_tokens(llm)
            started = time.perf_counter()
            (result,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))
            took = time.perf_counter() - started
            print(
                f"{run}: {len(result.prompt_token_ids)} prompt tokens, "
                f"{restored_tokens(llm) - before} restored from host memory, {took * 1e3:.0f} ms, "
                f"token ids {list(result.outputs[0].token_ids)}"
            )
            # Empty the engine's own cache, so that only KVLoft can help the next run.
            llm.reset_prefix_cache()


def small_model(folder: Path) -> str:
    """Make the small model and return its directory."""
    return str(checkpoint(SHAPES["gemma4"], folder))


def restored_tokens(llm: LLM) -> int:
    """vLLM's count of prompt tokens that a connector supplied."""
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:external_prefix_cache_hits"
    )


if __name__ == "__main__":
    main()
