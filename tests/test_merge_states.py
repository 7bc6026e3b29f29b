"""merge_states is a commutative monoid, and merging what split keys give equals one call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile import InvalidInputError

State = tuple[torch.Tensor, torch.Tensor]


@st.composite
def states(draw: st.DrawFn) -> State:
    """A state of 2 rows and 2 heads whose lse may be huge, tiny or -inf; then out is 0."""
    seed = draw(st.integers(0, 2**31))
    spread = draw(st.sampled_from([1.0, 30.0, 800.0]))
    make = torch.Generator().manual_seed(seed)
    lse = torch.randn(1, 2, 2, generator=make, dtype=torch.float64) * spread
    lse = torch.where(torch.rand(1, 2, 2, generator=make) < 0.3, -torch.inf, lse)
    out = torch.randn(1, 2, 2, 3, generator=make, dtype=torch.float64)
    return torch.where((lse == -torch.inf).transpose(1, 2)[..., None], 0.0, out), lse


def assert_same(a: State, b: State) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-12, atol=1e-12)


@given(states(), states(), states())
def test_is_associative(a: State, b: State, c: State) -> None:
    left = flashtile.merge_states(*flashtile.merge_states(*a, *b), *c)
    right = flashtile.merge_states(*a, *flashtile.merge_states(*b, *c))
    assert_same(left, right)


@given(states(), states())
def test_is_commutative(a: State, b: State) -> None:
    assert_same(flashtile.merge_states(*a, *b), flashtile.merge_states(*b, *a))


@given(states())
def test_the_empty_state_changes_nothing(a: State) -> None:
    empty = torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf)
    assert_same(flashtile.merge_states(*a, *empty), a)
    assert_same(flashtile.merge_states(*empty, *a), a)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 2**31))
def test_keys_split_anywhere_merge_to_one_call(cuts: list[int], seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 9, 4, 8, generator=make, dtype=torch.float64)
    k, v = (torch.randn(2, 40, 2, 8, generator=make, dtype=torch.float64) for _ in range(2))
    whole = flashtile.attention(q, k, v, return_lse=True)
    state = torch.zeros_like(q), torch.full((2, 4, 9), -torch.inf, dtype=torch.float64)
    bounds = [0, *sorted(cuts), 40]
    for start, stop in itertools.pairwise(bounds):
        part = flashtile.attention(q, k[:, start:stop], v[:, start:stop], return_lse=True)
        state = flashtile.merge_states(*state, *part)
    assert_same(state, whole)


@pytest.mark.parametrize("score", [torch.finfo(torch.float32).min, -1e9, -3e5, 1e9, torch.finfo(torch.float32).max])
def test_weights_add_up_to_one_however_large_the_scores(score: float) -> None:
    q, k, ones = torch.zeros(1, 4, 1, 8), torch.randn(1, 5, 1, 8), torch.ones(1, 5, 1, 8)
    a = flashtile.attention(q, k, ones, attn_bias=torch.full((4, 5), score), return_lse=True)
    b = flashtile.attention(q, k, 3 * ones, attn_bias=torch.full((4, 5), score), return_lse=True)
    outs, lses = [a[0].requires_grad_(), b[0].requires_grad_()], [a[1].requires_grad_(), b[1].requires_grad_()]
    merged, lse = flashtile.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert torch.equal(merged, 2 * torch.ones_like(merged))
    torch.testing.assert_close(lse, a[1] + math.log(2))
    grads = torch.autograd.grad(merged.sum() + lse.sum(), (*outs, *lses))
    assert all(torch.equal(x, torch.full_like(x, 0.5)) for x in grads[:2])
    # A head's 8 columns, each -1 or 1 from their average, at a weight of a half; and lse's own share.
    assert [x.unique().item() for x in grads[2:]] == [-3.5, 4.5]


def test_gradients_flow_through_a_merge() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        a = flashtile.attention(q, k[:, :2], v[:, :2], return_lse=True)
        b = flashtile.attention(q, k[:, 2:], v[:, 2:], return_lse=True)
        return flashtile.merge_states(*a, *b)[0]

    assert torch.autograd.gradcheck(split, (q, k, v))


def test_what_an_empty_part_holds_is_ignored() -> None:
    out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    merged, _ = flashtile.merge_states(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
    assert torch.equal(merged, out)


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b"])
def test_refuses_by_name(name: str) -> None:
    good = dict(
        out_a=torch.ones(1, 3, 2, 4), lse_a=torch.ones(1, 2, 3), out_b=torch.ones(1, 3, 2, 4), lse_b=torch.ones(1, 2, 3)
    )
    with pytest.raises(InvalidInputError, match=f"^{name}: "):
        flashtile.merge_states(**(good | {name: torch.ones(2, 2)}))
    with pytest.raises(InvalidInputError, match=f"^{name}: "):
        flashtile.merge_states(**(good | {name: None}))


@pytest.mark.parametrize("lse_a", [-torch.inf, 0.5])
@pytest.mark.parametrize("lse_b", [-torch.inf, 0.5])
def test_gradients_of_empty_states_are_zero_and_never_nan(lse_a: float, lse_b: float) -> None:
    lse = [torch.full((1, 1, 1), x, dtype=torch.float64, requires_grad=True) for x in (lse_a, lse_b)]
    out = [torch.randn(1, 1, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    merged, merged_lse = flashtile.merge_states(out[0], lse[0], out[1], lse[1])
    total = merged.sum() + torch.where(torch.isfinite(merged_lse), merged_lse, 0.0).sum()
    grads = torch.autograd.grad(total, (*out, *lse))
    assert all(torch.isfinite(g).all() for g in grads)
    for part, own in ((0, lse_a), (1, lse_b)):
        if own == -torch.inf:
            assert not grads[part].any() and not grads[2 + part].any()


def test_what_an_empty_state_holds_reaches_no_gradient() -> None:
    out, lse = torch.randn(1, 3, 2, 4, requires_grad=True), torch.randn(1, 2, 3, requires_grad=True)
    garbage = torch.full_like(out, torch.nan, requires_grad=True)
    empty = torch.full_like(lse, -torch.inf, requires_grad=True)
    merged = flashtile.merge_states(out, lse, garbage, empty)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    weights = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad(merged, (out, lse, garbage, empty), weights)
    expected = (*weights, torch.zeros_like(out), torch.zeros_like(lse))
    for grad, truth in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, truth)
