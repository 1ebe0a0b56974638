"""Copies between CPU pages and slots at the speed of memcpy.

numpy's strided assignment moves whole contiguous rows with memcpy and without the interpreter's
lock, so what counts is to give it much per call. Two things do: layers that lie at equal distances
become one array with a layer axis, and neighbouring blocks of both memories become one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloft.errors import TransferError
from kvloft.jobs import Job
from kvloft.plan import ChunkPlan
from kvloft.transfer.base import PageViews, check_job
from kvloft.transfer.likeness import unlike
from kvloft.transfer.moves import Mover

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Strip:
    """Consecutive layers of a run that one array covers: ``(num_blocks, layers, ...)``."""

    pages: Bytes
    first: int
    """Place of its first layer in the run."""
    run_layers: int
    """Layers of the run; where the strip has them all, its pages lie one behind the other."""

    def rows(self, slots: Bytes, blocks: int) -> Bytes:
        """The strip's part of memory that holds ``blocks`` blocks of the run."""
        _, layers, *page = self.pages.shape
        if layers == self.run_layers:
            return slots.reshape(blocks, layers, *page)
        whole = slots.reshape(blocks, self.run_layers, *page)
        return whole[:, self.first : self.first + layers]


class CpuCopier:
    """One rank's :class:`kvloft.transfer.Copier`; copies are done when a call returns."""

    def __init__(self, plan: ChunkPlan, views: PageViews, arena: Bytes, *, rank: int) -> None:
        """``arena``: the mapping's memory. Raises :class:`TransferError` where views do not fit."""
        self._plan = plan
        self._arena = arena
        self._mover = Mover(plan, rank)
        self._strips: dict[tuple[int, int], list[_Strip]] = {}
        """By group and run of layers."""
        sizes = set()
        for group in plan.geometry.cacheable:
            layers = list(views.get(group.id, ()))
            expected = sum(run.count for run in group.layers)
            if len(layers) != expected:
                raise TransferError(
                    f"group {group.id} has {len(layers)} layers of pages, the geometry {expected}"
                )
            for index, run in enumerate(group.layers):
                own, layers = layers[: run.count], layers[run.count :]
                for view in own:
                    page_bytes = view.nbytes // len(view) if len(view) else 0
                    if view.dtype != np.uint8 or page_bytes != run.page_bytes:
                        raise TransferError(
                            f"group {group.id}: a page of {page_bytes} bytes where the "
                            f"geometry has {run.page_bytes}"
                        )
                    sizes.add(len(view))
                self._strips[group.id, index] = list(_merge(own))
        if len(sizes) != 1:
            raise TransferError(f"pages of pools of different lengths: {sorted(sizes)}")
        self._num_blocks = sizes.pop()

    def store(self, job: Job) -> None:
        """Fill slots from pages."""
        check_job(job, self._plan, len(self._arena), self._num_blocks)
        for pages, slots in self._pairs(job, writes=True):
            slots[...] = pages

    def load(self, job: Job) -> None:
        """Fill pages from slots."""
        check_job(job, self._plan, len(self._arena), self._num_blocks)
        for pages, slots in self._pairs(job, writes=False):
            pages[...] = slots

    def difference(self, job: Job) -> float:
        """How unlike pages and slots are where they differ most."""
        check_job(job, self._plan, len(self._arena), self._num_blocks)
        most = 0.0
        for pages, slots in self._pairs(job, writes=False):
            count = pages.shape[0] * pages.shape[1]
            most = max(most, unlike(pages.reshape(count, -1), slots.reshape(count, -1)))
        return most

    def _pairs(self, job: Job, *, writes: bool) -> Iterator[tuple[Bytes, Bytes]]:
        """Pages and their place in slots, of equal shape; neighbours in both become one pair."""
        for move in self._mover.moves(job, writes=writes):
            ids, places, size = move.ids, move.places, move.block_bytes
            if writes:
                # In the order of the pages: reading on where one has just read is what memory is
                # good at, and a writer has no such preference. Engines often give ids in falling
                # order.
                order = np.argsort(ids, kind="stable")
                ids, places = ids[order], places[order]
            apart = (np.diff(ids) != 1) | (np.diff(places) != size)
            edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(ids)]
            firsts, starts = ids[edges[:-1]].tolist(), places[edges[:-1]].tolist()
            for strip in self._strips[move.group, move.run]:
                for n, (block, at) in enumerate(zip(firsts, starts, strict=True)):
                    blocks = edges[n + 1] - edges[n]
                    slots = self._arena[at : at + blocks * size]
                    yield strip.pages[block : block + blocks], strip.rows(slots, blocks)


def _merge(views: Sequence[Bytes]) -> Iterator[_Strip]:
    """Join neighbouring layers whose pages lie at equal distances under one array."""
    start = 0
    while start < len(views):
        end = start + 1
        distance = 0
        while end < len(views) and _alike(views[start], views[end]):
            gap = _address(views[end]) - _address(views[end - 1])
            if end == start + 1:
                distance = gap
            if gap != distance or gap == 0:
                break
            end += 1
        yield _Strip(_with_layer_axis(views[start:end], distance), start, len(views))
        start = end


def _alike(a: Bytes, b: Bytes) -> bool:
    return a.shape == b.shape and a.strides == b.strides


def _address(view: Bytes) -> int:
    return int(view.__array_interface__["data"][0])


class _Span:
    """Memory of several views as one array; keeps their owners alive."""

    def __init__(self, views: Sequence[Bytes], distance: int) -> None:
        first = views[0]
        self.owners = list(views)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (_address(first), False),
            "shape": (first.shape[0], len(views), *first.shape[1:]),
            "strides": (first.strides[0], distance, *first.strides[1:]),
        }


def _with_layer_axis(views: Sequence[Bytes], distance: int) -> Bytes:
    if len(views) == 1:
        return views[0][:, np.newaxis]
    return np.asarray(_Span(views, distance))
