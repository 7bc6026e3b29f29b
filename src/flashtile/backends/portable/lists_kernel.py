"""The kernels of ``lists``."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.device.mods import At


@triton.jit
def block_kinds(mask, blocks):
    """Stores 0, 1 (partial) or 2 (full) of one block, by a mask's ``Mod``."""
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


@triton.jit
def block_bits(mask, given):
    """Stores which pairs of 64 elements of this side by 128 of the other, a part of a block, a mask's ``Mod`` keeps."""
    pid = tl.program_id(0)
    PARTS: tl.constexpr = given.OWN // 64 * (given.OTHER // 128)
    part, n = pid % PARTS, tl.cast(pid // PARTS, tl.int64)
    group, block = tl.load(given.blocks + 3 * n), tl.load(given.blocks + 3 * n + 1)
    b, h = group // given.heads, group % given.heads
    own, other = part % (given.OWN // 64) * 64, part // (given.OWN // 64) * 128
    i = (block * given.OWN + own + tl.arange(0, 64))[:, None]
    j = (tl.load(given.blocks + 3 * n + 2) * given.OTHER + other + tl.arange(0, 128))[None, :]
    if given.OVER_KEYS:
        i, j = j, i
    at = At(b, h, i, i + (given.seqlen_k - given.seqlen_q), j, given.seqlen_q, given.seqlen_k, ())
    head = mask.of_head(mask.operands, At(b, h, None, None, None, given.seqlen_q, given.seqlen_k, ()))
    rows = mask.of_rows(mask.operands, head, at)
    fetched = mask.fetch(mask.operands, head, rows, at)
    x = ((i < given.seqlen_q) & (j < given.seqlen_k)).to(tl.int32)
    kept = mask.function(x, fetched, mask.operands, head, rows, at, 0)
    col = tl.arange(0, 128)[None, :]
    numbers = tl.sum(tl.sum(tl.reshape(kept << (col // 8 * 2 + col % 2), [64, 16, 4, 2]), 3), 1)
    place = n * (given.OWN * given.OTHER // 32) + (other // 128 * given.OWN + own) * 4
    tl.store(given.ptr + place + tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :], numbers)
