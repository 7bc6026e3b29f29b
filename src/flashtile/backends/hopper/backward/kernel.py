"""Attention backward for Hopper: a program owns a block of keys and walks over the rows that see it.

    S^T = K Q^T      P^T = exp2(S^T * scale - lse_log2)      dV += P^T dO
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

from flashtile.backends.hopper.backward.channels import PART_KEYS, DqOutput, make_channels, with_dq
from flashtile.backends.hopper.backward.dq import advance_dq_order, dq_consumer, wait_for_dq_order
from flashtile.backends.hopper.backward.roles import consumer, producer
from flashtile.backends.hopper.backward.scheduler import KeyGrid
from flashtile.backends.hopper.backward.split_by_gradient import gradient_consumer
from flashtile.backends.hopper.device.ring import make_ring, make_ring_beside
from flashtile.backends.hopper.device.score_mod import ScoreMod, alibi_terms, score_tensors

# No run-time argument is specialised, so that the compile-time arguments and the dtypes alone decide which build runs.
_RUN_TIME = [
    "dq_order_ptr", "counter_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "scale_log2", "softmax_scale", "softcap",
    "prescale", "seqlen_q", "seqlen_k", "batch", "num_heads_kv", "group_size", "gqa_splits", "heads_per_split",
    "sum_heads", "left", "right", "heads_at_once", "first_head", "heads",
    "alibi_ptr", "alibi_stride_b", "bias_ptr", "bias_stride_b", "bias_stride_head", "bias_stride_row",
    "bias_stride_col", "mask_ptr", "mask_stride_b", "mask_stride_head", "mask_stride_row", "mask_stride_col",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_backward(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dk_out, dv_out, dq_desc, dq_ptr, dq_order_ptr, counter_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale_log2, softmax_scale, softcap, prescale, seqlen_q, seqlen_k, batch,
    num_heads_kv, group_size, gqa_splits, heads_per_split, sum_heads, left, right, heads_at_once, first_head, heads,
    alibi_ptr, alibi_stride_b, bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, BY_GRADIENT: gl.constexpr,
    STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    DQ_WIDTH: gl.constexpr, REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, FALLING: gl.constexpr,
    VARLEN: gl.constexpr, ADDS: gl.constexpr, CHAINED: gl.constexpr, SPLITS_GQA: gl.constexpr,
    ALIBI_ONE_SIDED: gl.constexpr, BIAS_CONTIGUOUS: gl.constexpr, MASK_CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """Every tile's dk and dv, and what it adds to dq; one program per SM.

    Arguments, in groups: descriptors of the tensors (dk, dv None: not computed), of the workspace's rows, and of its dq
    (None: add from registers); dq of the workspace (None: not computed), dq_order (None: add in any order), the
    counter of tiles; cu_seqlens, None if dense; numbers of ``launch.scales``; sizes, whose lengths are rows of the
    tensors if VARLEN; the band; ALiBi's slopes, bias and mask with their strides (``score_mod``), None if absent; then
    ``config.Config`` and what the call has. ADDS says that dk and dv are added to what is there, in float32;
    SPLITS_GQA that dk_out and dv_out are no descriptors but the workspace's sums (see ``gqa_splits``); CHAINED that
    the workspace is a chain's; CONTIGUOUS that a stride of keys is 1. ``preprocess.prepare_rows`` must have run.
    """
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = 1 if BY_GRADIENT else 2
    HAS_DQ: gl.constexpr = dq_ptr is not None
    HAS_DK: gl.constexpr = dk_out is not None
    DQ_WARPGROUPS: gl.constexpr = 1 if DQ_REGISTERS > 0 else 2
    DQ_SHARE: gl.constexpr = BLOCK_D if BLOCK_M == 128 or DQ_WARPGROUPS == 1 else BLOCK_D // 2
    grid = KeyGrid(seqlen_q, seqlen_k, batch, num_heads_kv, group_size, gqa_splits, heads_per_split, sum_heads, left,
                   right, heads_at_once, first_head, heads, softmax_scale, HAS_LEFT, HAS_RIGHT, VARLEN, FALLING,
                   BLOCK_M, PART_KEYS * PARTS, BLOCK_D, BLOCK_DV, PARTS, DQ_WARPGROUPS, DQ_SHARE, DQ_WIDTH,
                   HAS_DQ or HAS_DK, HAS_DQ, HAS_DK, dv_out is not None, ADDS, CHAINED, SPLITS_GQA)  # fmt: skip
    channels = make_channels(dtype, rows_desc, grid, STAGES, K_STAGES, V_STAGES, DS_STAGES, dq_order_ptr is not None)
    channels0, channels1, dq_order, added = channels, channels, None, None
    if dq_order_ptr is not None:
        flag: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        dq_order = make_ring(gl.int32, [1], flag, 4, 1)
        added = make_ring_beside(dq_order, gl.int32, [1], flag, DQ_WARPGROUPS)
    if dq_desc is not None:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_WIDTH // 2, 128], dq_desc.layout)
        channels0 = with_dq(channels, DqOutput(dq_ptr, dq_desc, dq_s.index(0), dq_order, added))
        channels1 = with_dq(channels, DqOutput(dq_ptr, dq_desc, dq_s.index(1), dq_order, added))
    elif HAS_DQ:
        channels0 = with_dq(channels, DqOutput(dq_ptr, None, None, dq_order, added))
        channels1 = channels0
    alibi = (alibi_ptr, alibi_stride_b)
    bias_strides = (bias_stride_b, bias_stride_head, bias_stride_row, 1 if BIAS_CONTIGUOUS else bias_stride_col)
    mask_strides = (mask_stride_b, mask_stride_head, mask_stride_row, 1 if MASK_CONTIGUOUS else mask_stride_col)
    mod = ScoreMod(scale_log2, softcap, prescale, HAS_SOFTCAP, False,
                   score_tensors((bias_ptr, bias_strides)) + alibi_terms(alibi[0], alibi[1], batch, ALIBI_ONE_SIDED),
                   score_tensors((mask_ptr, mask_strides)), (), (), (), ())  # fmt: skip
    produced = (q_desc, k_desc, v_desc, dout_desc, rows_desc, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                channels, grid)  # fmt: skip
    keys0, keys1 = (dk_out, dv_out, channels0, grid, mod), (dk_out, dv_out, channels1, grid, mod)
    order_arguments = (dq_order_ptr, channels0, grid)
    if DQ_WARPGROUPS == 1:
        if dq_order is None:
            gl.warp_specialize([
                (first_keys, keys0), (second_keys, keys1), (dq_consumer, (channels0, grid)), (producer, produced),
            ], [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (first_keys, keys0), (second_keys, keys1), (dq_consumer, (channels0, grid)), (producer, produced),
                (wait_for_dq_order, order_arguments), (advance_dq_order, order_arguments),
            ], [4, 4, 1, 1, 1], [REGISTERS, DQ_REGISTERS, 24, 24, 24])  # fmt: skip
    elif dq_order is None:
        gl.warp_specialize([
            (first_keys, keys0), (second_keys, keys1), (producer, produced),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_keys, keys0), (second_keys, keys1), (producer, produced), (wait_for_dq_order, order_arguments),
            (advance_dq_order, order_arguments),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip


@gluon.jit
def first_keys(dk_out, dv_out, channels, grid, mod):
    """The first warpgroup that works on a tile's keys."""
    of_keys(dk_out, dv_out, channels, grid, mod, 0)


@gluon.jit
def second_keys(dk_out, dv_out, channels, grid, mod):
    """The second one."""
    of_keys(dk_out, dv_out, channels, grid, mod, 1)


@gluon.jit
def of_keys(dk_out, dv_out, channels, grid, mod, WARPGROUP: gl.constexpr):
    """A warpgroup that works on a tile's keys: one gradient of all of them, or both of its own."""
    if channels.out is None:
        gradient_consumer(dk_out if WARPGROUP == 1 else dv_out, channels, grid, mod, WARPGROUP)
    else:
        consumer(dk_out, dv_out, channels, grid, mod, WARPGROUP)
