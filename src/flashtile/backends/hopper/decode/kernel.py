"""Attention over a cache for Hopper, for key heads that many rows share: loads, products and softmax overlap.

A warp finds the parts of a program, a warp loads their keys and values by TMA, and warpgroups of 64 rows compute with
WGMMA. Which splits there are, which program computes them, and how their states are stored and folded is as in the
Triton kernel, ``backends/gpu/decode/kernel.py``. Source of the schedule: Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.decode.roles import FIELDS, RECORD_SIZE, DecodeChannels, consumer, producer, scheduler
from flashtile.backends.hopper.device.parts import make_rings
from flashtile.backends.hopper.device.ring import make_records


@gluon.jit
def wide_cache_attention(call, maps, warps):
    """``kernel.cache_attention`` of 16-bit queries without windows and score functions; one program an SM.

    Args:
        call: ``call.DecodeCall``, without its caches' addresses.
        maps: ``roles.Maps``.
        warps: ``roles.Warps``.
    """
    dtype: gl.constexpr = maps.k.dtype
    DIM: gl.constexpr = call.q.BLOCK_DIM
    WARPGROUPS: gl.constexpr = call.schedule.BLOCK_M // 64
    STAGES: gl.constexpr = warps.STAGES
    REGISTERS: gl.constexpr = warps.REGISTERS
    FEW: gl.constexpr = warps.FEW
    keys = make_rings(dtype, call.schedule.BLOCK_N, DIM, STAGES, WARPGROUPS)
    values = make_rings(dtype, call.schedule.BLOCK_N, DIM, STAGES, WARPGROUPS)
    parts = make_records(FIELDS, "", RECORD_SIZE, 2, WARPGROUPS + 1)
    q0 = make_rings(dtype, 64, DIM, 1, 0)
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (consumer, (DecodeChannels(parts, q0, keys, values), call, 0)),
            (producer, (maps, DecodeChannels(parts, (), keys, values), call)),
            (scheduler, (parts, call)),
        ], [1, 1], [FEW, FEW])  # fmt: skip
    else:
        q1 = make_rings(dtype, 64, DIM, 1, 0)
        gl.warp_specialize([
            (consumer, (DecodeChannels(parts, q0, keys, values), call, 0)),
            (consumer, (DecodeChannels(parts, q1, keys, values), call, 1)),
            (producer, (maps, DecodeChannels(parts, (), keys, values), call)),
            (scheduler, (parts, call)),
        ], [4, 1, 1], [REGISTERS, FEW, FEW])  # fmt: skip
