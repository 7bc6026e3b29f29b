"""What the kernel over latent rows gets beside a cached call, and what its roles hand each other."""

# Annotations are read by Triton's aggregate as the types they are, so they must not be turned into strings.
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.device.gluon_compat import aggregate
from flashtile.backends.hopper.device.ring import Records, Ring

# A part of a tile, in the order of ``roles.scheduler``: its place and lengths, its blocks of keys, and its states. The
# entry is the sequence's first page where pages are a list.
FIELDS = gl.constexpr(
    "is_part b entry h_kv first num_rows high first_row first_block stop_block state num_states origin waits"
)
RECORD_SIZE = gl.constexpr(32)


class Latent(NamedTuple):
    """How rows are read and work is shared.

    Attributes:
        q: A descriptor of the queries' own columns, None where the scorer copies them.
        qv: Likewise of those of the values.
        k: A descriptor of the keys' own columns, with boxes of the rows of a block, or of a smaller page.
        v: Likewise of the values.
        scales: Likewise of the scales of 8-bit values, by row and 128 columns; None where values are of 16 bits.
        k_entry_rows: Rows from one entry to the next: a sequence, or a page.
        v_entry_rows: Likewise.
        fixed_cost: Of a tile, in blocks: ``shares``.
        fewest_blocks: Of a program, so that so many programs share the work.
        STAGES: Blocks of keys in flight.
        PIECE: Columns of values that are loaded and released at once.
        LANES: Programs with tiles of the same sequence at the same time.
        REGISTERS: Of a summer's threads.
        FEW: Of the threads of the warps that load and find work.
        WIDE: Of the threads that make 16 bits of 8.
    """

    q: Any
    qv: Any
    k: Any
    v: Any
    scales: Any
    k_entry_rows: Any
    v_entry_rows: Any
    fixed_cost: Any
    fewest_blocks: Any
    STAGES: Any
    PIECE: Any
    LANES: Any
    REGISTERS: Any
    FEW: Any
    WIDE: Any


@aggregate
class Channels:
    """Rings between the roles.

    Attributes:
        parts: Records of parts.
        queries: Those of a part by pieces of columns, of the values' first and then of the keys'; one use each.
        values: By pieces of columns, each released by the one summer that has it: the scorer has read a block before
            it leaves the probabilities without which summers do not begin.
        landings: Values of 8 bits, where ``values`` will be; the same as those where they are of 16.
        scales: Theirs, of a block; ``factors`` where there are none.
        keys: The keys' own columns, in whose place the scorer leaves the block's probabilities, which take as much.
        factors: By which rows are rescaled before a block is added.
        results: Of a part, the rows' maxima and sums.
    """

    parts: Records
    queries: gl.tuple
    values: gl.tuple
    landings: gl.tuple
    scales: Ring
    keys: Ring
    factors: Ring
    results: Ring
