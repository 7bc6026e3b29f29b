"""Splits a call into sequences, then blocks of rows, then rectangles that contain kept pairs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from flashtile.backends.cpu import masks
from flashtile.backends.cpu.sequences import DenseSequences as DenseSequences
from flashtile.backends.cpu.sequences import four_dimensional as four_dimensional
from flashtile.backends.cpu.sequences import sequences as sequences
from flashtile.call.problem import Problem
from flashtile.core.masks import Band

# Passed wherever a tensor is made, because torch.set_default_device may name another device.
_CPU = torch.device("cpu")
# Rows of a block under a narrow and a wide window: few rows waste less of a narrow band, many rows need fewer calls.
NARROW_ROWS, WIDE_ROWS = 128, 256
NARROW_WINDOW = 512
# A remainder of fewer rows than this joins the block before it.
SHORTEST_ROWS = 32
# Keys of a rectangle if scores are PyTorch tensors, and the elements of a tile over all heads.
TILE_KEYS, TILE_NUMBERS = 512, 2**20


class KeptPairs(Enum):
    """The pairs of a rectangle that the band keeps: all, the lower triangle, or others."""

    FULL = "full"
    TRIANGLE = "triangle"
    EDGE = "edge"


@dataclass(frozen=True)
class Rectangle:
    """Rows ``rows[0]`` to ``rows[1]`` against keys ``keys[0]`` to ``keys[1]``, both half-open and never empty.

    A TRIANGLE keeps key ``keys[0] + n`` for row ``rows[0] + m`` if ``n <= m``.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: KeptPairs


def blocks_of(band: Band, seq: DenseSequences, *, tile_rows: int | None) -> Iterator[list[Rectangle]]:
    """``row_blocks`` of a sequence, without the keys that intervals or lists leave out."""
    for block in row_blocks(band, seq.seqlen_q, seq.seqlen_k, tile_rows=tile_rows):
        if kept := masks.cut(seq, block):
            yield kept


def row_blocks(band: Band, seqlen_q: int, seqlen_k: int, *, tile_rows: int | None) -> Iterator[list[Rectangle]]:
    """Blocks of rows, each as a list of rectangles from left to right. Rows that keep no key are in no block.

    Args:
        band: The band of kept pairs.
        seqlen_q: Number of rows.
        seqlen_k: Number of keys.
        tile_rows: Split into tiles of this many rows and ``TILE_KEYS`` keys; None splits only where the band requires
            it.
    """
    start, stop = band.any_rows(seqlen_q, seqlen_k)
    if stop <= start:
        return
    open_left = tile_rows is None and band.left is None
    rows = stop - start if open_left else tile_rows or _window_rows(band, seqlen_k)
    first = start
    while first < stop:
        # A short remainder joins the block before it.
        last = stop if stop - first < rows + SHORTEST_ROWS else first + rows
        if open_left:
            rectangles = _without_left_bound(band, first, last, seqlen_q, seqlen_k)
        else:
            rectangles = _row_block(band, first, last, seqlen_q, seqlen_k, TILE_KEYS if tile_rows else None)
        if rectangles:
            yield rectangles
        first = last


def _window_rows(band: Band, seqlen_k: int) -> int:
    assert band.left is not None
    width = seqlen_k if band.right is None else band.left + band.right + 1
    return NARROW_ROWS if width <= NARROW_WINDOW else WIDE_ROWS


def _without_left_bound(band: Band, start: int, stop: int, seqlen_q: int, seqlen_k: int) -> list[Rectangle]:
    """A band without a left bound: keys that all rows keep, then a triangle."""
    _, full = band.all_keys(start, stop, seqlen_q, seqlen_k)
    _, end = band.any_keys(start, stop, seqlen_q, seqlen_k)
    if band.right is None or full == end:
        return [Rectangle((start, stop), (0, end), KeptPairs.FULL)]
    # The first row keeps `full` keys, so the triangle begins one key earlier.
    corner = full - 1
    triangle = Rectangle((start, stop), (corner, end), KeptPairs.TRIANGLE)
    return [Rectangle((start, stop), (0, corner), KeptPairs.FULL), triangle] if corner > 0 else [triangle]


def _row_block(
    band: Band, first: int, last: int, seqlen_q: int, seqlen_k: int, key_step: int | None
) -> list[Rectangle]:
    low, high = band.any_keys(first, last, seqlen_q, seqlen_k)
    full_low, full_high = band.all_keys(first, last, seqlen_q, seqlen_k)
    if key_step is None:
        worth_cutting = full_high - full_low >= NARROW_WINDOW
        cuts = [low, full_low, full_high, high] if worth_cutting else [low, high]
    else:
        cuts = [*range(low, high, key_step), high]
    pairs = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
    kinds = (KeptPairs.FULL if full_low <= a and b <= full_high else KeptPairs.EDGE for a, b in pairs)
    return [Rectangle((first, last), pair, kind) for pair, kind in zip(pairs, kinds, strict=True)]


def tile_bias(
    problem: Problem, seq: DenseSequences, rectangle: Rectangle, dtype: torch.dtype, *, alibi: bool = True
) -> Tensor | None:
    """The sum added to a rectangle's scores: ALiBi, the bias, and -inf where the band or the mask drops a pair.

    Without ``alibi`` the caller adds ALiBi.

    Returns:
        ``(batch or 1, num_heads_q or 1, rows, keys)`` in ``dtype``, or None where nothing is added.
    """
    (row, row_stop), (key, key_stop) = rectangle.rows, rectangle.keys
    if not seq.has_tile_bias:
        return (
            None
            if rectangle.kind is KeptPairs.FULL
            else _band_bias(problem.band, *_place(problem.band, seq, rectangle), dtype)
        )
    total: Tensor | None = None
    if seq.bias is not None:
        total = part(seq.bias, rectangle).to(dtype)
    if seq.slopes is not None and alibi:
        distance = -seq.slopes.to(dtype) * distances(seq, rectangle)
        total = distance if total is None else total + distance
    keep: Tensor | None = None
    if rectangle.kind is not KeptPairs.FULL:
        keep = _band_tile(problem.band, *_place(problem.band, seq, rectangle))
    for kept in selections(seq, rectangle, dtype):
        keep = kept if keep is None else keep & kept
    if keep is not None:
        total = torch.where(keep, torch.zeros((), dtype=dtype, device=_CPU) if total is None else total, -torch.inf)
    if total is None:  # intervals or lists keep all of the rectangle
        return None
    total = total[(None,) * (4 - total.dim())]
    return total.expand(*total.shape[:2], row_stop - row, key_stop - key)


def selections(seq: DenseSequences, rectangle: Rectangle, dtype: torch.dtype) -> list[Tensor]:
    """The pairs of a rectangle that each mask except the band keeps; they broadcast to its scores."""
    given = [None if seq.mask is None else part(seq.mask, rectangle), masks.within_intervals(seq, rectangle)]
    if seq.lists is not None or seq.mask_mod is not None:
        given.append(masks.within_lists(seq, rectangle, pairs(seq, rectangle), dtype))
    return [kept for kept in given if kept is not None]


def pairs(seq: DenseSequences, rectangle: Rectangle) -> dict[str, Tensor]:
    """The arguments b, h, i and j of functions of pairs, which broadcast to a rectangle's scores."""
    device = seq.q.device
    b = torch.arange(seq.batch.start, seq.batch.stop, device=device)[:, None, None, None]
    h = torch.arange(seq.q.shape[1], device=device)[:, None, None]
    i, j = (torch.arange(*span, device=device) for span in (rectangle.rows, rectangle.keys))
    return {"b": b, "h": h, "i": i[:, None], "j": j}


def distances(seq: DenseSequences, rectangle: Rectangle) -> Tensor:
    """ALiBi's distances between rows' positions and keys; ``(rows, keys)`` int64."""
    i, j = (torch.arange(*span, device=seq.q.device) for span in (rectangle.rows, rectangle.keys))
    shift, at = seq.seqlen_k - seq.seqlen_q, seq.origin
    if at is not None:
        i, j, shift = at.row + at.row_step * i, at.key + at.key_step * j, at.shift
    return (i[:, None] + shift - j).abs()


def has_empty_rows(problem: Problem, seq: DenseSequences, rectangle: Rectangle) -> bool:
    """Whether a row of the rectangle may keep none of its keys."""
    if any(x is not None for x in (seq.mask, seq.bias, seq.row_keys, seq.key_rows, seq.mask_mod, seq.lists)):
        return True
    return rectangle.kind is KeptPairs.EDGE and _band_has_empty_rows(
        problem.band, *_place(problem.band, seq, rectangle)
    )


def _place(band: Band, seq: DenseSequences, rectangle: Rectangle) -> tuple[int, int, int, int]:
    """The band's shape in a rectangle: row 0's diagonal key, rows, the first key, the end of the keys.

    Keys are counted from the rectangle's first one, or from the first one of its chunk: many rectangles share a shape.
    """
    (row, row_stop), (key, key_stop) = rectangle.rows, rectangle.keys
    first = 0 if band.chunk is None else key % band.chunk
    return row + seq.seqlen_k - seq.seqlen_q - key + first, row_stop - row, first, first + key_stop - key


# Tensors that later calls share are made outside inference mode: a training step could not save them otherwise.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _band_bias(band: Band, diagonal: int, rows: int, key: int, key_stop: int, dtype: torch.dtype) -> Tensor:
    """0 where the band keeps a pair, -inf where it drops one; ``(1, 1, rows, keys)``."""
    zeros = torch.zeros(1, 1, rows, key_stop - key, dtype=dtype, device=_CPU)
    return zeros.masked_fill_(~_band_tile(band, diagonal, rows, key, key_stop), -torch.inf)


@functools.lru_cache(maxsize=64)
def _band_has_empty_rows(band: Band, *place: int) -> bool:
    return not bool(_band_tile(band, *place).any(dim=-1).all())


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _band_tile(band: Band, diagonal: int, rows: int, key: int, key_stop: int) -> Tensor:
    """The pairs that the band keeps if row m's diagonal is at key ``m + diagonal``; ``(1, 1, rows, keys)``."""
    return band.dense(rows, rows + diagonal, keys=(key, key_stop), device=_CPU)[None, None]


def part(x: Tensor, rectangle: Rectangle) -> Tensor:
    """A rectangle of a four-dimensional tensor; broadcast dimensions stay 1."""
    rows = slice(None) if x.shape[2] == 1 else slice(*rectangle.rows)
    keys = slice(None) if x.shape[3] == 1 else slice(*rectangle.keys)
    return x[:, :, rows, keys]


def tile_rows(num_heads_q: int) -> int:
    """Rows of a tile with ``TILE_NUMBERS`` elements over all heads; independent of the batch size."""
    return max(32, min(256, TILE_NUMBERS // (TILE_KEYS * num_heads_q)))


def all_finite(*tensors: Tensor) -> bool:
    """Whether no element is an infinity or NaN: one pass each, no copies.

    A sum is fast, and finite only if every term is; an overflow makes the answer False, which is safe.
    """
    return all(math.isfinite(x.sum(dtype=_SUM_DTYPES.get(x.dtype)).item()) for x in tensors)


# bfloat16 has float32's range, and summing in it is faster than converting; float16 would easily overflow.
_SUM_DTYPES = {torch.float16: torch.float32}
