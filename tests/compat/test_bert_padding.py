"""Padding and unpadding: round trips, gradients, and attention between the two."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashtile import InvalidInputError
from flashtile.compat import bert_padding
from flashtile.compat.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flashtile.compat.flash_attn_2 import flash_attn_func, flash_attn_varlen_func
from tests.compat.by_hand import shown

# Left and right padding, holes, a full sequence and an empty one.
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
LENGTHS = [3, 3, 3, 5, 0]


SIGNATURES = {
    "index_first_axis": "(input, indices)",
    "index_first_axis_residual": "(input, indices)",
    "index_put_first_axis": "(values, indices, first_axis_dim)",
    "pad_input": "(hidden_states, indices, batch, seqlen)",
    "unpad_input": "(hidden_states, attention_mask, unused_mask=None)",
    "unpad_input_for_concatenated_sequences": "(hidden_states, attention_mask_in_length)",
}


def test_signatures() -> None:
    assert {name: shown(getattr(bert_padding, name)) for name in bert_padding.__all__} == SIGNATURES


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


def test_residual_has_both_gradients() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([6, 0, 3])
    rows, residual = index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    torch.autograd.gradcheck(lambda t: index_first_axis_residual(t, indices), (x,))


def test_several_sequences_in_a_row_of_the_batch() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 3, 0, 2, 0, 1], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(4, 6, 2, 8, dtype=torch.float64)
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 11, 17] and cu_seqlens.dtype == torch.int32
    assert (longest, type(longest)) == (6, int)
    assert indices.tolist() == [*range(5), *range(12, 18), *range(18, 24)]
    assert torch.equal(rows, torch.cat([x[0, :5], x[2], x[3]]))
    # Each sequence attends to itself alone: what a block-diagonal mask over the padded batch says.
    packed = flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, longest, longest)
    out = pad_input(packed, indices, 4, 6)
    for b, starts in enumerate(([0, 2, 5], [], [0, 3, 5, 6], [0, 6])):
        for start, stop in itertools.pairwise(starts):
            alone = x[b : b + 1, start:stop]
            torch.testing.assert_close(out[b, start:stop], flash_attn_func(alone, alone, alone)[0])
    nothing = unpad_input_for_concatenated_sequences(x, torch.zeros_like(lengths))
    assert (nothing[0].shape, nothing[2].tolist(), nothing[3]) == ((0, 2, 8), [0], 0)


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="^attention_mask: "):
        unpad_input(torch.zeros(2, 3, 4), torch.ones(2, 4))
    with pytest.raises(InvalidInputError, match="^unused_mask: "):
        unpad_input(torch.zeros(2, 3, 4), torch.ones(2, 3), torch.ones(3))
    with pytest.raises(InvalidInputError, match="^attention_mask_in_length: "):
        unpad_input_for_concatenated_sequences(torch.zeros(2, 3, 4), torch.ones(2, 4))
