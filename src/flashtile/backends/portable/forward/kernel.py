"""The forward in Triton: one kernel for dense and packed sequences and every feature.

A program owns BLOCK_M query rows of one head and walks over the keys once, in base 2. Blocks of keys that every row
keeps run in an unmasked loop; those on the band's edges and at the end of the keys run in a masked one. Mathematics:
docs/algorithm.md. Source: Dao 2023, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, mods, softmax
from flashtile.backends.gpu.device.dropout import keep_tile, philox_key_of
from flashtile.backends.gpu.device.tiles import HeadRows, KeyBlocks, key_blocks, phase_blocks
from flashtile.backends.portable.device.tiles import (
    AT_ONCE,
    add_product,
    append,
    load_contiguous,
    load_rows,
    locate,
    scaled,
    store_contiguous,
    times_transposed,
    zeros,
)


@triton.jit
def attend(acc, row_max, row_sum, q, m_first, visit, call, tiles, head, keys):
    """Adds the key blocks of ``tiles.KeyBlocks`` to the softmax state of BLOCK_M rows."""
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    INPUT_PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    philox_key = philox_key_of(call, head.b, head.h)
    head_kv = head.h // call.heads.group_size
    p = m_first + tl.arange(0, tiles.BLOCK_M)[:, None] + head.shift
    for position in tl.range(visit.start, visit.stop):
        n = masks.block_at(position, call.mods.band.lists, BLOCK_N)
        first = n * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        k = load_rows(HeadRows(call.k, head_kv, keys), first, BLOCK_N, visit.MASKED)
        at = mods.pairs_of(head, p, cols)
        given = mods.read(call.mods, head, at, visit.PARTIAL)
        product = times_transposed(q, k, INPUT_PRECISION)  # [BLOCK_M, BLOCK_N] float32
        x, scale_log2, _slope = mods.apply(product, call.mods, head, at, False, given)
        edge = visit.MASKED
        if visit.full_start is not None:
            edge = (n < visit.full_start) | (n >= visit.full_stop)
        x = mods.select(x, call.mods, head, at, float("-inf"), edge, visit.PARTIAL, given)
        probs, rescale, row_max, row_sum = softmax.update(row_max, row_sum, x, scale_log2, True, call.mods.LARGE)
        if call.mods.dropout.rng_state_ptr is not None:
            kept = keep_tile(call.mods.dropout, philox_key, head.b, m_first, first, tiles.BLOCK_M, BLOCK_N)
            probs = tl.where(kept, probs, 0.0)
        v = load_rows(HeadRows(call.v, head_kv, keys), first, BLOCK_N, visit.MASKED)
        acc = add_product(scaled(acc, rescale[:, None]), probs.to(v[0].dtype), v, INPUT_PRECISION)
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, sinks_ptr, h, in_sequence, keep_scale, LARGE: tl.constexpr):
    """The output and lse of rows after their last key; rows outside every sequence get no sink."""
    if sinks_ptr is not None:
        sink = tl.where(in_sequence, tl.load(sinks_ptr + h).to(tl.float32), float("-inf"))
        rescale, row_max, row_sum = softmax.add_sink(row_max, row_sum, sink, LARGE)
        acc = scaled(acc, rescale[:, None])
    out_scale, lse = softmax.finalise(row_max, row_sum, LARGE)
    out_scale = out_scale * keep_scale
    return scaled_or_zero(acc, out_scale[:, None]), lse


@triton.jit
def scaled_or_zero(tile, factor):
    """``scaled``, but 0 where the factor is, so that an empty row is 0 even if a key that it masks has a NaN in v."""
    parts = ()
    for p in tl.static_range(len(tile)):
        parts = append(parts, tl.where(factor == 0.0, 0.0, tile[p] * factor))
    return parts


@triton.jit
def merged(tile, lse, more, more_lse, LARGE: tl.constexpr):
    """``softmax.merge`` of two tiles."""
    parts, both_lse = (), lse
    for p in tl.static_range(len(tile)):
        if LARGE:
            part, both_lse = softmax.merge_in_parts(tile[p], lse, more[p], more_lse)
        else:
            part, both_lse = softmax.merge(tile[p], lse, more[p], more_lse)
        parts = append(parts, part)
    return parts, both_lse


@triton.jit
def lost_rows(call, output, place, rows, exists):
    """Where lse of rows is stored, which of them another kernel has lost, and which it has not.

    Rows are lost too if out is NaN: probabilities of the first keys, if their scores are huge, may be past what
    float16 has, and are multiplied with 0 once a later key has a greater score.
    """
    queries, num_heads = place.queries, call.heads.num_q
    b = tl.cast(queries.batch_index, tl.int64)
    at = (b * num_heads + place.head) * call.queries.length + queries.start + rows
    exists = exists & (rows < queries.length)
    first = output.out + ((b * call.queries.length + queries.start + rows) * num_heads + place.head) * call.v.DIM
    out = tl.load(first, mask=exists, other=0.0).to(tl.float32)
    lost = softmax.is_lost(tl.load(output.lse + 2 * at, mask=exists, other=0.0)) | (out != out)
    return at, exists & lost, exists & (lost == 0)


@triton.jit
def attention_forward(call, output, tiles):
    """The output and lse of BLOCK_M rows of one head.

    Args:
        call: ``records.Call``; for packed sequences its lengths are the rows of the packed tensors.
        output: ``records.Output``.
        tiles: ``tiles.TileSizes``.
    """
    place = locate(call, tiles, None)
    if place.block * tiles.BLOCK_M >= place.queries.length:
        return
    attend_rows(call, output, tiles, place, None)


@triton.jit
def repair_forward(call, output, tiles, count):
    """Computes lost rows again, where another kernel has stored all, of lse the first parts; the others get the second.

    Programs are few, and each looks at several of its tiles at once, as in most of them no row is lost.

    Args:
        call: As of ``attention_forward``, like what follows.
        output: See there.
        tiles: See there.
        count: Number of tiles.
    """
    step = tl.num_programs(0)
    for first in tl.range(tl.program_id(0), count, step * AT_ONCE, disable_licm=True):
        if have_lost(call, output, tiles, first + step * tl.arange(0, AT_ONCE)[:, None], count) > 0:
            for number in tl.range(first, tl.minimum(first + step * AT_ONCE, count), step, disable_licm=True):
                place = locate(call, tiles, None, number)
                rows = place.block * tiles.BLOCK_M + tl.arange(0, tiles.BLOCK_M)
                _at, lost, _kept = lost_rows(call, output, place, rows, True)
                if tl.max(lost.to(tl.int32), 0) > 0:
                    attend_rows(call, output, tiles, place, lost)


@triton.jit
def have_lost(call, output, tiles, numbers, count):
    """Whether tiles [AT_ONCE, 1] have lost rows; stores the second part of lse of their others."""
    place = locate(call, tiles, None, tl.minimum(numbers, count - 1))
    rows = place.block * tiles.BLOCK_M + tl.arange(0, tiles.BLOCK_M)[None, :]
    at, lost, kept = lost_rows(call, output, place, rows, numbers < count)
    tl.store(output.lse + 2 * at + 1, 0.0, mask=kept)
    return tl.max(tl.max(lost.to(tl.int32), 1), 0)


@triton.jit
def attend_rows(call, output, tiles, place, wanted):
    """``attention_forward`` of the tile at a ``tiles.HeadBlock``; wanted: which rows to store, or None for all."""
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    LISTED: tl.constexpr = call.mods.band.lists is not None
    ONE_LOOP: tl.constexpr = tiles.ONE_LOOP and not LISTED
    BRANCH: tl.constexpr = ONE_LOOP and not tiles.MASK_ALL
    h, queries, keys = place.head, place.queries, place.keys
    m_first = place.block * BLOCK_M
    rows = m_first + tl.arange(0, BLOCK_M)
    head = mods.head_of(call.mods, place.b, h, queries.length, keys.length)
    # Not by descriptor, here and in the backward: a descriptor load before a loop keeps its values in registers
    # throughout.
    q = load_rows(HeadRows(call.q, h, queries), m_first, BLOCK_M, True)
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
    acc = zeros(BLOCK_M, call.v.BLOCK_DIM)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Phases: keys on the left edge, keys that every row keeps, the right edge and the end; ONE_LOOP: all. A list's:
    # partial blocks, full ones, and full ones on an edge.
    HAS_START: tl.constexpr = call.mods.band.left is not None or call.mods.band.bounds is not None or LISTED
    for phase in tl.static_range(2 if ONE_LOOP else 0 if HAS_START else 1, 3):
        n_start, n_stop = phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, m_first,
            KeyBlocks(
                n_start, n_stop, n_full_min if BRANCH else None, n_full_max if BRANCH else None, phase != 1,
                phase == 0 or not LISTED,
            ),
            call, tiles, head, keys,
        )  # fmt: skip
    in_sequence, keep_scale = place.b < call.queries.count, call.mods.dropout.keep_scale
    LARGE: tl.constexpr = call.mods.LARGE
    out, lse = finish(acc, row_max, row_sum, call.mods.sinks, h, in_sequence, keep_scale, LARGE)
    lse_at = (tl.cast(queries.batch_index, tl.int64) * call.heads.num_q + h) * call.queries.length + queries.start
    if output.partial_out is not None:
        more_out = load_contiguous(
            output.partial_out, call.queries, call.heads.num_q, h, queries, m_first, BLOCK_M,
            call.v.DIM, call.v.BLOCK_DIM,
        )  # fmt: skip
        more_lse = softmax.load_lse(output.partial_lse, lse_at + rows, rows < queries.length, LARGE)
        out, lse = merged(out, lse, more_out, more_lse, LARGE)
    store_contiguous(
        output.out, call.queries, call.heads.num_q, h, queries, m_first, out, call.v.DIM, call.v.BLOCK_DIM,
        wanted=wanted,
    )  # fmt: skip
    exists = rows < queries.length
    if wanted is not None:
        exists = wanted
    softmax.store_lse(output.lse, lse_at + rows, lse, exists, LARGE)
    if output.max_scores is not None:
        at = output.max_scores + (lse_at + rows) * (2 if LARGE else 1)
        tl.store(at, softmax.largest(row_max, row_sum, LARGE), mask=exists)
