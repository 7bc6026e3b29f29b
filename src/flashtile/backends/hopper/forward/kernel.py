"""Attention forward for Hopper: one warp finds tiles, one warp loads by TMA, warpgroups of 64 rows compute by WGMMA.

The mathematics is in docs/algorithm.md. For each block of keys a warpgroup starts the scores of the next block, then
multiplies the probabilities of this block with its values; with two warpgroups the softmax of the next scores runs
under that product, with three it runs under the products of the others. At the end of a tile the first scores of the
next tile take the place of the next block's, so the tensor cores have work while a tile's output is normalised and
stored. Source of the schedule: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3 (warp specialisation,
intra-warpgroup overlap).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.mods import transforms_of
from flashtile.backends.hopper.device.parts import make_rings
from flashtile.backends.hopper.device.ring import make_records
from flashtile.backends.hopper.forward.roles import (
    KeyTensors,
    consumer,
    few_registers,
    make_outputs,
    producer,
    scheduler,
)
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE
from flashtile.backends.hopper.forward.softmax_step import ForwardChannels


@gluon.jit
def attention_forward(call, output, schedule):
    """Attention of every tile; one or two programs per SM.

    Args:
        call: ``gpu.device.records.Call``, with rows by TMA alone, and with the tensors' lengths if packed. Its keys and
            mods are ``Keys`` and ``Mods`` from ``device.records``.
        output: ``device.records.Output``.
        schedule: ``ForwardSchedule``.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    NUM_WARPGROUPS: gl.constexpr = schedule.NUM_WARPGROUPS
    REGISTERS: gl.constexpr = schedule.REGISTERS
    HAS_START: gl.constexpr = call.mods.band.left is not None or call.mods.band.bounds is not None
    FEW: gl.constexpr = few_registers(call.q.PACKED, HAS_START, call.mods.SCORES, NUM_WARPGROUPS)
    keys = make_rings(dtype, BLOCK_N, call.q.BLOCK_DIM, schedule.STAGES, NUM_WARPGROUPS)
    values = make_rings(dtype, BLOCK_N, call.v.BLOCK_DIM, schedule.STAGES, NUM_WARPGROUPS)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, NUM_WARPGROUPS + 1)
    outputs = None
    if output.desc is not None:
        outputs = make_outputs(output, schedule)
    mod, by_tma = transforms_of(call, schedule)
    source = KeyTensors(False)
    q0 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
    if NUM_WARPGROUPS == 1:
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (producer, (ForwardChannels(tiles, (q0,), keys, values, None), by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [1, 1], [FEW, FEW])  # fmt: skip
    elif NUM_WARPGROUPS == 2:
        q1 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (producer, (ForwardChannels(tiles, (q0, q1), keys, values, None), by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 1, 1], [REGISTERS, FEW, FEW])  # fmt: skip
    else:
        q1 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
        q2 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (consumer, (ForwardChannels(tiles, q2, keys, values, outputs), call, output, schedule, mod, 2)),
            (producer, (ForwardChannels(tiles, (q0, q1, q2), keys, values, None), by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, FEW, FEW])  # fmt: skip
