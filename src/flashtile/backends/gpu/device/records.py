"""A kernel's arguments as trees of records; ``gpu.launch`` says what a field's name means to the compiler.

``gpu.device`` has the rules for records: assigned records, last constant, flags.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Plain numbers, of which device code makes constants of its own.
LOG2_E = 1.4426950408889634
# The size of an lse from which on ``softmax.is_lost``.
MOST_LSE = 4096.0
# Rows in the two extra dimensions of a packed tensor's descriptor: see ``sequence``.
PACKED_ROWS = 2**30
# Distances in a ``DistanceTable`` on either side of those of the longest sequences: more than a block of pairs has.
SLACK = 512


class Rows(NamedTuple):
    """A tensor (batch, rows, heads, dim), dim contiguous, or packed (rows, heads, dim); strides in elements.

    Attributes:
        ptr: Its first element.
        desc: A tensor descriptor of it, in the portable kernels one for each part of a tile; or None.
        stride_b: From one sequence to the next, unused if packed.
        stride_row: From row to row.
        stride_head: From head to head.
        DIM: Columns.
        BLOCK_DIM: Columns of a tile, those past DIM being 0.
        UNIT: Divisor of the strides, which the compiler sees by itself only if it is 16.
        PACKED: Whether sequences follow one another in a single entry.
    """

    ptr: Any
    desc: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    DIM: Any
    BLOCK_DIM: Any
    UNIT: Any
    PACKED: Any


class Sequences(NamedTuple):
    """The sequences of the queries or of the keys.

    Attributes:
        cu_seqlens: (count + 1,) int32 where they are packed, else None.
        count: How many there are.
        length: Rows of the packed tensor, or of each sequence.
    """

    cu_seqlens: Any
    count: Any
    length: Any


class Heads(NamedTuple):
    """Query heads, and how many of them each key head has."""

    num_q: Any
    group_size: Any


class Call(NamedTuple):
    """What all kernels of a call read.

    Attributes:
        q: ``Rows``, like k and v.
        k: Keys.
        v: Values.
        queries: ``Sequences`` of q.
        keys: Those of k and v.
        heads: ``Heads``.
        mods: ``Mods``.
    """

    q: Any
    k: Any
    v: Any
    queries: Any
    keys: Any
    heads: Any
    mods: Any


class Output(NamedTuple):
    """Where a forward stores its results, and what it merges into them.

    Attributes:
        out: Contiguous (batch, rows, num_heads_q, head_dim_v), of any float dtype.
        lse: Contiguous (batch, num_heads_q, rows) float32; with ``Mods.LARGE`` in two parts, (..., rows, 2).
        partial_out: Like out: the output over other keys, or None.
        partial_lse: Like lse: the lse over those keys.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


class Scale(NamedTuple):
    """float32 scales by sequence, head and block of rows, with their steps, 0 where one serves several."""

    ptr: Any
    batch_step: Any
    head_step: Any
    block_step: Any


class Mod(NamedTuple):
    """A transform or a mask, see the module; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        function: Applies it.
        linear: The same with its slope; None where that is 1, and of masks.
        of_head: None where all heads have the same operands.
        operands: The argument of of_head; without of_head, that of the others.
        of_rows: Of a printed mod alone, whose functions are those of ``flashtile.mods.printed``.
        fetch: Likewise.
    """

    function: Any
    linear: Any
    of_head: Any
    operands: Any
    of_rows: Any = None
    fetch: Any = None


class Operand(NamedTuple):
    """A tensor that a printed mod reads: its address, its lengths, and how far apart its elements are by dimension."""

    ptr: Any
    sizes: Any
    steps: Any


class Operands(NamedTuple):
    """What a printed mod reads; None for none.

    Attributes:
        tensors: A tuple of ``Operand``.
        numbers: A tuple of numbers.
        table: ``DistanceTable`` of what it computes by distance.
    """

    tensors: Any
    numbers: Any
    table: Any = None


class Mods(NamedTuple):
    """How a call's products become probabilities, the same for all heads; only passed as an argument, never assigned.

    Attributes:
        scale: softmax_scale.
        scores: Tuple of the transforms, in their order; None for none.
        band: ``Band``, applied to blocks on its edges alone.
        masks: Tuple of the masks, applied to all blocks; None for none.
        dropout: ``Dropout``.
        sinks: (num_heads_q,), or None.
        SCORES: Names of the transforms: ``"softcap bias"``.
        MASKS: Names of the masks.
        SCALE_FIRST: Whether scores are scaled before the softmax takes their maximum. Needed with any transform, and
            with a scale that is not positive; otherwise the scale is folded into the exponential's argument.
        INPUT_PRECISION: That of the matrix products.
        LARGE: ``Problem.large_scores``: see ``softmax``.
    """

    scale: Any
    scores: Any
    band: Any
    masks: Any
    dropout: Any
    sinks: Any
    SCORES: Any
    MASKS: Any
    SCALE_FIRST: Any
    INPUT_PRECISION: Any
    LARGE: Any = False


class Band(NamedTuple):
    """How many keys before and after its own position a row keeps; None for all.

    With a chunk, which is not None, of so many keys, it keeps none outside of its own. Both sides are then bounded.

    Attributes:
        left: Before.
        right: After.
        chunk: Keys of a chunk.
        row_keys: ``Interval`` of rows: the keys that each keeps; None without.
        key_rows: That of keys: the rows that keep each.
        bounds: ``Bounds`` of the kernel's tiles; None without either.
        lists: ``Lists`` of the blocks that are kept; None for all.
    """

    left: Any
    right: Any
    chunk: Any = None
    row_keys: Any = None
    key_rows: Any = None
    bounds: Any = None
    lists: Any = None


class Alibi(NamedTuple):
    """ALiBi slopes by head; ptr is None without any, stride_b 0 if sequences share them."""

    ptr: Any
    stride_b: Any


class ScoreTensor(NamedTuple):
    """A bias or mask over (batch, heads, rows, keys), with stride 0 where it broadcasts; ptr is None without one.

    The number of keys and the strides but for stride_col are multiples of UNIT, so that a load takes UNIT keys at once.
    It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any
    UNIT: Any = 1


class Tree(NamedTuple):
    """Draft trees: words (batch, rows) int64; sequences of more rows have none."""

    ptr: Any
    rows: Any


class Dropout(NamedTuple):
    """The dropout arguments of a call.

    Attributes:
        rng_state_ptr: (2,) int64: seed, offset; None without dropout.
        threshold: ``threshold_bits`` of the probability.
        keep_scale: Factor of the probabilities that are kept.
        origins_ptr: (num_sequences, 6) int32, ``Origin`` of each sequence, None where none is part of another.
        PTX: Whether the target takes inline PTX.
    """

    rng_state_ptr: Any
    threshold: Any
    keep_scale: Any
    origins_ptr: Any
    PTX: Any


class Interval(NamedTuple):
    """Intervals of rows or of keys, int32 (batch, heads, count, 2): the first element of the other side, and the end.

    Attributes:
        ptr: Of the first pair.
        batch_step: From one sequence to the next, 0 if they share them; all steps are in numbers.
        head_step: The same of query heads.
        step: From one element to the next: 2, or 0 if all have the same.
        count: Elements.
    """

    ptr: Any
    batch_step: Any
    head_step: Any
    step: Any
    count: Any


class Bounds(NamedTuple):
    """Of each tile what ``interval_bounds`` found, int32 (batch, heads, count, 4).

    The first element of the other side that some element of the tile keeps, and the end of those; and the same of those
    that all of them keep.

    Attributes:
        ptr: Of the first tile's.
        batch_step: As in ``Interval``.
        head_step: As there.
        count: Tiles.
    """

    ptr: Any
    batch_step: Any
    head_step: Any
    count: Any


class BoundsTable(NamedTuple):
    """What ``interval_bounds`` writes.

    Attributes:
        ptr: As in ``Bounds``.
        heads: Heads that differ.
        tiles: As ``Bounds.count``.
        length: Elements of the tiles' side.
        other_length: Elements of the other side.
        BLOCK: Elements of a tile.
        SCAN: Elements of the other side that are looked at at once.
    """

    ptr: Any
    heads: Any
    tiles: Any
    length: Any
    other_length: Any
    BLOCK: Any
    SCAN: Any


class Lists(NamedTuple):
    """The lists of one side, rows or keys; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        bounds: int32 (batch, heads, count, 3): where a list begins, where its full blocks begin, and where it ends.
        items: int32, the blocks of the other side.
        batch_step: From one sequence to the next, 0 if they share them; in numbers.
        head_step: The same of query heads.
        count: Blocks of this side.
        BLOCK: Elements of one, of this side.
        OTHER: Those of one of the other side.
        BITS: Whether they have bits that decide about partial blocks, see ``block_mask.with_bits``.
        EDGES: Whether more than the end of a sequence, the same for all, may cut a full block.
    """

    bounds: Any
    items: Any
    batch_step: Any
    head_step: Any
    count: Any
    BLOCK: Any
    OTHER: Any
    BITS: Any
    EDGES: Any


class DistanceTable(NamedTuple):
    """Values of ``places.tabulated``: contiguous (values, batch, heads, size) float32.

    Attributes:
        ptr: The first.
        batch: Sequences, 1 where all have the same.
        heads: Query heads.
        size: Distances, from ``-before`` on.
        before: Where the distance 0 is.
    """

    ptr: Any
    batch: Any
    heads: Any
    size: Any
    before: Any


class Tabulated(NamedTuple):
    """The printed functions that ``tabulate`` calls, and the ``Operands`` that they read."""

    of_head: Any
    of_distance: Any
    operands: Any
