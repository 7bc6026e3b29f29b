"""What each sequence costs, which work items a program computes, and where their rows and keys are."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, mods


class SequenceWork(NamedTuple):
    """Lengths of one sequence, or of many, and how their work is cut into items; before that cut, a span.

    Attributes:
        first_row: First row of a packed sequence.
        num_rows: Queries.
        low: First key that some row may keep.
        high: The end of the keys: new ones included.
        num_tiles: Tiles of a key head.
        num_splits: Splits of a tile.
        chunk: Keys of a split, a multiple of BLOCK_N; the first begins at ``first_of_splits``.
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
    num_states: Any = 0
    state_splits: Any = 0
    num_items: Any = 0
    item_states: Any = 0


class Sizing(NamedTuple):
    """What a work item is.

    Attributes:
        run_keys: Runs of at most so many keys store one state; longer ones store one a split.
        grain: States of an item.
    """

    run_keys: Any
    grain: Any


@triton.jit
def cut(keys, rows, num_tiles, num_heads_kv, BLOCK_N: tl.constexpr, splitting):
    """Splits of a tile and keys of each, by ``config.SplitRule``'s numbers.

    Args:
        keys: That some row may keep.
        rows: Packed rows: queries times group size.
        num_tiles: Tiles of these rows.
        num_heads_kv: Key heads.
        BLOCK_N: Keys of a block.
        splitting: ``Splitting``.
    """
    wanted = tl.maximum(splitting.programs // tl.maximum(num_tiles * num_heads_kv, 1), 1)
    most = tl.maximum(splitting.MOST_SLOTS // tl.maximum(rows * num_heads_kv, 1), 1)
    filling = tl.where(keys < splitting.LONG_KEYS, wanted, 2 * splitting.MOST_SPLITS)
    most = tl.minimum(most, tl.minimum(tl.maximum(filling, splitting.MOST_SPLITS), 2 * splitting.MOST_SPLITS))
    count = tl.maximum(wanted, (keys + splitting.MOST_KEYS - 1) // splitting.MOST_KEYS)
    of_fewest = (keys + splitting.FEWEST_KEYS - 1) // splitting.FEWEST_KEYS
    if splitting.FEWEST_KEYS < splitting.FEWEST_OF_LONG:
        fewest = tl.maximum(tl.minimum(keys // 8, splitting.FEWEST_OF_LONG), splitting.FEWEST_KEYS)
        of_fewest = tl.where(keys > 16 * splitting.FEWEST_KEYS, (keys + fewest - 1) // fewest, of_fewest)
    count = tl.minimum(tl.minimum(count, most), of_fewest)
    blocks, count = (keys + BLOCK_N - 1) // BLOCK_N, tl.maximum(count, 1)
    chunk = tl.maximum((blocks + count - 1) // count, 1)
    return tl.maximum((blocks + chunk - 1) // chunk, 1), chunk * BLOCK_N


@triton.jit
def cut_at_fixed_keys(keys, splitting):
    """As ``cut``, of splits that are all as long: a key's split follows from its number alone."""
    return tl.maximum((keys + splitting.FIXED - 1) // splitting.FIXED, 1), keys * 0 + splitting.FIXED


@triton.jit
def first_of_splits(low, call):
    """Where the splits begin of a sequence with ``low`` as its first key: at a block, or at a run of fixed splits."""
    FIXED: tl.constexpr = call.schedule.splitting.FIXED
    RUN: tl.constexpr = call.schedule.splitting.RUN
    UNIT: tl.constexpr = RUN * FIXED if FIXED > 0 else call.schedule.BLOCK_N
    return low // UNIT * UNIT


@triton.jit
def span_of(b, call):
    """The span of sequence b, a number or a tensor; beyond the batch there are no keys.

    For packed queries, b == batch stands for the rows past the last sequence.
    """
    BLOCK_M: tl.constexpr = call.schedule.BLOCK_M
    BLOCK_N: tl.constexpr = call.schedule.BLOCK_N
    GROUP: tl.constexpr = call.GROUP
    exists = b < call.queries.count
    first_row, num_rows = b * 0, tl.where(exists, call.queries.length, 0)
    each = call.queries.length
    if call.queries.cu_seqlens is not None:
        first_row = tl.load(call.queries.cu_seqlens + b, mask=b <= call.queries.count, other=0)
        stop = tl.load(call.queries.cu_seqlens + b + 1, mask=exists, other=0)
        num_rows = tl.where(exists, stop, tl.where(b == call.queries.count, call.queries.length, first_row)) - first_row
        each = num_rows
    cached = tl.where(exists, call.cache.capacity, -1)
    if call.cache.cached is not None:
        cached = tl.load(call.cache.cached + b, mask=exists, other=-1)
    num_new = call.cache.new.length
    if call.cache.new.cu_seqlens is not None:
        num_new = tl.load(call.cache.new.cu_seqlens + b + 1, mask=exists, other=0)
        num_new -= tl.load(call.cache.new.cu_seqlens + b, mask=exists, other=0)
    # A negative length stands for a sequence that is not there.
    high = tl.where(cached < 0, 0, tl.minimum(cached + num_new, call.cache.capacity))
    if call.schedule.most_rows is not None:
        is_asked = (num_rows * GROUP <= call.schedule.most_rows) & (high > call.schedule.above_keys)
        num_rows = tl.where(is_asked, num_rows, 0)
        each = num_rows
    if call.schedule.fewest_rows is not None:
        num_rows = tl.where(num_rows * GROUP >= call.schedule.fewest_rows, num_rows, 0)
        each = num_rows
    low = b * 0
    if call.leftpad is not None:
        low = tl.maximum(tl.load(call.leftpad + b, mask=exists, other=0), 0)
    if call.mods.band.left is not None:
        if call.mods.band.chunk is not None:
            low = tl.maximum(low, low + masks.chunk_start(high - num_rows - low, call.mods.band.chunk))
        low = tl.maximum(low, high - num_rows - call.mods.band.left)
    keys = tl.where(low < high, high - first_of_splits(low, call), 0)
    tiles = (each * GROUP + BLOCK_M - 1) // BLOCK_M
    if call.schedule.splitting.FIXED > 0:
        num_splits, chunk = cut_at_fixed_keys(keys, call.schedule.splitting)
    else:
        num_splits, chunk = cut(keys, each * GROUP, tiles, call.num_heads_kv, BLOCK_N, call.schedule.splitting)
    return SequenceWork(first_row, num_rows, low, high, tl.where(num_rows > 0, tiles, 0), num_splits, chunk)


@triton.jit
def shape_of(span, sizing, call):
    """The ``SequenceWork`` of a span."""
    RUN: tl.constexpr = call.schedule.splitting.RUN
    are_runs = RUN * span.chunk <= sizing.run_keys
    if call.schedule.splitting.FIXED > 0:
        are_runs = are_runs | (span.num_splits > call.schedule.splitting.most_states)
    state_splits = tl.where(are_runs, RUN, 1)
    num_states = tl.where(state_splits == RUN, (span.num_splits + RUN - 1) // RUN, span.num_splits)
    num_items = num_states
    if sizing.grain > 1:
        num_items = (num_states + sizing.grain - 1) // sizing.grain
    return SequenceWork(
        span.first_row, span.num_rows, span.low, span.high, span.num_tiles, span.num_splits, span.chunk,
        num_states, state_splits, num_items, sizing.grain,
    )  # fmt: skip


@triton.jit
def cost_of(shape, call):
    """An item's cost in blocks of keys: its own, and about one for prologue and epilogue."""
    return shape.item_states * shape.state_splits * (shape.chunk // call.schedule.BLOCK_N) + 1


@triton.jit
def work_of(span, sizing, call):
    """The items of a sequence's heads in step, their cost, and the cost of the costliest."""
    shape = shape_of(span, sizing, call)
    cost = cost_of(shape, call)
    items = shape.num_tiles * (call.num_heads_kv // call.schedule.HEADS_IN_STEP) * shape.num_items
    return items, items.to(tl.int64) * cost, tl.where(items > 0, cost, 0)


@triton.jit
def rest_of(spans, call):
    """The span of the rows past the last packed sequence, without tiles where ``spans`` have them.

    Where it is not read it is ``spans`` (``gpu.device``: results).
    """
    rest = spans
    if call.queries.cu_seqlens is not None and call.schedule.SEARCH >= 256:
        span = span_of(call.queries.count, call)
        tiles = tl.where(call.queries.count == call.schedule.SEARCH, span.num_tiles, 0)
        rest = SequenceWork(span.first_row, span.num_rows, span.low, span.high, tiles, span.num_splits, span.chunk)
    return rest


@triton.jit
def all_work(spans, rest, sizing, call):
    """``work_of`` all sequences; rest: what ``rest_of`` says."""
    items, cost, most = work_of(spans, sizing, call)
    if call.schedule.SEARCH == 1:
        all_items, all_cost, all_most = items, cost, most
    else:
        all_items, all_most = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
        all_cost = tl.cast(0, tl.int64)
        # This loop runs once. Without one Triton 3.7 and later take addresses that depend on a reduction for unaligned.
        for _ in range(0, call.queries.count, call.schedule.SEARCH):
            all_items, all_cost = all_items + tl.sum(items), all_cost + tl.sum(cost)
            all_most = tl.maximum(all_most, tl.max(most, 0))
        if call.queries.cu_seqlens is not None and call.schedule.SEARCH >= 256:
            items, cost, most = work_of(rest, sizing, call)
            all_items, all_cost, all_most = all_items + items, all_cost + cost, tl.maximum(all_most, most)
    return all_items, all_cost, all_most


@triton.jit
def plan_items(spans, call):
    """The ``Sizing`` of the items of heads in step, their number, and the cost of all.

    Items of runs store fewer states, items of splits keep more programs busy. One item a program is best, as each item
    has a fixed cost. Where there are more, or they differ in cost, long sequences are cut into splits, to balance.
    """
    LONG: tl.constexpr = 1024
    teams = tl.num_programs(0) // call.schedule.HEADS_IN_STEP
    run_keys, grain, rest = tl.cast(2**30, tl.int32), tl.cast(1, tl.int32), rest_of(spans, call)
    items, cost, most = all_work(spans, rest, Sizing(run_keys, grain), call)
    if items * 8 < teams * 7:
        run_keys = tl.cast(0, tl.int32)
        items, cost, most = all_work(spans, rest, Sizing(run_keys, grain), call)
    if items > teams:
        grain = (items + teams - 1) // teams
        items, cost, most = all_work(spans, rest, Sizing(run_keys, grain), call)
    if (items > teams) | (items * most.to(tl.int64) * 8 > cost * 9):
        run_keys, grain = tl.minimum(run_keys, LONG), tl.cast(1, tl.int32)
        items, cost, most = all_work(spans, rest, Sizing(run_keys, grain), call)
    return Sizing(run_keys, grain), items, cost


@triton.jit
def share_of(spans, call):
    """The ``Sizing`` of the items of heads in step, and where this program's share of their cost begins and stops.

    If items are fewer than programs, each goes to a program of its own as far as they cost the same.
    """
    HEADS_IN_STEP: tl.constexpr = call.schedule.HEADS_IN_STEP
    sizing, items, cost = plan_items(spans, call)
    teams, team = tl.minimum(tl.num_programs(0) // HEADS_IN_STEP, items), tl.program_id(0) // HEADS_IN_STEP
    has_share, teams = team < teams, tl.maximum(teams, 1)
    return sizing, tl.where(has_share, cost * team // teams, 0), tl.where(has_share, cost * (team + 1) // teams, 0)


@triton.jit
def next_part(at, stop, spans, sizing, call):
    """The items of the next tile that begin between costs ``at`` and ``stop``.

    Returns:
        Whether there are any; the cost after them; the sequence, the slots and the tiles before it, and its
        ``SequenceWork``; the key head, the first packed row, the first state and their end.
    """
    HEADS_IN_STEP: tl.constexpr = call.schedule.HEADS_IN_STEP
    b, before, slots_before, tiles_before = find_sequence(at, spans, sizing, call)
    shape = shape_of(span_of(b, call), sizing, call)
    cost, tiles = cost_of(shape, call).to(tl.int64), shape.num_tiles * (call.num_heads_kv // HEADS_IN_STEP)
    # The first item that begins here, and the end of those that do.
    begin = ((at - before + cost - 1) // cost).to(tl.int32)
    end = tl.minimum(((stop - before + cost - 1) // cost).to(tl.int32), tiles * shape.num_items)
    tile, item = begin // shape.num_items, begin % shape.num_items
    stop_item = tl.minimum(shape.num_items, item + end - begin)
    after = before + (begin + stop_item - item) * cost
    after = tl.where(begin < end, after, tl.minimum(before + tiles * shape.num_items * cost, stop))
    num_tiles = tl.maximum(shape.num_tiles, 1)
    h_kv = tile // num_tiles * HEADS_IN_STEP + tl.program_id(0) % HEADS_IN_STEP
    first = tile % num_tiles * call.schedule.BLOCK_M
    state, stop_state = item * shape.item_states, tl.minimum(stop_item * shape.item_states, shape.num_states)
    return begin < end, after, b, slots_before, tiles_before, shape, h_kv, first, state, stop_state


@triton.jit
def find_sequence(at, spans, sizing, call):
    """The sequence where work stands at a cost of ``at``; and the cost, the slots and the tiles before it.

    Slots are rows of the workspace. They and tiles are counted over all heads.
    """
    found, tiles_before = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    cost_before, slots_before = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if call.schedule.SEARCH > 1:
        shape = shape_of(spans, sizing, call)
        heads = call.num_heads_kv
        items = shape.num_tiles * (heads // call.schedule.HEADS_IN_STEP) * shape.num_items
        cost = items.to(tl.int64) * cost_of(shape, call)
        slots = tl.where(shape.num_states > 1, shape.num_states * shape.num_rows, 0).to(tl.int64)
        earlier = tl.cumsum(cost, 0) <= at
        for _ in range(0, call.queries.count, call.schedule.SEARCH):  # once, as in ``all_work``
            found += tl.sum(earlier.to(tl.int32))
            cost_before += tl.sum(tl.where(earlier, cost, 0))
            slots_before += tl.sum(tl.where(earlier, slots * (call.GROUP * heads), 0))
            tiles_before += tl.sum(tl.where(earlier, shape.num_tiles * heads, 0))
    return found, cost_before, slots_before, tiles_before


@triton.jit
def rows_of_tile(packed, h_kv, num_rows, GROUP: tl.constexpr):
    """Row and query head of packed rows, and which exist; a row that does not is given as 0."""
    row, h = packed // GROUP, h_kv * GROUP + packed % GROUP
    exists = row < num_rows
    return tl.where(exists, row, 0), h, exists


@triton.jit
def first_key_of(b, call):
    """The first key of a sequence that counts."""
    first = 0
    if call.leftpad is not None:
        first = tl.maximum(tl.load(call.leftpad + b), 0)
    return first


@triton.jit
def entry_of(b, call):
    """The entry of the cache that is a sequence's; 0 for a cache in pages."""
    entry = b
    if call.cache.entries is not None:
        entry = tl.load(call.cache.entries + b)
    if call.cache.pages is not None:
        entry = 0
    return entry


@triton.jit
def right_of(b, call):
    """The right bound of the rows of a sequence, in a call that has one."""
    right = call.mods.band.right
    if call.causal is not None:
        right = tl.where(tl.load(call.causal + b) != 0, 0, right)
    return right


@triton.jit
def first_page_of(b, call):
    """Where the pages of a sequence begin in a list of all sequences' pages; 0 without one."""
    first = b * 0
    if call.cache.indptr is not None:
        first = tl.load(call.cache.indptr + b)
    return first


@triton.jit
def blocks_of(b, first, state, stop_state, shape, call):
    """First block and end of the blocks of states; a tile that is not split needs only those that its rows may keep."""
    BLOCK_N: tl.constexpr = call.schedule.BLOCK_N
    keys = shape.state_splits * shape.chunk
    start = first_of_splits(shape.low, call) + state * keys
    stop = tl.minimum(first_of_splits(shape.low, call) + stop_state * keys, shape.high)
    if shape.num_splits == 1:
        shift, row = shape.high - shape.num_rows, first // call.GROUP
        last = tl.minimum((first + call.schedule.BLOCK_M - 1) // call.GROUP, shape.num_rows - 1)
        if mods.place_of(call.mods.MASKS, "tree") >= 0:
            # Rows of a tree are in any order.
            is_tree = shape.num_rows <= call.mods.masks[0].operands.rows
            row, last = tl.where(is_tree, 0, row), tl.where(is_tree, shape.num_rows - 1, last)
        if call.mods.band.right is not None:
            stop = tl.minimum(stop, last + shift + right_of(b, call) + 1)
        if call.mods.band.left is not None:
            start = tl.maximum(start, (row + shift - call.mods.band.left) // BLOCK_N * BLOCK_N)
        if call.mods.band.chunk is not None and call.leftpad is None:
            stop = tl.minimum(stop, masks.chunk_stop(last + shift, call.mods.band.chunk))
            start = tl.maximum(start, masks.chunk_start(row + shift, call.mods.band.chunk) // BLOCK_N * BLOCK_N)
    return start // BLOCK_N, (stop + BLOCK_N - 1) // BLOCK_N
