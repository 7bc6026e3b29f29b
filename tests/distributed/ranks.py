"""The cases of context parallel attention, and what ranks run of them: N ranks against one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile import distributed


@dataclass(frozen=True)
class Case:
    """One call; ``lengths`` are (seqlen_q, seqlen_k) of packed documents, in place of batch and lengths."""

    name: str
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 37
    lengths: tuple[tuple[int, int], ...] = ()
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    dropout: float = 0.0
    lse: bool = False
    wanted: str = "qkvs"
    strided: bool = False

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("full"),
    Case("causal", causal=True),
    Case("causal_even", causal=True, seqlen_q=48, seqlen_k=48, strided=True),
    Case("scale", scale=0.4, causal=True),
    Case("more_keys", seqlen_q=19, seqlen_k=45, causal=True),
    Case("more_rows", seqlen_q=45, seqlen_k=19, causal=True),
    Case("window", window=(9, 4)),
    Case("window_causal", window=(6, 0), causal=True, seqlen_q=64, seqlen_k=64),
    Case("window_right", window=(None, 3), seqlen_q=21),
    Case("window_left", window=(5, None), seqlen_k=50),
    Case("softcap", softcap=2.0, causal=True),
    Case("alibi", alibi="h", causal=True),
    Case("alibi_batch", alibi="bh", seqlen_q=29),
    Case("sinks", sinks=True, causal=True),
    Case("dropout", dropout=0.3),
    Case("dropout_causal", dropout=0.5, causal=True, seqlen_q=31, kv_heads=1),
    Case("lse", lse=True, causal=True),
    Case("lse_sinks", lse=True, sinks=True, seqlen_q=50, seqlen_k=20, causal=True),
    Case("wider_v", head_dim=4, head_dim_v=12, causal=True),
    Case("one_group", heads=4, kv_heads=1, causal=True),
    Case("only_q", wanted="q", causal=True),
    Case("only_k", wanted="k", causal=True),
    Case("only_v", wanted="v", head_dim_v=12),
    Case("only_sinks", wanted="s", sinks=True),
    Case("few_rows", seqlen_q=3, seqlen_k=5, causal=True),
    Case("one_row", seqlen_q=1, seqlen_k=40, causal=True),
    Case("one_key", seqlen_q=9, seqlen_k=1, sinks=True),
    Case("no_rows", seqlen_q=0),
    Case("no_keys", seqlen_k=0, sinks=True, lse=True),
    Case("no_batch", batch=0),
    Case("packed", lengths=((13, 13), (1, 1), (29, 29)), causal=True),
    Case("packed_full", lengths=((20, 33), (17, 5))),
    Case("packed_window", lengths=((40, 40), (9, 33), (3, 3)), window=(6, 3)),
    Case("packed_empty", lengths=((0, 5), (7, 0), (0, 0), (11, 11)), causal=True, sinks=True, lse=True),
    Case("packed_short", lengths=tuple((n, n) for n in (1, 2, 1, 3, 1, 5, 2, 1)), causal=True),
    Case("packed_features", lengths=((13, 21), (30, 18)), alibi="bh", softcap=4.0, dropout=0.2, sinks=True,
         causal=True),
    Case("everything", causal=True, window=(20, 0), softcap=3.0, alibi="bh", sinks=True, dropout=0.2, kv_heads=1,
         lse=True, seqlen_q=29, seqlen_k=43, head_dim=6, head_dim_v=10),
)  # fmt: skip
NAMED = {case.name: case for case in CASES}


@dataclass(frozen=True, eq=False)
class Whole:
    """A case's tensors on one rank, the keywords of a call, and the bounds of documents."""

    tensors: dict[str, Tensor]
    keywords: dict[str, Any]
    bounds: tuple[tuple[int, ...], tuple[int, ...]] | None

    def side(self, name: str) -> dict[str, Any]:
        """What ``shard`` needs for the rows of a tensor."""
        keys = name in "kv"
        return {"dim": 0, "cu_seqlens": self.bounds[keys]} if self.bounds else {"dim": 1}


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> Whole:
    """The whole tensors, the same in every process."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    sizes: list[tuple[int, ...]] = [(case.batch, case.seqlen_q), (case.batch, case.seqlen_k)]
    bounds = None
    if case.lengths:
        sides = [torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0).tolist() for side in (0, 1)]
        bounds, sizes = (tuple(sides[0]), tuple(sides[1])), [(sides[0][-1],), (sides[1][-1],)]
    q = normal(*sizes[0], case.heads, case.head_dim)
    k, v = (normal(*sizes[1], case.kv_heads, dim) for dim in (case.head_dim, case.head_dim_v))
    found = {"q": q, "k": k, "v": v}
    keywords: dict[str, Any] = dict(
        causal=case.causal, window_size=case.window, softmax_scale=case.scale, softcap=case.softcap,
        dropout_p=case.dropout, return_lse=True,
    )  # fmt: skip
    if case.sinks:
        found["s"] = normal(case.heads)
    if case.alibi:
        entries = (len(case.lengths) or case.batch,) if "b" in case.alibi else ()
        keywords["alibi_slopes"] = torch.rand(*entries, case.heads, generator=make)
    return Whole(found, keywords, bounds)


def gradients(case: Case, results: Any, seeds: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the leaves that are wanted, of out and, if the case says so, of lse."""
    pairs = list(zip(results, seeds, strict=True))[: 2 if case.lse else 1]
    wanted = [name for name in leaves if name in case.wanted]
    outs = [(out, seed) for out, seed in pairs if out.requires_grad]
    found = torch.autograd.grad([x for x, _ in outs], [leaves[name] for name in wanted], [s for _, s in outs])
    return {f"d{name}": x for name, x in zip(wanted, found, strict=True)}


def on_one(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and the gradients of one rank, and the gradients' seeds."""
    whole = build(case, dtype)
    leaves = {name: x.clone().requires_grad_(name in case.wanted) for name, x in whole.tensors.items()}
    q, k, v, sinks = (leaves.get(name) for name in "qkvs")
    torch.manual_seed(7)
    if whole.bounds:
        bounds = [torch.tensor(x, dtype=torch.int32) for x in whole.bounds]
        results = flashtile.attention_varlen(q, k, v, *bounds, sinks=sinks, **whole.keywords)
    else:
        results = flashtile.attention(q, k, v, sinks=sinks, **whole.keywords)
    make = torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=make, dtype=torch.float64).to(x.dtype) for x in results]
    found = {"out": results[0].detach(), "lse": results[1].detach(), "dout": seeds[0], "dlse": seeds[1]}
    return found | gradients(case, results, seeds, leaves)


def parts_of(case: Case, found: dict[str, Tensor], mesh: DeviceMesh, layout: str) -> dict[str, Tensor]:
    """A rank's rows of what ``on_one`` found."""
    whole = build(case, torch.float32)
    rows_last = {"lse": -1, "dlse": -1}
    parts = {}
    for name, x in found.items():
        if name == "ds":
            parts[name] = x
            continue
        side = whole.side({"dk": "k", "dv": "v"}.get(name, "q"))
        if name in rows_last:
            side["dim"] = x.dim() - 1
        parts[name] = distributed.shard(x, mesh, layout, **side)
    return parts


def on_ranks(
    mesh: DeviceMesh, case: Case, dtype: torch.dtype, layout: str, comm: str, seeds: dict[str, Tensor], **others: Any
) -> dict[str, Tensor]:
    """This rank's out, lse and gradients."""
    whole = build(case, dtype)
    leaves = {}
    for name, x in whole.tensors.items():
        part = x if name == "s" else distributed.shard(x, mesh, layout, **whole.side(name))
        if case.strided and name != "s":  # as a view of a projection's output
            part = torch.stack([part, part], 2)[:, :, 1]
        leaves[name] = part.requires_grad_(name in case.wanted)
    q, k, v, sinks = (leaves.get(name) for name in "qkvs")
    if whole.bounds:
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), whole.bounds, strict=True))
    else:
        lengths = {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k}
    torch.manual_seed(7 + sum(mesh.get_coordinate() or ()))
    keywords = {**whole.keywords, "mesh": mesh, "layout": layout, "comm": comm, "sinks": sinks, **lengths, **others}
    results = distributed.attention(q, k, v, **keywords)
    found = {"out": results[0].detach(), "lse": results[1].detach()}
    return found | gradients(case, results, (seeds["dout"], seeds["dlse"]), leaves)


def distance(got: Tensor, want: Tensor, whole: Tensor) -> float:
    """The largest difference over the largest value of the whole; infinities must be equal, NaN is far from all."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{got.dtype} {tuple(got.shape)}, must be {want.dtype} {tuple(want.shape)}")
    apart = torch.where(got == want, 0.0, got - want).abs()
    if not apart.numel():
        return 0.0
    most = torch.where(whole.isinf(), 0.0, whole).abs().max().item()
    return float("inf") if apart.isnan().any() else apart.max().item() / max(most, 1e-30)


def compare(mesh: DeviceMesh, case: Case, dtype: torch.dtype, ways: list[tuple[str, str]]) -> dict[str, float]:
    """For each layout and comm, the largest distance of this rank's results from one rank's."""
    want = on_one(case, dtype)
    found = {}
    for layout, comm in ways:
        part = parts_of(case, want, mesh, layout)
        got = on_ranks(mesh, case, dtype, layout, comm, part)
        found |= {f"{layout} {comm} {name}": distance(x, part[name], want[name]) for name, x in got.items()}
    return found
