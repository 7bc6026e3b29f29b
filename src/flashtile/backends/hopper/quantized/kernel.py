"""Attention forward of e4m3 tensors for Hopper: both products in 8 bits, each block's own scales, sums in float32.

The roles, the tiles and their order are those of ``forward.kernel``; here is what 8 bits change. A block's scores are
multiplied by the scales of its queries and keys where the softmax scale is. Probabilities are rounded to e4m3 after a
factor of 2^8, and lie in registers as WGMMA takes its left operand, since each 16 keys of the values come in the order
of ``quantization.blocks.ORDER``. WGMMA sums 8-bit products with about 13 bits, so each block's product with the values
starts from 0 and is added in float32, in units of the block's own scale. Source: Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3.3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.head_dim_parts import make_rings
from flashtile.backends.hopper.device.ring import make_records, make_ring
from flashtile.backends.hopper.device.score_mod import ScoreMod
from flashtile.backends.hopper.forward.roles import Output, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE, Sizes
from flashtile.backends.hopper.forward.softmax_step import Channels
from flashtile.backends.hopper.quantized.roles import consumer, producer
from flashtile.backends.hopper.quantized.scales import Scale, Scales

# As in ``forward.kernel``.
CACHED_BYTES = gl.constexpr(2**25)

_RUN_TIME = [
    "lse_ptr", "sinks_ptr", "shift_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "counter_ptr", "q_scale_ptr",
    "k_scale_ptr", "v_scale_ptr", "q_scale_stride_b", "q_scale_stride_head", "q_scale_stride_block",
    "k_scale_stride_b", "k_scale_stride_head", "k_scale_stride_block", "v_scale_stride_b", "v_scale_stride_head",
    "v_scale_stride_block", "scale_log2", "softcap", "prescale", "shift_scale", "seqlen_q", "seqlen_k", "batch",
    "num_heads_q", "group_size", "left", "right",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUN_TIME)
def attention_quantized(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, shift_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_scale_stride_b, q_scale_stride_head, q_scale_stride_block,
    k_scale_stride_b, k_scale_stride_head, k_scale_stride_block, v_scale_stride_b, v_scale_stride_head,
    v_scale_stride_block, scale_log2, softcap, prescale, shift_scale, seqlen_q, seqlen_k, batch, num_heads_q,
    group_size, left, right,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, TILE_STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_EDGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, VARLEN: gl.constexpr, WIDTH: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Attention of every tile; one program per SM.

    Arguments as in ``forward.kernel``, and: the map of v's columns (``launch.columns_map``); ``shift``, like lse, which
    times shift_scale makes a row's scores those of the keys before smoothing, None for none; scales of blocks of 128
    rows, with strides in elements, 0 where one serves several; WIDTH and BEHIND as in ``roles.consumer``.
    """
    dtype: gl.constexpr = q_desc.dtype
    keys = make_rings(dtype, BLOCK_N, BLOCK_D, STAGES, NUM_WARPGROUPS)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_DV, BLOCK_N], dtype)
    values = (make_ring(dtype, [BLOCK_DV, BLOCK_N], v_layout, STAGES, NUM_WARPGROUPS),)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, TILE_STAGES, NUM_WARPGROUPS + 1)
    OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[4 if VARLEN else 3]
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUT_WIDTH], out_desc.dtype)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [NUM_WARPGROUPS * OUT_STAGES, BLOCK_M, OUT_WIDTH], out_layout)
    output = Output(out_desc, out_s, None, lse_ptr, None, None, sinks_ptr, None, BLOCK_DV)
    sizes = Sizes(seqlen_q, seqlen_k, batch, num_heads_q, group_size, left, right,
                  HAS_LEFT, HAS_RIGHT, HAS_EDGES, VARLEN, BLOCK_M, BLOCK_M, False, BLOCK_N, NUM_WARPGROUPS,
                  OVERLAP, PINGPONG, CACHED_BYTES // (BLOCK_D + BLOCK_DV), VARLEN, None)  # fmt: skip
    mod = ScoreMod(scale_log2, softcap, prescale, HAS_SOFTCAP, SCALE_FIRST, (), (), (), (), (), ())
    scales = Scales(
        Scale(q_scale_ptr, q_scale_stride_b, q_scale_stride_head, q_scale_stride_block),
        Scale(k_scale_ptr, k_scale_stride_b, k_scale_stride_head, k_scale_stride_block),
        Scale(v_scale_ptr, v_scale_stride_b, v_scale_stride_head, v_scale_stride_block),
        shift_ptr, shift_scale,
    )  # fmt: skip
    q0 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    scheduled = (tiles, sizes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, counter_ptr)
    if NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values), output, sizes, mod, scales, WIDTH, BEHIND, 0)),
            (consumer, (Channels(tiles, q1, keys, values), output, sizes, mod, scales, WIDTH, BEHIND, 1)),
            (producer, (q_desc, k_desc, v_desc, Channels(tiles, (q0, q1), keys, values), sizes, BLOCK_D)),
            (scheduler, scheduled),
        ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values), output, sizes, mod, scales, WIDTH, BEHIND, 0)),
            (consumer, (Channels(tiles, q1, keys, values), output, sizes, mod, scales, WIDTH, BEHIND, 1)),
            (consumer, (Channels(tiles, q2, keys, values), output, sizes, mod, scales, WIDTH, BEHIND, 2)),
            (producer, (q_desc, k_desc, v_desc, Channels(tiles, (q0, q1, q2), keys, values), sizes, BLOCK_D)),
            (scheduler, scheduled),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, 24, 24])  # fmt: skip
