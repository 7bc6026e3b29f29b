"""The softmax state of a split: its fold with those before it, and its way through memory; two states merged."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax

# A tile's first counter: bits for the number of stored states, and above them one for each program that waits.
_STATE_BITS, _HELPERS = tl.constexpr(8), tl.constexpr(23)
_ALL_STATES, _ALL_HELPERS = tl.constexpr(2**8 - 1), tl.constexpr(2**23 - 1)
# The same where tiles may have many states.
_MANY_STATE_BITS, _MANY_HELPERS = tl.constexpr(15), tl.constexpr(16)
_ALL_MANY_STATES, _ALL_MANY_HELPERS = tl.constexpr(2**15 - 1), tl.constexpr(2**16 - 1)


@triton.jit
def fold(total, total_max, total_sum, acc, row_max, row_sum, LARGE: tl.constexpr = False):
    """Folds the softmax state of the next split into the state of all splits before it; LARGE: see ``softmax``.

    Every product and sum is written as the machine must compute it, so that the same states give the same bits wherever
    this is compiled.
    """
    new_max = tl.maximum(total_max, row_max)
    finite_max = softmax.made_finite(new_max)
    if LARGE:
        rescale = tl.exp2((total_max - finite_max) * softmax.LOG2_E)
        weight = tl.exp2((row_max - finite_max) * softmax.LOG2_E)
    else:
        rescale, weight = tl.exp2(total_max - finite_max), tl.exp2(row_max - finite_max)
    total = tl.fma(acc, tl.broadcast_to(weight[:, None], acc.shape), total * rescale[:, None])
    return total, new_max, tl.fma(row_sum, weight, total_sum * rescale)


@triton.jit
def store_state(acc, row_max, row_sum, slot, count, call):
    """Stores the softmax state of the first ``count`` rows of a tile, over a run or a split, from ``slot`` on."""
    slot, exists = slot + tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[0]) < count
    col = tl.arange(0, acc.shape[1])[None, :]
    at = call.results.acc + slot[:, None] * call.out.DIM + col
    tl.store(at, acc, mask=exists[:, None] & (col < call.out.DIM))
    at = call.results.stats + 2 * slot[:, None] + tl.arange(0, 2)[None, :]
    tl.store(at, tl.join(row_max, row_sum), mask=exists[:, None])


@triton.jit
def fold_stored(slot, pitch, shape, count, call, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """The fold of all states of some rows: of the splits of each run, and then of the runs.

    Args:
        slot: int64, the first row's slot of the first state.
        pitch: Slots from one state to the next.
        shape: ``SequenceWork``; at least 2 states.
        count: Rows that there are, from this one on.
        call: ``DecodeCall``.
        ROWS: Rows at once, a power of two.
        AHEAD: States that are loaded at once, whole runs.
    """
    row = tl.arange(0, ROWS)
    none = tl.zeros([ROWS, call.out.BLOCK_DIM], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), row * 0.0
    return fold_states(none, slot + row, pitch, shape, row < count, call, load_state, AHEAD, call.mods.LARGE)


@triton.jit
def fold_states(
    none, slot, pitch, shape, exists, call, LOAD: tl.constexpr, AHEAD: tl.constexpr, LARGE: tl.constexpr = False
):
    """The fold of all states of a tile, which are runs or splits, into the state of no keys.

    AHEAD of them are unrolled, so that their loads are under way together. The same instructions serve both kinds: for
    every load Triton's coalescing pass walks all that is connected with it, so each one costs a user's first call time.
    LOAD is ``load_state``, or the like.
    """
    RUN: tl.constexpr = call.schedule.splitting.RUN
    num_states, are_runs = shape.num_states, shape.state_splits == RUN
    acc, row_max, row_sum = none
    for first in range(0, num_states, AHEAD):
        for start in tl.static_range(0, AHEAD, RUN):
            run, run_max, run_sum = LOAD(slot, pitch, first + start, num_states, exists, call)
            for ahead in tl.static_range(1, RUN):
                part, top, part_sum = LOAD(slot, pitch, first + start + ahead, num_states, exists, call)
                with_run, with_max, with_sum = fold(acc, row_max, row_sum, run, run_max, run_sum, LARGE)
                acc, row_max = tl.where(are_runs, with_run, acc), tl.where(are_runs, with_max, row_max)
                row_sum = tl.where(are_runs, with_sum, row_sum)
                more, more_max, more_sum = fold(run, run_max, run_sum, part, top, part_sum, LARGE)
                run, run_max = tl.where(are_runs, part, more), tl.where(are_runs, top, more_max)
                run_sum = tl.where(are_runs, part_sum, more_sum)
            acc, row_max, row_sum = fold(acc, row_max, row_sum, run, run_max, run_sum, LARGE)
    return acc, row_max, row_sum


@triton.jit
def load_state(slot, pitch, number, num_states, exists, call):
    """A stored state, (acc, row_max, row_sum); past the last one, the state of no keys."""
    col, there = tl.arange(0, call.out.BLOCK_DIM)[None, :], exists & (number < num_states)
    # What all states of the rows share comes first, so that it is computed once.
    stats = call.results.stats + 2 * slot[:, None] + tl.arange(0, 2)[None, :]
    at = call.results.acc + slot[:, None] * call.out.DIM + col
    first = tl.cast(number, tl.int64) * pitch
    # .cg bypasses L1, which is not coherent with other multiprocessors' stores.
    stats = tl.load(stats + 2 * first, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
    top, part_sum = tl.split(stats)
    wide = there[:, None] & (col < call.out.DIM)
    part = tl.load(at + first * call.out.DIM, wide, other=0.0, cache_modifier=".cg")
    # A row that sees none of the keys contributes nothing, whatever acc holds.
    empty = top == float("-inf")
    return tl.where(empty[:, None], 0.0, part), top, tl.where(empty, 0.0, part_sum)


@triton.jit
def arrive(counter, count, member, goal, numbers, waits, PATIENCE: tl.constexpr, MANY: tl.constexpr = False):
    """Counts stored states of a tile; says whether the caller folds the tile, and with how many others.

    Programs with nothing else to do wait to help fold a large tile, for a bounded time: the others may not be resident.
    counter[0] holds the number of stored states and a bitmask of waiting helpers; counter[1] holds an epoch and the
    bitmask of helpers at the time of the last store.

    Args:
        counter: The first of the two.
        count: States that have been stored.
        member: The caller's number in the tile.
        goal: States of the tile, at most 255, or 32767 if MANY.
        numbers: What all of them hold together; with fewer than 16,384 of them nobody waits.
        waits: Whether the caller would wait.
        PATIENCE: How often it looks; 0 for never.
        MANY: Whether there may be many states, and so fewer programs that wait.

    Returns:
        Whether the caller folds; its number among those that do; how many they are.
    """
    BITS: tl.constexpr = _MANY_STATE_BITS if MANY else _STATE_BITS
    HELPERS: tl.constexpr = _MANY_HELPERS if MANY else _HELPERS
    ALL_STATES: tl.constexpr = _ALL_MANY_STATES if MANY else _ALL_STATES
    ALL_HELPERS: tl.constexpr = _ALL_MANY_HELPERS if MANY else _ALL_HELPERS
    helps = waits & (numbers >= 16384) & (member < HELPERS) & (PATIENCE > 0)
    bit = tl.where(helps, 1 << (tl.minimum(member, HELPERS - 1) + BITS), 0)
    before = tl.load(counter + 1, volatile=True)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    stored = tl.atomic_add(counter, count + bit, sem="acq_rel")
    helpers, rank, folds = stored >> BITS, 0, False
    if (stored & ALL_STATES) + count == goal:
        folds = True
        # By an atomic: a program that gives up waiting may have yet to take its bit back.
        tl.atomic_xchg(counter, 0, sem="relaxed")
        if helpers != 0:
            tl.atomic_xchg(counter + 1, ((((before >> HELPERS) + 1) & 0xFF) << HELPERS) | helpers, sem="release")
    elif helps:
        helpers, folds = wait_for_others(counter, before, bit, goal, PATIENCE, ALL_STATES)
        helpers = helpers & ALL_HELPERS
        rank = 1 + count_bits(helpers & ((bit >> BITS) - 1))
    return folds, rank, 1 + count_bits(helpers)


@triton.jit
def wait_for_others(counter, before, bit, goal, PATIENCE: tl.constexpr, ALL_STATES: tl.constexpr):
    """Polls counter[1] until its epoch changes or patience ends; returns it and whether it changed."""
    now, polls, waits = before, 0, True
    while waits:
        now = tl.atomic_add(counter + 1, 0, sem="acquire")
        polls += 1
        waits = now == before
        if waits & (polls == PATIENCE):
            # Whoever stored the last state relies on each helper that it saw a bit of, then zeroes the counter.
            stored = tl.atomic_and(counter, ~bit)
            waits = ((stored & bit) == 0) | ((stored & ALL_STATES) == goal)
    return now, now != before


@triton.jit
def count_bits(x):
    """How many of the bits 0 to 23 are set."""
    x = (x & 0x555555) + ((x >> 1) & 0x555555)
    x = (x & 0x333333) + ((x >> 2) & 0x333333)
    x = (x & 0x0F0F0F) + ((x >> 4) & 0x0F0F0F)
    return (x * 0x010101 >> 16) & 0x1F


@triton.jit
def merge_states(a, b, merged, shape):
    """Writes the ``merge.StateTensors`` merged of two others, a and b."""
    DIM: tl.constexpr = shape.DIM
    row = tl.program_id(0) * shape.ROWS + tl.arange(0, shape.ROWS)
    exists = row < shape.rows
    token, h = row // shape.num_heads, row % shape.num_heads
    lse_at = (token // shape.seqlen * shape.num_heads + h).to(tl.int64) * shape.seqlen + token % shape.seqlen
    col = tl.arange(0, shape.BLOCK_DIM)[None, :]
    at, inside = row.to(tl.int64)[:, None] * DIM + col, exists[:, None] & (col < DIM)
    out, lse = softmax.merge(
        tl.load(a.out + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(a.lse + lse_at, mask=exists, other=float("-inf")),
        tl.load(b.out + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(b.lse + lse_at, mask=exists, other=float("-inf")),
    )
    tl.store(merged.out + at, out.to(merged.out.dtype.element_ty), mask=inside)
    tl.store(merged.lse + lse_at, lse, mask=exists)
