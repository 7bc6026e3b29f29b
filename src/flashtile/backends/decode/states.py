"""The softmax state of a split: its fold with those before it, and its way through memory."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.vocab import softmax


@triton.jit
def fold(total, total_max, total_sum, acc, row_max, row_sum):
    """Folds the softmax state of the next split into that of all splits before it.

    Every product and sum is written as the machine must compute it, so that the same states give the same bits wherever
    this is compiled.
    """
    new_max = tl.maximum(total_max, row_max)
    origin = softmax.finite_origin(new_max)
    rescale, weight = tl.exp2(total_max - origin), tl.exp2(row_max - origin)
    total = tl.fma(acc, tl.broadcast_to(weight[:, None], acc.shape), total * rescale[:, None])
    return total, new_max, tl.fma(row_sum, weight, total_sum * rescale)


@triton.jit
def store_split(acc, row_max, row_sum, slot, exists, call):
    """Stores the softmax state of a tile's rows over one split."""
    col = tl.arange(0, acc.shape[1])[None, :]
    at = call.results.acc_ptr + slot[:, None] * call.sizes.DIM_V + col
    tl.store(at, acc, mask=exists[:, None] & (col < call.sizes.DIM_V))
    tl.store(call.results.max_ptr + slot, row_max, mask=exists)
    tl.store(call.results.sum_ptr + slot, row_sum, mask=exists)


@triton.jit
def skip_splits(slot, pitch, count, exists, call):
    """Marks splits as empty, whose keys are in the state of a later one."""
    for _split in range(count):
        tl.store(call.results.max_ptr + slot, tl.full(slot.shape, float("-inf"), tl.float32), mask=exists)
        slot += pitch


@triton.jit
def fold_stored(slot, pitch, num_splits, exists, call):
    """The fold of all states of a tile.

    Args:
        slot: [MERGE_ROWS] int64, each row's slot of the first split.
        pitch: Slots from one split to the next.
        num_splits: At least 2.
        exists: [MERGE_ROWS].
        call: ``Call``.
    """
    ROWS: tl.constexpr = call.sizes.MERGE_ROWS
    WIDE: tl.constexpr = call.sizes.BLOCK_DV
    col = tl.arange(0, WIDE)[None, :]
    acc, row_sum = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, num_splits, call.sizes.MERGE_SPLITS):
        # Unrolled, so that the loads of several splits are under way together.
        for ahead in tl.static_range(call.sizes.MERGE_SPLITS):
            at = slot + tl.cast(first + ahead, tl.int64) * pitch
            there = exists & (first + ahead < num_splits)
            # Past the first-level cache, which does not see what other multiprocessors store.
            top = tl.load(call.results.max_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_sum = tl.load(call.results.sum_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
            wide = there[:, None] & (col < call.sizes.DIM_V)
            part = tl.load(
                call.results.acc_ptr + at[:, None] * call.sizes.DIM_V + col, wide, other=0.0, cache_modifier=".cg"
            )
            # A split without keys, or skipped, may have left anything there.
            empty = top == float("-inf")
            part, part_sum = tl.where(empty[:, None], 0.0, part), tl.where(empty, 0.0, part_sum)
            acc, row_max, row_sum = fold(acc, row_max, row_sum, part, top, part_sum)
    return acc, row_max, row_sum
