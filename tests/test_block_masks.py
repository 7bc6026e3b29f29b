"""``create_block_mask`` and PyTorch's ``BlockMask``: which blocks they list, and that calls keep what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

import flashtile
from flashtile import BlockMask, InvalidInputError, UnsupportedError, mods
from flashtile.mods.block_mask import FULL, PARTIAL
from flashtile.mods.converted import lists_of
from tests.mods.functions import MASKS, Sizes

IDS = torch.tensor([0] * 50 + [1] * 3 + [2] * 70 + [3] * 77)


def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def by_place(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() <= 20 * (h + 1) + b


def qkv(batch: int, seqlen_q: int, seqlen_k: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    shapes = (batch, seqlen_q, heads, 8), (batch, seqlen_k, 1, 8), (batch, seqlen_k, 1, 8)
    return [torch.randn(shape, generator=make, dtype=dtype).requires_grad_() for shape in shapes]


def kinds(mask: BlockMask) -> Tensor:
    partial, full = mask.dense()
    return PARTIAL * partial + FULL * full


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [(32, 32), (16, 48), (7, 100)], ids=str)
def test_each_block_is_what_its_pairs_say(name: str, size: tuple[int, int]) -> None:
    sizes = Sizes(2, 3, 90, 75, torch.float32, torch.Generator().manual_seed(1))
    function = MASKS[name](sizes).function
    made = flashtile.create_block_mask(function, 2, 3, 90, 75, BLOCK_SIZE=size)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 90, 75)), indexing="ij")
    keep = function(b, h, i, j)
    for m in range(made.row_blocks.shape[2]):
        for n in range(made.key_blocks.shape[2]):
            block = keep[..., m * size[0] : (m + 1) * size[0], n * size[1] : (n + 1) * size[1]]
            count = block.sum((-1, -2))
            want = torch.where(count == size[0] * size[1], FULL, torch.where(count > 0, PARTIAL, 0))
            assert torch.equal(kinds(made)[..., m, n], want.to(torch.int64))
    assert made.shape == (2, 3, 90, 75)


def test_lists_are_sorted_and_the_transpose_lists_the_same_blocks() -> None:
    made = flashtile.create_block_mask(documents, None, None, 200, 200, BLOCK_SIZE=16)
    by_row, by_key = set(), set()
    for which, bounds, items in (
        (by_row, made.row_blocks, made.row_items), (by_key, made.key_blocks, made.key_items)
    ):  # fmt: skip
        for n, (start, full, stop) in enumerate(bounds[0, 0].tolist()):
            for low, high, kind in ((start, full, PARTIAL), (full, stop, FULL)):
                listed = items[low:high].tolist()
                assert listed == sorted(listed)
                which |= {(n, each, kind) if which is by_row else (each, n, kind) for each in listed}
    assert by_row == by_key and len(by_row) == int((kinds(made) != 0).sum())
    assert made.sparsity() == pytest.approx(100 * (1 - len(by_row) / 13**2))
    assert len(made.row_items) < 2 * len(by_row)


@pytest.mark.parametrize("mask_mod", [documents, by_place])
@pytest.mark.parametrize("size", [16, (64, 32), (20, 33), 256], ids=str)
def test_a_list_keeps_what_its_function_keeps(mask_mod: Callable[..., Any], size: Any) -> None:
    q, k, v = qkv(2, 150, 190)
    groups = (2, 2) if mask_mod is by_place else (None, None)
    made = flashtile.create_block_mask(mask_mod, *groups, 150, 190, BLOCK_SIZE=size)
    theirs = pytorch.create_block_mask(mask_mod, *groups, 150, 190, device="cpu", BLOCK_SIZE=size)
    found = []
    for mask in ({"mask_mod": mask_mod}, {"block_mask": made}, {"block_mask": theirs}):
        out, lse = flashtile.attention(q, k, v, softcap=5.0, return_lse=True, causal=True, **mask)
        grads = torch.autograd.grad(out.square().sum() + lse.clamp(min=-9).sum(), (q, k, v))
        found.append((out, lse, *grads))
    for got, again, want in zip(found[1], found[2], found[0], strict=True):
        torch.testing.assert_close(got, want)
        assert torch.equal(got, again)


def test_pytorchs_mask_is_converted_once_and_lists_the_same() -> None:
    theirs = pytorch.create_block_mask(by_place, 2, 3, 150, 190, device="cpu", BLOCK_SIZE=(64, 32))
    ours = flashtile.create_block_mask(by_place, 2, 3, 150, 190, BLOCK_SIZE=(64, 32))
    assert lists_of(theirs) is lists_of(theirs)
    assert torch.equal(kinds(lists_of(theirs)), kinds(ours))
    sliced = theirs[:, :1]
    with pytest.raises(InvalidInputError, match="mask_mod"):
        flashtile.attention(*qkv(2, 150, 190), block_mask=sliced)


def test_lists_are_trusted() -> None:
    """Blocks that they leave out are dropped, and full ones kept, whatever a function says."""
    counts, places = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    q, k, v = qkv(1, 32, 32)
    keep = torch.zeros(32, 32, dtype=torch.bool)
    keep[:16, :16] = torch.ones(16, 16).tril()
    keep[:16, 16:] = True
    keep[16:, 16:] = torch.ones(16, 16).tril()
    want = flashtile.attention(q, k, v, attn_mask=keep)
    for given, mine in ((mods.causal, None), (None, mods.causal)):
        made = pytorch.BlockMask.from_kv_blocks(counts, places, *full, BLOCK_SIZE=16, mask_mod=given)
        torch.testing.assert_close(flashtile.attention(q, k, v, block_mask=made, mask_mod=mine), want)


def test_functions_are_asked_of_partial_blocks_alone() -> None:
    """NaN in rows of a captured tensor that no partial block reads stays out, and so does what full blocks would."""
    table = torch.zeros(64, requires_grad=True)
    with torch.no_grad():
        table[40:] = torch.nan

    def score(x: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return x + table[kv_idx]

    def before(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < 40

    q, k, v = qkv(1, 30, 64)
    for size in (16, 64):
        made = flashtile.create_block_mask(before, None, None, 30, 64, BLOCK_SIZE=size)
        out = flashtile.attention(q, k, v, score_mod=score, block_mask=made)
        found = (out, *torch.autograd.grad(out.square().sum(), (q, k, v, table)))
        assert all(x.isfinite().all() for x in found)
        torch.testing.assert_close(out, flashtile.attention(q, k[:, :40], v[:, :40]))


def test_packed_sequences_use_the_first_blocks() -> None:
    lengths = (60, 0, 33, 100)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (x[0].detach() for x in qkv(1, sum(lengths), sum(lengths)))
    made = flashtile.create_block_mask(by_place, 4, 2, 100, 100, BLOCK_SIZE=16)
    got = flashtile.attention_varlen(q, k, v, bounds, bounds, block_mask=made)
    torch.testing.assert_close(got, flashtile.attention_varlen(q, k, v, bounds, bounds, mask_mod=by_place))


def test_transforms_and_compiled_code_take_them() -> None:
    made = flashtile.create_block_mask(by_place, 3, 2, 50, 70, BLOCK_SIZE=16)
    q, k, v = (x.detach() for x in qkv(3, 50, 70))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, block_mask=made)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, mask_mod=by_place)

    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    for got, want in zip(*(torch.func.jvp(f, (q, k, v), tangents) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want)
    many = torch.stack((q, 2 * q)), torch.stack((k, -k)), torch.stack((v, v + 1))
    torch.testing.assert_close(torch.vmap(ours)(*many), torch.vmap(theirs)(*many))
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), theirs(q, k, v))


def test_what_does_not_fit_is_refused_by_name() -> None:
    made = flashtile.create_block_mask(mods.causal, None, None, 40, 50, BLOCK_SIZE=16)
    q, k, v = qkv(1, 40, 50)
    for given, text in (
        ({"q": q[:, :39]}, "seqlen_q 40, but q has 39"),
        ({"k": k[:, :45], "v": v[:, :45]}, "seqlen_k 50, but k has 45"),
        ({"mask_mod": documents}, "mask_mod: is given, but block_mask has its own"),
        ({"block_mask": torch.ones(3)}, "block_mask: is of type Tensor"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=text):
            flashtile.attention(**{"q": q, "k": k, "v": v, "block_mask": made, **given})
    three = flashtile.create_block_mask(by_place, 3, None, 40, 50, BLOCK_SIZE=16)
    with pytest.raises(InvalidInputError, match="block_mask: batch is 3"):
        flashtile.attention(q, k, v, block_mask=three)
    with pytest.raises(UnsupportedError, match="block lists"):
        flashtile.attention(q.half(), k.half(), v.half(), block_mask=made, backend="hopper")
    for wrong, text in (
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE: is 0"), ({"BLOCK_SIZE": (1, 2, 3)}, "BLOCK_SIZE"), ({"B": 0}, "B: is 0"),
        ({"mask_mod": lambda b, h: True}, "mask_mod: takes"), ({"Q_LEN": -1}, "Q_LEN: is -1"),
    ):  # fmt: skip
        good: dict[str, Any] = {"mask_mod": mods.causal, "B": None, "H": None, "Q_LEN": 9, "KV_LEN": 9}
        with pytest.raises(InvalidInputError, match=text):
            flashtile.create_block_mask(**{**good, **wrong})
