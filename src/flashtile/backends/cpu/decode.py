"""Cached calls on the CPU: new keys are appended, and then each sequence is a regular call over a view of its keys.

New rows are rotated and written for all sequences at once, element by element. Everything else is computed for one
sequence at a time, so a sequence's bits do not depend on the others. Keys in pages, and keys of 8 bits, are copied for
one sequence at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.backends.cpu import forward, invariant
from flashtile.call.arguments import Options
from flashtile.call.cached_arguments import EIGHT_BITS, CacheTensors, first_of, tree_pairs
from flashtile.call.cached_problem import bands_of, lengths_of
from flashtile.call.problem import Problem, Tensors
from flashtile.call.rotary import apply_rotary
from flashtile.core import states
from flashtile.core.masks import Band

_NO_OPTIONS = Options()
# Passed wherever a tensor is made, because torch.set_default_device may name another device.
_CPU = torch.device("cpu")


def describe(problem: Problem) -> str:
    """The path in one line."""
    copied = "keys copied from pages, " if problem.page_size else ""
    return f"one sequence at a time, {copied}{forward.describe(single(problem))}"


def single(problem: Problem) -> Problem:
    """The regular call of one sequence, without its lengths; 8-bit keys are multiplied in the softmax's dtype."""
    dtype = problem.lse_dtype if problem.kv_dtype in EIGHT_BITS else problem.dtype
    dim = problem.head_dim + problem.qv * problem.head_dim_v
    return problem.but(
        batch=1, seqlen_q=0, seqlen_k=0, varlen=False, cached=False, page_size=0, dtype=dtype, head_dim=dim, qv=False
    )


def decode(problem: Problem, one: Problem, t: CacheTensors) -> Tensor:
    """See ``call.backend.Decode``; ``one`` is ``single(problem)``."""
    old, new = lengths_of(t, problem.batch)
    bands = bands_of(problem, t)
    firsts = old if t.rotary_seqlens is None else t.rotary_seqlens.tolist()
    if t.k is not None:
        _append(problem, t, old, new, firsts)
    queries = _queries(problem, t, firsts, bands)
    lse = t.q.new_full(problem.lse_shape(t.q), -torch.inf, dtype=problem.lse_dtype)
    found = states.with_max_scores(lse, lse) if problem.max_scores else lse
    lse = found[..., 0] if problem.max_scores else lse
    if problem.large_scores:
        lse[..., 1] = 0.0
    bounds = None if t.cu_seqlens_q is None else t.cu_seqlens_q.tolist()
    leftpad = [0] * problem.batch if t.cache_leftpad is None else t.cache_leftpad.tolist()
    if bounds is not None:
        t.out[bounds[-1] :].zero_()
    for b in range(problem.batch):
        rows = b if bounds is None else slice(bounds[b], bounds[b + 1])
        q, stop = queries[rows] if t.qv is None else torch.cat([t.qv[rows], queries[rows]], dim=-1), old[b] + new[b]
        q = _on_a_line(q)
        if not q.shape[0]:
            continue
        tree = _tree(t, b, q.shape[0])
        # The first key that the first row sees. Earlier keys are not read.
        start = leftpad[b]
        # Functions and intervals count keys from leftpad.
        counted = one.score_function is not None or one.mask_function is not None or one.intervals
        if problem.band.left is not None and not counted:
            first = max(0, stop - start - q.shape[0] - problem.band.left)
            # Chunks are counted from the first key, and so are tiles if their places matter.
            unit = math.lcm(problem.band.chunk or 1, invariant.KEYS if problem.batch_invariant else 1)
            start += first // unit * unit
        k, v = (_keys(problem, one, t, x, scale, b, (min(start, stop), stop)) for x, scale in _caches(t))
        k = k if t.qv is None else torch.cat([v, k], dim=-1)
        slopes = t.alibi_slopes
        slopes = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        intervals = (first_of(t.row_keys, b, q.shape[0]), first_of(t.key_rows, b, k.shape[1]))
        call = Tensors(
            q[None].to(one.dtype), k, v, slopes, sinks=t.sinks, row_keys=intervals[0], key_rows=intervals[1],
            operands=t.operands, numbers=t.numbers,
        )  # fmt: skip
        banded = one if bands[b] == one.band else one.but(band=bands[b])
        of_one = banded if tree is None else _with_tree(banded, call, tree)
        out, sums = forward.forward(of_one.resized(call, _NO_OPTIONS), call, first=b)
        t.out[rows].copy_(out[0])
        # With a tree the slopes became a bias, and lse has two parts, which the call itself does not have.
        has_others = of_one.large_scores and not problem.large_scores
        sums = sums.select(3, 0) if has_others else sums
        found[rows if bounds is None else (slice(None), rows)].copy_(sums[0])
    return found


def _on_a_line(rows: Tensor) -> Tensor:
    """The rows at an aligned address: PyTorch's float32 products round differently by address."""
    return rows.clone() if rows.data_ptr() % 64 else rows


def _tree(t: CacheTensors, b: int, num_rows: int) -> Tensor | None:
    """The rows of a sequence that each of its rows sees, bool; None without a tree, or for a chain, which is causal."""
    if t.tree_mask is None or num_rows > t.tree_mask.shape[1]:
        return None
    seen = tree_pairs(t.tree_mask[b], num_rows)
    return None if torch.equal(seen, torch.ones_like(seen).tril()) else seen


def _with_tree(one: Problem, call: Tensors, seen: Tensor) -> Problem:
    """The problem of a sequence that ends with a tree of keys. The call gets its mask, and its slopes become a bias."""
    shift, depth = call.k.shape[1] - len(seen), seen.sum(-1) - 1
    j = torch.arange(call.k.shape[1], device=_CPU)
    u = (j - shift).clamp(min=0)
    after = (shift + depth)[:, None] - torch.where(j < shift, j, shift + depth[u])
    keep = (j < shift) | seen[:, u]
    left = one.band.left
    call.attn_mask = (keep if left is None else keep & (after <= left))[None, None]
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.view(1, -1, 1, 1).to(one.lse_dtype)
        call.attn_bias, call.alibi_slopes = -slopes * after.abs(), None
    return one.but(band=Band(), mask=True, bias_dtype=None if call.attn_bias is None else one.lse_dtype, alibi=False)


def _caches(t: CacheTensors) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    return (t.k_cache, t.k_scale), (t.v_cache, t.v_scale)


def _rows(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For ``counts`` rows of each sequence, one after another: the sequence, and the row's number in it."""
    lengths = _numbers(counts)
    sequence = torch.repeat_interleave(lengths)
    return sequence, torch.arange(len(sequence), device=_CPU) - (lengths.cumsum(0) - lengths)[sequence]


def _steps(problem: Problem, t: CacheTensors, nth: Tensor, counts: Sequence[int]) -> Tensor:
    """The distances of the rows of ``_rows`` after their sequence's first row: in a tree their depths."""
    if t.tree_mask is None:
        return nth
    of_each = zip(t.tree_mask, _query_counts(problem, t), counts, strict=True)
    trees = [tree_pairs(x, n).sum(-1) - 1 if rows <= len(x) else _numbers(range(n)) for x, rows, n in of_each]
    return torch.cat([*trees, nth[:0]])


def _query_counts(problem: Problem, t: CacheTensors) -> list[int]:
    if t.cu_seqlens_q is None:
        return [t.q.shape[1]] * problem.batch
    return t.cu_seqlens_q.diff().tolist()


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=_CPU)


def _rotated(problem: Problem, t: CacheTensors, x: Tensor, positions: Tensor) -> Tensor:
    """Rows ``(total, heads, head_dim)`` at positions ``(total,)``."""
    assert t.rotary_cos is not None and t.rotary_sin is not None
    cos, sin = t.rotary_cos[positions], t.rotary_sin[positions]
    return apply_rotary(x, cos, sin, interleaved=problem.rotary_interleaved)


def _queries(problem: Problem, t: CacheTensors, firsts: Sequence[int], bands: Sequence[Band]) -> Tensor:
    """q, rotated if there are tables. Packed rows past the last bound are left out."""
    if t.rotary_cos is None or not len(t.rotary_cos):
        return t.q
    counts = _query_counts(problem, t)
    sequence, nth = _rows(counts)
    moves = _numbers([not band.unbounded for band in bands])[sequence]
    positions = _numbers(firsts)[sequence] + moves * _steps(problem, t, nth, counts)
    rows = t.q.flatten(0, 1) if t.cu_seqlens_q is None else t.q[: len(sequence)]
    # Sequences without keys may have any position.
    rotated = _rotated(problem, t, rows, positions.clamp(0, len(t.rotary_cos) - 1))
    return rotated.view(t.q.shape) if t.cu_seqlens_q is None else rotated


def _append(problem: Problem, t: CacheTensors, old: Sequence[int], new: Sequence[int], firsts: Sequence[int]) -> None:
    """Writes the new keys and values into the caches."""
    assert t.k is not None and t.v is not None
    sequence, nth = _rows(new)
    if t.cu_seqlens_k_new is None:
        k, v = (x[sequence, nth] for x in (t.k, t.v))
    else:
        given = t.cu_seqlens_k_new[sequence] + nth
        k, v = t.k[given], t.v[given]
    if t.rotary_cos is not None:
        k = _rotated(problem, t, k, _numbers(firsts)[sequence] + _steps(problem, t, nth, new))
    places = _numbers(old)[sequence] + nth
    if t.slot_mapping is not None:
        slots = t.slot_mapping[sequence, nth] if t.cu_seqlens_k_new is None else t.slot_mapping[given]
        written = slots >= 0
        k, v, slots = k[written], v[written], slots[written].long()
        entries, places = slots // t.k_cache.shape[1], slots % t.k_cache.shape[1]
    elif t.in_pages:
        size = problem.page_size
        entries, places = _pages(t, sequence, places // size).long(), places % size
    else:
        entries = sequence if t.cache_batch_idx is None else t.cache_batch_idx[sequence].long()
    for x, (cache, scale) in zip((k, v), _caches(t), strict=True):
        if cache.dtype in EIGHT_BITS:
            x = x.to(problem.lse_dtype)
            if scale is not None:
                x = x / (scale if scale.dim() == 1 else scale[entries])[..., None].to(x.dtype)
            # Conversion turns greater numbers into NaN or an infinity.
            most = torch.finfo(cache.dtype).max
            x = x.clamp(-most, most).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[entries, places] = x


def _keys(
    problem: Problem,
    one: Problem,
    t: CacheTensors,
    cache: Tensor,
    scale: Tensor | None,
    b: int,
    span: tuple[int, int],
) -> Tensor:
    """Keys or values of sequence b at positions ``span[0]`` to ``span[1]``: ``(1, length, num_heads_kv, dim)``."""
    found = _found(problem, t, cache.view(torch.uint8) if cache.dtype in EIGHT_BITS else cache, b, span)
    if cache.dtype not in EIGHT_BITS:
        return found[None]
    # A table is five times as fast as PyTorch's conversion.
    wide = one.dtype if t.row_scale is None else torch.float32
    found = _every_value(cache.dtype, wide).index_select(0, found.flatten().int()).view(found.shape)
    if t.row_scale is not None:
        scales = _found(problem, t, t.row_scale, b, span)[..., None]
        return (found.unflatten(-1, (-1, 128)) * scales).flatten(-2).to(one.dtype)[None]
    return (found if scale is None else found * _scales(problem, t, scale, b, span).to(found.dtype))[None]


def _found(problem: Problem, t: CacheTensors, cache: Tensor, b: int, span: tuple[int, int]) -> Tensor:
    """The rows of sequence b in a cache at these positions: ``(length, num_heads_kv, dim)``."""
    start, stop = span
    if not t.in_pages:
        return cache[_entry(t, b), start:stop]
    size = problem.page_size
    # The entry for a span without keys may be no valid page.
    first = start // size
    pages = _pages(t, b, torch.arange(first, -(-stop // size) if start < stop else first, device=_CPU))
    return cache.index_select(0, pages).flatten(0, 1)[start - first * size : stop - first * size]


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _every_value(kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The 256 values of an 8-bit float dtype, in the order of their bits."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(kind).to(dtype)


def _scales(problem: Problem, t: CacheTensors, scale: Tensor, b: int, span: tuple[int, int]) -> Tensor:
    """The scales of positions ``span[0]`` to ``span[1]``: ``(length or 1, num_heads_kv, 1)``."""
    if scale.dim() == 1:
        return scale[None, :, None]
    if not t.in_pages:
        return scale[_entry(t, b), None, :, None]
    positions = torch.arange(*span, device=scale.device) // problem.page_size
    return scale[_pages(t, b, positions).long()][..., None]


def _pages(t: CacheTensors, b: int | Tensor, n: Tensor) -> Tensor:
    """The n-th pages of sequences b."""
    if t.page_indptr is not None and t.page_indices is not None:
        return t.page_indices[t.page_indptr[b] + n]
    assert t.page_table is not None
    return t.page_table[b, n]


def _entry(t: CacheTensors, b: int) -> int:
    return b if t.cache_batch_idx is None else int(t.cache_batch_idx[b])
