"""Band masks as selects.

A row stands at key position ``i = row + seqlen_k - seqlen_q`` and keeps ``i - left <= j <= i + right``.

The end of the keys and the band's right side fold into one number a row, so a masked score costs one comparison and one
select a bounded side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Band(NamedTuple):
    """Which keys a row keeps, as a kernel passes it on: how many before and behind its position; None for all."""

    left: Any
    right: Any


@triton.jit
def first_key(i, left, HAS_LEFT: tl.constexpr):
    """The first key that row position i keeps, inclusive."""
    first = i * 0
    if HAS_LEFT:
        first = i - left
    return first


@triton.jit
def last_key(i, seqlen_k, right, HAS_RIGHT: tl.constexpr):
    """The last key that row position i keeps, inclusive."""
    last = i * 0 + (seqlen_k - 1)
    if HAS_RIGHT:
        last = tl.minimum(i + right, last)
    return last


@triton.jit
def band_keep(i, j, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether each row keeps each key.

    Args:
        i: Row positions (``row + seqlen_k - seqlen_q``), broadcastable against j.
        j: Keys.
        seqlen_k: Keys of the sequence.
        left: Keys kept before the diagonal, read only if HAS_LEFT.
        right: Keys kept after it, read only if HAS_RIGHT.
        HAS_LEFT: Whether the left side is bounded.
        HAS_RIGHT: Whether the right side is bounded.

    Returns:
        Boolean, of the broadcast shape.
    """
    keep = j <= last_key(i, seqlen_k, right, HAS_RIGHT)
    if HAS_LEFT:
        keep = keep & (j >= first_key(i, left, HAS_LEFT))
    return keep


@triton.jit
def band_select(x, i, j, seqlen_k, left, right, fill, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """x, or fill where the band or the end of the keys masks; arguments as ``band_keep``.

    Selects are chained instead of joining booleans: packing and unpacking those costs more than a select.
    """
    x = tl.where(j <= last_key(i, seqlen_k, right, HAS_RIGHT), x, fill)
    if HAS_LEFT:
        x = tl.where(j >= first_key(i, left, HAS_LEFT), x, fill)
    return x
