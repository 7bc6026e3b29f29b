"""Padding and unpadding: round trips, gradients, and attention between the two."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashtile import InvalidInputError
from flashtile.compat.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from flashtile.compat.flash_attn_2 import flash_attn_func, flash_attn_varlen_func

# Left and right padding, holes, a full sequence and an empty one.
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
LENGTHS = [3, 3, 3, 5, 0]


def test_signatures() -> None:
    assert list(inspect.signature(unpad_input).parameters) == ["hidden_states", "attention_mask", "unused_mask"]
    assert list(inspect.signature(pad_input).parameters) == ["hidden_states", "indices", "batch", "seqlen"]
    assert inspect.signature(unpad_input).parameters["unused_mask"].default is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_round_trip(dtype: torch.dtype) -> None:
    x = torch.randn(5, 5, 2, 3)
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x[MASK.bool()])
    assert torch.equal(indices, MASK.flatten().nonzero().flatten())
    assert cu_seqlens.tolist() == [0, 3, 6, 9, 14, 14]
    assert cu_seqlens.dtype == torch.int32
    assert (max_seqlen, type(max_seqlen)) == (5, int)
    assert seqused.tolist() == LENGTHS
    assert seqused.dtype == torch.int32
    back = pad_input(rows, indices, 5, 5)
    assert torch.equal(back, x * MASK[:, :, None, None])


def test_unused_rows_are_packed_but_not_counted() -> None:
    x = torch.randn(1, 6, 2)
    used = torch.tensor([[1, 1, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 1, 1, 0, 0, 1]])
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, used, unused)
    assert indices.tolist() == [0, 1, 2, 5]
    assert torch.equal(rows, x[0, [0, 1, 2, 5]])
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 4], 4, [2])


def test_gradients() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([6, 0, 3])
    torch.autograd.gradcheck(lambda t: index_first_axis(t, indices), (x,))
    torch.autograd.gradcheck(lambda t: index_put_first_axis(t[:3], indices, 7), (x,))
    put = index_put_first_axis(x[:3], indices, 7)
    assert torch.equal(put[indices], x[:3])
    assert torch.equal(put[[1, 2, 4, 5]], torch.zeros(4, 3, dtype=torch.float64))


def test_attention_over_unpadded_rows_equals_each_sequence_alone() -> None:
    x = torch.randn(5, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    rows, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, MASK)
    packed = flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    out = pad_input(packed, indices, 5, 5)
    expected = torch.zeros_like(out)
    for b in range(4):
        keep = MASK[b].bool()
        alone = x[b : b + 1, keep]
        expected[b, keep] = flash_attn_func(alone, alone, alone, causal=True)[0]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    dout = torch.randn_like(out)
    grads = (torch.autograd.grad(y, x, dout)[0] for y in (out, expected))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="^attention_mask: "):
        unpad_input(torch.zeros(2, 3, 4), torch.ones(2, 4))
    with pytest.raises(InvalidInputError, match="^unused_mask: "):
        unpad_input(torch.zeros(2, 3, 4), torch.ones(2, 3), torch.ones(3))
