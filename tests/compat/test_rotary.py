"""flash-attn's apply_rotary_emb against multiplication by complex numbers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError
from flashtile.compat.rotary import apply_rotary_emb

ANGLES = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, turned by exp(i angle); features behind the sixth stay."""
    head, rest = x[..., :6], x[..., 6:]
    pairs = head.unflatten(-1, (3, 2)) if interleaved else head.unflatten(-1, (2, 3)).transpose(-1, -2)
    spun = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * ANGLES[positions])[..., None, :]
    pairs = torch.view_as_real(spun)
    head = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([head, rest], dim=-1)


def test_signature() -> None:
    shown = {p.name: p.default for p in inspect.signature(apply_rotary_emb).parameters.values()}
    empty = inspect.Parameter.empty
    assert shown == {
        **dict.fromkeys(("x", "cos", "sin"), empty),
        "interleaved": False,
        "inplace": False,
        "seqlen_offsets": 0,
        "cu_seqlens": None,
        "max_seqlen": None,
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, torch.tensor([3, 0, 9])])
@pytest.mark.parametrize("head_dim", [6, 9])
def test_dense(interleaved: bool, offsets: int | Tensor, head_dim: int) -> None:
    x = torch.randn(3, 7, 2, head_dim, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(7) + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    expected = turned(x, positions.expand(3, 7), interleaved)
    out = apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=offsets)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout))
    y = x.detach().clone()
    assert apply_rotary_emb(y, COS, SIN, interleaved, inplace=True, seqlen_offsets=offsets) is y
    torch.testing.assert_close(y, expected.detach())


def test_inplace_has_a_gradient() -> None:
    x = torch.randn(1, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda t: apply_rotary_emb(t * 2, COS, SIN, inplace=True), (x,))


@pytest.mark.parametrize("offsets", [2, torch.tensor([4, 1, 0])])
def test_packed(offsets: int | Tensor) -> None:
    x = torch.randn(11, 2, 6, dtype=torch.float64)
    first = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 3
    positions = torch.tensor([first[0] + i for i in range(4)] + [first[2] + i for i in range(5)] + [0, 0])
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # the last two rows belong to nobody
    out = apply_rotary_emb(x, COS, SIN, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=5)
    torch.testing.assert_close(out[:9], turned(x, positions, False)[:9])


def test_low_precision_is_computed_in_float32() -> None:
    x = torch.randn(1, 7, 2, 6).to(torch.bfloat16)
    expected = turned(x.double(), torch.arange(7), False)
    out = apply_rotary_emb(x, COS.float(), SIN.float())
    assert out.dtype == torch.bfloat16
    # One rounding to 8 bits at the end and nothing else.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


def test_bad_calls_name_their_argument() -> None:
    x = torch.zeros(1, 7, 2, 6)
    for argument, call in {
        "x": lambda: apply_rotary_emb(x[0], COS, SIN),
        "cos": lambda: apply_rotary_emb(x, COS[:5], SIN[:5]),
        "sin": lambda: apply_rotary_emb(x, COS, SIN[:, :2]),
    }.items():
        with pytest.raises(InvalidInputError, match=f"^{argument}: "):
            call()
    with pytest.raises(InvalidInputError, match="^cos: turns 6 features"):
        apply_rotary_emb(x[..., :4], COS, SIN)
    with pytest.raises(InvalidInputError, match="^cos: has 20 rows, but positions go up to 21"):
        apply_rotary_emb(x, COS, SIN, seqlen_offsets=15)
