"""A NaN or an infinity among the values, kept to the rows that keep its key.

A product multiplies a probability of 0 with the value of a masked key, and 0 times NaN or infinity is NaN. The loops
pay nothing to prevent that. All rows of a warpgroup meet all values of its blocks, so one that is not finite leaves a
NaN or an infinity in its first row, too: if that is finite, no masked value has left anything anywhere. Else the
warpgroup leaves these rows until the kernel's end, when nothing else needs the registers; then they are computed key by
key, with a select in place of the product, and stored again. A chain of notes says which rows are left: in place of the
first one's lse stands where in lse those are that were left before, -1 for none.
"""

# ruff: noqa: RET505 - Triton compiles what stands behind a return, decided or not.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.gluon_compat import thread_barrier
from flashtile.backends.vocab import mask, sequence, softmax

# Columns that are worked on at a time, and keys between two looks at what is left to do.
COLS = gl.constexpr(32)
KEYS = gl.constexpr(64)


@gluon.jit
def is_suspect(accs, like):
    """[M] bool as ``like``: true for the first row of a tile if a value that is not finite has reached it.

    The first row alone, because whoever asks whether any has needs a barrier: by an H200, 2% of a short causal tile.
    """
    nothing = gl.convert_layout(gl.sum(accs[0] * 0.0, 1), like.type.layout)
    for i in gl.static_range(1, len(accs)):
        nothing += gl.convert_layout(gl.sum(accs[i] * 0.0, 1), like.type.layout)
    return (nothing != nothing) & (gl.arange(0, like.shape[0], like.type.layout) == 0)


@gluon.jit
def row_at(place, sizes, cu_seqlens_q_ptr):
    """(b, head, row) of an element of lse."""
    any_head = place // sizes.seqlen_q
    row = place - any_head * sizes.seqlen_q
    if sizes.varlen:
        low, high = 0, sizes.batch
        while low < high:
            middle = (low + high + 1) // 2
            if gl.load(cu_seqlens_q_ptr + middle) <= row:
                low = middle
            else:
                high = middle - 1
        return low, any_head, row - gl.load(cu_seqlens_q_ptr + low)
    else:
        b = any_head // sizes.num_heads_q
        return b, any_head - b * sizes.num_heads_q, row


@gluon.jit
def head_base(ptr, desc, b, start, head, VARLEN: gl.constexpr):
    """Pointer to the first row of a head of a sequence, and the stride of its rows."""
    if VARLEN:
        row = desc.strides[2]
        return ptr + gl.cast(start, gl.int64) * row + gl.cast(head, gl.int64) * desc.strides[3], row
    else:
        at = gl.cast(b, gl.int64) * desc.strides[0] + gl.cast(head, gl.int64) * desc.strides[2]
        return ptr + at, desc.strides[1]


@gluon.jit
def mend(left_s, tensors, lse_ptr, sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sizes, transform,
         BLOCK_DV: gl.constexpr):  # fmt: skip
    """Computes and stores all rows that a warpgroup left; the place in lse of the last ones is in shared memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    pointers, descs = tensors
    place = gl.max(left_s.load(gl.BlockedLayout([4], [32], [4], [0])), 0)
    # Other threads wrote the notes.
    thread_barrier()
    while place >= 0:
        b, head, row = row_at(place, sizes, cu_seqlens_q_ptr)
        start_q, seqlen_q = sequence.sequence(cu_seqlens_q_ptr, b, sizes.batch, sizes.seqlen_q, sizes.varlen)
        start_k, seqlen_k = sequence.sequence(cu_seqlens_k_ptr, b, sizes.batch, sizes.seqlen_k, sizes.varlen)
        lse_at = lse_ptr + place
        place = gl.max(gl.load(lse_at + gl.arange(0, 1, one)).to(gl.int32, bitcast=True), 0)
        # The note is overwritten from here on.
        thread_barrier()
        # The other operand is 0, which the compiler does not know: else it computes for all roles at once what follows
        # from the lengths, and they have no registers for it.
        seqlen_k = seqlen_k ^ ((place + 1) >> 31)

        rows = row + gl.arange(0, sizes.block_m, gl.SliceLayout(1, layout))
        places = gl.cast(rows, gl.int64)[:, None]
        head_kv = head // sizes.group_size
        q_at, q_stride = head_base(pointers[0], descs[0], b, start_q, head, sizes.varlen)
        k_at, k_stride = head_base(pointers[1], descs[1], b, start_k, head_kv, sizes.varlen)
        v_at, v_stride = head_base(pointers[2], descs[2], b, start_k, head_kv, sizes.varlen)
        out_at, out_stride = head_base(pointers[3], descs[3], b, start_q, head, sizes.varlen)
        head_dim = descs[0].shape[4 if sizes.varlen else 3]
        head_dim_v = descs[3].shape[4 if sizes.varlen else 3]
        row_max, row_sum = softmax_state(q_at + places * q_stride, k_at, k_stride, row, rows, seqlen_q, seqlen_k,
                                         head_dim, sizes, transform)  # fmt: skip
        if sinks_ptr is not None:
            _, row_max, row_sum = softmax.add_sink(row_max, row_sum, gl.load(sinks_ptr + head).to(gl.float32))
        scale, lse = softmax.finalise(row_max, row_sum)
        gl.store(lse_at + (rows - row), lse, mask=rows < seqlen_q)
        # A loop to head_dim_v would cost the roles registers.
        for col in range(0, BLOCK_DV, COLS):
            cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
            acc = weighted_values(q_at + places * q_stride, k_at, k_stride, v_at + cols, v_stride, row, rows,
                                  cols < head_dim_v, softmax.finite_origin(row_max), scale, seqlen_q, seqlen_k,
                                  head_dim, sizes, transform)  # fmt: skip
            is_real = (rows < seqlen_q)[:, None] & (cols < head_dim_v)[None, :]
            gl.store(out_at + places * out_stride + cols[None, :], acc.to(descs[3].dtype), mask=is_real)


@gluon.jit
def key_range(row, rows, seqlen_q, seqlen_k, sizes):
    """The rows' first and last keys, and (first, stop) of all their keys."""
    shift = seqlen_k - seqlen_q
    first_keys = mask.first_key(rows + shift, sizes.left, sizes.has_left)
    last_keys = mask.last_key(rows + shift, seqlen_k, sizes.right, sizes.has_right)
    first = gl.maximum(mask.first_key(row + shift, sizes.left, sizes.has_left), 0)
    stop = mask.last_key(row + sizes.block_m - 1 + shift, seqlen_k, sizes.right, sizes.has_right) + 1
    return first_keys, last_keys, first, stop


@gluon.jit
def exponents(q_at, k_at, rows, seqlen_q, head_dim, transform):
    """[block_m] float32, base 2: the rows' scores of one key; q_at points to the rows."""
    is_row = rows < seqlen_q
    s = is_row.to(gl.float32) * 0.0
    for first in range(0, head_dim, COLS):
        cols = first + gl.arange(0, COLS, gl.SliceLayout(0, rows.type.layout.parent))
        k = gl.load(k_at + cols, mask=cols < head_dim, other=0.0).to(gl.float32)
        q = gl.load(q_at + cols[None, :], mask=is_row[:, None] & (cols < head_dim)[None, :], other=0.0).to(gl.float32)
        s += gl.sum(q * k[None, :], 1)
    return transform.scores(s) * transform.scale_log2


@gluon.jit
def softmax_state(q_at, k_at, k_stride, row, rows, seqlen_q, seqlen_k, head_dim, sizes, transform):
    """(row_max, row_sum) of the rows, as ``softmax.update`` has them."""
    first_keys, last_keys, key, stop = key_range(row, rows, seqlen_q, seqlen_k, sizes)
    layout: gl.constexpr = rows.type.layout
    row_sum = gl.zeros([sizes.block_m], gl.float32, layout)
    row_max = row_sum - float("inf")
    while key < stop:
        s = exponents(q_at, k_at + gl.cast(key, gl.int64) * k_stride, rows, seqlen_q, head_dim, transform)
        s = gl.where((key >= first_keys) & (key <= last_keys), s, float("-inf"))
        _, _, row_max, row_sum = softmax.update(row_max, row_sum, s[:, None], 1.0, True)
        key += 1
    return row_max, row_sum


@gluon.jit
def weighted_values(q_at, k_at, k_stride, v_at, v_stride, row, rows, is_col, origin, scale, seqlen_q, seqlen_k,
                    head_dim, sizes, transform):  # fmt: skip
    """[block_m, COLS] float32: the rows' output in the columns that v_at points to."""
    first_keys, last_keys, first, key = key_range(row, rows, seqlen_q, seqlen_k, sizes)
    changing = ((rows < seqlen_q) & (scale != 0.0))[:, None] & is_col[None, :]
    layout: gl.constexpr = changing.type.layout
    acc = gl.zeros([sizes.block_m, COLS], gl.float32, layout)
    # From the last key down, until nothing can change: mostly, all rows have soon met a NaN of their own.
    is_open = key > first
    while is_open:
        key -= 1
        at = gl.cast(key, gl.int64)
        s = exponents(q_at, k_at + at * k_stride, rows, seqlen_q, head_dim, transform)
        v = gl.load(v_at + at * v_stride, mask=is_col, other=0.0).to(gl.float32)
        keep = (key >= first_keys) & (key <= last_keys)
        acc = gl.where(keep[:, None], acc + (gl.exp2(s - origin) * scale)[:, None] * v[None, :], acc)
        is_open = key > first
        if key % KEYS == 0:
            is_open = is_open & (gl.max(gl.max(gl.where(changing & (acc == acc), 1, 0), 1), 0) > 0)
    return acc
