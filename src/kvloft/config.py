"""What a user may say, and what it means: every option is checked here, before any allocation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from kvloft.catalog.policies import DEFAULT_POLICY, POLICIES
from kvloft.errors import ConfigError
from kvloft.geometry import MAX_INTEGER, Geometry
from kvloft.plan import ChunkPlan, auto_resume_interval, auto_tokens_per_chunk
from kvloft.tiers.options import DiskOptions
from kvloft.units import ceil_div, parse_size

KNOWN_KEYS = (
    "blocks_per_chunk",
    "block_size",
    "canary",
    "cpu_bytes_to_use",
    "eviction_policy",
    "namespace",
    "offload_prompt_only",
    "resume_interval",
    "secondary_tiers",
    "verify",
)
TIER_TYPES = ("disk",)
DISK_KEYS = ("type", "path", "max_bytes", "write", "wait", "queue_bytes", "threads")
WRITE_RULES = ("all", "reused")
VERIFY_RULES = ("off", "tiers", "always")

_MAX_THREADS = 64
_MAX_NAMESPACE = 200

_MAX_DIGITS = 20
"""Enough to see that a number is too large; Python refuses to read thousands of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """A user's options after validation."""

    tokens_per_chunk: int
    """G: tokens, a multiple of the geometry's unit."""
    cpu_bytes: int
    """Host memory for the whole node, all ranks included."""
    eviction_policy: str
    offload_prompt_only: bool
    """Store what prompts have computed and leave out what was generated (vLLM's default)."""
    resume_interval: int
    """Tokens between the resume points kept inside a long prompt; a multiple of G."""
    tiers: tuple[DiskOptions, ...] = ()
    """Below host memory, in the order in which they are asked."""
    namespace: str | None = None
    """What stands for the model and its weights in persisted names, if the user vouches for it."""
    verify: str = "tiers"
    """Which checksums are looked at: none, those of lower tiers, or those of slots too."""
    canary: float = 0.0
    """The share of requests that are computed although they could be restored, to compare."""


AUTO_MOST_TOKENS = 512
"""``auto`` in an engine takes no longer chunks than this, unless a unit is longer: of a model with
under 2 KiB a token, 1 MiB would be longer than most prompts, and no prefix would ever be reused."""


def auto_in_engine(geometry: Geometry) -> int:
    """What ``auto`` means to the connector: tokens."""
    unit = geometry.unit_tokens
    if any(group.kind == "state" for group in geometry.cacheable):
        # States exist only where the engine ends a step, on some multiple of the unit.
        return unit
    return min(auto_tokens_per_chunk(geometry), max(1, AUTO_MOST_TOKENS // unit) * unit)


def resolve_chunk(
    geometry: Geometry, *, blocks_per_chunk: object = None, block_size: object = None
) -> int:
    """G in tokens from either option, or ``auto`` where neither is given.

    ``blocks_per_chunk`` counts units; on a model with one block size a unit is a block.
    ``block_size`` counts tokens. Raises :class:`ConfigError`.
    """
    unit = geometry.unit_tokens
    if blocks_per_chunk is not None and block_size is not None:
        raise ConfigError(
            f"both 'blocks_per_chunk' ({blocks_per_chunk!r}) and 'block_size' ({block_size!r}) "
            "are given; they say the same thing in units and in tokens: keep one"
        )
    if blocks_per_chunk is not None:
        return _positive("blocks_per_chunk", blocks_per_chunk, "units") * unit
    if block_size is not None:
        tokens = _positive("block_size", block_size, "tokens")
        if tokens % unit:
            lower = max(1, tokens // unit) * unit
            raise ConfigError(
                f"'block_size': {tokens} tokens are no multiple of this model's unit of {unit} "
                f"tokens, the least common multiple of {geometry.unit_causes}; "
                f"write {lower} or {lower + unit}"
            )
        return tokens
    return auto_tokens_per_chunk(geometry)


def parse_options(extra: Mapping[str, object], geometry: Geometry) -> Options:
    """Check ``kv_connector_extra_config``. Raises :class:`ConfigError`; nothing is allocated."""
    _check_keys(extra, KNOWN_KEYS, "kv_connector_extra_config")
    if extra.get("blocks_per_chunk") is None and extra.get("block_size") is None:
        tokens = auto_in_engine(geometry)
    else:
        tokens = resolve_chunk(
            geometry,
            blocks_per_chunk=extra.get("blocks_per_chunk"),
            block_size=extra.get("block_size"),
        )
    policy = extra.get("eviction_policy", DEFAULT_POLICY)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(
            f"'eviction_policy': {policy!r} is not one of {', '.join(sorted(POLICIES))}"
        )
    prompt_only = extra.get("offload_prompt_only", True)
    if not isinstance(prompt_only, bool):
        raise ConfigError(f"'offload_prompt_only': {prompt_only!r} is neither true nor false")
    return Options(
        tokens_per_chunk=tokens,
        cpu_bytes=_cpu_bytes(extra.get("cpu_bytes_to_use")),
        eviction_policy=policy,
        offload_prompt_only=prompt_only,
        resume_interval=_resume_interval(extra.get("resume_interval", "auto"), geometry, tokens),
        tiers=_tiers(extra.get("secondary_tiers")),
        namespace=_namespace(extra.get("namespace")),
        verify=_verify(extra.get("verify", "tiers")),
        canary=_canary(extra.get("canary", 0.0)),
    )


def _verify(value: object) -> str:
    if isinstance(value, str) and value in VERIFY_RULES:
        return value
    raise ConfigError(f"'verify': {_show(value)} is not one of {', '.join(VERIFY_RULES)}")


def _canary(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ConfigError(
        f"'canary': {_show(value)} is no number from 0 to 1; it is the share of requests that are "
        "computed although they could be restored, as in 0.01"
    )


def _check_keys(given: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"unknown option {_show(key)} in {where}; {hint}known options: {', '.join(known)}"
            )


def _namespace(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= _MAX_NAMESPACE:
        return value.strip()
    raise ConfigError(
        f"'namespace': {_show(value)} is no text of 1 to {_MAX_NAMESPACE} printable characters; it "
        "stands for the model and its weights, as in 'llama-3.1-8b/2026-11'"
    )


def _tiers(value: object) -> tuple[DiskOptions, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"'secondary_tiers': {_show(value)} is no list; write "
            '[{"type": "disk", "path": "/directory", "max_bytes": "500GiB"}]'
        )
    tiers = tuple(_tier(entry, f"secondary_tiers[{i}]") for i, entry in enumerate(value))
    paths = [tier.path for tier in tiers]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"'secondary_tiers': two tiers with the path {str(path)!r}")
    return tiers


def _tier(entry: object, where: str) -> DiskOptions:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where!r}: {_show(entry)} is no object with a 'type'")
    kind = entry.get("type")
    if kind not in TIER_TYPES:
        hint = '; for files in a directory write {"type": "disk", "path": …, "max_bytes": …}'
        raise ConfigError(
            f"'{where}.type': {_show(kind)} is not one of {', '.join(TIER_TYPES)}"
            + (hint if kind == "fs" else "")
        )
    _check_keys(entry, DISK_KEYS, where)
    path = entry.get("path")
    if not isinstance(path, str | PathLike) or not Path(path).expanduser().is_absolute():
        raise ConfigError(f"'{where}.path': {_show(path)} is no absolute path of a directory")
    if entry.get("max_bytes") is None:
        raise ConfigError(
            f"'{where}.max_bytes' is missing; give what all files there may take together, in "
            "bytes or as text such as '500GiB'"
        )
    write = entry.get("write", "all")
    if write not in WRITE_RULES:
        raise ConfigError(f"'{where}.write': {_show(write)} is not one of {', '.join(WRITE_RULES)}")
    threads = _positive(f"{where}.threads", entry.get("threads", 4), "threads")
    if threads > _MAX_THREADS:
        raise ConfigError(f"'{where}.threads': {threads} is more than {_MAX_THREADS}")
    return DiskOptions(
        path=Path(os.path.normpath(Path(path).expanduser())),
        max_bytes=size_option(f"{where}.max_bytes", entry["max_bytes"]),
        write=str(write),
        wait_seconds=_wait(entry.get("wait", "auto"), where),
        queue_bytes=size_option(f"{where}.queue_bytes", entry.get("queue_bytes", 256 << 20)),
        threads=threads,
    )


def _wait(value: object, where: str) -> float | None:
    if value == "auto":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 3600:
        return float(value)
    raise ConfigError(
        f"'{where}.wait': {_show(value)} is neither 'auto' nor a number of seconds from 0 to 3600"
    )


def _cpu_bytes(value: object) -> int:
    if value is None:
        raise ConfigError(
            "'cpu_bytes_to_use' is missing; give the host memory for the whole node, all ranks "
            "included, in bytes or as text such as '64GiB'"
        )
    return size_option("cpu_bytes_to_use", value)


def size_option(name: str, value: object) -> int:
    """A size in bytes; raises :class:`ConfigError` that names the option and quotes the value."""
    try:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name!r}: {error}") from error


def _resume_interval(value: object, geometry: Geometry, tokens_per_chunk: int) -> int:
    if value == "auto":
        return auto_resume_interval(ChunkPlan(geometry, tokens_per_chunk))
    tokens = _positive("resume_interval", value, "tokens, or 'auto'")
    return ceil_div(tokens, tokens_per_chunk) * tokens_per_chunk


def _positive(name: str, value: object, unit: str) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        digits = value.strip().lstrip("0")
        number = int(digits[:_MAX_DIGITS] or "0")
    if number is None or number < 1:
        raise ConfigError(f"{name!r}: {_show(value)} is not a whole number of 1 or more ({unit})")
    if number > MAX_INTEGER:
        raise ConfigError(
            f"{name!r}: {_show(value)} is more than {MAX_INTEGER}, the most there can be ({unit})"
        )
    return number


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
