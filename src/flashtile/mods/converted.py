"""PyTorch's ``BlockMask`` as ours: converted where it is first used, and again once it has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.core.errors import InvalidInputError
from flashtile.mods.block_mask import FULL, PARTIAL, BlockMask, of_kinds

_THEIRS = "torch.nn.attention.flex_attention"


def lists_of(block_mask: Any) -> BlockMask:
    """Lists from what a caller gives: ours, or PyTorch's, which is converted.

    What PyTorch's becomes is kept with it as long as its lists are the same tensors, at the same versions. So it is
    made anew for tensors without versions, made in inference mode; and where a CUDA graph is captured or code traced,
    so that what runs again follows the lists.

    Raises:
        InvalidInputError: It is neither.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask
    if not _is_torchs(block_mask):
        must = "must be made by flashtile.masks or create_block_mask, or be PyTorch's BlockMask, or None"
        raise InvalidInputError("block_mask", f"is of type {type(block_mask).__name__}, {must}")
    if torch.compiler.is_compiling():
        return _converted(block_mask)
    read = _read_of(block_mask)
    if read is None or _is_recorded(block_mask.kv_num_blocks):
        return _converted(block_mask)
    kept = vars(block_mask).get("_flashtile")
    if kept is None or not kept.holds(read):
        with torch.inference_mode(False):  # whose tensors autograd could not save for a backward
            kept = _Kept(read, block_mask.mask_mod, _converted(block_mask))
        if kept.lists.row_items.is_cuda:
            # The next call may be on another stream.
            torch.cuda.current_stream(kept.lists.row_items.device).synchronize()
        block_mask._flashtile = kept
    now = kept.with_function(block_mask.mask_mod)
    if now is not kept:
        block_mask._flashtile = now
    return now.lists  # type: ignore[no-any-return]


def keep(block_mask: Any, lists: BlockMask) -> None:
    """Keeps with PyTorch's mask the lists that it was made of."""
    read = _read_of(block_mask)
    if read is not None:
        reads = _reads_of(block_mask.mask_mod) if lists.has_bits else None
        block_mask._flashtile = _Kept(read, block_mask.mask_mod, lists, reads)


class _Read(NamedTuple):
    """What a conversion reads: lists, their versions, and sizes."""

    lists: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    sizes: tuple[Any, Any]


class _Kept(NamedTuple):
    """What PyTorch's mask has become.

    Attributes:
        read: What of it was read.
        mask_mod: The function that it had.
        lists: The mask.
        reads: What the function read when bits were made of it, see ``_reads_of``.
    """

    read: _Read
    mask_mod: Any
    lists: BlockMask
    reads: Any = None

    def holds(self, now: _Read) -> bool:
        """Whether lists and sizes are those that were read."""
        old = self.read
        same = all(x is y for x, y in zip(old.lists, now.lists, strict=True))
        return same and old.versions == now.versions and old.sizes == now.sizes

    def with_function(self, mask_mod: Any) -> _Kept:
        """The same of the function that the mask has now, without bits of what another one said, or this one once."""
        lists = self.lists
        if mask_mod is not self.mask_mod:
            lists = replace(lists, mask_mod=_function_of(mask_mod), has_bits=False)
        elif lists.has_bits and not _is_same(self.reads, _reads_of(mask_mod)):
            lists = replace(lists, has_bits=False)
        return self if lists is self.lists else self._replace(mask_mod=mask_mod, lists=lists, reads=None)


def _is_torchs(block_mask: Any) -> bool:
    """Without importing PyTorch's module, which takes long: who has such a mask has imported it."""
    module = sys.modules.get(_THEIRS)
    return module is not None and isinstance(block_mask, module.BlockMask)


def _function_of(mask_mod: Any) -> Callable[..., Any] | None:
    """PyTorch's function of a mask that has none is none here."""
    return None if mask_mod is sys.modules[_THEIRS].noop_mask else mask_mod  # type: ignore[no-any-return]


def _read_of(mask: Any) -> _Read | None:
    """None if some list has no version."""
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    try:
        versions = tuple([x._version for x in lists if x is not None])
    except RuntimeError:
        return None
    return _Read(lists, versions, (mask.BLOCK_SIZE, mask.seq_lengths))


def _is_recorded(x: Tensor) -> bool:
    """Whether what is computed of a tensor now stands for something else, or runs again later."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return bool(modes) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _reads_of(mask_mod: Callable[..., Any]) -> tuple[Any, list[Tensor]] | None:
    """What a function is and reads, by value, and tensors with their places in memory and versions; None without."""
    from flashtile.mods.record import lowered  # what few programs need is not loaded by all

    read = lowered(mask_mod, "mask_mod", "mask", False)
    try:
        places = [(x.data_ptr(), x.dtype, x.shape, x.stride(), x._version) for x in read.operands]
    except RuntimeError:
        return None
    return (read.text, read.numbers, places), list(read.operands)


def _is_same(old: tuple[Any, list[Tensor]] | None, now: tuple[Any, list[Tensor]] | None) -> bool:
    """What was read is kept alive meanwhile, so that no other tensor has its place."""
    return old is not None and now is not None and old[0] == now[0]


def _converted(mask: Any) -> BlockMask:
    """PyTorch's mask as ours, without waiting for the device."""
    size, (rows, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    block_size = (size, size) if isinstance(size, int) else (size[0], size[1])
    first = _four(mask.kv_num_blocks, 3)
    most = -(-keys // block_size[1])
    # What is listed beyond the keys, or not at all, goes to a column that is cut off.
    kinds = torch.zeros(*first.shape, most + 1, dtype=torch.int8, device=first.device)
    for num_blocks, indices, kind in (
        (mask.kv_num_blocks, mask.kv_indices, PARTIAL), (mask.full_kv_num_blocks, mask.full_kv_indices, FULL),
    ):  # fmt: skip
        if num_blocks is not None:
            counts, items = _four(num_blocks, 3), _four(indices, 4)
            if counts.shape != first.shape or counts.shape != items.shape[:-1]:
                shapes = f"{tuple(num_blocks.shape)} and {tuple(indices.shape)}"
                raise InvalidInputError("block_mask", f"has lists of shapes {shapes}, which do not fit one another")
            there = torch.arange(items.shape[-1], device=items.device) < counts[..., None]
            kinds = kinds.scatter(-1, torch.where(there & (items < most), items, most).long(), kind)
    return of_kinds(kinds[..., :most], block_size, (rows, keys), _function_of(mask.mask_mod))


def _four(x: Tensor, dims: int) -> Tensor:
    return x[(None,) * (dims - x.dim())]
