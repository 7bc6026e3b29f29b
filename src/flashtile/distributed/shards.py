"""Conversions between a whole tensor and the shards of its rows that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.api.keywords import intervals_of
from flashtile.call.arguments import band_of, check_tensor, integer
from flashtile.core.errors import InvalidInputError
from flashtile.distributed.dealing import Mask, deal_rows
from flashtile.distributed.exchange import Ranks, add_up, gather, ranks_of
from flashtile.distributed.layouts import Layout, check_layout, ranges
from flashtile.distributed.layouts import positions as ranges_of_positions
from flashtile.distributed.values import document_lengths, intervals
from flashtile.masks import Intervals


def deal(
    mesh: DeviceMesh,
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] | None = None,
    block_mask: Intervals | None = None,
) -> Layout:
    """A layout for sequences that attend to themselves under a mask, with equal work for all ranks and few transfers.

    Every rank has as many rows as under each other layout. The most pairs of a rank are at most 1.05 times the mean, if
    some layout reaches that; among such layouts it is one for which few keys travel. A document that fits one rank
    stays on one rank, as far as work remains even. The same arguments give the same layout on all ranks.

    Args:
        mesh: As in ``attention``.
        seqlen: Length of the whole sequence; or
        cu_seqlens: bounds of packed documents.
        causal: As in ``attention``.
        window_size: As in ``attention``.
        block_mask: As in ``attention``; its values are read on the host.

    Returns:
        A value for the argument ``layout`` of ``shard``, ``unshard``, ``positions`` and ``attention``: a name, or a
        layout for these lengths and this number of ranks alone.

    Raises:
        InvalidInputError: Naming the argument that does not fit.
    """
    lengths = _whole(seqlen, cu_seqlens)
    row_keys, key_rows, _ = (None, None, False) if block_mask is None else intervals_of(block_mask)
    mask = Mask(band_of(causal, window_size), intervals(row_keys, key_rows, lengths, lengths))
    return deal_rows(lengths, ranks_of(mesh).ring.size, mask)


def shard(
    x: Tensor,
    mesh: DeviceMesh,
    layout: Layout = "zigzag",
    dim: int = 1,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has in full, such as the tokens of a batch; differentiable.

    If N ranks share a sequence, "contiguous" gives rank r part r of N, "striped" every N-th row starting with row r,
    and "zigzag" the parts r and 2N - 1 - r of 2N, which is equal work under a causal mask. Shards differ by at most one
    row, and may be empty. With cu_seqlens, "zigzag" divides each document, and the others divide all rows as one
    sequence. ``deal`` makes layouts for a mask. The ranks of a dimension "ulysses" share, in order, the rows that one
    rank of "ring" would have.

    Args:
        x: Any tensor.
        mesh: As in ``attention``.
        layout: See above.
        dim: The dimension of its rows; 0 for packed documents.
        cu_seqlens: ``(documents + 1,)`` bounds of packed documents; the last bound is the number of rows.

    Returns:
        A copy of the rows, contiguous.

    Raises:
        InvalidInputError: Naming the argument that does not fit.
    """
    dim, length = _rows(x, dim)
    ranks, lengths = ranks_of(mesh), _lengths(cu_seqlens, length)
    found = ranges(lengths, *_place(ranks, ranks.rank, layout))
    if not found:
        return x.narrow(dim, 0, 0)
    return torch.cat([_part(x, dim, each) for each in found], dim)


def unshard(
    x: Tensor,
    mesh: DeviceMesh,
    layout: Layout = "zigzag",
    dim: int = 1,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole tensor on every rank, from the shards that ``shard`` returns. It is the inverse of ``shard``.

    The call waits for the other ranks and for the GPU, because shards may have unequal lengths. The gradient of a shard
    is the sum of all ranks' gradients for its rows, so all ranks must run the backward. If every rank computes a loss
    from the whole tensor, each of these losses counts once.

    Args:
        x: This rank's rows.
        mesh: As in ``attention``.
        layout: As in ``shard``.
        dim: The dimension of the rows.
        cu_seqlens: As in ``shard``.

    Raises:
        InvalidInputError: Names the argument that does not fit, or the shard that is not the layout's.
    """
    dim, length = _rows(x, dim)
    ranks, what = ranks_of(mesh), "the gathering of shards"
    counts = everyone(ranks, what, torch.tensor([[length]], device=x.device), 1).flatten().tolist()
    lengths = _lengths(cu_seqlens, sum(counts))
    shards = [ranges(lengths, *_place(ranks, i, layout)) for i in range(len(counts))]
    for member, have, found in zip(ranks.members, counts, shards, strict=True):
        if have != sum(map(len, found)):
            must = f"must have {sum(map(len, found))} of {sum(lengths)}"
            raise InvalidInputError("x", f"has {have} rows on rank {member}, {must} under layout {layout!r}")
    whole: Tensor = _Unshard.apply(x, dim, ranks, shards)  # type: ignore[no-untyped-call]
    return whole


class _Unshard(torch.autograd.Function):
    """The autograd function of ``unshard``: all ranks' rows in the whole tensor's order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks, shards: list[tuple[range, ...]]) -> Tensor:
        ctx.dim, ctx.ranks, ctx.mine = dim, ranks, shards[ranks.rank]
        counts = [sum(map(len, found)) for found in shards]
        rows = everyone(ranks, "the gathering of shards", x.movedim(dim, 0).contiguous(), max(counts))
        whole = rows.new_empty((sum(counts), *rows.shape[2:]))
        for part, found in zip(rows, shards, strict=True):
            at = 0
            for each in found:
                whole[each.start : each.stop : each.step] = part[at : at + len(each)]
                at += len(each)
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        # A sum in 16 bits would be rounded once for each rank.
        wide = torch.promote_types(dwhole.dtype, torch.float32)
        total = add_up(ctx.ranks, "the sum of gradients of shards", dwhole.to(wide, copy=True).contiguous())
        parts = [_part(total, ctx.dim, each) for each in ctx.mine]
        dx = torch.cat(parts, ctx.dim) if parts else total.narrow(ctx.dim, 0, 0)
        return dx.to(dwhole.dtype), None, None, None


def positions(
    mesh: DeviceMesh,
    layout: Layout = "zigzag",
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's rows in the whole sequence or in their documents, as rotary embeddings need them.

    Args:
        mesh: As in ``attention``.
        layout: As in ``shard``.
        seqlen: Length of the whole sequence; or
        cu_seqlens: bounds of packed documents.
        device: The device of the result.

    Returns:
        ``(rows,)`` int64.

    Raises:
        InvalidInputError: Naming the argument that does not fit.
    """
    ranks, lengths = ranks_of(mesh), _whole(seqlen, cu_seqlens)
    found = ranges_of_positions(lengths, *_place(ranks, ranks.rank, layout))
    rows = [torch.arange(each.start, each.stop, each.step, device=device) for each in found]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)


def _whole(seqlen: int | None, cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...]:
    """The documents' lengths; with ``seqlen`` there is one document."""
    if (seqlen is None) == (cu_seqlens is None):
        raise InvalidInputError("seqlen", "and cu_seqlens: one of the two must be given")
    return _lengths(cu_seqlens, None if seqlen is None else integer("seqlen", seqlen, 0))


def _rows(x: Tensor, dim: int) -> tuple[int, int]:
    """The dimension of the rows as a number that is not negative, and the number of rows."""
    check_tensor("x", x)
    if not -x.dim() <= dim < x.dim():
        raise InvalidInputError("dim", f"is {dim}, but x has {x.dim()} dimensions")
    return dim % x.dim(), x.shape[dim]


def _lengths(cu_seqlens: Tensor | Sequence[int] | None, rows: int | None) -> tuple[int, ...]:
    """The documents' lengths; without bounds there is one document."""
    if cu_seqlens is None:
        return (rows or 0,)
    lengths = document_lengths("cu_seqlens", cu_seqlens)
    if rows is not None and sum(lengths) != rows:
        raise InvalidInputError("cu_seqlens", f"ends with {sum(lengths)}, but there are {rows} rows")
    return lengths


def _place(ranks: Ranks, shard: int, layout: Layout) -> tuple[int, int, Layout, int, int]:
    """A shard's arguments for ``layouts.ranges``: ranks of the ring, a rank, the layout, a part, number of parts."""
    check_layout(layout)
    parts = ranks.ulysses.size
    return ranks.ring.size, shard // parts, layout, shard % parts, parts


def _part(x: Tensor, dim: int, rows: range) -> Tensor:
    return x[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]


def everyone(ranks: Ranks, what: str, x: Tensor, most: int) -> Tensor:
    """The tensors of all ranks, in the order of their shards: ``(ranks, most, ...)``."""
    x = (x if x.shape[0] == most else torch.cat([x, x.new_zeros((most - x.shape[0], *x.shape[1:]))]))[None]
    for line in ranks.lines:
        (found,), pending = gather(line, what, [x], x.shape[0])
        pending.wait()
        x = found.flatten(0, 1)
    return x
