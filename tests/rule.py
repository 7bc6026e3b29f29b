"""The error rule: how far a result may be from the float64 oracle, on any machine and in any order of summation.

A result may err at most twice as much as the same formula does in plain PyTorch in the input dtype, and half a unit in
the last place of what is stored. What plain PyTorch errs by is a matter of luck where a result has few elements: the
gradient of a bias that all pairs share is one number, and one order of its 5,476 terms may give it exactly. So plain
PyTorch as it happens to sum here is one sample of several. The others are the float64 formula with every operation,
forward and backward, off by a random amount of the size that rounding has (``drawn``):

- A result r that is rounded is off by at most u |r|, u being half of eps. Kernels compute in float32, and round up to
  four times where the formula does once: an exponential to base 2 rounds its score times log2(e), lse times log2(e),
  their difference and itself; so r is off by at most 4 u |r| for float32's u if that is more.
- A sum of n terms rounds each of its partial sums s_1 ... s_n. With signs that do not know of one another these errors
  grow as a random walk does, to u sqrt(s_1^2 + ... + s_n^2), and not to n times the largest. Where the order of the
  terms does not depend on their signs, s_j is about r j/n and a walk of j steps, so that s_1^2 + ... + s_n^2 is about
  n (r^2 / 3 + t^2 / 2), with t^2 the sum of the terms' squares. A sum that cancels to 0 still has its t. Sums in
  blocks, in trees or with fused multiplications round less and are below it.

n and t are those of each sum as it is computed: keys of a row for out, lse and dq, queries and heads of a group for dk
and dv, rows for dsinks, all that is broadcast for a bias. A sum of sums, such as dv of the heads of a group, counts the
terms of all of them, for a kernel may add them up in one go. What an error becomes later needs no formula of its own: a
score of size s that is off by u s changes its probability by the factor exp(u s), and a row's delta all of its terms
together. Nothing in it depends on the machine but for the last bits of float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Samples of each result's largest error: a draw has one in each of its elements.
_SAMPLES = 16
# Where an operation has its factors; the sum is over the first one's last dimension.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Beyond the first, scores are rounded as float32 whatever the dtype: no kernel has them in 16 bits. Beyond the second
# they are masks' numbers that stand for -inf and absorb what is added to them.
_LARGE, _INFINITE = 2.0**14, 1e8
_SUMS = {"sum", "mean"}
# Operations that copy, and are no views.
_LAID_OUT = {"clone", "_unsafe_view", "repeat", "_reshape_copy"}
# Operations in which PyTorch does several: those count.
_IN_STEPS = get_decompositions([aten._softmax, aten._softmax_backward_data, aten.logsumexp])
# Operations on each element that select, copy or change a sign.
_EXACT = {
    "abs", "clamp", "copy", "fill", "masked_fill", "maximum", "minimum", "nan_to_num", "neg", "relu", "where",
    "_to_copy",
}  # fmt: skip


@functools.cache
def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::").removesuffix("_")


@functools.cache
def _rounds(func: Any) -> bool:
    """Whether an operation on each element computes something."""
    return torch.Tag.pointwise in func.tags and _name(func) not in _EXACT


class _Rounded(TorchDispatchMode):
    """Disturbs float64 results as rounding to ``dtype`` would, with sums in float32 or wider."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.unit_of_sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
        self.unit = max(torch.finfo(dtype).eps / 2, 4 * self.unit_of_sums)
        self.seed, self.makes = seed, dict[torch.device, torch.Generator]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what keeps the compiler out costs each operation more than what is done here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IN_STEPS:
            with self:
                return _IN_STEPS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or out.dtype != torch.float64 or not out.numel():
            return out
        name = _name(func)
        if name in _PRODUCTS:
            a, b = (args[i] for i in _PRODUCTS[name])
            count, squares = a.shape[-1], a.square() @ b.square()
            out.terms = count, squares
        elif name in _SUMS:
            # Of what are sums themselves the whole may be summed in one go.
            each, squares = getattr(args[0], "terms", None) or (1, args[0].square())
            squares = func(squares, *args[1:], **kwargs)
            count = args[0].numel() // out.numel()
            squares = squares / count if name == "mean" else squares
            count *= each
        elif func.is_view or name in _LAID_OUT:
            if terms := getattr(args[0], "terms", None):
                out.terms = terms[0], func(terms[1], *args[1:], **kwargs)
            return out
        elif _rounds(func):
            count, squares = 0, None
        else:
            return out
        # Infinities, and numbers that stand for them in masks, are what they are.
        size = torch.where(out.abs() < _INFINITE, out, 0.0).abs_()
        size.mul_(torch.where(size < _LARGE, self.unit, 4 * self.unit_of_sums))
        if squares is not None and count > 1:
            size += (out.square().div_(3) + squares / 2).mul_(count).sqrt_().mul_(self.unit_of_sums)
        return out.add_(size.mul_(self._random(out)))

    def _random(self, like: Tensor) -> Tensor:
        """Uniform from -1 to 1: a rounding is as likely to be any part of half a unit in the last place."""
        make = self.makes.get(like.device)
        if make is None:
            make = self.makes[like.device] = torch.Generator(like.device).manual_seed(self.seed)
        return torch.empty(like.shape, dtype=torch.float32, device=like.device).uniform_(-1, 1, generator=make)


def drawn(formula: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The float64 results of a formula, off by random roundings to ``dtype``: of each (draws, *its shape)."""
    draws: list[Mapping[str, Tensor]] = []
    fewest = 0
    while len(draws) * fewest < _SAMPLES:
        # Fused, PyTorch's attention is one operation.
        with _step_by_step(), _Rounded(dtype, len(draws)):
            draws.append({name: x.detach() for name, x in formula().items()})
        fewest = min((x.numel() for x in draws[0].values() if x.numel()), default=_SAMPLES)
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


@contextmanager
def _step_by_step() -> Iterator[None]:
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class Yardstick:
    """What results are judged by: max|got - exact| <= 2 max|others - exact| + half a unit in the last place.

    Args:
        exact: Computes the results in float64, with gradients by autograd.
        plain: What plain PyTorch makes of the same formula in ``dtype``. It and ``drawn`` are the others.
        dtype: Of the inputs.
    """

    def __init__(
        self, exact: Callable[[], Mapping[str, Tensor]], plain: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        self.exact, self.drawn = exact(), drawn(exact, dtype)
        self.plain = plain

    def check(self, got: Mapping[str, Tensor]) -> None:
        """Asserts the rule for some of the results, by name; infinities must agree."""
        for name, value in got.items():
            exact, plain = self.exact[name].detach(), self.plain[name].detach()
            _assert_close(name, value.detach(), exact, plain, self.drawn[name])


def assert_close(
    got: Mapping[str, Tensor],
    exact: Callable[[], Mapping[str, Tensor]],
    plain: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """The rule for results by name, of which ``exact`` and ``plain`` may have more; see ``Yardstick``."""
    Yardstick(exact, plain, dtype).check(got)


def _assert_close(name: str, got: Tensor, exact: Tensor, plain: Tensor, drawn: Tensor) -> None:
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)} is not {tuple(exact.shape)}"
    if not got.numel():
        return
    finite = torch.isfinite(exact)
    assert torch.equal(torch.where(finite, 0.0, exact), torch.where(finite, 0.0, got.double())), f"{name}: infinities"
    is_large = exact.abs() >= _LARGE
    for judged in (finite & ~is_large, finite & is_large):  # apart, or lse of masked rows would excuse all others

        def worst(x: Tensor, judged: Tensor = judged) -> float:
            return torch.where(judged, x.double() - exact, 0.0).abs().max().item()

        error, here, elsewhere = worst(got), worst(plain.nan_to_num()), worst(drawn)
        largest = torch.where(judged, exact, 0.0).abs().max().item()
        limit = 2 * max(here, elsewhere) + torch.finfo(got.dtype).eps / 2 * largest
        assert error <= limit, (
            f"{name}: error {error:.3e} is over {limit:.3e}"
            f" (plain PyTorch has {here:.3e} here, {elsewhere:.3e} elsewhere)"
        )
