"""Random batches of servers' steps, for batch-invariant calls: a row has the same bits in every call that has it.

A world is a layer and some sequences, each with queries, keys and values at all positions. A call has parts of some
sequences, in any order: the rows at some neighbouring positions over all keys up to the last of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flashtile

# (sequence, first position, end of the positions)
Part = tuple[int, int, int]


@dataclass(frozen=True)
class Layer:
    """What all calls of a world have in common.

    Attributes:
        cached: Whether keys are in a cache; else sequences are packed.
        page_size: Rows of a page; 0 for an entry a sequence.
        float8: Whether the cache has 8 bits.
        latent: Whether values are the keys' first columns, with queries of them.
        appends: Whether calls append their rows' keys.
        keywords: Of every call.
        name: Its name, in the names of tests.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    cached: bool = True
    page_size: int = 0
    float8: bool = False
    latent: bool = False
    appends: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def few(self) -> int:
        """The most rows of a sequence that GPUs take for few."""
        return max(16 // self.group, 1)


class World:
    """A layer and its sequences, drawn from a seed."""

    def __init__(self, layer: Layer, seed: int, lengths: list[int], device: str = "cpu") -> None:
        self.layer, self.lengths, self.device = layer, lengths, device
        self.draw = random.Random(seed)
        make = torch.Generator(device=device).manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, device=device).to(layer.dtype)

        width = 512 + 64 if layer.latent else layer.head_dim
        self.width_v = 512 if layer.latent else layer.head_dim
        self.q = [drawn(n, layer.heads, width) for n in lengths]
        self.k = [drawn(n, layer.kv_heads, width) for n in lengths]
        self.v = [drawn(n, layer.kv_heads, self.width_v) for n in lengths]
        if layer.latent:
            self.v = [k[..., : self.width_v] for k in self.k]
        self.bits: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.compared = self.different = 0
        if layer.cached:
            self._fill()

    def _fill(self) -> None:
        layer, size = self.layer, self.layer.page_size or max(self.lengths)
        counts = [-(-n // size) for n in self.lengths] if layer.page_size else [1] * len(self.lengths)
        order = list(range(sum(counts)))
        self.draw.shuffle(order)
        self.places = [[order.pop() for _ in range(count)] for count in counts]
        caches = []
        for rows in (self.k, self.v):
            shape = (sum(counts), size, *rows[0].shape[1:])
            cache = torch.zeros(shape, dtype=layer.dtype, device=self.device)
            for own, places in zip(rows, self.places, strict=True):
                for n, place in enumerate(places):
                    part = own[n * size : (n + 1) * size]
                    cache[place, : len(part)] = part
            caches.append(cache.to(torch.float8_e4m3fn) if layer.float8 else cache)
        if layer.latent:
            caches[1] = caches[0][..., : self.width_v]
        self.caches = caches

    def call(self, parts: list[Part], invariant: Any, backend: str | None, **more: Any) -> list[tuple[Tensor, Tensor]]:
        """Out and lse of each part, ``(rows, heads, dim)`` and ``(heads, rows)``, of one call.

        more: ``spare`` rows past the last sequence; ``longest``, max_seqlen_q; ``dense``, whether not to pack.
        """
        layer, device = self.layer, self.device
        counts = [stop - first for _, first, stop in parts]
        q = torch.cat([self.q[b][first:stop] for b, first, stop in parts])
        q = torch.cat([q, q.new_zeros(more.get("spare", 0), *q.shape[1:])])
        bounds = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        longest = more.get("longest", max(counts))
        given: dict[str, Any] = {"causal": True, "return_lse": True, "backend": backend, **layer.keywords}
        given["batch_invariant"] = invariant
        if not layer.cached:
            k, v = (torch.cat([x[b][:stop] for b, _, stop in parts]) for x in (self.k, self.v))
            keys = torch.tensor([0, *(stop for *_, stop in parts)]).cumsum(0).to(device, torch.int32)
            most = max(stop for *_, stop in parts) + more.get("longest", 0)
            out, lse = flashtile.attention_varlen(q, k, v, bounds, keys, longest, most, **given)
            return self._split(out, lse, counts)
        lengths = torch.tensor([stop for *_, stop in parts], dtype=torch.int32, device=device)
        if layer.page_size:
            tables = [torch.tensor(self.places[b], dtype=torch.int32) for b, *_ in parts]
            width = max(map(len, tables)) + more.get("wider", 0)
            given["page_table"] = torch.stack([torch.cat([x, x.new_full((width - len(x),), -1)]) for x in tables]).to(
                device
            )
        else:
            entries = [self.places[b][0] for b, *_ in parts]
            given["cache_batch_idx"] = torch.tensor(entries, dtype=torch.int32, device=device)
        if layer.appends:
            lengths = lengths - torch.tensor(counts, dtype=torch.int32, device=device)
            given["k"], given["v"] = (torch.cat([x[b][i:j] for b, i, j in parts]) for x in (self.k, self.v))
        if more.get("dense"):
            shape = (len(parts), counts[0])
            q = q.unflatten(0, shape)
            given |= {name: given[name].unflatten(0, shape) for name in ("k", "v") if name in given}
        else:
            given |= {"cu_seqlens_q": bounds, "max_seqlen_q": longest}
        queries: Any = q
        if layer.latent:
            queries = (q[..., : self.width_v], q[..., self.width_v :])
            given["softmax_scale"] = 192**-0.5
        out, lse = flashtile.attention_with_kvcache(queries, *self.caches, cache_seqlens=lengths, **given)
        if more.get("dense"):
            return [(out[n], lse[n]) for n in range(len(parts))]
        return self._split(out, lse, counts)

    @staticmethod
    def _split(out: Tensor, lse: Tensor, counts: list[int]) -> list[tuple[Tensor, Tensor]]:
        used = sum(counts)
        return list(zip(out[:used].split(counts), lse[:, :used].split(counts, dim=1), strict=True))

    def check(self, parts: list[Part], invariant: Any, backend: str | None, by_kind: bool, **more: Any) -> None:
        """Compares the rows of a call with the same rows of earlier calls; ``by_kind``: of those of few, or of many."""
        for (b, first, stop), (out, lse) in zip(parts, self.call(parts, invariant, backend, **more), strict=True):
            kind = by_kind and stop - first <= self.layer.few
            nothing = torch.full_like(self.q[b][..., : self.width_v], torch.nan)
            none = lse.new_full((lse.shape[0], self.lengths[b]), torch.nan)
            before_out, before_lse = self.bits.setdefault((b, kind), (nothing, none))
            known = ~before_lse[:, first:stop].isnan().all(0)
            mine, theirs = out[known], before_out[first:stop][known]
            same = (mine == theirs).flatten(1).all(1) & (lse[:, known] == before_lse[:, first:stop][:, known]).all(0)
            self.compared += len(same)
            self.different += int((~same).sum())
            before_out[first:stop][~known] = out[~known]
            before_lse[:, first:stop][:, ~known] = lse[:, ~known]


def judge(
    layer: Layer,
    seed: int,
    backend: str | None,
    *,
    longest: int,
    device: str = "cpu",
    by_kind: bool = True,
    invariant: Any = True,
) -> tuple[int, int]:
    """How many rows a random batch's calls have in common with earlier ones, and how many of these differ.

    Each sequence is computed alone; all in one call, in any order; with strangers, which are longer and have more rows;
    and in chunks, which on GPUs have more rows than few.
    """  # fmt: skip
    draw = random.Random(seed)
    count = draw.randint(2, 4)
    lengths = [draw.randint(1, longest) for _ in range(count)] + [longest, draw.randint(1, longest)]
    world, few = World(layer, seed, lengths, device), layer.few if by_kind else 0
    run = {"invariant": invariant, "backend": backend, "by_kind": by_kind}

    def part(b: int) -> Part:
        """A decode, drafts, a chunk or a prompt."""
        rows = draw.choice([1, 1, draw.randint(1, 8), draw.randint(1, lengths[b]), lengths[b]])
        return (b, lengths[b] - min(rows, lengths[b]), lengths[b])

    own = [part(b) for b in range(count)]
    for each in own:
        world.check([each], **run, dense=layer.cached and draw.random() < 0.3)
    draw.shuffle(own)
    world.check(own, **run, spare=draw.choice([0, 0, 3]), longest=max(stop - first for _, first, stop in own) + 7)
    strangers = [part(b) for b in (count, count + 1)]
    mixed = own + strangers
    draw.shuffle(mixed)
    world.check(mixed, **run, wider=2)
    # Positions one by one, or in chunks, each beside a stranger.
    for b, first, stop in own[:2]:
        at, most = first, few + draw.randint(1, max(longest // 3, few + 1))
        is_few = by_kind and stop - first <= few
        while at < stop:
            rows = draw.randint(1, max(few // 2, 1)) if is_few else draw.randint(few + 1, max(most, few + 1))
            end = min(at + rows, stop)
            if not is_few and stop - end <= few:
                end = stop
            world.check([strangers[0], (b, at, end)], **run)
            at = end
    return world.compared, world.different
