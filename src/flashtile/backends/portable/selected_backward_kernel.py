"""The kernels of ``selected_backward``: gradients of attention where each query has a list of single keys.

The mathematics is the regular backward's (``backward.kernel``), from the same terms:

    delta  = rowsum(dout * out) - dlse
    dprobs = dout @ v^T                                dscores = probs * (dprobs - delta)
    dv += probs^T @ dout   dk += dscores^T @ q         dq = dscores @ k

A tile's rows are heads of one query, which share its list; its columns are keys of the list, gathered row by row.
A key is in the lists of many queries, so dk and dv are sums over programs: by atomic adds, or, to be repeatable, each
program stores its share of each key and a second kernel adds the shares up in the order of the queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device import softmax
from flashtile.backends.gpu.device.mods import tanh
from flashtile.backends.portable.device.tiles import add_product, append, times_transposed


@triton.constexpr_function
def num_parts(cols, width):
    """The number of parts of so many columns, each of ``width`` or, the last one, of what is left."""
    return (cols + width - 1) // width


@triton.constexpr_function
def width_of(cols, width, part):
    """The columns of a part."""
    return min(width, cols - part * width)


@triton.jit
def load_tile(of, at, exists, WIDTH: tl.constexpr):
    """Rows of a ``ListedRows`` in parts of columns; 0 for rows that do not exist and past the last column.

    Args:
        of: ``ListedRows``.
        at: [ROWS] int64, where the rows begin, in elements.
        exists: [ROWS], which rows to read at all.
        WIDTH: The columns of a part.
    """
    parts = ()
    for p in tl.static_range(num_parts(of.BLOCK_DIM, WIDTH)):
        parts = append(parts, load_part(of, at, exists, p * WIDTH, width_of(of.BLOCK_DIM, WIDTH, p)))
    return parts


@triton.jit
def load_part(of, at, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """The part of ``load_tile`` from column FIRST on."""
    col = FIRST + tl.arange(0, WIDTH)[None, :]
    wanted = exists[:, None]
    if FIRST + WIDTH > of.DIM:
        wanted = wanted & (col < of.DIM)
    return tl.load(of.ptr + at[:, None] + col, mask=wanted, other=0.0)


@triton.jit
def first_parts(tile, COUNT: tl.constexpr):
    """The first parts of a tile."""
    parts = ()
    for p in tl.static_range(COUNT):
        parts = append(parts, tile[p])
    return parts


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Float32 zeros in parts."""
    parts = ()
    for p in tl.static_range(num_parts(COLS, WIDTH)):
        parts = append(parts, tl.zeros([ROWS, width_of(COLS, WIDTH, p)], tl.float32))
    return parts


@triton.jit
def row_terms(call, n, head, exists, dout, WIDTH: tl.constexpr):
    """Lse in base 2 and delta of heads of a query; those that do not exist have probability 0."""
    lse = tl.load(call.lse + n * call.stride_lse + head * call.stride_lse_head, mask=exists, other=float("-inf"))
    out = load_tile(call.out, n * call.out.stride_row + head * call.out.stride_head, exists, WIDTH)
    delta = tl.zeros_like(lse)
    for p in tl.static_range(len(out)):
        delta += tl.sum(out[p].to(tl.float32) * dout[p].to(tl.float32), 1)
    if call.dlse is not None:
        delta -= tl.load(call.dlse + n * call.stride_dlse + head * call.stride_dlse_head, mask=exists, other=0.0)
    return softmax.lse_log2_of(lse), tl.where(lse == float("-inf"), 0.0, delta)


@triton.jit
def probabilities_and_slope(product, lse, inside, call):
    """Probabilities of a tile of ``q @ k^T``, 0 outside of the list, and the derivative of its scores by the products.

    Without a softcap the derivative is the scale, which the sums are multiplied by at their end: 1.
    """
    scores, slope = product * call.scale, 1.0
    if call.cap is not None:
        capped = tanh(scores / call.cap)
        scores, slope = call.cap * capped, 1.0 - capped * capped
    probs = tl.exp2(scores * softmax.LOG2_E - lse[:, None])
    return tl.where(inside[None, :], probs, 0.0), slope


@triton.jit
def add_to_keys(of, at, inside, weights, rows, factor, WIDTH: tl.constexpr, call, ADDS: tl.constexpr):
    """Adds ``weights^T @ rows * factor`` to rows of a ``KeySums``, or stores it.

    Args:
        of: ``KeySums``.
        at: [KEYS] int64, the keys' rows.
        inside: [KEYS], which of them there are.
        weights: [HEADS, KEYS].
        rows: A tile [HEADS, DIM] of their dtype.
        factor: A number.
        WIDTH: The columns of a part.
        call: ``SelectedCall``.
        ADDS: Whether to add, by atomic adds.
    """
    for p in tl.static_range(len(rows)):
        part = tl.dot(tl.trans(weights), rows[p], input_precision=call.PRECISION)
        add_part(of, at, inside, part * factor, p * WIDTH, ADDS)


@triton.jit
def add_part(of, at, inside, part, FIRST: tl.constexpr, ADDS: tl.constexpr):
    """Adds the columns from FIRST on of ``add_to_keys``."""
    col = FIRST + tl.arange(0, part.shape[1])[None, :]
    wanted = inside[:, None]
    if FIRST + part.shape[1] > of.DIM:
        wanted = wanted & (col < of.DIM)
    place = of.ptr + at[:, None] * of.DIM + col
    if ADDS:
        tl.atomic_add(place, part, mask=wanted, sem="relaxed")
    else:
        tl.store(place, part, mask=wanted)


@triton.jit
def attention_selected_backward(call, dq_ptr, dk, dv, tiles):
    """Computes dq of HEADS heads of one query, which share a key head, and adds what they add to dk and dv.

    Programs are numbered by blocks of heads first, so that those that gather the same rows run together.

    Args:
        call: ``SelectedCall``.
        dq_ptr: Contiguous (rows, heads, DIM), of q's dtype.
        dk: ``KeySums``.
        dv: Likewise.
        tiles: ``SelectedSizes``.
    """
    HEADS: tl.constexpr = tiles.HEADS
    KEYS: tl.constexpr = tiles.KEYS
    WIDTH: tl.constexpr = tiles.WIDTH
    V_PARTS: tl.constexpr = num_parts(call.dout.BLOCK_DIM, WIDTH)
    pid = tl.program_id(0)
    blocks = (call.group_size + HEADS - 1) // HEADS
    block, head_kv = pid % blocks, pid // blocks % call.num_heads_kv
    n = (call.first + pid // blocks // call.num_heads_kv).to(tl.int64)
    member = block * HEADS + tl.arange(0, HEADS)
    exists = member < call.group_size
    head = head_kv * call.group_size + member.to(tl.int64)
    q = load_tile(call.q, n * call.q.stride_row + head * call.q.stride_head, exists, WIDTH)
    dout = load_tile(call.dout, n * call.dout.stride_row + head * call.dout.stride_head, exists, WIDTH)
    lse, delta = row_terms(call, n, head, exists, dout, WIDTH)
    count = tl.load(call.counts + n)
    dq = zero_tile(HEADS, call.q.BLOCK_DIM, WIDTH)
    # What LLVM would compute before the loop would be spilled.
    for start in tl.range(0, count, KEYS, disable_licm=True):
        j = start + tl.arange(0, KEYS)
        inside = j < count
        slot = tl.load(call.slots + n * call.most + j, mask=inside, other=0).to(tl.int64)
        k = load_tile(call.k, slot * call.k.stride_row + head_kv * call.k.stride_head, inside, WIDTH)
        product = times_transposed(q, k, call.PRECISION)  # [HEADS, KEYS] float32
        probs, slope = probabilities_and_slope(product, lse, inside, call)
        if call.v is None:
            dprobs = times_transposed(dout, first_parts(k, V_PARTS), call.PRECISION)
        else:
            v = load_tile(call.v, slot * call.v.stride_row + head_kv * call.v.stride_head, inside, WIDTH)
            dprobs = times_transposed(dout, v, call.PRECISION)
        dscores = (probs * (dprobs - delta[:, None]) * slope).to(k[0].dtype)
        dq = add_product(dq, dscores, k, call.PRECISION)
        at = slot * call.num_heads_kv + head_kv
        if not tiles.ADDS:
            listed = (n - call.first) * call.most + j
            at = (listed * call.num_heads_kv + head_kv) * blocks + block
        add_to_keys(dv, at, inside, probs.to(dout[0].dtype), dout, 1.0, WIDTH, call, tiles.ADDS)
        add_to_keys(dk, at, inside, dscores, q, call.scale, WIDTH, call, tiles.ADDS)
    to = (n * (call.num_heads_kv * call.group_size) + head)[:, None] * call.q.DIM
    for p in tl.static_range(len(dq)):
        col = p * WIDTH + tl.arange(0, dq[p].shape[1])[None, :]
        part = (dq[p] * call.scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + to + col, part, mask=exists[:, None] & (col < call.q.DIM))


@triton.jit
def sum_selected_shares(shares, sums, order, bounds, num_heads_kv, blocks, AT_ONCE: tl.constexpr):
    """Adds all shares of one row of keys and one of its heads to a sum, in the order of the queries.

    Args:
        shares: ``KeySums``, (listed keys, heads, blocks, DIM) float32.
        sums: ``KeySums``, (rows, heads, DIM).
        order: int64, the listed keys in the order of their rows.
        bounds: (rows + 1,) int32, where each row's begin in ``order``.
        num_heads_kv: Key heads.
        blocks: Blocks of heads, each with a share.
        AT_ONCE: Shares to load at once.
    """
    pid = tl.program_id(0)
    row, head = pid // num_heads_kv, pid % num_heads_kv
    first, stop = tl.load(bounds + row), tl.load(bounds + row + 1)
    if first == stop:
        return
    col = tl.arange(0, sums.BLOCK_DIM)
    total = tl.zeros([sums.BLOCK_DIM], tl.float32)
    for start in tl.range(0, (stop - first) * blocks, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        inside = number < (stop - first) * blocks
        listed = tl.load(order + first + number // blocks, mask=inside, other=0)
        at = (listed * num_heads_kv + head) * blocks + number % blocks
        wanted = inside[:, None] & (col < sums.DIM)[None, :]
        total += tl.sum(tl.load(shares.ptr + at[:, None] * sums.DIM + col[None, :], mask=wanted, other=0.0), 0)
    to = sums.ptr + pid.to(tl.int64) * sums.DIM + col
    tl.store(to, tl.load(to, mask=col < sums.DIM, other=0.0) + total, mask=col < sums.DIM)
