"""Second derivatives: gradients of gradients against differences and against the formula, for every feature."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import UnsupportedError
from flashtile.backends.cpu.second import second
from flashtile.call.arguments import Options, Tensors
from flashtile.call.problem import Problem
from flashtile.compat import flash_attn_2
from flashtile.integrations import sdpa
from flashtile.mods import curve
from flashtile.ops import operators

ROWS, KEYS = 3, 4


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


BANDS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window_size": (1, 0)}, "ahead": {"window_size": (0, 2)},
}  # fmt: skip
# What is given beside q, k and v: numbers, or functions that make a tensor.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 1.5},
    "bias": {"attn_bias": lambda: leaf(2, 2, 3, 4)},
    "row_bias": {"attn_bias": lambda: leaf(2, 1, 4), "softcap": 2.0, "return_lse": True},
    "sinks": {"sinks": lambda: leaf(2)},
    "sinks_lse": {"sinks": lambda: leaf(2), "return_lse": True},
    "mask": {"attn_mask": lambda: torch.rand(2, 1, 3, 4) > 0.4},
    "alibi": {"alibi_slopes": lambda: torch.rand(2).double()},
    "groups": {"kv_heads": 1},
    "values": {"head_dim_v": 3, "softcap": 1.0},
    "scale": {"softmax_scale": -0.7},
    "dropout": {"dropout_p": 0.4},
    "dropout_bias": {"dropout_p": 0.3, "attn_bias": lambda: leaf(3, 4), "sinks": lambda: leaf(2)},
    "groups_lse": {"kv_heads": 1, "head_dim_v": 1, "return_lse": True, "sinks": lambda: leaf(2)},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("feature", "band"), [*itertools.product(FEATURES, BANDS)], ids=str)
def test_gradients_of_gradients(feature: str, band: str) -> None:
    torch.manual_seed(0)
    given = {name: x() if callable(x) else x for name, x in FEATURES[feature].items()}
    heads, width = given.pop("kv_heads", 2), given.pop("head_dim_v", 2)
    leaves = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        torch.manual_seed(1)
        return flashtile.attention(q, k, v, **given | dict(zip(leaves, others, strict=True)), **BANDS[band])

    inputs = leaf(2, ROWS, 2, 2), leaf(2, KEYS, heads, 2), leaf(2, KEYS, heads, width), *leaves.values()
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_gradients_of_gradients_of_packed_sequences() -> None:
    torch.manual_seed(0)
    rows, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 5], [0, 3, 4, 6]))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flashtile.attention_varlen(q, k, v, rows, keys, causal=True, sinks=sinks, return_lse=True)

    assert torch.autograd.gradgradcheck(attend, (leaf(5, 2, 2), leaf(7, 1, 2), leaf(7, 1, 2), leaf(2)))


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v).transpose(-3, -2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtile.attention(q, k, v, causal=True)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def penalty(attend: Attend) -> Callable[[Tensor], Tensor]:
    """A gradient penalty, as a function of q."""
    return lambda q: grad(lambda q: attend(q, q, q).sin().sum())(q).square().sum()


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward over reverse": lambda f, q: hessian(f)(q),
    "reverse twice": lambda f, q: jacrev(jacrev(f))(q),
    "functional": lambda f, q: torch.autograd.functional.hessian(f, q),
    "reverse over forward": lambda f, q: grad(lambda q: jvp(f, (q,), (q.cos(),))[1])(q),
    "jvp of a gradient": lambda f, q: jvp(grad(f), (q,), (q.cos(),))[1],
    "vhp": lambda f, q: torch.autograd.functional.vhp(f, q, q.cos())[1],
    "hvp": lambda f, q: torch.autograd.functional.hvp(f, q, q.cos())[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_second_derivative(way: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 5, 2, 3, dtype=torch.float64)
    found, wanted = (WAYS[way](lambda q, f=f: f(q, q * 2, q).sin().sum(), q) for f in (ours, formula))
    torch.testing.assert_close(found, wanted)


def test_penalties_of_samples() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 1, 5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(vmap(grad(penalty(ours)))(q), vmap(grad(penalty(formula)))(q))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_penalty(backend: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    torch.compile(penalty(ours), backend=backend, fullgraph=True)(q).backward()
    torch.testing.assert_close(q.grad, grad(penalty(formula))(q.detach()))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_of_other_dtypes(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 300, 4, 64, dtype=dtype)
    wanted = grad(penalty(formula))(x.double())
    found = grad(lambda q: grad(lambda q: ours(q, q, q).float().sin().sum())(q).float().square().sum())(x)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() <= most * wanted.abs().max()


def test_through_modules_and_other_interfaces() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    own = flashtile.nn.MultiheadAttention(8, 2, causal=True, dtype=torch.float64)

    def twice(attend: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(attend(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 4))

    def by_formula(x: Tensor) -> Tensor:
        q, k, v = (heads(project(x)) for project in (own.q_proj, own.k_proj, own.v_proj))
        return own.out_proj(formula(q, k, v).flatten(2))

    torch.testing.assert_close(twice(own), twice(by_formula))
    wanted = twice(lambda x: formula(heads(x), heads(x), heads(x)))
    torch.testing.assert_close(twice(lambda x: flash_attn_2.flash_attn_func(*[heads(x)] * 3, causal=True)), wanted)

    def overridden(x: Tensor) -> Tensor:
        given = [heads(x).transpose(1, 2)] * 3
        return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)

    with sdpa.use():
        torch.testing.assert_close(twice(overridden), wanted)


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.numel())
        return found


def plain_call(q: Tensor, k: Tensor) -> tuple[Tensors, Options]:
    """A call as operators take it."""
    return Tensors(q, k, k), Options()


def test_no_tensor_grows_with_the_square_of_the_length() -> None:
    x = torch.randn(1, 3000, 1, 8)
    out, lse = flashtile.attention(x, x, x, causal=True, return_lse=True)
    t, options = plain_call(x, x)
    with _Largest() as made:
        second((x, x, x, None, None), x, None, out, lse, t, Problem.of(t, options._replace(window_right=0)))
    assert x.numel() <= made.most <= 2**18


def test_what_lse_loses_by_rounding_does_not_spoil_what_cancels() -> None:
    """A row of one key: its scores' gradients cancel, whatever ``exp(score - lse)`` is."""
    make = torch.Generator().manual_seed(0)
    q, k, v, dout, *of = (torch.randn(1, n, 1, 16, generator=make) for n in (5, 1, 1, 5, 5, 1, 1))
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    t, options = Tensors(q, k, v), Options()
    found = second((*of, None, None), dout, None, out, lse + 1e-3, t, Problem.of(t, options))
    assert max(found.q.abs().max(), found.k.abs().max()) < 2e-5


def test_flops_are_those_of_the_products() -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8)
    out, lse = flashtile.attention(q, k, k, return_lse=True)
    with FlopCounterMode(display=False) as counter:
        operators.SECOND.overload(q, k, k, None, None, q, None, out, lse, *operators.REGULAR.flatten(*plain_call(q, k)))
    # Scores, their tangents from q and k, dprobs and what is like it of ddv, twice; two for the tangent of out; dv, two
    # for each of dq and dk.
    assert counter.get_total_flops() == 2 * (2 * 6 * 9 * 4) * 8 * (2 * 5 + 2 + 5)


def test_a_hessian_times_a_vector_is_the_vector_times_it() -> None:
    """``hvp`` differentiates a second derivative by its directions, ``vhp`` a first one."""
    torch.manual_seed(0)
    shapes = (1, ROWS, 2, 2), (1, KEYS, 1, 2), (1, KEYS, 1, 3), (2, ROWS, KEYS), (2,)
    x, of = (tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(2))

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        given: Any = {"attn_bias": bias, "sinks": sinks, "causal": True, "softcap": 3.0, "return_lse": True}
        out, lse = flashtile.attention(q, k, v, **given)
        return out.sin().sum() + lse.square().sum()  # type: ignore[no-any-return]

    found, want = (
        product(loss, x, of)[1] for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp)
    )
    assert all(float(each.abs().max()) > 0.01 for each in want)
    torch.testing.assert_close(found, want)


def test_directions_that_depend_on_what_has_no_third_derivative() -> None:
    """Gradients of a second derivative by its directions alone; by its other arguments there are none."""
    q, w = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(ours(q, q, q).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first, q, w, create_graph=True)
    (by_w,) = torch.autograd.grad(second.sum(), w, retain_graph=True)
    (same,) = torch.autograd.grad(first, q, torch.ones_like(first), retain_graph=True)
    torch.testing.assert_close(by_w, same)
    for other in (q, [q, w]):
        with pytest.raises(UnsupportedError, match="no third derivative"):
            torch.autograd.grad(second.sum(), other, retain_graph=True)


def test_what_has_no_such_derivative_says_so() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(ours(q, q, q).sin().sum(), q, create_graph=True)
    (of_first,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no third derivative: its second derivative cannot"):
        of_first.sum().backward()
    with pytest.raises(UnsupportedError, match="no second derivative: its forward-mode derivative cannot"):
        jvp(lambda q: jvp(lambda q: ours(q, q, q), (q,), (q,))[1], (q,), (q,))


class _OwnTanh(torch.autograd.Function):
    """A function with its own backward, which is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := torch.tanh(x))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scores(table: Tensor, cap: float = 1.3) -> dict[str, Score]:
    """Functions of scores; the table is (heads, distances)."""
    return {
        "distance": lambda s, b, h, q, kv: s - 0.3 * (q - kv).abs(),
        "read": lambda s, b, h, q, kv: s * table[h, (q - kv).abs()] + table[h, q].sin() * s * s,
        "cap": lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        "cap_inside": lambda s, b, h, q, kv: 0.1 * kv + cap * torch.tanh(s / cap),
        "square": lambda s, b, h, q, kv: 0.5 * s * s,
        "exp": lambda s, b, h, q, kv: torch.exp(0.3 * s) + torch.sigmoid(s) * s,
        "where": lambda s, b, h, q, kv: torch.where(q > kv, (s * s + 1).sqrt(), torch.nn.functional.silu(s)),
        "powers": lambda s, b, h, q, kv: (s * s + 0.5) ** 1.5 + (1.2 + 0.1 * h) ** s + s.abs() ** 2.5,
        "logarithms": lambda s, b, h, q, kv: torch.log1p(s.exp()) + (s * s + 1).log2() + s.cos() * (s * s + 2).rsqrt(),
        "corners": lambda s, b, h, q, kv: (
            torch.maximum(s * s, 0.3 * s) - torch.minimum(s.sin(), s**3) + s * s.clamp(-0.4, 0.5) + s * s * s.floor()
        ),
        "remainders": lambda s, b, h, q, kv: s * torch.fmod(s * s, 0.9) + s * torch.remainder(s, s * s + 0.7),
        "others": lambda s, b, h, q, kv: s * s.erf() + torch.exp2(s * 0.5) + 1 / (s * s + 1) - (s * s + 1).log(),
        "own": lambda s, b, h, q, kv: s * _OwnTanh.apply(s),
        "no_score": lambda s, b, h, q, kv: torch.where(kv % 2 == 0, 0.5 * h, 2 * s),
        "infinite": lambda s, b, h, q, kv: torch.where(kv == 1, -torch.inf, s * s),
        "root_of_0": lambda s, b, h, q, kv: torch.log(s * s * (kv != 1)),
    }


SCORES = [*scores(torch.ones(()))]
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "lse": {"return_lse": True, "causal": True},
    "softcap": {"softcap": 1.5, "alibi_slopes": torch.rand(2).double(), "return_lse": True, "window_size": (2, 1)},
    "mask": {"mask_mod": lambda b, h, q, kv: kv != 2 + h},
}


# A softcap makes a finite score of log(0), but its slope is still infinite.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "beside"), [x for x in itertools.product(SCORES, BESIDE) if x != ("root_of_0", "softcap")], ids=str
)
def test_gradients_of_gradients_with_functions_of_scores(name: str, beside: str) -> None:
    torch.manual_seed(0)
    score_mod = scores(torch.randn(2, 8, dtype=torch.float64))[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Any:
        given = dict(zip(["attn_bias"], bias, strict=False))
        return flashtile.attention(q, k, v, score_mod=score_mod, **given, **BESIDE[beside])

    bias = [leaf(2, 3, 4)] * (beside in ("lse", "softcap"))
    inputs = leaf(2, ROWS, 2, 2), leaf(2, KEYS, 1, 2), leaf(2, KEYS, 1, 3)
    assert torch.autograd.gradgradcheck(attend, (*inputs, *bias), fast_mode=True)


def twice(score_mod: Score, x: Tensor, *more: Tensor) -> list[Tensor]:
    """Gradients of a gradient penalty with respect to x and others."""
    out = flashtile.attention(x, 2 * x, x, score_mod=score_mod)
    (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    return [*torch.autograd.grad(first.square().sum(), (x, *more))]


def formula_of(score_mod: Score) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        x = x.transpose(-3, -2)
        places = torch.meshgrid(*map(torch.arange, (1, 2, 5, 5)), indexing="ij")
        scores = score_mod(2 * x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5, *places)
        return (scores.softmax(-1) @ x).transpose(-3, -2)

    return attend


@pytest.mark.parametrize("way", WAYS)
def test_every_way_with_a_function_of_scores(way: str) -> None:
    torch.manual_seed(0)
    q, score_mod = torch.randn(1, 5, 2, 3, dtype=torch.float64), scores(torch.randn(2, 8, dtype=torch.float64))["read"]

    def ours(q: Tensor) -> Tensor:
        return flashtile.attention(q, 2 * q, q, score_mod=score_mod)

    found, wanted = (WAYS[way](lambda q, f=f: f(q).sin().sum(), q) for f in (ours, formula_of(score_mod)))
    torch.testing.assert_close(found, wanted)


def test_a_compiled_penalty_with_a_function_of_scores() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * s - 0.1 * (q - kv).abs()

    def penalty(attend: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda q: grad(lambda q: attend(q).sin().sum())(q).square().sum()

    def ours(q: Tensor) -> Tensor:
        return flashtile.attention(q, 2 * q, q, score_mod=score_mod)

    torch.compile(penalty(ours), backend="aot_eager", fullgraph=True)(q).backward()
    torch.testing.assert_close(q.grad, grad(penalty(formula_of(score_mod)))(q.detach()))


def test_a_slope_that_is_the_same_for_all_scores_has_no_derivative_whatever_is_detached() -> None:
    torch.manual_seed(0)
    q = leaf(1, 5, 2, 3)

    def rounded(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + (s.floor() - s).detach()

    (found,) = twice(rounded, q)
    out = formula_of(rounded)(q)
    (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(first.square().sum(), q)[0])


def test_what_a_function_of_scores_captures_has_no_second_derivative() -> None:
    q, table = leaf(1, 4, 2, 8), leaf(2)

    def reads(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * table[h]

    with pytest.raises(UnsupportedError, match=r"no second derivative of captured tensors .*: its backward cannot"):
        twice(reads, q)
    with pytest.raises(UnsupportedError, match="no second derivative of captured tensors"):
        twice(reads, q, table)

    def of_table(t: Tensor, x: Tensor) -> Tensor:
        out = flashtile.attention(x, x, x, score_mod=lambda s, b, h, q, kv: s * t[h])
        return out.sin().sum()

    x, t = q.detach(), table.detach()
    with pytest.raises(UnsupportedError, match="no second derivative of captured tensors"):
        grad(lambda t: grad(of_table, 1)(t, x).sum())(t)
    with pytest.raises(UnsupportedError, match="captures"):
        jvp(lambda t: grad(of_table, 1)(t, x), (t,), (t,))
    with pytest.raises(UnsupportedError, match=r"captured tensors .*: its forward-mode derivative cannot"):
        grad(lambda t: jvp(lambda x: of_table(t, x), (x,), (x,))[1])(t)
    # By x alone, a table that requires grad elsewhere is a constant.
    found = hessian(lambda x: of_table(table, x))(x)
    torch.testing.assert_close(found, hessian(lambda x: of_table(t, x))(x))


def test_functions_without_a_second_derivative_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    q = leaf(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=r"of this score_mod \(it detaches something or has a backward"):
        twice(lambda s, b, h, q, kv: s * s.detach(), q)
    curve.curved.cache_clear()
    monkeypatch.delitem(curve.RULES, "sin")
    with pytest.raises(UnsupportedError, match=r"of this score_mod \(there is none of its operator sin\)"):
        twice(lambda s, b, h, q, kv: s.sin(), q)
    curve.curved.cache_clear()
