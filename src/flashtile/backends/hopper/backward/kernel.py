"""Attention backward for Hopper: a program owns a block of keys and loops over the rows that see it.

    S^T = K Q^T      P^T = exp2(S^T * scale - lse_log2)      dV += P^T dO
    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)           dK += dS^T Q      dQ += dS K

Scores have keys first, so that P^T and dS^T are left operands straight from registers. Two warpgroups compute, each for
64 keys of its own: dK and dV of these keys stay in registers. Both write dS^T to shared memory. One step later each
computes one half of the dQ that all 128 keys add to a row block, and adds it to float32 global memory; or a third
warpgroup computes all of dQ, if there are registers for it. One warp loads by TMA. If the head dims make dK and dV too
large for that, two warpgroups share 64 keys: ``roles.gradient_consumer``. For lists of small blocks one warpgroup has
64 keys and computes no dQ, which is ``by_rows``'s.
Mathematics: docs/algorithm.md. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, appendix B.1 (warp specialisation of the backward).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import place_of
from flashtile.backends.hopper.backward.dq import DqOutput, dq_consumer, keep_dq_order, make_channels, with_dq
from flashtile.backends.hopper.backward.roles import consumer, gradient_consumer, producer
from flashtile.backends.hopper.device.mods import Transforms, alibi_terms, made, score_tensors
from flashtile.backends.hopper.device.ring import make_ring, make_ring_beside


@gluon.jit
def attention_backward(grid):
    """Computes every tile's dk and dv, and its share of dq; one program per SM.

    The argument is ``records.KeyGrid``. ``rows.prepare_rows`` must have run.
    """
    DQ_WARPGROUPS: gl.constexpr = grid.tiles.DQ_WARPGROUPS
    REGISTERS: gl.constexpr = grid.tiles.REGISTERS
    # Only rows past the last packed sequence have no slope. Without such rows one number less is passed on.
    batch = grid.call.keys.count if grid.call.q.PACKED else gl.to_tensor(2**30)
    mod = score_mod(grid.call.mods, batch)
    channels = make_channels(grid)
    channels0, channels1, dq_order, added = channels, channels, None, None
    if grid.work.dq_order is not None:
        flag: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        dq_order = make_ring(gl.int32, [1], flag, 4, 1)
        added = make_ring_beside(dq_order, gl.int32, [1], flag, DQ_WARPGROUPS)
    if grid.work.dq_desc is not None:
        lines: gl.constexpr = grid.tiles.DQ_WIDTH // 2
        dq_s = gl.allocate_shared_memory(gl.float32, [DQ_WARPGROUPS, lines, 128], grid.work.dq_desc.layout)
        channels0 = with_dq(channels, DqOutput(grid.work.dq, grid.work.dq_desc, dq_s.index(0), dq_order, added))
        last = dq_s.index(DQ_WARPGROUPS - 1)
        channels1 = with_dq(channels, DqOutput(grid.work.dq, grid.work.dq_desc, last, dq_order, added))
    elif grid.gradients.HAS_DQ:
        channels0 = with_dq(channels, DqOutput(grid.work.dq, None, None, dq_order, added))
        channels1 = channels0
    # The records are not kept in variables, because they hold constants: see ``records``.
    if grid.tiles.PARTS == 1 and not grid.tiles.BY_GRADIENT:
        gl.warp_specialize([
            (of_keys, (channels0, grid, mod, 0)), (producer, (channels, grid)),
        ], [1], [24])  # fmt: skip
    elif DQ_WARPGROUPS == 1:
        DQ_REGISTERS: gl.constexpr = grid.tiles.DQ_REGISTERS
        if dq_order is None:
            gl.warp_specialize([
                (of_keys, (channels0, grid, mod, 0)), (of_keys, (channels1, grid, mod, 1)),
                (dq_consumer, (channels0, grid)), (producer, (channels, grid)),
            ], [4, 4, 1], [REGISTERS, DQ_REGISTERS, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (of_keys, (channels0, grid, mod, 0)), (of_keys, (channels1, grid, mod, 1)),
                (dq_consumer, (channels0, grid)), (producer, (channels, grid)),
                (keep_dq_order, (channels0, grid, False)), (keep_dq_order, (channels0, grid, True)),
            ], [4, 4, 1, 1, 1], [REGISTERS, DQ_REGISTERS, 24, 24, 24])  # fmt: skip
    elif dq_order is None:
        gl.warp_specialize([
            (of_keys, (channels0, grid, mod, 0)), (of_keys, (channels1, grid, mod, 1)), (producer, (channels, grid)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (of_keys, (channels0, grid, mod, 0)), (of_keys, (channels1, grid, mod, 1)), (producer, (channels, grid)),
            (keep_dq_order, (channels0, grid, False)), (keep_dq_order, (channels0, grid, True)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])  # fmt: skip


@gluon.jit
def score_mod(mods, batch):
    """The ``Transforms`` for ``records.Mods``, with slopes of ``batch`` sequences."""
    BIAS: gl.constexpr = place_of(mods.SCORES, "bias")
    MASK: gl.constexpr = place_of(mods.MASKS, "mask")
    HAS_SOFTCAP: gl.constexpr = place_of(mods.SCORES, "softcap") >= 0
    softcap = None
    if HAS_SOFTCAP:
        softcap = mods.scores[place_of(mods.SCORES, "softcap")].operands
    terms = score_tensors(mods.scores, BIAS) + alibi_terms(mods, batch)
    return Transforms(mods.scale_log2, softcap, mods.prescale, HAS_SOFTCAP, False,
                    terms, score_tensors(mods.masks, MASK), (), (), (), (),
                    made(mods.FUNCTIONS, mods), made(mods.DROPOUT, mods))  # fmt: skip


@gluon.jit
def of_keys(channels, grid, mod, WARPGROUP: gl.constexpr):
    """A warpgroup that works on a tile's keys: one gradient of all keys, or both gradients of its own."""
    if channels.out is not None:
        consumer(channels, grid, mod, WARPGROUP)
    elif WARPGROUP == 0 or grid.gradients.HAS_DSCORES:
        # For dv alone, the second of two warpgroups that share keys has nothing to do.
        gradient_consumer(channels, grid, mod, WARPGROUP)
