"""Attention over a cache of latent rows for Hopper: a row is loaded once, for 576 columns of a key and 512 of a value.

A program has 64 rows of a sequence, query heads times queries, and some blocks of its keys. The scorer's product takes
a block's 576 columns; its probabilities go where the block's own 64 columns of keys were, so that they take no memory.
Two summers have half of the output's columns each; both operands of their products are in shared memory. The scorer is
at a block while the summers are at the one before, so that products and exponentials overlap. Values of 8 bits land
in the first half of the buffer that they become, where further warps widen them. Rows are loaded by TMA, or, from
pages that it has no boxes for, copied by a few warps. What a program computes
says ``shares``; states of tiles that several programs have parts of are folded as the Triton kernel folds its own. The
schedule has the shape of FlashMLA's (DeepSeek, 2025) and FlashAttention-3's for wide values, roles in other hands.
"""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.parts import append, make_rings
from flashtile.backends.hopper.device.ring import Records, Ring, make_landing, make_records, make_ring, make_ring_beside
from flashtile.backends.hopper.latent.gather import arrivals
from flashtile.backends.hopper.latent.roles import producer, scheduler, scorer, summer
from flashtile.backends.hopper.latent.widening import widener

# A part of a tile, in the order of ``roles.scheduler``: its place and lengths, its blocks of keys, and its states. The
# entry is the sequence's first page where pages are a list.
FIELDS = gl.constexpr(
    "is_part b entry h_kv first num_rows high first_row first_block stop_block state num_states origin waits"
)
RECORD_SIZE = gl.constexpr(32)


@aggregate
class LatentChannels:
    """Rings between the roles.

    Attributes:
        parts: Records of parts.
        queries: Queries of a part by pieces of columns, of the values' first and then of the keys'; one use each.
        values: By pieces of columns, each released by the one summer that has it: the scorer has read a block before
            it leaves the probabilities without which summers do not begin.
        landings: Values of 8 bits, where ``values`` will be; the same as ``values`` where these are of 16.
        scales: Scales of a block's values; ``factors`` where there are none.
        keys: The keys' own columns; in their place the scorer leaves the block's probabilities, which take as much.
        factors: By which rows are rescaled before a block is added.
        results: The rows' maxima and sums of a part.
    """

    parts: Records
    queries: gl.tuple
    values: gl.tuple
    landings: gl.tuple
    scales: Ring
    keys: Ring
    factors: Ring
    results: Ring


@gluon.jit
def latent_attention(call, latent):
    """``gpu.decode.kernel.cache_attention`` of queries of values; one program an SM.

    Args:
        call: ``call.DecodeCall``, without its caches' addresses.
        latent: ``records.Latent``.
    """
    dtype: gl.constexpr = call.q.ptr.dtype.element_ty
    N: gl.constexpr = call.schedule.BLOCK_N
    STAGES: gl.constexpr = latent.STAGES
    PIECE: gl.constexpr = latent.PIECE
    REGISTERS: gl.constexpr = latent.REGISTERS
    FEW: gl.constexpr = latent.FEW
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, 64], dtype)
    of_values: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PIECE], dtype)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDENS: gl.constexpr = latent.WIDE > 0
    # The producer is a warp, or as many as copy rows.
    LOADERS: gl.constexpr = max(latent.COPIERS, 1)
    OF_LOADERS: gl.constexpr = latent.COPYING if latent.COPIERS > 0 else FEW
    LOADING: gl.constexpr = arrivals(latent.COPIERS)
    # The scorer's 128 threads copy queries that TMA cannot load.
    COPIERS: gl.constexpr = 128 * (latent.q is None)
    queries = make_rings(dtype, 64, call.out.DIM + call.q.DIM, 1, 1, 1, PIECE, COPIERS)
    values = ()
    for _ in gl.static_range(call.out.DIM // PIECE):
        values = append(values, make_ring(dtype, [N, PIECE], of_values, STAGES, 1, COPIERS=0 if WIDENS else LOADING))
    keys = make_ring(dtype, [N, 64], of_keys, STAGES, 2, COPIERS=LOADING)
    factors = make_ring_beside(keys, gl.float32, [64], of_rows)
    results = make_ring(gl.float32, [64], of_rows, 1, 2, 1, 2)
    parts = make_records(FIELDS, "", RECORD_SIZE, 2, 5 if WIDENS else 4)
    if WIDENS:
        SCALES: gl.constexpr = call.out.DIM // 128
        of_scales: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, SCALES], gl.float32)
        landings = ()
        for i in gl.static_range(len(values)):
            landings = append(landings, make_landing(values[i], LOADING))
        scales = make_ring(gl.float32, [N, SCALES], of_scales, STAGES, 1, COPIERS=LOADING)
        channels = LatentChannels(parts, queries, values, landings, scales, keys, factors, results)
        gl.warp_specialize([
            (scorer, (channels, call, latent)),
            (summer, (channels, call, latent, 0)),
            (summer, (channels, call, latent, 1)),
            (widener, (channels, call, latent)),
            (producer, (channels, call, latent)),
            (scheduler, (parts, call, latent)),
        ], [4, 4, 4, LOADERS, 1], [REGISTERS, REGISTERS, latent.WIDE, OF_LOADERS, FEW])  # fmt: skip
    else:
        channels = LatentChannels(parts, queries, values, values, factors, keys, factors, results)
        gl.warp_specialize([
            (scorer, (channels, call, latent)),
            (summer, (channels, call, latent, 0)),
            (summer, (channels, call, latent, 1)),
            (producer, (channels, call, latent)),
            (scheduler, (parts, call, latent)),
        ], [4, 4, LOADERS, 1], [REGISTERS, REGISTERS, OF_LOADERS, FEW])  # fmt: skip
