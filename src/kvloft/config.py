"""What a user may say, and what it means: every option is checked here, before any allocation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kvloft.catalog.policies import POLICIES
from kvloft.errors import ConfigError
from kvloft.geometry import MAX_INTEGER, Geometry
from kvloft.plan import ChunkPlan, auto_resume_interval, auto_tokens_per_chunk
from kvloft.units import ceil_div, parse_size

KNOWN_KEYS = (
    "blocks_per_chunk",
    "block_size",
    "cpu_bytes_to_use",
    "eviction_policy",
    "offload_prompt_only",
    "resume_interval",
    "secondary_tiers",
)

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
    for key in extra:
        if key not in KNOWN_KEYS:
            close = difflib.get_close_matches(str(key), KNOWN_KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"unknown option {key!r} in kv_connector_extra_config; {hint}"
                f"known options: {', '.join(KNOWN_KEYS)}"
            )
    if extra.get("blocks_per_chunk") is None and extra.get("block_size") is None:
        tokens = auto_in_engine(geometry)
    else:
        tokens = resolve_chunk(
            geometry,
            blocks_per_chunk=extra.get("blocks_per_chunk"),
            block_size=extra.get("block_size"),
        )
    policy = extra.get("eviction_policy", "lru")
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(
            f"'eviction_policy': {policy!r} is not one of {', '.join(sorted(POLICIES))}"
        )
    prompt_only = extra.get("offload_prompt_only", True)
    if not isinstance(prompt_only, bool):
        raise ConfigError(f"'offload_prompt_only': {prompt_only!r} is neither true nor false")
    tiers = extra.get("secondary_tiers", [])
    if tiers not in ([], ()):
        raise ConfigError(
            f"'secondary_tiers': {tiers!r}: this version keeps chunks in host memory only; "
            "leave the option out or give an empty list"
        )
    return Options(
        tokens_per_chunk=tokens,
        cpu_bytes=_cpu_bytes(extra.get("cpu_bytes_to_use")),
        eviction_policy=policy,
        offload_prompt_only=prompt_only,
        resume_interval=_resume_interval(extra.get("resume_interval", "auto"), geometry, tokens),
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
