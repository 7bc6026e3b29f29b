"""Cases of the Hopper forward and what their numbers must be, on this machine's GPU: see ``benchmarks.tune_hopper``."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashtile import reference
from flashtile.backends.hopper import tiles
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. ``lengths`` holds (seqlen_q, seqlen_k) of each sequence; dense calls repeat one pair."""

    head_dim: int
    head_dim_v: int | None = None
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 2)
    band: Band = field(default_factory=Band)
    varlen: bool = False
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    layout: str = "contiguous"
    outliers: bool = False


def _tensor(case: Case, side: int, dim: int, seed: int) -> Tensor:
    """Query (side 0), key or value (side 1), in the case's layout; NaN behind the last packed sequence."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads = case.heads[side]
    lengths = [pair[side] for pair in case.lengths]
    shape = (sum(lengths) + 37, heads, dim) if case.varlen else (len(lengths), lengths[0], heads, dim)
    if case.layout == "heads_first" and not case.varlen:
        x = (
            torch.randn(shape[0], heads, shape[1], dim, device=DEVICE, generator=generator)
            .to(case.dtype)
            .transpose(1, 2)
        )
    elif case.layout == "padded":
        x = torch.randn(*shape[:-1], dim + 24, device=DEVICE, generator=generator).to(case.dtype)[..., 8 : 8 + dim]
    elif case.layout == "expanded" and side == 1:
        x = torch.randn(*shape[:-2], 1, dim, device=DEVICE, generator=generator).to(case.dtype).expand(shape)
    else:
        x = torch.randn(shape, device=DEVICE, generator=generator).to(case.dtype)
    if case.outliers:
        far = torch.rand(shape, device=DEVICE, generator=generator) < 1e-3
        x = (x.float() + far * 10 * torch.randn(shape, device=DEVICE, generator=generator)).to(case.dtype)
    if case.varlen and case.layout != "expanded":
        x[sum(lengths) :] = math.nan
    return x


def build(case: Case, seed: int = 0) -> tuple[Problem, Tensors]:
    """The record and the tensors of a case."""
    sinks = torch.randn(case.heads[0], device=DEVICE).to(case.dtype) if case.sinks else None
    bounds: list[Tensor | None] = [None, None]
    if case.varlen:
        for side in (0, 1):
            ends = itertools.accumulate((pair[side] for pair in case.lengths), initial=0)
            bounds[side] = torch.tensor(list(ends), dtype=torch.int32, device=DEVICE)
    t = Tensors(
        _tensor(case, 0, case.head_dim, seed),
        _tensor(case, 1, case.head_dim, seed + 1),
        _tensor(case, 1, case.head_dim_v or case.head_dim, seed + 2),
        sinks=sinks,
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
    )
    longest = {f"max_seqlen_{s}": max(p[i] for p in case.lengths) if case.varlen else None for i, s in enumerate("qk")}
    return Problem.build(t, case.band, softmax_scale=case.softmax_scale, softcap=case.softcap, **longest), t  # type: ignore[arg-type]


def wrong(case: Case, config: tiles.Config | None = None, seed: int = 0) -> str | None:
    """What is wrong with a case's numbers, or None: at most twice plain PyTorch's error in the dtype, and a floor."""
    from flashtile.backends.hopper import launch

    problem, tensors = build(case, seed)
    out, lse = launch.forward(problem, tensors, config)
    torch.cuda.synchronize()
    exact, exact_lse = reference.attention(problem, tensors)
    plain, _ = reference.attention(problem, tensors, case.dtype)
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    bar = 2 * (plain.double() - exact).abs().max().item() + 1e-4 if out.numel() else 1.0
    same_empty = torch.equal(lse == -math.inf, exact_lse == -math.inf)
    finite = exact_lse != -math.inf
    lse_error = (lse.double() - exact_lse)[finite].abs().max().item() if finite.any() else 0.0
    if error <= bar and same_empty and lse_error <= 2e-3:
        return None
    return f"error {error:.1e} (bar {bar:.1e}), lse error {lse_error:.1e}, empty rows agree: {same_empty}"


def smoke_cases(dim: int, dim_v: int | None = None) -> Iterator[Case]:
    """From the least that can run to many tiles a program."""
    of = functools.partial(Case, head_dim=dim, head_dim_v=dim_v)
    for n, band in itertools.product((64, 128, 256, 1000), (Band(), Band(None, 0))):
        yield of(lengths=((n, n),), band=band)
    for band in (Band(), Band(None, 0)):
        yield of(lengths=((777, 1234),) * 9, heads=(16, 4), band=band)
        yield of(lengths=((1000, 300),) * 5, heads=(8, 8), band=band)


# Head dims that share tiles with the widest of them, but for 72 and 96 in the forward.
NARROW = {
    64: (8, 40, 64),
    96: (72, 88, 96),
    128: (72, 96, 128),
    160: (136, 144, 160),
    192: (168, 176, 192),
    256: (136, 192, 256),
}


def check_cases(dim: int, count: int, shards: Iterable[int] = range(4), dim_v: int | None = None) -> Iterator[Case]:
    """Every feature on its own and in the mixtures that share a build, over awkward lengths; a shard has its builds."""
    pick = random.Random(dim)
    lengths = (1, 2, 17, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 383, 511, 640, 777, 1025)
    bands = (
        Band(),
        Band(None, 0),
        Band(100, 0),
        Band(70, 30),
        Band(0, 0),
        Band(None, 20),
        Band(513, None),
        Band(-3, 9),
    )
    for index in range(count):
        band = bands[index % len(bands)]
        varlen = index // len(bands) % 2 == 1
        extra = index // (2 * len(bands)) % 4
        batch = pick.choice((1, 2, 3, 5))
        pair = (pick.choice(lengths), pick.choice(lengths))
        many = tuple((pick.choice((0, *lengths)), pick.choice((0, *lengths))) for _ in range(batch))
        some = all(sum(pair[side] for pair in many) for side in (0, 1))
        case = Case(
            head_dim=pick.choice(NARROW[dim]) if extra in (0, 1) else dim,
            head_dim_v=pick.choice(NARROW[dim_v]) if dim_v and extra in (0, 1) else dim_v,
            lengths=many if varlen and some else (pair,) * batch,
            heads=pick.choice(((2, 2), (4, 2), (6, 1), (3, 3))),
            band=band,
            varlen=varlen,
            dtype=torch.float16 if extra == 1 else torch.bfloat16,
            softmax_scale=(None, 0.3, -0.2)[pick.randrange(3)] if extra == 3 else None,
            softcap=15.0 if extra == 2 else 0.0,
            sinks=extra == 1,
            layout=pick.choice(("contiguous", "contiguous", "heads_first", "padded", "expanded")),
            outliers=extra == 0 and index % 3 == 0,
        )
        if extra in shards:
            yield case


def run_checks(cases: Iterator[Case], config: tiles.Config | None, limit_s: float) -> bool:
    """Checks until the cases or the time run out; prints failures."""
    # NaN in whatever the kernel does not write.
    allocate = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda *a, **k: allocate(*a, **k).fill_(math.nan)  # type: ignore[assignment,method-assign]
    return all_right(cases, lambda case, seed: wrong(case, config, seed), limit_s)


def all_right(cases: Iterator[Any], wrong: Callable[[Any, int], str | None], limit_s: float) -> bool:
    """Whether no case is wrong, as far as the time goes; prints what is.

    Args:
        cases: Cases to check.
        wrong: What is wrong with a case, from it and how many were right before; nothing if it is right.
        limit_s: After so many seconds no case starts.
    """
    start_s = time.perf_counter()
    good = bad = 0
    for case in cases:
        if time.perf_counter() - start_s > limit_s:
            print("  out of time", flush=True)
            break
        try:
            verdict = wrong(case, good)
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error)[:300]}"
        if verdict:
            bad += 1
            print(f"  WRONG {case}: {verdict}", flush=True)
            if "CUDA" in verdict:
                break
        else:
            good += 1
    print(f"  {good} right, {bad} wrong, {time.perf_counter() - start_s:.0f} s", flush=True)
    return bad == 0


def check_bits(dim: int, dim_v: int, repetitions: int) -> None:
    """One bit pattern over repetitions, and for a sequence alone, in a batch, and packed."""
    from flashtile.backends.hopper import launch

    for band in (Band(), Band(None, 0)):
        case = Case(head_dim=dim, head_dim_v=dim_v, lengths=((1500, 1500),) * 7, heads=(8, 2), band=band)
        problem, t = build(case)
        first = launch.forward(problem, t)
        same = True
        for _ in range(repetitions):
            again = launch.forward(problem, t)
            same = same and torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        alone = Tensors(t.q[3:4], t.k[3:4], t.v[3:4])
        one = launch.forward(Problem.build(alone, band), alone)
        in_batch = torch.equal(one[0], first[0][3:4]) and torch.equal(one[1], first[1][3:4])
        ends = torch.arange(0, 8 * 1500, 1500, dtype=torch.int32, device=DEVICE)
        q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))
        packed = Tensors(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        out, _ = launch.forward(Problem.build(packed, band, max_seqlen_q=1500, max_seqlen_k=1500), packed)
        print(f"  {band}: repetitions {same}, alone {in_batch}, packed {torch.equal(out, first[0].flatten(0, 1))}")


def check_variants(dim: int, dim_v: int, variants: Mapping[str, tiles.Config]) -> bool:
    """Every configuration with the same widths and blocks gives the same bits: so the choice may depend on lengths."""
    from flashtile.backends.hopper import launch

    alike = True
    for band, lengths, varlen in itertools.product(
        (Band(), Band(None, 0)), (((512, 512),) * 40, ((1500, 1500),) * 3, ((300, 777),) * 5), (False, True)
    ):
        problem, t = build(
            Case(head_dim=dim, head_dim_v=dim_v, lengths=lengths, heads=(8, 4), band=band, varlen=varlen)
        )
        firsts: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        for name, config in variants.items():
            # Packed, those alone that are chosen or differ from it by the counter.
            fixed = replace(config, dynamic=False, tile_stages=tiles.THREE_GROUPS_64.tile_stages)
            if varlen and fixed != tiles.choose(problem):
                continue
            one = launch.forward(problem, t, config)
            first = firsts.setdefault((config.block_d, config.block_dv, config.block_n), one)
            if not all(torch.equal(x, y) for x, y in zip(first, one, strict=True)):
                alike = False
                print(f"  OTHER BITS: {name}, {band}, {lengths[0]}, varlen {varlen}", flush=True)
    print(f"  {len(variants)} configurations, bits alike: {alike}", flush=True)
    return alike


def check_poison(dim: int, dim_v: int) -> None:
    """A sequence of NaN between two others changes neither."""
    from flashtile.backends.hopper import launch

    case = Case(
        head_dim=dim, head_dim_v=dim_v, lengths=((200, 333), (150, 150), (77, 500)), varlen=True, band=Band(None, 0)
    )
    problem, t = build(case)
    clean, _ = launch.forward(problem, t)
    for x in (t.q, t.k, t.v):
        start, length = (200, 150) if x is t.q else (333, 150)
        x[start : start + length] = math.nan
    out, _ = launch.forward(problem, t)
    kept = torch.equal(out[:200], clean[:200]) and torch.equal(out[350:427], clean[350:427])
    print(f"  NaN stays in its sequence: {kept}; and fills it: {bool(out[200:350].isnan().all())}")


def check_leaks(dim: int, dim_v: int) -> bool:
    """A NaN or an infinity of one key's value reaches the rows that keep the key, and no other row of its block."""
    from flashtile.backends.hopper import launch

    good = True
    for band, junk in itertools.product((Band(None, 0), Band(60, 30)), (math.nan, math.inf)):
        problem, t = build(Case(head_dim=dim, head_dim_v=dim_v, lengths=((300, 300),) * 2, heads=(4, 2), band=band))
        clean, clean_lse = launch.forward(problem, t)
        t.v[1, 200, 1, 5] = junk
        out, lse = launch.forward(problem, t)
        exact, _ = reference.attention(problem, t)
        same_rows = torch.equal(out.isfinite(), exact.isfinite())
        kept = exact.isfinite()
        same_numbers = torch.allclose(out[kept], clean[kept], atol=2e-2, rtol=2e-2)
        same_lse = torch.allclose(lse, clean_lse, atol=1e-3)
        if not (same_rows and same_numbers and same_lse):
            good = False
            print(f"  LEAK {band}, {junk}: rows {same_rows}, numbers {same_numbers}, lse {same_lse}", flush=True)
    print(f"  values of masked keys stay away: {good}", flush=True)
    return good
