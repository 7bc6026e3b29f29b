"""torch.autocast: q, k and v in its dtype, as PyTorch's own attention has them, on every public entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import nn
from flashtile.compat import flash_attn_2
from tests.rule import assert_close

BOUNDS = torch.tensor([0, 3, 9], dtype=torch.int32)


def leaves(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"bias": (4, 9, 9), "sinks": (4,)}
    sizes = [shapes.get(name, (2, 9, 4 if name == "q" else 2, 16)) for name in names]
    return {name: torch.randn(n, dtype=dtype, requires_grad=True) for name, n in zip(names, sizes, strict=True)}


def dense(x: dict[str, Tensor], **keywords: Any) -> Tensor:
    return flashtile.attention(
        x["q"], x["k"], x["v"], attn_bias=x.get("bias"), sinks=x.get("sinks"), causal=True, **keywords
    )


def packed(x: dict[str, Tensor]) -> Tensor:
    return flashtile.attention_varlen(*(x[n].flatten(0, 1)[:9] for n in "qkv"), BOUNDS, BOUNDS, softcap=2.0)


def compat(x: dict[str, Tensor]) -> Tensor:
    return flash_attn_2.flash_attn_func(x["q"], x["k"], x["v"], causal=True)


CALLS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "plain": dense,
    "softcap": lambda x: dense(x, softcap=2.0),
    "wider_v": lambda x: dense({**x, "v": F.pad(x["v"], (0, 8), value=1.0)}),
    "packed": packed,
    "compat": compat,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CALLS, "bias_and_sinks"])
def test_is_the_call_on_cast_tensors_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    names = ("q", "k", "v", "bias", "sinks") if name == "bias_and_sinks" else ("q", "k", "v")
    x, call = leaves(*names), CALLS.get(name, dense)
    cast = {n: t.to(dtype) if n in "qkv" else t for n, t in x.items()}
    want = call(cast)
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, list(x.values()), dout)
    for backward_inside in (False, True):
        with torch.autocast("cpu", dtype=dtype):
            out = call(x)
            grads = torch.autograd.grad(out, list(x.values()), dout) if backward_inside else None
        grads = grads or torch.autograd.grad(out, list(x.values()), dout)
        assert out.dtype == dtype and torch.equal(out, want)
        for got, other in zip(grads, want_grads, strict=True):
            assert got.dtype == torch.float32 and torch.equal(got, other)


def test_forward_mode_is_that_of_the_cast_tensors() -> None:
    """Its sums are in float32 all the same, as outside autocast."""
    q = leaves("q")["q"].detach()
    dq = torch.randn_like(q)
    want = torch.func.jvp(lambda q: flashtile.attention(q, q, q), (q.bfloat16(),), (dq.bfloat16(),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.jvp(lambda q: flashtile.attention(q, q, q), (q,), (dq,))
    assert got[1].dtype == torch.bfloat16 and torch.equal(got[1], want[1])


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype_k", DTYPES, ids=str)
@pytest.mark.parametrize("dtype_q", DTYPES, ids=str)
def test_casts_what_sdpa_casts(dtype_q: torch.dtype, dtype_k: torch.dtype, into: torch.dtype) -> None:
    q, k = torch.randn(1, 5, 2, 8, dtype=dtype_q), torch.randn(1, 5, 2, 8, dtype=dtype_k)
    for on in (True, False):
        with torch.autocast("cpu", dtype=into, enabled=on):
            try:
                want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, k))).dtype
            except RuntimeError:
                with pytest.raises(flashtile.InvalidInputError, match="k: dtype"):
                    flashtile.attention(q, k, k)
            else:
                assert flashtile.attention(q, k, k).dtype == want


def test_only_the_device_that_autocast_is_on_for() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 64, device="cuda")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert flashtile.attention(q, q, q).dtype == torch.float32
        try:
            torch.set_autocast_enabled("cuda", True)  # torch.autocast would look for a GPU
            assert flashtile.attention(q, q, q).dtype == torch.get_autocast_dtype("cuda")
            x = torch.empty(1, 8, 2, 64)
            assert flashtile.attention(x, x, x).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)
    meta = torch.empty(1, 8, 2, 64, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashtile.attention(meta, meta, meta).dtype == torch.float32


def test_explain_and_warm_up_see_the_cast() -> None:
    q, k = torch.randn(1, 8, 2, 64), torch.randn(1, 8, 2, 64, dtype=torch.bfloat16)
    for describe in (flashtile.explain, lambda *x: flashtile.warm_up(*x, device="cpu")):
        with pytest.raises(flashtile.InvalidInputError, match="k: dtype"):
            describe(q, k, k)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            described = describe(q, k, k)
        assert described == describe(k, k, k)


@pytest.mark.parametrize("rotary", [False, True])
def test_the_module(rotary: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, num_kv_heads=2, causal=True, rotary=rotary)
    x = torch.randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
        q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k = (module.rotary(each, 0, None) if module.rotary is not None else each for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        plain = module.out_proj(plain.transpose(1, 2).flatten(-2))
        out.float().square().sum().backward()
    assert out.dtype == plain.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    module.double()
    assert_close({"out": out}, lambda: {"out": module(x.double())}, {"out": plain}, torch.bfloat16)


def test_compiled() -> None:
    torch._dynamo.reset()
    x = leaves("q", "k", "v")

    def loss(*qkv: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flashtile.attention(*qkv, causal=True).float().square().sum()

    want = torch.autograd.grad(loss(*x.values()), list(x.values()))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*x.values()), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
