"""Training in 8 bits: the forward's results are those of 8 bits, its gradients those of 16 at the rounded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError
from flashtile.call.arguments import Grads, Options, Tensors
from flashtile.call.rotation import rotate
from flashtile.ops import operators as ops


def leaves(dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, 140)) -> list[Tensor]:
    """q, k, v and sinks."""
    make = torch.Generator().manual_seed(0)
    shapes = [(*rows, 4, 32), (*rows, 2, 32), (*rows, 2, 48)]
    made = [torch.randn(shape, generator=make).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in (*made, torch.randn(4, generator=make))]


def rounded(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, smooth: bool) -> list[Tensor]:
    """The numbers that 8 bits hold, by products with the rotation's matrix, in the dtype of q."""
    lengths = {} if bounds is None else {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    found = [x.double() for x in flashtile.quantize(q, k, v, smooth_k=smooth, **lengths).dequantized()]
    matrix = rotate(torch.eye(q.shape[-1], dtype=torch.float64)).T
    found[:2] = found[0] @ matrix, found[1] @ matrix
    if smooth:
        parts = [k] if bounds is None else k.split(bounds.diff().tolist())
        along = 1 if bounds is None else 0
        found[1] += torch.cat([x.double().mean(along, True).expand_as(x) for x in parts], along)
    return [x.to(q.dtype) for x in found]


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


CU = torch.tensor([0, 100, 280], dtype=torch.int32)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal_window": {"causal": True, "window_size": (50, 0)},
    "softcap": {"softcap": 3.0},
    "deterministic": {"deterministic": True, "softmax_scale": 0.1},
    "packed": {"causal": True, "packed": True},
}


def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, packed: bool = False, **keywords: Any) -> Any:
    """out and lse of the public function."""
    if packed:
        return flashtile.attention_varlen(q, k, v, CU, CU, sinks=sinks, return_lse=True, **keywords)
    return flashtile.attention(q, k, v, sinks=sinks, return_lse=True, **keywords)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_16_bits_at_the_rounded_numbers_with_the_lse_of_8(name: str, dtype: torch.dtype) -> None:
    keywords = CALLS[name]
    inputs = leaves(dtype, (280,) if "packed" in keywords else (2, 140))
    out, lse = run(*inputs, precision="fp8", **keywords)
    with torch.no_grad():
        plain, plain_lse = run(*inputs, precision="fp8", **keywords)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and out.dtype == dtype
    make = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=make).to(dtype), torch.randn(lse.shape, generator=make)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))

    window, bounds = keywords.get("window_size", (None, None)), CU if "packed" in keywords else None
    options = Options(
        window[0], 0 if keywords.get("causal") else None, grads=Grads(True, True, True, False, True),
        softmax_scale=keywords.get("softmax_scale"), softcap=keywords.get("softcap", 0.0),
    )  # fmt: skip
    with torch.no_grad():
        q, k, v = rounded(*inputs[:3], bounds, "softcap" not in keywords)
        tensors = Tensors(q, k, v, sinks=inputs[3], cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        want = ops.BACKWARD.overload(dout, dlse, plain, plain_lse, *ops.REGULAR.flatten(tensors, options))
    for x, y in zip(got, (*want[:3], want[4]), strict=True):
        # A number or two may be rounded to the other side.
        assert off(x, y) < 2e-3
    regular = torch.autograd.grad(run(*inputs, **keywords), inputs, (dout, dlse))
    assert all(0 < off(x, y) < 0.1 for x, y in zip(got[:3], regular[:3], strict=True))


def test_what_all_keys_have_in_common_has_no_gradient() -> None:
    """Softmax does not see it. Where a row's probabilities do not add up to 1 it has one, and training diverges."""
    q, k, v, _ = leaves()
    out = flashtile.attention(3 * q, 3 * k, v, precision="fp8")
    make = torch.Generator().manual_seed(1)
    (dk,) = torch.autograd.grad(out, [k], torch.randn(out.shape, generator=make).bfloat16())
    assert dk.double().sum(1).norm() < 0.2 * dk.double().norm()


def test_gradients_of_some_inputs_and_of_lse_alone() -> None:
    q, k, v, sinks = leaves()
    out, lse = run(q, k.detach(), v.detach(), sinks.detach(), precision="fp8")
    (dq,) = torch.autograd.grad(lse.sum(), [q])
    _, full = run(q, k, v, sinks)
    assert off(dq, torch.autograd.grad(full.sum(), [q])[0]) < 0.1
    out = flashtile.attention(q, k.detach(), v.detach(), precision="fp8")
    assert (
        out.requires_grad and not flashtile.attention(q.detach(), k.detach(), v.detach(), precision="fp8").requires_grad
    )


@pytest.mark.long
def test_compiles_whole_and_under_func_grad() -> None:
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, causal=True, precision="fp8").float().square().sum()

    inputs = leaves()[:3]
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    under_func = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in inputs))
    for x, y, z in zip(got, want, under_func, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(z, y)


def test_autocast_gives_gradients_in_the_dtypes_that_went_in() -> None:
    inputs = [x.detach().float().requires_grad_() for x in leaves()[:3]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashtile.attention(*inputs, precision="fp8")
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0 for x in inputs)


def test_there_is_no_second_derivative_and_no_gradient_of_a_quantized() -> None:
    q, k, v, _ = leaves()
    out = flashtile.attention(q, k, v, precision="fp8")
    (dq,) = torch.autograd.grad(out.float().square().sum(), [q], create_graph=True)
    with pytest.raises(flashtile.UnsupportedError, match="no second derivative"):
        dq.sum().backward()
    record = flashtile.quantize(q.detach(), k.detach(), v.detach())
    with pytest.raises(InvalidInputError, match=r"^sinks: requires grad, but a quantized call has no gradient"):
        flashtile.attention(record, sinks=torch.zeros(4, requires_grad=True))
    with pytest.raises(InvalidInputError, match=r"^v: requires grad"):
        flashtile.quantize(q.detach(), k.detach(), v)


def test_there_is_no_forward_mode() -> None:
    """Rounding has none; a tangent is not lost in silence."""
    q, k, v, sinks = (x.detach() for x in leaves())

    def loss(q: Tensor, sinks: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, sinks=sinks, precision="fp8").float().sum()

    for name, tangents in (("q", (q, torch.zeros_like(sinks))), ("sinks", (torch.zeros_like(q), sinks))):
        with pytest.raises(InvalidInputError, match="^(q|sinks): has a tangent, but a call in 8 bits has no"):
            torch.func.jvp(loss, (q, sinks), tangents)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(InvalidInputError, match=f"^{name}: has a tangent"):
            dual = torch.autograd.forward_ad.make_dual
            loss(dual(q, q) if name == "q" else q, dual(sinks, sinks) if name == "sinks" else sinks)


def test_a_small_model_learns_as_in_16_bits() -> None:
    """A head that must find the key like its query among 200: 60 steps end where those of 16 bits do."""

    def train(precision: str | None) -> list[float]:
        torch.manual_seed(0)
        keys, values = torch.randn(1, 200, 1, 32), torch.randn(1, 200, 1, 16)
        project = torch.nn.Linear(32, 32, bias=False)
        optimiser = torch.optim.Adam(project.parameters(), 2e-2)
        losses = []
        for _ in range(60):
            out = flashtile.attention(project(keys).bfloat16(), keys.bfloat16(), values.bfloat16(), precision=precision)
            loss = (out.float() - values).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    wide, eight = train(None), train("fp8")
    assert wide[-1] < 0.3 * wide[0] and eight[-1] < 0.3 * eight[0]
    assert abs(eight[-1] - wide[-1]) < 0.05 * wide[0]
