"""Infinities and NaN in a tile: whether there are any, and the tile without them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_finite(x):
    """Elementwise, whether it is neither infinite nor NaN."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def finite(x):
    """A tile with 0 for every infinity and NaN."""
    return tl.where(is_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def leaks(x):
    """Whether an element is a NaN, or infinite, which a sum behind it makes NaN."""
    nothing = tl.sum(x * 0.0)
    return nothing != nothing
