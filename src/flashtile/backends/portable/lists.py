"""Which blocks a mask function keeps, and which pairs of those kept in part: kernels with the printed function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.gpu.functions import mod_of
from flashtile.backends.gpu.host import Launcher, run
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.backends.gpu.named import device_code
from flashtile.call.functions import Function

_kernels = device_code("flashtile.backends.portable.lists_kernel")
# Rows and keys that a program looks at at once, at most.
_TILE = 64


class Blocks(NamedTuple):
    """The blocks of a launch.

    Attributes:
        ptr: Their kinds, int8 (batch * heads, rows, keys).
        first: The first block of rows.
        rows: Blocks of rows.
        keys: Blocks of keys.
        heads: Query heads.
        seqlen_q: Rows of a sequence.
        seqlen_k: Its keys.
        ROWS: Rows of a block.
        KEYS: Keys of a block.
        TILE_M: Rows that are looked at at once.
        TILE_N: Keys.
    """

    ptr: Any
    first: Any
    rows: Any
    keys: Any
    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    ROWS: Any
    KEYS: Any
    TILE_M: Any
    TILE_N: Any


def kinds(
    function: Function,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    span: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """As ``flashtile.ops.lists.kinds_of``."""
    (batch, heads), rows, keys = groups, span[1] - span[0], -(-lengths[1] // block_size[1])
    found = torch.empty(batch * heads, rows, keys, dtype=torch.int8, device=device)
    launch = kinds_launch(function, (batch, heads), lengths, block_size, span)
    _run(launch, function, kinds=found)
    return found


def kinds_launch(
    function: Function,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    span: tuple[int, int],
) -> Launch:
    """The launch over blocks of rows ``span`` of all groups: B and H."""
    rows, keys = span[1] - span[0], -(-lengths[1] // block_size[1])
    tile = [min(_TILE, max(16, 1 << (size - 1).bit_length())) for size in block_size]
    blocks = Blocks(Pointer(torch.int8, "kinds"), span[0], rows, keys, groups[1], *lengths, *block_size, *tile)
    arguments = {"mask": mod_of(function), "blocks": blocks}
    return Launch(
        _kernels.block_kinds, groups[0] * groups[1] * rows * keys, arguments, {"num_warps": 4, "num_stages": 1}
    )


class PartialBlocks(NamedTuple):
    """Blocks that a launch stores the bits of, one after another.

    Attributes:
        ptr: int32, the bits, as ``block_mask.with_bits`` says.
        blocks: int32 (count, 3): group, block of this side, block of the other.
        heads: Query heads of a sequence.
        seqlen_q: Rows.
        seqlen_k: Keys.
        OWN: Rows or keys of a block of this side.
        OTHER: Rows or keys of a block of the other side.
        OVER_KEYS: Whether this side is the keys'.
    """

    ptr: Any
    blocks: Any
    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    OWN: Any
    OTHER: Any
    OVER_KEYS: Any


def store_bits(
    function: Function, heads: int, lengths: tuple[int, int], block_size: tuple[int, int], bits: Tensor, blocks: Tensor,
    over_keys: bool,
) -> None:  # fmt: skip
    """Stores the bits of blocks, int32 (count, 3), at the beginning of ``bits``; see ``block_mask.with_bits``."""
    own, other = block_size[:: -1 if over_keys else 1]
    given = PartialBlocks(
        Pointer(torch.int32, "bits"), Pointer(torch.int32, "blocks"), heads, *lengths, own, other, over_keys
    )
    launch = Launch(
        _kernels.block_bits, len(blocks) * (own // 64) * (other // 128), {"mask": mod_of(function), "given": given},
        {"num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    _run(launch, function, bits=bits, blocks=blocks)


def _run(launch: Launch, function: Function, **made: Tensor) -> None:
    """A launch that reads what a function does and the tensors given by name."""
    (device,) = {x.device for x in made.values()}
    run([Launcher(launch, device, function, made)], function, made)
