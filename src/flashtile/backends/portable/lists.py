"""Which blocks a mask function keeps: a kernel that counts the kept pairs of each block, with the printed function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.backends.gpu.device.mods import At
from flashtile.backends.gpu.functions import mod_of
from flashtile.backends.gpu.host import Step, run
from flashtile.backends.gpu.launch import Launch, Pointer
from flashtile.call.functions import Function

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
        ROWS: Of a block.
        KEYS: Likewise.
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


@triton.jit
def block_kinds(mask, blocks):
    """Stores 0, 1 (partial) or 2 (full) of one block, by a mask's ``mods.Mod``."""
    pid = tl.program_id(0)
    n, m = pid % blocks.keys, pid // blocks.keys % blocks.rows
    group = pid // blocks.keys // blocks.rows
    b, h = group // blocks.heads, group % blocks.heads
    head = mask.of_head(mask.operands, At(b, h, None, None, None, blocks.seqlen_q, blocks.seqlen_k, ()))
    kept = tl.zeros([blocks.TILE_M, blocks.TILE_N], tl.int32)
    for row in range(0, blocks.ROWS, blocks.TILE_M):
        i = row + tl.arange(0, blocks.TILE_M)[:, None]
        in_rows = i < blocks.ROWS
        i += (blocks.first + m) * blocks.ROWS
        for key in range(0, blocks.KEYS, blocks.TILE_N):
            j = key + tl.arange(0, blocks.TILE_N)[None, :]
            inside = in_rows & (j < blocks.KEYS)
            j += n * blocks.KEYS
            at = At(b, h, i, i + (blocks.seqlen_k - blocks.seqlen_q), j, blocks.seqlen_q, blocks.seqlen_k, ())
            rows = mask.of_rows(mask.operands, head, at)
            fetched = mask.fetch(mask.operands, head, rows, at)
            x = (inside & (i < blocks.seqlen_q) & (j < blocks.seqlen_k)).to(tl.int32)
            kept += mask.function(x, fetched, mask.operands, head, rows, at, 0)
    count = tl.sum(tl.sum(kept, 1), 0)
    kind = tl.where(count == blocks.ROWS * blocks.KEYS, 2, tl.where(count > 0, 1, 0))
    tl.store(blocks.ptr + tl.cast(pid, tl.int64), kind.to(tl.int8))


def kinds(
    function: Function,
    groups: tuple[int, int],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    span: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """As ``flashtile.api.blocks.evaluated``."""
    (batch, heads), rows, keys = groups, span[1] - span[0], -(-lengths[1] // block_size[1])
    found = torch.empty(batch * heads, rows, keys, dtype=torch.int8, device=device)
    launch = kinds_launch(function, (batch, heads), lengths, block_size, span)
    names = [f"operand{n}" for n in range(len(function.operands))]
    names += [f"number{n}" for n in range(len(function.numbers))]
    given: Any = (found, *function.operands, *function.numbers)
    run((Step(launch, ("kinds", *names), found.device),), given)
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
    return Launch(block_kinds, groups[0] * groups[1] * rows * keys, arguments, {"num_warps": 4, "num_stages": 1})
