"""``attention(selected=)``: values and gradients against the definition with a mask in float64, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashtile
from flashtile import InvalidInputError, UnsupportedError, masks, reference
from flashtile.call.arguments import Options, Tensors
from flashtile.call.problem import Problem
from flashtile.ops.operators import REGULAR

Q, K = torch.randn(2, 5, 4, 24), torch.randn(2, 9, 1, 24)


def lists_of(batch: int, rows: int, keys: int, most: int, seed: int = 0) -> Tensor:
    """Random lists, with -1 and positions past the end; the first one names nothing."""
    make = torch.Generator().manual_seed(seed)
    lists = torch.stack([torch.randperm(keys + most + 4, generator=make)[:most] - 2 for _ in range(batch * rows)])
    lists[0] = torch.where(torch.arange(most) % 2 == 0, -1, keys)
    return lists.int().view(batch, rows, most)


def mask_of(lists: Tensor, keys: int) -> Tensor:
    keep = [[j in each for j in range(keys)] for each in map(set, lists.flatten(0, 1).tolist())]
    return torch.tensor(keep).view(lists.shape[0], 1, lists.shape[1], keys)


LISTS = lists_of(2, 5, 9, 6)


def by_definition(q: Tensor, k: Tensor, v: Tensor, lists: Tensor, sinks: Tensor | None, **keywords: Any) -> Any:
    tensors = Tensors(q, k, v, attn_mask=mask_of(lists, k.shape[1]), sinks=sinks)
    window = keywords.pop("window_size", (None, None))
    right = 0 if keywords.pop("causal", False) else window[1]
    problem = Problem.of(tensors, Options(window[0], right, **keywords))
    return reference.with_max_scores(problem, tensors)


SHAPES = {
    "latent": dict(heads=4, kv_heads=1, dim=24, dim_v=16, keys=9, rows=5, joined=True),
    "grouped": dict(heads=6, kv_heads=2, dim=8, dim_v=8, keys=11, rows=11),
    "wider_v": dict(heads=2, kv_heads=2, dim=8, dim_v=20, keys=30, rows=3),
    "one_key": dict(heads=2, kv_heads=1, dim=8, dim_v=8, keys=1, rows=4),
}
KEYWORDS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (4, 2)}, {"softcap": 2.0, "softmax_scale": 0.7},
    {"causal": True, "sinks": True},
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", KEYWORDS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_the_definition(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    s, make = SHAPES[name], torch.Generator().manual_seed(2)
    q = torch.randn(2, s["rows"], s["heads"], s["dim"], generator=make)
    k = torch.randn(2, s["keys"], s["kv_heads"], s["dim"], generator=make)
    v = torch.randn(2, s["keys"], s["kv_heads"], s["dim_v"], generator=make)
    sinks = torch.randn(s["heads"], generator=make) if given.get("sinks") else None
    given = {name: x for name, x in given.items() if name != "sinks"}
    lists = lists_of(2, s["rows"], s["keys"], 6)
    found = []
    for wide in (False, True):
        leaves = [x.to(dtype).to(torch.float64 if wide else dtype).requires_grad_() for x in (q, k, v)]
        tensors = [*leaves[:2], leaves[1][..., : s["dim_v"]] if s.get("joined") else leaves[2]]
        own = None if sinks is None else sinks.to(leaves[0].dtype).requires_grad_()
        if wide:
            results = by_definition(*tensors, lists, own, **given)
        else:
            results = flashtile.attention(
                *tensors, sinks=own, selected=lists, return_lse=True, return_max_scores=True, **given
            )
        assert not results[2].requires_grad or wide
        out, lse = results[0], results[1]
        draw = torch.Generator().manual_seed(3)
        dout, dlse = (torch.randn(x.shape, generator=draw).to(dtype).to(x.dtype) for x in (out, lse))
        wanted = [x for x in (*leaves[: 2 if s.get("joined") else 3], own) if x is not None]
        finite = torch.where(lse.isfinite(), lse, 0)
        found.append([*results, *torch.autograd.grad((out, finite), wanted, (dout, dlse))])
    limit = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 3e-2}[dtype]
    for n, (got, want) in enumerate(zip(*found, strict=True)):
        assert got.dtype == dtype or n in (1, 2)
        torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)


def test_keys_and_values_of_any_strides() -> None:
    wide = torch.randn(2, 9, 3, 24)
    q, k, v = Q.clone(), wide[:, :, 1:2], wide.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 2:]
    cases = (k, v), (torch.randn(3, 9, 1, 24)[::2], v), (k.mT.contiguous().mT, v), (k, k[..., :8]), (v, v[..., :8])
    for keys, values in cases:
        leaves = [q.clone().requires_grad_(), keys.detach().requires_grad_(), values.detach().requires_grad_()]
        copies = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in leaves]
        found = []
        for q_, k_, v_ in (leaves, copies):
            out = flashtile.attention(q_, k_, v_, selected=LISTS)
            found.append([out, *torch.autograd.grad(out, (q_, k_, v_), torch.ones_like(out))])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


def test_what_nobody_names_reaches_nothing_and_gets_nothing() -> None:
    lists = torch.where(LISTS == 3, -1, LISTS)
    k = K.clone()
    k[:, 3] = torch.nan
    found = []
    for keys in (k, K):
        leaves = Q.clone().requires_grad_(), keys.clone().requires_grad_()
        out = flashtile.attention(leaves[0], leaves[1], leaves[1][..., :16], selected=lists)
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    assert not found[0][2][:, 3].any() and not found[0][0][0, 0].any() and not found[0][1][0, 0].any()


def test_only_asked_for_gradients_and_no_grad() -> None:
    k = K.clone().requires_grad_()
    out = flashtile.attention(Q, k, k[..., :16].detach(), selected=LISTS)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.any() and not flashtile.attention(Q, K, K, selected=LISTS).requires_grad
    with torch.no_grad():
        assert not flashtile.attention(Q, k, k, selected=LISTS).requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole_with_its_backward(backend: str) -> None:
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
        lists = scores.topk(6, dim=-1).indices.int()
        out, lse = flashtile.attention(q * 2, k, k[..., :16], selected=lists, causal=True, sinks=sinks, return_lse=True)
        return out.square().sum() + lse.sum()

    scores = torch.randn(2, 5, 9)
    found = []
    for run in (torch.compile(loss, fullgraph=True, backend=backend), loss):
        leaves = Q.clone().requires_grad_(), K.clone().requires_grad_(), torch.zeros(4).requires_grad_()
        found.append(torch.autograd.grad(run(*leaves[:2], scores, leaves[2]), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def _operators(**changes: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    sinks = torch.randn(4).requires_grad_()
    options = Options(window_right=0, grads=REGULAR.options().grads._replace(q=True, k=True, v=True, sinks=True))
    args = REGULAR.flatten(Tensors(q, k, K.clone().requires_grad_(), sinks=sinks), options._replace(**changes))
    out, lse = torch.ops.flashtile.selected_attention(LISTS, *args)
    lse = lse[..., 0].contiguous() if options.return_max_scores else lse
    detached = [x.detach() if isinstance(x, Tensor) else x for x in args]
    lse = torch.where(lse.isfinite(), lse, 0).detach()
    return (LISTS, *args), (torch.randn_like(out), torch.randn_like(lse), out.detach(), lse, LISTS, *detached)


def test_opcheck() -> None:
    forward, backward = _operators()
    torch.library.opcheck(torch.ops.flashtile.selected_attention.default, forward)
    torch.library.opcheck(torch.ops.flashtile.selected_attention_backward.default, backward)


def test_flops_count_the_elements_of_lists() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = flashtile.attention(q, k, k[..., :16], selected=LISTS)
    pairs = LISTS.numel() * 4
    assert counter.get_total_flops() == 2 * pairs * (24 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 24 + 2 * 16)


def test_there_is_no_second_derivative_and_no_forward_mode() -> None:
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    out = flashtile.attention(q, k, k, selected=LISTS)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    torch.testing.assert_close(dq, torch.autograd.grad(flashtile.attention(q, k, k, selected=LISTS), q, 2 * out)[0])
    with pytest.raises(UnsupportedError, match="no second derivative with selected"):
        torch.autograd.grad(dq.sum(), k)
    with forward_ad.dual_level(), pytest.raises(InvalidInputError, match="^q: has a tangent"):
        flashtile.attention(forward_ad.make_dual(Q, Q), K, K, selected=LISTS)
    by_func = torch.func.grad(lambda q: flashtile.attention(q, K, K, selected=LISTS).square().sum())(Q)
    torch.testing.assert_close(by_func, dq)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "a list": ("selected", {"selected": [1]}),
    "int64": ("selected", {"selected": LISTS.long()}),
    "of other rows": ("selected", {"selected": LISTS[:, :3]}),
    "of rank 2": ("selected", {"selected": LISTS[0]}),
    "a key twice": ("selected", {"selected": LISTS.clamp(0, 8)}),
    "slopes": ("alibi_slopes", {"alibi_slopes": torch.ones(4)}),
    "a mask": ("attn_mask", {"attn_mask": torch.ones(5, 9).bool()}),
    "a bias": ("attn_bias", {"attn_bias": torch.ones(5, 9)}),
    "intervals": ("block_mask", {"block_mask": masks.rows(0, torch.ones(5, dtype=torch.int32))}),
    "a function": ("selected", {"mask_mod": lambda b, h, i, j: j > 1}),
    "chunks": ("attention_chunk", {"attention_chunk": 3}),
    "dropout": ("dropout_p", {"dropout_p": 0.5}),
    "8 bits": ("selected", {"precision": "fp8"}),
    "k of other columns": ("k", {"k": K[..., :7]}),
    "v of other rows": ("v", {"v": K[:, :3]}),
    "causal a number": ("causal", {"causal": 1}),
}


@pytest.mark.parametrize("name", BAD)
def test_names_what_is_wrong(name: str) -> None:
    argument, changes = BAD[name]
    with pytest.raises(InvalidInputError, match=f"^{argument}: "):
        flashtile.attention(**{"q": Q, "k": K, "v": K, "selected": LISTS} | changes)


def test_a_backend_without_the_backward_is_refused_where_a_gradient_is_needed() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="has no backward of selected keys on cpu"):
        flashtile.attention(q, K, K, selected=LISTS, backend="portable")
    assert flashtile.attention(q, K, K, selected=LISTS, backend="cpu").requires_grad
    with pytest.raises(TypeError, match="selected"):
        flashtile.attention_varlen(Q[0], K[0], K[0], None, None, selected=LISTS[0])
