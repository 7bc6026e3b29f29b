"""From functions to graphs: what is captured, what is recorded, and what of two functions is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flashtile
from flashtile import InvalidInputError
from flashtile.mods import recognise, record
from flashtile.mods.graph import GraphError, evaluate, parse
from tests import fresh
from tests.mods.functions import MASKS, SCORES, Sizes


def lowered(f: Callable[..., Any], what: str = "score") -> record.Lowered:
    return record.lowered(f, f"{what}_mod", what, False)


def relative(table: torch.Tensor, cap: float) -> Callable[..., Any]:
    def mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh((score + table[h, q_idx - kv_idx]) / cap)

    return mod


def test_two_closures_of_one_graph_share_one_text_and_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    one = lowered(relative(torch.randn(4, 9), 3.0))
    monkeypatch.setattr(record, "_traced", None)
    other = lowered(relative(torch.randn(2, 70, dtype=torch.bfloat16), 5.0))
    assert one.text == other.text and one.numbers == (3.0,) and other.numbers == (5.0,)
    assert other.operands[0].shape == (2, 70)


def test_a_trace_loads_no_compiler() -> None:
    """It takes seconds to load; a function's first call would wait for it though no kernel is to be built."""
    code = """
import sys
import torch
from flashtile import mods
from flashtile.mods.record import lowered
for f in (mods.t5(torch.randn(8, 2)), mods.alibi(torch.randn(2)), mods.softcap(9.0), lambda s, b, h, i, j: s / (i + 1)):
    assert lowered(f, "score_mod", "score", False).text
assert lowered(mods.neighbourhood_2d(8, 2), "mask_mod", "mask", False).text
loaded = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
assert not loaded, loaded
"""
    fresh.run(code, check=True)


def test_the_order_in_which_a_sum_is_written_is_no_difference() -> None:
    table = torch.randn(9)
    texts = {
        lowered(lambda score, b, h, q, kv: score + 2.0 * table[q]).text,
        lowered(lambda score, b, h, q, kv: table[q] * 2.0 + score).text,
    }
    assert len(texts) == 1


WIDTH, TABLE = 5, torch.randn(8)


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.factor = torch.nn.Parameter(torch.randn(2, 8)), 3.0

    def mod(self, score, b, h, q, kv):
        return score + self.bias[h, kv % self.bias.shape[1]] * self.factor

    def inner(self) -> Callable[..., Any]:
        return lambda score, b, h, q, kv: score + self.bias[h, q]


def test_what_is_found_where_functions_keep_it() -> None:
    def default(score, b, h, q, kv, table=TABLE, width=WIDTH):
        return score + table[q % width]

    def nested(score, b, h, q, kv):
        return default(score, b, h, q, kv) * WIDTH

    pair = (TABLE, 2)
    holder = Holder()
    found = {
        "default": lowered(default), "nested": lowered(nested), "method": lowered(holder.mod),
        "attribute": lowered(holder.inner()), "tuple": lowered(lambda s, b, h, q, kv: s + pair[0][q // pair[1]]),
        "partial": lowered(functools.partial(lambda table, s, b, h, q, kv: s * table[q], TABLE)),
        "keyword": lowered(functools.partial(lambda s, b, h, q, kv, *, table: s * table[q], table=TABLE)),
    }  # fmt: skip
    for name, each in found.items():
        want = holder.bias if name in ("method", "attribute") else TABLE
        assert len(each.operands) == 1 and each.operands[0] is want, name
    assert found["default"].numbers == (5.0,) and found["nested"].numbers == (5.0, 5.0)[: len(found["nested"].numbers)]
    assert found["tuple"].numbers == (2.0,) and "3.0" in found["method"].text


def test_a_number_that_python_needs_stays_a_constant() -> None:
    def mod(count: int) -> Callable[..., Any]:
        def power(score, b, h, q, kv):
            made = score
            for _ in range(count):
                made = made * 0.5
            return made

        return power

    one, two = lowered(mod(1)), lowered(mod(2))
    assert one.text != two.text and one.numbers == two.numbers == ()
    assert lowered(mod(1)).text == one.text


def test_a_number_whose_type_is_asked_for_is_a_constant() -> None:
    def mod(width: Any) -> Callable[..., Any]:
        return lambda score, b, h, q, kv: score * width if isinstance(width, int) else score + width

    assert lowered(mod(3)).numbers == () and lowered(mod(3)).text != lowered(mod(3.0)).text


def test_flags_are_constants() -> None:
    sizes = Sizes(1, 1, 4, 4, torch.float32, torch.Generator())
    flips = SCORES["flips"]
    assert lowered(flips(sizes).function).text != lowered(flips(sizes, add=False).function).text  # type: ignore[call-arg]


def test_views_and_indices_in_steps() -> None:
    bias = torch.randn(1, 2, 3, 8, 8)
    functions = [
        lambda s, b, h, q, kv: s + bias[0][b, h][q][kv],
        lambda s, b, h, q, kv: s + bias[0, b, h, q, kv],
        lambda s, b, h, q, kv: s + bias.squeeze(0)[b][h][q, kv],
        lambda s, b, h, q, kv: s + bias[0].transpose(-1, -2)[b, h, kv, q],
        lambda s, b, h, q, kv: s + bias[..., 1:, :][0, b, h, q - 1, kv],
    ]
    score, at = torch.zeros(()), {n: torch.tensor(x) for n, x in zip("bhij", (1, 2, 3, 5), strict=True)}
    for f in functions:
        found = lowered(f)
        graph = parse(found.text)
        (value,) = evaluate(graph, [graph.result], {"score": score, **at}, found.operands, (), torch.float32)
        assert value == bias[0, 1, 2, 3, 5]
        assert found.operands[0].untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.floor()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.where(x > 0, 3.0, 1.0)


def test_a_backward_of_ones_own() -> None:
    q, k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: Straight.apply(2 * s))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    want = torch.einsum("bhij,bjhd->bihd", Straight.apply(2 * scores).softmax(-1), v)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad))


@pytest.mark.parametrize("name", sorted(set(SCORES) - {"identity"}))
def test_slopes_are_autograds(name: str) -> None:
    sizes = Sizes(2, 3, 9, 9, torch.float64, torch.Generator().manual_seed(0))
    made = SCORES[name](sizes)
    found = lowered(made.function)
    graph = parse(found.text)
    score = torch.randn(2, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    axes = (torch.arange(n).view(-1, *[1] * k) for n, k in ((2, 3), (3, 2), (9, 1), (9, 0)))
    at = {"score": score, **dict(zip("bhij", axes, strict=True))}
    assert graph.slope is not None
    result, slope = evaluate(graph, [graph.result, graph.slope], at, found.operands, found.numbers, torch.float64)
    (want,) = torch.autograd.grad(result.sum(), score)
    torch.testing.assert_close(slope.expand_as(want), want)


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_a_text_is_parsed_into_its_graph(name: str) -> None:
    what = "score" if name in SCORES else "mask"
    sizes = Sizes(2, 3, 9, 9, torch.float32, torch.Generator().manual_seed(0))
    text = lowered({**SCORES, **MASKS}[name](sizes).function, what).text
    assert not text or parse(text).text == text
    # Inductor writes operators' arguments into comments.
    assert "\n" not in text


@pytest.mark.parametrize(
    "text",
    [
        "", "score - | -", "score - | -; f import 0; return 0 -", "score - | -; f score; f exp 1; return 1 -",
        "mask - | -; f score; return 0 -", "score f1 | -; f load 0; return 0 -",
        "score - | -; f score; f add 0 0 0; return 1 -",
        "score - | -; f score; b lt 0 0; return 1 -", "other - | -; f score; return 0 -",
        "score - | -; f score; return 5 -", "score - | -; f number 0; return 0 -",
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(GraphError):
        parse(text)


def test_bands_are_recognised_and_the_rest_is_kept() -> None:
    width, docs = 6, torch.arange(9) // 2
    causal, same = (lambda b, h, q, kv: kv <= q), lambda b, h, q, kv: docs[q] == docs[kv]
    found = lowered(and_masks(causal, same, lambda b, h, q, kv: q < kv + width), "mask")
    band = recognise.band_of(found.text)
    assert band is not None
    bounds = sorted((bound.is_right, bound.most.of(found.numbers)) for bound in band[0])
    assert bounds == [(False, 5), (True, 0)] and "i number" not in band[1].text and "load" in band[1].text
    for other in (lambda b, h, q, kv: kv <= 2 * q, lambda b, h, q, kv: kv <= q + h, lambda b, h, q, kv: kv < 5, same):
        assert recognise.band_of(lowered(other, "mask").text) is None
    either = lowered(lambda b, h, q, kv: (kv <= q) | (kv < 3), "mask")
    assert recognise.band_of(either.text) is None


def test_only_a_cap_that_comes_last_is_recognised() -> None:
    cap, table = 3.0, torch.randn(9)
    whole = lowered(lambda s, b, h, q, kv: cap * torch.tanh((s + table[q]) / cap))
    ends = recognise.softcap_of(whole.text)
    assert ends is not None and ends[1] == 0 and "tanh" not in ends[2].text
    rest = parse(ends[2].text)
    assert rest.is_const(rest.slope, 1.0) and rest.is_const(rest.partials[0].slope, 1.0)
    for other in (
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + 1.0, lambda s, b, h, q, kv: cap * torch.tanh(s / 2.0),
        lambda s, b, h, q, kv: torch.tanh(s),
    ):  # fmt: skip
        assert recognise.softcap_of(lowered(other).text) is None


def test_errors_name_the_operator_and_the_line() -> None:
    table = torch.randn(4)
    wrong = [
        (lambda s, b, h, q, kv: s + table.cumsum(0)[q], "cumsum"),
        (lambda s, b, h, q, kv: s + torch.dot(table, table), "dot"),
        (lambda s, b, h, q, kv: torch.special.bessel_j0(s), "bessel_j0"),
        (lambda s, b, h, q, kv: s + float(q), "torch.where"),
    ]  # fmt: skip
    for f, name in wrong:
        with pytest.raises(InvalidInputError, match=rf"{name}.*test_trace.py:\d+"):
            lowered(f)
