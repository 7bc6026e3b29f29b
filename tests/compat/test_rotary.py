"""flash-attn's rotary embedding against multiplication by complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import InvalidInputError
from flashtile.compat import rotary
from flashtile.compat.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from tests.compat.by_hand import shown, spun

ANGLES = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """By the angles of the tables; features behind the sixth stay."""
    return spun(x, ANGLES[positions], interleaved)


SIGNATURES = {
    "RotaryEmbedding": "(dim, base=10000.0, interleaved=False, scale_base=None, device=None)",
    "apply_rotary": (
        "(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, "
        "conjugate=False)"
    ),
    "apply_rotary_emb": (
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)"
    ),
    "apply_rotary_emb_kv_": "(kv, cos, sin, interleaved=False, seqlen_offsets=0)",
    "apply_rotary_emb_qkv_": (
        "(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)"
    ),
    "apply_rotary_emb_torch": "(x, cos, sin, interleaved=False)",
    "rotate_half": "(x, interleaved=False)",
}
SIGNATURES["apply_rotary_emb_func"] = SIGNATURES["apply_rotary_emb"]


def test_signatures() -> None:
    assert {name: shown(getattr(rotary, name)) for name in rotary.__all__} == SIGNATURES
    forward = "(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)"
    assert shown(RotaryEmbedding.forward) == forward


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_conjugate_turns_back(interleaved: bool) -> None:
    x = torch.randn(2, 7, 3, 9, dtype=torch.float64)
    there = rotary.apply_rotary(x, COS, SIN, 4, interleaved=interleaved)
    torch.testing.assert_close(rotary.apply_rotary(there, COS, SIN, 4, interleaved=interleaved, conjugate=True), x)
    torch.testing.assert_close(there, turned(x, torch.arange(4, 11), interleaved))
    torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, COS[4:11], SIN[4:11], interleaved), there)
    tables = (COS[4:11].expand(2, 7, 3), SIN[4:11].expand(2, 7, 3))
    torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, *tables, interleaved), there)
    quarter = torch.zeros(7, 3), torch.ones(7, 3)
    expected = rotary.apply_rotary(x[..., :6], *quarter, interleaved=interleaved)
    torch.testing.assert_close(rotary.rotate_half(x[..., :6], interleaved), expected)


OFFSETS: list[int | Tensor] = [0, 5, torch.tensor([3, 9])]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("own_table_for_k", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_packed_q_k_v(interleaved: bool, offsets: int | Tensor, own_table_for_k: bool, grouped: bool) -> None:
    shape = (2, 7, 8, 9) if grouped else (2, 7, 3, 4, 9)  # four heads of q; grouped, two of k and of v
    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.split([4, 2, 2], dim=2) if grouped else qkv.unbind(2)
    positions = (torch.arange(7) + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)).expand(2, 7)
    q, k = turned(q, positions, interleaved), turned(k, positions + 2 * own_table_for_k, interleaved)
    expected = torch.cat([q, k, v], dim=2) if grouped else torch.stack([q, k, v], dim=2)
    dout = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, qkv, dout)

    k_tables = (COS[2:], SIN[2:]) if own_table_for_k else (None, None)
    tail = (COS, SIN, *k_tables, interleaved, offsets, 4 if grouped else None)
    middle = qkv * 1
    assert apply_rotary_emb_qkv_(middle, *tail) is middle
    torch.testing.assert_close(middle, expected)
    torch.testing.assert_close(torch.autograd.grad(middle, qkv, dout)[0], truth)  # though nothing returned was used
    leaf = qkv.detach().clone().requires_grad_()
    out = apply_rotary_emb_qkv_(leaf, *tail)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(leaf, expected)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, dout)[0], truth)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_packed_k_v(interleaved: bool, offsets: int | Tensor) -> None:
    kv = torch.randn(2, 7, 2, 4, 9, dtype=torch.float64, requires_grad=True)
    positions = (torch.arange(7) + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)).expand(2, 7)
    expected = torch.stack([turned(kv[:, :, 0], positions, interleaved), kv[:, :, 1]], dim=2)
    dout = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, kv, dout)
    out = apply_rotary_emb_kv_(kv, COS, SIN, interleaved, offsets)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, kv, dout)[0], truth)
    torch.testing.assert_close(kv, expected)


class Unpadded(torch.autograd.Function):
    """How models call the kernel from autograd functions of their own: on a view, in place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        rotary.apply_rotary(qkv[:, :, :4], COS, SIN, 2, inplace=True)
        ctx.mark_dirty(qkv)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([rotary.apply_rotary(grad[:, :, :4], COS, SIN, 2, conjugate=True), grad[:, :, 4:]], dim=2)


def test_inplace_within_an_autograd_function() -> None:
    x = torch.randn(2, 7, 6, 9, dtype=torch.float64, requires_grad=True)
    expected = torch.cat([turned(x[:, :, :4], torch.arange(2, 9), False), x[:, :, 4:]], dim=2)
    out = Unpadded.apply(x * 1)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout))


def module_turned(x: Tensor, positions: Tensor, base: float, interleaved: bool, scale: Tensor | float = 1.0) -> Tensor:
    """All features of x (..., rows, heads, dim) turned by the angles of a RotaryEmbedding, times scale."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * base ** -(torch.arange(half, dtype=torch.float64) / half)
    return spun(x.double(), angles, interleaved, scale)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 4.0])
def test_module(interleaved: bool, scale_base: float | None) -> None:
    module = RotaryEmbedding(8, base=100.0, interleaved=interleaved, scale_base=scale_base)
    assert list(module.state_dict()) == []
    q, k, v = (torch.randn(2, 7, 3, 8) for _ in range(3))
    positions = torch.arange(5, 12)
    scale: Tensor | float = 1.0
    if scale_base is not None:  # the tables hold 12 positions
        pairs = torch.arange(4, dtype=torch.float64)
        scale = ((2 * pairs / 8 + 0.4) / 1.4) ** ((positions[:, None] - 6) / scale_base)
    expected_q = module_turned(q, positions, 100.0, interleaved, scale).float()
    expected_k = module_turned(k, positions, 100.0, interleaved, 1 / scale).float()
    qkv, kv = torch.stack([q, k, v], dim=2), torch.stack([k, v], dim=2)
    torch.testing.assert_close(module(qkv, seqlen_offset=5), torch.stack([expected_q, expected_k, v], dim=2))
    out_q, out_kv = module(q.clone(), kv, seqlen_offset=torch.tensor([5, 5]), max_seqlen=12)
    torch.testing.assert_close(out_q, expected_q)
    torch.testing.assert_close(out_kv, torch.stack([expected_k, v], dim=2))
    flat = torch.cat([q, k[:, :, :1], v[:, :, :1]], dim=2)
    found = module(flat, seqlen_offset=5, num_heads_q=3)
    torch.testing.assert_close(found, torch.cat([expected_q, expected_k[:, :, :1], v[:, :, :1]], dim=2))


def test_tables_grow_are_kept_and_follow_dtypes_and_modes() -> None:
    module = RotaryEmbedding(8)
    with torch.inference_mode():
        module(torch.zeros(1, 4, 3, 1, 8))
        kept = module._cos_cached
        module(torch.zeros(1, 3, 3, 1, 8))
        assert module._cos_cached is kept
    qkv = torch.randn(1, 4, 3, 1, 8, requires_grad=True)
    out = module(qkv * 1)
    torch.testing.assert_close(out[:, :, 0], module_turned(qkv[:, :, 0], torch.arange(4), 1e4, False).float())
    out.sum().backward()
    assert module._cos_cached is not kept and module._cos_cached.shape == (4, 4)
    module(torch.zeros(1, 9, 3, 1, 8))
    assert module._cos_cached.shape == (9, 4)
    # As low-precision tables are made in float32, far positions are as good as near ones.
    low = module.to(torch.bfloat16)
    x = torch.randn(1, 2, 3, 1, 8).bfloat16()
    far = low(x.clone(), seqlen_offset=3000)
    assert low._cos_cached.dtype == torch.bfloat16
    expected = module_turned(x[:, :, 0], torch.tensor([3000, 3001]), 1e4, False)
    # The tables' rounding to 8 bits, and the result's.
    torch.testing.assert_close(far[:, :, 0].double(), expected, rtol=2**-7, atol=2**-6)


def test_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(apply_rotary_emb_qkv_, fullgraph=True, backend="aot_eager")
    qkv = torch.randn(2, 7, 3, 4, 9, dtype=torch.float64)
    dout = torch.randn_like(qkv)
    results = []
    for function in (compiled, apply_rotary_emb_qkv_):
        leaf = qkv.clone().requires_grad_()
        out = function(leaf, COS, SIN, seqlen_offsets=3)
        results.append((out, leaf, *torch.autograd.grad(out, leaf, dout)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_bad_calls_name_their_argument() -> None:
    x = torch.zeros(1, 7, 2, 6)
    for argument, call in {
        "x: ": lambda: apply_rotary_emb(x[0], COS, SIN),
        "cos: is a NoneType": lambda: apply_rotary_emb(x, None, SIN),
        "cos: has": lambda: apply_rotary_emb(x, COS[:5], SIN[:5]),
        "sin: ": lambda: apply_rotary_emb(x, COS, SIN[:, :2]),
    }.items():
        with pytest.raises(InvalidInputError, match=f"^{argument}"):
            call()
    with pytest.raises(InvalidInputError, match="^cos: turns 6 features"):
        apply_rotary_emb(x[..., :4], COS, SIN)
    with pytest.raises(InvalidInputError, match="^cos: has 20 rows, but positions go up to 21"):
        apply_rotary_emb(x, COS, SIN, seqlen_offsets=15)
    with pytest.raises(InvalidInputError, match="^dim: "):
        RotaryEmbedding(7)
    with pytest.raises(InvalidInputError, match="^num_heads_q: "):
        RotaryEmbedding(6)(x, torch.zeros(1, 7, 2, 2, 6), num_heads_q=3)
    with pytest.raises(InvalidInputError, match="^num_heads_q: "):
        apply_rotary_emb_qkv_(x, COS, SIN)
    with pytest.raises(InvalidInputError, match="^kv: "):
        apply_rotary_emb_kv_(x, COS, SIN)
    with pytest.raises(InvalidInputError, match="^max_seqlen: "):
        RotaryEmbedding(6)(torch.zeros(1, 7, 3, 2, 6), seqlen_offset=torch.tensor([1]))
    with pytest.raises(InvalidInputError, match="^cos: has 7 rows, but positions go up to 8"):
        module = RotaryEmbedding(6)
        module(torch.zeros(1, 7, 3, 2, 6), seqlen_offset=2, max_seqlen=7)
