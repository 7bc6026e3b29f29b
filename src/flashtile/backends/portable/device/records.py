"""Arguments of the portable kernels besides ``gpu.device.records``, under the same rules."""

from __future__ import annotations

from typing import Any, NamedTuple

# Programs that share the sum of a head's keys.
MEAN_SPLITS = 16


def widths(cols: int) -> list[int]:
    """The width of each part of a tile of so many columns, the widest first."""
    return [1 << bit for bit in reversed(range(cols.bit_length())) if cols >> bit & 1]


class TileSizes(NamedTuple):
    """The last argument of the portable kernels.

    Attributes:
        heads_at_once: Heads with tiles that run at the same time.
        BLOCK_M: As in ``PortableTiles``, as are the constants after it.
    """

    heads_at_once: Any
    BLOCK_M: Any
    BLOCK_N: Any
    ONE_LOOP: Any
    MASK_ALL: Any


class RowTerms(NamedTuple):
    """The numbers of each row that the backward's kernels read, as ``prepare_rows`` stores them.

    Attributes:
        lse: In base 2, ``(batch, num_heads_q, stride_head)`` like delta; with ``Mods.LARGE`` in natural units.
        delta: See the module's docstring.
        stride_head: The stride of lse and delta between heads, a multiple of 128.
        rest: The rounding error of lse, in base 2; None without ``Mods.LARGE``.
        flags: Only for repairs, which add the gradients' shares of rows that another backend's kernels have lost; lse
            of all other rows is +inf. int32, whether a block of rows has lost some. Blocks are numbered by sequences
            and heads, or, if packed, by heads and then as in ``tiles.packed_tile``.
        FLAG_ROWS: Rows of a block of ``flags``.
    """

    lse: Any
    delta: Any
    stride_head: Any
    rest: Any = None
    flags: Any = None
    FLAG_ROWS: Any = None


class KeyGradients(NamedTuple):
    """The contiguous tensors for dk and dv; the pointer of an unwanted one is None.

    Attributes:
        dk: Like k, or with a head for each split of a group.
        dv: Like v.
        heads_per_split: The number of query heads over which a program sums, None for all of a group.
        ADDS: Whether to add to the present contents.
    """

    dk: Any
    dv: Any
    heads_per_split: Any
    ADDS: Any


class BiasSums(NamedTuple):
    """dbias in float32, contiguous ``(entries, heads, rows, cols)`` and initially 0; ptr is None if it is not wanted.

    Sequence b adds to entry ``b % entries``. VECTOR is ``ScoreTensor``'s. A SUM_ constant is True if the bias
    broadcasts along that dimension. It holds constants, so it is only passed as an argument, never assigned.
    """

    ptr: Any
    entries: Any
    heads: Any
    rows: Any
    cols: Any
    VECTOR: Any
    SUM_HEADS: Any
    SUM_ROWS: Any
    SUM_COLS: Any


class SecondInputs(NamedTuple):
    """Directions of a second derivative's inputs: ``records.Rows``, and of the bias ``ScoreTensor``.

    The pointer of what is 0 is None.

    Attributes:
        q: Direction of the queries.
        k: Direction of the keys.
        v: Direction of the values.
        bias: Direction of the bias.
        slope: ``Mod`` of the slope of the user's score mod; all None if that one's derivative is 0 and not needed.
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    slope: Any


class SinkTangents(NamedTuple):
    """The sinks, a number for each query head, and their direction; None for no sinks, and for 0."""

    sinks: Any
    of_sinks: Any


class RowChanges(NamedTuple):
    """What second derivatives know of each row, float32, laid out like ``RowTerms.lse``.

    Attributes:
        mu: The tangent of lse.
        rho: What is subtracted in the gradient of scores, as delta is in the first one.
        stride_head: The stride between heads.
    """

    mu: Any
    rho: Any
    stride_head: Any


class ForwardResults(NamedTuple):
    """The forward's results and the gradient of lse.

    Attributes:
        out: Contiguous ``(batch, length, num_heads_q, head_dim_v)``.
        lse: Contiguous ``(batch, num_heads_q, length)``, or in two parts.
        dlse: Gradient of lse, or None.
        stride_b: Stride of dlse from entry to entry.
        stride_head: Stride of dlse from head to head.
        stride_row: Stride of dlse from row to row.
        batch: Number of entries.
        length: Rows of an entry.
        num_heads_q: Number of query heads.
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
    """dbias, contiguous ``(bias_batch, heads, rows, stride_row)``, and the numbers of rows and keys of scores.

    A SUM_ constant is True if the bias broadcasts along that dimension; along the batch, dbias then has a sum for each
    of ``parts`` parts.
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


class Derivative(NamedTuple):
    """The derivative of the user's score mod by one load; functions is None for the gradient of a bias.

    IS_ONE says that the derivative is 1. It holds constants, so it is only passed as an argument, never assigned.
    """

    functions: Any
    NUM: Any
    IS_ONE: Any = False


class Places(NamedTuple):
    """Sums of loads' gradients by place; holds constants, so it is only passed as an argument.

    Attributes:
        of_loads: The printed ``places``.
        operands: ``Operands`` for contiguous gradients; their addresses are not used.
        ptr: The sums: float32, or int64 if the greatest magnitudes are given.
        greatest: int32, the bits of each place's greatest magnitude; None for float32 sums.
        NUM: The number of the load.
        FIRST: Whether to find the greatest magnitudes only, and add nothing.
        ROOM: The number of an integer's bits that are left for the number of terms.
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

    Entry ``[..., k, s, c]`` is one program's share for the distance ``(k - before + s - 1) * BLOCK_N + c``.

    Attributes:
        ptr: The sums.
        before: Number of blocks of keys.
        after: Number of blocks of BLOCK_N rows that cover all rows.
    """

    ptr: Any
    before: Any
    after: Any


class Scales(NamedTuple):
    """Further arguments of a call with 8-bit tensors, besides ``records.Call``.

    Attributes:
        q: ``records.BlockScale``.
        k: ``records.BlockScale``.
        v: ``records.BlockScale``.
        shift: Like lse: ``q . mean(k)`` of each row if the keys' mean was subtracted, else None.
        out: The divisor of the output, or None.
    """

    q: Any
    k: Any
    v: Any
    shift: Any
    out: Any


class Angles(NamedTuple):
    """Cosines and sines, contiguous (rows, DIM / 2); only passed as an argument, never assigned. DIM 0 means none.

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
    """A number for each head, or for each block of a head; strides may be 0. ptr None means none."""

    ptr: Any
    stride_b: Any
    stride_head: Any
    stride_block: Any


class Rounding(NamedTuple):
    """How a tensor is rounded and written.

    Attributes:
        seed: Seed of the rotation's signs.
        ROTATE: Precision of the rotation's product in float32, None for no rotation.
        BITS: Whether e4m3 is made by integer arithmetic.
        SEARCH: The number of sequences' bounds to read at once.
        HEADS: The number of heads of a program that rounds rows.
        STAGES: Pipeline stages of the loop over heads.
    """

    seed: Any
    ROTATE: Any
    BITS: Any
    SEARCH: Any
    HEADS: Any
    STAGES: Any


class Source(NamedTuple):
    """A tensor (batch, rows, heads, dim), or packed with stride_b 0; dim is contiguous, in parts of WIDTH."""

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    num_heads: Any
    DIM: Any
    WIDTH: Any


class Written(NamedTuple):
    """The outputs for a tensor.

    Attributes:
        out: e4m3 as bytes; None if only the largest magnitudes are wanted.
        scales: ``PerHead``.
        largest: ``PerHead``, the largest magnitudes; int32, the bits of float32.
        shift: Like lse: the products of queries with the mean of keys, or None.
    """

    out: Any
    scales: Any
    largest: Any
    shift: Any
