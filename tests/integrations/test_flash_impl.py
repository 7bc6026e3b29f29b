"""flashtile in the place of PyTorch's flash attention operators, registered for CPU tensors to be run here."""

from __future__ import annotations

import inspect
import warnings
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


# Since PyTorch 2.12.
WHOLE = "block_table" in inspect.signature(varlen.varlen_attn).parameters
of_parts_of_keys = pytest.mark.skipif(not WHOLE, reason="this PyTorch's varlen_attn has no seqused_k and block_table")


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
    torch.manual_seed(3)
    plain = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False, scale=0.25)
    torch.manual_seed(3)
    debug = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, False, True, scale=0.25)
    assert torch.equal(debug[0], plain[0]) and not plain[-1].numel()
    assert torch.equal(debug[-1] < 0, debug[0] == 0)


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


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_sequence(
    q: tuple[Tensor, ...], k: tuple[Tensor, ...], v: tuple[Tensor, ...], window: tuple[int, int]
) -> dict[str, Tensor]:
    """out and lse of sequences, each ``(rows, heads, head_dim)``; -1 is an open side."""
    outs, lses = [], []
    for each in zip(q, k, v, strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1).repeat_interleave(4 // x.shape[1], 0) for x in each)
        apart = torch.arange(one_k.shape[1]) - torch.arange(one_q.shape[1])[:, None]
        apart = apart - (one_k.shape[1] - one_q.shape[1])
        keep = ((window[0] < 0) | (apart >= -window[0])) & ((window[1] < 0) | (apart <= window[1]))
        scores = (one_q @ one_k.mT * 0.3).masked_fill(~keep, -torch.inf)
        outs.append((scores.softmax(-1).nan_to_num() @ one_v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return {"out": torch.cat(outs), "lse": torch.cat(lses, -1)}


# Queries and keys of each sequence, and of its keys those that are used; pages have four keys.
ROWS, KEYS, USED = (5, 1, 8), (9, 6, 8), (7, 0, 8)
BOUNDS = ints(0, 5, 6, 14), ints(0, 9, 15, 23)
TABLE = torch.tensor([[4, 1, 6], [0, 0, 0], [5, 2, 3]], dtype=torch.int32)


@of_parts_of_keys
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("window", "num_splits"), [((-1, -1), None), ((-1, 0), 1), ((3, 1), 4)])
@pytest.mark.usefixtures("on_cpu")
def test_varlen_attn_over_parts_of_keys(
    window: tuple[int, int], num_splits: int | None, paged: bool, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(14, 4, 16), torch.randn(23, 2, 16), torch.randn(23, 2, 16)
    seen: list[int] = []
    forward = _flash_impl.flash_attn._flash_attn_varlen_forward

    def spy(*args: Any) -> Any:
        seen.append(args[-1])
        return forward(*args)

    monkeypatch.setattr(_flash_impl.flash_attn, "_flash_attn_varlen_forward", spy)
    used = [tuple(x[:n] for x, n in zip(whole.split(KEYS), USED, strict=True)) for whole in (k, v)]
    keywords: dict[str, Any] = {"seqused_k": ints(*USED), "num_splits": num_splits, "enable_gqa": True}
    keywords |= {"window_size": window, "scale": 0.3, "return_aux": varlen.AuxRequest(lse=True)}
    bounds_k: Tensor | None = BOUNDS[1]
    if paged:
        pages = [torch.full((7, 4, 2, 16), torch.nan) for _ in range(2)]
        for whole, given in zip(pages, used, strict=True):
            for row, each in zip(TABLE.tolist(), given, strict=True):
                for j, one in enumerate(each):
                    whole[row[j // 4], j % 4] = one
        k, v = pages
        keywords["block_table"], bounds_k = TABLE, None
    given = (q, k, v, BOUNDS[0], bounds_k, 8, 9)
    if inplace:
        out = torch.full_like(q, torch.nan)
        found, lse = varlen.varlen_attn_out(out, *given, **keywords)
        assert found is out
    else:
        out, lse = varlen.varlen_attn(*given, **keywords)
    assert seen == [int(num_splits == 1)] and sdpa.calls.served == 1
    sequences = (q.split(ROWS), *used)
    wide = [tuple(x.double() for x in each) for each in sequences]
    plain = by_sequence(*sequences, window)
    assert_close({"out": out, "lse": lse}, lambda: by_sequence(*wide, window), plain, q.dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_quantized_sdpa_operator(causal: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(4)
    # Heads beside one another in memory, as a projection leaves them.
    shapes = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    q, k, v = (torch.randn(x, generator=generator).to(torch.float8_e4m3fn).transpose(1, 2) for x in shapes)
    descales = [torch.rand(2, 2, generator=generator) + 0.5 for _ in range(3)]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        found = aten._scaled_dot_product_flash_attention.quantized(*given, 0.0, causal, scale=0.3)
        return found[0], found[1]

    out, lse = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(q, k, v, *descales)
    assert out.dtype == torch.bfloat16 and out.stride() == q.stride() and sdpa.calls.served == 1

    def wide(x: Tensor, descale: Tensor) -> Tensor:
        scaled = x.double() * descale.double().repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
        return scaled.repeat_interleave(4 // x.shape[1], 1)

    exact = [wide(x, descale) for x, descale in zip((q, k, v), descales, strict=True)]
    want, _ = aten._scaled_dot_product_attention_math(*exact, None, is_causal=causal, scale=0.3)
    scores = exact[0] @ exact[1].mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(out, want.to(out.dtype))
    torch.testing.assert_close(lse, scores.logsumexp(-1).to(lse.dtype))


@pytest.mark.usefixtures("on_cpu")
def test_quantized_packed_operator() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(x, 4, 16, generator=generator).to(torch.float8_e4m3fn) for x in (14, 23, 23))
    descales = [torch.rand(3, 4, generator=generator) + 0.5 for _ in range(3)]
    call = (q, k, v, *BOUNDS, 8, 9, 0.0, False, False)
    keywords = {"scale": 0.3, "window_size_left": 3, "window_size_right": 1, "seqused_k": ints(*USED)}
    out, lse, *_ = aten._flash_attention_forward.quantized(*call, *descales, **keywords)
    assert out.dtype == torch.bfloat16 and sdpa.calls.served == 1

    def sequences(x: Tensor, descale: Tensor, lengths: tuple[int, ...], used: tuple[int, ...]) -> tuple[Tensor, ...]:
        parts = zip(x.double().split(lengths), descale.double(), used, strict=True)
        return tuple(part[:n] * by_head[:, None] for part, by_head, n in parts)

    sides = ((q, ROWS, ROWS), (k, KEYS, USED), (v, KEYS, USED))
    wide = [sequences(x, descale, *lengths) for (x, *lengths), descale in zip(sides, descales, strict=True)]
    want = by_sequence(*wide, (3, 1))
    torch.testing.assert_close(out, want["out"].to(out.dtype))
    torch.testing.assert_close(lse, want["lse"].to(lse.dtype))
    plain, *_ = aten._flash_attention_forward(*call, **keywords)  # without descales they are 1
    ones, *_ = aten._flash_attention_forward.quantized(*call, *[torch.ones(3, 4)] * 3, **keywords)
    assert torch.equal(plain, ones) and not torch.equal(plain, out)


@pytest.mark.parametrize(("name", "argument"), [
    ("seqused_k", ints(3, 3)), ("num_splits", 2), ("block_table", torch.zeros(2, 1, dtype=torch.int32)),
])  # fmt: skip
@pytest.mark.usefixtures("on_cpu")
def test_what_flashtile_lacks_is_refused(name: str, argument: object) -> None:
    q = torch.randn(2, 5, 4, 16)
    known = [each.name for each in aten._flash_attention_forward.default._schema.arguments]
    if name in known:
        with pytest.raises(UnsupportedError, match=name):
            aten._flash_attention_forward(q, q, q, None, None, 5, 5, 0.0, False, False, **{name: argument})
    x = q.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="return_debug_mask .* is True"):
        aten._flash_attention_forward(x, x, x, None, None, 5, 5, 0.0, False, True)
    with pytest.raises(UnsupportedError, match="dropout_p .* is 0.5"):
        aten._flash_attention_forward(x, x, x, None, None, 5, 5, 0.5, False, False)
    if name in known and name != "seqused_k":  # which goes with packed sequences of 8 bits
        with pytest.raises(UnsupportedError, match=name):
            aten._flash_attention_forward(x[0], x[0], x[0], *BOUNDS, 5, 5, 0.0, False, False, **{name: argument})
    assert sdpa.calls.served == 0


# cuDNN, which PyTorch may ask first.


@pytest.fixture
def cudnn() -> Iterator[list[str]]:
    """Stands for cuDNN's kernels on CPU tensors, and notes the calls; the function is registered over it."""
    seen: list[str] = []
    library = torch.library.Library("aten", "IMPL", "CPU")

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, *plain: Any, scale: Any = None) -> Any:
        seen.append(f"{len(plain)}, {scale}")
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *plain[:2], scale=scale)
        return out, lse, None, None, q.shape[2], k.shape[2], ints(0), ints(0), out.new_empty(0)

    library.impl("_scaled_dot_product_cudnn_attention", run)
    sdpa.calls.clear()
    handle = _flash_impl.Handle(sdpa.calls, "CPU")
    yield seen
    handle.remove()
    left = sdpa.calls.left.total()
    aten._scaled_dot_product_cudnn_attention(*[torch.ones(1, 1, 1, 16)] * 3, None, True)
    assert sdpa.calls.left.total() == left, "still counts"
    library._destroy()


def test_calls_that_cudnn_gets_are_counted_and_the_first_one_warns(cudnn: list[str]) -> None:
    q = torch.randn(1, 2, 5, 16)

    def run() -> Tensor:
        return aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, True, scale=0.3)[0]

    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.CUDNN_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("error")  # somebody chose cuDNN
        run()
    with pytest.warns(UserWarning, match="PyTorch asks cuDNN before flash attention"):
        out = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert sdpa.calls.left == {"PyTorch chose cuDNN's attention": 3} and sdpa.calls.served == 0
    assert cudnn == ["2, 0.3"] * 3
    torch.testing.assert_close(out, aten._scaled_dot_product_attention_math(q, q, q, is_causal=True, scale=0.3)[0])


def test_flash_attention_is_not_counted_as_cudnns(cudnn: list[str]) -> None:
    q = torch.randn(1, 2, 5, 16)
    aten._scaled_dot_product_flash_attention(q, q, q)
    assert (sdpa.calls.served, sdpa.calls.left.total(), cudnn) == (1, 0, [])
