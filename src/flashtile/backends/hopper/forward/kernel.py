"""Attention forward for Hopper: a warp finds tiles, a warp loads by TMA, warpgroups of 64 rows compute with WGMMA.

The mathematics is in docs/algorithm.md. For each block of keys a warpgroup starts the scores of the next block, then
multiplies the probabilities of this block with its values; with two warpgroups the softmax of the next scores runs
under that product, with three it runs under the products of the others.
At the end of a tile the first scores of the next tile stand in for the next block's, so the tensor cores have work
while a tile's output is normalised and stored. Source of the schedule: Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3 (warp specialisation, intra-warpgroup overlap).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.head_dim_parts import make_rings
from flashtile.backends.hopper.device.ring import make_records
from flashtile.backends.hopper.device.score_mod import ScoreMod, alibi_by_mma, alibi_terms, score_tensors, score_tiles
from flashtile.backends.hopper.forward.roles import Output, consumer, producer, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE, Cache, Sizes
from flashtile.backends.hopper.forward.softmax_step import Channels

# Keys and values that are read at the same time: the L2 cache has 50 MB, and queries and outputs need some of it.
CACHED_BYTES = gl.constexpr(2**25)

# No run-time argument is specialised, so that the compile-time arguments and the dtypes alone decide which build runs.
_RUN_TIME = [
    "lse_ptr", "sinks_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "counter_ptr",
    "scale_log2", "softcap", "prescale", "seqlen_q", "seqlen_k", "batch", "num_heads_q", "group_size", "left", "right",
    "alibi_ptr", "alibi_stride_b", "bias_ptr", "bias_stride_b", "bias_stride_head", "bias_stride_row",
    "bias_stride_col", "mask_ptr", "mask_stride_b", "mask_stride_head", "mask_stride_row", "mask_stride_col",
    "cached_ptr", "cu_seqlens_new_ptr", "num_new", "entries_ptr", "pages_ptr", "pages_stride", "v_pitch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_forward(
    q_desc, k_desc, v_desc, out_desc, bias_desc, mask_desc, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr,
    sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr, scale_log2, softcap, prescale, seqlen_q, seqlen_k,
    batch, num_heads_q, group_size, left, right,
    alibi_ptr, alibi_stride_b, bias_ptr, bias_stride_b, bias_stride_head, bias_stride_row, bias_stride_col,
    mask_ptr, mask_stride_b, mask_stride_head, mask_stride_row, mask_stride_col,
    cached_ptr, cu_seqlens_new_ptr, num_new, entries_ptr, pages_ptr, pages_stride, v_pitch,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, STRIP: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, TILE_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, VARLEN: gl.constexpr, ALIBI_ONE_SIDED: gl.constexpr, BIAS_CONTIGUOUS: gl.constexpr,
    MASK_CONTIGUOUS: gl.constexpr, SCORE_STAGES: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    PAGE_SIZE: gl.constexpr, FEW_ROWS: gl.constexpr, LONG_KEYS: gl.constexpr,
):  # fmt: skip
    """Attention of every tile; one program per SM.

    Arguments, in groups: descriptors of the tensors, with boxes as ``launch.box`` says; pointers to an output in
    float32, which then has no descriptor, to lse (float32, natural log, as the backend returns it), to a partial result
    (``states.Partial``), sinks, cu_seqlens, and a counter of tiles (int32, 0 before and after), all but lse None if
    absent; the numbers of ``launch.scales``; sizes, whose lengths are rows of the tensors if VARLEN; the band; ALiBi's
    slopes, bias and mask with their strides (``score_mod``), None if absent; ``scheduler.Cache``, all None without one;
    then ``config.Config`` and what the call has. CONTIGUOUS says that a stride of keys is 1.
    """
    dtype: gl.constexpr = q_desc.dtype
    keys = make_rings(dtype, BLOCK_N, BLOCK_D, STAGES, NUM_WARPGROUPS)
    values = make_rings(dtype, BLOCK_N, BLOCK_DV, STAGES, NUM_WARPGROUPS)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, TILE_STAGES, NUM_WARPGROUPS + 1)
    out_s = None
    if out_desc is not None:
        # The output leaves in pieces, through fewer buffers than pieces where it does not fit beside the rest.
        OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[4 if VARLEN else 3]
        out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUT_WIDTH], dtype)
        out_s = gl.allocate_shared_memory(dtype, [NUM_WARPGROUPS * OUT_STAGES, BLOCK_M, OUT_WIDTH], out_layout)
    output = Output(out_desc, out_s, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sinks_ptr, HEAD_DIM_V,
                    BLOCK_DV)  # fmt: skip
    cache = None
    if cached_ptr is not None:
        cache = Cache(cached_ptr, cu_seqlens_new_ptr, num_new, entries_ptr, pages_ptr, pages_stride, v_pitch, PAGE_SIZE,
                      FEW_ROWS, LONG_KEYS)  # fmt: skip
    sizes = Sizes(seqlen_q, seqlen_k, batch, num_heads_q, group_size, left, right, HAS_LEFT, HAS_RIGHT, HAS_EDGES,
                  VARLEN, BLOCK_M, STRIP, STRIP < BLOCK_M, BLOCK_N, NUM_WARPGROUPS, OVERLAP, PINGPONG,
                  CACHED_BYTES // (2 * (BLOCK_D + BLOCK_DV)), VARLEN or cached_ptr is not None, cache)  # fmt: skip
    bias_strides = (bias_stride_b, bias_stride_head, bias_stride_row, 1 if BIAS_CONTIGUOUS else bias_stride_col)
    mask_strides = (mask_stride_b, mask_stride_head, mask_stride_row, 1 if MASK_CONTIGUOUS else mask_stride_col)
    bias_tiles = score_tiles(bias_desc, bias_strides, SCORE_STAGES, NUM_WARPGROUPS)
    mask_tiles = score_tiles(mask_desc, mask_strides, SCORE_STAGES, NUM_WARPGROUPS)
    by_tma = bias_tiles + mask_tiles
    biases = bias_tiles + score_tensors((bias_ptr, bias_strides))
    alibi = alibi_terms(alibi_ptr, alibi_stride_b, batch, ALIBI_ONE_SIDED)
    # Softcap and a scale that is not > 0 apply to the products alone: terms are then added after them.
    IS_LATE: gl.constexpr = HAS_SOFTCAP or SCALE_FIRST
    mod = ScoreMod(scale_log2, softcap, prescale, HAS_SOFTCAP, SCALE_FIRST, biases + alibi if IS_LATE else (),
                   mask_tiles + score_tensors((mask_ptr, mask_strides)), () if IS_LATE else biases,
                   () if IS_LATE else alibi_by_mma(alibi, BLOCK_N), () if IS_LATE else bias_tiles,
                   by_tma if IS_LATE else mask_tiles)  # fmt: skip
    # Registers of producer and scheduler. With 32 the first of two consumers has 8 fewer than the other, and the widest
    # loop bodies of packed calls would spill; with 24 the scheduler has no room for the tile counter.
    FEW: gl.constexpr = 24 if VARLEN and (HAS_LEFT or HAS_SOFTCAP) and NUM_WARPGROUPS == 2 else 32
    q0 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    scheduled = (tiles, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)
    if NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values), output, sizes, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values), output, sizes, mod, 1)),
            (producer, (q_desc, k_desc, v_desc, Channels(tiles, (q0, q1), keys, values), by_tma, sizes,
                        BLOCK_D, BLOCK_DV)),
            (scheduler, scheduled),
        ], [4, 1, 1], [REGISTERS, FEW, FEW])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values), output, sizes, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values), output, sizes, mod, 1)),
            (consumer, (Channels(tiles, q2, keys, values), output, sizes, mod, 2)),
            (producer, (q_desc, k_desc, v_desc, Channels(tiles, (q0, q1, q2), keys, values), by_tma, sizes,
                        BLOCK_D, BLOCK_DV)),
            (scheduler, scheduled),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, FEW, FEW])  # fmt: skip
