"""flash-attn's private functions: forward and backward on their own, as context-parallel libraries call them."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError
from flashtile.compat import _kvcache
from flashtile.compat import _private as private
from flashtile.compat import flash_attn_2 as fa2
from tests.compat.by_hand import assert_same

FORWARD = "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax"
BACKWARD = (
    "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes deterministic rng_state"
)
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
NAMES = {
    "_flash_attn_forward": FORWARD,
    "_flash_attn_backward": BACKWARD,
    "_flash_attn_varlen_forward": FORWARD.replace("dropout_p", f"{LENGTHS} dropout_p")
    + " block_table leftpad_k seqused_k zero_tensors num_splits",
    "_flash_attn_varlen_backward": BACKWARD.replace("dropout_p", f"{LENGTHS} dropout_p") + " zero_tensors",
}


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    assert inspect.getfullargspec(getattr(private, name)).args == NAMES[name].split()


def test_defaults() -> None:
    forward = inspect.getfullargspec(private._flash_attn_varlen_forward)
    assert forward.defaults == (-1, -1, 0.0, None, False, None, None, None, False, 0)
    assert inspect.getfullargspec(private._flash_attn_forward).defaults is None
    assert inspect.getfullargspec(private._flash_attn_backward).defaults == (None,)
    assert inspect.getfullargspec(private._flash_attn_varlen_backward).defaults == (None, False)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_dense_equals_autograd_and_writes_in_place() -> None:
    torch.manual_seed(0)
    q, k, v = randn(2, 21, 4, 16), randn(2, 30, 2, 16), randn(2, 30, 2, 16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    tail = (0.3, True, 12, -1, 4.0, slopes)
    expected, expected_lse, _ = fa2.flash_attn_func(q, k, v, 0.0, 0.3, True, (12, -1), 4.0, slopes, False, True)
    out, lse, s_dmask, rng_state = private._flash_attn_forward(q, k, v, 0.0, *tail, False)
    assert not out.requires_grad
    assert_same((out, lse), (expected.detach(), expected_lse.detach()))
    assert s_dmask.numel() == 0
    assert rng_state.shape == (2,)
    dout = torch.randn(2, 4, 21, 16, dtype=torch.float64).transpose(1, 2)
    dqkv = torch.full((2, 30, 3, 4, 16), torch.nan, dtype=torch.float64)
    dq, dk, dv = dqkv[:, :21, 0], dqkv[:, :, 1, :2], dqkv[:, :, 2, :2]
    delta = private._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, *tail, False, rng_state)
    assert_same((dq, dk, dv), torch.autograd.grad(expected, (q, k, v), dout))
    assert_same((delta,), ((dout * out).sum(-1).transpose(1, 2),))
    assert dqkv[:, 21:, 0].isnan().all(), "wrote outside dq"
    only_dk = torch.empty_like(k)
    private._flash_attn_backward(dout, q, k, v, out, lse, None, only_dk, None, 0.0, *tail, True)
    assert_same((only_dk,), (dk,))


def test_varlen_equals_autograd() -> None:
    torch.manual_seed(1)
    lengths = (5, 0, 13)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = randn(18, 2, 8), randn(18, 1, 8), randn(18, 1, 8)
    expected, expected_lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu, cu, 13, 13, causal=True, return_attn_probs=True)
    longest = torch.tensor(13), 13
    out, lse, _, rng_state = private._flash_attn_varlen_forward(q, k, v, cu, cu, *longest, 0.0, 8**-0.5, True)
    assert_same((out, lse), (expected.detach(), expected_lse.detach()))
    dout = torch.randn_like(out)
    grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    tail = (0.0, 8**-0.5, True, -1, 0, 0.0, None, False)
    delta = private._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, cu, cu, *longest, *tail, rng_state)
    assert_same(grads, torch.autograd.grad(expected, (q, k, v), dout))
    assert_same((delta,), ((dout * out).sum(-1).T,))


def test_varlen_of_the_first_keys_of_each_sequence() -> None:
    torch.manual_seed(1)
    cu, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 18], [3, 0, 9]))
    q, k, v = (randn(18, heads, 8).detach() for heads in (2, 1, 1))
    tail = (18, 18, 0.0, 8**-0.5, True)
    found = private._flash_attn_varlen_forward(q, k, v, cu, cu, *tail, seqused_k=used)
    rows = torch.tensor([0, 1, 2, *range(5, 14)])
    shorter = torch.tensor([0, 3, 3, 12], dtype=torch.int32)
    expected = private._flash_attn_varlen_forward(q, k[rows], v[rows], cu, shorter, *tail)
    assert_same(found[:2], expected[:2])
    k[[3, 4, 14, 17]] = torch.nan
    assert_same(private._flash_attn_varlen_forward(q, k, v, cu, cu, *tail, seqused_k=used)[:2], expected[:2])


@pytest.mark.parametrize("in_pages", [False, True])
def test_one_split_gives_a_sequence_bits_of_its_own(in_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    if in_pages:
        within, name = _kvcache, "attention_with_kvcache"
    else:
        within, name = private.ops, "attention"
    call = getattr(within, name)

    def spy(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords["batch_invariant"] if in_pages else args[1].batch_invariant)
        return call(*args, **keywords)

    monkeypatch.setattr(within, name, spy)
    cu, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 16], [5, 11]))
    q = torch.randn(16, 2, 8)
    pages = {"block_table": torch.arange(2, dtype=torch.int32)[:, None], "seqused_k": used} if in_pages else {}
    k = torch.randn(2, 16, 2, 8) if in_pages else q
    for splits in (0, 1):
        private._flash_attn_varlen_forward(
            q, k, k, cu, None if in_pages else cu, 11, 16, 0.0, 0.3, True, num_splits=splits, **pages
        )
    assert list(map(bool, seen)) == [False, True]


def test_dropout_state_carries_to_the_backward() -> None:
    q, k, v = randn(1, 16, 2, 16), randn(1, 16, 2, 16), randn(1, 16, 2, 16)
    torch.manual_seed(2)
    expected = fa2.flash_attn_func(q, k, v, 0.25)
    torch.manual_seed(2)
    out, lse, _, rng_state = private._flash_attn_forward(q, k, v, 0.25, 0.25, False, -1, -1, 0.0, None, False)
    assert_same((out,), (expected.detach(),))
    dout = torch.randn_like(out)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    tail = (0.25, 0.25, False, -1, -1, 0.0, None, False)
    private._flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail, rng_state)
    assert_same(grads, torch.autograd.grad(expected, (q, k, v), dout))
    with pytest.raises(InvalidInputError, match="^rng_state: "):
        private._flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail)


def test_s_dmask_is_that_of_the_public_function() -> None:
    q, k, v = randn(1, 16, 2, 16), randn(1, 16, 2, 16), randn(1, 16, 2, 16)
    torch.manual_seed(2)
    expected = fa2.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
    torch.manual_seed(2)
    out, lse, s_dmask, rng_state = private._flash_attn_forward(q, k, v, 0.25, 0.25, False, -1, -1, 0.0, None, True)
    assert_same((out, lse, s_dmask), tuple(x.detach() for x in expected))
    assert (s_dmask < 0).any() and not out.requires_grad
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    assert private._wrapped_flash_attn_forward is private._flash_attn_forward


def test_gradients_by_halves_of_the_keys_add_up() -> None:
    """What ring attention does: merge the states of two halves, then ask each half for its share of the gradients."""
    q, k, v = randn(2, 10, 2, 8), randn(2, 24, 2, 8), randn(2, 24, 2, 8)
    expected = fa2.flash_attn_func(q, k, v)
    tail = (0.0, 8**-0.5, False, -1, -1, 0.0, None, False)
    halves = [tuple(x[:, part].detach() for x in (k, v)) for part in (slice(0, 9), slice(9, 24))]
    states = [private._flash_attn_forward(q.detach(), *half, *tail)[:2] for half in halves]
    out, lse = flashtile.merge_states(*states[0], *states[1])
    assert_same((out,), (expected.detach(),))
    dout = torch.randn_like(out)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for half in halves:
        grads = torch.empty_like(q), torch.empty_like(half[0]), torch.empty_like(half[1])
        private._flash_attn_backward(dout, q, *half, out, lse, *grads, *tail)
        dq = dq + grads[0]
        dks.append(grads[1])
        dvs.append(grads[2])
    total = (dq, torch.cat(dks, dim=1), torch.cat(dvs, dim=1))
    assert_same(total, torch.autograd.grad(expected, (q, k, v), dout))


def test_refusals_name_their_argument() -> None:
    x, cu = torch.zeros(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    start = (x, x, x, cu, cu, 4, 4, 0.0, 1.0, False)
    with pytest.raises(UnsupportedError, match="^leftpad_k: "):
        private._flash_attn_varlen_forward(*start, leftpad_k=cu)
    with pytest.raises(InvalidInputError, match="^seqused_k: is 5 for sequence 0, which has 4 rows"):
        private._flash_attn_varlen_forward(*start, seqused_k=torch.tensor([5], dtype=torch.int32))
    with pytest.raises(InvalidInputError, match="^v: total_k is 3, but k has 4"):
        private._flash_attn_varlen_forward(x, x, x[:3], *start[3:], seqused_k=torch.tensor([2], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="^num_splits > 1 is not supported"):
        private._flash_attn_varlen_forward(*start, num_splits=2)
    with pytest.raises(InvalidInputError, match="^k: .*block_table is missing"):
        private._flash_attn_varlen_forward(x, x[None], x[None], *start[3:])
    q = torch.zeros(1, 4, 2, 8)
    lse = torch.zeros(1, 2, 4)
    tail = (0.0, 1.0, False, -1, -1, 0.0, None, False)
    for name, args in {
        "dout": (q[:, :2], q, q, q, q, lse, q, q, q),
        "out": (q, q, q, q, q[..., :4], lse, q, q, q),
        "softmax_lse": (q, q, q, q, q, lse.transpose(1, 2), q, q, q),
        "dv": (q, q, q, q, q, lse, q, q, q[:, :, :1]),
    }.items():
        with pytest.raises(InvalidInputError, match=f"^{name}: "):
            private._flash_attn_backward(*args, *tail)
