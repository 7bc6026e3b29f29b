"""Cached calls where each query names the keys that it sees, one by one: DeepSeek's sparse attention (DSA).

Such a call becomes one over pages of one row: each query is a sequence of its own, its keys are the rows named in its
list, and the list is its row of ``page_table``. Lists name positions of the query's sequence, or slots of the cache.
Rows are numbered through the whole cache, so a page or an entry has to begin a whole number of rows after the one
before.

Source: DeepSeek-V3.2, 2025, "DeepSeek Sparse Attention"; slots are FlashMLA's ``indices``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.call.arguments import check_tensor
from flashtile.call.cached_arguments import CacheOptions, CacheTensors
from flashtile.call.problem import Problem
from flashtile.core.errors import InvalidInputError
from flashtile.core.sizes import differ, holds

# What lists of keys do not go with, besides functions, and what to do instead.
_APART = {
    "k": ": append new keys by a call without it, and select then", "v": "", "rotary_cos": "", "rotary_sin": "",
    "rotary_seqlens": "", "slot_mapping": "", "cu_seqlens_k_new": "", "tree_mask": "", "alibi_slopes": "",
    "row_keys": "", "key_rows": "",
}  # fmt: skip
_NAMES = {"row_keys": "block_mask", "key_rows": "block_mask"}
# What says which positions a query may see, and nothing about slots.
_BY_POSITION = ("causal", "cache_batch_idx", "cache_leftpad")
_MOST_ROWS = 2**31


class Selected(NamedTuple):
    """The lists of a call, one of two None.

    Attributes:
        positions: ``(batch, seqlen_q, most)`` or packed ``(total_q, most)`` int32: keys of the query's sequence.
        slots: The same, but rows of the cache: row ``slot % page_size`` of page ``slot // page_size``.
    """

    positions: Tensor | None
    slots: Tensor | None

    @property
    def is_given(self) -> bool:
        """Whether there are any."""
        return self.positions is not None or self.slots is not None

    @property
    def name(self) -> str:
        """The keyword."""
        return "selected" if self.positions is not None else "selected_slots"

    @property
    def lists(self) -> Tensor:
        """The one that is given."""
        found = self.slots if self.positions is None else self.positions
        assert found is not None
        return found


class SelectedInputs(NamedTuple):
    """What the gradients of a call over selected keys are made from; queries, and rows, are one after another.

    Attributes:
        q: ``(queries, num_heads_q, head_dim)``, a float dtype, with any strides, as all of these.
        k: ``(rows, num_heads_kv, head_dim)``, like q.
        v: ``(rows, num_heads_kv, head_dim_v)``, like q; it may be k's first columns.
        out: ``(queries, num_heads_q, head_dim_v)``, the forward's output.
        lse: ``(queries, num_heads_q)`` float32, float64 for float64 inputs; natural log, sinks included, -inf for a
            query without keys.
        dout: The gradient of out, in its shape.
        dlse: The gradient of lse, in its shape, or None.
        slots: ``(queries, most)`` int32, rows of k and v that each query sees, from the front; the rest is not used.
        counts: ``(queries,)`` int32, how many these are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    slots: Tensor
    counts: Tensor


class Reach(NamedTuple):
    """Which positions named in its list a query sees, besides lengths.

    Attributes:
        left: Keys before the query's own position, None for all.
        right: Keys after it, likewise.
        capacity: Keys that a sequence may have.
        page_size: Rows of a page, or of an entry.
        step: Rows from the first of a page, or of an entry, to the first of the next.
    """

    left: int | None
    right: int | None
    capacity: int
    page_size: int
    step: int


# Makes of a call's lists the rows ``(queries, most)`` int32, those kept to the front and 0 behind them, and how many
# are kept, ``(queries,)`` int32.
Compact = Callable[[CacheTensors, Selected, Reach], tuple[Tensor, Tensor]]


def check_company(t: CacheTensors, o: CacheOptions, given: Selected) -> None:
    """Refuses what does not go with lists of keys.

    Raises:
        InvalidInputError: Naming the argument.
    """
    name = given.name
    if given.positions is not None and given.slots is not None:
        raise InvalidInputError("selected_slots", "is given with selected, which names the same keys by position")
    check_tensor(name, given.lists)
    for each, hint in _APART.items():
        if getattr(t, each) is not None:
            raise InvalidInputError(_NAMES.get(each, each), f"is given, but does not go with {name}{hint}")
    if o.mods:
        raise InvalidInputError(name, "is given with score_mod or mask_mod, which it does not go with")
    if o.attention_chunk is not None:
        raise InvalidInputError("attention_chunk", f"is {o.attention_chunk}, but does not go with {name}")
    for each in ("k_scale", "v_scale"):
        scale = getattr(t, each)
        if scale is not None and scale.dim() != 1:
            must = f"must be (num_heads_kv,) with {name}"
            raise InvalidInputError(each, f"has shape {tuple(scale.shape)}, {must}")
    if given.slots is None:
        return
    by_position = {each: getattr(t, each) is not None for each in _BY_POSITION}
    by_position["window_size"] = o.window_left is not None or o.window_right not in (None, 0)
    by_position["max_seqlen_k"] = o.max_seqlen_k is not None
    for each, is_given in by_position.items():
        if is_given:
            raise InvalidInputError(each, f"is given, but slots have no positions: it does not go with {name}")


def check_lists(t: CacheTensors, given: Selected) -> None:
    """Checks the lists' kind and shape, for queries that have been checked.

    Raises:
        InvalidInputError: Naming the argument.
    """
    name, lists = given.name, given.lists
    if lists.dtype != torch.int32:
        raise InvalidInputError(name, f"dtype is {lists.dtype}, must be torch.int32")
    if lists.device != t.q.device:
        raise InvalidInputError(name, f"is on {lists.device}, but q is on {t.q.device}")
    lead = t.q.shape[:-2]
    if lists.dim() != len(lead) + 1 or differ(lists.shape[:-1], lead):
        axes = "(total_q, most)" if len(lead) == 1 else "(batch, seqlen_q, most)"
        raise InvalidInputError(name, f"has shape {tuple(lists.shape)}, must be {axes} for q {tuple(t.q.shape)}")


def to_check(t: CacheTensors, given: Selected) -> CacheTensors:
    """The call that says of all arguments but the lists whether they are right: without positions, one without keys."""
    if given.slots is None or t.cache_seqlens.dim() != 1:
        return t
    # Slots are the same whether the cache is entries or pages, and whichever sequence a row belongs to.
    nothing = t.cache_seqlens.new_empty((t.cache_seqlens.shape[0], 0), dtype=torch.int32)
    return dataclasses.replace(t, page_table=nothing, page_indptr=None, page_indices=None)


def reach_of(t: CacheTensors, o: CacheOptions, problem: Problem, given: Selected) -> Reach:
    """The reach of queries; causality by sequence is in ``t.causal``.

    Raises:
        InvalidInputError: The caches' rows cannot be numbered through.
    """
    bounds = (o.window_left, o.window_right) if given.slots is None else (None, None)
    return Reach(*bounds, problem.seqlen_k, t.k_cache.shape[1], _step(t, given.name))


def _step(t: CacheTensors, name: str) -> int:
    """Rows between the first rows of two pages, the same in all tensors of rows."""
    pages, page_size = t.k_cache.shape[:2]
    if holds(page_size == 1) or holds(pages <= 1):
        return page_size
    steps = []
    for each in (t.k_cache, t.v_cache, t.row_scale):
        if each is not None and holds(each.numel() > 0):
            page, row = each.stride()[:2]
            steps.append(page // row if holds(row > 0) and holds(page % row == 0) else 0)
    if not steps:
        return page_size
    if min(steps) < 1 or min(steps) < max(steps):
        strides = f"{t.k_cache.stride()}, and v_cache {t.v_cache.stride()}"
        must = (
            f"with {name} a page, or an entry, must begin a whole number of rows after the one before, as many in both"
        )
        raise InvalidInputError("k_cache", f"has strides {strides}: {must}")
    if holds((pages - 1) * steps[0] + page_size >= _MOST_ROWS):
        raise InvalidInputError(
            "k_cache", f"has {pages} pages {steps[0]} rows apart, at most 2**31 - 1 rows go with {name}"
        )
    return steps[0]


def _in_rows(x: Tensor, step: int) -> Tensor:
    """A cache as pages of one row, ``(rows, 1, num_heads_kv, dim)``: a view."""
    pages, page_size, *rest = x.shape
    if not pages or not page_size:
        return x.new_empty((0, 1, *rest))
    row = x.stride(0) if page_size == 1 else x.stride(1)
    return x.as_strided(((pages - 1) * step + page_size, 1, *rest), (row, row, *x.stride()[2:]))


def _by_query(x: Tensor) -> Tensor:
    """Queries as sequences of one, ``(queries, 1, ...)``; a view where strides allow."""
    if x.dim() == 3:
        return x[:, None]
    return x if x.shape[1] == 1 else x.flatten(0, 1)[:, None]


def reduced(
    t: CacheTensors, o: CacheOptions, reach: Reach, rows: Tensor, counts: Tensor
) -> tuple[CacheTensors, CacheOptions]:
    """The call over pages of one row, and its options.

    Args:
        t: The call, after ``latent.split``.
        o: Its options.
        reach: See there.
        rows: ``(queries, most)`` int32, made by a ``Compact``.
        counts: ``(queries,)`` int32, likewise.

    Returns:
        The call. Its ``out`` is a view of the call's where strides allow, and otherwise a copy.
    """
    caches = (None if x is None else _in_rows(x, reach.step) for x in (t.k_cache, t.v_cache, t.row_scale))
    k_cache, v_cache, row_scale = caches
    made = CacheTensors(
        _by_query(t.out), _by_query(t.q), k_cache, v_cache, counts, rows, k_scale=t.k_scale, v_scale=t.v_scale,  # type: ignore[arg-type]
        sinks=t.sinks, qv=None if t.qv is None else _by_query(t.qv), row_scale=row_scale,
    )  # fmt: skip
    return made, o._replace(window_left=None, window_right=None, max_seqlen_q=None, max_seqlen_k=None)


def in_parts(t: CacheTensors, most: int) -> list[CacheTensors]:
    """The calls of at most so many sequences of a ``reduced`` call, one after another; what they write are views."""
    count = t.q.shape[0]
    if not holds(count > most):
        return [t]
    names = [name for name in ("out", "q", "qv", "page_table", "cache_seqlens") if getattr(t, name) is not None]
    return [
        dataclasses.replace(t, **{name: getattr(t, name)[first : first + most] for name in names})
        for first in range(0, count, most)
    ]


def lse_of(t: CacheTensors, found: Tensor) -> Tensor:
    """The lse of a call, made from its ``reduced`` call's: a view, in which rows of no sequence have -inf.

    Args:
        t: The call.
        found: ``(queries, num_heads_q, 1)``, with a last dimension of 2 where largest scores are returned.

    Returns:
        ``(batch, num_heads_q, seqlen_q)`` or ``(num_heads_q, total_q)``, with that dimension.
    """
    if t.q.dim() == 4:
        return found if t.q.shape[1] == 1 else found.squeeze(2).unflatten(0, t.q.shape[:2]).transpose(1, 2)
    found = found.squeeze(2).transpose(0, 1)
    if t.sinks is None or t.cu_seqlens_q is None:
        return found
    past = torch.arange(t.q.shape[0], device=t.q.device) >= t.cu_seqlens_q[-1]
    return found.masked_fill(past if found.dim() == 2 else past[:, None], -torch.inf)


def kept(t: CacheTensors, given: Selected, reach: Reach) -> tuple[Tensor, Tensor]:
    """Which elements of all lists are kept, bool, and the row of the cache that each names; ``(queries, most)``."""
    lists = given.lists.flatten(0, -2).long()
    if given.slots is not None:
        keep = (lists >= 0) & (lists < t.k_cache.shape[0] * t.k_cache.shape[1])
        if t.cu_seqlens_q is not None:
            keep &= (torch.arange(len(lists), device=lists.device) < t.cu_seqlens_q[-1])[:, None]
        safe = torch.where(keep, lists, 0)
        size = max(reach.page_size, 1)
        return keep, torch.where(keep, safe // size * reach.step + safe % size, 0)
    b, i, count, exists = _queries(t)
    if not t.cache_seqlens.shape[0]:
        return torch.zeros_like(lists, dtype=torch.bool), torch.zeros_like(lists)
    lengths = t.cache_seqlens.long()[b]
    at = i + lengths - count
    first, stop = torch.zeros_like(at), lengths.clamp(max=reach.capacity)
    if t.cache_leftpad is not None:
        first = t.cache_leftpad.long()[b].clamp(min=0)
    if reach.left is not None:
        first = torch.maximum(first, at - reach.left)
    if reach.right is not None:
        stop = torch.minimum(stop, at + reach.right + 1)
    if t.causal is not None:
        stop = torch.where(t.causal[b], torch.minimum(stop, at + 1), stop)
    keep = exists[:, None] & (lists >= first[:, None]) & (lists < stop[:, None])
    lists, size = torch.where(keep, lists, 0), max(reach.page_size, 1)
    if t.page_table is not None:
        table = t.page_table.long()
        pages = table[b[:, None], lists // size] if table.shape[1] else torch.zeros_like(lists)
    elif t.page_indptr is not None and t.page_indices is not None:
        last = max(t.page_indices.shape[0] - 1, 0)
        places = torch.where(keep, t.page_indptr.long()[b][:, None] + lists // size, 0).clamp(max=last)
        pages = t.page_indices.long()[places] if t.page_indices.shape[0] else torch.zeros_like(lists)
    else:
        pages = (b if t.cache_batch_idx is None else t.cache_batch_idx.long()[b])[:, None]
        return keep, torch.where(keep, pages * reach.step + lists, 0)
    return keep, torch.where(keep, pages * reach.step + lists % size, 0)


def _queries(t: CacheTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sequence of each query, the query's number in it, the sequence's queries, and whether there is a sequence."""
    if t.cu_seqlens_q is None:
        batch, rows = t.q.shape[:2]
        n = torch.arange(batch * rows, device=t.q.device)
        return n // max(rows, 1), n % max(rows, 1), torch.full_like(n, rows), torch.ones_like(n, dtype=torch.bool)
    bounds, n = t.cu_seqlens_q.long(), torch.arange(t.q.shape[0], device=t.q.device)
    b = torch.searchsorted(bounds[1:].contiguous(), n, right=True)
    exists = b < bounds.shape[0] - 1
    b = torch.where(exists, b, 0)
    return b, n - bounds[b], bounds.diff()[b] if bounds.shape[0] > 1 else torch.zeros_like(n), exists


def compacted(t: CacheTensors, given: Selected, reach: Reach) -> tuple[Tensor, Tensor]:
    """A ``Compact`` in PyTorch."""
    keep, rows = kept(t, given, reach)
    order = torch.argsort((~keep).to(torch.int8), dim=-1, stable=True)
    return rows.gather(-1, order).int(), keep.sum(-1, dtype=torch.int32)


def check_values(t: CacheTensors, given: Selected, reach: Reach) -> None:
    """Refuses a key that a query sees twice.

    Raises:
        InvalidInputError: Naming the lists, and the first such key.
    """
    keep, _ = kept(t, given, reach)
    lists = given.lists.flatten(0, -2)
    ordered = torch.where(keep, lists, -1).sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        n, place = twice.nonzero()[0].tolist()
        query = n if t.q.dim() == 3 else divmod(n, t.q.shape[1])
        raise InvalidInputError(
            given.name, f"has {int(ordered[n, place])} twice for query {query}: it must name a key once"
        )
