"""flashtile in the place of PyTorch's flash attention operators, registered for CPU tensors to be run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen

from flashtile import UnsupportedError
from flashtile.integrations import _flash_impl, sdpa
from tests.rule import assert_close

aten = torch.ops.aten


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Registers the functions for CPU tensors, where PyTorch itself has none of these operators."""
    sdpa.calls.clear()
    handle = _flash_impl.Handle(sdpa.calls, "CPU")
    yield
    handle.remove()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")


def has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def test_users_activate_and_restore_it_by_name() -> None:
    assert "flashtile" in torch_attention.list_flash_attention_impls()
    before = {name: has_kernel(name) for name in _flash_impl.FUNCTIONS}
    torch_attention.activate_flash_attention_impl("flashtile")
    try:
        assert torch_attention.current_flash_attention_impl() == "flashtile"
        assert all(map(has_kernel, _flash_impl.FUNCTIONS))
    finally:
        torch_attention.restore_flash_attention_impl()
    assert {name: has_kernel(name) for name in _flash_impl.FUNCTIONS} == before
    assert torch_attention.current_flash_attention_impl() is None


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def with_gradients(tensors: tuple[Tensor, ...], out: Tensor) -> dict[str, Tensor]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad(out, tensors, dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def math(tensors: tuple[Tensor, ...], **keywords: Any) -> dict[str, Tensor]:
    return with_gradients(tensors, aten._scaled_dot_product_attention_math(*tensors, None, **keywords)[0])


def lse_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q and k ``(..., seqlen, head_dim)``; causal from the bottom right."""
    scores = q @ k.mT * scale
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return scores.masked_fill(~keep, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(("compiled", "dtype", "heads_kv", "scale"), [
    (False, torch.float32, 4, None), (False, torch.bfloat16, 2, 0.3), (True, torch.float32, 4, 0.3),
])  # fmt: skip
@pytest.mark.usefixtures("on_cpu")
def test_sdpa_operator(compiled: bool, dtype: torch.dtype, heads_kv: int, scale: float | None) -> None:
    tensors = leaves((2, 4, 9, 16), (2, heads_kv, 9, 16), (2, heads_kv, 9, 16), dtype=dtype)
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
        return found[0], found[1]

    out, lse = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*tensors)
    got = with_gradients(tensors, out)
    assert out.stride() == torch.empty_like(tensors[0]).stride() and sdpa.calls.served == 1
    keywords = {"is_causal": True, "scale": scale, "enable_gqa": heads_kv != 4}
    assert lse.dtype == torch.float32

    def by_definition(tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        lse = lse_of(tensors[0], tensors[1].repeat_interleave(4 // heads_kv, 1), scale or 0.25)
        return math(tensors, **keywords) | {"lse": lse}

    doubled = tuple(x.detach().double().requires_grad_() for x in tensors)
    assert_close(got | {"lse": lse}, lambda: by_definition(doubled), by_definition(tensors), dtype)


@pytest.mark.usefixtures("on_cpu")
def test_dropout_in_the_backward_is_that_of_the_forward() -> None:
    """With v the identity the output shows the probabilities, and dv of a sum their column sums."""
    q, k = leaves((1, 2, 30, 16), (1, 2, 30, 16))
    v = torch.eye(30).expand(1, 2, 30, 30).clone().requires_grad_()
    q, k = (torch.nn.functional.pad(x, (0, 14)) for x in (q, k))
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False, scale=0.25)[0]
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert 0.3 < (out == 0).float().mean() < 0.5
    torch.testing.assert_close(dv, out.detach().sum(-2).unsqueeze(-1).expand_as(dv))


@pytest.mark.usefixtures("on_cpu")
def test_deterministic_algorithms_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    backward = _flash_impl.flash_attn._flash_attn_backward

    def spy(*given: Any) -> Any:
        seen.append(given[-2])
        return backward(*given)

    monkeypatch.setattr(_flash_impl.flash_attn, "_flash_attn_backward", spy)
    tensors = leaves((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16))
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            aten._scaled_dot_product_flash_attention(*tensors)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.usefixtures("on_cpu")
def test_packed_operator_runs_pytorchs_varlen_attn(window: tuple[int, int]) -> None:
    lengths = (5, 1, 8)
    bounds = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    tensors = leaves((14, 4, 16), (14, 4, 16), (14, 4, 16))
    request = varlen.AuxRequest(lse=True)
    out, lse = varlen.varlen_attn(*tensors, bounds, bounds, 8, 8, return_aux=request, window_size=window, scale=0.3)
    got = with_gradients(tensors, out)
    assert sdpa.calls.served == 1

    def each(given: tuple[Tensor, ...]) -> dict[str, Tensor]:
        outs, lses = [], []
        for q, k, v in zip(*(x.split(lengths) for x in given), strict=True):
            scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * 0.3
            i, j = torch.arange(len(q))[:, None], torch.arange(len(q))
            keep = torch.ones(len(q), len(q), dtype=torch.bool) if window[0] < 0 else (j <= i) & (j >= i - 3)
            scores = scores.masked_fill(~keep, -torch.inf)
            outs.append((scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1))
            lses.append(scores.logsumexp(-1))
        return with_gradients(given, torch.cat(outs)) | {"lse": torch.cat(lses, -1)}

    doubled = tuple(x.detach().double().requires_grad_() for x in tensors)
    assert_close(got | {"lse": lse}, lambda: each(doubled), each(tensors), tensors[0].dtype)


@pytest.mark.usefixtures("on_cpu")
def test_inference_writes_into_the_tensor_that_is_given() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in leaves((2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16)))
    out = torch.full_like(q, torch.nan)
    call = (q, k, v, None, None, 9, 12, 0.0, True, False)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *call)
    want, want_lse, *_ = aten._flash_attention_forward(*call)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    plain = {"lse": lse_of(q, k, 0.25)}
    assert_close({"lse": lse}, lambda: {"lse": lse_of(q.double(), k.double(), 0.25)}, plain, q.dtype)


@pytest.mark.parametrize(("name", "argument"), [
    ("seqused_k", torch.tensor([3, 3], dtype=torch.int32)), ("num_splits", 2),
    ("block_table", torch.zeros(2, 1, dtype=torch.int32)),
])  # fmt: skip
@pytest.mark.usefixtures("on_cpu")
def test_what_flashtile_lacks_is_refused(name: str, argument: object) -> None:
    q = torch.randn(2, 5, 4, 16)
    with pytest.raises(UnsupportedError, match=name):
        aten._flash_attention_forward(q, q, q, None, None, 5, 5, 0.0, False, False, **{name: argument})
    with pytest.raises(UnsupportedError, match="return_debug_mask"):
        aten._flash_attention_forward(q, q, q, None, None, 5, 5, 0.0, False, True)
    assert sdpa.calls.served == 0
