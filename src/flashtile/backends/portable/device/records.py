"""What the portable kernels take as arguments besides ``gpu.device.records``, with the rules of those."""

from __future__ import annotations

from typing import Any, NamedTuple

# Programs that share the sum of a head's keys.
MEAN_SPLITS = 16


def widths(cols: int) -> list[int]:
    """The width of each part of a tile of so many columns, the widest first."""
    return [1 << bit for bit in reversed(range(cols.bit_length())) if cols >> bit & 1]


class Tiles(NamedTuple):
    """The last argument of the portable kernels.

    Attributes:
        heads_at_once: Heads whose tiles run at the same time.
        BLOCK_M: As in ``portable.config.Config``, like the constants that follow.
    """

    heads_at_once: Any
    BLOCK_M: Any
    BLOCK_N: Any
    ONE_LOOP: Any
    MASK_ALL: Any


class RowTerms(NamedTuple):
    """What the backward's kernels read of a row, as ``prepare_rows`` stores it.

    Attributes:
        lse: In base 2, ``(batch, num_heads_q, stride_head)`` like delta; with ``Mods.LARGE`` in natural units.
        delta: See the module's docstring.
        stride_head: Theirs, a multiple of 128.
        rest: What rounding took from lse, in base 2; None without ``Mods.LARGE``.
        flags: Given to repair: what rows another backend's kernels have lost add to gradients is added to these, and
            of all others lse is +inf. int32, whether a block of rows has lost some: blocks are numbered by sequences
            and heads, or, packed, by heads and then as ``scheduler.packed_tile`` has them.
        FLAG_ROWS: Rows of such a block.
    """

    lse: Any
    delta: Any
    stride_head: Any
    rest: Any = None
    flags: Any = None
    FLAG_ROWS: Any = None


class KeyGradients(NamedTuple):
    """Where the kernel of dk and dv stores them, contiguous; the pointer of one not wanted is None.

    Attributes:
        dk: Like k, or with a head for each split of a group.
        dv: Like v.
        heads_per_split: Query heads over which a program sums, None for all of a group.
        ADDS: Whether to add to what is there.
    """

    dk: Any
    dv: Any
    heads_per_split: Any
    ADDS: Any


class BiasSums(NamedTuple):
    """dbias in float32, contiguous ``(entries, heads, rows, cols)`` and 0 at first; ptr is None where it is not wanted.

    Sequence b adds to entry ``b % entries``. UNIT is ``ScoreTensor``'s. A SUM_ constant is True if the bias broadcasts
    along that dimension. It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    entries: Any
    heads: Any
    rows: Any
    cols: Any
    UNIT: Any
    SUM_HEADS: Any
    SUM_ROWS: Any
    SUM_COLS: Any


class ForwardResults(NamedTuple):
    """The forward's results and the gradient of lse.

    Attributes:
        out: Contiguous ``(batch, length, num_heads_q, head_dim_v)``.
        lse: Contiguous ``(batch, num_heads_q, length)``, or in two parts.
        dlse: Its gradient, or None.
        stride_b: Of dlse, like the next two.
        stride_head: From head to head.
        stride_row: From row to row.
        batch: Entries.
        length: Rows of an entry.
        num_heads_q: Query heads.
    """

    out: Any
    lse: Any
    dlse: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    batch: Any
    length: Any
    num_heads_q: Any


class BiasGradient(NamedTuple):
    """dbias, contiguous ``(bias_batch, heads, rows, stride_row)``, and the scores' numbers of rows and keys.

    A SUM_ constant is True if the bias broadcasts along that dimension; of the batch, dbias then has a sum for each of
    ``parts`` parts.
    """

    ptr: Any
    heads: Any
    rows: Any
    stride_row: Any
    max_rows: Any
    max_cols: Any
    parts: Any
    SUM_BATCH: Any
    SUM_HEADS: Any
    SUM_ROWS: Any
    SUM_COLS: Any


class Partial(NamedTuple):
    """The derivative of the user's score mod by one of its loads; functions is None for the gradient of a bias.

    IS_ONE says that it is 1. It holds constants, so it is only passed as an argument, never assigned.
    """

    functions: Any
    NUM: Any
    IS_ONE: Any = False


class Places(NamedTuple):
    """Where gradients of loads are summed by place; holds constants, so it is only passed as an argument.

    Attributes:
        of_loads: The printed ``places``.
        operands: ``Operands`` of contiguous gradients, whose addresses are not used.
        ptr: The sums: float32; or int64, with the greatest magnitudes.
        greatest: int32, the bits of each place's greatest magnitude; None for sums in float32.
        NUM: Which load's place it is.
        FIRST: Whether to find the greatest magnitudes, and add nothing.
        ROOM: So many bits of an integer are left for the number of terms.
    """

    of_loads: Any
    operands: Any
    ptr: Any
    greatest: Any
    NUM: Any
    FIRST: Any
    ROOM: Any


class Diagonals(NamedTuple):
    """Sums by ``i - j``, contiguous ``(batch, num_heads_q, before + after, BLOCK_M / BLOCK_N + 1, BLOCK_N)`` float32.

    Entry ``[..., k, s, c]`` is the share of one program in the distance ``(k - before + s - 1) * BLOCK_N + c``.

    Attributes:
        ptr: The sums.
        before: Blocks of keys.
        after: As many blocks of as many rows as cover all rows.
    """

    ptr: Any
    before: Any
    after: Any


class Scales(NamedTuple):
    """What a call of 8-bit tensors has besides ``records.Call``.

    Attributes:
        q: ``records.Scale``.
        k: ``records.Scale``.
        v: ``records.Scale``.
        shift: Like lse: ``q . mean(k)`` of each row if the keys' mean was subtracted, else None.
        out: What the output is divided by, or None.
    """

    q: Any
    k: Any
    v: Any
    shift: Any
    out: Any


class Angles(NamedTuple):
    """Cosines and sines, contiguous (rows, DIM / 2); only passed as an argument, never assigned. DIM 0: none.

    Unless pairs are INTERLEAVED, DIM / 2 is a multiple of the parts' width.
    """

    cos_ptr: Any
    sin_ptr: Any
    rows: Any
    DIM: Any
    INTERLEAVED: Any


class Mean(NamedTuple):
    """The means of keys, (batch, num_heads, head_dim) float32, rotated like the rows if these are.

    ``group``: the query heads of a key head; ptr None: no mean.
    """

    ptr: Any
    num_heads: Any
    group: Any


class PerHead(NamedTuple):
    """A number for each head, or for each of its blocks; strides may be 0. ptr None: none."""

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_block: Any


class Rounding(NamedTuple):
    """How it is written.

    Attributes:
        seed: Of the rotation's signs.
        ROTATE: Precision of the rotation's product in float32, None for no rotation.
        BITS: Whether e4m3 is made by integer arithmetic.
        SEARCH: Bounds of sequences to read at once.
        HEADS: Heads of a program that rounds rows.
        STAGES: Of the loop over them.
    """

    seed: Any
    ROTATE: Any
    BITS: Any
    SEARCH: Any
    HEADS: Any
    STAGES: Any


class Source(NamedTuple):
    """A tensor (batch, rows, heads, dim), or packed, then stride_b is 0; dim is contiguous, in parts of WIDTH."""

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    num_heads: Any
    DIM: Any
    WIDTH: Any


class Written(NamedTuple):
    """What is written for a tensor.

    Attributes:
        out: e4m3 as bytes; None where only the largest magnitudes are looked for.
        scales: ``PerHead``.
        largest: ``PerHead``, of the largest magnitudes; int32, the bits of float32.
        shift: Like lse: products of queries with the mean of keys, or None.
    """

    out: Any
    scales: Any
    largest: Any
    shift: Any
