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

from flashtile.backends.gpu.device.mods import place_of
from flashtile.backends.hopper.device.mods import (
    Transforms,
    alibi_by_mma,
    alibi_terms,
    score_tensors,
    score_tiles,
)
from flashtile.backends.hopper.device.parts import make_landings, make_rings
from flashtile.backends.hopper.device.ring import make_records
from flashtile.backends.hopper.forward.roles import consumer, make_outputs, producer, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE
from flashtile.backends.hopper.forward.softmax_step import Channels
from flashtile.backends.hopper.forward.widening import widener


@gluon.jit
def attention_forward(call, output, schedule):
    """Attention of every tile; one program per SM.

    Args:
        call: ``gpu.device.records.Call``, with rows by TMA alone, and with the tensors' lengths if packed. Its keys and
            mods are ``Keys`` and ``Mods`` from ``device.records``.
        output: ``device.records.Output``.
        schedule: ``Schedule``.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    BLOCK_M: gl.constexpr = schedule.BLOCK_M
    BLOCK_N: gl.constexpr = schedule.BLOCK_N
    NUM_WARPGROUPS: gl.constexpr = schedule.NUM_WARPGROUPS
    Q_STAGES: gl.constexpr = schedule.Q_STAGES
    REGISTERS: gl.constexpr = schedule.REGISTERS
    BLOCK_D: gl.constexpr = call.q.BLOCK_DIM
    HELPERS: gl.constexpr = schedule.HELPER_WARPS
    COPIERS: gl.constexpr = 32 * HELPERS if schedule.GATHERS else 0
    keys = make_rings(dtype, BLOCK_N, BLOCK_D, schedule.STAGES, NUM_WARPGROUPS, COPIERS=COPIERS)
    # For an 8-bit cache one more role widens the producer's loads. With its warps the compiler may give a thread 128
    # registers, as many as a product of 256 columns alone takes.
    WIDENS: gl.constexpr = schedule.WIDENS
    MOST: gl.constexpr = 128 if WIDENS else 256
    values = make_rings(dtype, BLOCK_N, call.v.BLOCK_DIM, schedule.STAGES, NUM_WARPGROUPS, 1, MOST, COPIERS)
    # If a program finds a tile of a mixed batch ahead of time, no idle program can take the tile.
    ASKED: gl.constexpr = call.keys.CACHED and call.q.PACKED and schedule.counter is not None
    READERS: gl.constexpr = NUM_WARPGROUPS + (2 if WIDENS else 1)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, READERS, ASKED)
    outputs = None
    if output.desc is not None:
        outputs = make_outputs(output, schedule)
    BIAS: gl.constexpr = place_of(call.mods.SCORES, "bias")
    MASK: gl.constexpr = place_of(call.mods.MASKS, "mask")
    bias_tiles = score_tiles(call.mods.scores, BIAS, schedule.SCORE_STAGES, NUM_WARPGROUPS)
    mask_tiles = score_tiles(call.mods.masks, MASK, schedule.SCORE_STAGES, NUM_WARPGROUPS)
    by_tma = bias_tiles + mask_tiles
    biases = bias_tiles + score_tensors(call.mods.scores, BIAS)
    masks = mask_tiles + score_tensors(call.mods.masks, MASK)
    alibi = alibi_terms(call.mods, call.queries.count)
    # Softcap, and a scale that is not > 0, apply to the products alone: terms are then added after them.
    HAS_SOFTCAP: gl.constexpr = place_of(call.mods.SCORES, "softcap") >= 0
    softcap = None
    if HAS_SOFTCAP:
        softcap = call.mods.scores[place_of(call.mods.SCORES, "softcap")].operands
    IS_LATE: gl.constexpr = call.mods.SCALE_FIRST
    mod = Transforms(call.mods.scale_log2, softcap, call.mods.prescale, HAS_SOFTCAP,
                   call.mods.prescale is not None and not HAS_SOFTCAP, biases + alibi if IS_LATE else (), masks,
                   () if IS_LATE else biases, () if IS_LATE else alibi_by_mma(alibi, BLOCK_N),
                   () if IS_LATE else bias_tiles, by_tma if IS_LATE else mask_tiles)  # fmt: skip
    # Registers of producer and scheduler. With 32 the first of two consumers has 8 fewer than the second, and the
    # widest loop bodies of packed calls would spill; with 24 the scheduler has no room for the tile counter.
    HAS_START: gl.constexpr = call.mods.band.left is not None or call.mods.band.bounds is not None
    IS_WIDEST: gl.constexpr = call.q.PACKED and (HAS_START or HAS_SOFTCAP)
    FEW: gl.constexpr = 24 if IS_WIDEST and NUM_WARPGROUPS == 2 and not WIDENS else 32
    # A producer that gathers gets more registers, and so does the scheduler, which is in the same warpgroup.
    MANY: gl.constexpr = schedule.HELPER_REGISTERS
    PRODUCERS: gl.constexpr = HELPERS if schedule.GATHERS else 1
    OF_PRODUCER: gl.constexpr = MANY if schedule.GATHERS else FEW
    q0 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    q1 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
    if WIDENS:
        APART: gl.constexpr = NUM_WARPGROUPS == 3
        landed_keys = make_landings(keys, call.k.desc.dtype, BLOCK_D, APART)
        landed_values = make_landings(values, call.v.desc.dtype, call.v.BLOCK_DIM, APART, MOST)
    if WIDENS and NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (widener, (Channels(tiles, (), keys, values, None), (landed_keys, landed_values), call, schedule)),
            (producer, (Channels(tiles, (q0, q1), landed_keys, landed_values, None), by_tma, call, schedule)),
            (scheduler, (tiles, call, schedule)),
        ], [4, HELPERS, 1, 1], [REGISTERS, MANY, FEW, FEW])  # fmt: skip
    elif WIDENS:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (consumer, (Channels(tiles, q2, keys, values, outputs), call, output, schedule, mod, 2)),
            (widener, (Channels(tiles, (), keys, values, None), (landed_keys, landed_values), call, schedule)),
            (producer, (Channels(tiles, (q0, q1, q2), landed_keys, landed_values, None), by_tma, call, schedule)),
            (scheduler, (tiles, call, schedule)),
        ], [4, 4, HELPERS, 1, 1], [REGISTERS, REGISTERS, MANY, FEW, FEW])  # fmt: skip
    elif NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (producer, (Channels(tiles, (q0, q1), keys, values, None), by_tma, call, schedule)),
            (scheduler, (tiles, call, schedule)),
        ], [4, PRODUCERS, 1], [REGISTERS, OF_PRODUCER, FEW])  # fmt: skip
    else:
        q2 = make_rings(dtype, BLOCK_M, BLOCK_D, Q_STAGES, 1)
        gl.warp_specialize([
            (consumer, (Channels(tiles, q0, keys, values, outputs), call, output, schedule, mod, 0)),
            (consumer, (Channels(tiles, q1, keys, values, outputs), call, output, schedule, mod, 1)),
            (consumer, (Channels(tiles, q2, keys, values, outputs), call, output, schedule, mod, 2)),
            (producer, (Channels(tiles, (q0, q1, q2), keys, values, None), by_tma, call, schedule)),
            (scheduler, (tiles, call, schedule)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, FEW, FEW])  # fmt: skip
