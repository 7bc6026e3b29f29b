"""torch.compile and torch.export: sizes that are symbols, dropout's state; and what must not be compiled."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashtile
from flashtile import InvalidInputError, masks
from flashtile.call.arguments import Options, Tensors
from flashtile.compat import flash_attn_2, flash_attn_3
from flashtile.mods import record as mods
from flashtile.ops import operators

attend, packed, cached = flashtile.attention, flashtile.attention_varlen, flashtile.attention_with_kvcache
Run = Callable[..., Any]

# In a process of its own, since what is skipped stays so.
_CALL = """
import torch, flashtile
from flashtile.ops import operators

lines = set()

def keep(graph, _inputs):
    traces = (node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
    lines.update(line for trace in traces for line in trace.splitlines() if "File" in line)
    return graph

# As after more recompilations than are allowed: these run as they are, and what they call is traced.
for function in (flashtile.attention, operators.attention):
    torch._dynamo.decorators.skip(function)

@torch._dynamo.disable(recursive=False)
def attend(q):
    return flashtile.attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))

q = torch.randn(1, 8, 2, 16, requires_grad=True)
run = torch.compile(lambda q: attend(q * 2) + 1, backend=keep)
for _ in range(2):
    run(q).sum().backward()
    run(q.detach())
print(*lines, sep="\\n")
"""


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="its Dynamo asserts on its way through the operator's autograd")
def test_backends_are_not_compiled() -> None:
    """Inductor cannot compile the view of a mask as bytes, which a plan takes."""
    done = subprocess.run([sys.executable, "-c", _CALL], capture_output=True, text=True, check=True)
    assert "flashtile/ops" in done.stdout  # the way there is traced
    assert "flashtile/backends" not in done.stdout


@pytest.fixture
def symbols() -> Iterator[None]:
    """Sizes and numbers of tensors stay symbols in a graph."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


X, KEEP, SLOPES = torch.randn(5, 8, 4, 16), torch.tensor([True, False, True, True, False]), torch.rand(4)
PAGES = torch.randn(16, 4, 2, 16)
LISTS = flashtile.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8)


def _views(y: Tensor) -> tuple[Tensor, ...]:
    return y.repeat(1, 1, 3, 1).unflatten(2, (3, 4)).unbind(2)


def _lengths(y: Tensor, length: int) -> Tensor:
    return y.new_full((y.shape[0],), length, dtype=torch.int32)


def _packed(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.flatten(0, 1), torch.arange(y.shape[0] + 1, dtype=torch.int32) * y.shape[1]


def _table(y: Tensor) -> Tensor:
    return torch.arange(4, dtype=torch.int32).expand(y.shape[0], 4)


def _varlen(y: Tensor, function: Run = packed, longest: bool = False, **given: Any) -> Any:
    x, bounds = _packed(y)
    most: Any = (bounds[1:] - bounds[:-1]).max().item() if longest else None
    return function(x, x, x, bounds, bounds, *((most, most) if longest else ()), **given)


# By what they have whose size is y's batch.
SIZED: dict[str, Run] = {
    "contiguous": lambda y: attend(y, y, y, causal=True),
    "views": lambda y: attend(*_views(y)),
    "strided": lambda y: attend(y.mT.contiguous().mT, y, y),
    "mask": lambda y: attend(y, y, y, attn_mask=y[:, None, None, :, 0, 0] < 9),
    "bias": lambda y: attend(y, y, y, attn_bias=y[:, None, :, 0, :8]),
    "expanded_bias": lambda y: attend(y, y, y, attn_bias=y[:, None, None, :, 0, 0].expand(-1, 4, 8, 8)),
    "slopes": lambda y: attend(y, y, y, alibi_slopes=SLOPES.expand(y.shape[0], 4), sinks=SLOPES),
    "lists": lambda y: attend(y, y, y, block_mask=LISTS),
    "documents": lambda y: attend(y, y, y, block_mask=masks.documents((y[:, :, 0, 0] > 0).int())),
    "prefix": lambda y: attend(y, y, y, block_mask=masks.prefix(_lengths(y, 3), 8)),
    "score_mod": lambda y: (lambda z: attend(y, y, y, score_mod=lambda s, b, h, i, j: s + z[b, j]))(y[:, :, 0, 0]),
    "packed": functools.partial(_varlen, longest=True),
    "packed_mask": lambda y: _varlen(y, attn_bias=y[:, None, :1, 0, :8]),
    "packed_out": lambda y: _varlen(y.detach(), out=torch.empty_like(y.detach().flatten(0, 1))),
    "fa2": functools.partial(_varlen, function=flash_attn_2.flash_attn_varlen_func, longest=True),
    "fa3": lambda y: _varlen(y, flash_attn_3.flash_attn_varlen_func, True, seqused_k=_lengths(y, 5)),
    "cached": lambda y: cached(y.detach(), PAGES, PAGES.clone(), cache_seqlens=_lengths(y, 9), page_table=_table(y)),
    "cached_views": lambda y: cached(
        _views(y.detach())[1], PAGES, PAGES.clone(), cache_seqlens=_lengths(y, 9), page_table=_table(y),
        block_mask=masks.rows(0, (y[:, None, :, 0, 0] > 0).int() + 5),
    ),
    "appended": lambda y: cached(
        y.detach(), y.new_zeros(5, 16, 2, 16), y.new_zeros(5, 16, 2, 16), k=y.detach()[:, :, :2],
        v=y.detach()[:, :, 2:], cache_seqlens=_lengths(y, 6),
    ),
    "fa2_pages": lambda y: flash_attn_2.flash_attn_varlen_func(
        _packed(y.detach())[0], PAGES, PAGES.clone(), *(_packed(y)[1],) * 2, 8, 8, block_table=_table(y)
    ),
}  # fmt: skip


class _Chosen(torch.nn.Module):
    """A call of the sequences that data choose, with a weight whose gradient is that of q, k and v together."""

    def __init__(self, call: Run) -> None:
        super().__init__()
        self.call, self.weight = call, torch.nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        return self.call(x[keep] * self.weight)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SIZED)
def test_batches_whose_size_depends_on_data(name: str, symbols: None) -> None:
    """Exported, and some compiled with their backward; then for one sequence too."""
    model = _Chosen(SIZED[name])
    exported = torch.export.export(model, (X, KEEP), strict=name == "contiguous").module()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    is_compiled = name in ("strided", "expanded_bias", "documents", "packed_mask", "fa2", "cached_views")
    for keep in (KEEP, torch.arange(5) == 2):
        want = model(X, keep)
        assert torch.equal(exported(X, keep), want)
        if is_compiled:
            got = compiled(X, keep)
            assert torch.equal(got, want)
            if want.requires_grad:
                torch.testing.assert_close(*(torch.autograd.grad(out.sum(), model.weight) for out in (got, want)))


def test_lengths_that_are_symbols_are_not_guarded(symbols: None) -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            kept = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(9)
            found = attend(q, k, k, attn_mask=kept, mask_mod=lambda b, h, i, j: i >= j)
            runs = masks.documents(torch.arange(q.shape[1]) // 3)
            return found + attend(q, q, q, block_mask=runs, mask_mod=lambda b, h, i, j: i >= j)

    q, k = torch.randn(2, 16, 4, 8), torch.randn(2, 20, 4, 8)
    seqlens = [{0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim(name, max=4096)} for name in ("seqlen_q", "seqlen_k")]
    run = torch.export.export(Net(), (q, k), dynamic_shapes=tuple(seqlens)).module()
    for n, m, batch in ((2, 300, 3), (300, 2, 2), (16, 16, 1)):
        q, k = torch.randn(batch, n, 4, 8), torch.randn(batch, m, 4, 8)
        torch.testing.assert_close(run(q, k), Net()(q, k))
    # What tracing let pass is refused when it runs.
    with pytest.raises(InvalidInputError, match="k: batch is 3, but q has 2"):
        torch.compile(attend, backend="eager", dynamic=True)(*(torch.randn(n, 16, 4, 8) for n in (2, 3, 3)))


@pytest.mark.parametrize("call", ["varlen", "cached"])
def test_numbers_of_data_are_checked_when_a_compiled_call_runs(call: str, symbols: None) -> None:
    x, bounds = torch.randn(7, 2, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    calls: dict[str, Run] = {
        "varlen": lambda n: packed(x, x, x, bounds, bounds, n.max().item(), n.max().item(), causal=True),
        "cached": lambda n: cached(x[None, :1], PAGES[None, 0], PAGES[None, 1], cache_seqlens=n.min().item()),
    }
    run = torch.compile(calls[call], backend="aot_eager", fullgraph=True)
    right, wrong = torch.tensor([3, 4]), torch.tensor([-3, -4])
    assert torch.equal(run(right), calls[call](right))
    with pytest.raises((InvalidInputError, RuntimeError), match="max_seqlen_q|>= 0"):
        run(wrong)


def _policy(_context: Any, operator: Any, *_args: Any, **_keywords: Any) -> CheckpointPolicy:
    saved = operator == torch.ops.aten.sin.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_DROPPED: dict[str, Run] = {
    "plain": lambda q, v: attend(q.sin(), q.cos(), v, dropout_p=0.3),
    "two of one q": lambda q, v: attend(q, q, v, dropout_p=0.3) - attend(q, q, v, dropout_p=0.3),
}
_DROPPED["checkpoint"] = functools.partial(checkpoint, _DROPPED["plain"], use_reentrant=False)
_DROPPED["selective"] = functools.partial(
    _DROPPED["checkpoint"], context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("budget", [0.3, 0.0])
@pytest.mark.parametrize("name", _DROPPED)
def test_no_partitioner_draws_dropout_anew(name: str, budget: float) -> None:
    """out is linear in v, so its sum is the product of v with its gradient if both drop the same."""
    q, v = (torch.randn(2, 64, 4, 16, requires_grad=True) for _ in range(2))
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=budget):
        run = torch.compile(_DROPPED[name], backend="aot_eager_decomp_partition", fullgraph=True)
        torch.manual_seed(5)
        out = run(q, v)
        (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum(), atol=1e-3, rtol=1e-4)
    torch.manual_seed(5)
    want = _DROPPED[name](q, v)
    torch.testing.assert_close(out, want)  # and what is drawn is what an eager call draws
    assert want.abs().max() > 0.1


def test_empty_lists_may_be_none() -> None:
    """AOTInductor makes them so."""
    x, read = torch.randn(1, 8, 2, 16), {"operands": (), "numbers": ()}
    graph = mods.lowered(lambda b, h, i, j: (i + j) % 3 != 0, "mask_mod", "mask").text
    for given, options in (({}, Options()), (read, Options(mods=(graph,)))):
        t = Tensors(x, x, x, **given)
        args = operators.REGULAR.flatten(t, options)
        none = [None if each == () else each for each in args]
        assert torch.equal(operators.FORWARD.overload(*none)[0], operators.FORWARD.overload(*args)[0])
