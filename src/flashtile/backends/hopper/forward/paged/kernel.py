"""Attention forward for Hopper over a cache of keys and values: ``forward.kernel``, with other loads of keys.

Keys and values are loaded by TMA from pages that it has boxes for, else by threads that copy rows. For an 8-bit cache
one more role widens what is loaded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.mods import transforms_of
from flashtile.backends.hopper.device.parts import make_landings, make_rings
from flashtile.backends.hopper.device.ring import make_records
from flashtile.backends.hopper.forward.paged.keys import PagedKeys
from flashtile.backends.hopper.forward.paged.widening import widener
from flashtile.backends.hopper.forward.roles import consumer, few_registers, make_outputs, producer, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE
from flashtile.backends.hopper.forward.softmax_step import ForwardChannels


@gluon.jit
def paged_forward(call, output, schedule, helpers):
    """``attention_forward`` over a cache.

    Args:
        call: As there; ``call.keys.cache`` is a ``Cache``.
        output: As there.
        schedule: As there.
        helpers: ``Helpers``.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    NUM_WARPGROUPS: gl.constexpr = schedule.NUM_WARPGROUPS
    WIDENS: gl.constexpr = helpers.WIDENS
    GATHERS: gl.constexpr = helpers.GATHERS
    WARPS: gl.constexpr = helpers.WARPS
    REGISTERS: gl.constexpr = schedule.REGISTERS
    HAS_START: gl.constexpr = call.mods.band.left is not None or call.mods.band.bounds is not None
    FEW: gl.constexpr = 32 if WIDENS else few_registers(call.q.PACKED, HAS_START, call.mods.SCORES, NUM_WARPGROUPS)
    # A producer that gathers gets more registers, and so does the scheduler, which is in the same warpgroup.
    MANY: gl.constexpr = helpers.REGISTERS
    LOADERS: gl.constexpr = WARPS if GATHERS else 1
    OF_LOADERS: gl.constexpr = MANY if GATHERS else FEW
    COPIERS: gl.constexpr = 32 * WARPS if GATHERS else 0
    # With the warps that widen the compiler may give a thread 128 registers, as many as a product of 256 columns alone
    # takes.
    MOST: gl.constexpr = 128 if WIDENS else 256
    keys = make_rings(dtype, BLOCK_N, call.q.BLOCK_DIM, schedule.STAGES, NUM_WARPGROUPS, COPIERS=COPIERS)
    values = make_rings(dtype, BLOCK_N, call.v.BLOCK_DIM, schedule.STAGES, NUM_WARPGROUPS, 1, MOST, COPIERS)
    # If a program finds a tile of a mixed batch ahead of time, no idle program can take the tile.
    ASKED: gl.constexpr = call.q.PACKED and schedule.counter is not None
    READERS: gl.constexpr = NUM_WARPGROUPS + (2 if WIDENS else 1)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, READERS, ASKED)
    outputs = None
    if output.desc is not None:
        outputs = make_outputs(output, schedule)
    mod, by_tma = transforms_of(call, schedule)
    source = PagedKeys(GATHERS)
    q0 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
    if WIDENS:
        APART: gl.constexpr = NUM_WARPGROUPS == 3
        landed_keys = make_landings(keys, call.k.desc.dtype, call.q.BLOCK_DIM, APART)
        landed_values = make_landings(values, call.v.desc.dtype, call.v.BLOCK_DIM, APART, MOST)
    if WIDENS and NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (widener, (ForwardChannels(tiles, (), keys, values, None), (landed_keys, landed_values), call, schedule)),
            (producer, (ForwardChannels(tiles, (q0, q1), landed_keys, landed_values, None), by_tma, source, call,
                        schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, WARPS, 1, 1], [REGISTERS, MANY, FEW, FEW])  # fmt: skip
    elif WIDENS:
        q2 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
        landed = ForwardChannels(tiles, (q0, q1, q2), landed_keys, landed_values, None)
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (consumer, (ForwardChannels(tiles, q2, keys, values, outputs), call, output, schedule, mod, 2)),
            (widener, (ForwardChannels(tiles, (), keys, values, None), (landed_keys, landed_values), call, schedule)),
            (producer, (landed, by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 4, WARPS, 1, 1], [REGISTERS, REGISTERS, MANY, FEW, FEW])  # fmt: skip
    elif NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (producer, (ForwardChannels(tiles, (q0, q1), keys, values, None), by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, LOADERS, 1], [REGISTERS, OF_LOADERS, FEW])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, call.q.BLOCK_DIM, schedule.Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (ForwardChannels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (ForwardChannels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (consumer, (ForwardChannels(tiles, q2, keys, values, outputs), call, output, schedule, mod, 2)),
            (producer, (ForwardChannels(tiles, (q0, q1, q2), keys, values, None), by_tma, source, call, schedule)),
            (scheduler, (tiles, source, call, schedule)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, FEW, FEW])  # fmt: skip
