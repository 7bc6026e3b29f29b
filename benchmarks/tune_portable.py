"""Sweeps tiles of the portable kernels on this machine's GPU: ``python -m benchmarks.tune_portable --out FILE``.

Every candidate is compiled first, in parallel, into Triton's disk cache; its numbers are checked against the float64
reference on a small problem with NaN-filled outputs; then a cell's candidates are timed in interleaved rounds beside
the flash kernel of PyTorch's SDPA. Prints a table and appends a JSON line a timing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import Call, measure
from flashtile import reference
from flashtile.backends.base import Gradients
from flashtile.backends.portable.tiles import Config
from flashtile.masks import Band
from flashtile.problem import Problem, Tensors

if TYPE_CHECKING:
    from flashtile.backends.portable.launch import Launch

TOKENS, HIDDEN = 16384, 2048
GRADIENTS = {"forward": ("out",), "dkdv": ("dk", "dv")}  # what a kernel writes, if not what it is called
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """What is timed: one kernel on one shape."""

    kernel: str
    head_dim: int
    causal: bool
    seqlen: int
    dtype: str = "bf16"


@dataclass(frozen=True)
class Operands:
    """Tensors of one problem and everything a kernel of either direction takes or writes."""

    problem: Problem
    tensors: Tensors
    out: Tensor
    lse: Tensor
    dout: Tensor
    rows: tuple[Tensor, Tensor]
    grads: Gradients


def operands(cell: Cell, batch: int, heads: int, seqlen: int, device: str) -> Operands:
    """Random inputs, NaN-filled results, and the forward's real results where a backward needs them."""
    from flashtile.backends.portable import gradients
    from flashtile.backends.portable.forward import run

    def random() -> Tensor:
        return torch.randn(batch, seqlen, heads, cell.head_dim, device=device).to(DTYPES[cell.dtype])

    tensors = Tensors(random(), random(), random())
    problem = Problem.build(tensors, Band(None, 0) if cell.causal else Band())
    out = torch.full_like(tensors.q, torch.nan)
    lse = torch.full((batch, heads, seqlen), torch.nan, device=device)
    dout, rows = random(), gradients.row_workspace(lse)
    if cell.kernel != "forward":
        out, lse = run(problem, tensors)
        gradients.prepare_launch(problem, out, lse, dout, None, *rows).run()
    dq, dk, dv = (torch.full_like(out, torch.nan) for _ in range(3))
    return Operands(problem, tensors, out, lse, dout, rows, Gradients(dq, dk, dv))


def launch_of(cell: Cell, x: Operands, config: Config) -> Launch:
    """The kernel of a cell with a candidate's tiles."""
    from flashtile.backends.portable import forward, gradients

    if cell.kernel == "forward":
        return forward.forward_launch(x.problem, x.tensors, x.out, x.lse, config)
    common, grads = (x.problem, x.tensors, x.dout, x.rows), x.grads
    if cell.kernel == "dq":
        return gradients.dq_launch(*common, grads.dq, config)
    dk, dv = (grads.dk if "dk" in cell.kernel else None), (grads.dv if "dv" in cell.kernel else None)
    return gradients.dkdv_launch(*common, dk, dv, config)


def shape_of(cell: Cell) -> tuple[int, int, int]:
    """Batch, heads, seqlen of a benchmark cell."""
    return max(1, TOKENS // cell.seqlen), HIDDEN // cell.head_dim, cell.seqlen


def compile_candidate(cell: Cell, config: Config) -> tuple[Cell, Config, str | None, float]:
    """Builds a candidate into the disk cache, with arguments that specialise as the timed ones do."""
    start_s = time.perf_counter()
    try:
        device = "cuda"
        batch, heads, seqlen = shape_of(cell)
        shape = (batch, seqlen, heads, cell.head_dim)
        q, k, v, out, dout, dq, dk, dv = (torch.empty(shape, dtype=DTYPES[cell.dtype], device=device) for _ in range(8))
        lse, delta, origin = (torch.empty(batch, heads, seqlen, device=device) for _ in range(3))
        tensors = Tensors(q, k, v)
        problem = Problem.build(tensors, Band(None, 0) if cell.causal else Band())
        x = Operands(problem, tensors, out, lse, dout, (delta, origin), Gradients(dq, dk, dv))
        launch = launch_of(cell, x, config)
        launch.kernel.warmup(**launch.arguments, **launch.options, grid=(1,))
    except Exception as error:
        return cell, config, f"{type(error).__name__}: {str(error)[:200]}", time.perf_counter() - start_s
    return cell, config, None, time.perf_counter() - start_s


@cache
def answers(head_dim: int, causal: bool, dtype: str, device: str) -> dict[str, tuple[Tensor, float]]:
    """Of the small problem that candidates are checked on: the float64 result and the bar of out, dq, dk and dv.

    The bar is twice the error of the same computation in the input dtype by plain PyTorch, plus a floor.
    """
    x = small(Cell("forward", head_dim, causal, 0, dtype), device)
    leaves = [t.detach().double().requires_grad_() for t in (x.tensors.q, x.tensors.k, x.tensors.v)]
    exact = [reference.attention(x.problem, Tensors(*leaves))[0]]
    exact += torch.autograd.grad(exact[0], leaves, x.dout.double())
    low = [t.detach().clone().requires_grad_() for t in (x.tensors.q, x.tensors.k, x.tensors.v)]
    plain = [reference.attention(x.problem, Tensors(*low), x.problem.dtype)[0]]
    plain += torch.autograd.grad(plain[0], low, x.dout)
    errors = [(p.double() - e).abs().max().item() for p, e in zip(plain, exact, strict=True)]
    bars = [(e.detach(), 2 * error + 1e-5) for e, error in zip(exact, errors, strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), bars, strict=True))


def small(cell: Cell, device: str) -> Operands:
    """A small problem with ragged ends, the same every time."""
    torch.manual_seed(1)
    return operands(cell, 2, 2, 333 if device == "cuda" else 37, device)


def wrong(cell: Cell, config: Config, device: str) -> str | None:
    """What is wrong with a candidate's numbers on the small problem, or None."""
    x = small(cell, device)
    launch_of(cell, x, config).run()
    have = {"out": x.out, "dq": x.grads.dq, "dk": x.grads.dk, "dv": x.grads.dv}
    for name in GRADIENTS.get(cell.kernel, (cell.kernel,)):
        exact, bar = answers(cell.head_dim, cell.causal, cell.dtype, device)[name]
        error = (have[name].double() - exact).abs().max().item()
        if not error <= bar:
            return f"wrong: {name} has error {error:.1e} over {bar:.1e}"
    return None


def flops(cell: Cell) -> float:
    """Of the products the kernel makes: the forward and dv 2, dkdv 4, dk and dq 3."""
    products = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}[cell.kernel]
    return 2.0 * products * TOKENS * HIDDEN * cell.seqlen * (0.5 if cell.causal else 1.0)


def flash_attention_2(cell: Cell, x: Operands) -> Call:
    """SDPA's flash kernel: its forward, or its whole backward."""
    q, k, v = (t.transpose(1, 2).detach() for t in (x.tensors.q, x.tensors.k, x.tensors.v))
    if cell.kernel == "forward":

        def forward() -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

        return forward
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)
    dout = x.dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def weak_candidates(kernel: str, dim: int, causal: bool) -> list[Config]:
    """What may mend the cells that are slow, and what the table holds unmeasured: the table's choice first.

    Chosen by builds for sm_90a: next to nothing is spilled in the loop that most blocks take, and WGMMA run without a
    wait behind each. Two of dkdv at d 256 are there for comparison: 64x64x8x2 T spills, and TO waits.
    """
    sizes = {
        ("forward", 64): "64x64x4x3, 64x64x4x3 A, 64x128x4x2 TA",
        ("forward", 128): "64x64x4x3 T, 64x64x4x3 TA",
        ("forward", 256): "128x64x8x2 T, 128x64x8x2 TA, 64x32x4x2 T, 64x64x4x1 T, 64x64x4x1 TO",
        ("dkdv", 64): "64x64x4x2 TO, 64x64x4x2 T, 64x64x4x3, 64x64x4x2 O" if causal else
                      "128x64x4x2 T, 64x64x4x2 TO, 64x128x8x2 TO",
        ("dkdv", 128): "64x64x4x2 TO, 64x64x4x2 T, 32x64x4x2 TO, 64x128x8x2 TO",
        ("dk", 128): "64x64x4x2 TO, 64x128x8x2 TO",
        ("dv", 128): "64x64x4x2 T, 64x128x8x2 TO",
        ("dq", 64): "64x64x4x3 168, 64x64x4x3, 64x64x4x3 T 168, 64x64x4x3 A 168",
        ("dq", 128): "128x64x8x3, 128x64x8x3 A",
        ("dkdv", 256): "64x64x8x2 T, 64x64x8x2 TO, 32x64x8x3 TO, 32x32x4x2 T",
        ("dk", 256): "32x128x8x2 TO, 32x128x8x2 T, 32x128x8x2, 32x128x8x2 O, 64x64x8x2 T",
        ("dv", 256): "64x128x8x2 TO, 64x128x8x2 T, 32x128x8x3 T, 32x64x4x2 T, 64x64x8x2 T",
        ("dq", 256): "128x32x8x2, 128x32x8x2 T, 128x32x8x2 A, 128x64x8x1 TO, 64x32x4x1 TO",
    }.get((kernel, dim), "")  # fmt: skip
    weak = causal or (kernel, dim) == ("dkdv", 64) or (dim == 256 and kernel != "forward")
    return [parse(text) for text in sizes.split(", ")] if sizes and weak else []


def parse(text: str) -> Config:
    """A candidate from "rows x keys x warps x stages", then flags and a limit of registers.

    T stands for descriptors, O for one loop, A for one loop that masks all blocks.
    """
    sizes, *rest = text.split()
    flags, limit = "".join(word for word in rest if word.isalpha()), next((int(w) for w in rest if w.isdigit()), None)
    block_m, block_n, num_warps, num_stages = map(int, sizes.split("x"))
    one_loop, mask_all = "O" in flags or "A" in flags, "A" in flags
    return Config(block_m, block_n, num_warps, num_stages, "T" in flags, one_loop, mask_all, limit)


def candidates(kernel: str, dim: int) -> list[Config]:
    """The tiles worth timing: those of the table and their neighbours, with and without descriptors."""
    table = {
        ("forward", 64): [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3),
                          (64, 128, 4, 2), (128, 128, 4, 2), (128, 64, 8, 4)],
        ("forward", 128): [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2),
                           (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3)],
        ("forward", 256): [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2),
                           (128, 64, 8, 1), (64, 128, 8, 1)],
        ("dkdv", 64): [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2),
                       (32, 128, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)],
        ("dkdv", 128): [(64, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2),
                        (64, 64, 8, 2), (64, 128, 8, 1), (64, 64, 8, 3)],
        ("dkdv", 256): [(32, 64, 8, 2), (64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 8, 1), (32, 32, 4, 2), (16, 64, 8, 2)],
        ("dk", 256): [(32, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2)],
        ("dv", 256): [(64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2)],
        ("dq", 64): [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2),
                     (64, 128, 4, 2), (128, 64, 8, 2), (128, 32, 4, 3)],
        ("dq", 128): [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 1), (128, 32, 8, 3), (64, 64, 4, 3),
                      (128, 64, 8, 3), (64, 32, 4, 3)],
        ("dq", 256): [(64, 64, 8, 1), (64, 32, 4, 2), (64, 64, 4, 1), (128, 32, 8, 1), (128, 32, 8, 2), (64, 64, 8, 2)],
    }.get((kernel, dim), [])  # fmt: skip
    return [Config(*sizes, tma=tma) for sizes in table for tma in (False, True)]


def compile_all(work: list[tuple[Cell, Config]], workers: int) -> dict[tuple[Cell, Config], str | None]:
    """Compiles in parallel; says what failed."""
    verdicts: dict[tuple[Cell, Config], str | None] = {}
    context = multiprocessing.get_context("spawn")
    start_s = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(compile_candidate, *item) for item in work]):
            cell, config, failure, _ = future.result()
            verdicts[cell, config] = failure
    print(f"compiled {len(work)} kernels in {time.perf_counter() - start_s:.0f} s with {workers} processes", flush=True)
    return verdicts


def sweep(cell: Cell, configs: list[Config], rounds: int, out: Path) -> float:
    """Times the candidates of one cell beside the peer, prints them best first, appends the rows; returns the best."""
    x = operands(cell, *shape_of(cell), "cuda")
    calls: dict[str, Call] = {"fa2": flash_attention_2(cell, x)}
    by_name = {}
    for config in configs:
        try:
            launch = launch_of(cell, x, config)
            launch.run()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {config}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        calls[str(config)] = launch.run
        by_name[str(config)] = config
    timings = measure(calls, torch.device("cuda"), rounds=rounds, burst_ms=5.0)
    tera = {name: flops(cell) / (t.median_ms * 1e-3) / 1e12 for name, t in timings.items()}
    mask = "causal" if cell.causal else "full"
    peer = timings["fa2"].median_ms
    print(f"{cell.kernel} d{cell.head_dim} {mask} {cell.seqlen}: fa2 {peer:.3f} ms", flush=True)
    for name in sorted(by_name, key=lambda n: timings[n].median_ms):
        ms = timings[name].median_ms
        print(f"  {ms:7.3f} ms {tera[name]:6.0f} TFLOPS  fa2/it {peer / ms:5.2f}  {name}", flush=True)
    with out.open("a") as file:
        for name, timing in timings.items():
            tiles = asdict(by_name[name]) if name in by_name else None
            row = {"cell": asdict(cell), "config": tiles, "median_ms": timing.median_ms, "spread": timing.spread}
            file.write(json.dumps(row) + "\n")
    return min((timings[name].median_ms for name in by_name), default=float("nan"))


def compare_apart(best: dict[Cell, float]) -> None:
    """Prints, where both were timed, what one kernel for dk and dv takes and what two of them take."""
    for cell, together in best.items():
        apart = [best.get(replace(cell, kernel=name)) for name in ("dk", "dv")]
        if cell.kernel == "dkdv" and None not in apart:
            mask = "causal" if cell.causal else "full"
            total = sum(ms for ms in apart if ms is not None)
            print(f"dk and dv d{cell.head_dim} {mask} {cell.seqlen}: together {together:.3f}, apart {total:.3f} ms")


def main() -> None:
    """Compiles, checks, times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=["all", "weak"], default="all", help="which candidates")
    parser.add_argument("--kernels", nargs="+", default=["forward", "dkdv", "dk", "dv", "dq"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--limit-s", type=float, default=480.0, help="no cell is started after this many seconds")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "tune_portable.jsonl")
    args = parser.parse_args()
    start_s = time.perf_counter()
    kinds = [
        Cell(kernel, dim, mask == "causal", args.seqlens[0])
        for kernel, dim, mask in itertools.product(args.kernels, args.head_dims, args.masks)
    ]
    work = [
        (cell, config)
        for cell in kinds
        for config in (
            candidates(cell.kernel, cell.head_dim)
            if args.suite == "all"
            else weak_candidates(cell.kernel, cell.head_dim, cell.causal)
        )
    ]
    kinds = [cell for cell in kinds if any(cell == busy for busy, _ in work)]
    failures = compile_all(work, args.workers)
    checked_s = time.perf_counter()
    good: dict[Cell, list[Config]] = {}
    for cell, config in work:
        failure = failures[cell, config]
        try:
            failure = failure or wrong(cell, config, "cuda")
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}"
        if failure:
            print(f"out: {cell.kernel} d{cell.head_dim} causal={cell.causal} {config}: {failure}", flush=True)
        else:
            good.setdefault(cell, []).append(config)
    print(f"checked in {time.perf_counter() - checked_s:.0f} s", flush=True)
    best: dict[Cell, float] = {}
    for seqlen, kind in itertools.product(reversed(args.seqlens), kinds):
        if time.perf_counter() - start_s > args.limit_s:
            print("out of time", flush=True)
            break
        cell = Cell(kind.kernel, kind.head_dim, kind.causal, seqlen)
        best[cell] = sweep(cell, good.get(kind, []), args.rounds, args.out)
    compare_apart(best)


if __name__ == "__main__":
    main()
