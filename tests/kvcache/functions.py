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
