"""A kernel's arguments as trees of records. ``gpu.launch`` says what a field's name means to the compiler.

``gpu.device`` has the rules for records: assigned records, last constant, flags.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Plain numbers. Device code makes its own constants from them.
LOG2_E = 1.4426950408889634
# The least size of an lse for which ``softmax.is_lost`` is true.
MOST_LSE = 4096.0
# Rows in the two extra dimensions of a packed tensor's descriptor: see ``sequence``.
PACKED_ROWS = 2**30
# Distances in a ``DistanceTable`` beyond the longest sequences' on either side: more than a block of pairs has.
SLACK = 512


class Rows(NamedTuple):
    """A tensor (batch, rows, heads, dim), dim contiguous, or packed (rows, heads, dim); strides in elements.

    Attributes:
        ptr: Address of the first element.
        desc: Its tensor descriptor (in portable kernels one for each part of a tile), or None.
        stride_b: Stride from one sequence to the next, unused if packed.
        stride_row: Stride from row to row.
        stride_head: Stride from head to head.
        DIM: Columns.
        BLOCK_DIM: Columns of a tile; columns past DIM are 0.
        VECTOR: Divisor of the strides; the compiler detects it by itself only if it is 16.
        PACKED: Whether sequences follow one another in a single entry.
    """

    ptr: Any
    desc: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    DIM: Any
    BLOCK_DIM: Any
    VECTOR: Any
    PACKED: Any


class Sequences(NamedTuple):
    """The sequences of the queries or of the keys.

    Attributes:
        cu_seqlens: (count + 1,) int32 if they are packed, else None.
        count: Number of sequences.
        length: Rows of the packed tensor, or of each sequence.
    """

    cu_seqlens: Any
    count: Any
    length: Any


class Heads(NamedTuple):
    """The number of query heads, and the number of query heads for each key head."""

    num_q: Any
    group_size: Any


class Call(NamedTuple):
    """The inputs of all kernels of a call.

    Attributes:
        q: ``Rows``, like k and v.
        k: Keys.
        v: Values.
        queries: ``Sequences`` of q.
        keys: ``Sequences`` of k and v.
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
    """The tensors for a forward's results, and the partial result that it merges into them.

    Attributes:
        out: Contiguous (batch, rows, num_heads_q, head_dim_v), of any float dtype.
        lse: Contiguous (batch, num_heads_q, rows) float32; with ``Mods.LARGE`` in two parts, (..., rows, 2).
        partial_out: Like out: the output over other keys, or None.
        partial_lse: Like lse: the lse over those keys.
        max_scores: Like lse: the largest score of each row, with LARGE in the first part alone; None unless asked for.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    max_scores: Any = None


class BlockScale(NamedTuple):
    """float32 scales by sequence, head and block of rows, with their strides; a stride is 0 if scales are shared."""

    ptr: Any
    batch_step: Any
    head_step: Any
    block_step: Any


class Mod(NamedTuple):
    """A transform or a mask, see ``mods``; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        function: Applies the transform or the mask.
        linear: Applies a transform and returns its slope; None if the slope is 1, and for masks.
        of_head: Makes a head's operands; None if all heads have the same operands.
        operands: The argument of of_head; without of_head, of the other functions.
        of_rows: For printed mods alone, with functions as in ``flashtile.mods.printed``.
        fetch: Likewise.
    """

    function: Any
    linear: Any
    of_head: Any
    operands: Any
    of_rows: Any = None
    fetch: Any = None


class Operand(NamedTuple):
    """A tensor that a printed mod reads: its address, its lengths, and its strides by dimension."""

    ptr: Any
    sizes: Any
    steps: Any


class Operands(NamedTuple):
    """The operands of a printed mod; None for none.

    Attributes:
        tensors: A tuple of ``Operand``.
        numbers: A tuple of numbers.
        table: ``DistanceTable`` of values that depend on the distance.
    """

    tensors: Any
    numbers: Any
    table: Any = None


class Mods(NamedTuple):
    """The steps from a call's products to probabilities, the same for all heads; only passed as an argument.

    Attributes:
        scale: softmax_scale.
        scores: Tuple of the transforms, in their order; None for none.
        band: ``KeyBand``, applied to blocks on its edges alone.
        masks: Tuple of the masks, applied to all blocks; None for none.
        dropout: ``Dropout``.
        sinks: (num_heads_q,), or None.
        SCORES: Names of the transforms: ``"softcap bias"``.
        MASKS: Names of the masks.
        SCALE_FIRST: Whether scores are scaled before the softmax takes their maximum. Needed with any transform, and
            with a scale that is not positive; otherwise the scale is folded into the exponential's argument.
        INPUT_PRECISION: The precision of matrix products.
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


class KeyBand(NamedTuple):
    """The number of keys before and after its own position that a row keeps; None for all.

    With a chunk, a row keeps no key outside of its own chunk. Both sides are then bounded.

    Attributes:
        left: Keys before.
        right: Keys after.
        chunk: Keys of a chunk; None for no chunks.
        row_keys: ``Interval`` for rows: the keys that each row keeps; None without.
        key_rows: ``Interval`` for keys: the rows that keep each key; None without.
        bounds: ``TileBounds`` for the kernel's tiles; None without intervals.
        lists: ``Lists`` of the blocks that are kept; None for all.
    """

    left: Any
    right: Any
    chunk: Any = None
    row_keys: Any = None
    key_rows: Any = None
    bounds: Any = None
    lists: Any = None


class SlopeTensor(NamedTuple):
    """ALiBi slopes by head; ptr is None without any, stride_b 0 if sequences share them.

    ``last`` is the last sequence that has slopes: rows past it are taken for another one.
    """

    ptr: Any
    stride_b: Any
    last: Any


class ScoreTensor(NamedTuple):
    """A bias or mask over (batch, heads, rows, keys), with stride 0 where it broadcasts; ptr is None without one.

    The number of keys and all strides except stride_col are multiples of VECTOR, so a load reads VECTOR keys at once.
    It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any
    VECTOR: Any = 1


class Tree(NamedTuple):
    """Draft trees: words (batch, rows) int64. Sequences of more rows have no tree."""

    ptr: Any
    rows: Any


class Dropout(NamedTuple):
    """The dropout arguments of a call.

    Attributes:
        rng_state_ptr: (2,) int64: seed, offset; None without dropout.
        threshold: ``threshold_bits`` of the probability.
        keep_scale: Factor of the probabilities that are kept.
        origins_ptr: (num_sequences, 6) int32, ``Origin`` of each sequence; None if none is part of another.
        PTX: Whether the target accepts inline PTX.
    """

    rng_state_ptr: Any
    threshold: Any
    keep_scale: Any
    origins_ptr: Any
    PTX: Any


class Interval(NamedTuple):
    """Intervals of rows or of keys, int32 (batch, heads, count, 2): the first element of the other side, and the end.

    Attributes:
        ptr: Address of the first pair.
        batch_step: Step from one sequence to the next, 0 if they share intervals; all steps count numbers.
        head_step: The same of query heads.
        step: Step from one element to the next: 2, or 0 if all have the same interval.
        count: Number of elements.
    """

    ptr: Any
    batch_step: Any
    head_step: Any
    step: Any
    count: Any


class TileBounds(NamedTuple):
    """The results of ``interval_bounds`` for each tile, int32 (batch, heads, count, 4).

    The first element of the other side that some element of the tile keeps, and the end of such elements; the same for
    elements that all of the tile's elements keep.

    Attributes:
        ptr: Address of the first tile's numbers.
        batch_step: As in ``Interval``.
        head_step: As in ``Interval``.
        count: Number of tiles.
    """

    ptr: Any
    batch_step: Any
    head_step: Any
    count: Any


class BoundsTable(NamedTuple):
    """The output of ``interval_bounds``.

    Attributes:
        ptr: As in ``TileBounds``.
        heads: Heads with bounds of their own.
        tiles: As ``TileBounds.count``.
        length: Elements of the tiles' side.
        other_length: Elements of the other side.
        BLOCK: Elements of a tile.
        SCAN: Elements of the other side that are read at once.
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
        batch_step: Step from one sequence to the next, 0 if they share lists; counts numbers.
        head_step: The same of heads with lists of their own.
        heads_each: Query heads that share such a list: one, or a group.
        count: Number of blocks of this side.
        BLOCK: Elements of a block of this side.
        OTHER: Elements of a block of the other side.
        BITS: Whether bits decide about partial blocks, see ``block_mask.with_bits``.
        EDGES: Whether anything besides the end of a sequence, which is the same for all, may cut a full block.
    """

    bounds: Any
    items: Any
    batch_step: Any
    head_step: Any
    heads_each: Any
    count: Any
    BLOCK: Any
    OTHER: Any
    BITS: Any
    EDGES: Any


class DistanceTable(NamedTuple):
    """The values of ``places.tabulated``: contiguous (values, batch, heads, size) float32.

    Attributes:
        ptr: Address of the first number.
        batch: Number of sequences, 1 if all have the same values.
        heads: Number of query heads.
        size: Number of distances, from ``-before`` on.
        before: The place of distance 0.
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
