"""Converts PyTorch's ``BlockMask`` to ours at its first use, and again after it has changed."""

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
    """The lists of a caller's mask: ours, or PyTorch's, which is converted.

    The converted mask is kept with PyTorch's mask as long as its lists are the same tensors at the same versions. It is
    made again each time for tensors without versions, which are made in inference mode; and while a CUDA graph is
    captured or code is traced, so that later runs follow the lists.

    Raises:
        InvalidInputError: The mask is neither ours nor PyTorch's.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask
    if not _is_torchs(block_mask):
        own = __name__.partition(".")[0]  # a kernel of the hub is a package of another name, with classes of its own
        must = f"must be made by {own}.masks or {own}.create_block_mask, or be PyTorch's BlockMask, or None"
        raise InvalidInputError("block_mask", f"is of type {type(block_mask).__name__}, {must}")
    if torch.compiler.is_compiling():
        return _converted(block_mask)
    read = _read_of(block_mask)
    if read is None or _is_recorded(block_mask.kv_num_blocks):
        return _converted(block_mask)
    kept = vars(block_mask).get("_flashtile")
    if kept is None or not kept.holds(read):
        with torch.inference_mode(False):  # autograd could not save tensors made in inference mode for a backward
            kept = _KeptLists(read, block_mask.mask_mod, _converted(block_mask))
        if kept.lists.row_items.is_cuda:
            # The next call may be on another stream.
            torch.cuda.current_stream(kept.lists.row_items.device).synchronize()
        block_mask._flashtile = kept
    now = kept.with_function(block_mask.mask_mod)
    if now is not kept:
        block_mask._flashtile = now
    return now.lists  # type: ignore[no-any-return]


def keep(block_mask: Any, lists: BlockMask) -> None:
    """Keeps with PyTorch's mask our lists, from which it was made."""
    read = _read_of(block_mask)
    if read is not None:
        reads = _reads_of(block_mask.mask_mod) if lists.has_bits else None
        block_mask._flashtile = _KeptLists(read, block_mask.mask_mod, lists, reads)


class _Read(NamedTuple):
    """The inputs of a conversion: lists, their versions, and sizes."""

    lists: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    sizes: tuple[Any, Any]


class _KeptLists(NamedTuple):
    """The conversion of PyTorch's mask.

    Attributes:
        read: The inputs that were read.
        mask_mod: The mask's function at that time.
        lists: Our mask.
        reads: The tensors that the function read when bits were made, see ``_reads_of``.
    """

    read: _Read
    mask_mod: Any
    lists: BlockMask
    reads: Any = None

    def holds(self, now: _Read) -> bool:
        """Whether lists and sizes are the ones that were read."""
        old = self.read
        same = all(x is y for x, y in zip(old.lists, now.lists, strict=True))
        return same and old.versions == now.versions and old.sizes == now.sizes

    def with_function(self, mask_mod: Any) -> _KeptLists:
        """The same lists with the mask's present function, without bits of another function or of earlier values."""
        lists = self.lists
        if mask_mod is not self.mask_mod:
            lists = replace(lists, mask_mod=_function_of(mask_mod), has_bits=False)
        elif lists.has_bits and not _is_same(self.reads, _reads_of(mask_mod)):
            lists = replace(lists, has_bits=False)
        return self if lists is self.lists else self._replace(mask_mod=mask_mod, lists=lists, reads=None)


def _is_torchs(block_mask: Any) -> bool:
    """Whether a mask is PyTorch's. The slow import of its module is not needed: a mask exists only after it."""
    module = sys.modules.get(_THEIRS)
    return module is not None and isinstance(block_mask, module.BlockMask)


def _function_of(mask_mod: Any) -> Callable[..., Any] | None:
    """A mask's function; None for PyTorch's placeholder of a mask without a function."""
    return None if mask_mod is sys.modules[_THEIRS].noop_mask else mask_mod  # type: ignore[no-any-return]


def _read_of(mask: Any) -> _Read | None:
    """The inputs of a conversion; None if some list has no version."""
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    try:
        versions = tuple([x._version for x in lists if x is not None])
    except RuntimeError:
        return None
    return _Read(lists, versions, (mask.BLOCK_SIZE, mask.seq_lengths))


def _is_recorded(x: Tensor) -> bool:
    """Whether computations on a tensor are now traced, or recorded to run again later."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return bool(modes) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _reads_of(mask_mod: Callable[..., Any]) -> tuple[Any, list[Tensor]] | None:
    """A function's key and numbers, and its tensors with their addresses and versions; None if it is not watched."""
    from flashtile.mods.record import lowered  # what few programs need is not loaded by all

    read = lowered(mask_mod, "mask_mod", "mask", False)
    try:
        places = [(x.data_ptr(), x.dtype, x.shape, x.stride(), x._version) for x in read.operands]
    except RuntimeError:
        return None
    return (read.text, read.numbers, places), list(read.operands)


def _is_same(old: tuple[Any, list[Tensor]] | None, now: tuple[Any, list[Tensor]] | None) -> bool:
    """Whether a function reads the same. The old tensors are kept alive, so no other tensor has their address."""
    return old is not None and now is not None and old[0] == now[0]


def _converted(mask: Any) -> BlockMask:
    """PyTorch's mask as ours, without waiting for the device."""
    size, (rows, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    block_size = (size, size) if isinstance(size, int) else (size[0], size[1])
    first = _four(mask.kv_num_blocks, 3)
    most = -(-keys // block_size[1])
    # Blocks beyond the keys, and places without a block, go to a column that is cut off.
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
