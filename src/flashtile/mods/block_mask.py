"""``BlockMask``: which blocks of rows and keys a mask keeps, listed for each block of rows and for each block of keys.

A list is sorted, of partial blocks first, in which the mask's function decides about each pair, then of full ones,
which need no function. Blocks that are not listed hold no kept pair. Memory follows the blocks that are listed.

Behind its blocks a list may have what the function kept of each partial one, a bit a pair: see ``with_bits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError

PARTIAL, FULL = 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """What ``flashtile.create_block_mask`` makes, and PyTorch's ``BlockMask`` becomes.

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

    def entries(self) -> Entries:
        """The listed blocks in the order of the rows' lists."""
        ranges = self.row_blocks.long()
        counts = ranges[..., 2] - ranges[..., 0]
        owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.flatten())
        at = torch.arange(owner.numel(), device=owner.device) + ranges.flatten()[:1]
        kind = torch.where(at < ranges.flatten(0, -2)[owner, 1], PARTIAL, FULL)
        return Entries(owner // counts.shape[2], owner % counts.shape[2], self.row_items[at].long(), kind)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Which blocks are partial, and which are full: ``(B, H, blocks_q, blocks_k)`` bool."""
        group, row, key, kind = self.entries()
        shape = (*self.row_blocks.shape[:3], self.key_blocks.shape[2])
        kinds = torch.zeros(shape, dtype=torch.int8, device=key.device)
        kinds.flatten(0, 1)[group, row, key] = kind.to(torch.int8)
        return kinds == PARTIAL, kinds == FULL

    def all_partial(self) -> BlockMask:
        """The mask with no block called full, so that the function decides about each pair."""
        entries = self.entries()
        entries = entries._replace(kind=torch.full_like(entries.kind, PARTIAL))
        groups = self.row_blocks.shape[0], self.row_blocks.shape[1]
        return listed(entries, groups, self.block_size, self.lengths, self.mask_mod)


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


def lists_of(block_mask: Any) -> BlockMask:
    """Lists from what a caller gives: ours, or PyTorch's, which is converted once.

    Raises:
        InvalidInputError: It is neither.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask
    if not _is_torchs(block_mask):
        must = "must be made by flashtile.masks or create_block_mask, or be PyTorch's BlockMask, or None"
        raise InvalidInputError("block_mask", f"is of type {type(block_mask).__name__}, {must}")
    found = vars(block_mask).get("_flashtile")
    if found is None:
        found = block_mask._flashtile = _converted(block_mask)
    return found  # type: ignore[no-any-return]


def _is_torchs(block_mask: Any) -> bool:
    """Without importing PyTorch's module, which takes long: who has such a mask has imported it."""
    of = type(block_mask)
    return any(each.__module__ == "torch.nn.attention.flex_attention" for each in of.__mro__)


def _converted(mask: Any) -> BlockMask:
    """PyTorch's mask as ours; waits for the device."""
    size = mask.BLOCK_SIZE
    block_size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    lengths = int(mask.seq_lengths[0]), int(mask.seq_lengths[1])
    parts = list(_entries_of(mask))
    entries = Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))
    groups = _four(mask.kv_num_blocks, 3).shape[:2]
    mask_mod = None if getattr(mask.mask_mod, "__name__", "") == "noop_mask" else mask.mask_mod
    return listed(entries, (groups[0], groups[1]), block_size, lengths, mask_mod)


def _entries_of(mask: Any) -> Iterator[Entries]:
    given = [(mask.kv_num_blocks, mask.kv_indices, PARTIAL), (mask.full_kv_num_blocks, mask.full_kv_indices, FULL)]
    for num_blocks, indices, kind in given:
        if num_blocks is None:
            continue
        counts, items = _four(num_blocks, 3), _four(indices, 4)
        there = torch.arange(items.shape[-1], device=items.device) < counts[..., None]
        b, h, row, _ = there.nonzero(as_tuple=True)
        yield Entries(b * there.shape[1] + h, row, items[there].long(), torch.full_like(b, kind))


def _four(x: Tensor, dims: int) -> Tensor:
    return x[(None,) * (dims - x.dim())]
