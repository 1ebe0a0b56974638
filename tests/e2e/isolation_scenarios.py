"""Tenants and adapters on the real engine; run and judged like ``scenarios.py``.

``python isolation_scenarios.py NAME CACHE DIRECTORY`` prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvloft.engines.vllm.compare import Output, compare
from kvloft.engines.vllm.models import SHAPES, checkpoint
from kvloft.engines.vllm.trial import (
    CANDIDATES,
    close_engine,
    empty_engine_cache,
    make_engine,
    output_of,
    read_counters,
    shape_prompts,
    with_disk,
)
from tests.e2e.disk_scenarios import PATIENT, flush

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path, Path], Result]] = {}
MINE, THEIRS, THIRD = "tenant-one", "tenant-two", "tenant-three"
RANK = 4
"""Of the adapters."""


def scenario(function: Callable[[Path, Path], Result]) -> Callable[[Path, Path], Result]:
    """Register a scenario by its name."""
    SCENARIOS[function.__name__] = function
    return function


def ask(
    llm: Any, prompt: Sequence[int], *, salt: str | None = None, adapter: Any = None
) -> tuple[Output, int]:
    """Send one prompt to an engine whose own cache is empty; its answer, and the tokens that came
    from the connector."""
    from vllm import SamplingParams, TokensPrompt

    empty_engine_cache(llm)
    before = read_counters(llm).restored_tokens
    text = TokensPrompt(prompt_token_ids=list(prompt))
    if salt is not None:
        text["cache_salt"] = salt
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=CANDIDATES)
    (result,) = llm.generate([text], sampling, use_tqdm=False, lora_request=adapter)
    return output_of(result), read_counters(llm).restored_tokens - before


# --- tenants --------------------------------------------------------------------------------------


@scenario
def salts(cache: Path, folder: Path) -> Result:
    """One prompt under several salts: from host memory, then from disk by another engine."""
    shape = SHAPES["uniform"]
    connector = with_disk(folder / "disk", wait=PATIENT)
    llm = make_engine(shape, cache, connector)
    prompt = shape_prompts(llm)[1]
    cold, first = ask(llm, prompt, salt=MINE)
    out: Result = {"prompt": len(prompt), "first": first, "agrees": {}}

    def record(name: str, salt: str | None) -> None:
        answer, out[name] = ask(llm, prompt, salt=salt)
        out["agrees"][name] = compare([cold], [answer], shape.tolerance).agrees

    record("memory_same", MINE)
    record("memory_other", THEIRS)
    record("memory_other_again", THEIRS)
    flush(llm)
    close_engine(llm)
    # What this engine finds can only come from disk, where a third tenant has never been.
    llm = make_engine(shape, cache, connector)
    record("disk_other", THIRD)
    record("disk_unsalted", None)
    record("disk_same", MINE)
    close_engine(llm)
    return out


# --- adapters -------------------------------------------------------------------------------------


def make_adapter(model: Path, place: Path, seed: int) -> Path:
    """A LoRA adapter for all attention projections of a checkpoint, strong enough to show."""
    import safetensors.torch
    import torch

    place.mkdir()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model),
        "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": targets, "inference_mode": True, "fan_in_fan_out": False,
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in safetensors.torch.load_file(next(model.glob("*.safetensors"))).items():
        if name.split(".")[-2] not in targets:
            continue
        rows, columns = weight.shape
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        spread = float(weight.float().std())
        a = torch.randn(RANK, columns, generator=random) * columns**-0.5
        b = torch.randn(rows, RANK, generator=random) * spread * (columns / RANK) ** 0.5 * 0.2
        tensors[f"{stem}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"{stem}.lora_B.weight"] = b.to(torch.bfloat16)
    safetensors.torch.save_file(tensors, place / "adapter_model.safetensors")
    return place


@scenario
def adapters(cache: Path, folder: Path) -> Result:
    """Two adapters and the base model, one prompt: from host memory, then from disk."""
    from vllm.lora.request import LoRARequest

    shape = SHAPES["uniform"]
    model = checkpoint(shape, cache)
    users: dict[str, Any] = {"base": None}
    for number, name in enumerate(("first", "second"), 1):
        place = make_adapter(model, folder / name, number)
        users[name] = LoRARequest(name, number, str(place))
    connector = with_disk(folder / "disk", wait=PATIENT)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    llm = make_engine(shape, cache, connector, **options)
    prompt = shape_prompts(llm)[1]
    out: Result = {"prompt": len(prompt), "cold": {}, "memory": {}, "disk": {}, "agrees": {}}
    cold = {}
    for name, adapter in users.items():
        # Whatever others have left may be found, and must not be.
        cold[name], out["cold"][name] = ask(llm, prompt, adapter=adapter)
    for name, adapter in users.items():
        answer, out["memory"][name] = ask(llm, prompt, adapter=adapter)
        out["agrees"][f"memory_{name}"] = compare([cold[name]], [answer], shape.tolerance).agrees
    flush(llm)
    close_engine(llm)
    llm = make_engine(shape, cache, connector, **options)
    for name, adapter in users.items():
        answer, out["disk"][name] = ask(llm, prompt, adapter=adapter)
        out["agrees"][f"disk_{name}"] = compare([cold[name]], [answer], shape.tolerance).agrees
    third = LoRARequest("third", 3, str(shutil.copytree(folder / "first", folder / "third")))
    _, out["unknown"] = ask(llm, prompt, adapter=third)
    close_engine(llm)
    # Answers that are all alike would agree whatever was restored.
    out["differ"] = {
        f"{a}_{b}": not compare([cold[a]], [cold[b]], shape.tolerance).agrees
        for a, b in (("base", "first"), ("base", "second"), ("first", "second"))
    }
    return out


if __name__ == "__main__":
    name, cache, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(SCENARIOS[name](cache, folder)), flush=True)
