"""vLLM's KV-cache tensors as byte views of engine pages, whatever their layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvloft.errors import TransferError

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


def page_view(tensor: torch.Tensor, num_blocks: int) -> Bytes:
    """``(num_blocks, ...)`` bytes of one layer on the CPU; block b's live bytes are ``view[b]``.

    The first dimension of ``tensor`` counts blocks, or kernel blocks that divide them evenly.
    Dimensions are ordered by stride, so that the bytes of a page come in the order of memory.
    Raises :class:`TransferError` for a tensor that has no such view or leaves its storage.
    """
    import torch

    if tensor.device.type != "cpu":
        raise TransferError(
            f"KV cache on {tensor.device}: this version copies from CPU memory only"
        )
    rows, size = tensor.shape[0], tensor.element_size()
    if rows < num_blocks or rows % num_blocks:
        raise TransferError(f"{rows} kernel blocks do not divide into {num_blocks} blocks")
    ratio = rows // num_blocks
    step = tensor.stride(0) * size
    inner = [(ratio, step), (size, 1)]
    inner += [
        (n, stride * size) for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    ]
    shape, strides = _coalesce([dim for dim in inner if dim[0] > 1])
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    start = tensor.storage_offset() * size
    block_stride = step * ratio
    reach = start + (num_blocks - 1) * block_stride
    reach += sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    if min(block_stride, *strides) < 1 or reach > flat.nbytes:
        raise TransferError(
            f"a KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()} leaves its "
            f"storage of {flat.nbytes} bytes"
        )
    view = np.lib.stride_tricks.as_strided(
        flat[start:], (num_blocks, *shape), (block_stride, *strides)
    )
    if math.prod(shape) != tensor[0].numel() * size * ratio:
        raise TransferError(f"a KV cache of shape {tuple(tensor.shape)} has overlapping pages")
    return view


def _coalesce(dims: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Dimensions (size, stride in bytes) from the widest to the tightest, joined where dense."""
    out: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = (out[-1][0] * size, out[-1][1])
        else:
            out.append((size, stride))
    out.reverse()
    return [size for size, _ in out], [stride for _, stride in out]
