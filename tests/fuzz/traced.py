"""Random calls, exported or compiled with sizes that are symbols, known to be numbers later or never: as eager ones.

Batches and lengths of all tensors are such sizes, those of 1 that are broadcast and those of 0 too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.masks import Intervals
from tests.cases import Call, Case, build, gradient_of
from tests.fuzz.drawn import FLOATS, SMALL, Draw, _plain, _within

WAYS = ("export", "dynamic", "unbacked")
# Tensors whose last two dimensions are sizes too.
_PAIRS = ("attn_mask", "attn_bias")


def drawn(seed: int) -> tuple[Case, torch.dtype, str]:
    """Call number ``seed``, and how it is traced."""
    d = Draw(("traced", seed), replace(SMALL, longest=60, most_pairs=2**15, most_dim=64))
    case = replace(_within(_plain(d, f"traced_{seed}"), d.sizes), deterministic=False)
    return case, d.pick(*FLOATS), d.pick(*WAYS)


class Attend(torch.nn.Module):
    """A call by the names of its tensors: out, and lse without the gradient of 0 that compiled code gives it."""

    def __init__(self, made: Call) -> None:
        super().__init__()
        self.packed, self.longest = made.tensors.cu_seqlens_q is not None, made.case.say_longest
        mask = made.keywords.get("block_mask")
        self.mirrored, self.has_mask = mask is not None and mask.mirrored, mask is not None
        self.plain = {n: x for n, x in made.keywords.items() if not isinstance(x, (Tensor, Intervals))}

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Longest lengths are those of the data."""
        t: dict[str, Any] = dict(given)
        if self.has_mask:
            t["block_mask"] = Intervals(t.pop("row_keys", None), t.pop("key_rows", None), self.mirrored)
        if not self.packed:
            out, lse = flashtile.attention(**t, **self.plain, return_lse=True)
            return out, lse.detach()
        if self.longest:
            bounds = t["cu_seqlens_q"], t["cu_seqlens_k"]
            lengths = [(each[1:] - each[:-1]).max().item() for each in bounds]
            t |= {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]}
        out, lse = flashtile.attention_varlen(**t, **self.plain, return_lse=True)
        return out, lse.detach()


def judge_call(seed: int) -> None:
    """Asserts that a call gives the same numbers and gradients traced as eager."""
    case, dtype, way = drawn(seed)
    case = replace(case, out="", say_longest=case.say_longest and bool(case.lengths))
    made = build(case, dtype, seed=seed)
    given = {n: x for n, x in vars(made.tensors).items() if isinstance(x, Tensor) and n != "rng_state"}
    attend, leaves = Attend(made), list(made.leaves.values())
    sizes = {name: _sizes(name, x, attend.packed) for name, x in given.items()}
    run: Callable[..., Any]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch._dynamo.reset()
        if way == "export":
            shapes = {name: dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for name, dims in sizes.items()}
            shapes = {name: {n: s for n, s in of.items() if given[name].shape[n] > 2} for name, of in shapes.items()}
            with torch.no_grad():
                run, leaves = torch.export.export(attend, (given,), dynamic_shapes=(shapes,)).module(), []
        else:
            for name, dims in sizes.items() if way == "unbacked" else ():
                for n in dims:
                    torch._dynamo.decorators.mark_unbacked(given[name], n)
            run = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=way == "dynamic" or None)
        found = [_results(each, given, leaves, gradient_of(made).contiguous()) for each in (attend, run)]
    for want, got in zip(*found, strict=True):
        assert torch.equal(want.nan_to_num(), got.nan_to_num()), (seed, case, dtype, way)


def _sizes(name: str, x: Tensor, packed: bool) -> range:
    """The dimensions that are a batch or a length."""
    if name in ("sinks", "alibi_slopes"):
        return range(x.dim() - 1)
    if name in _PAIRS:
        return range(x.dim())
    return range(1) if packed or x.dim() == 1 else range(2 if name in "qkv" else 1)


def _results(run: Callable[..., Any], given: dict[str, Tensor], leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    out, lse = run(given)
    return [out, lse, *(torch.autograd.grad(out, leaves, dout) if leaves else ())]
