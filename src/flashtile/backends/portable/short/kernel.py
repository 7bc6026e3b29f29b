"""The backward of short packed sequences: a program has all rows and keys of one, so nothing is summed by others.

The mathematics is ``backward.kernel``'s. delta is computed from the rows that are there anyway, dq is stored as it is
computed, and a tensor's element is read or written once: no workspace, no launch before or after, and a fixed order.
No tile has rows of two sequences, so what one of them holds, NaN included, never meets another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mods, softmax
from flashtile.backends.gpu.device.tiles import HeadRows, sequence_of
from flashtile.backends.portable.backward.kernel import probabilities
from flashtile.backends.portable.device.tiles import (
    add_product,
    load_contiguous,
    load_rows,
    scaled,
    store_contiguous,
    times_transposed,
    zeros,
)


@triton.jit
def attention_backward_short(call, douts, results, dq_ptr, grads, tiles):
    """Computes dk and dv of one key head of one sequence, and dq of the query heads of its group.

    Args:
        call: ``records.Call``.
        douts: ``records.Rows`` of the output's gradient.
        results: ``ForwardResults``.
        dq_ptr: Contiguous, like q.
        grads: ``KeyGradients``.
        tiles: ``tiles.TileSizes``.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    group_size = call.heads.group_size
    num_kv = call.heads.num_q // group_size
    b, head_kv = tl.program_id(0) // num_kv, tl.program_id(0) % num_kv
    clear_spare(call, dq_ptr, grads, b, head_kv, BLOCK_M)
    queries, keys = sequence_of(call.queries, b), sequence_of(call.keys, b)
    k = load_rows(HeadRows(call.k, head_kv, keys), 0, BLOCK_N, True)
    v = load_rows(HeadRows(call.v, head_kv, keys), 0, BLOCK_N, True)
    dk, dv = zeros(BLOCK_N, call.q.BLOCK_DIM), zeros(BLOCK_N, call.v.BLOCK_DIM)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[:, None]
    # Addresses that do not change with the head would be computed before the loop, and spill.
    for h in tl.range(head_kv * group_size, (head_kv + 1) * group_size, disable_licm=True):
        head = mods.head_of(call.mods, b, h, queries.length, keys.length)
        q = load_rows(HeadRows(call.q, h, queries), 0, BLOCK_M, True)
        dout = load_rows(HeadRows(douts, h, queries), 0, BLOCK_M, True)
        lse_log2, delta = terms_of_rows(call, results, dout, h, queries, rows)
        at = mods.pairs_of(head, rows[None, :] + head.shift, cols)
        product = times_transposed(k, q, INPUT_PRECISION)  # [BLOCK_N, BLOCK_M] float32
        probs, slope = probabilities(product, (lse_log2[None, :],), call, head, at, True, True, True)
        dprobs = times_transposed(v, dout, INPUT_PRECISION)
        dscores = mods.score_gradient(probs, dprobs, delta[None, :], slope, call.mods, True).to(q[0].dtype)
        dv = add_product(dv, probs.to(dout[0].dtype), dout, INPUT_PRECISION)
        dk = add_product(dk, dscores, q, INPUT_PRECISION)
        dq = add_product(zeros(BLOCK_M, call.q.BLOCK_DIM), tl.trans(dscores), k, INPUT_PRECISION)
        dq = scaled(dq, call.mods.scale)
        store_contiguous(dq_ptr, call.queries, call.heads.num_q, h, queries, 0, dq, call.q.DIM, call.q.BLOCK_DIM)
    dk = scaled(dk, call.mods.scale)
    store_contiguous(grads.dk, call.keys, num_kv, head_kv, keys, 0, dk, call.q.DIM, call.q.BLOCK_DIM)
    store_contiguous(grads.dv, call.keys, num_kv, head_kv, keys, 0, dv, call.v.DIM, call.v.BLOCK_DIM)


@triton.jit
def terms_of_rows(call, results, dout, h, queries, rows):
    """Lse in base 2 and delta of a head's rows; (inf, 0), so that their probabilities are 0, without keys or past all.

    dout: the rows' tile.
    """
    exists = rows < queries.length
    out = load_contiguous(
        results.out, call.queries, call.heads.num_q, h, queries, 0, dout[0].shape[0], call.v.DIM, call.v.BLOCK_DIM
    )
    delta = tl.sum(out[0].to(tl.float32) * dout[0].to(tl.float32), 1)
    for part in tl.static_range(1, len(out)):
        delta += tl.sum(out[part].to(tl.float32) * dout[part].to(tl.float32), 1)
    i = queries.start + rows
    if results.dlse is not None:
        dlse_at = results.dlse + tl.cast(h, tl.int64) * results.stride_head + i.to(tl.int64) * results.stride_row
        delta -= tl.load(dlse_at, mask=exists, other=0.0)
    lse = softmax.load_lse(results.lse, tl.cast(h, tl.int64) * results.length + i, exists, False)
    return softmax.lse_log2_of(lse), tl.where(lse == float("-inf"), 0.0, delta)


@triton.jit
def clear_spare(call, dq_ptr, grads, b, head_kv, BLOCK: tl.constexpr):
    """Sets the gradients of rows and of keys past the last sequence to 0, each program a share."""
    group_size, step = call.heads.group_size, call.queries.count * BLOCK
    num_kv = call.heads.num_q // group_size
    queries, keys = sequence_of(call.queries, call.queries.count), sequence_of(call.keys, call.keys.count)
    of_q, of_v = zeros(BLOCK, call.q.BLOCK_DIM), zeros(BLOCK, call.v.BLOCK_DIM)
    for first in range(b * BLOCK, queries.length, step):
        for h in range(head_kv * group_size, (head_kv + 1) * group_size):
            store_contiguous(
                dq_ptr, call.queries, call.heads.num_q, h, queries, first, of_q, call.q.DIM, call.q.BLOCK_DIM
            )
    for first in range(b * BLOCK, keys.length, step):
        store_contiguous(grads.dk, call.keys, num_kv, head_kv, keys, first, of_q, call.q.DIM, call.q.BLOCK_DIM)
        store_contiguous(grads.dv, call.keys, num_kv, head_kv, keys, first, of_v, call.v.DIM, call.v.BLOCK_DIM)
