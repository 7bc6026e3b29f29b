"""The cases of context parallel attention, and what ranks run of them: N ranks against one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile import distributed, reference
from tests.cases import Call, Case, build


def case_of(name: str, **values: Any) -> Case:
    """A small case, packed if it has lengths."""
    lengths = values.get("lengths", ())
    usual = {"batch": len(lengths) or 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Case(f"varlen_{name}" if lengths else name, **usual | values)


CASES = (
    case_of("full"),
    case_of("causal", causal=True),
    case_of("causal_even", causal=True, seqlen_q=48, seqlen_k=48, layout="packed"),
    case_of("scale", scale=0.4, causal=True),
    case_of("more_keys", seqlen_q=19, seqlen_k=45, causal=True),
    case_of("more_rows", seqlen_q=45, seqlen_k=19, causal=True),
    case_of("window", window=(9, 4)),
    case_of("window_causal", window=(6, 0), causal=True, seqlen_q=64, seqlen_k=64),
    case_of("window_right", window=(None, 3), seqlen_q=21),
    case_of("window_left", window=(5, None), seqlen_k=50),
    case_of("softcap", softcap=2.0, causal=True),
    case_of("alibi", alibi="h", causal=True),
    case_of("alibi_batch", alibi="bh", seqlen_q=29),
    case_of("sinks", sinks=True, causal=True),
    case_of("dropout", dropout=0.3),
    case_of("dropout_causal", dropout=0.5, causal=True, seqlen_q=31, kv_heads=1),
    case_of("lse", lse_grad=True, causal=True),
    case_of("lse_sinks", lse_grad=True, sinks=True, seqlen_q=50, seqlen_k=20, causal=True),
    case_of("wider_v", head_dim=4, head_dim_v=12, causal=True),
    case_of("one_group", heads=4, kv_heads=1, causal=True),
    case_of("only_q", wanted="q", causal=True),
    case_of("only_k", wanted="k", causal=True),
    case_of("only_v", wanted="v", head_dim_v=12),
    case_of("only_sinks", wanted="s", sinks=True),
    case_of("few_rows", seqlen_q=3, seqlen_k=5, causal=True),
    case_of("one_row", seqlen_q=1, seqlen_k=40, causal=True),
    case_of("one_key", seqlen_q=9, seqlen_k=1, sinks=True),
    case_of("no_rows", seqlen_q=0),
    case_of("no_keys", seqlen_k=0, sinks=True, lse_grad=True),
    case_of("no_batch", batch=0),
    case_of("packed", lengths=((13, 13), (1, 1), (29, 29)), causal=True),
    case_of("packed_full", lengths=((20, 33), (17, 5))),
    case_of("packed_window", lengths=((40, 40), (9, 33), (3, 3)), window=(6, 3)),
    case_of("packed_empty", lengths=((0, 5), (7, 0), (0, 0), (11, 11)), causal=True, sinks=True, lse_grad=True),
    case_of("packed_short", lengths=tuple((n, n) for n in (1, 2, 1, 3, 1, 5, 2, 1)), causal=True),
    case_of("packed_features", lengths=((13, 21), (30, 18)), alibi="bh", softcap=4.0, dropout=0.2, sinks=True,
         causal=True),
    case_of("everything", causal=True, window=(20, 0), softcap=3.0, alibi="bh", sinks=True, dropout=0.2, kv_heads=1,
         lse_grad=True, seqlen_q=29, seqlen_k=43, head_dim=6, head_dim_v=10),
)  # fmt: skip
NAMED = {case.name.removeprefix("varlen_"): case for case in CASES}


def bounds_of(case: Case) -> list[tuple[int, ...]]:
    """Of packed queries and keys."""
    sides = zip(*case.lengths, strict=True) if case.lengths else ()
    return [tuple(itertools.accumulate(side, initial=0)) for side in sides]


def side(case: Case, name: str) -> dict[str, Any]:
    """What ``shard`` needs for the rows of a tensor."""
    return {"dim": 0, "cu_seqlens": bounds_of(case)[name in "kv"]} if case.lengths else {"dim": 1}


def gradients(call: Call, results: Any, seeds: Any) -> dict[str, Tensor]:
    """Gradients of the call's leaves, of out and, if the case says so, of lse."""
    pairs = list(zip(results, seeds, strict=True))[: 2 if call.case.lse_grad else 1]
    outs = [(out, seed) for out, seed in pairs if out.requires_grad]
    found = torch.autograd.grad([x for x, _ in outs], list(call.leaves.values()), [seed for _, seed in outs])
    return {f"d{name}": x for name, x in zip(call.leaves, found, strict=True)}


def on_one(case: Case, dtype: torch.dtype, seed: int = 0, oracle: bool = False) -> dict[str, Tensor]:
    """out, lse and the gradients of one rank, or of the reference, and the gradients' seeds."""
    call = build(case, dtype, seed=seed)
    results = reference.attention(call.problem, call.tensors) if oracle else call.run(None)
    make = torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=make, dtype=torch.float64).to(x.dtype) for x in results]
    found = {"out": results[0].detach(), "lse": results[1].detach(), "dout": seeds[0], "dlse": seeds[1]}
    return found | gradients(call, results, seeds)


def parts_of(case: Case, found: dict[str, Tensor], mesh: DeviceMesh, layout: Any) -> dict[str, Tensor]:
    """A rank's rows of what ``on_one`` found."""
    parts = {name: found[name] for name in ("dsinks", "dbias") if name in found}
    for name, x in found.items():
        if name not in parts:
            where = side(case, {"dk": "k", "dv": "v"}.get(name, "q"))
            where |= {"dim": x.dim() - 1} if name in ("lse", "dlse") else {}
            parts[name] = distributed.shard(x, mesh, layout, **where)
    return parts


def on_ranks(
    mesh: DeviceMesh, case: Case, dtype: torch.dtype, layout: Any, comm: str, seeds: dict[str, Tensor], seed: int = 0,
    **others: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """This rank's out, lse and gradients."""
    whole = build(case, dtype, seed=seed)
    parts = {n: distributed.shard(getattr(whole.tensors, n).detach(), mesh, layout, **side(case, n)) for n in "qkv"}
    if case.layout == "packed":  # as views of a projection's output
        parts = {name: torch.stack([part, part], 2)[:, :, 1] for name, part in parts.items()}
    leaves = {name: parts[name].requires_grad_() if name in parts else x for name, x in whole.leaves.items()}
    if case.lengths:
        lengths: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds_of(case), strict=True))
    else:
        lengths = {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k}
    torch.manual_seed(7 + sum(mesh.get_coordinate() or ()))
    keywords = whole.keywords | {"mesh": mesh, "layout": layout, "comm": comm, "return_lse": True, **lengths, **others}
    results = distributed.attention(*parts.values(), **keywords)
    found = {"out": results[0].detach(), "lse": results[1].detach()}
    return found | gradients(replace(whole, leaves=leaves), results, (seeds["dout"], seeds["dlse"]))


def distance(got: Tensor, want: Tensor, whole: Tensor, least: float = 1e-30) -> float:
    """The largest difference over the largest value of the whole; infinities must be equal, NaN is far from all.

    A whole that is zero but for rounding counts as ``least``.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{got.dtype} {tuple(got.shape)}, must be {want.dtype} {tuple(want.shape)}")
    apart = torch.where(got == want, 0.0, got - want).abs()
    if not apart.numel():
        return 0.0
    most = torch.where(whole.isinf(), 0.0, whole).abs().max().item()
    return float("inf") if apart.isnan().any() else apart.max().item() / max(most, least)


def compare(mesh: DeviceMesh, case: Case, dtype: torch.dtype, ways: list[tuple[str, str]]) -> dict[str, float]:
    """For each layout and comm, the largest distance of this rank's results from one rank's."""
    want = on_one(case, dtype)
    found = {}
    for layout, comm in ways:
        part = parts_of(case, want, mesh, layout)
        got = on_ranks(mesh, case, dtype, layout, comm, part)
        found |= {f"{layout} {comm} {name}": distance(x, part[name], want[name]) for name, x in got.items()}
    return found
