"""The table of cases that every backend is tested on, and how every backend is judged on it.

A case is data; ``build`` turns it into tensors, ``judge`` compares a backend with the float64 oracle by the rule of
``tests/rule.py``: the error may be at most twice that of the same formula computed in the input dtype by plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import InvalidInputError, UnsupportedError, reference
from flashtile.call.arguments import BY_KIND, Grads, band_of
from flashtile.call.backend import Direction
from flashtile.call.problem import Problem, Tensors
from flashtile.masks import Intervals
from flashtile.ops import dispatch
from tests.intervals import drawn_mask
from tests.poison import poisoned_memory
from tests.problems import banded_problem
from tests.rule import Yardstick, assert_close


@dataclass(frozen=True)
class Case:
    """One call. Letters in ``mask`` and ``bias`` are the dimensions kept of ``bhqk``; the others are broadcast.

    ``lengths`` packs sequences of (seqlen_q, seqlen_k); ``spare`` rows follow the last one. ``trimmed``: leading ones
    of the shapes of mask and bias are left out. ``wanted`` names what alone requires a gradient, by first letters; None
    for all that have one. ``dout`` says how out's gradient lies in memory. ``out``: a packed call is given one, "whole"
    or a "part" of a wider tensor; nothing requires a gradient then. ``intervals`` is a kind of ``tests.intervals``.
    ``large``: what the bias is for some pairs and for whole rows, a number, or "min" or "max", its dtype's.
    """

    name: str
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 37
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    spare: int = 0
    say_longest: bool = True
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    mask: str | None = None
    bias: str | None = None
    bias_grad: bool = True
    bias_float: bool = False
    trimmed: bool = False
    sinks: bool = False
    dropout: float = 0.0
    layout: str = "contiguous"
    lse_grad: bool = False
    magnitude: float = 1.0
    deterministic: bool = False
    invariant: bool = False
    wanted: str | None = None
    out: str = ""
    dout: str = "contiguous"
    chunk: int | None = None
    intervals: str = ""
    large: str = ""

    def __str__(self) -> str:
        return self.name


_FEATURES = (
    Case("full"),
    Case("scale", scale=0.3),
    Case("causal", causal=True),
    Case("window", window=(5, 3)),
    Case("window_left", window=(9, -1)),
    Case("window_right", window=(None, 4)),
    Case("window_one", window=(0, 0)),
    Case("window_causal", window=(6, 2), causal=True),
    Case("window_wide", window=(500, 500)),
    Case("chunk", chunk=10),
    Case("chunk_causal", chunk=16, causal=True),
    Case("chunk_window", chunk=13, window=(9, 2), seqlen_k=44),
    Case("chunk_of_one", chunk=1),
    Case("chunk_of_all", chunk=10**9, causal=True),
    Case("documents", intervals="documents"),
    Case("documents_causal", intervals="documents", causal=True, batch=3, kv_heads=1),
    Case("prefix", intervals="prefix", seqlen_k=45),
    Case("row_intervals", intervals="rows"),
    Case("row_intervals_window", intervals="rows of heads", window=(15, 3), softcap=2.0),
    Case("column_intervals", intervals="columns", causal=True),
    Case("column_intervals_of_heads", intervals="columns of heads", heads=4, kv_heads=2, sinks=True),
    Case("both_intervals", intervals="both", mask="bqk", bias="hqk", dropout=0.2, lse_grad=True),
    Case("intervals_chunk", intervals="documents and rows", chunk=9, alibi="h"),
    Case("softcap", softcap=2.0),
    Case("alibi", alibi="h"),
    Case("alibi_batch", alibi="bh", causal=True),
    Case("mask", mask="bhqk"),
    Case("mask_keys", mask="bk"),
    Case("mask_rows", mask="q"),
    Case("bias", bias="bhqk"),
    Case("bias_heads", bias="hqk"),
    Case("bias_square", bias="qk"),
    Case("bias_keys", bias="bk", causal=True),
    Case("bias_rows", bias="hq"),
    Case("bias_scalar", bias=""),
    Case("bias_constant", bias="hqk", bias_grad=False),
    Case("bias_large", bias="hqk", large="min", kv_heads=1, lse_grad=True),
    Case("bias_large_float", bias="bqk", bias_float=True, large="min", causal=True, seqlen_k=150, dropout=0.2),
    Case("bias_large_1e9", bias="bqk", bias_float=True, large="-1e9", window=(30, 30), seqlen_k=61),
    Case("bias_large_max", bias="bhqk", large="max", softcap=3.0, head_dim_v=24, alibi="h", bias_grad=False),
    Case("sinks", sinks=True),
    Case("sinks_causal", sinks=True, causal=True, seqlen_q=41),
    Case("dropout", dropout=0.3),
    Case("dropout_causal", dropout=0.5, causal=True),
    Case("dropout_320", dropout=0.3, head_dim=320, seqlen_q=20, seqlen_k=35),
    Case("lse_grad", lse_grad=True),
    Case("lse_grad_causal_sinks", lse_grad=True, causal=True, sinks=True, seqlen_q=45),
    Case("large_scores", magnitude=30.0, causal=True),
    Case("everything", causal=True, window=(20, 0), softcap=3.0, alibi="bh", mask="bqk", bias="hk", sinks=True,
         dropout=0.2, kv_heads=1, lse_grad=True, seqlen_q=29, seqlen_k=43, head_dim=20, head_dim_v=12),
)  # fmt: skip

_SHAPES = (
    Case("one", batch=1, seqlen_q=1, seqlen_k=1, heads=1, kv_heads=1, head_dim=1),
    Case("one_row", seqlen_q=1, seqlen_k=61, causal=True),
    Case("one_key", seqlen_q=61, seqlen_k=1),
    Case("prime", batch=1, seqlen_q=53, seqlen_k=59, heads=3, kv_heads=3, head_dim=17),
    Case("aligned", seqlen_q=64, seqlen_k=64, head_dim=32, causal=True),
    Case("more_keys_causal", seqlen_q=19, seqlen_k=47, causal=True),
    Case("more_rows_causal", seqlen_q=47, seqlen_k=19, causal=True),
    Case("more_rows_window", seqlen_q=47, seqlen_k=19, window=(4, 2)),
    Case("more_rows_chunk", seqlen_q=47, seqlen_k=19, chunk=8),
    Case("more_keys_chunk", seqlen_q=19, seqlen_k=47, chunk=11, heads=4, kv_heads=2),
    Case("more_keys_window", seqlen_q=19, seqlen_k=47, window=(3, 0)),
    Case("group", heads=4, kv_heads=2),
    Case("group_causal", heads=6, kv_heads=2, causal=True, seqlen_k=44),
    Case("many_in_a_group", heads=14, kv_heads=1, seqlen_q=300, seqlen_k=300, causal=True),
    Case("one_kv_head", heads=4, kv_heads=1, window=(8, 0)),
    Case("wider_v", head_dim=8, head_dim_v=24),
    Case("narrower_v", head_dim=24, head_dim_v=8, causal=True),
    Case("odd_dims", head_dim=33, head_dim_v=7),
    Case("no_rows", seqlen_q=0),
    Case("no_keys", seqlen_k=0),
    Case("no_keys_sinks", seqlen_k=0, sinks=True),
    Case("no_keys_sinks_lse_grad", seqlen_k=0, sinks=True, lse_grad=True),
    Case("no_batch", batch=0),
    Case("transposed", layout="transposed", causal=True),
    Case("expanded", layout="expanded", heads=4, kv_heads=4),
    Case("sliced", layout="sliced", causal=True),
    Case("last_dim_strided", layout="last_dim_strided"),
    Case("packed_projection", layout="packed", causal=True),
    Case("masked_out", mask="none"),
    Case("masked_out_sinks", mask="none", sinks=True),
)

_PACKED = (
    Case("varlen", lengths=((13, 13), (1, 1), (29, 29))),
    Case("varlen_out", lengths=((13, 21), (0, 7), (30, 7)), spare=3, sinks=True, wanted="", out="whole"),
    Case("varlen_out_part", lengths=((13, 21), (30, 7)), causal=True, head_dim_v=24, wanted="", out="part"),
    Case("varlen_causal", lengths=((13, 21), (30, 7), (17, 17)), causal=True, say_longest=False),
    Case("varlen_empty", lengths=((0, 5), (7, 0), (0, 0), (11, 11)), causal=True, sinks=True),
    Case("varlen_window", lengths=((40, 40), (9, 33)), window=(6, 3), heads=4, kv_heads=2),
    Case("varlen_group_no_keys", lengths=((1, 0),), heads=4, kv_heads=1, causal=True, chunk=9, wanted="v"),
    Case("varlen_intervals_no_rows", lengths=((0, 27),), spare=7, say_longest=False, intervals="rows", alibi="h"),
    Case("bias_of_no_dims", batch=1, seqlen_q=1, seqlen_k=1, heads=1, kv_heads=1, bias="hqk", trimmed=True, sinks=True),
    Case("varlen_chunk", lengths=((40, 40), (9, 33), (21, 7)), chunk=12, causal=True, heads=4, kv_heads=2),
    Case("varlen_chunk_both_ways", lengths=((30, 41), (33, 33)), chunk=17, spare=3),
    Case("varlen_own_bits", lengths=((13, 21), (1, 9), (40, 40)), causal=True, sinks=True, invariant=True),
    Case("varlen_ordered", lengths=((20, 20), (9, 9)), intervals="documents", deterministic=True),
    Case("varlen_documents", lengths=((40, 40), (9, 9), (21, 21)), intervals="documents", kv_heads=1, causal=True),
    Case("varlen_intervals", lengths=((30, 41), (0, 3), (33, 20)), intervals="both", spare=3, sinks=True),
    Case("varlen_no_keys_lse_grad", lengths=((9, 0), (5, 0)), spare=3, sinks=True, lse_grad=True),
    Case("varlen_spare", lengths=((8, 8), (15, 15)), spare=5, causal=True, sinks=True, lse_grad=True),
    Case("varlen_features", lengths=((13, 21), (30, 18)), alibi="bh", softcap=4.0, bias="bhqk", mask="bqk", dropout=0.2,
         sinks=True),
    Case("varlen_bias_large", lengths=((13, 21), (40, 140)), bias="qk", large="-3e5", kv_heads=1),
    Case("varlen_bias_shared", lengths=((13, 21), (21, 13)), bias="hqk", causal=True),
)  # fmt: skip

CASES: tuple[Case, ...] = (*_FEATURES, *_SHAPES, *(replace(c, batch=len(c.lengths)) for c in _PACKED))


@dataclass(frozen=True, eq=False)
class Call:
    """A case's tensors and keywords, ready for ``flashtile.attention`` or ``attention_varlen``."""

    case: Case
    problem: Problem
    tensors: Tensors
    keywords: dict[str, Any]
    leaves: dict[str, Tensor]

    def upcast(self) -> Call:
        """The same call on float64 copies, so that the oracle's gradients are not rounded to the input dtype."""
        return self._with({name: x.detach().double().requires_grad_() for name, x in self.leaves.items()})

    def in_main_memory(self) -> Call:
        """The same call on CPU copies, for the references; ``run`` still uses the keywords on their own device."""
        here = {name: x.detach().cpu() for name, x in vars(self.tensors).items() if x is not None}
        leaves = {name: x.detach().cpu().requires_grad_() for name, x in self.leaves.items()}
        return replace(self, tensors=replace(self.tensors, **here))._with(leaves)

    def _with(self, leaves: dict[str, Tensor]) -> Call:
        names = {"bias": "attn_bias"}
        tensors = replace(self.tensors, **{names.get(name, name): x for name, x in leaves.items()})
        return replace(self, tensors=tensors, leaves=leaves)

    def wanting(self, names: Collection[str]) -> Call:
        """The same call, of whose leaves only these require a gradient."""
        for name, x in self.leaves.items():
            x.requires_grad_(name in names)
        return replace(self, leaves={name: x for name, x in self.leaves.items() if name in names})

    def run(self, backend: str | None, **changes: Any) -> Any:
        """out and lse of the library, dropout drawn from seed 7; ``changes`` are other keywords."""
        t = self.tensors
        torch.manual_seed(7)
        keywords = {"return_lse": True, "backend": backend, **self.keywords, **changes}
        if t.cu_seqlens_q is None:
            return flashtile.attention(t.q, t.k, t.v, **keywords)
        lengths: tuple[Any, ...] = (t.cu_seqlens_q, t.cu_seqlens_k)
        if self.case.say_longest:
            lengths += (self.problem.seqlen_q, self.problem.seqlen_k)
        more = {"out": self._out()} if self.case.out else {}
        return flashtile.attention_varlen(t.q, t.k, t.v, *lengths, **keywords, **more)

    def _out(self) -> Tensor:
        """Where the output goes: a tensor, or a part of a wider one."""
        q, heads = self.tensors.q, self.case.heads
        wide = q.new_full((q.shape[0], heads + (self.case.out == "part"), self.problem.head_dim_v), torch.nan)
        return wide[:, :heads]


def build(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Call:
    """The tensors of a case, random with a fixed seed; on the meta device their layouts alone."""
    make = None if device == "meta" else torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).to(dtype)

    packed = "varlen" in case.name
    longest_q = max((q for q, _ in case.lengths), default=0) if packed else case.seqlen_q
    longest_k = max((k for _, k in case.lengths), default=0) if packed else case.seqlen_k
    rows_q = (sum(q for q, _ in case.lengths) + case.spare,) if packed else (case.batch, case.seqlen_q)
    rows_k = (sum(k for _, k in case.lengths) + case.spare,) if packed else (case.batch, case.seqlen_k)
    dim_v = case.head_dim_v or case.head_dim
    shapes = {
        "q": (*rows_q, case.heads, case.head_dim),
        "k": (*rows_k, case.kv_heads, case.head_dim),
        "v": (*rows_k, case.kv_heads, dim_v),
    }
    data = {name: normal(*shape) for name, shape in shapes.items()}
    data["q"] = data["q"] * case.magnitude
    data = {name: _lay_out(x, case.layout).detach().requires_grad_() for name, x in data.items()}
    leaves = dict(data)
    sizes = {"b": case.batch, "h": case.heads, "q": longest_q, "k": longest_k}
    keywords: dict[str, Any] = dict(
        causal=case.causal, window_size=case.window, softmax_scale=case.scale, softcap=case.softcap,
        dropout_p=case.dropout, deterministic=case.deterministic,
    )  # fmt: skip
    if case.chunk is not None:
        keywords["attention_chunk"] = case.chunk
    if case.invariant:
        keywords["batch_invariant"] = True
    if case.alibi:
        keywords["alibi_slopes"] = torch.rand(*(sizes[x] for x in case.alibi), generator=make, device=device)
    if case.mask is not None:
        shape = [sizes[x] if x in case.mask else 1 for x in "bhqk"]
        drawn = torch.rand(*shape, generator=make, device=device)
        drawn = torch.zeros_like(drawn, dtype=torch.bool) if case.mask == "none" else drawn > 0.4
        keywords["attn_mask"] = _trimmed(drawn) if case.trimmed else drawn
    if case.bias is not None:
        bias_dtype = torch.float32 if case.bias_float else dtype
        bias = normal(*(sizes[x] if x in case.bias else 1 for x in "bhqk"), dtype=bias_dtype)
        if case.large:
            bias = _with_large(bias, case.large, make)
        keywords["attn_bias"] = (_trimmed(bias) if case.trimmed else bias).detach()
        if case.bias_grad:
            leaves["bias"] = keywords["attn_bias"].requires_grad_()
    if case.intervals:
        lengths = (*zip(*case.lengths, strict=True),) if case.lengths else ((case.seqlen_q,), (case.seqlen_k,))
        keywords["block_mask"] = drawn_mask(
            case.intervals, (case.batch, case.heads), *(max(each, default=0) for each in lengths), make, device
        )
    if case.sinks:
        leaves["sinks"] = keywords["sinks"] = normal(case.heads).requires_grad_()
    cu_seqlens: list[Tensor | None] = [None, None]
    if packed:
        for side in (0, 1):
            bounds = torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0)
            cu_seqlens[side] = bounds.to(device, torch.int32)
    rng_state = None
    if case.dropout:
        torch.manual_seed(7)
        rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
    if case.wanted is not None:
        leaves = {name: x for name, x in leaves.items() if x.requires_grad_(name[0] in case.wanted).requires_grad}
    features = (keywords.get(name) for name in ("alibi_slopes", "attn_mask", "attn_bias", "sinks"))
    made = keywords.get("block_mask", Intervals(None, None))
    tensors = Tensors(data["q"], data["k"], data["v"], *features, *cu_seqlens, rng_state, made.row_keys, made.key_rows)
    # Tensors strided in the last dimension are copied before a backend is chosen.
    read = tensors
    if case.layout == "last_dim_strided":
        read = replace(tensors, **{name: data[name].contiguous() for name in "qkv"})
    problem = banded_problem(
        read,
        replace(band_of(case.causal, case.window), chunk=case.chunk),
        softmax_scale=case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout,
        max_seqlen_q=longest_q if packed else None,
        max_seqlen_k=longest_k if packed else None,
        deterministic=case.deterministic,
        batch_invariant=BY_KIND if case.invariant else "",
        mirrored=made.mirrored,
    ).but(grads=Grads(*(name in leaves for name in ("q", "k", "v", "bias", "sinks"))))
    return Call(case, problem, tensors, keywords, leaves)


def _with_large(bias: Tensor, number: str, make: torch.Generator | None) -> Tensor:
    """The bias with a number, if its dtype has it, for a third of the pairs and of the rows."""
    limits = torch.finfo(bias.dtype)
    value = {"min": limits.min, "max": limits.max}.get(number) or max(float(number), limits.min)
    pairs, rows = (torch.rand(shape, generator=make, device=bias.device) for shape in (bias.shape, bias.shape[:-1]))
    return bias.masked_fill((pairs < 0.3) | (rows < 0.3)[..., None], value)


def _trimmed(x: Tensor) -> Tensor:
    """Without the leading dimensions of size 1, of which a call may leave out any."""
    while x.dim() and x.shape[0] == 1:
        x = x[0]
    return x


def gradient_of(call: Call) -> Tensor:
    """A random gradient of out."""
    q = call.tensors.q
    make = None if q.is_meta else torch.Generator(device=q.device).manual_seed(11)
    shape = (*q.shape[:-1], call.problem.head_dim_v)
    drawn = torch.randn(*shape, generator=make, device=q.device).to(call.problem.dtype)
    if call.case.dout == "expanded":
        return drawn[..., :1, :1].expand(shape)
    if call.case.dout == "transposed":
        return drawn.transpose(-1, -2).contiguous().transpose(-1, -2)
    return _lay_out(drawn, call.case.dout).detach()


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[:, :, :1].expand_as(x)
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "last_dim_strided":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "packed":
        wide = torch.stack([x, torch.full_like(x, torch.nan)], dim=2)
        return wide[:, :, 0]
    return x


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a case: out, lse and the gradients by name, detached."""

    values: dict[str, Tensor]


def results(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Results:
    """Differentiates ``(out * dout).sum() + (lse * dlse).sum()`` with respect to every leaf."""
    outputs, seeds = [out], [dout.to(out.dtype)]
    # Where only v requires a gradient, lse has none.
    if dlse is not None and lse.requires_grad:
        outputs.append(lse)
        seeds.append(torch.where(torch.isfinite(lse), dlse.to(lse.dtype), 0.0))
    grads = torch.autograd.grad(outputs, list(call.leaves.values()), seeds)
    values = {"out": out, "lse": lse} | {f"d{name}": g for name, g in zip(call.leaves, grads, strict=True)}
    return Results({name: x.detach() for name, x in values.items()})


def one_sign(call: Call, sign: float) -> Call:
    """The same call with all scores of one sign, far from 0, decreasing along the keys.

    Exponentials differ by factors of 2**60 and more, so a loop that starts at the last key and subtracts anything but
    the row's maximum, or 0, overflows to infinity or underflows to 0.
    """
    q, k = call.leaves["q"], call.leaves["k"]
    with torch.no_grad():
        q.abs_().mul_(sign)
        # A negative score is greater for a key of smaller norm.
        lengths = torch.linspace(5, 16, k.shape[-3], device=k.device)
        k.abs_().mul_((lengths if sign < 0 else lengths.flip(0))[:, None, None])
    return call


def judge(call: Call, backend: str | None, watched: bool = False) -> None:
    """Checks a backend's errors against the rule, or that it refuses with the reasons it declares. Never skips.

    None is the library's choice. For a backend without a backward only the forward is checked. ``watched``: a tool
    checks the device's memory. It is then not filled beforehand, so that the tool can report unwritten elements, and
    the references run on the CPU.
    """
    memory = nullcontext if watched else poisoned_memory
    directions: tuple[Direction, ...] = ("forward", "backward")
    against = {each: dispatch.reasons(backend, call.problem, each) if backend else [] for each in directions}
    if not call.leaves:
        against["backward"] = []
    if not any(against.values()):
        with memory():
            (_judge_numbers if call.leaves else _judge_forward)(call, backend, watched)
        return
    with pytest.raises((UnsupportedError, InvalidInputError)) as caught:
        call.run(backend)
    assert any(all(reason in str(caught.value) for reason in why) for why in against.values() if why)
    if not against["forward"]:
        with memory(), torch.no_grad():
            _judge_forward(call, backend, watched)


def _judge_forward(call: Call, backend: str | None, watched: bool) -> None:
    got = dict(zip(("out", "lse"), call.run(backend), strict=True))
    if watched:
        call, got = call.in_main_memory(), {name: x.cpu() for name, x in got.items()}
    assert_forward_right(call, **got)


def assert_forward_right(call: Call, out: Tensor, lse: Tensor) -> None:
    """The error rule for the results of a forward."""
    upcast = call.upcast()

    def by_definition(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
        return dict(zip(("out", "lse"), reference.attention(call.problem, call.tensors, dtype), strict=True))

    plain = by_definition(call, call.problem.dtype)
    assert_close({"out": out, "lse": lse}, lambda: by_definition(upcast, torch.float64), plain, call.problem.dtype)


def _judge_numbers(call: Call, backend: str | None, watched: bool) -> None:
    """Runs the library and both references, and asserts the rule for out, lse and every gradient."""
    dout = gradient_of(call)
    out, lse = call.run(backend)
    if watched:
        # The tool does not see TMA stores, and the backward reads out: write the same bits again.
        out.data.copy_(out.data.cpu())
    make = torch.Generator(device=lse.device).manual_seed(12)
    dlse = torch.randn(lse.shape, generator=make, device=lse.device) if call.case.lse_grad else None
    got = results(call, out, lse, dout, dlse)
    if watched:
        got = Results({name: x.cpu() for name, x in got.values.items()})
        call, dout, dlse = call.in_main_memory(), dout.cpu(), None if dlse is None else dlse.cpu()
    assert out.dtype == call.problem.dtype and lse.dtype == call.problem.lse_dtype
    assert_right(call, got.values, dout, dlse)


def assert_right(call: Call, got: Mapping[str, Tensor], dout: Tensor, dlse: Tensor | None) -> None:
    """The error rule for some results of a call, by their names in ``Results``."""
    yardstick(call, dout, dlse).check(got)


def yardstick(call: Call, dout: Tensor, dlse: Tensor | None) -> Yardstick:
    """What the results of a call are judged by."""
    upcast = call.upcast()

    def by_definition(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
        return results(call, *reference.attention(call.problem, call.tensors, dtype), dout, dlse).values

    plain = by_definition(call, call.problem.dtype)
    return Yardstick(lambda: by_definition(upcast, torch.float64), plain, call.problem.dtype)
