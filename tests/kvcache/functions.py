"""Calls over a cache with functions of the user's and intervals, beside their definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile import masks


class Lengths(NamedTuple):
    """Queries of each sequence, its keys, keys of padding before them, and the window."""

    queries: int
    keys: tuple[int, ...]
    leftpad: tuple[int, ...] = (0, 0, 0)
    window: int | None = None
    page_size: int = 0


LENGTHS = {
    "decode": Lengths(1, (70, 33, 12)), "padded": Lengths(5, (60, 33, 12), (3, 0, 2)),
    "window": Lengths(40, (60, 45, 52), window=20), "pages": Lengths(3, (60, 30, 5), page_size=16),
}  # fmt: skip
KINDS = ("score", "mask", "intervals", "columns", "all")
HEADS, GROUP, DIM = 2, 2, 16


def error(lengths: Lengths, kind: str, backend: str, *, packed: bool = False) -> float:
    """How far a call is from its definition at most."""
    make = torch.Generator().manual_seed(5)
    batch, heads, rows = len(lengths.keys), HEADS * GROUP, lengths.queries
    table = torch.randn(batch, heads, 90, generator=make)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 0.5 + table[b, h, kv_idx] - 0.1 * q_idx

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx + h + b + q_idx) % 3 != 0

    start = torch.randint(0, 10, (batch, heads, rows), generator=make, dtype=torch.int32)
    intervals = masks.rows(start, start + 30)
    columns = masks.columns(start[..., :1].expand(-1, -1, 45) * 0, (torch.arange(45) % 7).int())
    q = torch.randn(batch, rows, heads, DIM, generator=make)
    k, v = (torch.randn(batch, 80, HEADS, DIM, generator=make) for _ in range(2))
    given: dict[str, Any] = {
        "score": {"score_mod": score_mod}, "mask": {"mask_mod": mask_mod}, "intervals": {"block_mask": intervals},
        "columns": {"block_mask": columns},
        "all": {"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": intervals},
    }[kind]  # fmt: skip
    want = []
    for b, (stop, first) in enumerate(zip(lengths.keys, lengths.leftpad, strict=True)):
        keys, values = (x[b, first:stop].double().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v))
        i, j = torch.arange(rows)[:, None], torch.arange(stop - first)
        h = torch.arange(heads)[:, None, None]
        score = q[b].double().transpose(0, 1) @ keys.transpose(1, 2) / DIM**0.5
        after = i + stop - first - rows - j
        keep = (after >= 0).expand(score.shape)
        if lengths.window is not None:
            keep = keep & (after <= lengths.window)
        if "score_mod" in given:
            score = score_mod(score, torch.tensor(b), h, i, j)
        if "mask_mod" in given:
            keep = keep & mask_mod(torch.tensor(b), h, i, j)
        if given.get("block_mask") is intervals:
            keep = keep & (start[b, :, :, None] <= j) & (j < start[b, :, :, None] + 30)
        if given.get("block_mask") is columns:
            keep = keep & (j < 45) & (i < j % 7)
        probs = torch.softmax(torch.where(keep, score, -torch.inf), -1).nan_to_num(0)
        want.append((probs @ values).transpose(0, 1))
    call: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths.keys, dtype=torch.int32), "backend": backend}
    if any(lengths.leftpad):
        call["cache_leftpad"] = torch.tensor(lengths.leftpad, dtype=torch.int32)
    if lengths.window is not None:
        call["window_size"] = (lengths.window, 0)
    if lengths.page_size:
        k, v = (x.unflatten(1, (-1, lengths.page_size)).flatten(0, 1).flip(0).contiguous() for x in (k, v))
        call["page_table"] = torch.arange(len(k), dtype=torch.int32).flip(0).view(batch, -1)
    if packed:
        q = q.flatten(0, 1)
        call["cu_seqlens_q"] = (torch.arange(batch + 1) * rows).int()
        call["max_seqlen_q"] = rows
    out = flashtile.attention_with_kvcache(q, k, v, **call, **given)
    return float((out.view(batch, rows, heads, DIM).double() - torch.stack(want)).abs().max())


HUGE = (-3e5, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)


def huge_error(
    value: float, backend: str, *, page_size: int = 0, packed: bool = False, sinks: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> float:  # fmt: skip
    """How far rows of scores that a function makes as large as ``value`` are from their definition at most, lse too.

    A row of its own scores, one of which each is ``value``, one of which every third is, one whose scores differ by
    quarters if float32 has those, and one that is empty.
    """
    make = torch.Generator().manual_seed(7)
    lengths, rows, heads = (200, 67), 5, HEADS * GROUP
    q = torch.randn(len(lengths), rows, heads, DIM, generator=make).to(dtype)
    k, v = (torch.randn(len(lengths), 208, HEADS, DIM, generator=make).to(dtype) for _ in range(2))
    j = torch.arange(208)
    steps = value + 0.25 * (j % 5) if abs(value) < 1e6 else torch.full((208,), value)
    table = torch.stack((j * 0.0, j * 0.0 + value, value * (j % 3 == 0), steps, j * 0.0 - torch.inf)).float()

    there = table.to(device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(there[q_idx, kv_idx] == 0, score, there[q_idx, kv_idx])

    logits = torch.full((heads,), value) if sinks else None
    want, want_lse = [], []
    for b, length in enumerate(lengths):
        keys, values = (x[b, :length].double().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v))
        scores = q[b].double().transpose(0, 1) @ keys.transpose(1, 2) / DIM**0.5
        scores = torch.where(table[:, :length] == 0, scores, table[:, :length].double())
        if logits is not None:
            scores = torch.cat((scores, logits.double()[:, None, None].expand(-1, rows, 1)), -1)
        want.append((torch.softmax(scores, -1).nan_to_num(0)[..., :length] @ values).transpose(0, 1))
        want_lse.append(torch.logsumexp(scores, -1))
    call: dict[str, Any] = {}
    if page_size:
        k, v = (x.unflatten(1, (-1, page_size)).flatten(0, 1).flip(0).contiguous() for x in (k, v))
        call["page_table"] = torch.arange(len(k), dtype=torch.int32).flip(0).view(len(lengths), -1)
    if packed:
        q = q.flatten(0, 1)
        call |= {"cu_seqlens_q": torch.tensor([0, rows, 2 * rows], dtype=torch.int32), "max_seqlen_q": rows}
    call |= {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "sinks": logits}
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    out, lse = flashtile.attention_with_kvcache(
        *(x.to(device) for x in (q, k, v)), causal=False, score_mod=score_mod, return_lse=True, backend=backend, **call
    )
    out, lse = out.cpu(), lse.cpu()
    wanted = torch.stack(want_lse).float()
    assert lse.is_contiguous() and lse.shape == ((heads, len(lengths) * rows) if packed else wanted.shape)
    lse = lse.view(heads, len(lengths), rows).transpose(0, 1) if packed else lse
    # Of the size of lse, since a large one is rounded; where both are infinite they are equal.
    apart = torch.where(lse == wanted, 0.0, (lse - wanted) / wanted.abs().clamp(min=1))
    return max(float((out.view(*torch.stack(want).shape) - torch.stack(want)).abs().max()), float(apart.abs().max()))
