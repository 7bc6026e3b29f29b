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
def store_state(acc, row_max, row_sum, slot, count, call):
    """Stores the softmax state of the first ``count`` rows of a tile, over a run or a split, from ``slot`` on."""
    slot, exists = slot + tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[0]) < count
    col = tl.arange(0, acc.shape[1])[None, :]
    at = call.results.acc_ptr + slot[:, None] * call.sizes.DIM_V + col
    tl.store(at, acc, mask=exists[:, None] & (col < call.sizes.DIM_V))
    at = call.results.stats_ptr + 2 * slot[:, None] + tl.arange(0, 2)[None, :]
    tl.store(at, tl.join(row_max, row_sum), mask=exists[:, None])


@triton.jit
def fold_stored(slot, pitch, shape, count, call, ROWS: tl.constexpr, RUNS: tl.constexpr, SPLITS: tl.constexpr):
    """The fold of all states of some rows: of the splits of each run, and then of the runs.

    Args:
        slot: int64, the first row's slot of the first state.
        pitch: Slots from one state to the next.
        shape: ``Shape``; at least 2 states.
        count: Rows that there are, from this one on.
        call: ``Call``.
        ROWS: Rows at once, a power of two.
        RUNS: States of runs that are loaded at once.
        SPLITS: States of splits, whole runs.
    """
    RUN: tl.constexpr = call.sizes.splitting.RUN
    row = tl.arange(0, ROWS)
    slot, exists = slot + row, row < count
    if shape.state_splits == RUN:
        acc, row_max, row_sum = fold_states(slot, pitch, shape.num_states, exists, call, 1, RUNS)
    else:
        acc, row_max, row_sum = fold_states(slot, pitch, shape.num_states, exists, call, RUN, SPLITS)
    return acc, row_max, row_sum


@triton.jit
def fold_states(slot, pitch, num_states, exists, call, RUN: tl.constexpr, AHEAD: tl.constexpr):
    """The fold of all states of a tile, of which RUN neighbours are folded first.

    AHEAD of them are unrolled, so that their loads are under way together.
    """
    acc, row_max, row_sum = empty_state(slot.shape[0], call)
    for first in range(0, num_states, AHEAD):
        for start in tl.static_range(0, AHEAD, RUN):
            run, run_max, run_sum = load_state(slot, pitch, first + start, num_states, exists, call)
            for ahead in tl.static_range(1, RUN):
                part, top, part_sum = load_state(slot, pitch, first + start + ahead, num_states, exists, call)
                run, run_max, run_sum = fold(run, run_max, run_sum, part, top, part_sum)
            acc, row_max, row_sum = fold(acc, row_max, row_sum, run, run_max, run_sum)
    return acc, row_max, row_sum


@triton.jit
def empty_state(ROWS: tl.constexpr, call):
    """The state [ROWS, ...] of no keys."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, call.sizes.BLOCK_DV], tl.float32), row_max, tl.zeros([ROWS], tl.float32)


@triton.jit
def load_state(slot, pitch, number, num_states, exists, call):
    """A stored state, (acc, row_max, row_sum); that of no keys past the last one."""
    at = slot + tl.cast(number, tl.int64) * pitch
    col = tl.arange(0, call.sizes.BLOCK_DV)[None, :]
    there = exists & (number < num_states)
    # Past the first-level cache, which does not see what other multiprocessors store.
    stats = call.results.stats_ptr + 2 * at[:, None] + tl.arange(0, 2)[None, :]
    top, part_sum = tl.split(tl.load(stats, mask=there[:, None], other=float("-inf"), cache_modifier=".cg"))
    wide = there[:, None] & (col < call.sizes.DIM_V)
    part = tl.load(call.results.acc_ptr + at[:, None] * call.sizes.DIM_V + col, wide, other=0.0, cache_modifier=".cg")
    # What a row has of keys of which it sees none counts for nothing.
    empty = top == float("-inf")
    return tl.where(empty[:, None], 0.0, part), top, tl.where(empty, 0.0, part_sum)
