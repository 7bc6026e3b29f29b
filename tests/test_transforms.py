"""torch.func and forward mode: grad, vjp, jacrev, vmap, jvp, jacfwd, dual tensors, batches of gradients.

Reverse mode and vmap are compared with eager calls one by one, forward mode with the oracle's in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import InvalidInputError, UnsupportedError, nn, reference
from flashtile.backends.cpu import jvp as forward_mode
from flashtile.call.arguments import Options, Tensors
from flashtile.compat import flash_attn_2
from flashtile.ops import operation
from flashtile.ops import operators as ops
from tests.cases import CASES, Call, build
from tests.rule import assert_close

BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def causal(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return flashtile.attention(q, k, v, causal=True, **keywords)


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_grad_vjp_and_jacrev_are_autograds() -> None:
    q, k, v = normal(2, 6, 4, 4), normal(2, 6, 2, 4, seed=1), normal(2, 6, 2, 4, seed=2)
    dout = normal(2, 6, 4, 4, seed=3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = causal(*leaves)
    want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    equal(grad(lambda *x: (causal(*x) * dout).sum(), argnums=(0, 1, 2))(q, k, v), want)
    equal(vjp(causal, q, k, v)[1](dout), want)
    rows = [torch.autograd.grad(out.flatten()[n], leaves[0], retain_graph=True)[0] for n in range(out.numel())]
    equal(jacrev(causal)(q, k, v), torch.stack(rows).view(*out.shape, *q.shape))


def test_gradients_of_lse_bias_and_sinks_nest_in_autograd() -> None:
    q, bias, sinks = normal(2, 6, 2, 4), normal(2, 6, 6, seed=1), normal(2, seed=2)
    outer = normal(1, seed=4).requires_grad_()

    def loss(q: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out, lse = causal(q, q * outer, q, attn_bias=bias, sinks=sinks, return_lse=True)
        return (out.square().sum() + lse.sin().sum()) * 2

    leaves = [x.clone().requires_grad_() for x in (q, bias, sinks)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    equal(tuple(x.detach() for x in grad(loss, argnums=(0, 1, 2))(q, bias, sinks)), want)
    # An outer graph through the result of a vjp's forward.
    value, _ = vjp(loss, q, bias, sinks)
    equal(torch.autograd.grad(value, outer), torch.autograd.grad(loss(q, bias, sinks), outer))


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_of_gradients(packed: bool) -> None:
    q = normal(6, 2, 4) if packed else normal(2, 6, 2, 4)
    q.requires_grad_()
    out, lse = (
        flashtile.attention_varlen(q, q, q, BOUNDS, BOUNDS, return_lse=True)
        if packed
        else flashtile.attention(q, q, q, causal=True, return_lse=True)
    )
    seeds = normal(3, *out.shape, seed=1), normal(3, *lse.shape, seed=2)
    for outputs, several in (((out,), seeds[:1]), ((lse,), seeds[1:]), ((out, lse), seeds)):
        got = torch.autograd.grad(outputs, q, several, is_grads_batched=True, retain_graph=True)[0]
        want = [torch.autograd.grad(outputs, q, [s[n] for s in several], retain_graph=True)[0] for n in range(3)]
        equal(got, torch.stack(want))
        by_vmap = vmap(lambda *s, o=outputs: torch.autograd.grad(o, q, s, retain_graph=True)[0])(*several)
        equal(by_vmap, got)


IN_DIMS = [(0, 0, 0), (1, None, -1), (None, 2, 0), (None, None, 3), (4, 0, None)]


def one_by_one(call: Callable[..., Any], in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
    samples = []
    for n in range(3):
        samples.append(call(*(x if d is None else x.select(d, n) for x, d in zip(tensors, in_dims, strict=True))))
    return torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *samples)


def mapped(shape: tuple[int, ...], dim: int | None, seed: int) -> Tensor:
    x = normal(3, *shape, seed=seed)
    return x[0] if dim is None else x.movedim(0, dim)


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_and_gradients_of_samples(in_dims: tuple[int | None, ...]) -> None:
    shapes = (2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 4)
    tensors = [mapped(shape, dim, seed) for seed, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True))]
    call = partial(causal, return_lse=True)
    equal(vmap(call, in_dims)(*tensors), one_by_one(call, in_dims, *tensors))

    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in call(*x))

    gradients = grad(loss, argnums=(0, 1, 2))
    equal(vmap(gradients, in_dims)(*tensors), one_by_one(gradients, in_dims, *tensors))
    # The gradient of a sum over samples, through vmap.
    leaves = [x.clone().requires_grad_() for x in tensors]
    want = torch.autograd.grad(one_by_one(loss, in_dims, *leaves).sum(), leaves)
    equal(torch.autograd.grad(vmap(loss, in_dims)(*leaves).sum(), leaves), want)


EXTRAS: dict[str, tuple[str, tuple[int, ...]]] = {
    "bias": ("attn_bias", (2, 2, 5, 7)),
    "bias_shared": ("attn_bias", (2, 5, 1)),
    "bias_of_one": ("attn_bias", (1, 1, 5, 7)),
    "mask": ("attn_mask", (2, 1, 5, 7)),
    "mask_keys": ("attn_mask", (7,)),
    "slopes": ("alibi_slopes", (2,)),
    "slopes_batch": ("alibi_slopes", (2, 2)),
    "sinks": ("sinks", (2,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("extra", EXTRAS)
def test_vmap_of_every_tensor(extra: str, batch: int, dim: int | None) -> None:
    name, shape = EXTRAS[extra]
    shape = shape if len(shape) in (1, 3) else (min(batch, shape[0]), *shape[1:])
    x = mapped(shape, dim, 5)
    x = x > 0 if extra.startswith("mask") else x.float().abs() if extra.startswith("slopes") else x
    qkv = [mapped((batch, n, 2, 4), d, s) for s, (n, d) in enumerate(((5, 0), (7, None), (7, 1)))]
    in_dims = (0, None, 1, dim)

    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return causal(q, k, v, return_lse=True, **{name: x})

    equal(vmap(call, in_dims)(*qkv, x), one_by_one(call, in_dims, *qkv, x))
    wanted = (0, 1, 2, 3) if x.dtype == torch.float64 else (0, 1, 2)
    gradients = grad(lambda *t: call(*t)[0].square().sum() + call(*t)[1].nan_to_num(neginf=0.0).sum(), argnums=wanted)
    equal(vmap(gradients, in_dims)(*qkv, x), one_by_one(gradients, in_dims, *qkv, x))


def test_vmap_nests() -> None:
    x = normal(2, 3, 1, 5, 2, 4)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return causal(q, k, q)

    got = vmap(vmap(call, in_dims=(0, None)), in_dims=(0, None))(x, x[0, 0])
    want = torch.stack([torch.stack([call(each, x[0, 0]) for each in row]) for row in x])
    equal(got, want)
    twice = vmap(vmap(grad(lambda q: call(q, q).square().sum())))
    equal(twice(x), torch.stack([torch.stack([grad(lambda q: call(q, q).square().sum())(e) for e in r]) for r in x]))


@pytest.mark.parametrize("own_bounds", [False, True])
def test_vmap_of_packed_calls(own_bounds: bool) -> None:
    x = normal(3, 6, 2, 4)
    bounds = torch.tensor([[0, 2, 6], [0, 5, 5], [0, 1, 3]], dtype=torch.int32)
    in_dims = (0, 0 if own_bounds else None)

    def loss(x: Tensor, bounds: Tensor) -> Tensor:
        return flashtile.attention_varlen(x, x, x, bounds, bounds, causal=True).square().sum()

    bounds = bounds if own_bounds else bounds[0]
    for call in (loss, grad(loss)):
        equal(vmap(call, in_dims)(x, bounds), one_by_one(call, in_dims, x, bounds))


def test_vmap_of_no_samples() -> None:
    none = normal(0, 1, 5, 2, 4)
    assert vmap(lambda x: causal(x, x, x))(none).shape == none.shape
    with pytest.raises(UnsupportedError, match="no samples"):
        vmap(lambda x: flashtile.attention_varlen(x, x, x, BOUNDS, BOUNDS))(none[:, 0])


def test_dropout_under_vmap_follows_its_randomness() -> None:
    x = normal(1, 40, 2, 4).expand(3, 1, 40, 2, 4)

    def call(x: Tensor) -> Tensor:
        return causal(x, x, x, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(x)
    torch.manual_seed(1)
    want = call(x[0])
    torch.manual_seed(1)
    same = vmap(call, randomness="same")(x)
    assert all(torch.equal(each, want) for each in same)
    a, b, c = vmap(call, randomness="different")(x)
    assert not (torch.equal(a, b) or torch.equal(b, c) or torch.equal(a, c))
    # The backward drops what the forward dropped: out is linear in v, so its derivative along v is out.
    for randomness in ("same", "different"):
        both = vmap(
            lambda v: (lambda out, back: (out.sum(), (back(torch.ones_like(out))[0] * v).sum()))(
                *vjp(lambda v: causal(x[0], x[0], v, dropout_p=0.5), v)
            ),
            randomness=randomness,
        )(x)
        equal(*both)


def test_gradients_of_samples_through_the_module() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, num_kv_heads=2, causal=True, rotary=True, dtype=torch.float64)
    parameters = {name: x.detach() for name, x in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x[None],)).square().sum()

    x = normal(3, 5, 16)
    equal(vmap(grad(loss), in_dims=(None, 0))(parameters, x), one_by_one(partial(grad(loss), parameters), (0,), x))


def along(
    call: Call, attend: Callable[[Call], tuple[Tensor, Tensor]], tangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The derivative of out and lse along tangents of the leaves."""

    def of(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attend(call._with(dict(zip(call.leaves, leaves, strict=True))))

    primals = tuple(x.detach() for x in call.leaves.values())
    _, found = jvp(of, primals, tuple(tangents[name].to(x.dtype) for name, x in call.leaves.items()))
    return {name: x.detach() for name, x in zip(("out", "lse"), found, strict=True)}


def run(call: Call) -> tuple[Tensor, Tensor]:
    """The library's, with the leaves among the keywords replaced as well."""
    t = call.tensors
    keywords = {**call.keywords, **{n: getattr(t, n) for n in ("attn_bias", "sinks") if getattr(t, n) is not None}}
    return dataclasses.replace(call, keywords=keywords).run(None)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.out], ids=str)
def test_forward_mode(case: Any, dtype: torch.dtype) -> None:
    call = build(case, dtype)
    make = torch.Generator().manual_seed(5)
    tangents = {name: torch.randn(x.shape, generator=make).to(dtype) for name, x in call.leaves.items()}
    if case.layout == "expanded":  # PyTorch makes no other tangents for such tensors
        tangents = {name: x[:, :, :1].expand_as(x) for name, x in tangents.items()}
    got = along(call, run, tangents)
    plain = along(call, lambda c: reference.attention(c.problem, c.tensors, c.problem.dtype), tangents)
    upcast = call.upcast()
    assert_close(
        got, lambda: along(upcast, lambda c: reference.attention(c.problem, c.tensors), tangents), plain, dtype
    )


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_of_forward_mode_and_of_batches(packed: bool) -> None:
    q, k, v = (normal(1, 6, 2, 4, seed=n).requires_grad_() for n in range(3))
    bias, sinks = normal(2, 6, 6, seed=3).requires_grad_(), normal(2, seed=4).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        keywords: Any = dict(causal=True, attn_bias=bias, sinks=sinks, softcap=1.5, return_lse=True)
        if packed:
            return flashtile.attention_varlen(q[0], k[0], v[0], BOUNDS, BOUNDS, **keywords)
        return flashtile.attention(q, k, v, **keywords)

    checks = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks), fast_mode=True, **checks)


def test_dual_tensors_jvp_and_jacfwd_agree_on_every_entry() -> None:
    q, dq = normal(1, 6, 2, 4), normal(1, 6, 2, 4, seed=1)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, causal=True, dtype=torch.float64).requires_grad_(False)
    entries: list[Callable[[Tensor], Tensor]] = [
        lambda q: causal(q, q, q),
        lambda q: flashtile.attention_varlen(q[0], q[0], q[0], BOUNDS, BOUNDS),
        lambda q: flash_attn_2.flash_attn_func(q, q, q, causal=True),
        lambda q: module(q.flatten(2)),
    ]
    for entry in entries:
        leaf = q.clone().requires_grad_()
        jacobian = torch.autograd.functional.jacobian(entry, leaf)
        want = torch.einsum("...bshd,bshd->...", jacobian, dq)
        assert want.abs().sum() > 1
        equal(jvp(entry, (q,), (dq,))[1], want)
        equal(jacfwd(entry)(q), jacobian)
        for primal in (q, leaf):
            with fwad.dual_level():
                out, tangent = fwad.unpack_dual(entry(fwad.make_dual(primal, dq)))
            equal(tangent.detach(), want)
        # The output's graph is that of a call without tangents: what a loss with a detached tangent trains.
        equal(torch.autograd.grad(out.sum(), leaf), torch.autograd.grad(entry(leaf).sum(), leaf))


def test_forward_mode_of_samples() -> None:
    x = normal(3, 1, 5, 2, 4)

    def along(x: Tensor) -> Tensor:
        return jvp(lambda x: causal(x, x, x, attn_bias=x[..., 0, :1] * x[0, :, 0, 0]), (x,), (x.cos(),))[1]

    equal(vmap(along)(x), one_by_one(along, (0,), x))
    q, bias, sinks = normal(2, 5, 2, 4), normal(5, 5, seed=1), normal(2, seed=2)
    for name, extra in (("attn_bias", bias), ("sinks", sinks)):
        call = partial(lambda name, x: causal(q, q, q, **{name: x}), name)
        equal(jacfwd(call)(extra), jacrev(call)(extra))


def test_forward_mode_of_a_value_that_vjp_returns() -> None:
    """A first derivative: the level of reverse mode, which is inside, must hand the tangents on."""
    q, dq = normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=1)

    def f(q: Tensor) -> Tensor:
        return causal(q, q, q)

    equal(jvp(lambda q: vjp(f, q)[0], (q,), (dq,))[1], jvp(f, (q,), (dq,))[1])


def test_forward_mode_discards_nan_of_masked_pairs() -> None:
    q, k, dq = normal(1, 5, 2, 4), normal(1, 6, 2, 4, seed=1), normal(1, 5, 2, 4, seed=2)
    keep = torch.arange(6) < 5
    nan = k.index_fill(1, torch.tensor(5), torch.nan)

    def along(k: Tensor, v: Tensor) -> Tensor:
        return jvp(lambda q: flashtile.attention(q, k, v, attn_mask=keep), (q,), (dq,))[1]

    equal(along(nan, k), along(k, k))


def test_slopes_have_no_tangent() -> None:
    q, slopes = normal(1, 5, 2, 4), torch.ones(2)
    with pytest.raises(InvalidInputError, match="alibi_slopes: has a tangent"):
        jvp(lambda slopes: causal(q, q, q, alibi_slopes=slopes), (slopes,), (slopes,))


def test_forward_mode_takes_memory_linear_in_the_lengths() -> None:
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
            return out

    q = torch.randn(1, 2048, 1, 4)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    with Largest() as largest:
        forward_mode.jvp((q, q, q, None, None), out, lse, Tensors(q, q, q), Options())
    assert 0 < largest.numbers <= 2048 * 2048 // 16


def test_flops_of_forward_mode() -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8)
    products = {(0,): 3, (1,): 3, (2,): 2, (0, 1, 2): 5}
    for wanted, count in products.items():
        with FlopCounterMode(display=False) as counter, fwad.dual_level():
            x = [fwad.make_dual(t, t) if n in wanted else t for n, t in enumerate((q, k, k))]
            flashtile.attention(*x)
        forward = 2 * 4 * 6 * 9 * 4 * 8
        assert counter.get_total_flops() == forward + 2 * 4 * 6 * 9 * 2 * 8 * count


COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda q: grad(lambda q: causal(q, q, q).square().sum())(q),
    "vmap": lambda q: vmap(lambda q: causal(q, q, q))(q[None]),
    "samples": lambda q: vmap(grad(lambda q: causal(q, q, q).square().sum()))(q[None]),
    "jvp": lambda q: jvp(lambda q: causal(q, q, q), (q,), (q.sin(),))[1],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name: str) -> None:
    torch._dynamo.reset()
    q = normal(1, 5, 2, 4)
    equal(torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")(q), COMPILED[name](q))


def test_opcheck_forward_mode() -> None:
    q = normal(1, 5, 2, 4)
    out, lse = flashtile.attention(q, q, q, return_lse=True)
    args = (q, None, q, None, None, out, lse, *ops.REGULAR.flatten(Tensors(q, q, q), Options()))
    torch.library.opcheck(torch.ops.flashtile.attention_jvp.default, args)


def with_huge_rows() -> tuple[Tensor, ...]:
    """q, k, v and a bias of huge rows; float32 holds all scores, halves, in whichever order they are summed."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-1, 2, (2, n, 2, 4), generator=make).float() for n in (6, 9, 9))
    rows = torch.tensor([torch.finfo(torch.float32).min, -1e9, -3e5, 1e9, torch.finfo(torch.float32).max, 0.0])
    return q, k, v, rows[:, None] + torch.randint(0, 2, (2, 1, 6, 9), generator=make).float()


def of_huge_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return flashtile.attention(q, k, v, attn_bias=bias, return_lse=True)


def by_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """By the formula in float32; torch.logsumexp would lose the counts of keys in its gradient."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2 + bias
    top = scores.detach().amax(-1, keepdim=True)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, top.squeeze(-1) + torch.log(torch.exp(scores - top).sum(-1))


SEEDS = normal(3, 2, 6, 2, 4, seed=4).float(), normal(3, 2, 2, 6, seed=5).float()
TANGENTS = tuple(normal(*x.shape, seed=7).float() for x in with_huge_rows())


def weighted(call: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def loss(*x: Tensor) -> Tensor:
        out, lse = call(*x)
        return (out * SEEDS[0][0, : len(out)]).sum() + (lse * SEEDS[1][0, : len(lse)]).sum()

    return loss


def batch_of_gradients(call: Callable[..., tuple[Tensor, Tensor]], *x: Tensor) -> Any:
    leaves = [each.clone().requires_grad_() for each in x]
    return torch.autograd.grad(call(*leaves), leaves, SEEDS, is_grads_batched=True)


# With a bias lse has two parts inside, and has one for callers, whatever transforms the call.
WAYS: dict[str, Callable[..., Any]] = {
    "values": lambda call, *x: call(*x),
    "grad": lambda call, *x: grad(weighted(call), (0, 1, 2, 3))(*x),
    "batch": batch_of_gradients,
    "vmap": lambda call, q, *x: vmap(call, (0, None, None, None))(torch.stack([q, -q]), *x),
    "samples": lambda call, *x: vmap(grad(weighted(call), (0, 3)))(*(e[:, None] for e in x)),
    "jvp": lambda call, *x: jvp(call, x, TANGENTS)[1],
}


@pytest.mark.parametrize(
    ("name", "is_compiled"), [*((name, False) for name in WAYS), ("grad", True), ("samples", True), ("jvp", True)]
)
def test_transforms_keep_the_counts_of_huge_rows(name: str, is_compiled: bool) -> None:
    torch._dynamo.reset()
    tensors = with_huge_rows()
    call: Any = partial(WAYS[name], of_huge_rows)
    if is_compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = call(*tensors), WAYS[name](by_softmax, *tensors)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_eager_calls_skip_the_dispatcher() -> None:
    q = torch.ones(1, 4, 1, 4)
    assert not operation.is_watched(q, q, q)
    with fwad.dual_level():
        assert operation.is_watched(q, q, q)
    assert not operation.is_watched(q, q, q)


def test_a_compiled_derivative_may_be_returned_detached() -> None:
    """AOTAutograd traces the backward of all outputs; what is asked for at last decides."""
    weight, x, dx = torch.randn(8, 8, requires_grad=True), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)

    def both(x: Tensor, dx: Tensor) -> Any:
        return torch.func.jvp(lambda x: flashtile.attention(x @ weight, x, x), (x,), (dx,))

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = []
    for run in (both, compiled):
        out, dout = run(x, dx)
        (dweight,) = torch.autograd.grad((out - dout.detach()).square().mean(), weight)
        found.append((out, dout, dweight))
    torch.testing.assert_close(*found)
    of_tangents = [torch.autograd.grad(run(x, dx)[1].square().sum(), weight)[0] for run in (both, compiled)]
    torch.testing.assert_close(*of_tangents)
