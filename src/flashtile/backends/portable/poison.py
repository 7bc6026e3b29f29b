"""Infinities and NaN of an operand, kept to the rows and keys that attend to them.

A matrix product over a block multiplies what a mask took out by 0, and 0 times NaN is NaN. The loops pay nothing to
prevent that: it always leaves a NaN in the result, so a tile that holds one is computed again with 0 in place of
every infinity and NaN, and what those do to the pairs that are kept is stored afterwards, from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import mask, scores

# Rows or keys at a time of what is computed again: few, so that it needs no more registers than the loops before it.
STEP = tl.constexpr(16)


@triton.jit
def spread(
    result_at, result_stride_row, first, length, touchable, x_at, x_stride_row, start, stop, length_x, length_q,
    length_k, left, right, mask_at, mask_stride_row, mask_stride_col,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    KEYS_FIRST: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Stores what infinities and NaN of x make of those rows of a result that keep theirs.

    Counts, by products with 0 and 1, the kept elements of each kind, STEP rows and columns of x at a time.

    Args:
        result_at: Row 0 of the result, ``(length, DIM)``.
        result_stride_row: Its stride.
        first: Rows first ... first + BLOCK - 1 are looked at.
        length: Rows of the result.
        touchable: [BLOCK, 1] bool: rows that may be changed; None for all.
        x_at: Row 0 of the operand, ``(length_x, DIM)``.
        x_stride_row: Its stride.
        start: First row of x that the result sums over.
        stop: Behind the last one.
        length_x: Rows of x.
        length_q: Rows of the sequence.
        length_k: Keys of the sequence.
        left: Of the band, like HAS_LEFT.
        right: Of the band, like HAS_RIGHT.
        mask_at: As ``scores.select_mask`` takes it.
        mask_stride_row: Its stride.
        mask_stride_col: Its stride.
        DIM: Columns.
        BLOCK: Rows of the result at a time.
        HAS_LEFT: Whether the band is bounded there.
        HAS_RIGHT: Whether the band is bounded there.
        KEYS_FIRST: The result's rows are keys and those of x queries, not the other way round.
        GRADIENT: An infinity becomes NaN, whatever its sign: its factor may be 0 or of either sign.
    """
    mine = first + tl.arange(0, BLOCK)[:, None]
    for column in range(0, DIM, STEP):
        col = column + tl.arange(0, STEP)[None, :]
        nans = tl.zeros([BLOCK, STEP], tl.float32)
        above = tl.zeros([BLOCK, STEP], tl.float32)
        below = tl.zeros([BLOCK, STEP], tl.float32)
        for other in range(start, stop, STEP):
            x_row = other + tl.arange(0, STEP)[:, None]
            at = x_at + x_row.to(tl.int64) * x_stride_row + col
            x = tl.load(at, mask=(x_row < length_x) & (col < DIM), other=0.0).to(tl.float32)
            theirs = other + tl.arange(0, STEP)[None, :]
            rows, cols = mine, theirs
            if KEYS_FIRST:
                rows, cols = theirs, mine
            keep = tl.full([BLOCK, STEP], 1.0, tl.float32)
            position = rows + (length_k - length_q)
            keep = mask.band_select(keep, position, cols, length_k, left, right, 0.0, HAS_LEFT, HAS_RIGHT)
            keep = scores.select_mask(
                keep, mask_at, mask_stride_row, mask_stride_col, rows, cols, length_q, length_k, 0.0
            ).to(tl.float16)
            nans = tl.dot(keep, (x != x).to(tl.float16), nans)
            above = tl.dot(keep, (x == float("inf")).to(tl.float16), above)
            below = tl.dot(keep, (x == float("-inf")).to(tl.float16), below)
        poison = tl.where(above > 0.0, float("inf"), float("-inf"))
        both = (above > 0.0) & (below > 0.0)
        if GRADIENT:
            both = above + below > 0.0
        poison = tl.where((nans > 0.0) | both, float("nan"), poison)
        touched = (nans + above + below > 0.0) & (mine < length) & (col < DIM)
        if touchable is not None:
            touched = touched & touchable
        at = result_at + mine.to(tl.int64) * result_stride_row + col
        tl.store(at, poison.to(result_at.dtype.element_ty), mask=touched)
