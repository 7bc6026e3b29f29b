"""``masks.selected_blocks``: lists of the blocks that data have chosen, against plain loops; compiled calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile.masks import selected_blocks


def chosen(*sizes: int, keys: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Numbers of blocks, among them some that are named again, -1, and some that are past the last one."""
    return torch.randint(-1, keys + 2, sizes, dtype=dtype, generator=torch.Generator().manual_seed(7))


def listed(blocks: Tensor, items: Tensor) -> list[list[int]]:
    """Each list, of all groups one after another."""
    assert torch.equal(blocks[..., 0], blocks[..., 1]), "all blocks are full"
    return [items[start:stop].tolist() for start, _, stop in blocks.flatten(0, -2).tolist()]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 9, 5), (1, 2, 4, 1), (1, 1, 3, 0), (1, 1, 0, 4)], ids=str)
def test_lists_of_rows_and_of_keys(sizes: tuple[int, int, int, int], counted: bool, dtype: torch.dtype) -> None:
    keys, (batch, heads, rows, most) = 7, sizes
    indices = chosen(*sizes, keys=keys, dtype=dtype)
    counts = torch.randint(-1, most + 2, (batch, 1, rows)) if counted else None
    mask = selected_blocks(indices, counts, (16, 8), seqlen_q=16 * rows, seqlen_k=8 * keys - 3)
    each = indices.flatten(0, 2).tolist()
    limits = [most] * len(each) if counts is None else counts.expand(sizes[:3]).flatten().clamp(min=0).tolist()
    want = [sorted({n for n in line[:limit] if 0 <= n < keys}) for line, limit in zip(each, limits, strict=True)]
    assert listed(mask.row_blocks, mask.row_items) == want
    groups = [want[n * rows : (n + 1) * rows] for n in range(batch * heads)]
    by_key = [[row for row, line in enumerate(group) if key in line] for group in groups for key in range(keys)]
    assert listed(mask.key_blocks, mask.key_items) == by_key
    assert (mask.shape, mask.listed) == ((batch, heads, 16 * rows, 8 * keys - 3), (16, 8))


def test_numbers_of_64_bits_do_not_wrap() -> None:
    mask = selected_blocks(torch.tensor([[[[2**32, 2**32 + 1, 1]]]]), block_size=4, seqlen_k=12)
    assert listed(mask.row_blocks, mask.row_items) == [[1]]


def call(q: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    mask = flashtile.masks.selected_blocks(indices, counts, (4, 8), seqlen_q=q.shape[1], seqlen_k=q.shape[1])
    return flashtile.attention(q, q, q, block_mask=mask, causal=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """What data choose is no constant of the code; attention keeps the pairs of chosen blocks, gradients too."""
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (24, 40):
        q = torch.randn(2, length, 2, 16, dtype=torch.float64, requires_grad=True)
        indices = torch.cat(
            (torch.zeros(2, 2, length // 4, 1, dtype=torch.int32), chosen(2, 2, length // 4, 3, keys=length // 8)), 3
        )
        counts = torch.full((2, 2, length // 4), 3)
        keep = torch.zeros(2, 2, length // 4, length // 8 + 3, dtype=torch.bool)
        keep = keep.scatter(3, indices[..., :3].long() % (length // 8 + 3), True)[..., : length // 8]
        keep = (
            keep.repeat_interleave(4, 2).repeat_interleave(8, 3) & torch.ones(length, length, dtype=torch.bool).tril()
        )
        plain = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3, attn_mask=keep)
        results = compiled(q, indices, counts), call(q, indices, counts), plain.transpose(1, 2)
        got, eager, want = ((out, *torch.autograd.grad(out.square().sum(), q)) for out in results)
        for x, y, z in zip(got, eager, want, strict=True):
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(x, z)


def test_operator() -> None:
    indices = chosen(1, 2, 5, 3, keys=6)
    for counts in (None, torch.ones(1, 2, 5, dtype=torch.int64)):
        torch.library.opcheck(torch.ops.flashtile.selected_lists.default, (indices, counts, 6))


def test_counts_are_where_indices_are() -> None:
    counts = torch.ones(1, 2, 4, dtype=torch.int32, device="meta")
    with pytest.raises(InvalidInputError, match="^counts: is on meta, but indices is on cpu"):
        selected_blocks(torch.zeros(1, 2, 4, 3, dtype=torch.int32), counts)
