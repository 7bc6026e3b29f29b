"""``attention_varlen(out=)`` on every backend that a CPU can run, under the dispatcher, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import InvalidInputError
from flashtile.call.arguments import Options
from flashtile.ops.into import INTO, IntoTensors
from tests.backends.hopper.emulated import on_cpu

BOUNDS_Q, BOUNDS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 70, 75], [0, 90, 95, 130]))


def inputs(dtype: torch.dtype = torch.float32, dim_v: int = 64) -> dict[str, Tensor]:
    """A packed call with a row past the last bound."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, d).to(dtype) for n, h, d in ((76, 4, 64), (130, 2, 64), (130, 2, dim_v)))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": BOUNDS_Q, "cu_seqlens_k": BOUNDS_K}


def places(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Where an output may go: kernels write to the first, the others are copied to."""
    rows, heads, dim = shape
    wide = torch.full((rows, heads + 1, dim), torch.nan, dtype=dtype)
    odd = torch.full((rows * heads * dim + 1,), torch.nan, dtype=dtype)
    return {
        "whole": torch.full(shape, torch.nan, dtype=dtype), "part": wide[:, 1:], "odd": odd[1:].view(shape),
        "turned": torch.full((heads, rows, dim), torch.nan, dtype=dtype).transpose(0, 1),
    }  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim_v", [64, 32])
@pytest.mark.parametrize("backend", ["cpu", "hopper"])
def test_out_holds_the_result(backend: str, dim_v: int) -> None:
    given = inputs(torch.bfloat16, dim_v)
    keywords: dict[str, Any] = {"causal": True, "sinks": torch.ones(4), "backend": backend, "return_lse": True}
    for name, out in places((76, 4, dim_v), torch.bfloat16).items():
        with on_cpu(seed=1) if backend == "hopper" else nullcontext():
            want, want_lse = flashtile.attention_varlen(**given, **keywords)
            version = out._version
            got, lse = flashtile.attention_varlen(**given, **keywords, out=out)
        assert got is out and torch.equal(out, want) and torch.equal(lse, want_lse), name
        assert out._version > version


def test_no_keys_at_all() -> None:
    given = inputs(torch.bfloat16) | {"k": torch.zeros(0, 2, 64).bfloat16(), "v": torch.zeros(0, 2, 64).bfloat16()}
    given["cu_seqlens_k"] = BOUNDS_K * 0
    for backend in ("cpu", "hopper"):
        out = torch.full((76, 4, 64), torch.nan, dtype=torch.bfloat16)
        with on_cpu(seed=1) if backend == "hopper" else nullcontext():
            flashtile.attention_varlen(**given, backend=backend, out=out)
        assert not out.any()


def test_a_bias_leaves_lse_one_number_a_row() -> None:
    given = inputs() | {"attn_bias": torch.full((1, 70, 90), -1e9), "backend": "cpu", "return_lse": True}
    out = torch.full((76, 4, 64), torch.nan)
    _, lse = flashtile.attention_varlen(**given, out=out)
    want = given["v"][:90].mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(out[:70], want.expand(70, -1, -1))
    assert lse.is_contiguous() and torch.equal(lse[:, :70], torch.full((4, 70), -1e9))
    with FakeTensorMode(allow_non_fake_inputs=True):
        _, fake = flashtile.attention_varlen(**given, out=out)
    assert fake.shape == lse.shape and fake.stride() == lse.stride()


def test_opcheck() -> None:
    t = IntoTensors(**inputs(), out=torch.zeros(76, 4, 64))
    torch.library.opcheck(torch.ops.flashtile.attention_into.default, INTO.flatten(t, Options()))
    schema = torch.ops.flashtile.attention_into.default._schema
    assert {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write} == {"out"}


def test_compiles_whole_and_on_fake_tensors() -> None:
    given = inputs()

    def call(out: Tensor, **tensors: Tensor) -> Tensor:
        return flashtile.attention_varlen(**tensors, out=out) + out

    torch._dynamo.reset()
    out = torch.empty(76, 4, 64)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(out, **given)
    want = flashtile.attention_varlen(**given)
    assert torch.equal(out, want) and torch.equal(got, 2 * want)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        shown, lse = flashtile.attention_varlen(**fake, out=mode.from_tensor(out), return_lse=True)
    assert shown.shape == out.shape and lse.shape == (4, 76)


def test_explain_takes_it() -> None:
    given = inputs()
    assert flashtile.explain(**given, out=torch.empty(76, 4, 64)) == flashtile.explain(**given)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a list": ("out", {"out": [1.0]}),
    "shape": ("out", {"out": torch.empty(75, 4, 64)}),
    "width": ("out", {"out": torch.empty(76, 4, 32)}),
    "dtype": ("out", {"out": torch.empty(76, 4, 64).half()}),
    "device": ("out", {"out": torch.empty(76, 4, 64, device="meta")}),
    "expanded": ("out", {"out": torch.empty(76, 1, 64).expand(76, 4, 64)}),
    "gradient": ("out", {"q": torch.randn(76, 4, 64, requires_grad=True)}),
    "gradient of out": ("out", {"out": torch.empty(76, 4, 64, requires_grad=True)}),
    "8 bits": ("out", {"precision": "fp8"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name: str) -> None:
    argument, changes = WRONG[name]
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        flashtile.attention_varlen(**inputs() | {"out": torch.empty(76, 4, 64)} | changes)


def test_a_tensor_that_requires_grad_where_gradients_are_off() -> None:
    given, out = inputs(), torch.empty(76, 4, 64)
    given["q"].requires_grad_()
    with torch.no_grad():
        flashtile.attention_varlen(**given, out=out)
        assert torch.equal(out, flashtile.attention_varlen(**given))
