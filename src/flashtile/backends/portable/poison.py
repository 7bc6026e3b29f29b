"""Infinities and NaN of an operand, kept to the rows and keys that attend to them.

A matrix product over a block multiplies what a mask took out by 0, and 0 times NaN is NaN. The loops pay nothing to
prevent that: it always leaves a NaN in the result, so a tile that holds one is computed again with 0 in place of
every infinity and NaN, and what those do to the pairs that are kept is stored afterwards, from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import scores, sequence

# Rows or keys at a time of what is computed again: few, so that it needs no more registers than the loops before it.
STEP = tl.constexpr(16)


@triton.jit
def spread(
    result, first, touchable, x_rows, start, stop, pairs, BLOCK: tl.constexpr, KEYS_FIRST: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Stores what infinities and NaN of an operand make of those rows of a result that keep theirs.

    Counts, by products with 0 and 1, the kept elements of each kind, STEP rows and columns of the operand at a time.

    Args:
        result: ``sequence.Rows`` of the result.
        first: Rows first ... first + BLOCK - 1 of it are looked at.
        touchable: [BLOCK, 1] bool: rows that may be changed; None for all.
        x_rows: ``sequence.Rows`` of the operand.
        start: The first one that the result sums over.
        stop: Behind the last one.
        pairs: ``scores.Pairs``: which of them are kept.
        BLOCK: Rows of the result at a time.
        KEYS_FIRST: The result's rows are keys and those of the operand queries, not the other way round.
        GRADIENT: An infinity becomes NaN, whatever its sign: its factor may be 0 or of either sign.
    """
    mine = first + tl.arange(0, BLOCK)[:, None]
    stride = x_rows.tensor.stride_row
    dim = result.tensor.cols.shape[0] if result.tensor.dim is None else result.tensor.dim
    for column in range(0, dim, STEP):
        col = column + tl.arange(0, STEP)[None, :]
        nans = tl.zeros([BLOCK, STEP], tl.float32)
        above = tl.zeros([BLOCK, STEP], tl.float32)
        below = tl.zeros([BLOCK, STEP], tl.float32)
        for other in range(start, stop, STEP):
            x_row = other + tl.arange(0, STEP)[:, None]
            at = sequence.start_of(x_rows) + x_row.to(tl.int64) * stride + col
            x = tl.load(at, mask=(x_row < x_rows.length) & (col < dim), other=0.0).to(tl.float32)
            theirs = other + tl.arange(0, STEP)[None, :]
            rows, cols = mine, theirs
            if KEYS_FIRST:
                rows, cols = theirs, mine
            keep = tl.full([BLOCK, STEP], 1.0, tl.float32)
            keep = scores.select_band(keep, pairs, rows, cols, 0.0)
            keep = scores.select_mask(keep, pairs, rows, cols, 0.0).to(tl.float16)
            nans = tl.dot(keep, (x != x).to(tl.float16), nans)
            above = tl.dot(keep, (x == float("inf")).to(tl.float16), above)
            below = tl.dot(keep, (x == float("-inf")).to(tl.float16), below)
        poison = tl.where(above > 0.0, float("inf"), float("-inf"))
        both = (above > 0.0) & (below > 0.0)
        if GRADIENT:
            both = above + below > 0.0
        poison = tl.where((nans > 0.0) | both, float("nan"), poison)
        touched = (nans + above + below > 0.0) & (mine < result.length) & (col < dim)
        if touchable is not None:
            touched = touched & touchable
        at = sequence.start_of(result) + mine.to(tl.int64) * result.tensor.stride_row + col
        tl.store(at, poison.to(result.tensor.ptr.dtype.element_ty), mask=touched)
