"""``create_block_mask`` and ``selected_blocks``: lists of blocks that a function keeps or data have chosen."""

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
from flashtile.core.sizes import holds
from flashtile.masks import check_integers
from flashtile.mods.block_mask import PARTIAL, BlockMask, Entries, listed, of_kinds, with_bits
from flashtile.mods.graph import parse
from flashtile.mods.record import lowered
from flashtile.ops import selected_lists
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


def selected_blocks(
    indices: Tensor,
    counts: Tensor | None = None,
    block_size: int | tuple[int, int] = 64,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
) -> BlockMask:
    """Blocks of keys that data have chosen for each block of rows: a ``block_mask`` of ``attention``.

    Rows of block i see the keys of the blocks ``indices[b, h, i]``; ``causal``, windows and lengths cut further. The
    order in which blocks are named is free. The lists are made on the device, for rows and for keys, which gradients
    need; nothing waits for it, so CUDA graphs and ``torch.compile`` can follow. Memory grows with ``indices``; GPUs
    use up to 128 MiB more while they make them.

    Args:
        indices: ``(batch or 1, heads, blocks_q, most)`` int32 or int64, with query heads, key heads or 1 for all:
            numbers of blocks of keys. A block that is named twice counts once; -1, and what is past the last block,
            counts for nothing.
        counts: ``(batch or 1, heads, blocks_q)`` integers: how many of the numbers of each list count, the first ones;
            by default all.
        block_size: Rows and keys of a block, or one number for both. A block may have one row: then each row has a list
            of its own.
        seqlen_q: Rows of a sequence, by default all of ``blocks_q`` blocks.
        seqlen_k: Keys of a sequence, by default as many as rows.

    Returns:
        The mask. It is for these lengths; packed sequences use the first rows and keys of their sample's lists.

    Raises:
        InvalidInputError: Naming the argument that is wrong.

    Source: Zhang et al. 2025, VSA, arXiv:2505.13389; Lu et al. 2025, MoBA, arXiv:2502.13189; Yuan et al. 2025, NSA,
    arXiv:2502.11089.
    """
    check_integers("indices", indices)
    if indices.dim() != 4:
        must = "must have 4: (batch, heads, blocks_q, most)"
        raise InvalidInputError("indices", f"has {indices.dim()} dimensions, {must}")
    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes):
        raise InvalidInputError("block_size", f"is {shown(block_size)}, must be a number or two: rows and keys")
    rows = indices.shape[2] * sizes[0] if seqlen_q is None else _length("seqlen_q", seqlen_q)
    keys = rows if seqlen_k is None else _length("seqlen_k", seqlen_k)
    if holds(-(-rows // sizes[0]) != indices.shape[2]):
        must = f"must be the {-(-rows // sizes[0])} blocks of {sizes[0]} of seqlen_q {rows}"
        raise InvalidInputError("indices", f"has lists for {indices.shape[2]} blocks of rows, {must}")
    if counts is not None:
        check_integers("counts", counts)
        if counts.device != indices.device:
            raise InvalidInputError("counts", f"is on {counts.device}, but indices is on {indices.device}")
        try:
            counts = counts.expand(indices.shape[:-1])
        except RuntimeError:
            must = f"must be {tuple(indices.shape[:-1])}, one number for each list of indices"
            raise InvalidInputError("counts", f"has shape {tuple(counts.shape)}, {must}") from None
    by_row, row_items, by_key, key_items = selected_lists.OPERATOR(indices, counts, -(-keys // sizes[1]))
    return BlockMask(by_row, row_items, by_key, key_items, (sizes[0], sizes[1]), (rows, keys), None)


def _length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or holds(value < 0):
        raise InvalidInputError(name, f"is {shown(value)}, must be an integer >= 0")
    return value  # type: ignore[return-value]


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
