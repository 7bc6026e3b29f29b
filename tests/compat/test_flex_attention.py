"""``flashtile.compat.flex_attention`` beside PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from flashtile import UnsupportedError
from flashtile.compat.flex_attention import (
    AuxRequest,
    and_masks,
    attention_by_reference,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

IDS = torch.arange(90) // 25


def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return IDS[q_idx] == IDS[kv_idx]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def halved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * 0.5 + h


def qkv(dtype: torch.dtype = torch.float64, batch_k: int = 2, heads_k: int = 4) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    shapes = (2, 4, 90, 16), (batch_k, heads_k, 90, 16), (batch_k, heads_k, 90, 24)
    return [torch.randn(shape, generator=make, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mask_mod", [documents, and_masks(causal, documents), or_masks(causal, documents), noop_mask])
def test_masks_and_results_are_pytorchs(mask_mod: Any, separate: bool) -> None:
    given: dict[str, Any] = {"device": "cpu", "BLOCK_SIZE": (16, 32), "separate_full_blocks": separate}
    ours, theirs = (f(mask_mod, None, None, 90, 90, **given) for f in (create_block_mask, pytorch.create_block_mask))
    for got, want in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
        assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    q, k, v = qkv()
    out, aux = flex_attention(q, k, v, halved, ours, scale=0.3, return_aux=AuxRequest(lse=True))
    want_out, want_aux = pytorch.flex_attention(q, k, v, halved, theirs, scale=0.3, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(aux.lse, want_aux.lse)
    assert aux.max_scores is None
    asked = AuxRequest(max_scores=True)
    got, most = flex_attention(q, k, v, halved, ours, scale=0.3, return_aux=asked)
    assert torch.equal(got, out) and most.lse is None and most.max_scores is not None
    # PyTorch has none on CPUs.
    scores = 0.15 * q @ k.transpose(-1, -2) + torch.arange(4)[:, None, None]
    kept = pytorch.create_mask(mask_mod, None, None, 90, 90, "cpu")
    torch.testing.assert_close(most.max_scores, scores.masked_fill(~kept, -torch.inf).amax(-1))
    again, lse = flex_attention(q, k, v, halved, theirs, 0.3, return_lse=True, kernel_options={"fwd_num_stages": 1})
    assert torch.equal(again, out) and torch.equal(lse, aux.lse)


def test_gradients_on_a_cpu_grouped_heads_and_a_shared_batch() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(batch_k=1, heads_k=2))
    mask = create_block_mask(documents, 2, None, 90, 90, "cpu", 16)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    rows = [x.transpose(1, 2).expand(2, -1, -1, -1) for x in (q, k, v)]
    by_definition = attention_by_reference(*rows, block_mask=mask)
    assert isinstance(by_definition, Tensor)
    torch.testing.assert_close(out, by_definition.transpose(1, 2))
    want = torch.autograd.grad(by_definition.square().sum(), (q, k, v))
    for each, other in zip(got, want, strict=True):
        torch.testing.assert_close(each, other)


def test_errors_are_pytorchs() -> None:
    q, k, v = qkv(torch.float32)
    mask = create_block_mask(causal, None, None, 90, 90, "cpu")
    for call, text in (
        (lambda: flex_attention(q, k.half(), v), "same dtype"),
        (lambda: flex_attention(q, k[..., :8], v), "same embedding dimension"),
        (lambda: flex_attention(q, k[:, :2], v[:, :2]), "enable_gqa=True"),
        (lambda: flex_attention(q, k[:, :3], v[:, :3], enable_gqa=True), "multiple of kv heads"),
        (lambda: flex_attention(q, k[:1], v[:1]), "same batch size"),
        (lambda: flex_attention(q[0], k, v), "must have 4"),
        (lambda: flex_attention(q[:, :, :80], k, v, block_mask=mask), "_adjust"),
        (lambda: flex_attention(q, k, v, block_mask=mask._adjust(80, 90)), "create a new block mask"),
        (lambda: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest()), "Cannot specify both"),
        (lambda: flex_attention(q, k, v, kernel_options={"STAGES": 1}), "STAGES"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex_attention(q, k, v, block_mask=mask[:, 0])
    with pytest.raises(UnsupportedError):
        create_block_mask(causal, None, None, 90, 90, "cpu", compute_dq_write_order=True)
