"""A kernel's arguments as trees of records; ``gpu.launch`` says what a field's name means to the compiler.

A record that holds constants is passed on or built in an argument list, never assigned, returned or added to: Triton
3.6 turns its constants into tensors. One that holds records with constants, and numbers, ends with a constant of its
own: else 3.6 forgets theirs after a function's first branch or loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple


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
        mods: ``mods.Mods``.
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
