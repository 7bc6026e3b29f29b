"""Functions in compiled code: all that they read is guarded, and they may be made anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import flashtile
from tests.mods.test_changes import CASES, FIRST, THEN, Change, right


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


_SOME = ("nested", "nn.Module", "rebound helper", "text", "tensor of an item", "array")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "mod", "change"), [case for case in CASES if case[0] in _SOME], ids=[n for n, *_ in CASES if n in _SOME]
)
def test_what_a_function_reads_is_guarded(name: str, mod: Callable[..., Any], change: Change) -> None:
    q = torch.randn(1, 64, 2, 16)
    whole = name != "array"  # what the compiler cannot follow is read as it is
    run = torch.compile(
        lambda q: flashtile.attention(q, q, q, causal=True, mask_mod=mod), backend="eager", fullgraph=whole
    )
    for n in (FIRST, THEN, FIRST):
        change(n)
        assert right(run(q), n, q), n


def test_a_third_number_is_seen_too() -> None:
    """After two the compiler takes it as a symbol, without a guard of its value."""
    q, width, flag = torch.randn(1, 64, 2, 16), 2, False

    def mod(b, h, i, j):
        return i - j <= (width if flag else min(width, 50))

    run = torch.compile(lambda q: flashtile.attention(q, q, q, causal=True, mask_mod=mod), backend="eager")
    for number in (2, 20, 30, 31, 5):
        width, flag = number, number > 30
        assert right(run(q), width, q), width


@pytest.mark.parametrize("dynamic", [None, True])
def test_floats_that_change(dynamic: bool | None) -> None:
    q, factor = torch.randn(1, 16, 2, 16), 0.5

    def mod(s, b, h, i, j):
        return s * factor

    run = torch.compile(
        lambda q: flashtile.attention(q, q, q, score_mod=mod), backend="eager", fullgraph=True, dynamic=dynamic
    )
    for factor in (0.5, 2.0, 3.0, 0.25):
        torch.testing.assert_close(run(q), flashtile.attention(q, q, q, softmax_scale=factor * 0.25))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, nn.Parameter(torch.randn(4, 16, dtype=torch.float64))
        self.partial = functools.partial(self.added, self.table)
        self.function = lambda s, b, h, i, j: s + self.table[h, j]

    @staticmethod
    def added(table: Tensor, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, j]

    def method(self, s, b, h, i, j):
        return s + self.table[h, j]

    def forward(self, q: Tensor) -> Tensor:
        table, half = self.table, self.table * 0.5
        mod = {
            "lambda": lambda s, b, h, i, j: s + table[h, j], "method": self.method, "partial": self.partial,
            "attribute": self.function, "computed": lambda s, b, h, i, j: s + 2 * half.transpose(0, 1)[j, h],
        }[self.how]  # fmt: skip
        return flashtile.attention(q, q, q, score_mod=mod)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("how", "fullgraph"),
    [
        ("lambda", True),
        ("method", True),
        ("partial", True),
        ("attribute", True),
        ("computed", True),
        ("partial", False),
    ],
)
def test_functions_made_anywhere(how: str, fullgraph: bool) -> None:
    net, q = Net(how), torch.randn(2, 16, 4, 8, dtype=torch.float64, requires_grad=True)
    want = flashtile.attention(q, q, q, attn_bias=net.table[None, :, None])
    got = torch.compile(net, fullgraph=fullgraph, backend="aot_eager")(q)
    torch.testing.assert_close(got, want)
    dout = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, net.table), dout) for x in (got, want)))


def test_an_error_in_a_function_is_its_own() -> None:
    q = torch.randn(1, 8, 2, 16)
    run = torch.compile(
        lambda q: flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s if i > j else -s), backend="eager"
    )
    with pytest.raises(flashtile.InvalidInputError, match=r"use torch.where \(.*test_compiled.py"):
        run(q)


def test_what_functions_capture_may_be_mapped_alone() -> None:
    q, k, v = (torch.randn(2, 16, 4, 8, dtype=torch.float64) for _ in range(3))
    tables = torch.randn(3, 2, 16, 4, dtype=torch.float64)

    def ours(t: Tensor, q: Tensor) -> Tensor:
        mod = dict(
            score_mod=lambda s, b, h, i, j: s + t.transpose(0, 1)[h, j], mask_mod=lambda b, h, i, j: t[j, h] > -1
        )
        return flashtile.attention(q, k, v, **mod)

    def plain(t: Tensor, q: Tensor) -> Tensor:
        bias = t.transpose(0, 1)[None, :, None]
        return flashtile.attention(q, k, v, attn_bias=bias, attn_mask=bias > -1)

    each = tables[:, 0]
    want = torch.stack([plain(t, q) for t in each])
    torch.testing.assert_close(vmap(ours, (0, None))(each, q), want)
    torch.testing.assert_close(torch.compile(vmap(ours, (0, None)), backend="eager", fullgraph=True)(each, q), want)
    nested = vmap(vmap(ours, (0, None)), (0, None))(tables, q)
    torch.testing.assert_close(nested, torch.stack([torch.stack([plain(t, q) for t in ts]) for ts in tables]))
    for name in ("of samples", "through"):
        found = []
        for f in (ours, plain):
            loss = functools.partial(lambda f, t: f(t, q).square().sum(), f)
            one = vmap(grad(loss)) if name == "of samples" else grad(lambda ts, loss=loss: vmap(loss)(ts).sum())
            found.append(one(each) if f is ours else torch.stack([grad(loss)(t) for t in each]))
        torch.testing.assert_close(*found)
