"""How second derivatives of a case are judged: by the first ones' rule, against the formula differentiated twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashtile import reference
from tests.cases import Call, build, gradient_of
from tests.fuzz.drawn import SMALL, Sizes, draw
from tests.fuzz.judged import cancels
from tests.poison import poisoned_memory
from tests.rule import Yardstick


def _directions(call: Call) -> list[Tensor]:
    """Random directions of the leaves, of the leaves' dtypes."""
    device = call.tensors.q.device
    make = torch.Generator(device=device).manual_seed(13)
    return [torch.randn(x.shape, generator=make, device=device).to(x.dtype) for x in call.leaves.values()]


def _values(call: Call, out: Tensor, lse: Tensor, dout: Tensor, directions: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of the gradients along the directions, by what they are with respect to."""
    outputs, seeds = [out], [dout.detach().to(out.dtype, copy=True).requires_grad_()]
    if call.case.lse_grad and lse.requires_grad:
        make = torch.Generator(device=lse.device).manual_seed(12)
        outputs.append(torch.where(torch.isfinite(lse), lse, 0.0))
        seeds.append(torch.randn(lse.shape, generator=make, device=lse.device).to(lse.dtype).requires_grad_())
    leaves = [*call.leaves.values()]
    first = torch.autograd.grad(outputs, leaves, seeds, create_graph=True)
    inputs = dict(zip([*call.leaves, "dout", "dlse"], [*leaves, *seeds], strict=False))
    given = [x.to(y.dtype) for x, y in zip(directions, first, strict=True)]
    found = torch.autograd.grad(first, [*inputs.values()], given, materialize_grads=True)
    return {name: x.detach() for name, x in zip(inputs, found, strict=True)}


def judge_second(call: Call, backend: str | None) -> None:
    """Asserts the rule for the second derivatives of a call."""
    dout, directions, upcast = gradient_of(call), _directions(call), call.upcast()
    with poisoned_memory():
        got = _values(call, *call.run(backend), dout, directions)

    def by_definition(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
        return _values(call, *reference.attention(call.problem, call.tensors, dtype), dout, directions)

    plain = by_definition(call, call.problem.dtype)
    Yardstick(lambda: by_definition(upcast, torch.float64), plain, call.problem.dtype).check(got)


def drawn_call(seed: int, sizes: Sizes, device: str = "cpu", dtype: torch.dtype | None = None) -> Call:
    """Plain call number ``seed`` whose second derivatives are not sums that cancel."""
    while True:
        drawn = draw(seed, sizes, "plain")
        case = replace(drawn.case, wanted=None, out="")
        made = build(case, dtype or drawn.dtype, device, seed)
        if made.leaves and not cancels(made.problem):
            return made
        seed += 10**6


def fuzz(backend: str, seed: int, count: int, say: Callable[[str], None], device: str = "cpu") -> list[str]:
    """Judges so many calls from ``seed`` on; says and returns what is wrong, with the calls."""
    wrong, is_interpreted = [], (backend, device) == ("portable", "cpu")
    sizes = Sizes(700, 2**21) if device == "cuda" else Sizes(30, 2**13, 64) if is_interpreted else SMALL
    for number in range(seed, seed + count):
        # The interpreter multiplies bfloat16 numbers as integers.
        call = drawn_call(number, sizes, device, torch.float16 if is_interpreted else None)
        try:
            judge_second(call, backend)
        except Exception as error:
            wrong.append(f"{backend}: {type(error).__name__}: {str(error)[:500]}\n    {call.case}, seed {number}")
            say(f"FAILED {wrong[-1]}")
    return wrong
