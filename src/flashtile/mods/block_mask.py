"""``BlockMask``: the blocks of rows and keys that a mask keeps, listed for each block of rows and each block of keys.

A list is sorted. Partial blocks come first: in these the mask's function decides about each pair. Full blocks follow,
which need no function. Blocks that are not listed hold no kept pair. Memory grows with the number of listed blocks.

After the blocks there may be bits, one for each pair of a partial block that the function keeps: see ``with_bits``.
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
    """The result of ``flashtile.create_block_mask``, and of converting PyTorch's ``BlockMask``.

    ``mask[b]`` and ``mask[first:stop]`` are the masks of some samples, with the same lists, but without bits.

    Attributes:
        row_blocks: ``(B, H, blocks_q, 3)`` int32: for each block of rows, where its list begins in ``row_items``, where
            the full blocks begin, and where it ends. B or H is 1 if all sequences or heads share the lists.
        row_items: int32, the blocks of keys, and further numbers if ``with_bits`` has added them.
        key_blocks: ``(B, H, blocks_k, 3)``: the same for each block of keys, for gradients.
        key_items: int32, the blocks of rows.
        block_size: Rows and keys of a block.
        lengths: The mask's rows and keys.
        mask_mod: The function that decides in partial blocks; None keeps all of them.
        has_bits: Whether the lists have bits with mask_mod's decisions.
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
        """``Options.listed`` for the mask's calls."""
        return (*self.block_size, 1) if self.has_bits else self.block_size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, rows, keys)."""
        return (*self.row_blocks.shape[:2], *self.lengths)

    def sparsity(self) -> float:
        """The percentage of blocks that are left out, as PyTorch's; waits for the device."""
        groups = self.row_blocks.flatten(0, -2)
        total = groups.shape[0] * self.key_blocks.shape[2]
        return 100.0 * (1 - int((groups[:, 2] - groups[:, 0]).sum()) / total) if total else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on a device. Tensors that its function captures stay where they are."""
        names = ("row_blocks", "row_items", "key_blocks", "key_items")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def batch(self) -> int:
        """The number of samples with masks of their own; 1 if all share one mask."""
        return self.row_blocks.shape[0]

    def _some(self, first: int, stop: int) -> BlockMask:
        """The mask of some samples, with the same items, but without bits: their places follow the number of lists."""
        mod, lists = self.mask_mod, (self.row_blocks[first:stop], self.key_blocks[first:stop])
        mod = mod if mod is None or not first else _from_sample(mod, first)
        return replace(self, row_blocks=lists[0], key_blocks=lists[1], mask_mod=mod, has_bits=False)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Booleans for partial blocks and for full ones, ``(B, H, blocks_q, blocks_k)`` each; waits for the device."""
        start, full_start, stop = self.row_blocks.long().flatten(0, -2).T.contiguous()
        # While code is traced no length is read; bits after the lists are then not cut off here.
        is_traced = torch.compiler.is_compiling()
        items = self.row_items if is_traced or not len(stop) else self.row_items[: int(stop[-1])]
        at, most = torch.arange(len(items), device=items.device), self.key_blocks.shape[2]
        owner = (torch.searchsorted(start, at, right=True) - 1).clamp(min=0)
        kind = torch.where(at < full_start[owner], PARTIAL, FULL)
        # Items between lists go to a column that is cut off.
        item = torch.where((start[owner] <= at) & (at < stop[owner]), items, most).long()
        found = torch.zeros(len(start), most + 1, dtype=torch.int64, device=items.device)
        found = found.index_put((owner, item), kind)[:, :most].view(*self.row_blocks.shape[:3], most)
        return found == PARTIAL, found == FULL


def _from_sample(mask_mod: Callable[..., Any], first: int) -> Callable[..., Any]:
    """A function that takes sample ``first`` as sample 0."""

    def later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + first, h, q_idx, kv_idx)

    return later


def with_bits(mask: BlockMask, store: Callable[[Tensor, Tensor, bool], None]) -> BlockMask:
    """The mask with bits for its partial blocks, which kernels read instead of calling its function.

    ``row_items`` and ``key_items`` then begin with one number for each list: the place where its bits begin. The blocks
    follow, and then the bits, block by block, in the order of threads of a WGMMA accumulator. Each 128 elements of the
    other side give four numbers for each element of this side: the n-th has the columns c with c // 2 % 4 = n, and
    column c is bit c // 8 * 2 + c % 2.

    Args:
        mask: A mask with blocks of multiples of 128.
        store: Stores bits into a tensor, for blocks (group, block of this side, block of the other side) int32; the
            last argument says whether this side is keys.
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
        # A launch assumes that its pointers are multiples of 16 bytes.
        first = -(-(len(bounds) + len(items)) // 4) * 4
        joined = torch.empty(first + _room(len(owner)) * words, dtype=torch.int32, device=device)
        joined[: len(bounds)] = first + before * words
        joined[len(bounds) : len(bounds) + len(items)] = items
        if len(owner):
            store(joined[first:], blocks, side == "key")
        made |= {f"{side}_blocks": ranges + len(bounds), f"{side}_items": joined}
    return replace(mask, **made, has_bits=True)


def _room(count: int) -> int:
    """A power of two that is at least ``count``: with few different sizes, plans serve other masks too."""
    return 1 << max(count - 1, 0).bit_length()


class Entries(NamedTuple):
    """Listed blocks, as int64: ``b * H + h``, block of rows, block of keys, and ``PARTIAL`` or ``FULL``."""

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
    """The mask of listed blocks, given in any order. ``groups`` is B and H."""
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


def selected_lists(indices: Tensor, counts: Tensor | None, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lists of a ``BlockMask`` that keeps all of the blocks of keys that each block of rows names, in any order.

    As with ``of_kinds``, no length depends on data. A block that is named again counts once, and what is no block of
    keys counts for nothing.

    Args:
        indices: ``(B, H, blocks_q, most)`` int32 or int64.
        counts: ``(B, H, blocks_q)`` int32 or int64: how many of each list's numbers count, the first ones; None for
            all.
        keys: Blocks of keys.

    Returns:
        row_blocks, row_items, key_blocks and key_items. The list of rows n has its place at ``n * most`` of row_items,
        which has ``keys`` at places without a block. The lists of a group's keys follow one another from the place of
        the group's first row in key_items; what the places between a group's last list and the next group contain
        says nothing.
    """
    *shape, most = indices.shape
    groups, rows, device = shape[0] * shape[1], shape[2], indices.device
    is_block = (indices >= 0) & (indices < keys)
    if counts is not None:
        is_block &= torch.arange(most, device=device) < counts[..., None]
    # ``keys`` stands for no block: it sorts last.
    found = torch.where(is_block, indices, keys).int().sort(dim=-1).values
    is_again = found[..., 1:] == found[..., :-1]
    found = torch.cat((found[..., :1], found[..., 1:].masked_fill(is_again, keys)), -1).sort(dim=-1).values
    start = (torch.arange(groups * rows, device=device) * most).view(shape)
    stop = start + (found < keys).sum(-1)
    row_blocks = torch.stack((start, start, stop), dim=-1).int()
    # Sorted by key and then by row, all groups at once.
    wide = torch.int32 if (keys + 1) * rows < 2**31 else torch.int64
    row = torch.arange(rows, device=device, dtype=wide)[:, None]
    by_key = (found.to(wide) * rows + row).flatten(2).sort(dim=-1).values
    firsts = torch.arange(keys + 1, device=device, dtype=wide) * rows
    bounds = torch.searchsorted(by_key, firsts.expand(*shape[:2], -1).contiguous())
    bounds = bounds + (torch.arange(groups, device=device) * (rows * most)).view(*shape[:2], 1)
    key_blocks = torch.stack((bounds[..., :-1], bounds[..., :-1], bounds[..., 1:]), dim=-1).int()
    items = [
        x.int().flatten() if x.numel() else x.new_zeros(1, dtype=torch.int32) for x in (found, by_key % max(rows, 1))
    ]
    return row_blocks, items[0], key_blocks, items[1]


def of_kinds(
    kinds: Tensor, block_size: tuple[int, int], lengths: tuple[int, int], mask_mod: Callable[..., Any] | None
) -> BlockMask:
    """The mask of blocks that are 0, ``PARTIAL`` or ``FULL``, ``(B, H, blocks_q, blocks_k)`` int8.

    Its lists have room for all blocks, so no length depends on data: nothing waits for the device, and torch.compile
        and
    CUDA graphs can follow.
    """
    return BlockMask(*_with_room(kinds), *_with_room(kinds.mT), block_size, lengths, mask_mod)


def _with_room(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_lists``, but each list has a fixed place with room for all blocks."""
    *shape, most = kinds.shape
    # A stable sort keeps the blocks of each kind in order.
    items = torch.where(kinds == 0, FULL + 1, kinds).sort(dim=-1, stable=True).indices.int().flatten()
    start = (torch.arange(math.prod(shape), device=kinds.device) * most).view(shape)
    full_start, stop = start + (kinds == PARTIAL).sum(-1), start + (kinds != 0).sum(-1)
    return torch.stack((start, full_start, stop), dim=-1).int(), items if len(items) else items.new_zeros(1)
