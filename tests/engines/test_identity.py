"""What makes stored KV another model's: files, settings, kernels and the seed of the hashes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvloft.engines.vllm import fingerprint as module  # noqa: E402
from kvloft.engines.vllm.fingerprint import fingerprint  # noqa: E402
from kvloft.engines.vllm.identity import (  # noqa: E402
    check_hash_seed,
    hash_seed,
    identity,
    unread,
    weights_identity,
)
from kvloft.errors import ConfigError  # noqa: E402

TENSORS = {"a.weight": b"\1\2" * 40, "b.weight": b"\3" * 64, "b.k_scale": b"\0\0\0?"}
CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_theta": 1e4}


def safetensors(tensors: Mapping[str, bytes]) -> bytes:
    header, offset = {}, 0
    for name, data in tensors.items():
        span = [offset, offset + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def make_model(place: Path, config: Any = CONFIG, **files: bytes) -> Path:
    """A directory as models come in; ``files`` are named without their ``.safetensors``."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    for name, content in (files or {"model": safetensors(TENSORS)}).items():
        (place / f"{name}.safetensors").write_bytes(content)
    return place


def engine(model: str | Path, **changes: Any) -> Any:
    """What of vLLM's configuration is read; ``model__seed`` is its ``model_config.seed``."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), model_weights="", revision=None, code_revision=None, seed=0,
            dtype=torch.bfloat16, quantization=None, quantization_config=None, hf_overrides={},
            hf_config_path=None, config_format="auto", model_impl="auto", max_model_len=4096,
            model_class_overrides={}, trust_remote_code=False, disable_sliding_window=False,
            multimodal_config=None, hf_text_config=SimpleNamespace(model_type="llama"),
        ),
        load_config=SimpleNamespace(
            load_format="auto", download_dir=None, model_loader_extra_config={}
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto", kv_cache_dtype_skip_layers=[],
        ),
        attention_config=SimpleNamespace(
            backend=None, backend_per_kind={}, indexer_kv_dtype="auto"
        ),
        mamba_config=SimpleNamespace(backend="triton"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None, weight_transfer_config=None, additional_config={},
        speculative_config=None,
    )  # fmt: skip
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(getattr(made, f"{part}_config"), name, value)
        else:
            setattr(made, f"{part}_config", value)
    return made


def weights(model: str | Path, **changes: Any) -> dict[str, str | int]:
    return weights_identity(engine(model, **changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


# --------------------------------------------------------------------------------- files


def test_the_same_files_are_the_same_anywhere(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other" / "name"
    shutil.copytree(model, elsewhere)
    for file in elsewhere.iterdir():
        os.utime(file, (1, 1))
    (elsewhere / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=8))
    (elsewhere / "README.md").write_text("about")
    (elsewhere / "generation_config.json").write_text("{}")
    (elsewhere / "optimizer.pt").write_bytes(b"not a weight")
    assert weights(elsewhere) == weights(model)
    assert "unread" not in weights(model)
    assert weights(model)["weight_files"] == 1


@pytest.mark.parametrize("load_format", ["hf", "safetensors", "runai_streamer", "fastsafetensors"])
def test_how_the_same_files_are_loaded_does_not_matter(model: Path, load_format: str) -> None:
    assert weights(model, load__load_format=load_format) == weights(model)


def rename(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")


def add(model: Path) -> None:
    (model / "more.safetensors").write_bytes(safetensors({"c": b"1"}))


def change_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))


def add_quantization(model: Path) -> None:
    (model / "hf_quant_config.json").write_text("{}")


def lengthen(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def transpose(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content.replace(b"a.weight", b"c.weight"))


@pytest.mark.parametrize(
    "change", [rename, add, change_config, add_quantization, lengthen, transpose]
)
def test_other_files_are_another_model(model: Path, change: Callable[[Path], None]) -> None:
    before = weights(model)
    change(model)
    assert weights(model) != before


def test_a_removed_file_is_another_model(tmp_path: Path) -> None:
    shard = safetensors(TENSORS)
    both = make_model(tmp_path / "both", one=shard, two=shard)
    one = make_model(tmp_path / "one", one=shard)
    assert weights(one) != weights(both)


@given(
    name=st.sampled_from(list(TENSORS)), at=st.integers(0), bit=st.integers(0, 7)
)  # fmt: skip
def test_any_bit_of_a_small_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, bit: int
) -> None:
    data = bytearray(TENSORS[name])
    data[at % len(data)] ^= 1 << bit
    place = tmp_path_factory.mktemp("weights")
    (place / "before").write_bytes(safetensors(TENSORS))
    (place / "after").write_bytes(safetensors({**TENSORS, name: bytes(data)}))
    assert fingerprint(place / "before") != fingerprint(place / "after")


LARGE = {
    f"layers.{n}.{name}": bytes([n + 1]) * size
    for n in range(40)
    for name, size in (("k_proj", 90_000), ("k_scale", 4), ("norm", 14_336))
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    path.write_bytes(safetensors(LARGE))
    assert path.stat().st_size > module.WHOLE_BYTES
    return path


@given(name=st.sampled_from(list(LARGE)))
def test_any_tensor_of_a_large_file(large: Path, name: str) -> None:
    other = large.with_name("other")
    other.write_bytes(safetensors({**LARGE, name: b"\0" * len(LARGE[name])}))
    assert fingerprint(other) != fingerprint(large)


@given(st.binary(min_size=1, max_size=64), st.integers(1, 60))
def test_small_tensors_are_read_whole(large: Path, data: bytes, at: int) -> None:
    name = "layers.7.norm"
    changed = LARGE[name][:-at] + data
    other = large.with_name("other")
    other.write_bytes(safetensors({**LARGE, name: changed[: len(LARGE[name])].ljust(14_336)}))
    same = other.read_bytes() == large.read_bytes()
    assert (fingerprint(other) == fingerprint(large)) == same


def count_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Reads and bytes that one fingerprint takes."""
    reads: list[int] = []
    pread = os.pread

    def spy(fd: int, count: int, offset: int) -> bytes:
        reads.append(count)
        return pread(fd, count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", spy)
        fingerprint(path)
    return len(reads), sum(reads)


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_a_huge_file_takes_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    size = (64 << 30) // count
    header = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(count)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * size)
    reads, total = count_reads(path, monkeypatch)
    assert reads <= 260
    assert total <= len(text) + (2 << 20)


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[[]]"])
def test_files_of_other_kinds_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(head + bytes(8 << 20))
    before = fingerprint(path)
    assert count_reads(path, monkeypatch)[0] <= 260
    with path.open("r+b") as file:
        file.seek(-200_000, os.SEEK_END)  # Where a zip file keeps the checksums of its members.
        file.write(b"1")
    assert fingerprint(path) != before


def test_a_tensor_beyond_the_end_is_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(safetensors({"a": bytes(3 << 20)})[: 2 << 20])
    assert fingerprint(path)[0] == 2 << 20


# --------------------------------------------------------------------------------- which files


def test_a_name_in_the_hub_s_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("0123abcd" * 5)
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd" * 5)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = weights("some/model", load__download_dir=str(tmp_path / "hub"))
    assert cached["weights"] == weights(model)["weights"]
    assert weights(snapshot) == weights(model)

    blob = (snapshot / "model.safetensors").resolve()
    blob.unlink()
    assert unread(weights(snapshot)) is not None


def test_the_index_says_what_is_loaded(tmp_path: Path) -> None:
    shard, index = safetensors(TENSORS), json.dumps({"weight_map": {"a": "one.safetensors"}})
    plain = make_model(tmp_path / "plain", one=shard)
    extra = make_model(tmp_path / "extra", one=shard, stray=shard)
    twice = make_model(tmp_path / "twice", one=shard, consolidated=shard)
    for place in (plain, extra, twice):
        (place / "model.safetensors.index.json").write_text(index)
    assert weights(extra) == weights(plain)
    assert weights(twice) != weights(plain)
    (extra / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    assert weights(extra)["weight_files"] == 2

    (plain / "one.safetensors").unlink()
    assert unread(weights(plain)) is not None


def test_formats_choose_their_files(tmp_path: Path) -> None:
    place = make_model(tmp_path / "m", model=b"1", consolidated=b"2")
    (place / "model.bin").write_bytes(b"3")
    (place / "model.pt").write_bytes(b"4")
    found = {
        load_format: weights(place, load__load_format=load_format)["weights"]
        for load_format in ("auto", "mistral", "npcache", "pt")
    }
    assert len(set(found.values())) == 4

    for file in place.glob("*.safetensors"):
        file.unlink()
    assert weights(place)["weights"] == found["npcache"]


def test_weights_in_subdirectories(tmp_path: Path) -> None:
    place = make_model(tmp_path / "m")
    (place / "transformer").mkdir()
    (place / "model.safetensors").rename(place / "transformer" / "model.safetensors")
    assert "unread" not in weights(place)


def test_a_single_file(tmp_path: Path) -> None:
    for name in "one", "two":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"GGUF")
    one, two = (weights(tmp_path / name / "model.gguf") for name in ("one", "two"))
    assert one == two
    assert "unread" not in one


def test_code_counts_where_it_runs(model: Path) -> None:
    plain, trusted = weights(model), weights(model, model__trust_remote_code=True)
    (model / "modeling.py").write_text("x = 1")
    assert weights(model) == plain
    assert weights(model, model__trust_remote_code=True) != trusted


def test_a_configuration_from_elsewhere(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", {**CONFIG, "hidden_size": 32})
    assert weights(model, model__hf_config_path=str(other)) != weights(model)
    missing = weights(model, model__hf_config_path=str(tmp_path / "none"))
    assert "none" in str(unread(missing))


def test_a_drafter_with_kv_of_its_own_counts(tmp_path: Path, model: Path) -> None:
    def drafting(method: str, path: Path) -> Any:
        return SimpleNamespace(
            method=method,
            uses_draft_kv_cache=lambda: method != "ngram",
            draft_model_config=SimpleNamespace(model=str(path), revision=None),
        )

    first, second = make_model(tmp_path / "first"), make_model(tmp_path / "second")
    (second / "model.safetensors").write_bytes((second / "model.safetensors").read_bytes() + b"x")
    plain = weights(model)
    assert weights(model, speculative=drafting("ngram", first)) == plain
    eagle = weights(model, speculative=drafting("eagle", first))
    assert eagle != plain
    assert weights(model, speculative=drafting("eagle", second)) != eagle
    assert "unread" in weights(model, speculative=drafting("eagle", tmp_path / "nowhere"))


def multimodal(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"language_model_only": False, "mm_encoder_attn_dtype": None,
           "video_pruning_rate": None, "video_pruning_method": "evs", **changes}
    )  # fmt: skip


def test_processors_count_where_there_are_images(model: Path) -> None:
    text, images = weights(model), weights(model, model__multimodal_config=multimodal())
    (model / "preprocessor_config.json").write_text('{"size": 3}')
    assert weights(model) == text
    assert weights(model, model__multimodal_config=multimodal()) != images
    pruned = multimodal(video_pruning_rate=0.5)
    assert weights(model, model__multimodal_config=pruned) != images


# --------------------------------------------------------------------------------- unreadable


@pytest.mark.parametrize("name", ["some/unknown-model", "s3://bucket/model", "/no/such/place"])
def test_without_files_the_name_counts(name: str) -> None:
    record = weights(name, model__revision="v1")
    assert (record["name"], record["revision"]) == (name, "v1")
    assert "weights" not in record
    said = str(unread(record))
    assert name in said
    assert "'namespace'" in said
    assert weights(name, model__revision="v2") != record


def test_object_storage_behind_a_local_configuration(model: Path) -> None:
    """What vLLM makes of s3://…: ``model`` is a directory of its own with small files."""
    record = weights(model, model__model_weights="s3://bucket/model")
    assert record["name"] == "s3://bucket/model"
    assert record["config"] == weights(model)["config"]
    assert unread(record)


@pytest.mark.parametrize(
    "changes",
    [
        {"load__load_format": "tensorizer"},
        {"load__load_format": "ipc_cache"},
        {"weight_transfer": object()},
        {"model__hf_overrides": lambda config: config},
    ],
)
def test_what_no_file_tells(model: Path, changes: dict[str, Any]) -> None:
    record = weights(model, **changes)
    assert unread(record)
    assert record["name"] == str(model)
    assert record == weights(model, **changes)


def test_parts_from_other_repositories(tmp_path: Path) -> None:
    assert unread(weights(make_model(tmp_path / "m", {"text_model_id": "some/llm"})))


def test_dummy_weights(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", model=b"never read")
    dummy = weights(model, load__load_format="dummy")
    assert dummy == weights(other, load__load_format="dummy")
    assert dummy != weights(model, load__load_format="dummy", model__seed=1)
    assert dummy != weights(model)
    assert unread(dummy) is None


# --------------------------------------------------------------------------------- settings

SETTINGS: list[dict[str, Any]] = [
    {"model__dtype": torch.float16},
    {"model__quantization": "fp8"},
    {"model__quantization_config": {"linear": "fp8"}},
    {"model__hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}},
    {"model__hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
    {"model__model_impl": "transformers"},
    {"model__config_format": "mistral"},
    {"model__disable_sliding_window": True},
    {"model__model_class_overrides": {"LlamaForCausalLM": "mine:Model"}},
    {"model__trust_remote_code": True, "model__code_revision": "v2"},
    {"model__multimodal_config": multimodal(language_model_only=True)},
    {"additional": {"plugin": 1}},
    {"additional": SimpleNamespace(compute_hash=lambda: "abc")},
]


def test_settings_that_change_kv(model: Path) -> None:
    found = [weights(model, **changes) for changes in [{}, *SETTINGS]]
    assert len({json.dumps(record) for record in found}) == len(found)


def test_settings_that_do_not(model: Path) -> None:
    lora = SimpleNamespace(
        target_modules=None, enable_tower_connector_lora=False, default_mm_loras=None,
        lora_dtype=torch.bfloat16,
    )  # fmt: skip
    for changes in ({"model__max_model_len": 99}, {"model__seed": 3}, {"lora": lora}):
        assert weights(model, **changes) == weights(model)


@pytest.mark.parametrize(
    "text",
    [
        SimpleNamespace(
            model_type="phi3",
            rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4096},
        ),
        SimpleNamespace(
            model_type="phi3",
            rope_scaling={"type": "longrope"},
            original_max_position_embeddings=4096,
        ),
        SimpleNamespace(model_type="llama4_text", rope_parameters=None),
    ],
)
def test_lengths_that_switch_the_positions(model: Path, text: Any) -> None:
    def at(length: int) -> dict[str, str | int]:
        return weights(model, model__hf_text_config=text, model__max_model_len=length)

    assert at(1024) == at(4096)
    assert at(4096) != at(65536)
    assert at(65536) == at(131072)


def test_adapters_for_modalities(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    (adapter / "adapter_model.safetensors").write_bytes(safetensors({"lora_A": b"12"}))
    lora = SimpleNamespace(
        target_modules=None, enable_tower_connector_lora=False, lora_dtype="auto",
        default_mm_loras={"audio": str(adapter)},
    )  # fmt: skip
    before = weights(model, lora=lora)
    assert "unread" not in before
    (adapter / "adapter_model.safetensors").write_bytes(safetensors({"lora_A": b"13"}))
    assert weights(model, lora=lora) != before
    (adapter / "adapter_model.safetensors").unlink()
    assert str(adapter) in str(unread(weights(model, lora=lora)))


# --------------------------------------------------------------------------------- the whole

KV = SimpleNamespace(kv_cache_layout="LBHNC")


def whole(config: Any, **options: Any) -> dict[str, Any]:
    return identity(config, KV, **{"namespace": None, "persistent": False, **options})


def test_only_what_outlives_the_engine_reads_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloft.engines.vllm.identity.weights_identity", None)
    monkeypatch.setattr("kvloft.engines.vllm.identity.kernels_identity", None)
    assert whole(engine(model)) == {
        "model": str(model), "revision": "None", "quantization": "None",
        "layout": "LBHNC", "hash": "sha256", "tensor_parallel": 1,
    }  # fmt: skip


def test_a_persistent_identity_has_no_path(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    record = whole(engine(model), persistent=True)
    assert record == whole(engine(tmp_path / "copy"), persistent=True)
    assert str(tmp_path) not in json.dumps(record)
    assert unread(record) is None
    lost = whole(engine("s3://bucket/model"), persistent=True)
    assert unread(lost)


def test_a_namespace_stands_for_the_weights(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", {**CONFIG, "hidden_size": 32})
    mine: dict[str, Any] = {"namespace": "mine", "persistent": True}
    record = whole(engine(model), **mine)
    assert record == whole(engine(other), **mine)
    assert record == whole(engine("s3://gone", model__revision="v2"), **mine)
    assert unread(record) is None
    assert record != whole(engine(model), namespace="other", persistent=True)
    for change in (
        {"parallel__tensor_parallel_size": 2},
        {"cache__prefix_caching_hash_algo": "sha256_cbor"},
        {"cache__mamba_ssm_cache_dtype": "float16"},
        {"model__quantization": "fp8"},
        {"attention__backend": "FLASHINFER"},
    ):
        assert record != whole(engine(model, **change), **mine)
    local = whole(engine(model), namespace="mine")
    assert local == whole(engine(other), namespace="mine")


# --------------------------------------------------------------------------------- vLLM itself

HASHES = """
import json, os
from types import SimpleNamespace
from kvloft.engines.vllm.identity import check_hash_seed, hash_seed
from kvloft.errors import ConfigError
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

found = {}
for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=name))
    function = get_hash_fn_by_name(name)
    for seed in ("", "7", "8"):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed:
            os.environ["PYTHONHASHSEED"] = seed
        seeds = []
        for _ in range(2):
            try:
                check_hash_seed(config)
                seeds.append(hash_seed(config))
                assert seeds == seeds[:1] or kv_cache_utils.get_none_hash_seed() == seeds[0]
            except ConfigError as error:
                seeds.append(str(error))
            kv_cache_utils.init_none_hash(function)
        assert seeds[0] == seeds[1]
        block = kv_cache_utils.hash_block_tokens(function, None, list(range(16)), None)
        found[f"{name} {seed}"] = [seeds[0], block.hex()]
print(json.dumps(found))
"""


def vllm_process(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_share_hashes_exactly_where_their_seeds_agree() -> None:
    one, two = vllm_process(HASHES), vllm_process(HASHES)
    for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        assert one[f"{name} 7"] == two[f"{name} 7"]
        assert (one[f"{name} 7"][0], one[f"{name} 8"][0]) == ("7", "8")
        assert one[f"{name} 7"][1] != two[f"{name} 8"][1]
    for name in ("sha256", "sha256_cbor"):
        assert one[f"{name} "] == two[f"{name} "]
        assert one[f"{name} "][0] not in ("7", "8")
    for name in ("xxhash", "xxhash_cbor"):
        assert "PYTHONHASHSEED not set" in one[f"{name} "][0]
        assert one[f"{name} "][1] != two[f"{name} "][1]


def test_a_random_seed_is_refused_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine("m", cache__prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"'xxhash' with PYTHONHASHSEED not set.*'sha256_cbor'"):
        check_hash_seed(config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hash_seed(config)
    assert hash_seed(config) == "0"
    monkeypatch.delenv("PYTHONHASHSEED")
    check_hash_seed(engine("m"))


REAL = """
import json, pickle, tempfile
from pathlib import Path
from types import SimpleNamespace
from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs
from kvloft.engines.vllm.identity import identity, unread

folder = tempfile.TemporaryDirectory()
place = Path(folder.name)
LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], hidden_size=64,
            intermediate_size=64, num_attention_heads=2, num_hidden_layers=1,
            vocab_size=64).save_pretrained(place)
(place / "model.safetensors").write_bytes(bytes.fromhex("0200000000000000") + b"{}")
def found(config):
    kv = SimpleNamespace(kv_cache_layout="LBHNC")
    record = identity(config, kv, namespace=None, persistent=True)
    assert unread(record) is None, record
    return record
def make(**more):
    return EngineArgs(model=str(place), skip_tokenizer_init=True, enforce_eager=True,
                      max_model_len=128, **more).create_engine_config()
plain = make()
assert found(pickle.loads(pickle.dumps(plain))) == found(plain)
print(json.dumps([
    found(plain), found(make(dtype="float32")),
    found(make(hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}})),
    found(make(load_format="dummy")), found(make(enable_lora=True)),
]))
"""


def test_vllm_s_own_configuration() -> None:
    plain, wide, rope, dummy, lora = vllm_process(REAL)
    again = vllm_process(REAL)[0]
    assert plain == again == lora
    assert len({json.dumps(record["weights"]) for record in (plain, wide, rope, dummy)}) == 4
    assert plain["kernels"]["engine"] == "vllm 0.32"
    assert plain["kernels"]["device"].count("/") >= 1


def test_settings_are_left_as_they_are(model: Path) -> None:
    config = engine(model, model__hf_overrides={"a": {"b": 1}})
    before = deepcopy(config)
    weights_identity(config)
    assert config == before
