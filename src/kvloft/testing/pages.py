"""One rank's pages in the layouts that engines register, and what belongs in them.

The bytes of a token are a function of the whole prefix that ends with it (and of layer, group and
rank), so the right content of any block can be worked out from tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloft.geometry import Geometry, Group

Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]

PagesLayout = Literal["own", "packed", "layers_first", "overlaid", "kernel_blocks"]
"""``own``: an allocation per layer. ``packed``: one row per block holds the pages of all layers.
``layers_first``: all blocks of a layer, then those of the next one. ``overlaid``: the n-th layers
of all groups share storage, as block ids are unique across groups. ``kernel_blocks``: a page is
split into rows with padding between them."""

PAGES_LAYOUTS: tuple[PagesLayout, ...] = get_args(PagesLayout)

POISON = 0xA7
"""Fills padding, the null block and blocks that nothing has been computed into yet."""

_MASK = (1 << 64) - 1


def extend_hash(previous: int, token: int) -> int:
    """The hash of a prefix with one more token (splitmix64's finaliser)."""
    value = (previous * 0x9E3779B97F4A7C15 + token + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Pages:
    """The pages of one rank: ``views[group][layer][block]`` are live bytes, in C order."""

    def __init__(
        self, geometry: Geometry, num_blocks: int, *, rank: int, layout: PagesLayout
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._rank = rank
        self._rows: list[npt.NDArray[np.uint8]] = []
        """All memory, block by block: ``(num_blocks, ...)`` each."""
        self.views: dict[int, list[Bytes]] = {}
        getattr(self, f"_make_{layout}")()
        for rows in self._rows:
            rows[...] = POISON
        self._live = {group: self._live_bytes(group) for group in self.views}

    # ---------------------------------------------------------------- layouts

    def _layers(self) -> list[tuple[int, int, int]]:
        """``(group, page bytes, stride bytes)`` of every layer of cacheable groups, in order."""
        return [
            (group.id, run.page_bytes, run.stride_bytes)
            for group in self.geometry.groups
            if group.cacheable
            for run in group.layers
            for _ in range(run.count)
        ]

    def _add(self, group: int, view: Bytes) -> None:
        self.views.setdefault(group, []).append(view)

    def _make_own(self) -> None:
        for group, page, stride in self._layers():
            rows = np.empty((self.num_blocks, stride), dtype=np.uint8)
            self._rows.append(rows)
            self._add(group, rows[:, :page])

    def _make_packed(self) -> None:
        layers = self._layers()
        rows = np.empty((self.num_blocks, sum(stride for _, _, stride in layers)), dtype=np.uint8)
        self._rows.append(rows)
        at = 0
        for group, page, stride in layers:
            self._add(group, rows[:, at : at + page])
            at += stride

    def _make_layers_first(self) -> None:
        layers = self._layers()
        widest = max(stride for _, _, stride in layers)
        slab = np.empty((len(layers), self.num_blocks, widest), dtype=np.uint8)
        self._rows.append(slab.transpose(1, 0, 2))
        for rows, (group, page, _) in zip(slab, layers, strict=True):
            self._add(group, rows[:, :page])

    def _make_overlaid(self) -> None:
        by_place: list[list[tuple[int, int, int]]] = []
        counts: dict[int, int] = {}
        for layer in self._layers():
            place = counts[layer[0]] = counts.get(layer[0], -1) + 1
            if place == len(by_place):
                by_place.append([])
            by_place[place].append(layer)
        for layers in by_place:
            widest = max(stride for _, _, stride in layers)
            rows = np.empty((self.num_blocks, widest), dtype=np.uint8)
            self._rows.append(rows)
            for group, page, _ in layers:
                self._add(group, rows[:, :page])

    def _make_kernel_blocks(self) -> None:
        for group, page, stride in self._layers():
            split = next(n for n in (4, 3, 2, 1) if page % n == 0)
            width = page // split + (stride - page)
            rows = np.empty((self.num_blocks, split, width), dtype=np.uint8)
            self._rows.append(rows)
            self._add(group, rows[:, :, : page // split])

    def _live_bytes(self, group: int) -> list[npt.NDArray[np.bool_]]:
        """Which bytes of a row are live when a block serves ``group``."""
        before = [rows[0].copy() for rows in self._rows]
        for rows in self._rows:
            rows[0] = 0
        for view in self.views[group]:
            view[0] = 1
        out = [rows[0] == 1 for rows in self._rows]
        for rows, old in zip(self._rows, before, strict=True):
            rows[0] = old
        return out

    # ---------------------------------------------------------------- whole blocks

    def poison(self, blocks: Sequence[int]) -> None:
        """Make junk of blocks that have just been handed out."""
        ids = list(blocks)
        for rows in self._rows:
            rows[ids] = POISON

    def padding_intact(self, group: int, block: int) -> bool:
        """Whether everything but the live bytes of ``group`` is as :meth:`poison` left it."""
        return all(
            (rows[block][~live] == POISON).all()
            for rows, live in zip(self._rows, self._live[group], strict=True)
        )

    def snapshot(self) -> list[Bytes]:
        """A copy of all memory."""
        return [rows.copy() for rows in self._rows]

    def changed_blocks(self, before: Sequence[Bytes]) -> set[int]:
        """Blocks of which any byte differs from ``before``."""
        out: set[int] = set()
        for rows, old in zip(self._rows, before, strict=True):
            axes = tuple(range(1, rows.ndim))
            out.update(np.flatnonzero((rows != old).any(axis=axes)).tolist())
        return out

    # ---------------------------------------------------------------- tokens

    def write(
        self, group: Group, first: int, blocks: Sequence[int], hashes: Hashes,
        start: int, end: int,
    ) -> None:  # fmt: skip
        """Compute tokens ``[start, end)`` into ``blocks``, which begin at block index ``first``.

        ``hashes[t]`` is the hash of the prefix that ends with token t.
        """
        for view, (right, mine) in zip(
            self.views[group.id],
            self._expected(group, first, len(blocks), hashes, start, end),
            strict=True,
        ):
            shape = (len(blocks), *view.shape[1:])
            now = view[list(blocks)].reshape(right.shape)
            now[mine] = right[mine]
            view[list(blocks)] = now.reshape(shape)

    def wrong(
        self, group: Group, first: int, blocks: Sequence[int], hashes: Hashes,
        start: int, end: int,
    ) -> bool:  # fmt: skip
        """Whether any byte of tokens ``[start, end)`` is not what :meth:`write` would write."""
        for view, (right, mine) in zip(
            self.views[group.id],
            self._expected(group, first, len(blocks), hashes, start, end),
            strict=True,
        ):
            now = view[list(blocks)].reshape(right.shape)
            if not np.array_equal(now[mine], right[mine]):
                return True
        return False

    def _expected(
        self, group: Group, first: int, count: int, hashes: Hashes, start: int, end: int
    ) -> list[tuple[Bytes, npt.NDArray[np.bool_]]]:
        """Per layer: ``(count, page)`` bytes, and which of them belong to ``[start, end)``."""
        out: list[tuple[Bytes, npt.NDArray[np.bool_]]] = []
        layer = 0
        for run in group.layers:
            right, mine = expected_pages(
                group, run.page_bytes, range(layer, layer + run.count), self._rank,
                first, count, hashes, start, end,
            )  # fmt: skip
            out.extend((right[:, n], mine) for n in range(run.count))
            layer += run.count
        return out


def expected_pages(
    group: Group, page_bytes: int, layers: range, rank: int, first: int, count: int,
    hashes: Hashes, start: int, end: int,
) -> tuple[Bytes, npt.NDArray[np.bool_]]:  # fmt: skip
    """The right bytes of ``count`` blocks from index ``first``, ``(count, layers, page)``, and
    which of them tokens ``[start, end)`` determine, ``(count, page)``.

    A state is one function of the prefix of ``end`` tokens, over its whole page.
    """
    size = group.tokens_per_block
    place = np.arange(page_bytes, dtype=np.uint64)
    if group.kind == "state":
        token = np.full((count, page_bytes), end - 1)
        mine = np.ones((count, page_bytes), dtype=np.bool_)
    else:
        within = np.arange(page_bytes) * size // page_bytes
        token = (np.arange(first, first + count) * size)[:, None] + within
        mine = (token >= start) & (token < end)
    seed = hashes[np.minimum(token, len(hashes) - 1)]
    owner = 0 if group.replicated else rank + 1
    salt = (
        np.array(layers, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)
        + np.uint64(group.id * 1009 + owner)
        + np.uint64(1)
    )
    with np.errstate(over="ignore"):
        mixed = seed[:, None, :] + salt[None, :, None] * np.uint64(0xD6E8FEB86659FD93)
        mixed = (mixed + place) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(56)).astype(np.uint8), mine
