"""Interval masks and block lists from the host's side: kernels' records, and the launch that finds blocks to visit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.device.records import BoundsTable, Interval, Lists, TileBounds
from flashtile.backends.gpu.launch import Launch, Pointer, pointer
from flashtile.backends.gpu.named import device_code
from flashtile.call.problem import Problem, Tensors

interval_bounds = device_code("flashtile.backends.gpu.device.masks").interval_bounds
# Elements of the other side that ``interval_bounds`` looks at together.
_SCAN = 1024


class Masks(NamedTuple):
    """The fields of ``KeyBand`` that are intervals' and lists'.

    Attributes:
        row_keys: ``Interval`` of rows, or None.
        key_rows: ``Interval`` of keys, or None.
        bounds: ``TileBounds`` of the kernel's tiles.
        lists: ``Lists`` of the side of its tiles, or None.
    """

    row_keys: Interval | None
    key_rows: Interval | None
    bounds: TileBounds | None
    lists: Lists | None = None


class Side(NamedTuple):
    """A kernel's tiles of rows, or of keys.

    Attributes:
        block: Elements for which there are bounds of their own.
        over_keys: Whether tiles are of keys.
        operand: The int32 tensor that holds the bounds.
        offset: Where in it they begin, in numbers, a multiple of 4.
    """

    block: int
    over_keys: bool = False
    operand: str = "bounds"
    offset: int = 0


def masks_of(problem: Problem, t: Tensors, side: Side) -> Masks | None:
    """What a kernel with these tiles needs of the intervals or the lists of a call; None without them."""
    if problem.listed:
        return Masks(None, None, None, _lists_of(problem, t, over_keys=side.over_keys))
    if not problem.intervals:
        return None
    row_keys, key_rows = _used(problem, t, side.over_keys)
    return Masks(_interval("row_keys", row_keys), _interval("key_rows", key_rows), bounds_of(problem, t, side))


def bounds_of(problem: Problem, t: Tensors, side: Side) -> TileBounds:
    """The ``TileBounds`` that ``bounds_launch`` writes."""
    batch, heads, tiles = _shape(problem, t, side)
    at, head_step = Pointer(torch.int32, side.operand, 4 * side.offset), 4 * tiles
    return TileBounds(at, 0 if batch == 1 else heads * head_step, 0 if heads == 1 else head_step, tiles)


def intervals_of(problem: Problem, t: Any) -> tuple[Interval | None, Interval | None]:
    """The ``Interval`` of rows and of keys that a kernel over rows looks at."""
    row_keys, key_rows = _used(problem, t, False)
    return _interval("row_keys", row_keys), _interval("key_rows", key_rows)


def bounds_launch(problem: Problem, t: Tensors, side: Side) -> Launch:
    """The launch that writes the ``TileBounds`` of a kernel's tiles."""
    given = [_interval(*each) for each in zip(("row_keys", "key_rows"), _used(problem, t, side.over_keys), strict=True)]
    lengths = problem.seqlen_q, problem.seqlen_k
    if side.over_keys:
        given, lengths = given[::-1], lengths[::-1]
    batch, heads, tiles = _shape(problem, t, side)
    table = BoundsTable(
        Pointer(torch.int32, side.operand, 4 * side.offset), heads, tiles, *lengths, side.block,
        min(_SCAN, max(16, 1 << (lengths[1] - 1).bit_length())) if lengths[1] else 16,
    )  # fmt: skip
    arguments = {"own": given[0], "others": given[1], "table": table}
    return Launch(interval_bounds, batch * heads * tiles, arguments, {"num_warps": 4, "num_stages": 1})


# Elements of the smallest tile.
_LEAST_BLOCK = 16


def most_bounds(problem: Problem, t: Tensors, *, over_keys: bool = False) -> int:
    """Numbers of the ``TileBounds`` of a side, whatever its tiles."""
    batch, heads, tiles = _shape(problem, t, Side(_LEAST_BLOCK, over_keys))
    return 4 * batch * heads * tiles


def _used(problem: Problem, t: Tensors, over_keys: bool) -> tuple[Tensor | None, Tensor | None]:
    """row_keys and key_rows that a kernel reads: where both say the same, its tiles' own alone."""
    if not problem.mirrored:
        return t.row_keys, t.key_rows
    return (None, t.key_rows) if over_keys else (t.row_keys, None)


def _shape(problem: Problem, t: Tensors, side: Side) -> tuple[int, int, int]:
    """Sequences and heads that differ, and tiles of each."""
    given = [x.shape for x in _used(problem, t, side.over_keys) if x is not None]
    length = problem.seqlen_k if side.over_keys else problem.seqlen_q
    return max(x[0] for x in given), max(x[1] for x in given), -(-length // side.block)


def _lists_of(problem: Problem, t: Tensors, *, over_keys: bool) -> Lists:
    """The lists of blocks of rows, or of keys."""
    name, items = ("key_blocks", "key_items") if over_keys else ("row_blocks", "row_items")
    bounds, (own, other) = getattr(t, name), problem.listed[:2][:: -1 if over_keys else 1]
    batch, heads, count, _ = bounds.shape
    return Lists(
        pointer(bounds, name), pointer(getattr(t, items), items), 0 if batch == 1 else heads * count * 3,
        0 if heads == 1 else count * 3, 1 if heads == 1 else problem.num_heads_q // heads, count, own, other,
        problem.has_bits, problem.varlen or not problem.band.unbounded,
    )  # fmt: skip


def _interval(name: str, x: Tensor | None) -> Interval | None:
    if x is None:
        return None
    batch, heads, count, _ = x.shape
    numbers = 2 * count
    return Interval(
        pointer(x, name),
        0 if batch == 1 else heads * numbers,
        0 if heads == 1 else numbers,
        0 if count == 1 else 2,
        count,
    )
