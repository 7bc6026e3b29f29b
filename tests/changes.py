"""PyTorch's block masks that change between calls, and what their fields say, by definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

import flashtile
from flashtile.compat.flex_attention import create_block_mask

MAKERS: dict[str, Callable[..., Any]] = {"pytorch": pytorch.create_block_mask, "compat": create_block_mask}
ROWS, KEYS, SIZE = 50, 70, (16, 32)


class Reach:
    """A mask function of a distance that is a tensor."""

    def __init__(self, distance: int) -> None:
        with torch.inference_mode(False):  # autograd saves what functions read
            self.distance = torch.tensor([distance])

    def function(self) -> Callable[..., Any]:
        """The function."""
        distance = self.distance
        return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= distance[0] + b + 2 * h


def made(maker: str, distance: int = 20, groups: tuple[int, int] = (2, 1)) -> tuple[Any, Reach]:
    """A mask and what its function reads."""
    reach = Reach(distance)
    return MAKERS[maker](reach.function(), *groups, ROWS, KEYS, device="cpu", BLOCK_SIZE=SIZE), reach


def _other_items(mask: Any) -> Tensor:
    """Other blocks, none of which a list of full ones has too."""
    mask.full_kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    mask.full_kv_indices = torch.zeros_like(mask.kv_indices)
    flipped: Tensor = mask.kv_indices.flip(-1)
    return flipped


def _assign(**fields: Callable[[Any], Any]) -> Callable[[Any, Reach], None]:
    def change(mask: Any, reach: Reach) -> None:
        for name, value in fields.items():
            setattr(mask, name, value(mask))

    return change


# What programs do to a mask between two calls.
CHANGES: dict[str, Callable[[Any, Reach], Any]] = {
    "function": _assign(mask_mod=lambda mask: Reach(5).function()),
    "no function": _assign(mask_mod=lambda mask: pytorch.noop_mask),
    "captured tensor": lambda mask, reach: reach.distance.sub_(9),
    "counts": _assign(kv_num_blocks=lambda mask: mask.kv_num_blocks.clamp(max=1)),
    "counts in place": lambda mask, reach: mask.kv_num_blocks.clamp_(max=1),
    "counts by a view": lambda mask, reach: mask.kv_num_blocks[:, :, 1:2].zero_(),
    "items": _assign(kv_indices=_other_items),
    "items in place": lambda mask, reach: mask.kv_indices.copy_(_other_items(mask)),
    "full counts in place": lambda mask, reach: (
        None if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.zero_()
    ),
    "no full blocks": _assign(full_kv_num_blocks=lambda mask: None, full_kv_indices=lambda mask: None),
    "lengths": _assign(seq_lengths=lambda mask: (ROWS - 1, KEYS - 2)),
    "block size": _assign(BLOCK_SIZE=lambda mask: (14, 30)),
}


def kept(mask: Any, batch: int, heads: int) -> Tensor:
    """The pairs that a mask's fields keep, ``(batch, heads, rows, keys)`` bool."""
    (rows, keys), (of_rows, of_keys) = mask.seq_lengths, mask.BLOCK_SIZE
    index = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, rows, keys)), indexing="ij")
    said = torch.as_tensor(mask.mask_mod(*index))
    keep = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    for counts, items, is_full in (
        (mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):  # fmt: skip
        for b, h, m in [] if counts is None else torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            for n in items[b, h, m, : counts[b, h, m]].tolist():
                of = (slice(None) if size == 1 else i for size, i in zip(counts.shape, (b, h), strict=False))
                block = *of, slice(m * of_rows, (m + 1) * of_rows), slice(n * of_keys, (n + 1) * of_keys)
                keep[block] = True if is_full else said.expand_as(keep)[block]
    return keep


def check(mask: Any, qkv: tuple[Tensor, Tensor, Tensor], call: Callable[..., Tensor] = flashtile.attention) -> None:
    """Compares a call with the mask with one that has the pairs as booleans, gradients too."""
    rows, keys = mask.seq_lengths
    leaves = [x.detach()[:, :n].requires_grad_() for x, n in zip(qkv, (rows, keys, keys), strict=True)]
    found = []
    for out in (
        call(*leaves, block_mask=mask),
        flashtile.attention(*leaves, attn_mask=kept(mask, len(qkv[0]), qkv[0].shape[2])),
    ):
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def inputs(batch: int = 2, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call."""
    make = torch.Generator().manual_seed(5)
    shapes = (batch, ROWS, heads, 8), (batch, KEYS, 1, 8), (batch, KEYS, 1, 8)
    q, k, v = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes)
    return q, k, v
