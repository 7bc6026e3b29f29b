"""``masks.selected_blocks``: what lists it makes, and that calls keep what they name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile.api import lists_of_rows
from flashtile.api.keywords import Asked
from flashtile.call.arguments import Options, Plain, Tensors
from flashtile.masks import selected_blocks
from tests.selected import ANY, by_formula, drawn, judge, kept_pairs
from tests.slow import slow_but


@pytest.mark.parametrize("seed", slow_but(range(300), lambda seed: seed < 25))
def test_random_calls(seed: int) -> None:
    judge(drawn(seed, ANY, (torch.float64, torch.float32, torch.bfloat16), 150, (8, 24)))


@pytest.mark.parametrize("seed", range(30))
def test_lists_are_sorted_have_each_block_once_and_say_the_same_by_key(seed: int) -> None:
    call = drawn(seed, ANY, (torch.float32,), 150, (8,))
    mask = selected_blocks(
        call.indices, call.counts, call.block_size, seqlen_q=call.longest[0], seqlen_k=call.longest[1]
    )
    kept = kept_pairs(call)[:, :, :: call.block_size[0], :: call.block_size[1]]
    partial, full = mask.dense()
    assert not partial.any() and torch.equal(full, kept)
    for bounds, items, of_group in (
        (mask.row_blocks, mask.row_items, kept), (mask.key_blocks, mask.key_items, kept.mT)
    ):  # fmt: skip
        assert bounds.dtype == items.dtype == torch.int32 and (bounds[..., 0] == bounds[..., 1]).all()
        for place in torch.cartesian_prod(*map(torch.arange, bounds.shape[:3])).tolist():
            start, _, stop = bounds[tuple(place)].tolist()
            assert items[start:stop].tolist() == of_group[tuple(place)].nonzero().flatten().tolist()
    assert mask.shape == (*call.indices.shape[:2], *call.longest)


def test_rows_that_name_nothing_are_0_and_pass_nothing_on() -> None:
    q, k, v = (torch.randn(1, 128, 2, 16, dtype=torch.float64).requires_grad_() for _ in range(3))
    indices = torch.tensor([[-1, 7], [1, 1]], dtype=torch.int32).view(1, 1, 2, 2)
    out, lse = flashtile.attention(q, k, v, block_mask=selected_blocks(indices, seqlen_q=128), return_lse=True)
    assert not out[:, :64].any() and (lse[..., :64] == -torch.inf).all()
    want = flashtile.attention(q[:, 64:], k[:, 64:], v[:, 64:])
    assert torch.allclose(out[:, 64:], want)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not grads[0][:, :64].any() and not grads[1][:, :64].any() and not grads[2][:, :64].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_nobody_names_stays_out(bad: float) -> None:
    q, k, v = (torch.randn(1, 128, 1, 16).requires_grad_() for _ in range(3))
    indices = torch.tensor([0, 0], dtype=torch.int32).view(1, 1, 2, 1)
    mask = selected_blocks(indices, seqlen_q=128)
    want = flashtile.attention(q, k, v, block_mask=mask)
    with torch.no_grad():
        for x in (k, v):
            x[:, 64:] = bad
    out = flashtile.attention(q, k, v, block_mask=mask)
    assert torch.equal(out, want)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_lists_of_key_heads_are_those_of_their_groups() -> None:
    q, (k, v) = torch.randn(2, 90, 6, 8), (torch.randn(2, 90, 3, 8) for _ in range(2))
    indices = torch.randint(0, 6, (2, 3, 6, 2))
    by_group = flashtile.attention(q, k, v, block_mask=selected_blocks(indices, block_size=16, seqlen_q=90))
    by_head = selected_blocks(indices.repeat_interleave(2, 1), block_size=16, seqlen_q=90)
    assert torch.equal(by_group, flashtile.attention(q, k, v, block_mask=by_head))
    with pytest.raises(InvalidInputError, match=r"block_mask: num_heads_q is 2, must be 1 or 6 or 3"):
        flashtile.attention(q, k, v, block_mask=selected_blocks(indices[:, :2], block_size=16, seqlen_q=90))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("group", [2, 6, 16])
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"causal": True, "window_size": (20, 0)}], ids=str)
def test_heads_of_a_group_as_rows_of_a_block(rows: int, group: int, band: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for n, h in ((40, 2 * group), (70, 2), (70, 2))
    )
    indices = torch.randint(-1, 5, (2, 2, -(-40 // rows), 3), generator=draw)
    mask = selected_blocks(indices, block_size=(rows, 16), seqlen_q=40, seqlen_k=70)
    want = flashtile.attention(q, k, v, block_mask=mask, return_lse=True, return_max_scores=True, **band)
    asked = Asked(return_lse=True, plain=Plain(return_max_scores=True), **band)
    found = lists_of_rows.attend(flashtile.attention, mask, Tensors(q, k, v), asked)
    dout = torch.randn(want[0].shape, generator=draw, dtype=torch.float64)
    for a, b in zip(want, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x[0], (q, k, v), dout) for x in (want, found)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    made = lists_of_rows.folded(mask, q, k, Options())
    assert made[1].block_size[0] % 16 == 0 and made[0].shape == (2, 40 * made[2], 2, 8)


def test_only_plain_calls_on_gpus_with_lists_of_groups_are_folded() -> None:
    t = Tensors(*(torch.empty(1, 32, h, 16, device="meta") for h in (8, 2, 2)))
    small = selected_blocks(torch.zeros(1, 2, 32, 1, dtype=torch.int32), block_size=(1, 16))
    assert lists_of_rows.folds(small, t, Asked(causal=True))
    for asked in (
        Asked(plain=Plain(dropout_p=0.1)), Asked(plain=Plain(attention_chunk=4)), Asked(precision="fp8"),
        Asked(functions=(None, lambda b, h, i, j: i >= j)),
    ):  # fmt: skip
        assert not lists_of_rows.folds(small, t, asked)
    assert not lists_of_rows.folds(small, replace(t, sinks=torch.empty(8, device="meta")), Asked())
    assert not lists_of_rows.folds(small, Tensors(*(torch.empty(1, 32, h, 16) for h in (8, 2, 2))), Asked())
    by_head = selected_blocks(torch.zeros(1, 8, 32, 1, dtype=torch.int32), block_size=(1, 16))
    whole = selected_blocks(torch.zeros(1, 2, 2, 1, dtype=torch.int32), block_size=16)
    for mask in (by_head, whole, replace(small, mask_mod=lambda b, h, i, j: i >= j)):
        assert not lists_of_rows.folds(mask, t, Asked())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": torch.zeros(1, 1, 2)}, "indices: is torch.float32, must be an int32 tensor"),
        ({"indices": torch.zeros(1, 2, 2, dtype=torch.int32)}, "indices: has 3 dimensions, must have 4"),
        ({"seqlen_q": 300}, "indices: has lists for 2 blocks of rows, must be the 5 blocks of 64 of seqlen_q 300"),
        ({"block_size": 0}, "block_size: is 0, must be a number or two"),
        ({"block_size": (64,)}, r"block_size: is \(64,\), must be a number or two"),
        ({"block_size": (64, True)}, "must be a number or two"),
        ({"counts": torch.zeros(1, 1, 3, dtype=torch.int32)}, r"counts: has shape \(1, 1, 3\), must be \(1, 1, 2\)"),
        ({"counts": torch.zeros(1, 1, 2)}, "counts: is torch.float32"),
        ({"seqlen_k": -1}, "seqlen_k: is -1, must be an integer >= 0"),
        ({"seqlen_q": 1.5}, "seqlen_q: is 1.5"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    given = {"indices": torch.zeros(1, 1, 2, 3, dtype=torch.int32), **change}
    with pytest.raises(InvalidInputError, match=said):
        selected_blocks(given.pop("indices"), **given)


def test_calls_in_8_bits_take_no_lists() -> None:
    q, k = (torch.randn(1, 32, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    lists = selected_blocks(torch.zeros(1, 2, 32, 1, dtype=torch.int32), block_size=(1, 16))
    for given, keywords in (((flashtile.quantize(q, k, k),), {}), ((q, k, k), {"precision": "fp8"})):
        with pytest.raises(InvalidInputError, match="block_mask"):
            flashtile.attention(*given, block_mask=lists, **keywords)  # type: ignore[call-overload]


def test_masks_are_for_their_lengths() -> None:
    q = torch.randn(1, 100, 1, 8)
    with pytest.raises(InvalidInputError, match="block_mask: is for seqlen_q 128, but q has 100"):
        flashtile.attention(q, q, q, block_mask=selected_blocks(torch.zeros(1, 1, 2, 1, dtype=torch.int32)))


@pytest.mark.slow
def test_compiled_code_makes_lists_and_trains_through_them() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        indices = scores.topk(2, -1).indices.int()
        mask = selected_blocks(indices, block_size=16, seqlen_q=q.shape[1], seqlen_k=k.shape[1])
        return flashtile.attention(q, k, v, block_mask=mask, causal=True).square().sum()

    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 80, 2, 16, generator=draw).requires_grad_() for _ in range(3)]
    scores = torch.randn(1, 2, 5, 5, generator=draw)
    made = torch.compile(loss, fullgraph=True)
    for _ in range(2):
        want, got = loss(*leaves, scores), made(*leaves, scores)
        assert torch.allclose(want, got)
        for a, b in zip(*(torch.autograd.grad(x, leaves) for x in (want, got)), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        scores = torch.randn(1, 2, 5, 5, generator=draw)


def test_the_oracle_of_these_calls_is_the_dense_formula() -> None:
    call = drawn(11, ((16, 16),), (torch.float64,), 60, (8,))
    call = replace(call, indices=torch.arange(4).expand(1, 1, -(-call.longest[0] // 16), 4), counts=None)
    q, k, v = (x.unflatten(0, (len(call.lengths), -1)) for x in call.inputs[:3])
    if not call.packed:
        keywords = {"causal": call.causal, "window_size": (call.left, None)}
        want = flashtile.attention(q, k, v, **keywords)  # type: ignore[arg-type]
        assert torch.allclose(by_formula(call, torch.float64)["out"], want.flatten(0, 1), atol=1e-12)
