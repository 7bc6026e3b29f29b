"""Attention forward of e4m3 tensors for Hopper: both products in 8 bits, with scales by block, and sums in float32.

The roles, the tiles and their order are as in ``forward.kernel``; here are the differences for 8 bits. A block's scores
are multiplied by the scales of its queries and keys together with the softmax scale. Probabilities are multiplied by
2^8 and rounded to e4m3. They are in registers in the order of WGMMA's left operand, since each 16 keys of the values
have the order of ``quantization.blocks.ORDER``. WGMMA sums 8-bit products with about 13 bits, so each block's product
with values starts from 0 and is added in float32, in units of the block's own scale. Source: Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, section 3.3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import place_of
from flashtile.backends.hopper.device.mods import Transforms
from flashtile.backends.hopper.device.parts import make_rings
from flashtile.backends.hopper.device.ring import make_records, make_ring
from flashtile.backends.hopper.forward.roles import KeyTensors, make_outputs, producer, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE
from flashtile.backends.hopper.forward.softmax_step import ForwardChannels
from flashtile.backends.hopper.quantized.roles import consumer


@gluon.jit
def attention_quantized(call, scales, output, schedule, WIDTH: gl.constexpr, BEHIND: gl.constexpr):
    """Attention of every tile; one program per SM.

    Args:
        call: As in ``attention_forward``, but v's map is ``launch.columns_map``.
        scales: ``Scales`` of blocks of 128 rows.
        output: As in ``attention_forward``, stored by TMA.
        schedule: ``ForwardSchedule``.
        WIDTH: As in ``roles.consumer``.
        BEHIND: As in ``roles.consumer``.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    NUM_WARPGROUPS: gl.constexpr = schedule.NUM_WARPGROUPS
    Q_STAGES: gl.constexpr = schedule.Q_STAGES
    REGISTERS: gl.constexpr = schedule.REGISTERS
    BLOCK_D: gl.constexpr = call.q.BLOCK_DIM
    BLOCK_DV: gl.constexpr = call.v.BLOCK_DIM
    keys = make_rings(dtype, BLOCK_N, BLOCK_D, schedule.STAGES, NUM_WARPGROUPS)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_DV, BLOCK_N], dtype)
    values = (make_ring(dtype, [BLOCK_DV, BLOCK_N], v_layout, schedule.STAGES, NUM_WARPGROUPS),)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, NUM_WARPGROUPS + 1)
    out = make_outputs(output, schedule)
    HAS_SOFTCAP: gl.constexpr = place_of(call.mods.SCORES, "softcap") >= 0
    softcap = None
    if HAS_SOFTCAP:
        softcap = call.mods.scores[0].operands
    SCALE_FIRST: gl.constexpr = call.mods.SCALE_FIRST and not HAS_SOFTCAP
    mod = Transforms(call.mods.scale_log2, softcap, call.mods.prescale, HAS_SOFTCAP, SCALE_FIRST,
                   (), (), (), (), (), (), (), ())  # fmt: skip
    source = KeyTensors(True)
    q0 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    if NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, out), call, scales, output, schedule, mod,
                        WIDTH, BEHIND, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, out), call, scales, output, schedule, mod,
                        WIDTH, BEHIND, 1)),
            (producer, (ForwardChannels(tiles, (q0, q1), keys, values, None), (), source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 1, 1], [REGISTERS, 24, 24])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, out), call, scales, output, schedule, mod,
                        WIDTH, BEHIND, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, out), call, scales, output, schedule, mod,
                        WIDTH, BEHIND, 1)),
            (consumer, (ForwardChannels(tiles, q2, keys, values, out), call, scales, output, schedule, mod,
                        WIDTH, BEHIND, 2)),
            (producer, (ForwardChannels(tiles, (q0, q1, q2), keys, values, None), (), source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, 24, 24])  # fmt: skip
