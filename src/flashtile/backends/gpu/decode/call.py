"""The arguments of cached calls on the device; ``gpu.device`` has the rules for records."""

from __future__ import annotations

from typing import Any, NamedTuple


class HeadScale(NamedTuple):
    """Scales of 8-bit keys or values, float32 by head, or by entry and head.

    Attributes:
        ptr: None for 1.
        stride_b: Step between entries, 0 if they are by head alone.
    """

    ptr: Any
    stride_b: Any


class CacheScales(NamedTuple):
    """What a cache's numbers are to be multiplied by.

    Attributes:
        k: ``HeadScale``, like v.
        v: ``HeadScale`` of the values.
        rows: ``Rows`` of the scales by row and 128 columns of values alone, which then are bytes; of Nones for none.
        EIGHT_BIT: Whether it holds 8-bit numbers; others have no scales.
        E5M2: Whether those are e5m2; else e4m3.
        BITS: Whether the kernel decodes 8-bit numbers without instructions of NVIDIA's; e4m3 ones are then 2^-8 times
            their values.
        BY_PAGE: Whether scales differ from page to page.
    """

    k: Any
    v: Any
    rows: Any
    EIGHT_BIT: Any
    E5M2: Any
    BITS: Any
    BY_PAGE: Any


class Cache(NamedTuple):
    """A cache of keys and values, and how much of it each sequence has.

    Attributes:
        k: ``Rows`` (entries, rows, heads, dim), entries being sequences or pages; 8-bit ones as bytes to the kernel
            that appends, to others as int16 pairs of columns. None where they are read by TMA, like v.
        v: Likewise.
        scales: ``CacheScales``.
        new: ``Sequences`` of the keys that the call appends.
        cached: (batch,) int32, keys before this call; None where each sequence has an entry's ``capacity``.
        entries: (batch,) int32, which entry is the sequence's; None for its own number.
        capacity: Keys that a sequence can have at most.
        pages: int32, the pages of each sequence in their order; None for a cache by sequence.
        pages_pitch: Elements from one sequence's pages to the next. No ``stride``: a server's table has any width.
        indptr: (batch,) int32, where each sequence's pages begin instead; None for a table.
        PAGE_SIZE: Rows of a page.
    """

    k: Any
    v: Any
    scales: Any
    new: Any
    cached: Any
    entries: Any
    capacity: Any
    pages: Any
    pages_pitch: Any
    indptr: Any
    PAGE_SIZE: Any


class DecodeResults(NamedTuple):
    """Where results go beside the output.

    Attributes:
        lse: Contiguous (batch, num_heads_q, rows), or packed (num_heads_q, rows), float32; pairs with ``mods.LARGE``.
        acc: float32 [slots, head_dim_v]: a row's sum of one split, unnormalised; None if nothing is ever split.
        stats: float32 [slots, 2]: its maximum, as ``softmax.update`` has it, and its denominator.
        counters: int32, two for each tile, see ``kernel.share_tile``; the first is 0 between launches.
        max_scores: Like lse: the largest score of each row, of a pair the first; None unless asked for.
    """

    lse: Any
    acc: Any
    stats: Any
    counters: Any
    max_scores: Any = None


class Splitting(NamedTuple):
    """How keys are cut into splits, see ``config.SplitRule``.

    Attributes of batch-invariant calls:
        FIXED: Keys of every split, which are counted from key 0 on; 0 for the rule.
        most_states: Tiles of more splits than this store the states of runs alone; not read by the rule.
    """

    programs: Any
    FEWEST_KEYS: Any
    MOST_KEYS: Any
    MOST_SPLITS: Any
    MOST_SLOTS: Any
    RUN: Any
    LONG_KEYS: Any
    FEWEST_OF_LONG: Any
    FIXED: Any = 0
    most_states: Any = None


class DecodeSchedule(NamedTuple):
    """Tiles, and how they are shared among programs.

    Attributes:
        BLOCK_M: Rows of a tile.
        BLOCK_N: Keys of a block.
        FOLD_ROWS: How many rows' stored states are folded at once, a power of two.
        AHEAD: States that are loaded at once: whole runs.
        HEADS_IN_STEP: Neighbouring key heads with work cut alike, so that as many programs read their keys together.
        PATIENCE: How often a program looks whether the others of its tile have stored their states; 0 for never.
        splitting: ``Splitting``.
        most_rows: With packed queries, only sequences with so many packed rows a key head at most are computed; None if
            no launch leaves any out.
        above_keys: And with more keys than these.
        fewest_rows: And with so many packed rows at least; None if no launch leaves any out for that.
        SEARCH: How many sequences' work is summed at once, a power of two.
        KEEPS: Whether registers hold the fold of a tile's states beside the state of a run.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    FOLD_ROWS: Any
    AHEAD: Any
    HEADS_IN_STEP: Any
    PATIENCE: Any
    splitting: Any
    most_rows: Any
    above_keys: Any
    SEARCH: Any
    KEEPS: Any
    fewest_rows: Any = None


class DecodeCall(NamedTuple):
    """Attention over a cache.

    Attributes:
        q: ``Rows``.
        out: ``Rows`` like q, head_dim_v wide.
        queries: ``Sequences`` of both.
        cache: ``Cache``.
        mods: ``Mods``.
        results: ``DecodeResults``.
        schedule: ``DecodeSchedule``.
        leftpad: (batch,) int32, the first key that counts; None for 0.
        causal: (batch,) bytes, whether a sequence's rows see no key past their own; None where all have one band.
        qv: ``Rows`` like out: queries; scores include their products with the values; of Nones without.
        sinks: (num_heads_q,), or None.
        num_heads_kv: Key heads.
        GROUP: Query heads of each.
    """

    q: Any
    out: Any
    queries: Any
    cache: Any
    mods: Any
    results: Any
    schedule: Any
    leftpad: Any
    causal: Any
    qv: Any
    sinks: Any
    num_heads_kv: Any
    GROUP: Any


class New(NamedTuple):
    """The keys and values that a launch appends.

    Attributes:
        k: ``Rows``, like v.
        v: Values.
        count: Tokens.
        slots: (count,) int64 or int32, where each is written: its row among all entries' rows, or pages; negative
            for nowhere. None for where its position is.
        num_slots: Rows of all.
        entry_rows: Rows of one.
        num_heads_kv: Key heads.
        HEADS: Heads of one token that a program moves.
    """

    k: Any
    v: Any
    count: Any
    slots: Any
    num_slots: Any
    entry_rows: Any
    num_heads_kv: Any
    HEADS: Any


class Rotation(NamedTuple):
    """What a launch that appends rotates: the new keys and the queries; nothing without starts.

    Attributes:
        q: ``Rows`` that further programs rotate.
        rotated: ``Rows`` that they write.
        queries: ``Sequences`` of q.
        num_heads_q: Query heads.
        starts: (batch,) int32, the position of each sequence's first new token.
        causal: As in ``DecodeCall``, where all queries of a sequence that is not causal have the first position.
        cos: Contiguous (rows, DIM / 2).
        sin: Likewise.
        tree: (batch, tree_rows) int64, as in ``Tree``; None for no trees.
        tree_rows: Its rows.
        rows: Positions that there are angles of.
        DIM: Features that are rotated, in pairs.
        BLOCK: A power of two, at least as many as pairs.
        INTERLEAVED: Whether pairs are neighbours.
        EACH_ROW: Whether query i has the i-th position; else all have the first.
    """

    q: Any
    rotated: Any
    queries: Any
    num_heads_q: Any
    starts: Any
    causal: Any
    cos: Any
    sin: Any
    tree: Any
    tree_rows: Any
    rows: Any
    DIM: Any
    BLOCK: Any
    INTERLEAVED: Any
    EACH_ROW: Any
