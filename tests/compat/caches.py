"""Calls over caches of keys and values, and what they must give by plain PyTorch, one sequence a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.compat.by_hand import by_hand, cumulated

CAPACITY = 24
GARBAGE = (-1, 2**31 - 1)


@dataclass(frozen=True)
class Case:
    """One call of three sequences: caches with NaN wherever nothing may be read, in entries or in pages.

    ``rows`` and ``new`` are each sequence's queries and new keys. ``places`` are entries of a larger cache, or of a
    larger table; ``options`` are keywords for the function.
    """

    name: str
    rows: tuple[int, ...] = (1, 1, 1)
    new: tuple[int, ...] = ()
    lengths: tuple[int, ...] | int | None = (9, 0, 17)
    leftpad: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    page: int = 0
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    turned: int = 0
    interleaved: bool = True
    first: tuple[int, ...] = ()
    alibi: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass
class Call:
    """The tensors of a case: those of the function by name, and for each sequence its rows, keys and where they lie."""

    tensors: dict[str, Any]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    lengths: list[int]
    slots: list[Tensor]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def alike(counts: tuple[int, ...]) -> bool:
    return len(set(counts)) == 1


def build(case: Case, dtype: torch.dtype) -> Call:
    """Draws a case's tensors."""
    torch.manual_seed(len(case.name) + 31 * sum(case.rows) + case.page)
    (heads_q, heads_kv), (dim, dim_v) = case.heads, case.dims
    new, batch = case.new or (0, 0, 0), len(case.rows)
    before = list(case.lengths) if isinstance(case.lengths, tuple) else [case.lengths or CAPACITY] * batch
    slots, caches, table = lay_out(case, before, new, dtype)
    q = [randn(n, heads_q, dim, dtype=dtype) for n in case.rows]
    k = [randn(n, heads_kv, dim, dtype=dtype) for n in new]
    v = [randn(n, heads_kv, dim_v, dtype=dtype) for n in new]
    tensors: dict[str, Any] = {"k_cache": caches[0], "v_cache": caches[1]}
    for name, parts, counts in (("q", q, case.rows), ("k", k, new), ("v", v, new)):
        if name == "q" or case.new:
            tensors[name] = torch.stack(parts) if alike(counts) else torch.cat(parts)
    if not alike(case.rows):
        tensors |= {"cu_seqlens_q": cumulated(case.rows), "max_seqlen_q": max(case.rows)}
    if not alike(new):
        tensors["cu_seqlens_k_new"] = cumulated(new)
    tensors["cache_seqlens"] = int32(case.lengths) if isinstance(case.lengths, tuple) else case.lengths
    if table is not None:
        tensors["table"] = table
    for name, values in (("cache_leftpad", case.leftpad), ("cache_batch_idx", case.places)):
        if values:
            tensors[name] = int32(values)
    if case.turned:
        angles = torch.randn(CAPACITY, case.turned // 2, dtype=torch.float64)
        tensors |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    if case.first:
        tensors["rotary_seqlens"] = int32(case.first)
    if case.alibi:
        tensors["alibi_slopes"] = torch.rand(batch, heads_q)
    tensors["rotary_interleaved"] = case.interleaved
    return Call(tensors, q, k, v, before, slots)


def lay_out(
    case: Case, before: list[int], new: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Where each sequence's positions lie, caches that hold NaN but for valid keys, and the table of pages."""
    batch, entries = len(before), max(case.places, default=len(before) - 1) + 1
    places = case.places or tuple(range(batch))
    size, pages = case.page or CAPACITY, -(-CAPACITY // (case.page or CAPACITY))
    order = torch.randperm(entries * pages + 2).to(torch.int32) if case.page else torch.arange(entries)
    table = order[: entries * pages].reshape(entries, pages).clone()
    position = torch.arange(pages * size)
    slots = [table[place].long()[position // size] * size + position % size for place in places]
    caches = []
    for dim in case.dims:
        flat = torch.full((len(order) * size, case.heads[1], dim), torch.nan, dtype=dtype)
        for b, slot in enumerate(slots):
            first = case.leftpad[b] if case.leftpad else 0
            valid = slot[first : before[b]]
            flat[valid] = randn(len(valid), case.heads[1], dim, dtype=dtype)
        caches.append(flat.unflatten(0, (len(order), size)))
    if not case.page:
        return slots, caches, None
    for b, place in enumerate(places):
        unused = table[place, -(-(before[b] + new[b]) // size) :]
        unused.copy_(int32(GARBAGE * pages)[: len(unused)])
    used = table if case.places else table[:batch]
    return slots, caches, used


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def spun(x: Tensor, call: Call, first: int, step: int, interleaved: bool) -> Tensor:
    """Pairs of features as complex numbers, turned by their row's angle; rounded to x's dtype."""
    cos, sin = call.tensors["rotary_cos"].double(), call.tensors["rotary_sin"].double()
    half = cos.shape[1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    rows = first + step * torch.arange(x.shape[0])
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[rows][:, None])
    done = done.flatten(-2) if interleaved else done.transpose(-1, -2).flatten(-2)
    return torch.cat([done.to(x.dtype), rest], dim=-1)


def expected(
    case: Case, call: Call, caches: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Out and lse of each sequence, computed in a dtype, and both caches flat, from caches before the call."""
    flat = [cache.clone().flatten(0, 1) for cache in caches]
    options = {name: value for name, value in case.options.items() if name != "window_size"}
    options["window_size"] = tuple(int(x) for x in case.options.get("window_size", (-1, -1)))
    follows = options.get("causal", False) or options["window_size"] != (-1, -1)
    outs, lses = [], []
    for b, (q, k, v, length, slot) in enumerate(zip(call.q, call.k, call.v, call.lengths, call.slots, strict=True)):
        if case.turned:
            at = case.first[b] if case.first else length
            q, k = spun(q, call, at, int(follows), case.interleaved), spun(k, call, at, 1, case.interleaved)
        if len(k):
            flat[0][slot[length : length + len(k)]] = k
            flat[1][slot[length : length + len(k)]] = v
        seen = slot[case.leftpad[b] if case.leftpad else 0 : length + len(k)]
        if case.alibi:
            options["alibi_slopes"] = call.tensors["alibi_slopes"][b]
        out, lse = by_hand(q[None].to(dtype), *(x[seen][None].to(dtype) for x in flat), **options)
        outs.append(out[0])
        lses.append(lse[0])
    return outs, lses, flat


def packed_over_pages(dtype: torch.dtype, page: int = 5) -> tuple[Case, Call, tuple[Any, ...]]:
    """A case without new keys as the arguments of ``flash_attn_varlen_func``: with a table, and lengths in bounds."""
    case = Case("varlen", rows=(7, 2, 3), page=page, heads=(4, 2))
    call = build(case, dtype)
    t, bounds = call.tensors, cumulated(tuple(call.lengths))
    return case, call, (t["q"], t["k_cache"], t["v_cache"], t["cu_seqlens_q"], bounds, torch.tensor(7), 17)
