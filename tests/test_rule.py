"""The error rule itself: it sees faults of real size, and no order of summation is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile import reference
from tests.cases import CASES, Call, Case, build, results, yardstick
from tests.rule import drawn
from tests.slow import slow_but

BY_NAME = {case.name: case for case in CASES}


class Instead(TorchDispatchMode):
    """Operations by name, computed in another way."""

    def __init__(self, **operations: Callable[..., Tensor]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        return self.operations.get(name, func)(*args, **(kwargs or {}))


def seeds(call: Call) -> tuple[Tensor, Tensor]:
    """The gradients of out and lse."""
    make = torch.Generator().manual_seed(11)
    dout = torch.randn(*call.tensors.q.shape[:-1], call.problem.head_dim_v, generator=make).to(call.problem.dtype)
    shape = call.problem.lse_shape(call.tensors.q)[: call.tensors.q.dim() - 1]
    return dout, torch.randn(shape, generator=make)


def by_definition(call: Call, dout: Tensor, dlse: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    call = call.upcast() if dtype == torch.float64 else call
    return results(call, *reference.attention(call.problem, call.tensors, dtype), dout, dlse).values


def stored(found: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    return {name: x.to(call.problem.lse_dtype if name == "lse" else call.problem.dtype) for name, x in found.items()}


# Orders of the n terms of a sum, in blocks that are added up.
def _blocked(n: int) -> list[range]:
    return [range(i, min(i + 16, n)) for i in range(0, n, 16)]


def _permuted(n: int) -> list[list[int]]:
    return [torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()]


ORDERS: dict[str, Callable[[int], Any]] = {
    "forward": lambda n: [range(n)],
    "reversed": lambda n: [range(n)[::-1]],
    "blocked": _blocked,
    "permuted": _permuted,
}


def in_order(order: Callable[[int], Any], fused: bool) -> Instead:
    """Products and sums term by term, rounded to float32 after every multiplication, unless fused, and addition."""

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for block in order(a.shape[-1]):
            acc = torch.zeros_like(total)
            for i in block:
                x, y = a[..., i, None], b[..., i, None, :]
                acc = torch.addcmul(acc.double(), x.double(), y.double()).float() if fused else acc + x * y
            total = total + acc
        return total

    def sum_(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, **_: Any) -> Tensor:
        dims = sorted(dim % x.dim() for dim in (range(x.dim()) if dims is None else dims))
        others = [dim for dim in range(x.dim()) if dim not in dims]
        kept = [x.shape[dim] for dim in others]
        rows = x.permute(*others, *dims).reshape(*kept, 1, math.prod(x.shape[dim] for dim in dims))
        found = bmm(rows, torch.ones(rows.shape[-1], 1)).view(kept)
        return found.view([1 if dim in dims else n for dim, n in enumerate(x.shape)]) if keepdim else found

    return Instead(bmm=bmm, sum=sum_)


def _has_shared(case: Case) -> bool:
    return (case.bias is not None and case.bias != "bhqk") or case.sinks or case.kv_heads < case.heads


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "case", slow_but([c for c in CASES if _has_shared(c) and c.wanted != ""], lambda c: c.seqlen_q < 100), ids=str
)
def test_every_order_of_summation_meets_the_rule(case: Case) -> None:
    call = build(case, torch.float32)
    dout, dlse = seeds(call)
    rule = yardstick(call, dout, dlse)
    for order, fused in itertools.product(ORDERS.values(), (False, True)):
        with in_order(order, fused):
            got = by_definition(call, dout, dlse, torch.float32)
        rule.check(got)


def one_key_less(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    keep = torch.ones(1, call.case.heads, call.problem.seqlen_q, call.problem.seqlen_k, dtype=torch.bool)
    keep[0, 0, 9, 3] = False
    return by_definition(replace(call, tensors=replace(call.tensors, attn_mask=keep)), dout, dlse)


def one_row_less(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    dout, dlse = dout.clone(), dlse.clone()
    dout[0, 9, 0] = dlse[0, 0, 9] = 0
    return by_definition(call, dout, dlse)


def scale_is_off(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    problem = call.problem.but(softmax_scale=call.problem.softmax_scale * 1.001)
    return by_definition(replace(call, problem=problem), dout, dlse)


def lse_is_off(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    found = by_definition(call, dout, dlse)
    found["lse"][0, 1, 5] += 1e-5
    return found


def one_head_less(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    bias = call.leaves["bias"]
    wide = bias.detach().expand(-1, call.case.heads, -1, -1).clone().requires_grad_()
    found = by_definition(call._with({**call.leaves, "bias": wide}), dout, dlse)
    return found | {"dbias": found["dbias"][:, 1:].sum(1, keepdim=True)}


def probs_in_16_bits(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    with Instead(exp=lambda x: x.exp().to(torch.bfloat16).double()):
        return by_definition(call, dout, dlse)


def no_derivative_of_softcap(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    with Instead(tanh_backward=lambda grad, _: grad):
        return by_definition(call, dout, dlse)


def delta_is_off(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """By a thousandth. With all of it rows of the gradient of a bias sum to 0."""
    call = call.upcast()
    out, lse = reference.attention(call.problem, call.tensors)
    delta = (out * dout).sum(-1).transpose(-1, -2)
    return results(call, out, lse, dout, -0.001 * delta.detach()).values


def masked_rows_are_doubled(call: Call, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    found = by_definition(call, dout, dlse)
    factor = torch.where(found["lse"] < -1000, 2.0, 1.0).transpose(-1, -2)[..., None]
    return found | {"out": found["out"] * factor, "dv": by_definition(call, dout * factor, dlse)["dv"]}


ALL = (torch.float32, torch.float16, torch.bfloat16)
FAULTS: list[tuple[str, Callable[..., dict[str, Tensor]], str, tuple[torch.dtype, ...]]] = [
    ("full", one_key_less, "out dv", ALL),
    ("full", one_key_less, "lse dq dk", ALL[:2]),
    ("group", one_row_less, "dq dk dv", ALL),
    ("bias_keys", one_row_less, "dbias", ALL),
    ("sinks", one_row_less, "dsinks", ALL),
    ("full", scale_is_off, "out lse dq dk", ALL[:1]),
    ("large_scores", scale_is_off, "out lse dq dk", ALL[:1]),
    ("full", lse_is_off, "lse", ALL[:1]),
    ("sinks", lse_is_off, "lse", ALL[:1]),
    ("bias_keys", one_head_less, "dbias", ALL),
    ("bias_square", one_head_less, "dbias", ALL),
    ("full", probs_in_16_bits, "out dv", ALL[:1]),
    ("bias_scalar", delta_is_off, "dbias", ALL[:1]),
    ("bias_large", masked_rows_are_doubled, "out dv", ALL),
    ("bias_large_1e9", masked_rows_are_doubled, "out dv", ALL),
    ("varlen_bias_large", masked_rows_are_doubled, "out", ALL),
    ("softcap", no_derivative_of_softcap, "dq dk", ALL),
]


@pytest.mark.parametrize(
    ("case", "fault", "names", "dtype"),
    [(case, fault, names, dtype) for case, fault, names, dtypes in FAULTS for dtype in dtypes],
    ids=lambda x: x if isinstance(x, str) else str(getattr(x, "__name__", x)).removeprefix("torch."),
)
def test_faults_of_real_size_break_the_rule(
    case: str, fault: Callable[..., dict[str, Tensor]], names: str, dtype: torch.dtype
) -> None:
    call = build(BY_NAME[case], dtype)
    dout, dlse = seeds(call)
    rule = yardstick(call, dout, dlse)
    rule.check(stored(by_definition(call, dout, dlse), call))
    planted = stored(fault(call, dout, dlse), call)
    for name in names.split():
        with pytest.raises(AssertionError, match=f"^{name}: error"):
            rule.check({name: planted[name]})


def test_draws_err_as_much_as_the_formula_does_in_the_input_dtype() -> None:
    """Of a result of 1,184 elements, in 16 bits, where the largest error is no matter of luck."""
    call = build(BY_NAME["full"], torch.bfloat16)
    dout, dlse = seeds(call)
    exact, plain = by_definition(call, dout, dlse), by_definition(call, dout, dlse, torch.bfloat16)
    draws = drawn(lambda: by_definition(call, dout, dlse), torch.bfloat16)
    for name, want in exact.items():
        here, elsewhere = ((x - want).square().mean().sqrt() for x in (plain[name], draws[name]))
        assert 0.5 < elsewhere / here < 2, f"{name}: {elsewhere:.2e} and {here:.2e}"
