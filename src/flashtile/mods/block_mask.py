"""``BlockMask``: which blocks of rows and keys a mask keeps, listed for each block of rows and for each block of keys.

A list is sorted, of partial blocks first, in which the mask's function decides about each pair, then of full ones,
which need no function. Blocks that are not listed hold no kept pair. Memory follows the blocks that are listed.

Behind its blocks a list may have what the function kept of each partial one, a bit a pair: see ``with_bits``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.core.samples import BySample

PARTIAL, FULL = 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask(BySample):
    """What ``flashtile.create_block_mask`` makes, and PyTorch's ``BlockMask`` becomes.

    ``mask[b]`` and ``mask[first:stop]`` are the masks of some samples, with the same lists, but without bits.

    Attributes:
        row_blocks: ``(B, H, blocks_q, 3)`` int32: of each block of rows where its list begins in ``row_items``, where
            the full blocks begin, and where it ends. B and H may be 1 for all sequences and heads.
        row_items: int32, the blocks of keys, and some numbers more; ``with_bits`` says what it adds.
        key_blocks: ``(B, H, blocks_k, 3)``: the same of each block of keys, for gradients.
        key_items: int32, the blocks of rows.
        block_size: Rows and keys of a block.
        lengths: Rows and keys of the mask.
        mask_mod: Decides in partial blocks; None keeps all of them.
        has_bits: Whether bits say what it decided.
    """

    row_blocks: Tensor
    row_items: Tensor
    key_blocks: Tensor
    key_items: Tensor
    block_size: tuple[int, int]
    lengths: tuple[int, int]
    mask_mod: Callable[..., Any] | None
    has_bits: bool = False

    @property
    def listed(self) -> tuple[int, ...]:
        """``Options.listed`` of its calls."""
        return (*self.block_size, 1) if self.has_bits else self.block_size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, rows, keys)."""
        return (*self.row_blocks.shape[:2], *self.lengths)

    def sparsity(self) -> float:
        """The share of blocks that are left out, in percent, as of PyTorch's; waits for the device."""
        groups = self.row_blocks.flatten(0, -2)
        total = groups.shape[0] * self.key_blocks.shape[2]
        return 100.0 * (1 - int((groups[:, 2] - groups[:, 0]).sum()) / total) if total else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on a device; what its function captures stays where it is."""
        names = ("row_blocks", "row_items", "key_blocks", "key_items")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def batch(self) -> int:
        """Samples that the mask differs in, 1 if all share it."""
        return self.row_blocks.shape[0]

    def _some(self, first: int, stop: int) -> BlockMask:
        """Of the same items, without bits, which lie where their lists' numbers say."""
        mod, lists = self.mask_mod, (self.row_blocks[first:stop], self.key_blocks[first:stop])
        mod = mod if mod is None or not first else _from_sample(mod, first)
        return replace(self, row_blocks=lists[0], key_blocks=lists[1], mask_mod=mod, has_bits=False)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Which blocks are partial, and which are full: ``(B, H, blocks_q, blocks_k)`` bool; waits for the device."""
        start, full_start, stop = self.row_blocks.long().flatten(0, -2).T.contiguous()
        # Of lists made in compiled code no length is asked for; there bits may lie behind the lists.
        is_traced = torch.compiler.is_compiling()
        items = self.row_items if is_traced or not len(stop) else self.row_items[: int(stop[-1])]
        at, most = torch.arange(len(items), device=items.device), self.key_blocks.shape[2]
        owner = (torch.searchsorted(start, at, right=True) - 1).clamp(min=0)
        kind = torch.where(at < full_start[owner], PARTIAL, FULL)
        # What lies between lists goes to a column that is cut off.
        item = torch.where((start[owner] <= at) & (at < stop[owner]), items, most).long()
        found = torch.zeros(len(start), most + 1, dtype=torch.int64, device=items.device)
        found = found.index_put((owner, item), kind)[:, :most].view(*self.row_blocks.shape[:3], most)
        return found == PARTIAL, found == FULL


def _from_sample(mask_mod: Callable[..., Any], first: int) -> Callable[..., Any]:
    """A function of samples that are counted from a later one on."""

    def later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + first, h, q_idx, kv_idx)

    return later


def with_bits(mask: BlockMask, store: Callable[[Tensor, Tensor, bool], None]) -> BlockMask:
    """The mask with bits of its partial blocks, which kernels read in place of its function.

    ``row_items`` and ``key_items`` then have a number for each list, where its bits begin, before the blocks, and bits
    behind them, block by block, in the order of threads of a WGMMA accumulator: of each 128 elements of the other side
    four numbers for each of this one, the n-th of columns c with c // 2 % 4 = n, at bit c // 8 * 2 + c % 2.

    Args:
        mask: Of blocks that 128 divides.
        store: Stores the bits of blocks (group, of this side, of the other), int32, whether this side is that of keys.
    """
    made: dict[str, Any] = {}
    words = mask.block_size[0] * mask.block_size[1] // 32
    for side in ("row", "key"):
        ranges, items = getattr(mask, f"{side}_blocks"), getattr(mask, f"{side}_items")
        bounds, device = ranges.long().flatten(0, -2), items.device
        counts = bounds[:, 1] - bounds[:, 0]
        before = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(torch.arange(len(bounds), device=device), counts)
        at = torch.arange(len(owner), device=device) - before[owner] + bounds[owner, 0]
        blocks = torch.stack((owner // ranges.shape[2], owner % ranges.shape[2], items[at].long()), -1).int()
        # A launch takes its pointers for multiples of 16 bytes.
        first = -(-(len(bounds) + len(items)) // 4) * 4
        joined = torch.empty(first + _room(len(owner)) * words, dtype=torch.int32, device=device)
        joined[: len(bounds)] = first + before * words
        joined[len(bounds) : len(bounds) + len(items)] = items
        if len(owner):
            store(joined[first:], blocks, side == "key")
        made |= {f"{side}_blocks": ranges + len(bounds), f"{side}_items": joined}
    return replace(mask, **made, has_bits=True)


def _room(count: int) -> int:
    """Of few sizes, so that plans of calls are found again with another mask."""
    return 1 << max(count - 1, 0).bit_length()


class Entries(NamedTuple):
    """Listed blocks, a number each: ``b * H + h``, block of rows, block of keys, ``PARTIAL`` or ``FULL``; int64."""

    group: Tensor
    row: Tensor
    key: Tensor
    kind: Tensor


def listed(
    entries: Entries,
    groups: tuple[int, int],
    block_size: tuple[int, int],
    lengths: tuple[int, int],
    mask_mod: Callable[..., Any] | None,
) -> BlockMask:
    """The mask of listed blocks, in any order; groups: B and H."""
    rows, keys = (-(-length // block) for length, block in zip(lengths, block_size, strict=True))
    group, row, key, kind = entries
    by_row = _lists(group * rows + row, key, kind, (*groups, rows), keys)
    by_key = _lists(group * keys + key, row, kind, (*groups, keys), rows)
    return BlockMask(*by_row, *by_key, block_size, lengths, mask_mod)


def _lists(owner: Tensor, item: Tensor, kind: Tensor, shape: tuple[int, int, int], most: int) -> tuple[Tensor, Tensor]:
    """Bounds of each owner's list, ``(*shape, 3)``, and all lists one after another."""
    part = 2 * owner + (kind == FULL)
    order = torch.argsort(part * most + item)
    counts = torch.bincount(part, minlength=2 * shape[0] * shape[1] * shape[2])
    stops = counts.cumsum(0).view(*shape, 2)
    starts = stops[..., 0] - counts.view(*shape, 2)[..., 0]
    items = torch.zeros(_room(len(item)), dtype=torch.int32, device=item.device)
    items[: len(item)] = item[order]
    return torch.stack((starts, stops[..., 0], stops[..., 1]), dim=-1).int(), items


def of_kinds(
    kinds: Tensor, block_size: tuple[int, int], lengths: tuple[int, int], mask_mod: Callable[..., Any] | None
) -> BlockMask:
    """The mask of blocks that are 0, ``PARTIAL`` or ``FULL``, ``(B, H, blocks_q, blocks_k)`` int8.

    Its lists have room for all blocks. So no length depends on data: nothing waits for the device, and torch.compile
    and CUDA graphs can follow.
    """
    return BlockMask(*_with_room(kinds), *_with_room(kinds.mT), block_size, lengths, mask_mod)


def _with_room(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_lists``, each list at a place of its own."""
    *shape, most = kinds.shape
    # A stable sort leaves the blocks of a kind in order.
    items = torch.where(kinds == 0, FULL + 1, kinds).sort(dim=-1, stable=True).indices.int().flatten()
    start = (torch.arange(math.prod(shape), device=kinds.device) * most).view(shape)
    full_start, stop = start + (kinds == PARTIAL).sum(-1), start + (kinds != 0).sum(-1)
    return torch.stack((start, full_start, stop), dim=-1).int(), items if len(items) else items.new_zeros(1)
