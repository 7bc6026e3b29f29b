"""Attention in float64 on the tensors of a call, beside plain PyTorch, some rows at a time; and what its mask keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.audits.calls import CUT, SeenCall

# Bytes of one matrix of scores in float64; several are alive at a time.
_BYTES = 2**27


@dataclass(frozen=True)
class SeenPairs:
    """What a call's mask keeps, over the rows of real tokens.

    Attributes:
        share: The kept pairs among all, as a number up to 1.
        empty: Rows that see no key, and all rows that were looked at.
        ahead: The fewest and most keys between a row's own and the last one that it sees; negative is before its own.
        all_ahead: Whether each row sees the most keys ahead that there are for it.
        span: Most keys between the first one that a row sees and its own.
        slides: Whether each row has that span, or sees all keys up to its own if there are fewer: a window, or causal.
        reach: The largest span that rows can have: between the first real key and their own.
        holes: Whether a row sees keys on both sides of one that it does not see.
        padded: Rows that see keys of padding, and all rows of sequences with padding.
        idle: Whether a mask was passed and cuts no pair that nothing else cuts.
    """

    share: float
    empty: tuple[int, int]
    ahead: tuple[int, int]
    all_ahead: bool
    span: int
    slides: bool
    reach: int
    holes: bool
    padded: tuple[int, int]
    idle: bool


@dataclass(frozen=True)
class Errors:
    """How far a call's result is from attention in float64.

    Attributes:
        error: The largest difference over rows that see keys.
        plain: The same for plain PyTorch in the call's dtype.
        wrong: Rows with an error that is a fault: how many, the first and the last.
        heads: Heads with such rows.
    """

    error: float
    plain: float
    wrong: tuple[int, int, int]
    heads: tuple[int, ...]

    def is_fault(self) -> bool:
        """Whether rows are wrong."""
        return bool(self.heads)


class Exact:
    """A call by definition, some rows at a time."""

    def __init__(self, call: SeenCall, dtype: torch.dtype = torch.float64) -> None:
        self.call, self.dtype = call, dtype
        batch, _, heads = call.q.shape[:3]
        self.keys = call.k.shape[1]
        self.step = max(1, _BYTES // (8 * max(1, batch * heads * self.keys)))
        self.k, self.v = (
            x.to(dtype).transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1) for x in (call.k, call.v)
        )

    def parts(self) -> Iterator[slice]:
        """The rows of each step."""
        rows = self.call.q.shape[1]
        for first in range(0, rows, self.step):
            yield slice(first, min(first + self.step, rows))

    def products(self, rows: slice) -> Tensor:
        """Queries times keys, ``(batch, heads, rows, keys)``."""
        return self.call.q[:, rows].to(self.dtype).transpose(1, 2) @ self.k.mT

    def kept(self, rows: slice, with_mask: bool = True) -> Tensor:
        """The pairs that are kept, broadcastable to the scores."""
        call, j = self.call, torch.arange(self.keys, device=self.call.q.device)
        own = call.own[:, None, rows, None]
        keep = torch.ones(1, 1, own.shape[2], self.keys, dtype=torch.bool, device=own.device)
        if call.left is not None:
            keep = keep & (j >= own - call.left)
        if call.right is not None:
            keep = keep & (j <= own + call.right)
        if call.chunk is not None:
            keep = keep & (j // call.chunk == own // call.chunk)
        if call.ids is not None:
            keep = keep & (call.ids[0][:, None, rows, None] == call.ids[1][:, None, None])
        if not with_mask:
            return keep
        for mask, is_kept in ((call.mask, None), (call.bias, CUT), (call.scores, CUT)):
            if mask is not None:
                part = mask if mask.shape[2] == 1 else mask[:, :, rows]
                keep = keep & (part if is_kept is None else part > is_kept)
        if call.blocks is not None or call.mask_mod is not None:
            keep = keep & self._by_functions(rows)
        return keep

    def _by_functions(self, rows: slice) -> Tensor:
        """The pairs that a mask's function and its blocks keep."""
        call, device = self.call, self.call.q.device
        kept = torch.ones(1, dtype=torch.bool, device=device)
        if call.mask_mod is not None:
            kept = _over_pairs(call.mask_mod, call.q.shape, self.keys, rows, device)
        if call.blocks is not None:
            some, full, (of_rows, of_keys) = call.blocks
            m = torch.arange(rows.start, rows.stop, device=device) // of_rows
            n = torch.arange(self.keys, device=device) // of_keys
            kept = some[:, :, m][..., n] & (full[:, :, m][..., n] | kept)
        return kept

    def scores(self, rows: slice) -> Tensor:
        """The scores before any pair is dropped."""
        call = self.call
        if call.softmax_scale is None:
            assert call.scores is not None
            return call.scores[:, :, rows].to(self.dtype)
        scores = self.products(rows) * call.softmax_scale
        if call.score_mod is not None:
            scores = _over_pairs(call.score_mod, call.q.shape, self.keys, rows, scores.device, scores).to(self.dtype)
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.slopes is not None:
            distance = call.own[:, None, rows, None] - torch.arange(self.keys, device=scores.device)
            scores = scores - call.slopes.to(scores.dtype)[..., None, None] * distance.abs()
        if call.bias is not None:
            scores = scores + (call.bias if call.bias.shape[2] == 1 else call.bias[:, :, rows]).to(scores.dtype)
        return scores

    def rows(self, rows: slice, keep: Tensor) -> Tensor:
        """The result of some rows, ``(batch, rows, heads, head_dim_v)``; 0 for a row that sees nothing."""
        scores = self.scores(rows).masked_fill(~keep, -torch.inf)
        if self.call.sinks is not None:
            column = self.call.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., : self.keys].masked_fill(~keep, 0.0)
        return (probs @ self.v).transpose(1, 2)


def _over_pairs(
    mod: object, shape: torch.Size, keys: int, rows: slice, device: torch.device, scores: Tensor | None = None
) -> Tensor:
    """A score or mask function at all pairs of some rows."""
    prefix: tuple[int | None, ...] = () if scores is None else (0,)
    function: object = mod
    for axis in (3, 2, 1, 0):
        places = tuple(0 if axis == each else None for each in range(4))
        function = torch.vmap(function, in_dims=(*prefix, *places))  # type: ignore[arg-type]
    counts = (range(shape[0]), range(shape[2]), range(rows.start, rows.stop), range(keys))
    at = [torch.arange(count.start, count.stop, device=device, dtype=torch.int32) for count in counts]
    found: Tensor = function(*(() if scores is None else (scores,)), *at)  # type: ignore[operator]
    return found


def fitted(call: SeenCall) -> tuple[SeenCall, float]:
    """The call with its scale, and the largest product of a query and a key that it sees.

    The scores of attention that is written out show the scale: a least-squares fit over the kept pairs. It stays
    unknown if they are more than products times a number, such as capped or biased ones.
    """
    exact, most = Exact(call), 0.0
    sums = torch.zeros(3, dtype=torch.float64, device=call.q.device)
    for rows in exact.parts():
        keep = exact.kept(rows)
        x = torch.where(keep, exact.products(rows), 0.0)
        most = max(most, float(x.abs().nan_to_num(torch.inf).max()))
        if call.scores is not None:
            y = torch.where(keep, call.scores[:, :, rows].double(), 0.0)
            sums += torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()])
    xy, xx, yy = sums.tolist()
    if xx and yy and 1 - xy * xy / (xx * yy) < 4e-4:
        call = call.but(softmax_scale=xy / xx)
    return call, most


def errors_of(call: SeenCall) -> tuple[Errors, Tensor]:
    """A call's errors, and its result in float64, where rows that see nothing stay as they are."""
    exact, plain = Exact(call), Exact(call, call.q.dtype)
    worst = torch.zeros(call.out.shape[:3], dtype=torch.float64, device=call.out.device)
    result = torch.empty(call.out.shape, dtype=torch.float64, device=call.out.device)
    # By row over its heads: late rows, averages of many keys, are smaller than the first ones and err by less.
    by_plain, largest = torch.zeros(2, *call.out.shape[:2], dtype=torch.float64, device=call.out.device)
    for rows in exact.parts():
        keep = exact.kept(rows)
        sees = keep.any(-1).transpose(1, 2)[..., None]
        right = exact.rows(rows, keep)
        result[:, rows] = torch.where(sees, right, call.out[:, rows].double())
        here = plain.rows(rows, keep).double()
        worst[:, rows] = torch.where(sees, call.out[:, rows].double() - right, 0.0).abs().nan_to_num(torch.inf).amax(-1)
        by_plain[:, rows] = torch.where(sees, here - right, 0.0).abs().nan_to_num(0.0).amax((-2, -1))
        largest[:, rows] = right.abs().nan_to_num(0.0).amax((-2, -1))
    # Twice plain PyTorch's error is what flashtile's own tests allow with many samples of it; here is one. In float32
    # a row's error is chance, as no last rounding rules it.
    units = 2 if call.out.dtype.itemsize == 2 else 16
    limit = 4 * by_plain + units * torch.finfo(call.out.dtype).eps * largest
    wrong = (worst > limit[..., None]).nonzero()
    places = wrong[:, 1]
    found = (len(places.unique()), int(places.min()), int(places.max())) if len(places) else (0, 0, 0)
    return Errors(float(worst.max()), float(by_plain.max()), found, tuple(wrong[:, 2].unique().tolist())), result


def kept(call: SeenCall, real: Tensor | None) -> SeenPairs:
    """What a call's mask keeps.

    Args:
        call: The call.
        real: ``(batch, seqlen)`` bool, True where a token is no padding; None if all are real.
    """
    exact = Exact(call)
    totals = torch.zeros(7, dtype=torch.int64, device=call.q.device)
    is_idle = call.mask is not None or call.bias is not None
    j = torch.arange(exact.keys, device=call.q.device)
    fits_q, fits_k = (real is not None and real.shape[1] == x.shape[1] and call.ids is None for x in (call.q, call.k))
    # The keys that a row could see as far as sequences and padding go, and each row's distances from its own key.
    could = real[:, None, None] if real is not None and fits_k else torch.ones_like(j, dtype=torch.bool)
    distances = []
    for rows in exact.parts():
        keep = exact.kept(rows)
        if is_idle:
            is_idle = bool((keep == exact.kept(rows, with_mask=False)).all()) and _adds_nothing(call.bias)
        if bool((keep == keep[:, :1]).all()):
            keep = keep[:, :1]
        keep = keep.expand(len(call.q), *keep.shape[1:])
        looked = torch.ones_like(keep[..., 0])
        if real is not None and fits_q:
            looked = looked & real[:, None, rows]
        if call.ids is not None:
            could = call.ids[0][:, None, rows, None] == call.ids[1][:, None, None]
        counts, (first, last) = keep.sum(-1), _ends(keep, j)
        sees = looked & (counts > 0)
        is_padded = sees & (keep & ~could).any(-1)
        totals += torch.stack([
            torch.where(looked, counts, 0).sum(), looked.sum() * exact.keys, (looked & (counts == 0)).sum(),
            looked.sum(), (sees & (counts < last - first + 1)).sum(), is_padded.sum(),
            (looked & ~could.all(-1)).sum(),
        ])  # fmt: skip
        own, (start, stop) = call.own[:, None, rows], _ends(could, j)
        each = (last - own, stop - own, own - first, own - start)
        distances.append(torch.stack([x.expand(sees.shape)[sees] for x in each]))
    ends, room, begins, far = torch.cat(distances, dim=1)
    if not ends.numel():
        ends = room = begins = far = torch.zeros(1, dtype=torch.int64)
    ahead, span = (int(ends.min()), int(ends.max())), int(begins.max())
    pairs, every, empty, looked_at, holes, *padded = totals.tolist()
    return SeenPairs(
        pairs / max(1, every), (empty, looked_at), ahead, bool((ends == room.clamp(max=ahead[1])).all()), span,
        bool((begins == far.clamp(max=span)).all()), int(far.max()), holes > 0, (padded[0], padded[1]), is_idle,
    )  # fmt: skip


def _ends(keep: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last key that is kept; the number of keys and -1 where none is."""
    return torch.where(keep, j, len(j)).amin(-1), torch.where(keep, j, -1).amax(-1)


def _adds_nothing(bias: Tensor | None) -> bool:
    return bias is None or not bool(bias.any())
