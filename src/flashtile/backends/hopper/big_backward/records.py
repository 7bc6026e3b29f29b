"""The arguments of the backward with big heads as trees; ``gpu.launch`` says what a field's name means.

They are read by functions of ``hopper.backward`` too, under that one's names: see ``backward.records.KeyGrid``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Gradient(NamedTuple):
    """What comes in besides q, k and v, and what goes out.

    Attributes:
        dout: ``records.Rows``.
        out: A descriptor of the gradient, or of the splits' in the workspace.
        rows: A descriptor of the workspace's rows, see ``backward.rows``.
        scale: What the sum is multiplied with: softmax_scale; None for dv.
        ADDS: Whether it is added to what is there, in float32.
        HAS_SLOPE: Whether a user's score mod has a derivative by the score other than 1.
    """

    dout: Any
    out: Any
    rows: Any
    scale: Any
    ADDS: Any
    HAS_SLOPE: Any


class GradientTiles(NamedTuple):
    """A kernel's tiles: 64 rows of the side that the gradient is of; the other side's rows go past them.

    Attributes:
        OF: The tensor that the gradient is of: ``"q"``, ``"k"`` or ``"v"``.
        BLOCK_M: Queries of a step.
        KEYS: Keys of a step.
        CHUNK: Columns of what is loaded at once of the queries or keys of the scores.
        CHUNKS: Buffers for such chunks that pass.
        CHUNK_V: Columns of what is loaded at once of dout and the values of dprobs; None for dv, like the next.
        CHUNKS_V: Buffers for those.
        CHUNK_OWN: Columns of what is loaded at once of the tensor that the gradient is made of.
        CHUNKS_OWN: Buffers for those, an even number.
        NUM_OWN: Such chunks of a step.
        REGISTERS: What setmaxnreg gives the follower's threads; the compiler gives the scorer's the rest.
    """

    OF: Any
    BLOCK_M: Any
    KEYS: Any
    CHUNK: Any
    CHUNKS: Any
    CHUNK_V: Any
    CHUNKS_V: Any
    CHUNK_OWN: Any
    CHUNKS_OWN: Any
    NUM_OWN: Any
    REGISTERS: Any


class Grid(NamedTuple):
    """A kernel's argument: records alone (``gpu.device``: last constant).

    Attributes:
        call: ``records.Call`` with descriptors of q, k and v, and Hopper's ``Mods``.
        gradients: ``Gradient``.
        schedule: ``BackwardSchedule`` without chains. With splits, for dk and dv, tiles have heads as there.
        tiles: ``GradientTiles``.
    """

    call: Any
    gradients: Any
    schedule: Any
    tiles: Any
