"""Attention forward for Hopper with head dimensions up to 512: two warpgroups share the columns of 64 rows.

A float32 accumulator of 64 rows by 512 columns takes the registers of two warpgroups. The scorer computes the scores,
the softmax and the left columns, with probabilities from registers. It leaves the probabilities, and the factors by
which rows are rescaled, in shared memory for the follower, which computes the right columns. One warp finds tiles, and
one loads by TMA. Chunks of a block's keys are released one by one while the next chunks' products run, so that each
chunk has most of a step to be loaded again. A block's scores are started before the product of the block before with
its values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.device.mods import place_of
from flashtile.backends.hopper.big_heads.roles import BigHeadsChannels, follower, producer, scorer
from flashtile.backends.hopper.device.mods import Transforms, alibi_terms, made, score_tensors
from flashtile.backends.hopper.device.parts import make_rings
from flashtile.backends.hopper.device.ring import make_records, make_ring
from flashtile.backends.hopper.forward.roles import KeyTensors, scheduler
from flashtile.backends.hopper.forward.scheduler import FIELDS, OWN_FIELDS, RECORD_SIZE


@gluon.jit
def big_heads_forward(call, output, schedule, columns):
    """Attention of every tile; one program per SM.

    Args:
        call: As in ``forward.kernel.attention_forward``.
        output: Likewise.
        schedule: Likewise.
        columns: ``records.Columns``.
    """
    dtype: gl.constexpr = call.q.desc.dtype
    M: gl.constexpr = schedule.BLOCK_M
    N: gl.constexpr = schedule.BLOCK_N
    WIDTH: gl.constexpr = columns.CHUNK
    CHUNKS: gl.constexpr = call.q.BLOCK_DIM // WIDTH
    RIGHT: gl.constexpr = call.v.BLOCK_DIM - columns.LEFT
    of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, WIDTH], dtype)
    of_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, WIDTH], dtype)
    of_probs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], dtype)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = make_ring(dtype, [M, WIDTH], of_q, 1, 2, 1, CHUNKS)
    keys = make_ring(dtype, [N, WIDTH], of_k, columns.KEY_CHUNKS, 1)
    left = make_rings(dtype, N, columns.LEFT, schedule.STAGES, 1)
    right = make_rings(dtype, N, RIGHT, schedule.STAGES, 1)
    probs = make_ring(dtype, [M, N], of_probs, columns.PROB_STAGES, 1)
    factors = gl.allocate_shared_memory(gl.float32, [columns.PROB_STAGES, M], of_rows)
    tiles = make_records(FIELDS, OWN_FIELDS, RECORD_SIZE, schedule.TILE_STAGES, 3)
    lse = gl.allocate_shared_memory(gl.float32, [M], of_rows)
    rings = BigHeadsChannels(tiles, queries, keys, left, right, probs, factors, lse)
    BIAS: gl.constexpr = place_of(call.mods.SCORES, "bias")
    MASK: gl.constexpr = place_of(call.mods.MASKS, "mask")
    HAS_SOFTCAP: gl.constexpr = place_of(call.mods.SCORES, "softcap") >= 0
    softcap = None
    if HAS_SOFTCAP:
        softcap = call.mods.scores[place_of(call.mods.SCORES, "softcap")].operands
    terms = score_tensors(call.mods.scores, BIAS) + alibi_terms(call.mods, call.queries.count)
    masks = score_tensors(call.mods.masks, MASK)
    mod = Transforms(call.mods.scale_log2, softcap, call.mods.prescale, HAS_SOFTCAP,
                     call.mods.prescale is not None and not HAS_SOFTCAP, terms, masks, (), (), (), (),
                     made(call.mods.FUNCTIONS, call.mods), made(call.mods.DROPOUT, call.mods))  # fmt: skip
    gl.warp_specialize([
        (scorer, (rings, call, output, schedule, columns, mod)),
        (follower, (rings, call, output, schedule, columns)),
        (producer, (rings, call, schedule, columns)),
        (scheduler, (tiles, KeyTensors(False), call, schedule)),
    ], [4, 1, 1], [schedule.REGISTERS, 40, 40])  # fmt: skip
