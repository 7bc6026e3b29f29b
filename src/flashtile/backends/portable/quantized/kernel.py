"""The forward over e4m3 tensors in Triton, with both products in 8 bits and each block's own scales.

A program owns BLOCK_M query rows of one head, as in ``portable.forward.kernel``. Probabilities are rounded to e4m3
after a factor of 2^8, which brings the largest of a row to 256 of 448, and what was rounded is summed in float32. The
product of a block of at most 128 keys starts from 0 and is added to the output in float32, where v's scale meets it: an
8-bit product of Hopper keeps about 13 bits of its sum. Source: Shah et al. 2024, arXiv:2407.08608, section 3.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import mods, softmax
from flashtile.backends.gpu.device.tiles import HeadRows, KeyBlocks, base, key_blocks, phase_blocks
from flashtile.backends.portable.device.tiles import load_rows, locate, store_contiguous
from flashtile.backends.portable.forward.kernel import finish

# Keys, or queries, that share a scale.
SCALE_BLOCK = tl.constexpr(128)
# log2 of the factor of probabilities.
PROBS_LOG2 = tl.constexpr(8.0)


@triton.jit
def block_of(sequences, seq, b, first):
    """The number of the scale of row ``first`` of sequence b."""
    block = first // SCALE_BLOCK
    if sequences.cu_seqlens is not None:
        block += seq.start // SCALE_BLOCK + b
    return block


@triton.jit
def load_scale(scale, b, head, block, exists):
    """The scale of a block, 1 where it does not exist."""
    at = tl.cast(b, tl.int64) * scale.batch_step + tl.cast(head, tl.int64) * scale.head_step
    return tl.load(scale.ptr + at + block * scale.block_step, mask=exists, other=1.0)


@triton.jit
def load_values(v, b, head, first, BLOCK_N: tl.constexpr):
    """A tile [BLOCK_DIM, BLOCK_N] of v's columns from ``first``, which all exist; 0 past DIM."""
    row, col = tl.arange(0, v.BLOCK_DIM)[:, None], tl.arange(0, BLOCK_N)[None, :]
    at = base(v.ptr, b, 0, head, v.stride_b, v.stride_row, v.stride_head) + first
    at = at + (row.to(tl.int64) * v.stride_row + col)
    return tl.load(at) if v.DIM == v.BLOCK_DIM else tl.load(at, mask=row < v.DIM, other=0.0)


@triton.jit
def in_order_of_values(probs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The columns of probabilities [BLOCK_M, BLOCK_N] in the order of v's: ``quantization.blocks.ORDER`` of each 16."""
    halves = probs.reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    return halves.reshape(BLOCK_M, BLOCK_N)


@triton.jit
def rounded(probs):
    """Probabilities up to 2^8 rounded to the nearest e4m3 numbers, in float32.

    On the float32 bits, with no conversion back from e4m3, which ptxas 12.8 and 12.9 miscompile: they fuse the two
    conversions of a product's operand, and other readers of the second one get a register that was never written.
    """
    bits = probs.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    return tl.where(probs < 0.015625, (probs + 24576.0) - 24576.0, normal)


@triton.jit
def attend(acc, row_max, row_sum, q, q_scale, rows, visit, call, scales, tiles, head, keys):
    """Adds the key blocks of ``tiles.KeyBlocks`` to the softmax state of BLOCK_M rows, as ``portable.forward.kernel``.

    row_sum and acc are 2^PROBS_LOG2 times those there.
    """
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    SCALE_FIRST: tl.constexpr = call.mods.SCALE_FIRST
    head_kv = head.h // call.heads.group_size
    p = rows[:, None] + head.shift
    for n in tl.range(visit.start, visit.stop):
        first = n * BLOCK_N
        at = mods.pairs_of(head, p, first + tl.arange(0, BLOCK_N)[None, :])
        block = block_of(call.keys, keys, head.b, first)
        k = load_rows(HeadRows(call.k, head_kv, keys), first, BLOCK_N, visit.MASKED)[0]
        product = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N] float32
        scale = q_scale * load_scale(scales.k, keys.batch_index, head_kv, block, True)
        if SCALE_FIRST:
            product = product * scale
        x, scale_log2, _slope = mods.apply(product, call.mods, head, at, False)
        if not SCALE_FIRST:
            scale_log2 = scale_log2 * scale
        edge = visit.MASKED
        if visit.full_start is not None:
            edge = (n < visit.full_start) | (n >= visit.full_stop)
        x = mods.select(x, call.mods, head, at, float("-inf"), edge)
        row_max, finite_max, rescale = softmax.raise_max(row_max, tl.max(x, 1) * scale_log2, True)
        probs = rounded(softmax.exponentials(x, scale_log2, finite_max - PROBS_LOG2))
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        column = tl.multiple_of(block * SCALE_BLOCK + first % SCALE_BLOCK, 16)
        v = load_values(call.v, keys.batch_index, head_kv, column, BLOCK_N)
        v_scale = load_scale(scales.v, keys.batch_index, head_kv, block, True)
        acc = (
            acc * rescale[:, None]
            + tl.dot(in_order_of_values(probs.to(q.dtype), tiles.BLOCK_M, BLOCK_N), tl.trans(v)) * v_scale
        )
    return acc, row_max, row_sum


@triton.jit
def attention_quantized(call, scales, output, tiles):
    """The output and lse of BLOCK_M rows of one head; arguments as of ``attention_forward``, and ``Scales``.

    v's rows are its dimensions; each is contiguous over the columns.
    """
    BLOCK_M: tl.constexpr = tiles.BLOCK_M
    BLOCK_N: tl.constexpr = tiles.BLOCK_N
    ONE_LOOP: tl.constexpr = tiles.ONE_LOOP
    BRANCH: tl.constexpr = ONE_LOOP and not tiles.MASK_ALL
    place = locate(call, tiles, None)
    h, queries, keys = place.head, place.queries, place.keys
    m_first = place.block * BLOCK_M
    if m_first >= queries.length:
        return
    rows = m_first + tl.arange(0, BLOCK_M)
    head = mods.head_of(call.mods, place.b, h, queries.length, keys.length)
    in_sequence = place.b < call.queries.count
    q = load_rows(HeadRows(call.q, h, queries), m_first, BLOCK_M, True)[0]
    q_block = block_of(call.queries, queries, place.b, m_first)
    q_scale = load_scale(scales.q, queries.batch_index, h, q_block, in_sequence)
    n_min, n_full_min, n_full_max, n_max = key_blocks(
        m_first, tl.minimum(m_first + BLOCK_M, queries.length) - 1, queries.length, keys.length, call.mods.band, BLOCK_N
    )
    acc = tl.zeros([BLOCK_M, call.v.BLOCK_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # The phases of ``portable.forward.kernel``.
    for phase in tl.static_range(2 if ONE_LOOP else 0 if call.mods.band.left is not None else 1, 3):
        n_start, n_stop = phase_blocks(phase, n_min, n_full_min, n_full_max, n_max, ONE_LOOP)
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, q_scale, rows,
            KeyBlocks(n_start, n_stop, n_full_min if BRANCH else None, n_full_max if BRANCH else None, phase != 1),
            call, scales, tiles, head, keys,
        )  # fmt: skip
    exists = rows < queries.length
    lse_at = (tl.cast(queries.batch_index, tl.int64) * call.heads.num_q + h) * call.queries.length + queries.start
    if scales.shift is not None:
        shift = tl.load(scales.shift + lse_at + rows, mask=exists & in_sequence, other=0.0)
        row_max += shift * call.mods.scale * softmax.LOG2_E
    down = 0.00390625  # 2^-PROBS_LOG2
    if scales.out is not None:
        acc = acc / tl.load(scales.out)
    out, lse = finish((acc * down,), row_max, row_sum * down, call.mods.sinks, h, in_sequence, 1.0, False)
    store_contiguous(
        output.out, call.queries, call.heads.num_q, h, queries, m_first, out, call.v.DIM, call.v.BLOCK_DIM
    )  # fmt: skip
    tl.store(output.lse + lse_at + rows, lse, mask=exists)
