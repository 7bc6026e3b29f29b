"""Divides a call into dense problems: sequences, or several equally long ones at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from flashtile.backends.cpu.masks import BlockLists
from flashtile.call.functions import Function, mask_function
from flashtile.call.problem import Problem, Tensors
from flashtile.core.masks import Origin


@dataclass(frozen=True, eq=False)
class DenseSequences:
    """One dense problem: sequences of a dense batch, or packed ones that follow one another and are equally long.

    Attributes:
        batch: The numbers of its sequences in the call.
        place: Index of its rows in q, out and their gradients.
        key_place: Index of its rows in k and v.
        lse_place: Index of its rows in lse.
        q: ``(batch, num_heads_q, seqlen_q, head_dim)`` view, like everything below.
        k: ``(batch, num_heads_kv, seqlen_k, head_dim)``.
        v: ``(batch, num_heads_kv, seqlen_k, head_dim_v)``.
        slopes: ``(batch or 1, num_heads_q, 1, 1)`` or None.
        mask: Four dimensions, each of size 1 or full, or None.
        bias: Like mask.
        bias_place: Index of bias in the caller's four-dimensional bias.
        origin: The place of a part in a longer sequence, or None.
        row_keys: The keys that each row keeps, ``(batch or 1, heads or 1, seqlen_q or 1, 2)``, or None.
        key_rows: The rows that keep each key, or None.
        mask_mod: The user's function, or None.
        lists: The blocks that are kept, or None for all.
    """

    batch: range
    place: tuple[slice | int, ...]
    key_place: tuple[slice | int, ...]
    lse_place: tuple[slice | int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    bias_place: tuple[slice, ...]
    origin: Origin | None = None
    row_keys: Tensor | None = None
    key_rows: Tensor | None = None
    mask_mod: Function | None = None
    lists: BlockLists | None = None

    @property
    def seqlen_q(self) -> int:
        """Rows of scores."""
        return self.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        """Columns of scores."""
        return self.k.shape[2]

    @property
    def has_tile_bias(self) -> bool:
        """Whether something besides the band is added to the scores."""
        given = self.slopes, self.mask, self.bias, self.row_keys, self.key_rows, self.mask_mod, self.lists
        return any(x is not None for x in given)

    def view(self, tensor: Tensor) -> Tensor:
        """The rows of a q-shaped or out-shaped tensor as ``(batch, num_heads_q, seqlen_q, ...)``."""
        return _heads_first(tensor[self.place], len(self.batch))

    def key_view(self, tensor: Tensor) -> Tensor:
        """The rows of a k-shaped or v-shaped tensor as ``(batch, num_heads_kv, seqlen_k, ...)``."""
        return _heads_first(tensor[self.key_place], len(self.batch))

    def lse_view(self, lse: Tensor) -> Tensor:
        """The rows of an lse-shaped tensor as ``(batch, num_heads_q, seqlen_q)``; parts of lse are a last dimension."""
        rows = lse[self.lse_place]
        if len(self.lse_place) == 1:
            return rows
        return rows[None] if len(self.batch) == 1 else rows.unflatten(1, (len(self.batch), -1)).transpose(0, 1)


def _heads_first(rows: Tensor, count: int) -> Tensor:
    if rows.dim() == 3:  # packed
        rows = rows[None] if count == 1 else rows.unflatten(0, (count, -1))
    return rows.transpose(1, 2)


def sequences(
    problem: Problem, tensors: Tensors, most: Callable[[int, int], int], first: int = 0
) -> Iterator[DenseSequences]:
    """The dense problems of a call.

    Args:
        problem: The call.
        tensors: Its tensors.
        most: The most sequences of given rows and keys in one dense problem.
        first: The number of the first sequence.

    Yields:
        The dense problems. A sequence without rows or without keys is always alone.
    """
    if not problem.varlen:
        count = max(1, min(problem.batch, most(problem.seqlen_q, problem.seqlen_k)))
        for b in range(0, problem.batch, count):
            stop = min(b + count, problem.batch)
            place = (slice(None) if stop - b == problem.batch else slice(b, stop),)
            yield _sequence(problem, tensors, range(b, stop), place, place, place, first)
        return
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    bounds_q, bounds_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    origins = None if tensors.origins is None else tensors.origins.tolist()
    b = 0
    while b < problem.batch:
        stop = b + _run(bounds_q, bounds_k, b, most)
        rows, keys = slice(bounds_q[b], bounds_q[stop]), slice(bounds_k[b], bounds_k[stop])
        seq = _sequence(problem, tensors, range(b, stop), (rows,), (keys,), (slice(None), rows))
        yield seq if origins is None else replace(seq, origin=Origin(*origins[b]))
        b = stop


def _run(bounds_q: list[int], bounds_k: list[int], b: int, most: Callable[[int, int], int]) -> int:
    """The number of packed sequences, starting with b, that form one dense problem: they are equally long."""
    rows, keys = bounds_q[b + 1] - bounds_q[b], bounds_k[b + 1] - bounds_k[b]
    count, limit = 1, len(bounds_q) - 1 - b
    if limit == 1 or bounds_q[b + 2] - bounds_q[b + 1] != rows or not (rows and keys):
        return 1
    limit = min(most(rows, keys), limit)
    while (
        count < limit
        and bounds_q[b + count + 1] - bounds_q[b + count] == rows
        and bounds_k[b + count + 1] - bounds_k[b + count] == keys
    ):
        count += 1
    return count


def _sequence(
    problem: Problem,
    t: Tensors,
    batch: range,
    place: tuple[slice | int, ...],
    key_place: tuple[slice | int, ...],
    lse_place: tuple[slice | int, ...],
    first: int = 0,
) -> DenseSequences:
    count = len(batch)
    q = _heads_first(t.q[place], count)
    k, v = (_heads_first(x[key_place], count) for x in (t.k, t.v))
    slopes = t.alibi_slopes
    if slopes is not None:
        slopes = slopes[batch.start : batch.stop] if slopes.dim() == 2 else slopes[None]
        slopes = slopes[:, :, None, None]
    mask, _ = _corner(t.attn_mask, batch, q.shape[2], k.shape[2])
    bias, bias_place = _corner(t.attn_bias, batch, q.shape[2], k.shape[2])
    # If both describe the same mask, the rows' keys are enough.
    key_rows = None if problem.mirrored else t.key_rows
    row_keys, key_rows = _first(t.row_keys, batch, q.shape[2]), _first(key_rows, batch, k.shape[2])
    function, listed = mask_function(problem, t), None
    if t.row_blocks is not None and t.row_items is not None:
        rows, keys = problem.listed[:2]
        bounds, heads = _of_batch(t.row_blocks, batch), problem.num_heads_q
        if bounds.shape[1] not in (1, heads):
            bounds = bounds.repeat_interleave(heads // bounds.shape[1], dim=1)
        listed = BlockLists(bounds, t.row_items, (rows, keys))
    counted = range(batch.start + first, batch.stop + first)
    return DenseSequences(
        counted, place, key_place, lse_place, q, k, v, slopes, mask, bias, bias_place, None, row_keys, key_rows,
        function, listed,
    )  # fmt: skip


def _first(given: Tensor | None, batch: range, length: int) -> Tensor | None:
    """The intervals of some sequences and of their first elements."""
    if given is None:
        return None
    given = _of_batch(given, batch)
    return given if given.shape[2] == 1 else given[:, :, :length]


def _of_batch(given: Tensor, batch: range) -> Tensor:
    return given if given.shape[0] == 1 else given[batch.start : batch.stop]


def _corner(x: Tensor | None, batch: range, rows: int, keys: int) -> tuple[Tensor | None, tuple[slice, ...]]:
    """A broadcast tensor's part for some sequences and the first rows and keys; broadcast dimensions stay 1."""
    if x is None:
        return None, ()
    x = four_dimensional(x)
    wanted = (slice(batch.start, batch.stop), slice(None), slice(0, rows), slice(0, keys))
    place = tuple(slice(None) if size == 1 else want for size, want in zip(x.shape, wanted, strict=True))
    return x[place], place


def four_dimensional(x: Tensor) -> Tensor:
    """A view with leading dimensions of size 1 up to four."""
    return x[(None,) * (4 - x.dim())]
