"""The arguments of the Hopper backward's kernels as trees; ``gpu.launch`` says what a field's name means."""

from __future__ import annotations

from typing import Any, NamedTuple


class GradientTensors(NamedTuple):
    """What goes in and comes out.

    Attributes:
        dout: ``records.Rows``.
        dk: A descriptor of it, with gqa_splits a pointer to the workspace's sums; None: not computed. So is dv.
        scale: softmax_scale, with which dk is multiplied.
        HAS_DQ: Whether dq is computed; so are the next two.
        HAS_DSCORES: Whether the gradients of the scores are, which dq and dk need.
        ADDS: Whether dk and dv are added to what is there, in float32.
        HAS_SLOPE: Whether a user's score mod has a derivative by the score other than 1.
    """

    dout: Any
    dk: Any
    dv: Any
    scale: Any
    HAS_DQ: Any
    HAS_DK: Any
    HAS_DV: Any
    HAS_DSCORES: Any
    ADDS: Any
    HAS_SLOPE: Any


class RowGradient(NamedTuple):
    """What ``by_rows`` reads besides a forward's call, and where dq goes.

    Attributes:
        desc: The descriptor of dq.
        dout: ``records.Rows``.
        rows: [2 * blocks, 64] float32, see ``rows``.
        scale: Factor of dq.
        PACKED: Whether sequences are packed.
    """

    desc: Any
    dout: Any
    rows: Any
    scale: Any
    PACKED: Any


class Work(NamedTuple):
    """The workspace, see ``rows``.

    Attributes:
        rows: [2 * blocks, BLOCK_M] float32; of the main kernel a descriptor.
        dq: float32, None if dq is not wanted.
        dq_desc: A descriptor of it as lines of 128 numbers; None: added to from registers.
        dq_order: A semaphore for each row block, int32; None: dq is added to in any order.
        counter: Tiles that programs have taken, int32.
        sums: The sums of dk and dv, which ``prepare_rows`` sets to 0; None without gqa_splits.
        sums_size: How many numbers they have.
    """

    rows: Any
    dq: Any
    dq_desc: Any
    dq_order: Any
    counter: Any
    sums: Any
    sums_size: Any


class Splits(NamedTuple):
    """The query heads of a key head are cut into splits, and a tile visits one: see ``workspace.gqa_splits``.

    Attributes:
        count: Splits of a key head.
        heads: Heads of a split; the last may have fewer.
        sums_each: Sums of dk and dv for each key head: one, or one for each split.
        sums: Sums of all heads of a sequence.
    """

    count: Any
    heads: Any
    sums_each: Any
    sums: Any


class BackwardSchedule(NamedTuple):
    """Which tiles there are, and in which order programs take them.

    Attributes:
        heads_at_once: Heads with tiles that run at the same time.
        heads: Heads of tiles in each sequence: heads of keys, or the splits of all of them.
        all_heads: Heads of all sequences, of packed ones as of one.
        first_head: The first, read only if CHAINED.
        splits: ``Splits``; tiles have the head ``key head * count + split``; None without.
        FALLING: Whether tiles are handed out with keys falling.
        CHAINED: Whether the workspace is a chain's: it has the rows of all packed sequences as one's.
    """

    heads_at_once: Any
    heads: Any
    all_heads: Any
    first_head: Any
    splits: Any
    FALLING: Any
    CHAINED: Any


class MainTiles(NamedTuple):
    """The main kernel's tiles; what is not said here is as in ``BackwardTiles``.

    Attributes:
        KEYS: Keys of a tile.
        PARTS: Parts of 64 keys each in a tile.
        DQ_WARPGROUPS: How many compute dq.
        DQ_SHARE: Columns of 64 rows of a row block's dq that each of them has.
        HELD: Columns of values that a warpgroup of ``pairs`` holds in registers.
        BY_GRADIENT: As in ``BackwardTiles``.
    """

    BLOCK_M: Any
    KEYS: Any
    PARTS: Any
    STAGES: Any
    K_STAGES: Any
    V_STAGES: Any
    DS_STAGES: Any
    DQ_WARPGROUPS: Any
    DQ_SHARE: Any
    DQ_WIDTH: Any
    REGISTERS: Any
    DQ_REGISTERS: Any
    HELD: Any
    BY_GRADIENT: Any


class KeyGrid(NamedTuple):
    """The main kernel's argument: what is the same for every tile.

    ``call`` is a ``records.Call`` with descriptors of q, k and v and Hopper's ``Mods``, the others have their names'
    records.
    """

    call: Any
    gradients: Any
    work: Any
    schedule: Any
    tiles: Any


class SavedResults(NamedTuple):
    """The forward's results, and the gradients of them.

    Attributes:
        out: Contiguous, of the backend's shape, like lse.
        dout: ``records.Rows``.
        dlse: The gradient of lse, or None, with its strides.
        queries: ``records.Sequences``.
        num_heads_q: Query heads.
    """

    out: Any
    lse: Any
    dout: Any
    dlse: Any
    stride_b: Any
    stride_head: Any
    stride_row: Any
    queries: Any
    num_heads_q: Any


class Sums(NamedTuple):
    """A gradient in the workspace, float32.

    Attributes:
        ptr: Its first number.
        count: Sums of each head, one after another.
        BLOCK_M: Rows of a block of them.
    """

    ptr: Any
    count: Any
    BLOCK_M: Any
