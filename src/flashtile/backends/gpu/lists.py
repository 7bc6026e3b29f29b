"""Block lists from the host's side: a kernel's record."""

from __future__ import annotations

from flashtile.backends.gpu import intervals
from flashtile.backends.gpu.device.records import Lists
from flashtile.backends.gpu.intervals import Masks, Side
from flashtile.backends.gpu.launch import pointer
from flashtile.call.problem import Problem, Tensors


def masks_of(problem: Problem, t: Tensors, side: Side) -> Masks | None:
    """What a kernel needs of the intervals or the lists of a call; None without them."""
    if problem.listed:
        return Masks(None, None, None, _lists_of(problem, t, over_keys=side.over_keys))
    return intervals.masks_of(problem, t, side) if problem.intervals else None


def _lists_of(problem: Problem, t: Tensors, *, over_keys: bool) -> Lists:
    """The lists of blocks of rows, or of keys."""
    name, items = ("key_blocks", "key_items") if over_keys else ("row_blocks", "row_items")
    bounds, (own, other) = getattr(t, name), problem.listed[:2][:: -1 if over_keys else 1]
    batch, heads, count, _ = bounds.shape
    return Lists(
        pointer(bounds, name), pointer(getattr(t, items), items), 0 if batch == 1 else heads * count * 3,
        0 if heads == 1 else count * 3, count, own, other,
        problem.has_bits, problem.varlen or not problem.band.unbounded,
    )  # fmt: skip
