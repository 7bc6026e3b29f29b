"""``create_block_mask``: which blocks a mask function keeps, found tile by tile on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.call.arguments import integer
from flashtile.call.functions import Function
from flashtile.call.problem import compute_capability
from flashtile.core.errors import InvalidInputError, shown
from flashtile.mods.block_mask import PARTIAL, BlockMask, Entries, listed, of_kinds, with_bits
from flashtile.mods.graph import parse
from flashtile.mods.record import lowered
from flashtile.ops.lists import has_triton, kinds_of

# Blocks that a launch looks at, a byte each.
_MOST_BLOCKS = 2**26
# Bytes of bits of partial blocks: 65,536 of 128 rows and keys, each in the lists of its rows and of its keys.
_MOST_BYTES = 2**28


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The blocks that a mask function keeps, as ``block_mask`` of ``attention``.

    As PyTorch's function of this name, but no matrix of all pairs is ever made: on GPUs a kernel counts the kept pairs
    of each block. It waits for the device. In compiled code it waits for nothing: lists then have room for all blocks,
    and no bits.

    The mask is what the function says now: what that captures must stay as it is while the mask is used. On Hopper,
    where 128 divides the blocks, pairs of those kept in part have bits, 4 KiB a block of 128 rows and keys, and no call
    asks the function again. Where they would take more than 256 MiB, and elsewhere, calls ask it.

    Args:
        mask_mod: ``f(b, h, q_idx, kv_idx)``, see ``attention``. It goes with the mask.
        B: Sequences that the mask differs in; None or 1 for one that all share.
        H: The same of query heads.
        Q_LEN: Rows.
        KV_LEN: Keys.
        device: Where; by default the device of a tensor that the function captures, or else the GPU if there is one.
        BLOCK_SIZE: Rows and keys of a block, or one number for both. Kernels' tiles are no larger.

    Returns:
        The mask, with its function for blocks that are kept in part.

    Raises:
        InvalidInputError: A ValueError that names the argument.
    """
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2:
        raise InvalidInputError("BLOCK_SIZE", f"is {shown(BLOCK_SIZE)}, must be a number or two: rows and keys")
    block_size = integer("BLOCK_SIZE", sizes[0]), integer("BLOCK_SIZE", sizes[1])
    groups = (1 if B is None else integer("B", B)), (1 if H is None else integer("H", H))
    lengths = integer("Q_LEN", Q_LEN, 0), integer("KV_LEN", KV_LEN, 0)
    read = lowered(mask_mod, "mask_mod", "mask", False)
    place = _device(device, read.operands)
    operands = tuple([x.to(place) if x.dim() == 0 else x for x in read.operands])
    for x in operands:
        if x.device.type != place.type:
            raise InvalidInputError("mask_mod", f"reads a tensor on {x.device}, but the mask is made on {place}")
    if torch.compiler.is_compiling():
        # Lists as long as their blocks are many have a length that depends on data.
        given = [x.detach() for x in operands], read.numbers, read.text, groups, lengths, block_size
        kinds = torch.ops.flashtile.block_kinds(torch.empty(0, device=place), *given)
        return of_kinds(kinds, block_size, lengths, mask_mod)
    function = Function(parse(read.text), operands, read.numbers, 0) if read.text else None
    parts = list(_entries(function, groups, lengths, block_size, place))
    entries = Entries(*map(torch.cat, zip(*parts, strict=True)))
    mask = listed(entries, groups, block_size, lengths, mask_mod)
    if function is None or not _takes_bits(place) or block_size[0] % 128 or block_size[1] % 128:
        return mask
    if int((entries.kind == PARTIAL).sum()) * block_size[0] * block_size[1] // 4 > _MOST_BYTES:
        return mask
    from flashtile.backends.portable.lists import store_bits

    return with_bits(mask, functools.partial(store_bits, function, groups[1], lengths, block_size))


def _takes_bits(place: torch.device) -> bool:
    """Whether the device has kernels that read them."""
    return compute_capability(place) == (9, 0) and has_triton()


def _device(given: torch.device | str | None, operands: tuple[Tensor, ...]) -> torch.device:
    if given is not None:
        return torch.device(given)
    return next((x.device for x in operands if x.dim()), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _entries(
    function: Function | None,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    device: torch.device,
) -> Iterator[Entries]:
    """The listed blocks, of some blocks of rows after others."""
    rows, keys = (-(-length // block) for length, block in zip(lengths, block_size, strict=True))
    step = max(1, _MOST_BLOCKS // max(groups[0] * groups[1] * keys, 1))
    for first in range(0, max(rows, 1), step):
        found = kinds_of(function, groups, lengths, block_size, (first, min(first + step, rows)), device)
        group, row, key = found.nonzero(as_tuple=True)
        yield Entries(group, row + first, key, found[group, row, key].long())
