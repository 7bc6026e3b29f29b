"""What each sequence costs, which items a program computes, and where their rows and keys are."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Shape(NamedTuple):
    """Lengths of one sequence, or of many.

    Attributes:
        first_row: Of a packed sequence.
        num_rows: Queries.
        low: First key that some row may keep.
        high: The end of the keys: new ones included.
        num_tiles: Tiles of a key head.
        num_splits: Splits of a tile.
        chunk: Keys of a split, a multiple of BLOCK_N; the first begins at low, rounded down to such a multiple.
        num_states: States of a tile: of runs, or of splits.
        state_splits: Splits of a state.
        num_items: Work items of a tile.
        item_states: States of an item.
    """

    first_row: Any
    num_rows: Any
    low: Any
    high: Any
    num_tiles: Any
    num_splits: Any
    chunk: Any
    num_states: Any
    state_splits: Any
    num_items: Any
    item_states: Any


class Sizing(NamedTuple):
    """What a work item is.

    Attributes:
        run_keys: The most keys of a run that has one state; the splits of a longer one have theirs.
        grain: States of an item.
    """

    run_keys: Any
    grain: Any


@triton.jit
def cut(keys, rows, num_tiles, num_heads_kv, BLOCK_N: tl.constexpr, splitting):
    """Splits of a tile and keys of each; ``config.Splitting.cut`` is the same in Python.

    Args:
        keys: That some row may keep.
        rows: Packed rows: queries times group size.
        num_tiles: Tiles of these rows.
        num_heads_kv: Key heads.
        BLOCK_N: Keys of a block.
        splitting: ``Splitting``.
    """
    most = splitting.MOST_SLOTS // tl.maximum(rows * num_heads_kv, 1)
    most = tl.minimum(tl.maximum(most, 1), splitting.MOST_SPLITS)
    wanted = tl.maximum(splitting.PROGRAMS // tl.maximum(num_tiles * num_heads_kv, 1), 1)
    chunk = tl.minimum(tl.maximum((keys + wanted - 1) // wanted, splitting.FEWEST_KEYS), splitting.MOST_KEYS)
    chunk = tl.maximum(chunk, (keys + most - 1) // most)
    chunk = (chunk + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return tl.maximum((keys + chunk - 1) // chunk, 1), chunk


@triton.jit
def shape_of(b, sizing, call):
    """The ``Shape`` of sequence b, a number or a tensor; beyond the batch there are no keys.

    For packed queries, b == batch stands for the rows past the last sequence.
    """
    BLOCK_M: tl.constexpr = call.sizes.BLOCK_M
    BLOCK_N: tl.constexpr = call.sizes.BLOCK_N
    exists = b < call.sizes.batch
    first_row, num_rows = b * 0, tl.where(exists, call.queries.length, 0)
    if call.queries.cu_seqlens_ptr is not None:
        first_row = tl.load(call.queries.cu_seqlens_ptr + b, mask=b <= call.sizes.batch, other=0)
        stop = tl.load(call.queries.cu_seqlens_ptr + b + 1, mask=exists, other=0)
        num_rows = tl.where(exists, stop, tl.where(b == call.sizes.batch, call.queries.length, first_row)) - first_row
    cached = tl.load(call.lengths.cached_ptr + b, mask=exists, other=-1)
    num_new = call.lengths.num_new
    if call.lengths.cu_seqlens_new_ptr is not None:
        num_new = tl.load(call.lengths.cu_seqlens_new_ptr + b + 1, mask=exists, other=0)
        num_new -= tl.load(call.lengths.cu_seqlens_new_ptr + b, mask=exists, other=0)
    # A negative length stands for a sequence that is not there.
    high = tl.where(cached < 0, 0, tl.minimum(cached + num_new, call.sizes.capacity))
    low = b * 0
    if call.lengths.leftpad_ptr is not None:
        low = tl.maximum(tl.load(call.lengths.leftpad_ptr + b, mask=exists, other=0), 0)
    if call.terms.band.left is not None:
        low = tl.maximum(low, high - num_rows - call.terms.band.left)
    rows = num_rows * call.sizes.GROUP
    num_tiles = (rows + BLOCK_M - 1) // BLOCK_M
    keys = tl.where(low < high, high - low // BLOCK_N * BLOCK_N, 0)
    num_splits, chunk = cut(keys, rows, num_tiles, call.sizes.num_heads_kv, BLOCK_N, call.sizes.splitting)
    RUN: tl.constexpr = call.sizes.splitting.RUN
    state_splits = tl.where(RUN * chunk <= sizing.run_keys, RUN, 1)
    num_states = (num_splits + state_splits - 1) // state_splits
    num_items = (num_states + sizing.grain - 1) // sizing.grain
    return Shape(
        first_row, num_rows, low, high, num_tiles, num_splits, chunk, num_states, state_splits, num_items, sizing.grain
    )


@triton.jit
def cost_of(shape, call):
    """What an item of a sequence costs, in blocks of keys: its own, and about one more to begin and to end."""
    return shape.item_states * shape.state_splits * (shape.chunk // call.sizes.BLOCK_N) + 1


@triton.jit
def work_of(shape, call):
    """The cost of sequences, their slots (rows of the workspace), their tiles and their items."""
    tiles = shape.num_tiles * call.sizes.num_heads_kv
    items = tiles * shape.num_items
    slots = tl.where(shape.num_states > 1, shape.num_states * shape.num_rows, 0).to(tl.int64)
    cost = items.to(tl.int64) * cost_of(shape, call)
    return cost, slots * (call.sizes.GROUP * call.sizes.num_heads_kv), tiles, items


@triton.jit
def count_sequences(call):
    """The sequences of a call; the rows past the last packed one count as one more."""
    count = call.sizes.batch
    if call.queries.cu_seqlens_ptr is not None:
        count += 1
    return count


@triton.jit
def all_work(sizing, call):
    """The cost of all sequences together, and their items."""
    SEARCH: tl.constexpr = call.sizes.SEARCH
    if SEARCH == 1:
        cost, _slots, _tiles, items = work_of(shape_of(tl.full((), 0, tl.int32), sizing, call), call)
    else:
        cost, items = tl.full((), 0, tl.int64), 0
        for first in range(0, count_sequences(call), SEARCH):
            costs, _slots, _tiles, counts = work_of(shape_of(first + tl.arange(0, SEARCH), sizing, call), call)
            cost += tl.sum(costs)
            items += tl.sum(counts)
    return cost, items


@triton.jit
def plan_items(call):
    """The ``Sizing`` of the items, the cost of all, and their number.

    Runs send fewer states through memory than splits, which keep more programs busy. Best is one item for each program:
    one that works on two tiles begins and ends twice. Where items must be smaller for that, long sequences' are splits,
    which balance better.
    """
    LONG: tl.constexpr = 1024
    programs = tl.num_programs(0)
    run_keys, grain = tl.full((), 2**30, tl.int32), tl.full((), 1, tl.int32)
    cost, items = all_work(Sizing(run_keys, grain), call)
    if items * 8 < programs * 7:
        run_keys = tl.full((), 0, tl.int32)
        cost, items = all_work(Sizing(run_keys, grain), call)
    if items > programs:
        grain = (items + programs - 1) // programs
        cost, items = all_work(Sizing(run_keys, grain), call)
        if items > programs:
            run_keys, grain = tl.minimum(run_keys, LONG), tl.full((), 1, tl.int32)
            cost, items = all_work(Sizing(run_keys, grain), call)
    return Sizing(run_keys, grain), cost, items


@triton.jit
def find_sequence(at, sizing, call):
    """The sequence in which the work stands at a cost of ``at``; and the cost, the slots and the tiles before it."""
    SEARCH: tl.constexpr = call.sizes.SEARCH
    found, tiles_before = tl.full((), 0, tl.int32), 0
    cost_before, slots_before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if SEARCH > 1:
        end = tl.full((), 0, tl.int64)
        for first in range(0, count_sequences(call), SEARCH):
            shape = shape_of(first + tl.arange(0, SEARCH), sizing, call)
            costs, slots, tiles, _items = work_of(shape, call)
            earlier = end + tl.cumsum(costs, 0) <= at
            found += tl.sum(earlier.to(tl.int32))
            cost_before += tl.sum(tl.where(earlier, costs, 0))
            slots_before += tl.sum(tl.where(earlier, slots, 0))
            tiles_before += tl.sum(tl.where(earlier, tiles, 0))
            end += tl.sum(costs)
    return found, cost_before, slots_before, tiles_before


@triton.jit
def rows_of_tile(first, h_kv, num_rows, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Row and query head of the packed rows of a tile, and which exist; a row that does not is given as 0."""
    packed = first + tl.arange(0, BLOCK)
    row, h = packed // GROUP, h_kv * GROUP + packed % GROUP
    exists = row < num_rows
    return tl.where(exists, row, 0), h, exists


@triton.jit
def entry_of(b, call):
    """The entry of the cache that is a sequence's; 0 for a cache in pages."""
    entry = b
    if call.lengths.entries_ptr is not None:
        entry = tl.load(call.lengths.entries_ptr + b)
    if call.pages.ptr is not None:
        entry = 0
    return entry


@triton.jit
def blocks_of(first, state, stop_state, shape, call):
    """First block and end of the blocks of states; a tile that is not split needs only those that its rows may keep."""
    BLOCK_N: tl.constexpr = call.sizes.BLOCK_N
    keys = shape.state_splits * shape.chunk
    start = shape.low // BLOCK_N * BLOCK_N + state * keys
    stop = tl.minimum(shape.low // BLOCK_N * BLOCK_N + stop_state * keys, shape.high)
    if shape.num_splits == 1:
        shift = shape.high - shape.num_rows
        if call.terms.band.right is not None:
            last = tl.minimum((first + call.sizes.BLOCK_M - 1) // call.sizes.GROUP, shape.num_rows - 1)
            stop = tl.minimum(stop, last + shift + call.terms.band.right + 1)
        if call.terms.band.left is not None:
            start = tl.maximum(start, (first // call.sizes.GROUP + shift - call.terms.band.left) // BLOCK_N * BLOCK_N)
    return start // BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N
