"""Ready-made functions for ``score_mod`` and ``mask_mod``. All except ``causal`` are returned by a call.

A mask keeps a pair where it is True. Positions count from the first row and the first key of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.mods.printed import source as _printed
from flashtile.mods.record import source_graph

# mask(b, h, q_idx, kv_idx) -> bool; score(score, b, h, q_idx, kv_idx) -> score
MaskMod = Callable[[Any, Any, Any, Any], Any]
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


def source(f: Callable[..., Any]) -> str:
    """The Triton functions that kernels call for a score mod or a mask mod, as text.

    Two functions that compute the same, except for values, have one text. Calls over a cache compute values that other
    calls read from a table of distances (``of_distance``).

    Raises:
        InvalidInputError: f is not a mod.
    """
    return _printed(source_graph(f).text, True)


def and_masks(*masks: MaskMod) -> MaskMod:
    """Keeps the pairs that all of the masks keep."""

    def every(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept: Any = True
        for mask in masks:
            kept = mask(b, h, q_idx, kv_idx) & kept
        return kept

    return every


def or_masks(*masks: MaskMod) -> MaskMod:
    """Keeps the pairs that at least one of the masks keeps."""

    def either(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept: Any = False
        for mask in masks:
            kept = mask(b, h, q_idx, kv_idx) | kept
        return kept

    return either


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keeps the keys up to the row's own position."""
    return q_idx >= kv_idx


def window(left: int, right: int = 0) -> MaskMod:
    """Keeps ``left`` keys before the row's own position and ``right`` after it, ends inclusive."""
    return lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)


def prefix_lm(lengths: Tensor) -> MaskMod:
    """A causal mask that also keeps the first ``lengths[b]`` keys for all rows; lengths ``(batch,)`` of integers."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < lengths[b])


def documents(ids: Tensor) -> MaskMod:
    """Keeps pairs within a document; ids ``(seqlen,)`` or ``(batch, seqlen)`` of integers. Packed calls skip others."""
    if ids.dim() == 1:
        return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def dilated(step: int) -> MaskMod:
    """Keeps every ``step``-th key, counted from the row's own position."""
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0


def neighbourhood_2d(width: int, radius: int) -> MaskMod:
    """For an image stored row by row, ``width`` pixels in a row: keeps pairs at most ``radius`` apart in x and in y."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        across, down = q_idx % width - kv_idx % width, q_idx // width - kv_idx // width
        return (across.abs() <= radius) & (down.abs() <= radius)

    return near


def neighbourhood_3d(height: int, width: int, radius: int) -> MaskMod:
    """For a video stored as images of ``height * width``: keeps pairs at most ``radius`` apart in x, y and time."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        across, down = q_idx % width - kv_idx % width, q_idx // width % height - kv_idx // width % height
        later = q_idx // (height * width) - kv_idx // (height * width)
        return (across.abs() <= radius) & (down.abs() <= radius) & (later.abs() <= radius)

    return near


def tree(parents: Sequence[int], device: torch.device | str | None = None) -> MaskMod:
    """Keeps each row's ancestors and itself; ``parents[n]`` is row n's parent, an earlier row, or -1 for none."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    seen = seen.to(device)
    return lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx]


def chunked(size: int) -> MaskMod:
    """Keeps pairs within one chunk of ``size`` positions; with ``causal`` it is Llama 4's mask."""
    return lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size


def block_diffusion(length: int, size: int) -> MaskMod:
    """For ``length`` noisy tokens followed by as many clean ones, in blocks of ``size`` tokens.

    A noisy block sees itself and the clean blocks before its own. A clean block sees itself and the clean blocks before
    it. Source: Arriola et al. 2025, arXiv:2503.09573.
    """

    def kept(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_kv = q_idx >= length, kv_idx >= length
        block_q, block_kv = q_idx % length // size, kv_idx % length // size
        own = (block_q == block_kv) & (clean_q == clean_kv)
        return own | (clean_kv & (block_kv < block_q))

    return kept


def shared_prefix(length: int, ids: Tensor) -> MaskMod:
    """A causal mask for continuations of one prefix of ``length`` tokens; ids ``(seqlen,)`` has their numbers."""

    def kept(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((kv_idx < length) | (ids[q_idx] == ids[kv_idx]))

    return kept


def alibi(slopes: Tensor) -> ScoreMod:
    """``score - slopes[h] * |q_idx - kv_idx|``; learned slopes ``(num_heads_q,)`` have a gradient."""
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()


def relative(table: Tensor) -> ScoreMod:
    """A learned bias by distance: table ``(num_heads_q, 2 * n + 1)`` for distances -n to n; others are clamped."""
    reach = table.shape[1] // 2
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach]


def t5(table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
    """T5's learned bias by buckets of distances; table ``(num_buckets, num_heads_q)``.

    Source: Raffel et al. 2020, arXiv:1910.10683; the buckets are as in transformers' implementation.
    """
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    factor = (buckets - exact) / math.log(max_distance / exact)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        later = kv_idx - q_idx
        apart = later.abs() if bidirectional else (-later).clamp(min=0)
        far = exact + (torch.log(apart.clamp(min=1) / exact) * factor).to(torch.int32)
        bucket = torch.where(apart < exact, apart, far.clamp(max=buckets - 1))
        return score + table[torch.where(later > 0, bucket + buckets, bucket) if bidirectional else bucket, h]

    return biased


def graphormer(table: Tensor, distances: Tensor) -> ScoreMod:
    """A learned bias by distance in a graph: table ``(num_heads_q, n)``, distances ``(batch, seqlen_q, seqlen_k)``.

    Source: Ying et al. 2021, arXiv:2106.05234.
    """
    return lambda score, b, h, q_idx, kv_idx: score + table[h, distances[b, q_idx, kv_idx]]


def softcap(cap: float) -> ScoreMod:
    """``cap * tanh(score / cap)``; the same as ``softcap=cap``."""
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def temperature(scales: Tensor) -> ScoreMod:
    """``score * scales[h]``, learned."""
    return lambda score, b, h, q_idx, kv_idx: score * scales[h]
