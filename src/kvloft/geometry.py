"""The geometry of a model's KV cache: which groups it has and what one block of each holds.

Every other part of KVLoft reads this one object instead of assuming one block size for a whole
model (vllm-project/vllm#48878 is what that assumption costs). It is pure data: no engine, no torch.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

from kvloft.errors import GeometryError
from kvloft.units import ceil_div

SCHEMA = "kvloft-geometry/1"

Kind = Literal["full", "window", "chunked_local", "state", "ring"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_INTEGER = 2**53 - 1
"""Of a field, and of the unit: what every JSON reader keeps exact."""
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Layers:
    """A run of layers of one group whose pages have the same size."""

    count: int
    """How many layers."""
    page_bytes: int
    """Live bytes of one layer in one block, on one rank."""
    stride_bytes: int
    """Bytes from one block's page to the next one's; what is above ``page_bytes`` is padding."""


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    id: int
    """The group's index in the engine, which every per-group tuple keeps (ring groups included)."""
    kind: Kind
    tokens_per_block: int
    layers: tuple[Layers, ...]
    window: int = 0
    """Tokens that a ``window`` group attends to, the current one included."""
    attention_chunk: int = 0
    """Tokens of one local-attention chunk of a ``chunked_local`` group."""
    extra_retained_tokens: int = 0
    """Tokens behind the window that the engine keeps besides."""
    cacheable: bool = True
    draft: bool = False
    """A drafter's group: its last unit may still be rewritten while decoding."""
    replicated: bool = False
    """Every rank holds the same bytes, so that one copy serves all of them."""

    @cached_property
    def block_bytes(self) -> int:
        """Live bytes of one block over the group's layers, on one rank."""
        return sum(run.count * run.page_bytes for run in self.layers)

    @property
    def reach(self) -> int:
        """Tokens before a boundary that a ``window`` group needs in order to resume there."""
        return self.window - 1 + self.extra_retained_tokens if self.kind == "window" else 0

    def resume_start(self, boundary: int) -> int:
        """First token (0-based) that a request resuming at ``boundary`` needs of this group.

        Equals ``boundary`` where nothing is needed. A ``state`` group needs the one state at
        ``boundary``, which lives in the block that ends there.
        """
        match self.kind:
            case "full":
                return 0
            case "window":
                return max(0, boundary - self.reach)
            case "chunked_local":
                return boundary // self.attention_chunk * self.attention_chunk
            case "state":
                return max(0, boundary - self.tokens_per_block)
            case "ring":
                return boundary

    def resume_blocks(self, boundary: int) -> range:
        """Indices into the block table of the blocks that a resume at ``boundary`` needs.

        ``boundary`` is a multiple of ``tokens_per_block``.
        """
        first = self.resume_start(boundary) // self.tokens_per_block
        return range(first, boundary // self.tokens_per_block)


@dataclass(frozen=True)
class Geometry:
    """All groups of one model, as one rank sees them, and the unit that they have in common."""

    groups: tuple[Group, ...]
    tokens_per_hash: int
    tensor_parallel: int = 1
    name: str = ""
    model: str = ""
    dtype: str = ""
    source: str = ""
    where: str = field(default="", compare=False)
    """Where it was read from, for messages."""

    @cached_property
    def cacheable(self) -> tuple[Group, ...]:
        """The groups that take part in hits, stores, loads and sizing."""
        return tuple(group for group in self.groups if group.cacheable)

    @cached_property
    def unit_tokens(self) -> int:
        """U: the least number of tokens that is whole in hashes and in blocks of every group."""
        return math.lcm(self.tokens_per_hash, *(g.tokens_per_block for g in self.cacheable))

    @cached_property
    def unit_causes(self) -> str:
        """Which sizes the unit comes from, for a person: ``64 (hash), 3584 (groups 0, 2)``."""
        by_size: dict[int, list[str]] = {}
        for group in self.cacheable:
            by_size.setdefault(group.tokens_per_block, []).append(str(group.id))
        parts = [f"{self.tokens_per_hash} (hash)"]
        for size, ids in by_size.items():
            parts.append(f"{size} (group{'s' if len(ids) > 1 else ''} {', '.join(ids)})")
        return ", ".join(parts)

    def copies(self, group: Group) -> int:
        """How many ranks hold bytes of ``group`` of their own."""
        return 1 if group.replicated else self.tensor_parallel

    def to_dict(self) -> dict[str, Any]:
        """The file format's form: defaults are left out."""
        out: dict[str, Any] = {"schema": SCHEMA}
        for key in ("name", "model", "dtype"):
            if value := getattr(self, key):
                out[key] = value
        out["tokens_per_hash"] = self.tokens_per_hash
        out["tensor_parallel"] = self.tensor_parallel
        if self.source:
            out["source"] = self.source
        out["groups"] = [_group_to_dict(group) for group in self.groups]
        return out

    def save(self, path: str | Path) -> None:
        """Write the geometry to a file in the format that :func:`load` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def make_geometry(
    groups: Sequence[Group], tokens_per_hash: int, *, tensor_parallel: int = 1, **names: str
) -> Geometry:
    """A geometry that has been checked; raises :class:`GeometryError` where a rule is broken."""
    geometry = Geometry(tuple(groups), tokens_per_hash, tensor_parallel, **names)
    return from_dict(geometry.to_dict(), where=names.get("where") or "geometry")


def _group_to_dict(group: Group) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": group.id,
        "kind": group.kind,
        "tokens_per_block": group.tokens_per_block,
    }
    for key in ("window", "attention_chunk", "extra_retained_tokens"):
        if value := getattr(group, key):
            out[key] = value
    if not group.cacheable:
        out["cacheable"] = False
    for key in ("draft", "replicated"):
        if getattr(group, key):
            out[key] = True
    out["layers"] = [
        {"count": run.count, "page_bytes": run.page_bytes, "stride_bytes": run.stride_bytes}
        for run in group.layers
    ]
    return out


_TOP_KEYS = {
    "schema", "name", "model", "dtype", "tokens_per_hash", "tensor_parallel", "source", "groups",
}  # fmt: skip
_GROUP_KEYS = {
    "id", "kind", "tokens_per_block", "window", "attention_chunk", "extra_retained_tokens",
    "cacheable", "draft", "replicated", "layers",
}  # fmt: skip
_LAYER_KEYS = {"count", "page_bytes", "stride_bytes"}


class _Reader:
    """Takes typed fields out of one JSON object and names the place of what is wrong."""

    def __init__(self, obj: object, place: str, known: set[str]) -> None:
        if not isinstance(obj, Mapping):
            raise GeometryError(f"{place}: {_show(obj)} is not a JSON object")
        self.obj, self.place = obj, place
        for key in obj:
            if key not in known:
                raise GeometryError(
                    f"{place}: unknown field {_show(key)}; known fields: {', '.join(sorted(known))}"
                )

    def fail(self, key: str, problem: str) -> GeometryError:
        return GeometryError(f"{self.place}: field {key!r}: {problem}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.obj.get(key, default)
        if value is None:
            raise self.fail(key, f"is missing; it is an integer of {least} or more")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"{_show(value)} is not an integer of {least} or more")
        if value > MAX_INTEGER:
            raise self.fail(key, f"{_show(value)} is more than {MAX_INTEGER}, the greatest")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.obj.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"{_show(value)} is neither true nor false")
        return value

    def text(self, key: str) -> str:
        value = self.obj.get(key, "")
        if not isinstance(value, str):
            raise self.fail(key, f"{_show(value)} is not text")
        return value

    def items(self, key: str) -> Sequence[object]:
        value = self.obj.get(key)
        if not isinstance(value, list) or not value:
            raise self.fail(key, f"{_show(value)} is not a list of at least one entry")
        return value


_brief = reprlib.Repr()  # Bounds depth as well: plain repr() overflows the stack on deep nesting.
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


def _show(value: object) -> str:
    text = _brief.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_dict(data: object, *, where: str = "geometry") -> Geometry:
    """Check and build a geometry from its file form.

    Raises :class:`GeometryError` that names the file (``where``), the group and the field.
    """
    top = _Reader(data, where, _TOP_KEYS)
    if (schema := top.obj.get("schema")) != SCHEMA:
        raise top.fail("schema", f"{_show(schema)} is not {SCHEMA!r}")
    groups = tuple(_read_group(obj, index, where) for index, obj in enumerate(top.items("groups")))
    if not any(group.cacheable for group in groups):
        raise GeometryError(
            f"{where}: field 'groups': no cacheable group among the {len(groups)}; "
            "a model with scratch groups alone has nothing to store"
        )
    geometry = Geometry(
        groups=groups,
        tokens_per_hash=top.integer("tokens_per_hash"),
        tensor_parallel=top.integer("tensor_parallel", 1),
        name=top.text("name"),
        model=top.text("model"),
        dtype=top.text("dtype"),
        source=top.text("source"),
        where=where,
    )
    if geometry.unit_tokens > MAX_INTEGER:
        raise GeometryError(
            f"{where}: field 'groups': no chunk can hold whole blocks of every group: the least "
            f"common multiple of {geometry.unit_causes} is {_show(geometry.unit_tokens)} tokens"
        )
    return geometry


def _read_group(obj: object, index: int, where: str) -> Group:
    place = f"{where}: group {index}"
    read = _Reader(obj, place, _GROUP_KEYS)
    if (given := read.integer("id", index, least=0)) != index:
        raise read.fail("id", f"{given} is not the group's place in the list, {index}")
    kind = read.obj.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise read.fail("kind", f"{_show(kind)} is not one of {', '.join(KINDS)}")
    for key, owner in (
        ("window", "window"),
        ("attention_chunk", "chunked_local"),
        ("extra_retained_tokens", "window"),
    ):
        # A writer that spells out the default of what a kind does not have says nothing wrong.
        spelled_out = key == "extra_retained_tokens" and _show(read.obj.get(key)) == "0"
        if key in read.obj and kind != owner and not spelled_out:
            raise read.fail(key, f"belongs to groups of kind {owner!r}, not {kind!r}")
    cacheable = read.flag("cacheable", kind != "ring")
    if kind == "ring" and cacheable:
        raise read.fail("cacheable", "True, but a 'ring' group is scratch and is never cacheable")
    return Group(
        id=index,
        kind=cast(Kind, kind),
        tokens_per_block=read.integer("tokens_per_block"),
        layers=tuple(
            _read_layers(item, f"{place}: layers {n}")
            for n, item in enumerate(read.items("layers"))
        ),
        window=read.integer("window") if kind == "window" else 0,
        attention_chunk=read.integer("attention_chunk") if kind == "chunked_local" else 0,
        extra_retained_tokens=read.integer("extra_retained_tokens", 0, least=0),
        cacheable=cacheable,
        draft=read.flag("draft", False),
        replicated=read.flag("replicated", False),
    )


def _read_layers(obj: object, place: str) -> Layers:
    read = _Reader(obj, place, _LAYER_KEYS)
    layers = Layers(
        count=read.integer("count"),
        page_bytes=read.integer("page_bytes"),
        stride_bytes=read.integer("stride_bytes"),
    )
    if layers.page_bytes > layers.stride_bytes:
        raise read.fail(
            "page_bytes",
            f"{layers.page_bytes} live bytes do not fit in 'stride_bytes' {layers.stride_bytes}",
        )
    return layers


def known_names() -> tuple[str, ...]:
    """The models whose geometries ship with the package."""
    folder = resources.files("kvloft") / "geometries"
    return tuple(sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".json")))


def load(source: str | Path) -> Geometry:
    """The geometry in a file, or of a well-known model by its name (:func:`known_names`).

    Raises :class:`GeometryError` for what can't be read, isn't JSON or breaks a rule.
    """
    if (name := str(source)) in known_names():
        entry = resources.files("kvloft") / "geometries" / f"{name}.json"
        return _parse(entry.read_bytes(), name)
    try:
        with Path(source).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise GeometryError(
            f"{name!r} is neither a readable file ({reason}) nor a model known by name: "
            f"{', '.join(known_names())}"
        ) from error
    return _parse(data, name)


def _parse(data: bytes, where: str) -> Geometry:
    if len(data) > _MAX_FILE_BYTES:
        raise GeometryError(f"{where}: not a geometry file: more than {_MAX_FILE_BYTES} bytes")
    try:
        obj = json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise GeometryError(f"{where}: not a JSON file: {error}") from error
    return from_dict(obj, where=where)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in obj if names.count(key) > 1)
        raise ValueError(f"field {_show(twice)} is given twice in one object")
    return obj


def blocks_between(start: int, end: int, tokens_per_block: int) -> range:
    """Block-table indices of the blocks that meet tokens ``[start, end)``."""
    return range(start // tokens_per_block, ceil_div(end, tokens_per_block))
