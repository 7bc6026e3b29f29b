"""Calls on GPUs with lists for fewer than 16 rows: heads that share a list become the rows of its block.

Kernels multiply 16 rows at least. A group of query heads that shares a key head may share its lists too (NSA: a list
for each position and key head): then the call is one of as many heads as there are key heads, where a position has a
row for each head of its group. Its queries are copied, and so is its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashtile.api.keywords import Asked
from flashtile.call.arguments import Options, Tensors
from flashtile.mods.block_mask import BlockMask
from flashtile.mods.converted import lists_of

# Rows of the smallest tile.
LEAST = 16


def folds(block_mask: object, t: Tensors, asked: Asked) -> bool:
    """Whether a dense call on a GPU, of plain scores, has lists for too few rows that groups of heads share."""
    mask, q, k, plain = lists_of(block_mask), t.q, t.k, asked.plain
    if mask.block_size[0] % LEAST == 0 or mask.mask_mod is not None or q.device.type == "cpu":
        return False
    given = t.alibi_slopes, t.attn_mask, t.attn_bias, t.sinks, asked.precision, plain.attention_chunk, *asked.functions
    if any(x is not None for x in given) or plain.dropout_p or q.dim() != 4 or k.dim() != 4 or not k.shape[2]:
        return False
    return mask.row_blocks.shape[1] in (1, k.shape[2]) and q.shape[2] % k.shape[2] == 0


def attend(attention: Callable[..., Any], block_mask: object, t: Tensors, asked: Asked) -> Any:
    """The call, by one of key heads.

    Args:
        attention: The public function.
        block_mask: The call's lists.
        t: Its tensors.
        asked: What else it is.
    """
    group, plain = t.q.shape[2] // t.k.shape[2], asked.plain
    q, mask, rows = folded(lists_of(block_mask), t.q, t.k, asked.read(t))
    found = attention(
        q, t.k, t.v, block_mask=mask, softmax_scale=plain.softmax_scale, softcap=plain.softcap,
        deterministic=plain.deterministic, backend=plain.backend, return_lse=asked.return_lse,
        return_max_scores=plain.return_max_scores,
    )  # fmt: skip
    if not (asked.return_lse or plain.return_max_scores):
        return _out_of(found, rows, group)
    return _out_of(found[0], rows, group), *(_numbers_of(x, rows, group) for x in found[1:])


def folded(mask: BlockMask, q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, BlockMask, int]:
    """The queries and the mask of the call of key heads, and how many rows it has for each position.

    Those are the heads of a group, and as many more as make whole tiles of a block. The mask has the call's band.

    Args:
        mask: The lists.
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, made into ``(batch, seqlen_q * rows, num_heads_kv, head_dim)``.
        k: The keys.
        options: The call's, for its band.
    """
    rows = q.shape[2] // k.shape[2]
    while rows * mask.block_size[0] % LEAST:
        rows += 1
    by_group = q.unflatten(2, (k.shape[2], -1)).transpose(2, 3)
    by_group = functional.pad(by_group, (0, 0, 0, 0, 0, rows - by_group.shape[2])).flatten(1, 2)
    size, lengths = (mask.block_size[0] * rows, mask.block_size[1]), (mask.lengths[0] * rows, mask.lengths[1])
    made, left, right = replace(mask, block_size=size, lengths=lengths), options.window_left, options.window_right
    if left is None and right is None:
        return by_group, made, rows
    # The function is asked in all blocks.
    ends: dict[str, Any] = {f"{side}_blocks": _all_partial(getattr(mask, f"{side}_blocks")) for side in ("row", "key")}
    return by_group, replace(made, **ends, mask_mod=_within(rows, k.shape[1] - q.shape[1], left, right)), rows


def _out_of(out: Tensor, rows: int, group: int) -> Tensor:
    """``(batch, seqlen_q * rows, num_heads_kv, head_dim_v)`` by query heads."""
    return out.unflatten(1, (-1, rows))[:, :, :group].transpose(2, 3).flatten(2, 3)


def _numbers_of(lse: Tensor, rows: int, group: int) -> Tensor:
    """``(batch, num_heads_kv, seqlen_q * rows)`` by query heads."""
    return lse.unflatten(2, (-1, rows))[..., :group].transpose(2, 3).flatten(1, 2)


def _all_partial(bounds: Tensor) -> Tensor:
    return torch.stack((bounds[..., 0], bounds[..., 2], bounds[..., 2]), dim=-1)


def _within(rows: int, shift: int, left: int | None, right: int | None) -> Callable[..., Any]:
    """The band as a function of rows, ``rows`` for each position."""

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position = q_idx // rows + shift
        kept: Any = True
        if right is not None:
            kept = kv_idx <= position + right
        return kept if left is None else (kv_idx >= position - left) & kept

    return keeps
