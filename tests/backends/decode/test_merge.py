"""The merging kernel in Triton's interpreter, against ``flashtile.core.states.merge`` in float64."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.gpu.decode import merge
from flashtile.core import states


@pytest.mark.parametrize("shape", [(2, 5, 3, 33), (7, 4, 16), (1, 1, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_states(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    *lead, seqlen, heads, _ = shape
    out_a, out_b = torch.randn(shape).to(dtype), torch.randn(shape)
    lse_a, lse_b = torch.randn(*lead, heads, seqlen) * 9, torch.randn(*lead, heads, seqlen) * 9
    # Empty states, whose outputs may be anything.
    lse_a.view(-1)[0] = -torch.inf
    out_a.view(-1, shape[-1])[0] = torch.nan
    if lse_a.numel() > 3:
        lse_a[..., -1] = lse_b[..., -1] = -torch.inf
    assert merge.can_merge(out_a, lse_a, out_b, lse_b)
    out, lse = merge.merge(out_a, lse_a, out_b, lse_b)
    want, want_lse = states.merge(
        out_a.double().transpose(-2, -3), lse_a.double(), out_b.double().transpose(-2, -3), lse_b.double()
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), want.transpose(-2, -3), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("top", [torch.finfo(torch.float32).min, -1e9, torch.finfo(torch.float32).max])
def test_weights_add_up_to_one_however_large_lse_is(top: float) -> None:
    out, lse = torch.ones(2, 3, 2, 16), torch.full((2, 2, 3), top)
    lower = torch.where(torch.arange(3) == 2, -torch.inf, lse)
    for more_out, more_lse, want in ((3 * out, lse, 2.0), (3 * out, torch.zeros_like(lse), 1.0 + 2 * (top < 0))):
        merged, merged_lse = merge.merge(out, lse, more_out, more_lse)
        assert torch.equal(merged, want * out)
        assert torch.equal(merged_lse, torch.maximum(lse, more_lse))
    merged, _ = merge.merge(out, lower, 3 * out, lse)
    assert torch.equal(merged[:, :2], 2 * out[:, :2]) and torch.equal(merged[:, 2], 3 * out[:, 2])


def test_what_the_kernel_does_not_take() -> None:
    out, lse = torch.zeros(2, 4, 3, 16), torch.zeros(2, 3, 4)
    assert not merge.can_merge(out.double(), lse.double(), out.double(), lse.double())
    assert not merge.can_merge(out.transpose(1, 2), lse, out.transpose(1, 2), lse)
    assert not merge.can_merge(out[:0], lse[:0], out[:0], lse[:0])
