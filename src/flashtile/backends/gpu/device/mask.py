"""Masks, applied as selects: the band, and a boolean tensor.

A row is at key position ``i = row + seqlen_k - seqlen_q``; a band keeps the keys ``i - left <= j <= i + right``. The
end of the keys and the band's right side fold into one number per row, so a masked score costs one comparison and one
select for each bounded side.

A ``MaskMod`` is a further mask, a ``@triton.jit`` function ``function(x, operands, head, i, j, fill)``, which returns x
where the row keeps the key and fill elsewhere; head is ``scores.Head``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import sequence


class Band(NamedTuple):
    """How many keys before and after its own position a row keeps; None for all."""

    left: Any
    right: Any


class MaskMod(NamedTuple):
    """One mask of a call; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        function: See the module's docstring; None for a mask that the call does not have.
        of_head: ``of_head(operands, b, h, seqlen_q, seqlen_k)`` reads once per head what function takes as operands;
            None where those are the same for all heads.
        operands: The argument of of_head; without of_head, the function's own.
    """

    function: Any
    of_head: Any
    operands: Any


class ScoreTensor(NamedTuple):
    """A bias or mask over (batch, heads, rows, keys), with stride 0 where it broadcasts; ptr is None without one.

    The number of keys and the strides but for stride_col are multiples of UNIT, so that a load takes UNIT keys at once.
    It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any
    UNIT: Any = 1


class HeadTensor(NamedTuple):
    """A ``ScoreTensor`` of one head: base is the address of row position 0 and key 0."""

    base: Any
    stride_row: Any
    stride_col: Any
    seqlen_k: Any


@triton.jit
def first_key(i, left, HAS_LEFT: tl.constexpr):
    """The first key that row position i keeps, inclusive."""
    first = i * 0
    if HAS_LEFT:
        first = i - left
    return first


@triton.jit
def last_key(i, seqlen_k, right, HAS_RIGHT: tl.constexpr):
    """The last key that row position i keeps, inclusive."""
    last = i * 0 + (seqlen_k - 1)
    if HAS_RIGHT:
        last = tl.minimum(i + right, last)
    return last


@triton.jit
def select_band(x, band, head, i, j, fill):
    """x, or fill where a row's band or the end of the keys excludes the key.

    Selects are chained instead of joining booleans: packing and unpacking those costs more than a select.
    """
    x = tl.where(j <= last_key(i, head.seqlen_k, band.right, band.right is not None), x, fill)
    if band.left is not None:
        x = tl.where(j >= first_key(i, band.left, True), x, fill)
    return x


@triton.jit
def tensor_of_head(tensor, b, h, seqlen_q, seqlen_k):
    """The ``HeadTensor`` of a ``ScoreTensor``."""
    stride_b, stride_head = multiple(tensor.stride_b, tensor.UNIT), multiple(tensor.stride_head, tensor.UNIT)
    stride_row = multiple(tensor.stride_row, tensor.UNIT)
    at = sequence.base(tensor.ptr, b, 0, h, stride_b, 0, stride_head)
    base = at - tl.cast(seqlen_k - seqlen_q, tl.int64) * stride_row
    return HeadTensor(base, stride_row, tensor.stride_col, multiple(seqlen_k, tensor.UNIT))


@triton.jit
def multiple(x, UNIT: tl.constexpr):
    """A multiple of UNIT, as the compiler then sees."""
    return x // UNIT * UNIT


@triton.jit
def load_tile(tensor, i, j, other):
    """A tile of a ``HeadTensor``, ``other`` past the last row and the last key. Stride 0 broadcasts without a copy."""
    offsets = i.to(tl.int64) * tensor.stride_row + j.to(tl.int64) * tensor.stride_col
    return tl.load(tensor.base + offsets, mask=(i < tensor.seqlen_k) & (j < tensor.seqlen_k), other=other)


@triton.jit
def select_tensor(x, tensor, head, i, j, fill):
    """``MaskMod.function`` of a boolean mask, given as bytes."""
    return tl.where(load_tile(tensor, i, j, 0) != 0, x, fill)
