"""The gradient of an additive bias: dscores, summed over every dimension the bias broadcasts.

A program owns one tile of the bias and loops, in a fixed order, over all (sequence, head, rows, keys) that read it. So
no buffer of the scores' size is needed where the bias broadcasts, and the sum is bitwise repeatable. Where a batch
shares a bias of few tiles, several programs own one, each with a part of the batch and sums of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, mods
from flashtile.backends.gpu.device.dropout import keep_tile, philox_key_of
from flashtile.backends.gpu.device.tiles import HeadRows, key_blocks, sequence_of
from flashtile.backends.portable.backward.kernel import across, load_row_terms, probabilities
from flashtile.backends.portable.device.tiles import load_rows, times_transposed


@triton.jit
def tile_gradient(acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles, in_part):
    """Adds dscores of BLOCK_M rows and BLOCK_N keys of one sequence and head, 0 where a row does not keep a key.

    For a ``Derivative`` it adds the gradient of what that loads: its result's gradient, times the derivative. in_part:
    ``partial`` of ``mods.select``.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    head_kv = head.h // call.heads.group_size
    q = load_rows(HeadRows(call.q, head.h, queries), m_first, BLOCK_M, True)
    k = load_rows(HeadRows(call.k, head_kv, keys), n_first, BLOCK_N, True)
    rows = m_first + tl.arange(0, BLOCK_M)
    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
    product = times_transposed(q, k, INPUT_PRECISION)
    at = mods.block_of(head, m_first, n_first, BLOCK_M, BLOCK_N)
    probs, slope = probabilities(product, across(lse, 1), call, head, at, True, in_part, partial.functions is not None)
    dout = load_rows(HeadRows(douts, head.h, queries), m_first, BLOCK_M, True)
    v = load_rows(HeadRows(call.v, head_kv, keys), n_first, BLOCK_N, True)
    dprobs = times_transposed(dout, v, INPUT_PRECISION)
    if call.mods.dropout.rng_state_ptr is not None:
        philox_key = philox_key_of(call, head.b, head.h)
        kept = keep_tile(call.mods.dropout, philox_key, head.b, m_first, n_first, BLOCK_M, BLOCK_N)
        dprobs = tl.where(kept, dprobs * call.mods.dropout.keep_scale, 0.0)
    dscores = mods.score_gradient(probs, dprobs, delta[:, None], slope, call.mods, True)
    if partial.functions is not None and not partial.IS_ONE:
        dscores = tl.where(dscores == 0.0, 0.0, dscores * mods.partial_of_load(product, call.mods, head, at, partial))
    return acc + dscores


@triton.jit
def listed_gradient(acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles):
    """``tile_gradient``, of nothing where lists leave the tile out."""
    if call.mods.band.lists is None:
        acc = tile_gradient(acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles, True)
    else:
        kind = masks.kind_of(call.mods.band.lists, head.b, head.h, m_first, n_first)
        if kind != 0:
            acc = tile_gradient(
                acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles, kind == 1
            )
    return acc


@triton.jit
def keeps_some(queries, keys, m_first, n_first, call, tiles):
    """Whether a row of a tile keeps a key of it, by the band and the lengths."""
    n_min, _full_min, _full_max, n_max = key_blocks(
        m_first, tl.minimum(m_first + tiles.BLOCK_M, queries.length) - 1, queries.length, keys.length, call.mods.band,
        tiles.BLOCK_N,
    )  # fmt: skip
    n = n_first // tiles.BLOCK_N
    return (n >= n_min) & (n < n_max)


@triton.jit
def attention_backward_dbias(call, douts, of_rows, dbias, partial, tiles):
    """Computes one tile of ``BiasGradient``, contiguous, of one part of the batch, or the like of a ``Derivative``."""
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    PACKED: tl.constexpr = call.queries.cu_seqlens is not None
    m_tiles = 1 if dbias.SUM_ROWS else (dbias.rows + BLOCK_M - 1) // BLOCK_M
    n_tiles = 1 if dbias.SUM_COLS else (dbias.stride_row + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    n_tile, m_tile = pid % n_tiles, pid // n_tiles % m_tiles
    plane = pid // n_tiles // m_tiles
    bias_head, entry = plane % dbias.heads, plane // dbias.heads
    m_start, m_stop = m_tile, m_tile + 1
    n_start, n_stop = n_tile, n_tile + 1
    if dbias.SUM_ROWS:
        m_start, m_stop = 0, (dbias.max_rows + BLOCK_M - 1) // BLOCK_M
    if dbias.SUM_COLS:
        n_start, n_stop = 0, (dbias.max_cols + BLOCK_N - 1) // BLOCK_N
    # Sequences and heads are one loop without a branch, so that the next tile's loads start early.
    first_b, count = entry, 1
    if dbias.SUM_BATCH:
        size = (call.queries.count + dbias.parts - 1) // dbias.parts
        first_b = entry * size
        count = tl.minimum(size, call.queries.count - first_b)
    if dbias.SUM_HEADS:
        count *= call.heads.num_q
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in range(m_start, m_stop):
        for n in range(n_start, n_stop):
            m_first, n_first = m * BLOCK_M, n * BLOCK_N
            stop = count
            if not PACKED:
                queries, keys = sequence_of(call.queries, 0), sequence_of(call.keys, 0)
                stop = tl.where(keeps_some(queries, keys, m_first, n_first, call, tiles), count, 0)
            for i in tl.range(stop):
                b, h = i, bias_head
                if dbias.SUM_HEADS:
                    b, h = i // call.heads.num_q, i % call.heads.num_q
                b += first_b
                queries, keys = sequence_of(call.queries, b), sequence_of(call.keys, b)
                head = mods.head_of(call.mods, b, h, queries.length, keys.length)
                if PACKED:
                    if keeps_some(queries, keys, m_first, n_first, call, tiles):
                        acc = listed_gradient(
                            acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles
                        )
                else:
                    acc = listed_gradient(
                        acc, head, queries, keys, m_first, n_first, call, douts, of_rows, partial, tiles
                    )
    row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if dbias.SUM_ROWS:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), [BLOCK_M, BLOCK_N])
    if dbias.SUM_COLS:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), [BLOCK_M, BLOCK_N])
    at = (tl.cast(plane, tl.int64) * dbias.rows + row) * dbias.stride_row + col
    inside = (row < dbias.rows) & (col < dbias.stride_row)
    tl.store(dbias.ptr + at, acc.to(dbias.ptr.dtype.element_ty), mask=inside)
