"""How the Hopper kernels see tensors through TMA, and what both directions' launches take from a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashtile.backends.gpu.launch import DEFAULT, PLAIN, TensorMap
from flashtile.backends.gpu.records import geometry
from flashtile.call.problem import AHEAD, Tensors

# Bounds beyond any length are the same as none, and 32-bit arithmetic on positions must not overflow.
_FAR = 2**30


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; if tensors only show a layout, of the GPU that is built for, or 1."""
    gpu = AHEAD.get() if device.type == "meta" else None
    return _num_sms(device) if gpu is None else int(gpu.multiprocessors)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return 1 if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


def side_of(bound: int | None) -> int | None:
    """A side of the band as kernels take it."""
    return None if bound is None else max(-_FAR, min(_FAR, bound))


def is_readable(tensor: Tensor) -> bool:
    """Whether TMA can read it: on 16 bytes, rows of contiguous elements, all strides multiples of 16 bytes."""
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
        return False
    vector_width = 16 // tensor.element_size()
    if tensor.is_contiguous() and tensor.shape[-1] % vector_width == 0:
        return True
    return all(
        n <= 1 or (s > 0 and s % vector_width == 0)
        for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    )


def is_one(cache: Tensor) -> bool:
    """Whether a map may have the rows of all entries of a cache as rows of one tensor, counted in 32 bits.

    They are as far from one another as its stride says, even if entries have one row each.
    """
    count, (entry, row) = cache.shape[0], cache.stride()[:2]
    is_whole = row > 0 and row * cache.element_size() % 16 == 0 and entry % row == 0
    return is_whole and count * entry // row < 2**30


def box(rows: int, cols: int, varlen: bool) -> tuple[int, ...]:
    """The tile that one TMA copy moves, in the dimensions of its map."""
    return (1, 1, rows, 1, cols) if varlen else (1, rows, 1, cols)


def rows_map(name: str, tensor: Tensor, rows: int, cols: int, varlen: bool) -> TensorMap:
    """Boxes of rows and columns of one head of a tensor (batch, rows, heads, dim), or packed (rows, heads, dim).

    The operand has this name.
    """
    return TensorMap(
        tensor.dtype, *geometry(tensor.shape, tensor.stride(), varlen), box(rows, cols, varlen), DEFAULT, name
    )


def entries_map(name: str, cache: Tensor, rows: int, cols: int) -> TensorMap:
    """``rows_map`` of a cache (entries, rows, heads, dim), its entries or pages taken as packed one after another."""
    _, row, head, _ = cache.stride()
    _, _, heads, dim = cache.shape
    shape, strides = geometry((2, heads, dim), (row, head if heads > 1 else dim, 1), varlen=True)
    return TensorMap(cache.dtype, shape, strides, box(rows, cols, True), DEFAULT, name)


def contiguous_map(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], rows: int, cols: int, varlen: bool
) -> TensorMap:
    """``rows_map`` of a contiguous tensor that need not exist yet."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return TensorMap(dtype, *geometry(shape, tuple(strides[::-1]), varlen), box(rows, cols, varlen), DEFAULT, name)


def floats_map(lines: int, width: int, rows: int, offset: int = 0) -> TensorMap:
    """Boxes of ``rows`` lines of the workspace's float32 [lines, width], in shared memory as they lie there."""
    return TensorMap(torch.float32, (lines, width), (width, 1), (rows, width), PLAIN, "work", offset)


def score_map(tensor: Tensor | None, rows: int, cols: int) -> TensorMap | None:
    """Boxes of rows and keys of a bias or mask over (batch, heads, rows, keys), or None where TMA cannot read it.

    Whatever it broadcasts along has size 1 in the map, and then a box has one row.
    """
    if tensor is None or tensor.dtype == torch.float64 or tensor.dim() == 0:
        return None
    # Where it broadcasts along keys, TMA would fill all but the first key with 0.
    if tensor.stride(-1) != 1 or tensor.shape[-1] == 1:
        return None
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    own = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not is_readable(tensor.as_strided(own, tensor.stride())):
        return None
    shape = (1,) * (4 - tensor.dim()) + own
    # A dimension of size 1 may have any stride that is legal for TMA.
    strides = (16,) * (4 - tensor.dim()) + tensor.stride()
    strides = tuple(16 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False))
    sides = (1, 1, 1 if shape[2] == 1 else rows, cols)
    return TensorMap(tensor.dtype, shape, (*strides, 1), sides, PLAIN if sides[2] == 1 else DEFAULT)


def score_bytes(tensors: Tensors) -> tuple[int, int]:
    """What TMA can read of the bias and the mask, as in ``ForwardTiles``."""
    if tensors.attn_bias is None and tensors.attn_mask is None:
        return 0, 0
    maps = [score_map(tensor, 64, 64) for tensor in (tensors.attn_bias, tensors.attn_mask)]
    sizes = [(each.box[2] > 1, each.dtype.itemsize) for each in maps if each is not None]
    return sum(size for own, size in sizes if own), sum(size for own, size in sizes if not own)
