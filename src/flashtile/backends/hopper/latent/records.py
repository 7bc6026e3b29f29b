"""What the kernel over latent rows gets beside a cached call, and what its roles hand each other."""

# Triton's aggregate reads annotations as types, so they must not be turned into strings.

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.ring import Records, Ring

# A part of a tile, in the order of ``roles.scheduler``: its place and lengths, its blocks of keys, and its states. The
# entry is the sequence's first page where pages are a list.
FIELDS = gl.constexpr(
    "is_part b entry h_kv first num_rows high first_row first_block stop_block state num_states origin waits"
)
RECORD_SIZE = gl.constexpr(32)


@aggregate
class Channels:
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
