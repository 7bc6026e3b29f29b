"""The arguments of a cached call on the device, as records that hold constants: only passed on, never assigned."""

from __future__ import annotations

from typing import Any, NamedTuple


class Queries(NamedTuple):
    """The queries: (batch, rows, num_heads_q, DIM), or packed; holds constants, so it is only passed as an argument.

    Attributes:
        ptr: Their address.
        stride_b: In elements, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        cu_seqlens_ptr: (batch + 1,) int32 if packed, else None.
        length: Rows of a sequence, or of all packed ones together.
        MOST_ROWS: Only sequences with so many packed rows a key head at most are computed; None for all.
        ABOVE_KEYS: And with more keys than these.
    """

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    cu_seqlens_ptr: Any
    length: Any
    MOST_ROWS: Any = None
    ABOVE_KEYS: Any = None


class Lengths(NamedTuple):
    """What keys each sequence has, by (batch,) int32 tensors.

    Attributes:
        cached_ptr: Keys before this call.
        leftpad_ptr: The first key that counts; None for 0.
        cu_seqlens_new_ptr: Bounds of packed new keys, (batch + 1,), or None.
        num_new: New keys of each sequence where they are not packed.
        entries_ptr: Which entry of the cache is the sequence's; None for its own number.
    """

    cached_ptr: Any
    leftpad_ptr: Any
    cu_seqlens_new_ptr: Any
    num_new: Any
    entries_ptr: Any


class Cache(NamedTuple):
    """Keys or values, (entries, rows, heads, DIM), with the scales of 8-bit ones.

    Attributes:
        ptr: Their address; 8-bit ones are int16 pairs of columns.
        stride_b: Of entries: sequences or pages; in elements, or in pairs, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        scale_ptr: float32 by head, or by entry and head; None for 1.
        scale_stride_b: Of entries of the scales, 0 if they are by head alone.
    """

    ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    scale_ptr: Any
    scale_stride_b: Any


class Pages(NamedTuple):
    """The table of pages, (batch, pages) int32; ptr is None for a cache by sequence."""

    ptr: Any
    stride_b: Any


class Results(NamedTuple):
    """Where results go.

    Attributes:
        out_ptr: Like q, head_dim_v wide, with the strides that follow.
        stride_b: In elements, as the next two.
        stride_row: Of rows.
        stride_head: Of heads.
        lse_ptr: Contiguous (batch, num_heads_q, rows), or packed (num_heads_q, rows), float32.
        acc_ptr: float32 [slots, head_dim_v]: a row's sum of one split, unnormalised; None if nothing is ever split.
        stats_ptr: float32 [slots, 2]: its maximum, base 2, and its denominator.
        counters_ptr: int32, two for each tile, see ``kernel.share_tile``; the first is 0 between launches.
        sinks_ptr: (num_heads_q,), or None.
    """

    out_ptr: Any
    stride_b: Any
    stride_row: Any
    stride_head: Any
    lse_ptr: Any
    acc_ptr: Any
    stats_ptr: Any
    counters_ptr: Any
    sinks_ptr: Any


class Splitting(NamedTuple):
    """How keys are cut into splits, see ``config.Splitting``; constants, so it is only passed as an argument."""

    PROGRAMS: Any
    FEWEST_KEYS: Any
    MOST_KEYS: Any
    MOST_SPLITS: Any
    MOST_SLOTS: Any
    RUN: Any
    LONG_KEYS: Any


class Sizes(NamedTuple):
    """Numbers of the call and its tiles; holds constants, so it is only passed as an argument, never assigned.

    Attributes:
        batch: Sequences.
        num_heads_kv: Key heads.
        GROUP: Query heads of each.
        capacity: Keys that a sequence can have at most.
        PAGE_SIZE: Rows of a page.
        DIM: head_dim, then of v, then of both as tiles have them.
        DIM_V: See DIM.
        BLOCK_D: See DIM.
        BLOCK_DV: See DIM.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Keys of a block.
        FOLD_ROWS: Rows whose stored states are folded at once, a power of two.
        AHEAD: States that are loaded at once: whole runs.
        LANES: Neighbouring key heads whose work is cut alike, for as many programs to read their keys at the same time.
        PATIENCE: How often a program looks whether the others of its tile have stored their states; 0 for never.
        splitting: ``Splitting``.
        SEARCH: Sequences whose work is summed at once, a power of two.
        KEEPS: Whether registers hold the fold of a tile's states beside the state of a run.
        BITS: Whether the kernel decodes 8-bit numbers by their bits; then they are 2^-8 times their values.
        BY_PAGE: Whether scales differ from page to page.
    """

    batch: Any
    num_heads_kv: Any
    GROUP: Any
    capacity: Any
    PAGE_SIZE: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    FOLD_ROWS: Any
    AHEAD: Any
    LANES: Any
    PATIENCE: Any
    splitting: Any
    SEARCH: Any
    KEEPS: Any
    BITS: Any
    BY_PAGE: Any


class Call(NamedTuple):
    """A cached call.

    Attributes:
        queries: ``Queries``.
        lengths: ``Lengths``.
        k: ``Cache`` of the keys.
        v: ``Cache`` of the values.
        pages: ``Pages``.
        results: ``Results``.
        sizes: ``Sizes``.
        terms: ``scores.Terms``.
    """

    queries: Any
    lengths: Any
    k: Any
    v: Any
    pages: Any
    results: Any
    sizes: Any
    terms: Any
