"""The reference: the definition of a call, in plain PyTorch over the whole score matrix.

It takes O(N^2) memory and is written for readability. Every rule of docs/semantics.md appears here once, with its
number. Every backend is tested against it in float64, with gradients from PyTorch's autograd.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.call.cached_arguments import EIGHT_BITS, CacheTensors, first_of
from flashtile.call.functions import mask_function, score_function
from flashtile.call.problem import Problem, Tensors
from flashtile.call.quantized import Quantized
from flashtile.call.quantized_call import QuantizedTensors
from flashtile.call.selected import Selected
from flashtile.core import philox
from flashtile.core.masks import Band, Origin
from flashtile.core.sizes import holds
from flashtile.mods.block_mask import FULL, PARTIAL


def attention(problem: Problem, tensors: Tensors, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Attention by definition.

    Args:
        problem: The call.
        tensors: Its tensors; gradients flow to q, k, v, attn_bias, sinks and operands.
        dtype: The dtype of all arithmetic. float64 is the reference. The input dtype gives plain PyTorch's rounding
            error; if scores may be large, the softmax is then in float32.

    Returns:
        out ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and lse ``(batch, num_heads_q, seqlen_q)``, or for packed
        sequences ``(total_q, num_heads_q, head_dim_v)`` and ``(num_heads_q, total_q)``, both in ``dtype``. If scores
        may be large, lse is in float32 at least.
    """
    return with_max_scores(problem, tensors, dtype)[:2]


def with_max_scores(
    problem: Problem, tensors: Tensors, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """``attention``'s out and lse, and the largest score that each row keeps, like lse (rule 31)."""
    if not problem.varlen:
        return _dense(problem, tensors, dtype, (0, problem.batch))
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    bounds_q, bounds_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    outs, lses, tops = [], [], []
    for b in range(problem.batch):
        rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
        origin = None if tensors.origins is None else Origin(*tensors.origins[b].tolist())
        out, lse, top = _dense(problem, _sequence(tensors, b, rows, keys), dtype, (b, b + 1), origin)
        outs.append(out[0])
        lses.append(lse[0])
        tops.append(top[0])
    # Rows past the last bound belong to no sequence: rules 8 and 9.
    rest = tensors.q.shape[0] - bounds_q[-1]
    outs.append(torch.zeros(rest, problem.num_heads_q, problem.head_dim_v, dtype=dtype, device=tensors.q.device))
    wide = _score_dtype(problem, dtype)
    nothing = torch.full((problem.num_heads_q, rest), -torch.inf, dtype=wide, device=tensors.q.device)
    return torch.cat(outs), torch.cat([*lses, nothing], dim=1), torch.cat([*tops, nothing], dim=1)


def attention_quantized(problem: Problem, t: QuantizedTensors) -> tuple[Tensor, Tensor]:
    """A quantized call by definition: float64, over the dequantised numbers, without rounding of probabilities."""
    scales = t.q_scale, t.k_scale, t.v_scale
    record = Quantized(t.q, t.k, t.v, *scales, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    # Rules 20 and 21.
    call = Tensors(*record.dequantized(), cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    out, lse = attention(problem.but(sinks=False), call)
    if t.shift is not None:
        lse = torch.where(lse == -torch.inf, lse, lse + t.shift * problem.softmax_scale)  # rule 22
    if t.sinks is not None:  # rule 6, for the rows of sequences alone
        rows = slice(None) if t.cu_seqlens_q is None else slice(0, int(t.cu_seqlens_q[-1]))
        with_sinks = torch.logaddexp(lse[..., rows], t.sinks[:, None].to(lse))
        weight = torch.exp(lse[..., rows] - torch.where(with_sinks == -torch.inf, 0.0, with_sinks))
        out[..., rows, :, :] *= weight.transpose(-1, -2)[..., None]
        lse[..., rows] = with_sinks
    return out, lse


def _sequence(t: Tensors, b: int, rows: slice, keys: slice) -> Tensors:
    """Sequence b of a packed call as a dense call of batch 1."""
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start

    def corner(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[(None,) * (4 - x.dim())]
        x = x[b : b + 1] if x.shape[0] > 1 else x
        x = x[:, :, :num_rows] if x.shape[2] > 1 else x
        return x[..., :num_keys] if x.shape[3] > 1 else x

    def each(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[b : b + 1]

    def first(x: Tensor | None, count: int) -> Tensor | None:
        x = each(x)
        return x if x is None or x.shape[2] == 1 else x[:, :, :count]

    slopes = t.alibi_slopes
    return Tensors(
        t.q[None, rows],
        t.k[None, keys],
        t.v[None, keys],
        slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes,
        corner(t.attn_mask),
        corner(t.attn_bias),
        t.sinks,
        rng_state=t.rng_state,
        row_blocks=each(t.row_blocks),
        row_items=t.row_items,
        row_keys=first(t.row_keys, num_rows),
        key_rows=first(t.key_rows, num_keys),
        operands=t.operands,
        numbers=t.numbers,
    )


def _dense(
    p: Problem, t: Tensors, dtype: torch.dtype, batch: tuple[int, int], origin: Origin | None = None,
    tree: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q = t.q.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(p.group_size, dim=1) for x in (t.k, t.v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    device = q.device

    scores = (q @ k.transpose(-1, -2) * p.softmax_scale).to(_score_dtype(p, dtype))  # rule 1
    at = [torch.arange(*batch, device=device), *(torch.arange(n, device=device) for n in scores.shape[1:])]
    keep = p.band.dense(seqlen_q, seqlen_k, device=device).expand(scores.shape)  # rule 5
    if tree is not None:
        keep = _of_tree(p, tree, seqlen_k)[1].expand(scores.shape)
    if t.attn_mask is not None:
        keep = keep & t.attn_mask
    if t.row_keys is not None:
        keep = keep & (t.row_keys[..., :1] <= at[3]) & (at[3] < t.row_keys[..., 1:])
    if t.key_rows is not None:
        i = at[2][:, None]
        keep = keep & (t.key_rows[..., None, :, 0] <= i) & (i < t.key_rows[..., None, :, 1])
    if (mask := mask_function(p, t)) is not None:  # rule 27
        places = dict(zip("bhij", torch.meshgrid(*at, indexing="ij"), strict=True))
        kept = mask.values([mask.graph.result], places, dtype)[0]
    else:
        kept = torch.ones_like(keep)
    if t.row_blocks is not None:  # rule 30
        kinds = _listed(p, t, seqlen_q, seqlen_k)
        kept = (kinds == FULL) | ((kinds == PARTIAL) & kept)
    keep = keep & kept
    if (score := score_function(p, t)) is not None:  # rule 26, for kept pairs alone
        pairs = keep.nonzero(as_tuple=True)
        places = {"score": scores[pairs], **{name: x[n] for name, x, n in zip("bhij", at, pairs, strict=True)}}
        changed = score.values([score.graph.result], places, scores.dtype)[0]
        scores = torch.zeros_like(scores).index_put(pairs, changed)
    if p.softcap > 0:  # rule 2
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if t.alibi_slopes is not None:  # rule 3
        part = origin or Origin(0, 0, 1, 0, 1, seqlen_k - seqlen_q)
        i = part.row + part.row_step * at[2][:, None] + part.shift
        distance = (i - part.key - part.key_step * at[3]).abs()
        if tree is not None:
            distance = _of_tree(p, tree, seqlen_k)[0].abs()
        scores = scores - t.alibi_slopes.to(scores.dtype)[..., None, None] * distance
    if t.attn_bias is not None:  # rule 4
        scores = scores + t.attn_bias.to(scores.dtype)

    scores = torch.where(keep, scores, -torch.inf)  # rule 10: select, so that NaN from q or k affects kept pairs only
    if (
        p.large_scores and scores.dtype != p.lse_dtype
    ):  # rule 11: rounded as in the softmax, where a large number absorbs most of a small one
        with torch.no_grad():
            scores.copy_(scores.to(p.lse_dtype))

    probs, lse = _softmax(scores, t.sinks)
    if t.rng_state is not None:  # rule 7
        kept = philox.keep(t.rng_state, p.dropout_p, range(*batch), p.num_heads_q, (0, seqlen_q), (0, seqlen_k), origin)
        probs = torch.where(kept, probs / (1 - p.dropout_p), 0.0)
    return (
        (probs.to(dtype) @ v).transpose(1, 2),
        lse,
        _largest(scores),
    )  # rule 10: a NaN in v also reaches rows that mask its key


def _largest(scores: Tensor) -> Tensor:
    """Rule 31: the largest score of each row, -inf for a row without any."""
    top = _not_empty(scores.detach()).amax(dim=-1)
    return torch.where(top == torch.inf, torch.nan, top)


def _not_empty(scores: Tensor) -> Tensor:
    """Scores to which a column of -inf is appended if there are no keys, or perhaps none, which symbols leave open."""
    return scores if holds(scores.shape[-1] > 0) else F.pad(scores, (0, 1), value=-torch.inf)


def _score_dtype(p: Problem, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scores: 16 bits cannot hold all biases that float32 can."""
    return torch.promote_types(dtype, torch.float32) if p.large_scores else dtype


def _listed(p: Problem, t: Tensors, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Rule 30: for each pair whether and how its block is listed. The result broadcasts to the scores."""
    assert t.row_blocks is not None and t.row_items is not None
    (of_rows, of_keys), (batch, heads, blocks_q, _) = p.listed[:2], t.row_blocks.shape
    kinds = torch.zeros(batch, heads, blocks_q * of_rows, -(-seqlen_k // of_keys) * of_keys, device=t.q.device)
    for b, h, m in itertools.product(range(batch), range(heads), range(blocks_q)):
        start, full_start, stop = t.row_blocks[b, h, m].tolist()
        for place in range(start, stop):
            rows, n = slice(m * of_rows, (m + 1) * of_rows), int(t.row_items[place])
            kinds[b, h, rows, n * of_keys : (n + 1) * of_keys] = PARTIAL if place < full_start else FULL
    each = 1 if heads == 1 else p.num_heads_q // heads  # rule 30: key heads' lists are their groups'
    return kinds[:, :, :seqlen_q, :seqlen_k].repeat_interleave(each, dim=1)


def _of_tree(p: Problem, words: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Rule 18: each row's distance after each key, and the keys that it sees; both ``(rows, keys)``."""
    num_rows, depth = len(words), _depths(words)
    shift = seqlen_k - num_rows
    places = [j if j < shift else shift + depth[j - shift] for j in range(seqlen_k)]
    after = torch.tensor([[shift + each - place for place in places] for each in depth]).view(num_rows, seqlen_k)
    sees = [[j < shift or word >> j - shift & 1 for j in range(seqlen_k)] for word in words.tolist()]
    keep = torch.tensor(sees).view(num_rows, seqlen_k).bool()
    keep = keep if p.band.left is None else keep & (after <= p.band.left)
    return after.to(words.device), keep.to(words.device)


def _tree(t: CacheTensors, b: int, num_rows: int) -> Tensor | None:
    """The words of a sequence's tree; None if there is no tree."""
    return None if t.tree_mask is None or num_rows > t.tree_mask.shape[1] else t.tree_mask[b, :num_rows]


def _depths(words: Tensor) -> list[int]:
    """Rule 18: the number of ancestors of each row of a tree, without the row itself."""
    return [sum(word >> t & 1 for t in range(len(words))) - 1 for word in words.tolist()]


def _steps(problem: Problem, t: CacheTensors, b: int, count: int) -> list[int]:
    """The distances of ``count`` rows, or new keys, after a sequence's first new key, which rotary embeddings need."""
    rows = _spans(problem, t.q, t.cu_seqlens_q)[b]
    words = _tree(t, b, rows.stop - rows.start)
    return list(range(count)) if words is None or t.rotary_cos is None else _depths(words)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rules 6 and 8: probabilities, and the natural log of each row's sum of exponentials, with the sink's.

    In a row without any exponential the probabilities are 0, and the log is -inf.
    """
    if sinks is None:
        columns = _not_empty(scores)
    else:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        columns = torch.cat([scores, column], dim=-1)
    top = columns.detach().amax(dim=-1, keepdim=True)
    empty = top == -torch.inf
    # The maximum and the sum are kept apart: added to a score of 1e9, the log of a count would be lost.
    weights = torch.exp(columns - torch.where(empty, 0.0, top))
    total = torch.where(empty, 1.0, weights.sum(dim=-1, keepdim=True))
    return weights[..., : scores.shape[-1]] / total, (top + torch.log(total)).squeeze(-1)


def attention_with_kvcache(
    problem: Problem, tensors: CacheTensors, dtype: torch.dtype = torch.float64, given: Selected | None = None
) -> tuple[Tensor, Tensor]:
    """A cached call by definition; neither ``tensors.out`` nor the caches are changed.

    Args:
        problem: The call.
        tensors: Its tensors.
        dtype: As in ``attention``. New keys and rotated queries are rounded by rules 14 to 16 in every dtype.
        given: The keys that each query sees; the problem is made as if there were none.

    Returns:
        out and lse as ``attention`` returns them.
    """
    return cached_with_max_scores(problem, tensors, dtype, given)[:2]


def cached_with_max_scores(
    problem: Problem, tensors: CacheTensors, dtype: torch.dtype = torch.float64, given: Selected | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``attention_with_kvcache``'s out and lse, and the largest score that each row keeps, like lse (rule 31)."""
    t = appended(problem, tensors)
    out = torch.zeros(*t.q.shape[:-1], problem.head_dim_v, dtype=dtype, device=t.q.device)
    lse = torch.full(
        problem.lse_shape(t.q)[: t.q.dim() - 1], -torch.inf, dtype=_score_dtype(problem, dtype), device=t.q.device
    )
    top = lse.clone()
    for b, each in enumerate(_spans(problem, t.q, t.cu_seqlens_q)):
        # The last query is at the last key's position, however many keys are left out at the start.
        own = problem.but(band=_band(problem, t, b))
        if given is not None and given.slots is not None:  # rule 32: a query is a call of its own
            own = problem.but(band=Band())
        for rows, places, keep in _parts(t, b, each, given):
            k, v = (_values(cache, scale, places, dtype) for cache, scale in _caches(t))
            if t.row_scale is not None and places:  # rule 16
                scales = torch.stack([t.row_scale[place] for place in places])
                v = (v.float() * scales.repeat_interleave(128, -1)).to(t.q.dtype).to(dtype)
            q = _rows(t.q, b, rows)
            if t.qv is not None:  # rule 13
                q, k = torch.cat([_rows(t.qv, b, rows), q], dim=-1), torch.cat([v, k], dim=-1)
            slopes = t.alibi_slopes
            slopes = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
            one = Tensors(
                q[None], k[None], v[None], slopes, keep, sinks=t.sinks,
                row_keys=first_of(t.row_keys, b, rows.stop - rows.start), key_rows=first_of(t.key_rows, b, len(k)),
                operands=t.operands, numbers=t.numbers,
            )  # fmt: skip
            one_out, *of_rows = _dense(own, one, dtype, (b, b + 1), tree=_tree(t, b, one.q.shape[1]))
            _rows(out, b, rows).copy_(one_out[0])
            for found, part in zip((lse, top), of_rows, strict=True):
                (found if problem.varlen else found[b])[:, rows].copy_(part[0])
    return out, lse, top


_Part = tuple[slice, list[tuple[int, int]], Tensor | None]


def _parts(t: CacheTensors, b: int, rows: slice, given: Selected | None) -> list[_Part]:
    """Rows of a sequence, the places of their keys, and which pairs are kept, bool ``(1, 1, rows, keys)``."""
    first = 0 if t.cache_leftpad is None else int(t.cache_leftpad[b])
    length = int(t.cache_seqlens[b])
    if given is None:
        return [(rows, [_place(t, b, j) for j in range(first, length)], None)]  # rules 13 and 17
    lists = given.lists[b, rows] if given.lists.dim() == 3 else given.lists[rows]
    if given.slots is not None:  # rule 32
        size, count = t.k_cache.shape[1], t.k_cache.shape[0] * t.k_cache.shape[1]
        kept = [[divmod(slot, size) for slot in each if 0 <= slot < count] for each in lists.tolist()]
        return [(slice(n, n + 1), each, None) for n, each in enumerate(kept, rows.start)]
    keys = range(first, length)
    keep = [[j in each for j in keys] for each in map(set, lists.tolist())]
    mask = torch.tensor(keep, dtype=torch.bool, device=t.q.device).view(1, 1, len(lists), len(keys))
    return [(rows, [_place(t, b, j) for j in keys], mask)]


def appended(problem: Problem, tensors: CacheTensors) -> CacheTensors:
    """The call that remains after new keys are written to copies of the caches and queries are rotated."""
    t = tensors
    if t.k is None or t.v is None:
        return t
    q = t.q.clone()
    caches = [(cache.clone(), scale) for cache, scale in _caches(t)]
    old = t.cache_seqlens.tolist()
    firsts = old if t.rotary_seqlens is None else t.rotary_seqlens.tolist()
    lengths = []
    for b, rows in enumerate(_spans(problem, t.k, t.cu_seqlens_k_new)):
        k, v = _rows(t.k, b, rows), _rows(t.v, b, rows)
        if old[b] < 0:  # rule 13
            lengths.append(0)
            continue
        steps = _steps(problem, t, b, k.shape[0])
        for i in range(k.shape[0]):  # rule 14
            place = _place(t, b, old[b] + i) if t.slot_mapping is None else _slot(t, _rows(t.slot_mapping, b, rows)[i])
            if place is None:
                continue
            page, row = place
            turned = _rotated(problem, t, k[i], firsts[b] + steps[i])
            for new, (cache, scale) in zip((turned, v[i]), caches, strict=True):
                cache[page, row] = _stored(new, cache.dtype, None if scale is None else _scale(scale, page))
        lengths.append(old[b] + k.shape[0])
    for b, rows in enumerate(_spans(problem, q, t.cu_seqlens_q)):
        queries = _rows(q, b, rows)
        steps = _steps(problem, t, b, queries.shape[0])
        for i in range(queries.shape[0] if old[b] >= 0 else 0):  # rule 15
            at = firsts[b] if _band(problem, t, b).unbounded else firsts[b] + steps[i]
            queries[i] = _rotated(problem, t, queries[i], at)
    grown = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    return replace(
        t, q=q, k_cache=caches[0][0], v_cache=caches[1][0], cache_seqlens=grown, k=None, v=None, rotary_cos=None,
        rotary_sin=None, rotary_seqlens=None, cu_seqlens_k_new=None, slot_mapping=None,
    )  # fmt: skip


def _caches(t: CacheTensors) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    return (t.k_cache, t.k_scale), (t.v_cache, t.v_scale)


def _spans(problem: Problem, x: Tensor, bounds: Tensor | None) -> list[slice]:
    """Each sequence's rows; in a dense tensor all rows of its entry."""
    if bounds is None:
        return [slice(0, x.shape[1])] * problem.batch
    at = bounds.tolist()
    return [slice(at[b], at[b + 1]) for b in range(problem.batch)]


def _rows(x: Tensor, b: int, rows: slice) -> Tensor:
    """A sequence's rows of q, k, v or slot_mapping, packed or not."""
    return x[b, rows] if x.dim() in (2, 4) else x[rows]


def _place(t: CacheTensors, b: int, j: int) -> tuple[int, int]:
    """Rule 13: the place of key j of sequence b in the caches, as indices of their first two dimensions."""
    if t.in_pages:
        size = t.k_cache.shape[1]
        if t.page_indptr is not None and t.page_indices is not None:
            return int(t.page_indices[t.page_indptr[b] + j // size]), j % size
        assert t.page_table is not None
        return int(t.page_table[b, j // size]), j % size
    return (b if t.cache_batch_idx is None else int(t.cache_batch_idx[b])), j


def _band(problem: Problem, t: CacheTensors, b: int) -> Band:
    """Rule 5: the band of a sequence, if ``causal`` is a tensor."""
    return problem.band if t.causal is None or not t.causal[b] else replace(problem.band, right=0)


def _slot(t: CacheTensors, slot: Tensor) -> tuple[int, int] | None:
    """Rule 14: a slot's place in the caches, as indices of their first two dimensions; None for -1."""
    return None if slot < 0 else divmod(int(slot), t.k_cache.shape[1])


def _scale(scale: Tensor, page: int) -> Tensor:
    """The heads' scales ``(num_heads_kv, 1)`` for a page or an entry."""
    return (scale if scale.dim() == 1 else scale[page])[:, None]


def _values(cache: Tensor, scale: Tensor | None, places: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Rule 16: keys or values ``(keys, num_heads_kv, dim)`` at these places."""
    found = [cache[place].to(torch.promote_types(dtype, torch.float32)) for place in places]
    if scale is not None:
        found = [x * _scale(scale, page) for x, (page, _) in zip(found, places, strict=True)]
    return torch.stack(found).to(dtype) if found else cache.new_zeros(0, *cache.shape[2:], dtype=dtype)


def _stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Rule 16: new keys or values ``(num_heads_kv, dim)`` as a cache of this dtype holds them."""
    if dtype not in EIGHT_BITS:
        return x
    x, most = x.to(torch.promote_types(x.dtype, torch.float32)), torch.finfo(dtype).max
    return (x if scale is None else x / scale).clamp(-most, most).to(dtype)


def _rotated(problem: Problem, t: CacheTensors, x: Tensor, position: int) -> Tensor:
    """Rule 15: the heads ``(num_heads, head_dim)`` of one row at a position."""
    if t.rotary_cos is None or t.rotary_sin is None:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = t.rotary_cos[position].to(wide), t.rotary_sin[position].to(wide)
    turned, half = x.to(wide, copy=True), cos.shape[0]
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if problem.rotary_interleaved else (n, n + half)
        turned[:, a], turned[:, b] = (
            turned[:, a] * cos[n] - turned[:, b] * sin[n],
            turned[:, b] * cos[n] + turned[:, a] * sin[n],
        )
    return turned.to(x.dtype)
