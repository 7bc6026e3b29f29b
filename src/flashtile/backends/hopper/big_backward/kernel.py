"""Attention backward for Hopper with head dimensions up to 512: a kernel for each gradient.

    S^T = K Q^T      P^T = exp2(S^T * scale - lse_log2)      dV = P^T dO
    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)           dK = dS^T Q      dQ = dS K

A float32 gradient of 64 rows by 512 columns takes the registers of two warpgroups. So each kernel computes one
gradient, and computes scores again: eight products instead of five. Sums are never outside of a program, so bits depend
on no order. docs/tuning-notes.md compares this design with others.

The tile's own operands stay in shared memory; the other side's operands pass in chunks of their columns, step by step.
The scorer computes the scores of a step while both warpgroups multiply the operand of the step before: for dv its
probabilities, with dout; for dq and dk the gradients of its scores, which the follower computes from its dprobs and
from the scorer's factors. The second factor of these products is loaded once more: kept from the scores on, it would
leave no room for the next step's, and each load would wait for a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.backward.kernel import score_mod
from flashtile.backends.hopper.big_backward.roles import (
    BigBackwardChannels,
    follower,
    gradient_producer,
    producer,
    scorer,
    value_follower,
    value_producer,
    value_scorer,
)
from flashtile.backends.hopper.big_backward.scheduler import BLOCK, FIELDS, RECORD_SIZE
from flashtile.backends.hopper.device.ring import make_records, make_ring


@gluon.jit
def big_backward(grid):
    """Computes one tile of one gradient. The argument is ``records.Grid``; ``rows.prepare_rows`` must have run."""
    dtype: gl.constexpr = grid.call.q.desc.dtype
    OF: gl.constexpr = grid.tiles.OF
    WIDTH: gl.constexpr = grid.tiles.CHUNK
    OWN: gl.constexpr = grid.tiles.CHUNK_OWN
    chunks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, WIDTH], dtype)
    of_own: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, OWN], dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    of_rows: gl.constexpr = grid.gradients.rows.layout
    batch = grid.call.keys.count if grid.call.q.PACKED else gl.to_tensor(2**30)
    mod = score_mod(grid.call.mods, batch)
    tile = make_records(FIELDS, "", RECORD_SIZE, 1, 3 if OF == "v" else 4)
    held = make_ring(dtype, [BLOCK, WIDTH], chunks, 1, 1, 1, grid.call.q.BLOCK_DIM // WIDTH)
    passing = make_ring(dtype, [BLOCK, WIDTH], chunks, grid.tiles.CHUNKS, 1)
    BUFFERS: gl.constexpr = grid.tiles.CHUNKS_OWN // 2
    adding = make_ring(dtype, [BLOCK, OWN], of_own, BUFFERS, 1), make_ring(dtype, [BLOCK, OWN], of_own, BUFFERS, 1)
    if OF == "v":
        rows = make_ring(gl.float32, [2, BLOCK], of_rows, 2, 1)
        probs = make_ring(dtype, [BLOCK, BLOCK], square, 2, 2)
        rings = BigBackwardChannels(tile, held, None, rows, passing, None, adding, probs, None)
        gl.warp_specialize([
            (value_scorer, (rings, grid, mod)),
            (value_follower, (rings, grid)),
            (producer, (rings, grid)),
            (gradient_producer, (rings, grid)),
        ], [4, 1, 1], [grid.tiles.REGISTERS, 40, 40])  # fmt: skip
    else:
        WIDTH_V: gl.constexpr = grid.tiles.CHUNK_V
        chunks_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, WIDTH_V], dtype)
        held_v = make_ring(dtype, [BLOCK, WIDTH_V], chunks_v, 1, 1, 1, grid.call.v.BLOCK_DIM // WIDTH_V)
        passing_v = make_ring(dtype, [BLOCK, WIDTH_V], chunks_v, grid.tiles.CHUNKS_V, 1)
        rows = make_ring(gl.float32, [2, BLOCK], of_rows, 1 if OF == "q" else 2, 2)
        probs = make_ring(gl.bfloat16 if grid.gradients.HAS_SLOPE else gl.float16, [BLOCK, BLOCK], square, 1, 1)
        dscores = make_ring(dtype, [BLOCK, BLOCK], square, 1, 2)
        rings = BigBackwardChannels(tile, held, held_v, rows, passing, passing_v, adding, probs, dscores)
        gl.warp_specialize([
            (scorer, (rings, grid, mod)),
            (follower, (rings, grid)),
            (producer, (rings, grid)),
            (value_producer, (rings, grid)),
            (gradient_producer, (rings, grid)),
        ], [4, 1, 1, 1], [grid.tiles.REGISTERS, 40, 40, 40])  # fmt: skip
