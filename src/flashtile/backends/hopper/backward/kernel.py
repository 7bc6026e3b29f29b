"""Attention backward for Hopper: a program owns a block of keys and walks over the rows that see it.

    S^T = K Q^T      P^T = exp2(S^T * scale - origin)      dV += P^T dO
    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)           dK += dS^T Q      dQ += dS K

Scores lie keys first, so that P^T and dS^T are left operands straight from registers. Two warpgroups compute, each with
64 keys of its own: its dK and dV stay in registers. Both put dS^T into shared memory, and each makes one half of the dQ
that all 128 keys add to a row block, one step later, and adds it to float32 global memory; or a third warpgroup makes
all of dQ, where it has registers. One warp loads by TMA. For head dims whose dK and dV are too much for that, two
warpgroups share 64 keys: ``split_by_gradient``.
Mathematics: docs/algorithm.md. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, appendix B.1 (warp specialisation of the backward).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.backward.channels import PART_KEYS, WIDEST, Channels, DqOutput
from flashtile.backends.hopper.backward.dq import dq_consumer
from flashtile.backends.hopper.backward.roles import consumer, producer
from flashtile.backends.hopper.backward.scheduler import FIELDS, RECORD_SIZE, KeyGrid
from flashtile.backends.hopper.backward.split_by_gradient import gradient_consumer
from flashtile.backends.hopper.device.head_dim_parts import make_rings, width_of, with_parts
from flashtile.backends.hopper.device.ring import make_records, make_ring, make_ring_beside
from flashtile.backends.hopper.device.score_mod import ScoreMod, make_terms, pair_tensors

# No run-time argument is specialised, so that the compile-time arguments and the dtypes alone decide which build runs.
_RUN_TIME = [
    "turns_ptr", "counter_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "scale_log2", "softmax_scale", "softcap",
    "prescale", "seqlen_q", "seqlen_k", "batch", "num_heads_kv", "group_size", "subgroups", "subgroup_size", "left",
    "right", "heads_at_once",
    "alibi_ptr", "alibi_stride_b", "bias_ptr", "bias_stride_b", "bias_stride_head", "bias_stride_row",
    "bias_stride_col", "mask_ptr", "mask_stride_b", "mask_stride_head", "mask_stride_row", "mask_stride_col",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_backward(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dk_desc, dv_desc, dq_desc, dq_ptr, turns_ptr, counter_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale_log2, softmax_scale, softcap, prescale, seqlen_q, seqlen_k, batch,
    num_heads_kv, group_size, subgroups, subgroup_size, left, right, heads_at_once,
    alibi_ptr, alibi_stride_b, bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, BY_GRADIENT: gl.constexpr,
    STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    DQ_WIDTH: gl.constexpr,
    REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, FALLING: gl.constexpr, VARLEN: gl.constexpr, ADDS: gl.constexpr,
    SPLITS_GROUPS: gl.constexpr, ALIBI_ONE_SIDED: gl.constexpr, BIAS_CONTIGUOUS: gl.constexpr,
    MASK_CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """Every tile's dk and dv, and what it adds to dq; one program per SM.

    Arguments, in groups: descriptors of the tensors (dk, dv None: not computed), of the workspace's rows, and of its dq
    (None: add from registers); dq of the workspace (None: not computed), the turns (None: add in any order), the
    counter of tiles; cu_seqlens, None if dense; numbers of ``launch.scales``; sizes, whose lengths are rows of the
    tensors if VARLEN; the band; ALiBi's slopes, bias and mask with their strides (``score_mod``), None if absent; then
    ``config.Config`` and what the call has. ADDS says that dk and dv go to what is there, in float32; SPLITS_GROUPS
    that they are those of subgroups (see ``subgroups``); CONTIGUOUS that a stride of keys is 1.
    ``preprocess.prepare_rows`` must have run.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = 1 if BY_GRADIENT else 2
    HAS_DQ: gl.constexpr = dq_ptr is not None
    HAS_DK: gl.constexpr = dk_desc is not None
    HAS_DSCORES: gl.constexpr = HAS_DQ or HAS_DK
    # dv alone leaves the second of two that share keys nothing to do.
    CONSUMERS: gl.constexpr = 2 if HAS_DSCORES or not BY_GRADIENT else 1
    # A third warpgroup reads keys for dq. Those that share dq are those that make the scores.
    DQ_WARPGROUPS: gl.constexpr = 1 if DQ_REGISTERS > 0 else 2
    THIRD: gl.constexpr = 1 if HAS_DQ and DQ_WARPGROUPS == 1 else 0
    dout_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, width_of(BLOCK_DV, -1, WIDEST)], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, BLOCK_M], dtype)
    tiles = make_records(FIELDS, "", RECORD_SIZE, 2, CONSUMERS + THIRD)
    queries = make_rings(dtype, BLOCK_M, BLOCK_D, STAGES, CONSUMERS, 1, WIDEST)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], rows_desc.layout)
    dout = make_ring_beside(queries[0], dtype, [BLOCK_M, width_of(BLOCK_DV, 0, WIDEST)], dout_layout)
    dout = with_parts(dout, dout_layout, BLOCK_DV, WIDEST)
    keys = make_rings(dtype, PART_KEYS, BLOCK_D, K_STAGES, PARTS + THIRD, PARTS, WIDEST)
    # A ring that nobody uses would be a fault: see make_ring_beside.
    values, dscores, probs, dq0, dq1 = None, None, None, None, None
    if HAS_DSCORES:
        values = make_rings(dtype, PART_KEYS, BLOCK_DV, V_STAGES, PARTS, PARTS, WIDEST)
    if HAS_DQ or (BY_GRADIENT and HAS_DK):
        readers: gl.constexpr = DQ_WARPGROUPS if HAS_DQ else 0
        dscores = make_ring(dtype, [PART_KEYS, BLOCK_M], ds_layout, DS_STAGES, readers, PARTS, PARTS)
    if dq_desc is not None:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_WIDTH // 2, 128], dq_desc.layout)
        dq0 = DqOutput(dq_ptr, dq_desc, dq_s.index(0), turns_ptr)
        dq1 = DqOutput(dq_ptr, dq_desc, dq_s.index(1), turns_ptr)
    elif HAS_DQ:
        dq0 = DqOutput(dq_ptr, None, None, turns_ptr)
        dq1 = DqOutput(dq_ptr, None, None, turns_ptr)
    if BY_GRADIENT:
        probs = make_ring(gl.float16, [PART_KEYS, BLOCK_M], ds_layout, DS_STAGES, 1 if HAS_DSCORES else 0)
    of_producer = Channels(tiles, queries, rows, dout, keys, values, dscores, probs, None)
    channels0 = Channels(tiles, queries, rows, dout, keys, values, dscores, probs, dq0)
    channels1 = Channels(tiles, queries, rows, dout, keys, values, dscores, probs, dq1)
    grid = KeyGrid(seqlen_q, seqlen_k, batch, num_heads_kv, group_size, subgroups, subgroup_size, left, right,
                   heads_at_once, softmax_scale, HAS_LEFT, HAS_RIGHT, VARLEN, FALLING, BLOCK_M, PART_KEYS * PARTS,
                   BLOCK_D, BLOCK_DV, PARTS, DQ_WARPGROUPS,
                   BLOCK_D if BLOCK_M == 128 or DQ_WARPGROUPS == 1 else BLOCK_D // 2, DQ_WIDTH,
                   HAS_DSCORES, HAS_DQ, HAS_DK, dv_desc is not None, ADDS, SPLITS_GROUPS)  # fmt: skip
    alibi = (alibi_ptr, alibi_stride_b)
    bias_strides = (bias_stride_b, bias_stride_head, bias_stride_row, 1 if BIAS_CONTIGUOUS else bias_stride_col)
    mask_strides = (mask_stride_b, mask_stride_head, mask_stride_row, 1 if MASK_CONTIGUOUS else mask_stride_col)
    mod = ScoreMod(scale_log2, softcap, prescale, HAS_SOFTCAP, False,
                   make_terms(alibi, (bias_ptr, bias_strides), batch, ALIBI_ONE_SIDED),
                   pair_tensors((mask_ptr, mask_strides)))  # fmt: skip
    produced = (q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                of_producer, grid)  # fmt: skip
    if BY_GRADIENT:
        gl.warp_specialize([
            (gradient_consumer, (dv_desc, of_producer, grid, mod, 0)),
            (gradient_consumer, (dk_desc, of_producer, grid, mod, 1)),
            (dq_consumer, (channels0, grid)),
            (producer, produced),
        ], [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip
    else:
        # dk and dv leave in boxes of their narrowest part.
        out_cols: gl.constexpr = width_of(BLOCK_D, -1)
        out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_KEYS, out_cols], dtype)
        out_s = gl.allocate_shared_memory(dtype, [2 * (BLOCK_D // out_cols), PART_KEYS, out_cols], out_layout)
        if DQ_WARPGROUPS == 1:
            gl.warp_specialize([
                (consumer, (dk_desc, dv_desc, of_producer, out_s, grid, mod, 0)),
                (consumer, (dk_desc, dv_desc, of_producer, out_s, grid, mod, 1)),
                (dq_consumer, (channels0, grid)),
                (producer, produced),
            ], [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (consumer, (dk_desc, dv_desc, channels0, out_s, grid, mod, 0)),
                (consumer, (dk_desc, dv_desc, channels1, out_s, grid, mod, 1)),
                (producer, produced),
            ], [4, 1], [REGISTERS, 24])  # fmt: skip
