"""Copies between CPU pages and slots at the speed of memcpy.

numpy's strided assignment moves whole contiguous rows with memcpy and without the interpreter's
lock, so what counts is to give it much per call. Two things do: layers that lie at equal distances
become one array with a layer axis, and block ids that follow one another become one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloft.errors import TransferError
from kvloft.jobs import Job
from kvloft.plan import BlockCounts, ChunkPlan
from kvloft.transfer.base import PageViews, check_job

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Strip:
    """Consecutive layers of a run that one array covers: ``(num_blocks, layers, ...)``."""

    pages: Bytes
    first: int
    """Place of its first layer in the run."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One strip's place in a slot."""

    pages: Bytes
    first: int
    whole: bool
    """Whether the strip is the whole run, so that its pages lie one behind the other in the slot."""
    rows: tuple[int, ...]
    offset: int
    block_bytes: int
    shared: bool


class CpuCopier:
    """One rank's copier. Copies are done when a call returns; see :class:`kvloft.transfer.Copier`."""

    def __init__(self, plan: ChunkPlan, views: PageViews, arena: Bytes, *, rank: int) -> None:
        """``arena``: the mapping's memory. Raises :class:`TransferError` if views and plan differ."""
        self._plan = plan
        self._arena = arena
        self._rank = rank
        self._strips: dict[tuple[int, int], list[_Strip]] = {}
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
                    if view.dtype != np.uint8 or view[0].nbytes != run.page_bytes:
                        raise TransferError(
                            f"group {group.id}: a page of {view[0].nbytes} bytes where the "
                            f"geometry has {run.page_bytes}"
                        )
                    sizes.add(len(view))
                self._strips[group.id, index] = list(_merge(own))
        if len(sizes) != 1:
            raise TransferError(f"pages of pools of different lengths: {sorted(sizes)}")
        self._num_blocks = sizes.pop()
        self._programs: dict[BlockCounts, dict[int, list[_Step]]] = {}

    def store(self, job: Job) -> None:
        """Fill slots from pages."""
        check_job(job, self._plan, len(self._arena), self._num_blocks)
        for target, pages in self._moves(job, writes=True):
            target[...] = pages

    def load(self, job: Job) -> None:
        """Fill pages from slots."""
        check_job(job, self._plan, len(self._arena), self._num_blocks)
        for source, pages in self._moves(job, writes=False):
            pages[...] = source

    def _moves(self, job: Job, *, writes: bool) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of equal shape: a piece of a slot, and the pages that it holds."""
        arena = self._arena
        for copy in job.copies:
            program = self._programs.get(copy.counts) or self._compile(copy.counts)
            for part in copy.parts:
                for step in program[part.group]:
                    if writes and step.shared and self._rank:
                        continue  # Rank 0 writes the one copy of what all ranks hold alike.
                    at = copy.offset + step.offset + part.first * step.block_bytes
                    for ids in _runs(part.block_ids):
                        pages = step.pages[ids]
                        if step.whole:
                            size = pages.size
                            yield arena[at : at + size].reshape(pages.shape), pages
                        else:
                            size = len(pages) * step.block_bytes
                            rows = arena[at : at + size].reshape(len(pages), *step.rows)
                            yield rows[:, step.first : step.first + pages.shape[1]], pages
                        at += size

    def _compile(self, counts: BlockCounts) -> dict[int, list[_Step]]:
        """What to do for each group of a slot with these blocks; made once per class of chunk."""
        program: dict[int, list[_Step]] = {group: [] for group, _ in counts}
        for section in self._plan.layout(counts).sections:
            offset = section.offset + self._rank * section.rank_stride
            for strip in self._strips[section.group, section.run]:
                program[section.group].append(
                    _Step(
                        pages=strip.pages,
                        first=strip.first,
                        whole=strip.pages.shape[1] == section.count,
                        rows=(section.count, *strip.pages.shape[2:]),
                        offset=offset,
                        block_bytes=section.count * section.page_bytes,
                        shared=not section.rank_stride,
                    )
                )
        self._programs[counts] = program
        return program


def _runs(ids: Sequence[int]) -> Iterator[slice]:
    """``ids`` as slices of ascending or descending neighbours, in order."""
    start, total = 0, len(ids)
    while start < total:
        first, end, step = ids[start], start + 1, 1
        if end < total and abs(ids[end] - first) == 1:
            step = ids[end] - first
            while end < total and ids[end] - ids[end - 1] == step:
                end += 1
        stop = first + step * (end - start)
        yield slice(first, stop if stop >= 0 else None, step)
        start = end


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
        yield _Strip(_with_layer_axis(views[start:end], distance), start)
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
