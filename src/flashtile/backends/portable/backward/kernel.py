"""The backward's kernels in Triton: probabilities are recomputed from lse, so no quadratic buffer is kept.

    delta  = rowsum(dout * out) - dlse                 one float32 for each row
    dprobs = dout @ v^T                                dscores = probs * (dprobs - delta)
    dv = probs^T @ dout    dk = dscores^T @ q    dq = dscores @ k    dbias = dscores, summed over what broadcasts

One kernel computes dk and dv by blocks of keys, one dq by blocks of queries. Each element of these is summed by one
program in a fixed order, so they are bitwise repeatable without atomics. The kernel of dq also adds its dscores to
dbias, by atomic adds; a large dbias, or one that must be repeatable, has a kernel of its own (``dbias``).
Mathematics: docs/algorithm.md. Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, mods, softmax
from flashtile.backends.gpu.device.dropout import keep_tile, philox_key_of
from flashtile.backends.gpu.device.mods import multiple
from flashtile.backends.gpu.device.tiles import (
    HeadRows,
    KeyBlocks,
    first_packed_tile,
    key_blocks,
    phase_blocks,
    query_blocks,
)
from flashtile.backends.portable.device.tiles import (
    AT_ONCE,
    add_product,
    append,
    load_rows,
    locate,
    scaled,
    store_contiguous,
    times_transposed,
    zeros,
)


@triton.jit
def probabilities(product, lse, call, head, at, edge, partial, WITH_SLOPE: tl.constexpr, given=None):
    """Normalised probabilities of a block of ``q @ k^T``, in either orientation, and the mods' slope.

    lse is a tuple, ``across`` the block. If ``edge``, a constexpr or a run-time value, the band and the end of the keys
    are masked; ``partial`` and ``given`` as of ``mods.select``.
    """
    x, scale_log2, slope = mods.apply(product, call.mods, head, at, WITH_SLOPE, given)
    if call.mods.LARGE:  # noqa: SIM108
        # Exact where it counts: near the maximum.
        probs = tl.exp2((x - lse[0]) * softmax.LOG2_E - lse[1])
    else:
        probs = tl.exp2(x * scale_log2 - lse[0])
    if mods.place_of(call.mods.SCORES, "score_mod") >= 0:
        # What it makes of rows past the end may be infinite.
        probs = tl.where(lse[0] == float("inf"), 0.0, probs)
    return mods.select(probs, call.mods, head, at, 0.0, edge, partial, given), slope


@triton.jit
def load_row_terms(of_rows, num_heads, head, queries, rows):
    """Loads a tuple of lse, and of what it lost, and delta of rows of a head.

    Terms of rows past the end make every probability and gradient 0.
    """
    at = (tl.cast(queries.batch_index, tl.int64) * num_heads + head.h) * of_rows.stride_head + queries.start
    lse = (tl.load(of_rows.lse + at + rows, mask=rows < queries.length, other=float("inf")),)
    if of_rows.rest is not None:
        lse = append(lse, tl.load(of_rows.rest + at + rows, mask=rows < queries.length, other=0.0))
    delta = tl.load(of_rows.delta + at + rows, mask=rows < queries.length, other=0.0)
    return lse, delta


@triton.jit
def across(lse, AXIS: tl.constexpr):
    """The tuple of lse with a dimension of 1 at AXIS, along which a block has its keys."""
    parts = ()
    for n in tl.static_range(len(lse)):
        parts = append(parts, tl.expand_dims(lse[n], AXIS))
    return parts


@triton.jit
def has_lost(of_rows, call, b, h, queries):
    """Whether a sequence's head has rows to repair."""
    ROWS: tl.constexpr = of_rows.FLAG_ROWS
    if call.queries.cu_seqlens is None:
        first = (tl.cast(b, tl.int64) * call.heads.num_q + h) * tl.cdiv(call.queries.length, ROWS)
    else:
        first = tl.cast(h, tl.int64) * (call.queries.length // ROWS + call.queries.count + 1)
        first += first_packed_tile(queries.start, b, ROWS, 1, 0)
    count, found = tl.cdiv(queries.length, ROWS), 0
    for at in range(0, count, 128):
        block = at + tl.arange(0, 128)
        found = tl.maximum(found, tl.max(tl.load(of_rows.flags + first + block, mask=block < count, other=0), 0))
    return found


@triton.jit
def over_queries(dk, dv, k, v, visit, call, douts, of_rows, grads, tiles, head, place):
    """Adds the contribution of one head's query blocks, the ``tiles.KeyBlocks``, to dk and dv, where needed.

    The scores' first dimension is the keys.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    queries, n_first, philox_key = place.queries, place.block * BLOCK_N, philox_key_of(call, head.b, head.h)
    row_at = (tl.cast(queries.batch_index, tl.int64) * call.heads.num_q + head.h) * of_rows.stride_head + queries.start
    cols = n_first + tl.arange(0, BLOCK_N)[:, None]
    LISTED: tl.constexpr = call.mods.band.lists is not None
    PACKED: tl.constexpr = call.queries.cu_seqlens is not None
    HAS_REST: tl.constexpr = of_rows.rest is not None
    for position in tl.range(visit.start, visit.stop):
        m = masks.block_at(position, call.mods.band.lists, BLOCK_M)
        first = m * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        is_wanted = True
        if of_rows.flags is not None:
            lse, _delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
            is_wanted = tl.min(lse[0], 0) < float("inf")
        if is_wanted:
            p = rows[None, :] + head.shift
            edge = visit.MASKED
            if visit.full_start is not None:
                edge = (m < visit.full_start) | (m >= visit.full_stop)
            q = load_rows(HeadRows(call.q, head.h, queries), first, BLOCK_M, visit.MASKED)
            # Rows past the end have lse +inf, so probability 0: dense ones from prepare_rows, packed ones by a select.
            # A listed block may reach past all that is stored of a head, so what lists load is checked.
            if not HAS_REST:
                if visit.MASKED and LISTED:
                    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
                else:
                    lse = (tl.load(of_rows.lse + row_at + first + tl.arange(0, BLOCK_M)),)
                    delta = tl.load(of_rows.delta + row_at + first + tl.arange(0, BLOCK_M))
                    if visit.MASKED and PACKED:
                        lse = (tl.where(rows < queries.length, lse[0], float("inf")),)
                        delta = tl.where(rows < queries.length, delta, 0.0)
            at = mods.pairs_of(head, p, cols)
            given = mods.read(call.mods, head, at, visit.PARTIAL)
            product = times_transposed(k, q, INPUT_PRECISION)  # [BLOCK_N, BLOCK_M] float32
            # Three numbers a row take registers that dk and dv need, so they are loaded when the product is there. What
            # might be a NaN is checked: the rest past a packed sequence's end, and rows that a repair has no terms of.
            if HAS_REST:
                if of_rows.flags is not None or (visit.MASKED and (LISTED or PACKED)):
                    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
                else:
                    lse = (
                        tl.load(of_rows.lse + row_at + first + tl.arange(0, BLOCK_M)),
                        tl.load(of_rows.rest + row_at + first + tl.arange(0, BLOCK_M)),
                    )
                    delta = tl.load(of_rows.delta + row_at + first + tl.arange(0, BLOCK_M))
            probs, slope = probabilities(product, across(lse, 0), call, head, at, edge, visit.PARTIAL, True, given)
            dout = load_rows(HeadRows(douts, head.h, queries), first, BLOCK_M, visit.MASKED)
            dprobs = times_transposed(v, dout, INPUT_PRECISION)
            kept_probs = probs
            if call.mods.dropout.rng_state_ptr is not None:
                kept = tl.trans(keep_tile(call.mods.dropout, philox_key, head.b, first, n_first, BLOCK_M, BLOCK_N))
                kept_probs = tl.where(kept, probs, 0.0)
                dprobs = tl.where(kept, dprobs * call.mods.dropout.keep_scale, 0.0)
            if grads.dv is not None:
                dv = add_product(dv, kept_probs.to(dout[0].dtype), dout, INPUT_PRECISION)
            if grads.dk is not None:
                dscores = mods.score_gradient(probs, dprobs, delta[None, :], slope, call.mods, edge)
                dk = add_product(dk, dscores.to(q[0].dtype), q, INPUT_PRECISION)
    return dk, dv


@triton.jit
def attention_backward_dkdv(call, douts, of_rows, grads, tiles):
    """Computes dk and dv of BLOCK_N keys of one key head, summed over the query heads of its group in order.

    Args:
        call: ``records.Call``.
        douts: ``records.Rows`` of the output's gradient.
        of_rows: ``RowTerms``.
        grads: ``KeyGradients``.
        tiles: ``tiles.TileSizes``.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    LISTED: tl.constexpr = call.mods.band.lists is not None
    ONE_LOOP: tl.constexpr = tiles.ONE_LOOP and not LISTED
    BRANCH: tl.constexpr = ONE_LOOP and not tiles.MASK_ALL
    heads, splits = call.heads.group_size, 1
    if grads.heads_per_split is not None:
        heads, splits = (
            grads.heads_per_split,
            (call.heads.group_size + grads.heads_per_split - 1) // grads.heads_per_split,
        )
    place = locate(call, tiles, splits)
    head_kv, queries, keys = place.head // splits, place.queries, place.keys
    ADDS: tl.constexpr = grads.ADDS
    n_first = place.block * BLOCK_N
    if n_first >= keys.length:
        return
    if ADDS:  # noqa: SIM102
        if queries.length == 0:
            return
    REPAIRS: tl.constexpr = of_rows.flags is not None
    if REPAIRS:
        first = head_kv * call.heads.group_size
        found = 0
        for h in range(first, first + call.heads.group_size):
            found = tl.maximum(found, has_lost(of_rows, call, place.b, h, queries))
        if found == 0:
            return
    k = load_rows(HeadRows(call.k, head_kv, keys), n_first, BLOCK_N, True)
    v = load_rows(HeadRows(call.v, head_kv, keys), n_first, BLOCK_N, True)
    m_min, m_full_min, m_full_max, m_max = query_blocks(
        n_first, tl.minimum(n_first + BLOCK_N, keys.length) - 1, queries.length, keys.length, call.mods.band, BLOCK_M
    )
    dk = zeros(BLOCK_N, call.q.BLOCK_DIM)
    dv = zeros(BLOCK_N, call.v.BLOCK_DIM)
    first = place.head % splits * heads
    HAS_START: tl.constexpr = call.mods.band.right is not None or call.mods.band.bounds is not None or LISTED
    for member in range(first, tl.minimum(first + heads, call.heads.group_size)):
        h = head_kv * call.heads.group_size + member
        head = mods.head_of(call.mods, place.b, h, queries.length, keys.length)
        start, full_start, full_stop, stop = m_min, m_full_min, m_full_max, m_max
        if call.mods.band.bounds is not None:
            found = masks.bounds_of(call.mods.band.bounds, place.b, h, place.block, place.b < call.keys.count, 1)
            start, full_start, full_stop, stop = masks.narrowed(start, full_start, full_stop, stop, found, BLOCK_M)
        if LISTED:
            start, full_start, full_stop, stop = masks.positions_of(
                call.mods.band.lists, place.b, h, n_first, place.b < call.keys.count, queries.length, BLOCK_M
            )
        # Phases: rows on the band's right edge, rows that keep every key, the left edge and the end; ONE_LOOP: all.
        for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_START else 1, 3):
            m_start, m_stop = phase_blocks(phase, start, full_start, full_stop, stop, ONE_LOOP)
            dk, dv = over_queries(
                dk, dv, k, v,
                KeyBlocks(
                    m_start, m_stop, full_start if BRANCH else None, full_stop if BRANCH else None, phase != 1,
                    phase == 0 or not LISTED,
                ),
                call, douts, of_rows, grads, tiles, head, place,
            )  # fmt: skip
    num_heads, head = call.heads.num_q // call.heads.group_size * splits, place.head
    dk, dv = scaled(dk, call.mods.scale), scaled(dv, call.mods.dropout.keep_scale)
    if grads.dk is not None:
        store_contiguous(
            grads.dk, call.keys, num_heads, head, keys, n_first, dk, call.q.DIM, call.q.BLOCK_DIM, ADDS, REPAIRS
        )
    if grads.dv is not None:
        store_contiguous(
            grads.dv, call.keys, num_heads, head, keys, n_first, dv, call.v.DIM, call.v.BLOCK_DIM, ADDS, REPAIRS
        )


@triton.jit
def add_to_bias(sums, dscores, head, rows, cols, num_rows):
    """Adds a block of dscores to ``BiasSums``; rows [BLOCK_M] and cols [1, BLOCK_N] are its rows and keys."""
    h, row, col = head.h, rows[:, None], cols
    pitch, num_cols = multiple(sums.cols, sums.VECTOR), multiple(head.seqlen_k, sums.VECTOR)
    exists = (row < num_rows) & (col < num_cols)
    if sums.SUM_HEADS:
        h = 0
    # Rows and keys that do not exist have dscores 0.
    if sums.SUM_ROWS:
        dscores, row, exists = tl.sum(dscores, 0, keep_dims=True), tl.zeros([1, 1], tl.int32), col < num_cols
    if sums.SUM_COLS:
        dscores, col, exists = tl.sum(dscores, 1, keep_dims=True), tl.zeros([1, 1], tl.int32), row < num_rows
        pitch = 1
    plane = tl.cast(head.b % sums.entries * sums.heads + h, tl.int64) * sums.rows * pitch
    tl.atomic_add(sums.ptr + plane + (row.to(tl.int64) * pitch + col), dscores, mask=exists, sem="relaxed")


@triton.jit
def over_keys(dq, q, dout, lse, delta, rows, visit, call, tiles, head, place, sums):
    """Adds the contribution of the key blocks of ``tiles.KeyBlocks`` to dq and sums."""
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    keys, philox_key = place.keys, philox_key_of(call, head.b, head.h)
    head_kv = head.h // call.heads.group_size
    p = rows[:, None] + head.shift
    for position in tl.range(visit.start, visit.stop):
        n = masks.block_at(position, call.mods.band.lists, BLOCK_N)
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        edge = visit.MASKED
        if visit.full_start is not None:
            edge = (n < visit.full_start) | (n >= visit.full_stop)
        k = load_rows(HeadRows(call.k, head_kv, keys), first, BLOCK_N, visit.MASKED)
        at = mods.pairs_of(head, p, cols)
        given = mods.read(call.mods, head, at, visit.PARTIAL)
        product = times_transposed(q, k, INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        probs, slope = probabilities(product, across(lse, 1), call, head, at, edge, visit.PARTIAL, True, given)
        v = load_rows(HeadRows(call.v, head_kv, keys), first, BLOCK_N, visit.MASKED)
        dprobs = times_transposed(dout, v, INPUT_PRECISION)
        if call.mods.dropout.rng_state_ptr is not None:
            m_first = place.block * tiles.BLOCK_M
            kept = keep_tile(call.mods.dropout, philox_key, head.b, m_first, first, tiles.BLOCK_M, BLOCK_N)
            dprobs = tl.where(kept, dprobs * call.mods.dropout.keep_scale, 0.0)
        if sums.ptr is not None:
            # The bias is added to scores that softcap has changed.
            masked = True if sums.SUM_ROWS else edge
            dbias = mods.score_gradient(probs, dprobs, delta[:, None], 1.0, call.mods, masked)
            add_to_bias(sums, dbias, head, rows, cols, place.queries.length)
        dscores = mods.score_gradient(probs, dprobs, delta[:, None], slope, call.mods, edge)
        dq = add_product(dq, dscores.to(k[0].dtype), k, INPUT_PRECISION)
    return dq


@triton.jit
def attention_backward_dq(call, douts, of_rows, dq_ptr, bias_sums, tiles, ADDS: tl.constexpr):
    """Computes dq of BLOCK_M rows of one head, contiguous at ``dq_ptr``, or ADDS it; bias_sums: ``BiasSums``."""
    place = locate(call, tiles, None)
    if place.block * tiles.BLOCK_M >= place.queries.length:
        return
    if ADDS:  # noqa: SIM102
        if place.keys.length == 0:
            return
    dq_of_rows(call, douts, of_rows, dq_ptr, ADDS, bias_sums, tiles, place)


@triton.jit
def repair_dq(call, douts, of_rows, dq_ptr, bias_sums, tiles, count):
    """Adds what lost rows add to dq; in programs as of ``repair_forward``, count being the number of tiles."""
    step = tl.num_programs(0)
    for first in tl.range(tl.program_id(0), count, step * AT_ONCE, disable_licm=True):
        if least_lse(call, of_rows, tiles, first + step * tl.arange(0, AT_ONCE)[:, None], count) < float("inf"):
            for number in tl.range(first, tl.minimum(first + step * AT_ONCE, count), step, disable_licm=True):
                if least_lse(call, of_rows, tiles, number + tl.zeros([1, 1], tl.int32), count) < float("inf"):
                    place = locate(call, tiles, None, number)
                    dq_of_rows(call, douts, of_rows, dq_ptr, True, bias_sums, tiles, place)


@triton.jit
def least_lse(call, of_rows, tiles, numbers, count):
    """The least lse of all rows of a column of tiles, those outside not counting."""
    place = locate(call, tiles, None, tl.minimum(numbers, count - 1))
    rows = place.block * tiles.BLOCK_M + tl.arange(0, tiles.BLOCK_M)[None, :]
    at = (tl.cast(place.queries.batch_index, tl.int64) * call.heads.num_q + place.head) * of_rows.stride_head
    exists = (rows < place.queries.length) & (numbers < count)
    lse = tl.load(of_rows.lse + at + place.queries.start + rows, mask=exists, other=float("inf"))
    return tl.min(tl.min(lse, 1), 0)


@triton.jit
def dq_of_rows(call, douts, of_rows, dq_ptr, ADDS: tl.constexpr, bias_sums, tiles, place):
    """``attention_backward_dq`` of the tile at a ``tiles.HeadBlock``."""
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    LISTED: tl.constexpr = call.mods.band.lists is not None
    ONE_LOOP: tl.constexpr = tiles.ONE_LOOP and not LISTED
    BRANCH: tl.constexpr = ONE_LOOP and not tiles.MASK_ALL
    REPAIRS: tl.constexpr = of_rows.flags is not None
    h, queries, keys = place.head, place.queries, place.keys
    m_first = place.block * BLOCK_M
    head = mods.head_of(call.mods, place.b, h, queries.length, keys.length)
    q = load_rows(HeadRows(call.q, h, queries), m_first, BLOCK_M, True)
    dout = load_rows(HeadRows(douts, h, queries), m_first, BLOCK_M, True)
    rows = m_first + tl.arange(0, BLOCK_M)
    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
    n_min, n_full_min, n_full_max, n_max = key_blocks(
        m_first, tl.minimum(m_first + BLOCK_M, queries.length) - 1, queries.length, keys.length, call.mods.band, BLOCK_N
    )
    if call.mods.band.bounds is not None:
        found = masks.bounds_of(call.mods.band.bounds, place.b, h, place.block, place.b < call.queries.count, 1)
        n_min, n_full_min, n_full_max, n_max = masks.narrowed(n_min, n_full_min, n_full_max, n_max, found, BLOCK_N)
    if LISTED:
        n_min, n_full_min, n_full_max, n_max = masks.positions_of(
            call.mods.band.lists, place.b, h, m_first, place.b < call.queries.count, keys.length, BLOCK_N
        )
    dq = zeros(BLOCK_M, call.q.BLOCK_DIM)
    # Phases as in the forward.
    HAS_START: tl.constexpr = call.mods.band.left is not None or call.mods.band.bounds is not None or LISTED
    for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_START else 1, 3):
        n_start, n_stop = phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        dq = over_keys(
            dq, q, dout, lse, delta, rows,
            KeyBlocks(
                n_start, n_stop, n_full_min if BRANCH else None, n_full_max if BRANCH else None, phase != 1,
                phase == 0 or not LISTED,
            ),
            call, tiles, head, place, bias_sums,
        )  # fmt: skip
    dq = scaled(dq, call.mods.scale)
    store_contiguous(
        dq_ptr, call.queries, call.heads.num_q, h, queries, m_first, dq, call.q.DIM, call.q.BLOCK_DIM, ADDS, REPAIRS
    )
