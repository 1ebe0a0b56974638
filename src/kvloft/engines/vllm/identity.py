"""What must be the same for stored KV to mean the same: weights, settings, kernels, hash seed.

A cache that outlives the engine meets engines that differ in ways no geometry shows: new weights
under the old name, another machine, another release. A path, a name or a date says nothing about
that, so the files themselves are fingerprinted. The same files give the same identity anywhere.

Files are sampled, not read whole (:mod:`kvloft.engines.vllm.fingerprint`).

What that can't see, and a user who does it has to set ``namespace``: an edit to a few rows of a
large tensor that miss its samples; a part of the tensors in a file of several hundred large ones,
of which 192 are sampled; weights in a place that can't be read (``unread`` says so), or replaced
while the engine starts or runs; a LoRA adapter replaced under the same name and path (vLLM hashes
those two into every key, not the content).

Nothing here comes from ``hf_config`` as the engine sees it, but for two lengths: workers change it
while they load, and all processes of one engine must come to the same result.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from vllm import envs
from vllm.config.utils import normalize_value
from vllm.transformers_utils.repo_utils import hf_api
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvloft.engines.vllm.fingerprint import fingerprint
from kvloft.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

READERS = 8
"""Files read at once: what is waited for is the disk, or a network behind it."""

_CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)
# vLLM hashes images and the like before they are processed.
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_ADAPTERS = ("adapter_config.json",)

_SAFETENSORS = ("*.safetensors",)
_CONSOLIDATED = ("consolidated*.safetensors",)
_ALL = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
# As in DefaultModelLoader._prepare_weights: the first pattern with a match is loaded.
_PATTERNS: Mapping[str, Sequence[str]] = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "runai_streamer_sharded": _SAFETENSORS,
    "sharded_state": _SAFETENSORS,
    "mistral": _CONSOLIDATED,
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
}
_INDEX = "model.safetensors.index.json"
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

_LLAMA4_TUNED_BEYOND = 32768
"""Llama 4 scales its queries by position where ``max_model_len`` is above this."""


def identity(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    namespace: str | None,
    persistent: bool,
) -> dict[str, Any]:
    """What the engine knows of the meaning of stored bytes, beyond the geometry.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: The resolved layout of its KV cache.
        namespace: A name that the user vouches for; it stands for model, revision and weights.
        persistent: Whether the bytes outlive the engine; if so, weights and kernels count.
    """
    model = vllm_config.model_config
    record: dict[str, Any] = {
        "quantization": str(model.quantization),
        "layout": kv_cache_config.kv_cache_layout,
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
    }
    if namespace is not None:
        record["namespace"] = namespace
    elif persistent:
        record["weights"] = weights_identity(vllm_config)
    else:
        record |= {"model": str(model.model), "revision": str(model.revision)}
    if persistent:
        record["kernels"] = kernels_identity(vllm_config)
    return record


def unread(record: Mapping[str, Any]) -> str | None:
    """What to tell the user, once, about a result of ``identity`` or ``weights_identity``.

    None if everything that counts could be read.
    """
    weights = record.get("weights")
    reasons = (weights if isinstance(weights, Mapping) else record).get("unread")
    if not reasons:
        return None
    return (
        f"the identity of the weights is incomplete, since it can't be read from {reasons}; other "
        "weights with the same name would share what is stored: set 'namespace' to a name that "
        "changes whenever they do"
    )


# --------------------------------------------------------------------------------- hash seed


def check_hash_seed(vllm_config: VllmConfig) -> None:
    """Refuse prefix hashes that no other process can have, for which a store is never read.

    Raises :class:`kvloft.errors.ConfigError`.
    """
    hash_seed(vllm_config)


def hash_seed(vllm_config: VllmConfig) -> str:
    """The seed of this engine's prefix hashes, which belongs into the name of a store.

    It follows from the settings alone, so it is known before and after vLLM has used it. Raises
    :class:`kvloft.errors.ConfigError` if vLLM draws it at random.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    seed = str(resolve_none_hash_seed(function))
    if seed != resolve_none_hash_seed(function):
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm!r} with PYTHONHASHSEED not set: vLLM then starts "
            "its prefix hashes from a random seed in each process, and nothing that is stored "
            "would be found after a restart; set PYTHONHASHSEED to the same fixed value in every "
            "process, or use prefix_caching_hash_algo 'sha256' or 'sha256_cbor'"
        )
    return seed


# --------------------------------------------------------------------------------- kernels


def kernels_identity(vllm_config: VllmConfig) -> dict[str, str]:
    """What decides how the engine's kernels arrange bytes inside a block.

    vLLM's layout names the order of dimensions only. Inside, kernels pack as they like: on a CPU by
    instruction set, on a GPU by the attention backend, which vLLM picks by compute capability. That
    may change with a release, as may the inputs of the prefix hash, hence vLLM's minor version; its
    price is one cold cache at an upgrade. Patch releases and kernels that round differently share.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    attention, mamba = vllm_config.attention_config, vllm_config.mamba_config
    cache = vllm_config.cache_config
    if current_platform.is_cpu():
        # Its own choice for the common block and head sizes; the geometry has the others.
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(vllm_config.model_config.dtype, 32)
        device = f"cpu/{current_platform.get_cpu_architecture().name}/{isa}"
    else:
        kind = current_platform.get_device_capability() or current_platform.get_device_name()
        device = f"{current_platform.device_type}/{kind}"
    choices = {
        "attention": attention.backend,
        "attention_by_kind": attention.backend_per_kind,
        "indexer": attention.indexer_kv_dtype,
        "mamba": mamba.backend,
        "mamba_dtype": cache.mamba_cache_dtype,
        "mamba_ssm_dtype": cache.mamba_ssm_cache_dtype,
        "shuffled": envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT,
        "unquantized": sorted(cache.kv_cache_dtype_skip_layers),
    }
    return {
        "engine": "vllm " + ".".join(__version__.split(".")[:2]),
        "device": device,
        "choices": _canonical(choices),
    }


# --------------------------------------------------------------------------------- weights


def weights_identity(vllm_config: VllmConfig) -> dict[str, str | int]:
    """What the model computes with: its configuration, weights, and the settings that change KV.

    The same files give the same result on any machine and path. What can't be read is replaced by
    the model's name and revision, and named under ``unread`` (see the function of that name).
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    # Models from object storage: vLLM has fetched the configuration into ``model``.
    source = str(model.model_weights or model.model)
    doubts: list[str] = []
    record: dict[str, str | int] = {"config": _configs(vllm_config, doubts)}
    if load.load_format == "dummy":
        record["seed"] = int(model.seed)
    else:
        place = _locate(source, model.revision, load.download_dir)
        if (found := _weights(place, load.load_format)) is None:
            doubts.append(source)
        else:
            record |= found
        if load.load_format not in _PATTERNS:
            # Such a loader may take the weights from elsewhere, whatever the files say.
            record["loader"] = _canonical([load.load_format, load.model_loader_extra_config])
            doubts.append(f"load_format {load.load_format!r}")
    if vllm_config.weight_transfer_config is not None:
        doubts.append("weights sent to the running engine (weight_transfer_config)")
    record["settings"] = _canonical(_settings(vllm_config, doubts))
    if doubts:
        record |= {"name": source, "revision": str(model.revision)}
        record["unread"] = ", ".join(dict.fromkeys(doubts))
    return record


def _settings(vllm_config: VllmConfig, doubts: list[str]) -> dict[str, Any]:
    """Settings that change the KV of given tokens, without those at their default.

    Speculation is only among them where a drafter has KV of its own, which is stored with the
    target's. Nor are those that only change the order in which the same sums are added up
    (compilation, batching, CUDA graphs).
    """
    model = vllm_config.model_config
    settings: dict[str, Any] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "quantization_config": model.quantization_config,
        "model_class": model.model_class_overrides,
        "no_window": model.disable_sliding_window,
        "additional": _additional(vllm_config),
        "lora": _lora(vllm_config, doubts),
        "length": _length_regime(model),
        "drafter": _drafter(vllm_config, doubts),
    }
    for name, default in (("model_impl", "auto"), ("config_format", "auto")):
        if (value := getattr(model, name)) != default:
            settings[name] = value
    if callable(model.hf_overrides):
        settings["overrides"] = getattr(model.hf_overrides, "__qualname__", "function")
        doubts.append("a function in hf_overrides")
    else:
        settings["overrides"] = model.hf_overrides
    if model.trust_remote_code:
        settings["code_revision"] = model.code_revision
    if (multimodal := model.multimodal_config) is not None:
        settings["multimodal"] = {
            "text_only": multimodal.language_model_only,
            "encoder_dtype": multimodal.mm_encoder_attn_dtype,
            "pruning": multimodal.video_pruning_rate and multimodal.video_pruning_method,
            "pruning_rate": multimodal.video_pruning_rate,
        }
    return {name: value for name, value in settings.items() if value}


def _drafter(vllm_config: VllmConfig, doubts: list[str]) -> list[Any]:
    """The weights of a drafter whose KV lies beside the target's; empty without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return []
    model = speculative.draft_model_config
    source = str(model.model)
    found = _weights(_locate(source, model.revision, vllm_config.load_config.download_dir), "auto")
    if found is None:
        doubts.append(source)
        return [speculative.method, source]
    return [speculative.method, found["weights"]]


def _length_regime(model: Any) -> str:
    """Where ``max_model_len`` changes more than a limit: the cases in vLLM 0.32."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "longrope" in _canonical(rope):
        # LongRoPE has two sets of frequencies.
        name = "original_max_position_embeddings"
        original = rope.get(name) or getattr(text, name, None) or 0
        return "long" if model.max_model_len > original else "short"
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        return "long" if model.max_model_len > _LLAMA4_TUNED_BEYOND else "short"
    return ""


def _additional(vllm_config: VllmConfig) -> Any:
    """The settings of plug-ins, which may mean anything."""
    additional = vllm_config.additional_config
    compute_hash = getattr(additional, "compute_hash", None)
    return compute_hash() if callable(compute_hash) else additional


def _lora(vllm_config: VllmConfig, doubts: list[str]) -> dict[str, Any]:
    """How adapters are applied, and those that are known at start.

    All others come with requests.
    """
    if (lora := vllm_config.lora_config) is None:
        return {}
    found: dict[str, Any] = {
        "targets": sorted(lora.target_modules or ()),
        "towers": lora.enable_tower_connector_lora,
    }
    if str(lora.lora_dtype) not in ("auto", str(vllm_config.model_config.dtype)):
        found["dtype"] = str(lora.lora_dtype)
    for modality, path in sorted((lora.default_mm_loras or {}).items()):
        folder = _locate(path, None, None)
        weights = _weights(folder, "auto")
        if folder is None or weights is None:
            doubts.append(path)
            found[modality] = path
        else:
            found[modality] = [weights["weights"], _digest_texts(folder, _ADAPTERS)]
    return {name: value for name, value in found.items() if value}


def _configs(vllm_config: VllmConfig, doubts: list[str]) -> str:
    """A digest of the files that say what to do with the weights."""
    model = vllm_config.model_config
    names = list(_CONFIGS)
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        names += _PROCESSORS
    parts = []
    for source in dict.fromkeys((str(model.model), str(model.hf_config_path or model.model))):
        if (place := _locate(source, model.revision, None)) is None:
            doubts.append(source)
            parts.append(source)
        elif place.is_dir():
            code = sorted(path.name for path in place.glob("*.py"))
            parts.append(_digest_texts(place, names + code * model.trust_remote_code))
            if _names_other_weights(place / "config.json"):
                doubts.append("the other models that config.json refers to")
    return _digest(parts)


def _names_other_weights(config: Path) -> bool:
    """Whether parts of the model come from other repositories (Ultravox)."""
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and any(
        content.get(name) for name in ("text_model_id", "audio_model_id")
    )


def _digest_texts(folder: Path, names: Iterable[str]) -> str:
    """A digest of those of the files that exist; formatting of JSON doesn't count."""
    parts = []
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        if name.endswith(".json"):
            with contextlib.suppress(ValueError):
                content = json.dumps(json.loads(content), sort_keys=True).encode()
        parts.append([name, xxhash.xxh3_128_hexdigest(content)])
    return _digest(parts)


# --------------------------------------------------------------------------------- files


def _locate(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The file or directory that vLLM reads, or None where it is not on this machine."""
    if "://" in name:
        return None
    if (path := Path(name)).exists():
        return path
    if envs.VLLM_USE_MODELSCOPE:
        return None
    try:
        found = hf_api().snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):  # Not in the cache, or no name of a repository.
        return None
    return Path(found)


def _weight_files(place: Path, load_format: str) -> list[tuple[str, Path]]:
    """The files that vLLM loads, or a few more, with their names relative to the model.

    A file that is not loaded does no harm but for an identity that changes along with it.
    """
    if place.is_file():
        return [(place.name, place)]
    names = sorted(path.name for path in place.iterdir() if path.is_file() or path.is_symlink())
    for pattern in _PATTERNS.get(load_format, ()):
        chosen = [n for n in fnmatch.filter(names, pattern) if not n.endswith(_TRAINING)]
        if pattern in _SAFETENSORS and load_format not in ("sharded_state", "runai_streamer"):
            chosen = _without_duplicates(place, chosen)
        if chosen:
            return [(name, place / name) for name in chosen]
    # Other loaders, and models with their weights in subdirectories.
    return sorted(
        (path.relative_to(place).as_posix(), path)
        for path in place.rglob("*")
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in _ALL)
        and not path.name.endswith(_TRAINING)
    )


def _without_duplicates(place: Path, names: list[str]) -> list[str]:
    """Without files that the index doesn't mention, as in vLLM, but with consolidated ones.

    Which of the two vLLM takes depends on whether it can reach the hub.
    """
    try:
        index = set(json.loads((place / _INDEX).read_bytes())["weight_map"].values())
        # Files that aren't there stay: their absence must not go unnoticed.
        return sorted(index.union(fnmatch.filter(names, _CONSOLIDATED[0])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return names


def _weights(place: Path | None, load_format: str) -> dict[str, str | int] | None:
    """Digest, number and bytes of a model's weight files; None if there are none to be read."""
    if place is None:
        return None
    try:
        if not (files := _weight_files(place, load_format)):
            return None
        with ThreadPoolExecutor(min(READERS, len(files))) as pool:
            found = list(pool.map(fingerprint, [path for _, path in files]))
    except OSError:
        return None
    return {
        "weights": _digest(
            [[name, *print_] for (name, _), print_ in zip(files, found, strict=True)]
        ),
        "weight_files": len(files),
        "weight_bytes": sum(size for size, _ in found),
    }


def _canonical(value: Any) -> str:
    """JSON of a setting, equal in all processes; the order of a mapping doesn't count."""
    try:
        plain = normalize_value(value)  # What vLLM keys its own caches with.
    except TypeError:
        plain = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str)


def _digest(parts: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, separators=(",", ":")).encode())
