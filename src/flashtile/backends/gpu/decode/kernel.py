"""Attention over a cache of keys and values in Triton, of few query rows or many.

The query heads of a group are rows of one tile, so a key is read once for all of them. A sequence's keys are cut into
splits by a rule that looks at the sequence alone. The softmax state of every split is computed from nothing; the states
of RUN neighbouring splits, a run, are folded first to last, and then the states of runs. So a result does not depend on
who computes which split. A program that does all of a tile folds in registers, if they hold it; else the states of runs
(of splits, where there would be too few runs for all programs) go through memory, and the program that stores the last
of a tile folds them. Work items are one or more neighbouring states. The items of all tiles form one row, and each
program takes a contiguous part of equal cost. Mathematics: docs/algorithm.md, "Splits". Source: Dao, Haziza,
Massa and Sizov 2023, "Flash-Decoding"; Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.decode import eight_bit, states, work
from flashtile.backends.gpu.device import masks, mods, softmax


class TilePlace(NamedTuple):
    """A tile.

    Attributes:
        b: Its sequence.
        entry: Its entry of the cache.
        h_kv: Key head.
        first: Its first packed row.
        first_page: ``work.first_page_of``.
    """

    b: Any
    entry: Any
    h_kv: Any
    first: Any
    first_page: Any = 0


class TileRows(NamedTuple):
    """The rows of a tile; only passed as an argument, since first may be None.

    Attributes:
        q: [BLOCK_M, BLOCK_D] in the dtype that products take; for 8-bit caches the even columns.
        q_odd: The odd columns; ignored for other caches.
        q_scale: [BLOCK_M] float32, a factor of the products; ignored for other caches.
        qv: As q, q_odd and q_scale, [BLOCK_M, BLOCK_DV], queries of the values; ignored without ``call.qv``.
        qv_odd: Their odd columns.
        qv_scale: A factor of their products.
        i: [BLOCK_M, 1], the position of each row.
        low: First key that counts.
        high: End of the keys.
        first: [BLOCK_M, 1], the first key that each row sees; None if it sees all up to ``last``.
        last: [BLOCK_M, 1], the last key that each row sees.
        clear_first: The first key that all rows see.
        clear_last: The last key that all rows see.
    """

    q: Any
    q_odd: Any
    q_scale: Any
    qv: Any
    qv_odd: Any
    qv_scale: Any
    i: Any
    low: Any
    high: Any
    first: Any
    last: Any
    clear_first: Any
    clear_last: Any


class Part(NamedTuple):
    """The states of a tile that one program computes.

    Attributes:
        first: The first of them.
        stop: The end.
        first_block: First block of keys.
        stop_block: End of the blocks.
        blocks: Blocks of a split.
        state_splits: Splits of a state.
        keeps: Whether the fold of the states stays in registers: they are all of the tile.
        slot: int64, the first row's slot of the part's first state.
        pitch: Slots from one state to the next: the rows of all tiles.
        count: Rows of the tile that exist.
        waits: Whether the program has no other part to compute after this one.
    """

    first: Any
    stop: Any
    first_block: Any
    stop_block: Any
    blocks: Any
    state_splits: Any
    keeps: Any
    slot: Any
    pitch: Any
    count: Any
    waits: Any


@triton.jit
def load_block(cache, base, place, inside):
    """A block [BLOCK_N, BLOCK_DIM] of keys or values; what is not ``inside``, and columns past DIM, are 0.

    Args:
        cache: ``TileRows``.
        base: Address of its entry and head.
        place: What ``place_block`` says.
        inside: [BLOCK_N].
    """
    page, first_row, row = place
    col = tl.arange(0, cache.BLOCK_DIM)[None, :]
    if len(page.shape) == 0:
        # One address for the block, and small offsets.
        base += first_row * cache.stride_row
        at = base + (row * cache.stride_row)[:, None] + col
    else:
        at = base + (page * cache.stride_b + row.to(tl.int64) * cache.stride_row)[:, None] + col
    if cache.DIM == cache.BLOCK_DIM:
        tile = tl.load(at, mask=inside[:, None], other=0)
    else:
        tile = tl.load(at, mask=inside[:, None] & (col < cache.DIM), other=0)
    return tile


@triton.jit
def place_block(first, inside, place, cache, BLOCK_N: tl.constexpr):
    """Where the keys ``first`` to ``first + BLOCK_N`` lie: page, first row, and each key's row after that.

    In pages the page is [BLOCK_N] int64, and rows are the page's; in a cache by sequence it is 0. Page ids are a
    tensor even where one page holds the whole block, since Triton prefetches loads of tensors, not of scalars. The
    table is read only for keys inside: its other entries may hold anything.
    """
    PAGE_SIZE: tl.constexpr = cache.PAGE_SIZE
    key = tl.arange(0, BLOCK_N)
    page, first_row, row = tl.full((), 0, tl.int64), tl.cast(first, tl.int64), key
    if cache.pages is not None:
        table = cache.pages + tl.cast(place.b, tl.int64) * cache.pages_pitch
        if cache.indptr is not None:
            table = cache.pages + place.first_page
        if PAGE_SIZE % BLOCK_N == 0:
            index, row = first // PAGE_SIZE + key * 0, first % PAGE_SIZE + key
        elif BLOCK_N % PAGE_SIZE == 0:
            # Rows within pages are the same for every block: nothing is divided in the loop.
            index, row = first // PAGE_SIZE + key // PAGE_SIZE, key % PAGE_SIZE
        else:
            index, row = (first + key) // PAGE_SIZE, (first + key) % PAGE_SIZE
        page = tl.load(table + index, mask=inside, other=0).to(tl.int64)
    return page, first_row, row


@triton.jit
def address_of(cache, place):
    """The first row of a tile's entry and key head."""
    entry, h_kv = tl.cast(place.entry, tl.int64), tl.cast(place.h_kv, tl.int64)
    return cache.ptr + entry * cache.stride_b + h_kv * cache.stride_head


@triton.jit
def score_block(k, v, first, key, inside, page, place, rows, head, call):
    """Scores [BLOCK_M, BLOCK_N] of a block, -inf where a row does not see a key; and the factor to base 2.

    ``v`` are the block's values where scores include products with them.
    """
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    if k.dtype == tl.int16:
        product = eight_bit_product(rows.q, rows.q_odd, rows.q_scale, k, call.cache.scales.k, page, place, inside, call)
        if call.qv.ptr is not None:
            product += eight_bit_product(
                rows.qv, rows.qv_odd, rows.qv_scale, v, call.cache.scales.v, page, place, inside, call
            )
    else:
        product = tl.dot(rows.q, tl.trans(k), input_precision=INPUT_PRECISION)
        if call.qv.ptr is not None:
            product = tl.dot(rows.qv, tl.trans(v), product, input_precision=INPUT_PRECISION)
    HAS_TREE: tl.constexpr = mods.place_of(call.mods.MASKS, "tree") >= 0
    stands = key
    if HAS_TREE and (rows.first is not None or mods.place_of(call.mods.SCORES, "alibi") >= 0):
        stands = mods.tree_places(head.masks[0].base, head.masks[0].count, head.masks[0].shift, key)
    at = mods.pairs_of(head, rows.i, stands[None, :])
    HAS_FUNCTIONS: tl.constexpr = (
        mods.place_of(call.mods.SCORES, "score_mod") >= 0 or mods.place_of(call.mods.MASKS, "mask_mod") >= 0
    )
    HAS_INTERVALS: tl.constexpr = call.mods.band.row_keys is not None or call.mods.band.key_rows is not None
    if call.leftpad is not None and (HAS_FUNCTIONS or HAS_INTERVALS):
        # For users' functions and intervals keys count from the first that counts.
        pad = work.first_key_of(place.b, call)
        at = mods.At(at.b, at.h, at.i, at.p - pad, at.j - pad, at.seqlen_q, at.seqlen_k, ())
    x, scale_log2, _slope = mods.apply(product, call.mods, head, at, False)
    if HAS_TREE and x.shape[0] < 64:
        if (first < rows.clear_first) | (first + key.shape[0] - 1 > rows.clear_last):
            x = masked_by_tree(x, key, stands, rows, head, call)
    elif x.shape[0] < 64:
        x = masked(x, key, rows)
    else:
        # Comparisons stay in the branch: ptxas would hoist them above the WGMMA, a register each. The scale is applied
        # here, since a product that only the branch reads would be waited for inside it. A score mod has read it.
        if not call.mods.LARGE:
            x, scale_log2 = x * scale_log2, 1.0
        if (first < rows.clear_first) | (first + key.shape[0] - 1 > rows.clear_last):
            x = masked_by_tree(x, key, stands, rows, head, call) if HAS_TREE else masked(x, key, rows)
    if call.mods.band.row_keys is not None:
        x = masks.select(x, call.mods.band.row_keys, at.b, at.h, at.i, at.j, float("-inf"))
    if call.mods.band.key_rows is not None:
        x = masks.select(x, call.mods.band.key_rows, at.b, at.h, at.j, at.i, float("-inf"))
    if mods.place_of(call.mods.MASKS, "mask_mod") >= 0:
        x = mods.by_function(x, call.mods.masks[0], head.masks[0], at, float("-inf"))
    return x, scale_log2


@triton.jit
def eight_bit_product(q, q_odd, q_scale, k, scale, page, place, inside, call):
    """Products [BLOCK_M, BLOCK_N] of rows with a block of 8-bit keys, or values, as ``read_keys`` loads them."""
    even, odd = eight_bit.halves(k, call.cache.scales)
    product = tl.dot(q, tl.trans(even.to(q.dtype)), input_precision=call.mods.INPUT_PRECISION)
    product = tl.dot(q_odd, tl.trans(odd.to(q.dtype)), product, input_precision=call.mods.INPUT_PRECISION)
    product *= q_scale[:, None]
    if call.cache.scales.BY_PAGE and scale.ptr is not None:
        product *= eight_bit.page_scales(scale, page, place.h_kv, inside)[None, :]
    return product


@triton.jit
def masked(x, key, rows):
    """Scores, -inf where a row does not see a key."""
    x = tl.where(key[None, :] <= rows.last, x, float("-inf"))
    if rows.first is not None:
        x = tl.where(key[None, :] >= rows.first, x, float("-inf"))
    return x


@triton.jit
def masked_by_tree(x, key, stands, rows, head, call):
    """``masked`` where rows may be a tree, by the places ``stands`` of the keys."""
    x = tl.where((key[None, :] >= rows.low) & (key[None, :] <= rows.last), x, float("-inf"))
    if rows.first is not None:
        x = tl.where(stands[None, :] >= rows.first, x, float("-inf"))
    at = mods.pairs_of(head, rows.i, key[None, :])
    return call.mods.masks[0].function(x, head.masks[0], at, float("-inf"))


@triton.jit
def read_keys(n, place, rows, head, call):
    """Scores of block n as ``score_block``, where its keys lie, which are inside, and its values if scores need them.

    8-bit keys and values are loaded as pairs of neighbouring columns, which become two matrices: of even columns and of
    odd ones. So the tensor cores' operands are loaded from shared memory as 16-bit ones are.
    """
    BLOCK_N: tl.constexpr = call.schedule.BLOCK_N
    key = n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (key >= rows.low) & (key < rows.high)
    at = place_block(n * BLOCK_N, inside, place, call.cache, BLOCK_N)
    k = load_block(call.cache.k, address_of(call.cache.k, place), at, inside)
    v = k
    if call.qv.ptr is not None:
        v = load_block(call.cache.v, address_of(call.cache.v, place), at, inside)
    if call.cache.scales.rows.ptr is not None:
        base = address_of(call.cache.scales.rows, place)
        v = eight_bit.by_rows(v, base, at, inside, call.cache.scales.rows, k.dtype)
    x, scale_log2 = score_block(k, v, n * BLOCK_N, key, inside, at[0], place, rows, head, call)
    return x, scale_log2, at, inside, v


@triton.jit
def add_values(acc, acc_odd, row_max, row_sum, keys, place, rows, head, call):
    """Adds a block of keys, as ``read_keys`` returns it, to the softmax state of a tile's rows."""
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    LIKE: tl.constexpr = rows.q.dtype
    x, scale_log2, at, inside, v = keys
    probs, rescale, row_max, row_sum = softmax.update(row_max, row_sum, x, scale_log2, True, call.mods.LARGE)
    if call.qv.ptr is None:
        v = load_block(call.cache.v, address_of(call.cache.v, place), at, inside)
    acc *= rescale[:, None]
    if v.dtype == tl.int16:
        acc_odd *= rescale[:, None]
        even, odd = eight_bit.halves(v, call.cache.scales)
        even, odd = even.to(LIKE), odd.to(LIKE)
        if call.cache.scales.BY_PAGE and call.cache.scales.v.ptr is not None:
            # Relative to the block's largest, so that float16 probabilities do not underflow.
            scale = eight_bit.page_scales(call.cache.scales.v, at[0], place.h_kv, inside)
            largest = tl.maximum(tl.max(tl.abs(scale), 0), 1e-30)
            scaled = (probs * (scale / largest)[None, :]).to(LIKE)
            acc += tl.dot(scaled, even, input_precision=INPUT_PRECISION) * largest
            acc_odd += tl.dot(scaled, odd, input_precision=INPUT_PRECISION) * largest
        else:
            acc = tl.dot(probs.to(LIKE), even, acc, input_precision=INPUT_PRECISION)
            acc_odd = tl.dot(probs.to(LIKE), odd, acc_odd, input_precision=INPUT_PRECISION)
    else:
        acc = tl.dot(probs.to(LIKE), v, acc, input_precision=INPUT_PRECISION)
    return acc, acc_odd, row_max, row_sum


@triton.jit
def end_split(state, run, total, slot, splits_left, is_last, part, call):
    """Folds the (acc, row_max, row_sum) of a split into its run's. A run's at its end is stored, or folded into all.

    Returns:
        The run's state, the state of all, the slot of the next state and how many splits its run has left.
    """
    run, run_max, run_sum = run
    total, total_max, total_sum = total
    if splits_left == part.state_splits:
        run, run_sum = tl.zeros(run.shape, tl.float32), tl.zeros(run_sum.shape, tl.float32)
        run_max = tl.full(run_max.shape, float("-inf"), tl.float32)
    # With nothing folded yet, the fold is the split's own state, bit for bit.
    LARGE: tl.constexpr = call.mods.LARGE
    run, run_max, run_sum = states.fold(run, run_max, run_sum, state[0], state[1], state[2], LARGE)
    splits_left -= 1
    if (splits_left == 0) | is_last:
        if part.keeps == 0:
            states.store_state(run, run_max, run_sum, slot, part.count, call)
        elif call.schedule.KEEPS:
            total, total_max, total_sum = states.fold(total, total_max, total_sum, run, run_max, run_sum, LARGE)
        slot += part.pitch
        splits_left = part.state_splits
    return run, run_max, run_sum, total, total_max, total_sum, slot, splits_left


@triton.jit
def attend(place, rows, part, head, call):
    """The softmax state of a tile's rows over the keys of a ``Part``.

    Returns:
        acc [BLOCK_M, BLOCK_DV], row_max [BLOCK_M] as ``softmax.update`` has it, and row_sum [BLOCK_M], all float32: the
        fold of its states if the part keeps them, else nothing of use: the state of each has been stored.
    """
    EIGHT_BIT: tl.constexpr = call.cache.scales.EIGHT_BIT
    WIDE: tl.constexpr = call.out.BLOCK_DIM // 2 if EIGHT_BIT else call.out.BLOCK_DIM
    ROWS: tl.constexpr = rows.q.shape[0]
    acc, row_sum = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS], tl.float32)
    acc_odd, row_max = tl.zeros([ROWS, WIDE], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    run, run_sum = tl.zeros([ROWS, call.out.BLOCK_DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    run_max = tl.full([ROWS], float("-inf"), tl.float32)
    # Separate tensors: Triton carries only the first of variables that are the same value before a loop.
    total, total_sum = tl.zeros([ROWS, call.out.BLOCK_DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    total_max = tl.full([ROWS], float("-inf"), tl.float32)
    slot, blocks_left, splits_left = part.slot, part.blocks, part.state_splits
    for n in tl.range(part.first_block, part.stop_block):
        keys = read_keys(n, place, rows, head, call)
        if call.results.acc is not None:  # noqa: SIM102 a compile-time condition
            # Here, as the last block's product is complete. After this block's, ptxas would serialise its WGMMA.
            if blocks_left == 0:
                run, run_max, run_sum, total, total_max, total_sum, slot, splits_left = end_split(
                    (eight_bit.joined(acc, acc_odd, EIGHT_BIT), row_max, row_sum), (run, run_max, run_sum),
                    (total, total_max, total_sum), slot, splits_left, False, part, call,
                )  # fmt: skip
                acc, acc_odd = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
                row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
                blocks_left = part.blocks
        acc, acc_odd, row_max, row_sum = add_values(acc, acc_odd, row_max, row_sum, keys, place, rows, head, call)
        blocks_left -= 1
    state = (eight_bit.joined(acc, acc_odd, EIGHT_BIT), row_max, row_sum)
    if call.results.acc is None:
        total, total_max, total_sum = state
    elif part.first_block < part.stop_block:
        run, run_max, run_sum, total, total_max, total_sum, slot, splits_left = end_split(
            state, (run, run_max, run_sum), (total, total_max, total_sum), slot, splits_left, True, part, call
        )
    if call.results.acc is not None and not call.schedule.KEEPS:
        # Then a part keeps a state only if it is the tile's only one.
        total, total_max, total_sum = run, run_max, run_sum
    return total, total_max, total_sum


@triton.jit
def load_queries(b, first_row, row, h, exists, q, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Packed rows of ``TileRows``: ``row`` of the sequence and query head ``h`` of each; 0 where not ``exists``.

    [BLOCK_M, BLOCK_DIM / STEP]: every STEP-th column from FIRST on.
    """
    col = FIRST + STEP * tl.arange(0, q.BLOCK_DIM // STEP)[None, :]
    start = first_row.to(tl.int64) * q.stride_row
    if not q.PACKED:
        start = tl.cast(b, tl.int64) * q.stride_b
    at = start + row.to(tl.int64) * q.stride_row + h.to(tl.int64) * q.stride_head
    return tl.load(q.ptr + at[:, None] + col, mask=exists[:, None] & (col < q.DIM), other=0.0)


@triton.jit
def load_rows(place, first_row, row, h, exists, q, scale, EIGHT_BIT: tl.constexpr, call):
    """Queries as ``TileRows`` has them: the columns, or the even and the odd ones with a factor of their products."""
    if not EIGHT_BIT:
        even = load_queries(place.b, first_row, row, h, exists, q, 0, 1)
        odd, factor = even, 1.0
    else:
        even = load_queries(place.b, first_row, row, h, exists, q, 0, 2)
        odd = load_queries(place.b, first_row, row, h, exists, q, 1, 2)
        factor = tl.full([even.shape[0]], 1.0, tl.float32)
        if even.dtype == tl.bfloat16:
            factor = eight_bit.power_of_rows(even, odd)
            even, odd = eight_bit.scaled(even, factor), eight_bit.scaled(odd, factor)
        factor *= eight_bit.scale_of(scale, place, call)
    return even, odd, factor


@triton.jit
def attend_tile(place, shape, row, h, part, head, call):
    """``attend`` after loading the rows; the scales of 8-bit values are left to ``finish``."""
    exists, i = tl.arange(0, row.shape[0]) < part.count, (row + shape.high - shape.num_rows)[:, None]
    band, shift, GROUP = call.mods.band, shape.high - shape.num_rows, call.GROUP
    HAS_TREE: tl.constexpr = mods.place_of(call.mods.MASKS, "tree") >= 0
    if HAS_TREE:
        i = mods.tree_places(head.masks[0].base, head.masks[0].count, head.masks[0].shift, i)
    last, clear_last = i * 0 + shape.high - 1, shape.high - 1
    if band.right is not None:
        right = work.right_of(place.b, call)
        last = tl.minimum(last, i + right)
        clear_last = tl.minimum(clear_last, place.first // GROUP + shift + right)
    if HAS_TREE:
        # In a tree the mask says which drafts a row sees; all see what is before them.
        last = tl.where(head.masks[0].count > 0, shape.high - 1, last)
        clear_last = tl.where(head.masks[0].count > 0, shift - 1, clear_last)
    first, clear_first = None, shape.low
    if HAS_TREE and band.left is not None:
        first, clear_first = i - band.left, tl.maximum(clear_first, shape.high - 1 - band.left)
    elif band.left is not None:
        last_row = tl.minimum((place.first + call.schedule.BLOCK_M - 1) // GROUP, shape.num_rows - 1)
        first, clear_first = tl.maximum(i - band.left, shape.low), tl.maximum(clear_first, last_row + shift - band.left)
        if band.chunk is not None:
            # Chunks begin with the first key that counts.
            pad = work.first_key_of(place.b, call)
            first = tl.maximum(first, pad + masks.chunk_start(i - pad, band.chunk))
            clear_first = tl.maximum(clear_first, pad + masks.chunk_start(last_row + shift - pad, band.chunk))
            last = tl.minimum(last, pad + masks.chunk_stop(i - pad, band.chunk) - 1)
            clear_last = tl.minimum(
                clear_last, pad + masks.chunk_stop(place.first // GROUP + shift - pad, band.chunk) - 1
            )
    elif call.leftpad is not None and not HAS_TREE:
        first = i * 0 + shape.low
    EIGHT_BIT: tl.constexpr = call.cache.scales.EIGHT_BIT
    q, q_odd, q_scale = load_rows(place, shape.first_row, row, h, exists, call.q, call.cache.scales.k, EIGHT_BIT, call)
    qv, qv_odd, qv_scale = q, q_odd, q_scale
    if call.qv.ptr is not None:
        qv, qv_odd, qv_scale = load_rows(
            place, shape.first_row, row, h, exists, call.qv, call.cache.scales.v, EIGHT_BIT, call
        )
    acc, row_max, row_sum = attend(
        place,
        TileRows(
            q, q_odd, q_scale, qv, qv_odd, qv_scale, i, shape.low, shape.high, first, last, clear_first, clear_last
        ),
        part,
        head,
        call,
    )
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, b, place, packed, col, shape, call, writes_lse=True):
    """Normalises packed rows [ROWS], with columns ``col`` [1, BLOCK_DV], and stores them; sinks join here, once.

    Where several callers finish columns of the same rows, one ``writes_lse``.
    """
    row, h, exists = work.rows_of_tile(packed, place.h_kv, shape.num_rows, call.GROUP)
    top, total = row_max, row_sum
    if call.cache.scales.EIGHT_BIT:
        acc *= eight_bit.scale_of(call.cache.scales.v, place, call)
    if call.sinks is not None:
        sink = tl.load(call.sinks + h).to(tl.float32)
        sink = tl.where(b < call.queries.count, sink, float("-inf"))
        rescale, row_max, row_sum = softmax.add_sink(row_max, row_sum, sink, call.mods.LARGE)
        acc = acc * rescale[:, None]
    scale, lse = softmax.finalise(row_max, row_sum, call.mods.LARGE)
    out = tl.where(scale[:, None] == 0.0, 0.0, acc * scale[:, None])
    num_heads, row64, h64 = call.num_heads_kv * call.GROUP, row.to(tl.int64), h.to(tl.int64)
    if not call.out.PACKED:
        start = tl.cast(b, tl.int64) * call.out.stride_b
        lse_at = (tl.cast(b, tl.int64) * num_heads + h64) * call.queries.length + row64
    else:
        start = shape.first_row.to(tl.int64) * call.out.stride_row
        lse_at = h64 * call.queries.length + shape.first_row + row64
    at = start + row64 * call.out.stride_row + h64 * call.out.stride_head
    out = out.to(call.out.ptr.dtype.element_ty)
    tl.store(call.out.ptr + at[:, None] + col, out, mask=exists[:, None] & (col < call.out.DIM))
    if writes_lse:
        softmax.store_lse(call.results.lse, lse_at, lse, exists, call.mods.LARGE)
        if call.results.max_scores is not None:
            top_at = call.results.max_scores + lse_at * (2 if call.mods.LARGE else 1)
            tl.store(top_at, softmax.largest(top, total, call.mods.LARGE), mask=exists)


@triton.jit
def share_tile(b, base, counter, place, shape, part, call):
    """Finishes a tile of several states once all have been stored; each program that waits for that does some rows.

    base: The slot of the tile's first row and state.
    """
    folds, rank, step = states.arrive(
        counter, part.stop - part.first, part.first // shape.item_states, shape.num_states,
        shape.num_states * part.count * call.out.DIM, part.waits, call.schedule.PATIENCE,
        call.schedule.splitting.FIXED > 0,
    )  # fmt: skip
    if folds:
        RUN: tl.constexpr = call.schedule.splitting.RUN
        AHEAD: tl.constexpr = call.schedule.AHEAD
        FOLD_ROWS: tl.constexpr = call.schedule.FOLD_ROWS
        # With few states more rows are loaded at once, which saves iterations.
        FEW: tl.constexpr = (4 + RUN - 1) // RUN * RUN
        is_few = False
        if call.schedule.BLOCK_M > 32:
            is_few = shape.num_states <= FEW
        if is_few:
            fold_rows(rank, step, b, base, place, shape, part, call, 4 * FOLD_ROWS, FEW)
        else:
            fold_rows(rank, step, b, base, place, shape, part, call, FOLD_ROWS, AHEAD)


@triton.jit
def fold_rows(rank, step, b, base, place, shape, part, call, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Finishes every step-th group of ROWS of a tile, from ``rank`` on; see ``states.fold_stored``."""
    for group in range(rank, (part.count + ROWS - 1) // ROWS, step):
        first = group * ROWS
        acc, row_max, row_sum = states.fold_stored(
            base + first, part.pitch, shape, part.count - first, call, ROWS, AHEAD
        )
        packed, col = place.first + first + tl.arange(0, ROWS), tl.arange(0, call.out.BLOCK_DIM)[None, :]
        finish(acc, row_max, row_sum, b, place, packed, col, shape, call)


@triton.jit
def run_tile(place, state, stop_state, b, slots_before, tiles_before, waits, shape, call):
    """Computes states of a tile, and finishes the tile if no other state of it is still to be stored."""
    BLOCK_M: tl.constexpr = call.schedule.BLOCK_M
    # Rows past the last packed sequence have no keys, but addresses must exist for them too.
    valid_b, h_kv, first = place.b, place.h_kv, place.first
    place = TilePlace(valid_b, work.entry_of(valid_b, call), h_kv, first, work.first_page_of(valid_b, call))
    packed, col = first + tl.arange(0, BLOCK_M), tl.arange(0, call.out.BLOCK_DIM)[None, :]
    row, h, _exists = work.rows_of_tile(packed, h_kv, shape.num_rows, call.GROUP)
    first_block, stop_block = work.blocks_of(valid_b, first, state, stop_state, shape, call)
    pitch = shape.num_rows * call.GROUP
    base = slots_before + tl.cast(h_kv, tl.int64) * shape.num_states * pitch + first
    keeps = shape.num_states == 1
    if call.schedule.KEEPS:
        keeps = stop_state - state == shape.num_states
    # States kept in registers are folded run by run too, so that the bits are the same.
    part = Part(
        state, stop_state, first_block, stop_block, shape.chunk // call.schedule.BLOCK_N,
        tl.where(keeps, call.schedule.splitting.RUN, shape.state_splits), keeps,
        base + tl.cast(state, tl.int64) * pitch, pitch, tl.minimum(pitch - first, BLOCK_M), waits,
    )  # fmt: skip
    head = mods.head_of(call.mods, valid_b, h[:, None], shape.num_rows, shape.high, row[:, None])
    acc, row_max, row_sum = attend_tile(place, shape, row, h, part, head, call)
    if call.results.acc is None:  # noqa: SIM114 a compile-time condition
        finish(acc, row_max, row_sum, b, place, packed, col, shape, call)
    elif keeps:
        finish(acc, row_max, row_sum, b, place, packed, col, shape, call)
    else:
        counter = call.results.counters + 2 * (tiles_before + h_kv * shape.num_tiles + first // BLOCK_M)
        share_tile(b, base, counter, place, shape, part, call)


@triton.jit
def cache_attention(call):
    """Attention over a cache, of a ``call.DecodeCall``; persistent: as many programs as the device runs at once."""
    SEARCH: tl.constexpr = call.schedule.SEARCH
    spans = work.span_of(tl.full((), 0, tl.int32) if SEARCH == 1 else tl.arange(0, SEARCH), call)
    sizing, at, stop = work.share_of(spans, call)
    # This program's part of the items: those that begin in its share of the cost.
    while at < stop:
        exists, at, b, slots_before, tiles_before, shape, h_kv, first, state, stop_state = work.next_part(
            at, stop, spans, sizing, call
        )
        if exists:
            place = TilePlace(tl.minimum(b, call.queries.count - 1), 0, h_kv, first)
            run_tile(place, state, stop_state, b, slots_before, tiles_before, at >= stop, shape, call)
