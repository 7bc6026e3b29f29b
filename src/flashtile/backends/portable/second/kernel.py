"""The kernels of second derivatives: the gradients of the backward's results, along directions of its inputs.

``cpu.second`` has the same mathematics in PyTorch, docs/algorithm.md its derivation. Along the directions of q and k

    before = scale * (dq @ k^T + q @ dk^T)             tangent = slope * before, plus the direction of the bias
    dprobs = dout @ v^T                                of_values = dout @ dv^T

where dq, dk and dv are directions, and slope is the transforms'. A first kernel has for each row, by one pass over the
keys,

    mu  = sum(probs * tangent)                         rho = sum(probs * (tangent * dprobs + of_values)) - mu * (delta +
    out = sum(probs * (tangent * v + dv)) - mu * out         sum(probs * dprobs))

and the other two recompute the tiles, one by blocks of queries for q, one by blocks of keys for k and v, from

    of_tangent = probs * (dprobs - delta)
    of_scores  = probs * (tangent * (dprobs - delta) + of_values - mu * dprobs - rho)

For scores before the transforms both are multiplied by the slope, and ``of_tangent * before * curve`` is added to
of_scores, where curve is the slope's derivative. So each element is summed by one program in a fixed order; the bias's
alone are added up by atomic adds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.device import masks, mods, softmax
from flashtile.backends.gpu.device.dropout import keep_tile, philox_key_of
from flashtile.backends.gpu.device.tiles import HeadRows, KeyBlocks, key_blocks, phase_blocks, query_blocks
from flashtile.backends.portable.backward.kernel import across, add_to_bias, load_row_terms, probabilities
from flashtile.backends.portable.device.tiles import (
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


class Half(NamedTuple):
    """One side of a tile, rows or keys, each entry a tile of columns in parts; only passed on, never assigned.

    Attributes:
        scored: The rows of q, or of k.
        of_scored: Their direction; None for 0.
        valued: The rows of dout, or of v.
        of_valued: The direction of v; None for 0 and for dout.
    """

    scored: Any
    of_scored: Any
    valued: Any
    of_valued: Any


class Visit(NamedTuple):
    """What is the same for all tiles that a program visits; only passed on, never assigned.

    Attributes:
        of_bias: The direction of the bias for a head, ``mods.HeadTensor``; None for 0.
        of_slope: The operands for a head of ``SecondInputs.slope``; 0 where it is None.
        head: ``mods.Head``.
        philox_key: Its key for dropout.
        PARTIAL: As of ``mods.select``.
    """

    of_bias: Any
    of_slope: Any
    head: Any
    philox_key: Any
    PARTIAL: Any


@triton.jit
def add_times_transposed(tile, x, y, PRECISION: tl.constexpr):
    """``tile + x @ y^T``."""
    for p in tl.static_range(len(x)):
        tile = tl.dot(x[p], tl.trans(y[p]), tile, input_precision=PRECISION)
    return tile


@triton.jit
def bias_of_head(of, place, head):
    """The direction of the bias for a head; 0 where it is None."""
    found = 0
    if of.bias.ptr is not None:
        found = mods.tensor_of_head(
            of.bias, mods.At(place.b, head.h, None, None, None, head.seqlen_q, head.seqlen_k, ())
        )
    return found


@triton.jit
def slope_of_head(of, place, head):
    """The operands for a head of the slope of the user's function of scores; 0 where it is None."""
    found = 0
    if of.slope.linear is not None:
        found = of.slope.of_head(
            of.slope.operands, mods.At(place.b, head.h, None, None, None, head.seqlen_q, head.seqlen_k, ())
        )
    return found


@triton.jit
def slope_and_curve(scores, of, visit, at):
    """The slope of the user's function of scores, and its derivative."""
    rows = of.slope.of_rows(of.slope.operands, visit.of_slope, at)
    fetched = of.slope.fetch(of.slope.operands, visit.of_slope, rows, at)
    return of.slope.linear(scores, fetched, of.slope.operands, visit.of_slope, rows, at)


@triton.jit
def tile_of(call, of, own, other, visit, at, lse, kept, edge):
    """A tile and its change, own side first.

    Args:
        call: ``records.Call``.
        of: ``SecondInputs``.
        own: ``Half``.
        other: Likewise, the other side.
        visit: ``Visit``.
        at: ``mods.At`` of the pairs.
        lse: As of ``probabilities``.
        kept: The pairs that dropout keeps, of the tile's shape; not read without dropout.
        edge: As of ``mods.select``.

    Returns:
        The probabilities, 0 for masked pairs; these with 0 for dropped pairs too; the tangent of the scores, and before
        the transforms, and their slope and its derivative; dprobs; of_values. Numbers stand for what is constant.
    """
    PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    given = mods.read(call.mods, visit.head, at, visit.PARTIAL)
    product = times_transposed(own.scored, other.scored, PRECISION)
    probs, slope = probabilities(product, lse, call, visit.head, at, edge, visit.PARTIAL, True, given)
    before = tl.zeros_like(product)
    if len(own.of_scored) > 0:
        before = add_times_transposed(before, own.of_scored, other.scored, PRECISION)
    if len(other.of_scored) > 0:
        before = add_times_transposed(before, own.scored, other.of_scored, PRECISION)
    before *= call.mods.scale
    tangent = before * slope
    curve = 0.0
    SCORE_MOD: tl.constexpr = mods.place_of(call.mods.SCORES, "score_mod") >= 0
    CAP: tl.constexpr = mods.place_of(call.mods.SCORES, "softcap")
    if of.slope.linear is not None:
        own_slope, curve = slope_and_curve(product * call.mods.scale, of, visit, at)
    if CAP >= 0:
        cap, uncapped = call.mods.scores[CAP].operands, product * call.mods.scale
        if SCORE_MOD:
            in_rows, fetched = given[0]
            uncapped = call.mods.scores[0].function(
                uncapped, fetched, call.mods.scores[0].operands, visit.head.scores[0], in_rows, at
            )
        capped = mods.tanh(uncapped / cap)
        if of.slope.linear is not None:
            curve = (1.0 - capped * capped) * (curve - 2.0 / cap * capped * own_slope * own_slope)
        else:
            curve = -2.0 / cap * capped * slope
    if of.bias.ptr is not None:
        tangent += mods.load_tile(visit.of_bias, at, 0.0).to(tl.float32)
    dprobs = times_transposed(own.valued, other.valued, PRECISION)
    of_values = tl.zeros_like(dprobs)
    if len(own.of_valued) > 0:
        of_values = add_times_transposed(of_values, own.of_valued, other.valued, PRECISION)
    if len(other.of_valued) > 0:
        of_values = add_times_transposed(of_values, own.valued, other.of_valued, PRECISION)
    kept_probs = probs
    if call.mods.dropout.rng_state_ptr is not None:
        kept_probs = tl.where(kept, probs, 0.0)
        dprobs = tl.where(kept, dprobs * call.mods.dropout.keep_scale, 0.0)
        of_values = tl.where(kept, of_values * call.mods.dropout.keep_scale, 0.0)
    if mods.count(call.mods.MASKS) > 0 or edge:
        # A select instead of a product with 0 discards NaN of a masked pair.
        is_masked = probs == 0.0
        tangent, before = tl.where(is_masked, 0.0, tangent), tl.where(is_masked, 0.0, before)
        dprobs, of_values = tl.where(is_masked, 0.0, dprobs), tl.where(is_masked, 0.0, of_values)
    if SCORE_MOD:
        # Where it makes -inf of a score, its slope may be anything.
        is_nothing = probs == 0.0
        tangent, before = tl.where(is_nothing, 0.0, tangent), tl.where(is_nothing, 0.0, before)
        slope, curve = tl.where(is_nothing, 0.0, slope), tl.where(is_nothing, 0.0, curve)
    return probs, kept_probs, tangent, before, slope, curve, dprobs, of_values


@triton.jit
def of_scores_and_tangent(tile, delta, mu, rho):
    """The gradients of a tile's scores and of their tangent, after the transforms."""
    probs, _kept, tangent, _before, _slope, _curve, dprobs, of_values = tile
    centred = dprobs - delta
    return probs * (tangent * centred + of_values - mu * dprobs - rho), probs * centred


@triton.jit
def before_transforms(tile, of_scores, of_tangent, CURVED: tl.constexpr):
    """The same before the transforms."""
    _probs, _kept, _tangent, before, slope, curve, _dprobs, _of_values = tile
    of_scores *= slope
    if CURVED:
        of_scores += of_tangent * before * curve
    return of_scores, of_tangent * slope


@triton.jit
def blocks_of_rows(call, place, head, m_first, tiles):
    """The blocks of keys that a block of rows visits, as of ``key_blocks``; positions in a list, where there is one."""
    queries, keys = place.queries, place.keys
    n_min, n_full_min, n_full_max, n_max = key_blocks(
        m_first, tl.minimum(m_first + tiles.BLOCK_M, queries.length) - 1, queries.length, keys.length, call.mods.band,
        tiles.BLOCK_N,
    )  # fmt: skip
    if call.mods.band.bounds is not None:
        found = masks.bounds_of(call.mods.band.bounds, place.b, head.h, place.block, place.b < call.queries.count, 1)
        n_min, n_full_min, n_full_max, n_max = masks.narrowed(
            n_min, n_full_min, n_full_max, n_max, found, tiles.BLOCK_N
        )
    if call.mods.band.lists is not None:
        n_min, n_full_min, n_full_max, n_max = masks.positions_of(
            call.mods.band.lists, place.b, head.h, m_first, place.b < call.queries.count, keys.length, tiles.BLOCK_N
        )
    return n_min, n_full_min, n_full_max, n_max


@triton.jit
def kept_by_dropout(call, philox_key, b, m_first, n_first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pairs of a tile that dropout keeps, rows first; 0 without dropout."""
    kept = 0
    if call.mods.dropout.rng_state_ptr is not None:
        kept = keep_tile(call.mods.dropout, philox_key, b, m_first, n_first, BLOCK_M, BLOCK_N)
    return kept


@triton.jit
def keys_of(call, of, head_kv, keys, first, BLOCK: tl.constexpr):
    """The rows of k, their direction, the rows of v, and their direction; an empty tuple for a direction that is 0."""
    of_k, of_v = (), ()
    k = load_rows(HeadRows(call.k, head_kv, keys), first, BLOCK, True)
    if of.k.ptr is not None:
        of_k = load_rows(HeadRows(of.k, head_kv, keys), first, BLOCK, True)
    v = load_rows(HeadRows(call.v, head_kv, keys), first, BLOCK, True)
    if of.v.ptr is not None:
        of_v = load_rows(HeadRows(of.v, head_kv, keys), first, BLOCK, True)
    return k, of_k, v, of_v


@triton.jit
def queries_of(call, of, douts, h, queries, first, BLOCK: tl.constexpr):
    """The rows of q, their direction, and the rows of dout."""
    of_q = ()
    q = load_rows(HeadRows(call.q, h, queries), first, BLOCK, True)
    if of.q.ptr is not None:
        of_q = load_rows(HeadRows(of.q, h, queries), first, BLOCK, True)
    return q, of_q, load_rows(HeadRows(douts, h, queries), first, BLOCK, True)


@triton.jit
def load_changes(changes, num_heads, head, queries, rows):
    """Loads mu and rho of rows of a head, 0 past the end."""
    at = (tl.cast(queries.batch_index, tl.int64) * num_heads + head.h) * changes.stride_head + queries.start + rows
    exists = rows < queries.length
    return tl.load(changes.mu + at, mask=exists, other=0.0), tl.load(changes.rho + at, mask=exists, other=0.0)


@triton.jit
def over_keys(call, sums, own, rows, terms, visit, blocks, of, tiles, place):
    """Adds the tiles of some blocks of keys to the sums of the first kernel."""
    mu, rho, whole, total, out = sums
    PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    lse, _delta, _mu, _rho = terms
    for position in tl.range(blocks.start, blocks.stop):
        n = masks.block_at(position, call.mods.band.lists, tiles.BLOCK_N)
        first = n * tiles.BLOCK_N
        edge = blocks.MASKED
        if blocks.full_start is not None:
            edge = (n < blocks.full_start) | (n >= blocks.full_stop)
        k, of_k, v, of_v = keys_of(call, of, visit.head.h // call.heads.group_size, place.keys, first, tiles.BLOCK_N)
        at = mods.pairs_of(visit.head, rows[:, None] + visit.head.shift, first + tl.arange(0, tiles.BLOCK_N)[None, :])
        kept = kept_by_dropout(
            call, visit.philox_key, visit.head.b, place.block * tiles.BLOCK_M, first, tiles.BLOCK_M, tiles.BLOCK_N
        )
        tile = tile_of(call, of, own, Half(k, of_k, v, of_v), visit, at, across(lse, 1), kept, edge)
        probs, kept_probs, tangent, _before, _slope, _curve, dprobs, of_values = tile
        mu += tl.sum(probs * tangent, 1)
        rho += tl.sum(probs * (tangent * dprobs + of_values), 1)
        whole += tl.sum(probs * dprobs, 1)
        total += tl.sum(probs, 1)
        out = add_product(out, (kept_probs * tangent).to(v[0].dtype), v, PRECISION)
        if of.v.ptr is not None:
            out = add_product(out, kept_probs.to(v[0].dtype), of_v, PRECISION)
    return mu, rho, whole, total, out


@triton.jit
def over_keys_again(call, dq, own, rows, terms, visit, blocks, of, tiles, place, sums):
    """Adds the tiles of some blocks of keys to the gradient of q, and to the bias's."""
    PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    CURVED: tl.constexpr = mods.place_of(call.mods.SCORES, "softcap") >= 0 or of.slope.linear is not None
    lse, delta, mu, rho = terms
    for position in tl.range(blocks.start, blocks.stop):
        n = masks.block_at(position, call.mods.band.lists, tiles.BLOCK_N)
        first = n * tiles.BLOCK_N
        edge = blocks.MASKED
        if blocks.full_start is not None:
            edge = (n < blocks.full_start) | (n >= blocks.full_stop)
        k, of_k, v, of_v = keys_of(call, of, visit.head.h // call.heads.group_size, place.keys, first, tiles.BLOCK_N)
        cols = first + tl.arange(0, tiles.BLOCK_N)[None, :]
        at = mods.pairs_of(visit.head, rows[:, None] + visit.head.shift, cols)
        kept = kept_by_dropout(
            call, visit.philox_key, visit.head.b, place.block * tiles.BLOCK_M, first, tiles.BLOCK_M, tiles.BLOCK_N
        )
        tile = tile_of(call, of, own, Half(k, of_k, v, of_v), visit, at, across(lse, 1), kept, edge)
        of_scores, of_tangent = of_scores_and_tangent(tile, delta[:, None], mu[:, None], rho[:, None])
        if sums.ptr is not None:
            add_to_bias(sums, of_scores, visit.head, rows, cols, place.queries.length)
        of_scores, of_tangent = before_transforms(tile, of_scores, of_tangent, CURVED)
        dq = add_product(dq, of_scores.to(k[0].dtype), k, PRECISION)
        if of.k.ptr is not None:
            dq = add_product(dq, of_tangent.to(k[0].dtype), of_k, PRECISION)
    return dq


@triton.jit
def over_queries(call, sums, own, cols, visit, blocks, of, douts, of_rows, changes, tiles, place):
    """Adds the tiles of some blocks of a head's rows to the gradients of k and v."""
    dk, dv = sums
    PRECISION: tl.constexpr = call.mods.INPUT_PRECISION
    CURVED: tl.constexpr = mods.place_of(call.mods.SCORES, "softcap") >= 0 or of.slope.linear is not None
    for position in tl.range(blocks.start, blocks.stop):
        m = masks.block_at(position, call.mods.band.lists, tiles.BLOCK_M)
        first = m * tiles.BLOCK_M
        edge = blocks.MASKED
        if blocks.full_start is not None:
            edge = (m < blocks.full_start) | (m >= blocks.full_stop)
        rows = first + tl.arange(0, tiles.BLOCK_M)
        q, of_q, dout = queries_of(call, of, douts, visit.head.h, place.queries, first, tiles.BLOCK_M)
        lse, delta = load_row_terms(of_rows, call.heads.num_q, visit.head, place.queries, rows)
        mu, rho = load_changes(changes, call.heads.num_q, visit.head, place.queries, rows)
        at = mods.pairs_of(visit.head, rows[None, :] + visit.head.shift, cols)
        kept = kept_by_dropout(
            call, visit.philox_key, visit.head.b, first, place.block * tiles.BLOCK_N, tiles.BLOCK_M, tiles.BLOCK_N
        )
        if call.mods.dropout.rng_state_ptr is not None:
            kept = tl.trans(kept)
        tile = tile_of(call, of, own, Half(q, of_q, dout, ()), visit, at, across(lse, 0), kept, edge)
        _probs, kept_probs, tangent, _before, _slope, _curve, _dprobs, _of_values = tile
        dv = add_product(dv, (kept_probs * (tangent - mu[None, :])).to(dout[0].dtype), dout, PRECISION)
        of_scores, of_tangent = of_scores_and_tangent(tile, delta[None, :], mu[None, :], rho[None, :])
        of_scores, of_tangent = before_transforms(tile, of_scores, of_tangent, CURVED)
        dk = add_product(dk, of_scores.to(q[0].dtype), q, PRECISION)
        if of.q.ptr is not None:
            dk = add_product(dk, of_tangent.to(q[0].dtype), of_q, PRECISION)
    return dk, dv


@triton.jit
def attention_second_rows(call, douts, of_rows, of, sinks, out_ptr, made_ptr, changes, tiles):
    """Computes mu and rho of BLOCK_M rows of one head, and the gradient of dout.

    Args:
        call: ``records.Call``.
        douts: ``records.Rows`` of the output's gradient.
        of_rows: ``RowTerms``.
        of: ``SecondInputs``.
        sinks: ``SinkTangents``.
        out_ptr: The forward's out, contiguous.
        made_ptr: The gradient of dout, contiguous.
        changes: ``RowChanges``.
        tiles: ``tiles.TileSizes``.
    """
    place = locate(call, tiles, None)
    queries, m_first = place.queries, place.block * tiles.BLOCK_M
    if m_first >= queries.length:
        return
    LISTED: tl.constexpr = call.mods.band.lists is not None
    head = mods.head_of(call.mods, place.b, place.head, queries.length, place.keys.length)
    rows = m_first + tl.arange(0, tiles.BLOCK_M)
    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
    q, of_q, dout = queries_of(call, of, douts, head.h, queries, m_first, tiles.BLOCK_M)
    start, full_start, full_stop, stop = blocks_of_rows(call, place, head, m_first, tiles)
    mu, rho, whole, total = delta * 0.0, delta * 0.0, delta * 0.0, delta * 0.0
    if sinks.sinks is not None:
        sink = tl.load(sinks.sinks + head.h).to(tl.float32)
        if call.mods.LARGE:
            total += tl.exp2((sink - lse[0]) * softmax.LOG2_E - lse[1])
        else:
            total += tl.exp2(sink * softmax.LOG2_E - lse[0])
        if sinks.of_sinks is not None:
            mu += total * tl.load(sinks.of_sinks + head.h).to(tl.float32)
    out = zeros(tiles.BLOCK_M, call.v.BLOCK_DIM)
    for phase in tl.static_range(0 if LISTED else 2, 3):
        first, last = phase_blocks(phase, start, full_start, full_stop, stop, not LISTED)
        mu, rho, whole, total, out = over_keys(
            call, (mu, rho, whole, total, out), Half(q, of_q, dout, ()), rows, (lse, delta, mu, rho),
            Visit(
                bias_of_head(of, place, head), slope_of_head(of, place, head), head,
                philox_key_of(call, head.b, head.h), phase == 0 or not LISTED,
            ),
            KeyBlocks(first, last, None if LISTED else full_start, None if LISTED else full_stop, phase != 1),
            of, tiles, place,
        )  # fmt: skip
    # lse is rounded, so what it makes of the scores adds up to 1 nearly; what cancels would be off by as much.
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    mu, rho, whole = mu * share, rho * share, whole * share
    at = (tl.cast(queries.batch_index, tl.int64) * call.heads.num_q + head.h) * changes.stride_head + queries.start
    exists = rows < queries.length
    tl.store(changes.mu + at + rows, mu, mask=exists)
    tl.store(changes.rho + at + rows, rho - mu * (delta + whole), mask=exists)
    given = load_contiguous(
        out_ptr, call.queries, call.heads.num_q, head.h, queries, m_first, tiles.BLOCK_M, call.v.DIM, call.v.BLOCK_DIM
    )
    made = ()
    for p in tl.static_range(len(out)):
        made = append(
            made, out[p] * (share * call.mods.dropout.keep_scale)[:, None] - mu[:, None] * given[p].to(tl.float32)
        )
    store_contiguous(
        made_ptr, call.queries, call.heads.num_q, head.h, queries, m_first, made, call.v.DIM, call.v.BLOCK_DIM
    )


@triton.jit
def attention_second_dq(call, douts, of_rows, of, changes, dq_ptr, bias_sums, tiles):
    """Computes the gradient of BLOCK_M rows of one head of q, contiguous, and adds to the bias's, ``BiasSums``."""
    place = locate(call, tiles, None)
    queries, m_first = place.queries, place.block * tiles.BLOCK_M
    if m_first >= queries.length:
        return
    LISTED: tl.constexpr = call.mods.band.lists is not None
    head = mods.head_of(call.mods, place.b, place.head, queries.length, place.keys.length)
    rows = m_first + tl.arange(0, tiles.BLOCK_M)
    lse, delta = load_row_terms(of_rows, call.heads.num_q, head, queries, rows)
    mu, rho = load_changes(changes, call.heads.num_q, head, queries, rows)
    q, of_q, dout = queries_of(call, of, douts, head.h, queries, m_first, tiles.BLOCK_M)
    start, full_start, full_stop, stop = blocks_of_rows(call, place, head, m_first, tiles)
    dq = zeros(tiles.BLOCK_M, call.q.BLOCK_DIM)
    for phase in tl.static_range(0 if LISTED else 2, 3):
        first, last = phase_blocks(phase, start, full_start, full_stop, stop, not LISTED)
        dq = over_keys_again(
            call, dq, Half(q, of_q, dout, ()), rows, (lse, delta, mu, rho),
            Visit(
                bias_of_head(of, place, head), slope_of_head(of, place, head), head,
                philox_key_of(call, head.b, head.h), phase == 0 or not LISTED,
            ),
            KeyBlocks(first, last, None if LISTED else full_start, None if LISTED else full_stop, phase != 1),
            of, tiles, place, bias_sums,
        )  # fmt: skip
    store_contiguous(
        dq_ptr, call.queries, call.heads.num_q, head.h, queries, m_first, scaled(dq, call.mods.scale), call.q.DIM,
        call.q.BLOCK_DIM,
    )  # fmt: skip


@triton.jit
def attention_second_dkdv(call, douts, of_rows, of, changes, grads, tiles):
    """Computes the gradients of BLOCK_N keys of one key head: ``KeyGradients``, as the first backward's kernel does."""
    LISTED: tl.constexpr = call.mods.band.lists is not None
    heads, splits = call.heads.group_size, 1
    if grads.heads_per_split is not None:
        heads = grads.heads_per_split
        splits = (call.heads.group_size + heads - 1) // heads
    place = locate(call, tiles, splits)
    head_kv, queries, keys = place.head // splits, place.queries, place.keys
    n_first = place.block * tiles.BLOCK_N
    if n_first >= keys.length:
        return
    k, of_k, v, of_v = keys_of(call, of, head_kv, keys, n_first, tiles.BLOCK_N)
    m_min, m_full_min, m_full_max, m_max = query_blocks(
        n_first, tl.minimum(n_first + tiles.BLOCK_N, keys.length) - 1, queries.length, keys.length, call.mods.band,
        tiles.BLOCK_M,
    )  # fmt: skip
    dk, dv = zeros(tiles.BLOCK_N, call.q.BLOCK_DIM), zeros(tiles.BLOCK_N, call.v.BLOCK_DIM)
    cols = n_first + tl.arange(0, tiles.BLOCK_N)[:, None]
    first_member = place.head % splits * heads
    for member in range(first_member, tl.minimum(first_member + heads, call.heads.group_size)):
        head = mods.head_of(call.mods, place.b, head_kv * call.heads.group_size + member, queries.length, keys.length)
        start, full_start, full_stop, stop = m_min, m_full_min, m_full_max, m_max
        if call.mods.band.bounds is not None:
            found = masks.bounds_of(call.mods.band.bounds, place.b, head.h, place.block, place.b < call.keys.count, 1)
            start, full_start, full_stop, stop = masks.narrowed(
                start, full_start, full_stop, stop, found, tiles.BLOCK_M
            )
        if LISTED:
            start, full_start, full_stop, stop = masks.positions_of(
                call.mods.band.lists, place.b, head.h, n_first, place.b < call.keys.count, queries.length,
                tiles.BLOCK_M,
            )  # fmt: skip
        for phase in tl.static_range(0 if LISTED else 2, 3):
            first, last = phase_blocks(phase, start, full_start, full_stop, stop, not LISTED)
            dk, dv = over_queries(
                call, (dk, dv), Half(k, of_k, v, of_v), cols,
                Visit(
                    bias_of_head(of, place, head), slope_of_head(of, place, head), head,
                    philox_key_of(call, head.b, head.h), phase == 0 or not LISTED,
                ),
                KeyBlocks(first, last, None if LISTED else full_start, None if LISTED else full_stop, phase != 1),
                of, douts, of_rows, changes, tiles, place,
            )  # fmt: skip
    num_heads = call.heads.num_q // call.heads.group_size * splits
    store_contiguous(
        grads.dk, call.keys, num_heads, place.head, keys, n_first, scaled(dk, call.mods.scale), call.q.DIM,
        call.q.BLOCK_DIM,
    )  # fmt: skip
    store_contiguous(
        grads.dv, call.keys, num_heads, place.head, keys, n_first, scaled(dv, call.mods.dropout.keep_scale),
        call.v.DIM, call.v.BLOCK_DIM,
    )  # fmt: skip
