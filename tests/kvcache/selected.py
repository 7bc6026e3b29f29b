"""Calls over latent rows that each query has selected for itself: a sequence's table names tokens, pages of one row."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.serving import latent_rows
from tests.poison import poisoned_memory
from tests.rule import assert_close

SCALE = 192**-0.5
# Sequences whose rows are widened at once.
_AT_ONCE = 16


def judge_selected(batch: int, heads: int, most: int, backend: str, device: str, *, float8: bool = False) -> None:
    """Checks out and lse of one query a sequence over up to ``most`` random tokens; rows that no table names are NaN.

    Args:
        batch: Sequences, 6 at least: the first have no key, one, all but one, all, and a block's end on either side.
        heads: Query heads.
        most: Columns of the table, more than 65.
        backend: That runs the call.
        device: Where it runs.
        float8: Whether rows have 656 bytes.
    """
    make = torch.Generator().manual_seed(batch + heads)
    slots = min(8 * most, 65536)
    rows = torch.randn(2 * slots, 1, 1, 576, generator=make).bfloat16()
    named = torch.randperm(2 * slots, generator=make)[:slots]
    table = named[torch.randint(0, slots, (batch, most), generator=make)].int()
    lengths = torch.randint(0, most + 1, (batch,), generator=make).int()
    lengths[:6] = torch.tensor([0, 1, most - 1, most, 64, 65])
    is_key = torch.arange(most) < lengths[:, None]
    used = torch.zeros(2 * slots, dtype=torch.bool)
    used[table[is_key].long()] = True
    rows[~used] = torch.nan
    # No page at all, past the last key.
    table = torch.where(is_key, table, 2**31 - 1)
    q = torch.randn(batch, 1, heads, 576, generator=make).bfloat16()
    cache = latent_rows(rows) if float8 else rows
    if float8:
        numbers, scales = cache[..., :512].view(torch.float8_e4m3fn), cache[..., 512:528].view(torch.float32)
        values = (numbers.float().unflatten(-1, (4, 128)) * scales[..., None]).flatten(-2).bfloat16()
        rows = torch.cat([values, cache[..., 528:].view(torch.bfloat16)], dim=-1)
    q, rows, cache, table, lengths, is_key = (x.to(device) for x in (q, rows, cache, table, lengths, is_key))
    with poisoned_memory():
        out, lse = flashtile.attention_with_kvcache(
            q, cache, cache[..., :512], cache_seqlens=lengths, page_table=table, softmax_scale=SCALE, return_lse=True,
            backend=backend,
        )  # fmt: skip

    def by_definition(dtype: torch.dtype) -> dict[str, Tensor]:
        made = [
            _attended(*(x[start : start + _AT_ONCE] for x in (q, table, is_key)), rows, dtype)
            for start in range(0, batch, _AT_ONCE)
        ]
        outs, lses = zip(*made, strict=True)
        return {"out": torch.cat(outs), "lse": torch.cat(lses)}

    assert_close(
        {"out": out, "lse": lse}, lambda: by_definition(torch.float64), by_definition(torch.bfloat16), torch.bfloat16
    )


def _attended(q: Tensor, table: Tensor, is_key: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (sequences, 1, heads, 512) and lse (sequences, heads, 1) of some sequences, by the formula in a dtype."""
    own = rows[:, 0, 0][torch.where(is_key, table, 0).long()].masked_fill(~is_key[..., None], 0.0).to(dtype)
    scores = (q[:, 0].to(dtype) @ own.mT) * SCALE
    scores = scores.masked_fill(~is_key[:, None], -torch.inf)
    has_keys = is_key.any(-1)[:, None, None]
    # Without keys a row is 0, and its lse -inf.
    probs = torch.where(has_keys, scores, 0.0).softmax(-1)
    out = torch.where(has_keys, probs @ own[..., :512], 0.0)
    lse = torch.where(has_keys[..., 0], torch.where(has_keys, scores, 0.0).logsumexp(-1), -torch.inf)
    return out[:, None], lse[..., None]
