"""Geometries for property tests: hypothesis strategies, and real models made small.

Importing this needs hypothesis.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from kvloft.geometry import Geometry, Group, Layers, from_dict, known_names, load
from kvloft.plan import ChunkPlan

_MAX_UNIT = 48


def scaled_down(geometry: Geometry, *, max_page_bytes: int = 24, max_layers: int = 2) -> Geometry:
    """The same groups with small pages, few layers, and all tokens divided by a common factor.

    Which sizes divide which, whose windows are longer than a block or a unit, whose pages are
    padded and which are the larger ones stay as they are; one block of the smallest group keeps
    at least two tokens where it had more than one.
    """
    sizes = [geometry.tokens_per_hash]
    for group in geometry.cacheable:
        sizes += [group.tokens_per_block, group.window, group.attention_chunk]
        sizes.append(group.extra_retained_tokens)
    factor = math.gcd(*sizes)
    # A power of two less leaves blocks that begin and end inside a window.
    smallest = min(group.tokens_per_block for group in geometry.cacheable)
    if smallest == factor and factor % 2 == 0:
        factor //= 2
    largest = max(run.page_bytes for group in geometry.groups for run in group.layers)
    return replace(
        geometry,
        tokens_per_hash=geometry.tokens_per_hash // factor,
        groups=tuple(
            replace(
                group,
                tokens_per_block=max(1, group.tokens_per_block // factor),
                window=group.window // factor,
                attention_chunk=group.attention_chunk // factor,
                extra_retained_tokens=group.extra_retained_tokens // factor,
                layers=tuple(
                    _small_layers(run, largest, max_page_bytes, max_layers) for run in group.layers
                ),
            )
            for group in geometry.groups
        ),
    )


def _small_layers(run: Layers, largest: int, max_page_bytes: int, max_layers: int) -> Layers:
    page = max(3, run.page_bytes * max_page_bytes // largest)
    padding = 0 if run.stride_bytes == run.page_bytes else 5
    return Layers(min(run.count, max_layers), page, page + padding)


def shipped() -> dict[str, Geometry]:
    """The geometries of known models, made small, by name."""
    return {name: scaled_down(load(name)) for name in known_names()}


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layers, ...]:
    """One or two runs of layers, some padded."""
    runs = []
    for _ in range(draw(st.integers(1, 2))):
        page = draw(st.integers(1, 16))
        runs.append(
            Layers(draw(st.integers(1, 2)), page, page + draw(st.sampled_from([0, 0, 1, 7])))
        )
    return tuple(runs)


@st.composite
def groups(draw: st.DrawFn, index: int, kind: str, tokens_per_block: int) -> Group:
    """A group of a kind. Windows are anything from one token to several units."""
    window = extra = chunk = 0
    if kind == "window":
        window = draw(st.one_of(st.integers(1, 12), st.integers(1, 3 * _MAX_UNIT)))
        extra = draw(st.sampled_from([0, 0, 0, 1, 3, tokens_per_block]))
    if kind == "chunked_local":
        chunk = draw(st.one_of(st.integers(1, 12), st.integers(1, 2 * _MAX_UNIT)))
    return Group(
        id=index,
        kind=kind,  # type: ignore[arg-type]
        tokens_per_block=tokens_per_block,
        layers=draw(layers()),
        window=window,
        attention_chunk=chunk,
        extra_retained_tokens=extra,
        cacheable=kind != "ring",
        draft=kind in ("full", "window") and draw(st.integers(0, 5)) == 0,
        replicated=draw(st.booleans()),
    )


@st.composite
def geometries(draw: st.DrawFn, max_unit: int = _MAX_UNIT) -> Geometry:
    """Geometries of all kinds of groups whose unit has at most ``max_unit`` tokens.

    Block sizes are odd as often as even, and smaller or larger than the hash unit. There may be no
    ``full`` group. State groups share one block size, as in vLLM.
    """
    divisors = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    unit = draw(divisors)
    sizes = [unit]
    for _ in range(2):
        if math.lcm(unit, size := draw(divisors)) <= max_unit:
            unit = math.lcm(unit, size)
            sizes.append(size)
    kinds = draw(
        st.lists(
            st.sampled_from(["full", "full", "window", "window", "chunked_local", "state", "ring"]),
            min_size=1,
            max_size=5,
        ).filter(lambda found: set(found) != {"ring"})
    )
    state_size = draw(st.sampled_from(sizes))
    made = [
        draw(groups(i, kind, state_size if kind == "state" else draw(st.sampled_from(sizes))))
        for i, kind in enumerate(kinds)
    ]
    geometry = Geometry(
        groups=tuple(made),
        tokens_per_hash=draw(st.sampled_from(sizes)),
        tensor_parallel=draw(st.integers(1, 3)),
    )
    return from_dict(geometry.to_dict(), where="generated")


@st.composite
def plans(draw: st.DrawFn, max_unit: int = _MAX_UNIT) -> ChunkPlan:
    """A generated or a known geometry, cut into chunks of one to three units."""
    geometry = draw(st.one_of(geometries(max_unit), st.sampled_from(list(shipped().values()))))
    return ChunkPlan(geometry, geometry.unit_tokens * draw(st.integers(1, 3)))
