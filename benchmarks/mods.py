"""``python -m benchmarks.mods``: attention with functions of the user's, beside FlexAttention compiled.

TFLOPS of kept pairs. What learns (T5's table, Graphormer's) has its gradient in the backward. ``flashtile-lists`` and
``flashtile-portable`` have the mask's blocks listed, as FlexAttention has, ``flashtile-intervals`` is the same mask
without a function, where there is such a form. With ``--first`` the seconds to the first result of a new function, in a
process of its own: with an empty cache of compiled kernels, and again with what that left.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashtile
from benchmarks import results
from benchmarks.cases import select
from benchmarks.checks import poison
from benchmarks.session import NotTimedError, Session, attempt, new_parser, run_command
from benchmarks.table import to_text
from benchmarks.timing import measure, wait
from flashtile import masks
from flashtile.mods import library

MODS = (
    "full",
    "causal",
    "window",
    "documents",
    "prefix",
    "softcap",
    "alibi",
    "neighbourhood",
    "tree",
    "t5",
    "graphormer",
)
PROVIDERS = ("flashtile", "flashtile-lists", "flashtile-portable", "flashtile-intervals", "flex")
# Those that the report divides by FlexAttention's.
_RACED = ("flashtile", "flashtile-lists")
# For normal numbers attention in bfloat16 errs by 0.003, its gradients by 0.006; a table's have larger sums.
LIMIT = 0.02
DOCUMENT, WINDOW, PREFIX, SEGMENT, BUCKETS, DISTANCES = 1000, 1024, 512, 512, 32, 64


@dataclass(frozen=True)
class Cell:
    """One cell; ``mod`` is of MODS."""

    mod: str
    direction: str
    dtype: str
    batch: int
    seqlen: int
    heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """``--cells`` matches against it."""
        return f"{self.direction}-d{self.head_dim}-{self.mod}-s{self.seqlen}"


@dataclass(frozen=True, eq=False)
class Mod:
    """What a cell applies: a score mod of what learns, a mask mod, that mask as intervals, and what learns.

    ``table`` has the heads along dimension ``head_axis``.
    """

    score: Callable[[Tensor | None], library.ScoreMod] | None = None
    mask: library.MaskMod | None = None
    intervals: masks.Intervals | None = None
    table: Tensor | None = None
    head_axis: int = 0


def mod_of(cell: Cell, device: torch.device) -> Mod:
    """The functions of a cell."""
    n, heads = cell.seqlen, cell.heads
    ids = (torch.arange(n, device=device) // DOCUMENT).int()
    prefix = torch.full((cell.batch,), min(PREFIX, n // 2), dtype=torch.int32, device=device)
    draw = torch.Generator(device=device).manual_seed(1)
    normal = functools.partial(torch.randn, generator=draw, device=device)
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=device))
    width = 1 << (n.bit_length() // 2)
    segments = [segment for segment in range(n) if segment % SEGMENT == 0]
    parents = [((row // SEGMENT - 1) // 2 * SEGMENT + SEGMENT - 1 if row else -1) if row in set(segments) else row - 1
               for row in (range(n) if cell.mod == "tree" else ())]  # fmt: skip
    causal, table = library.causal, None
    if cell.mod in ("t5", "graphormer"):
        table = normal((BUCKETS, heads) if cell.mod == "t5" else (heads, DISTANCES)).to(getattr(torch, cell.dtype))
    distances = None
    if cell.mod == "graphormer":
        distances = torch.randint(0, DISTANCES, (cell.batch, n, n), generator=draw, device=device, dtype=torch.int32)
    made: dict[str, Callable[[], Mod]] = {
        "full": Mod,
        "causal": lambda: Mod(mask=causal),
        "window": lambda: Mod(mask=library.window(WINDOW)),
        "documents": lambda: Mod(mask=library.and_masks(causal, library.documents(ids)),
                                 intervals=masks.documents(ids)),
        "prefix": lambda: Mod(mask=library.prefix_lm(prefix), intervals=masks.prefix(prefix, n)),
        "softcap": lambda: Mod(lambda _: library.softcap(20.0), causal),
        "alibi": lambda: Mod(lambda _: library.alibi(slopes), causal),
        "neighbourhood": lambda: Mod(mask=library.neighbourhood_2d(width, 6)),
        "tree": lambda: Mod(mask=library.tree(parents, device)),
        "t5": lambda: Mod(lambda x: library.t5(x), table=table, head_axis=1),  # type: ignore[arg-type]
        "graphormer": lambda: Mod(lambda x: library.graphormer(x, distances), table=table),  # type: ignore[arg-type]
    }  # fmt: skip
    return made[cell.mod]()


def kept_pairs(cell: Cell, mod: Mod, device: torch.device) -> int:
    """(query, key) pairs of a head that the mask keeps, counted."""
    if mod.mask is None:
        return cell.batch * cell.seqlen**2
    j, kept = torch.arange(cell.seqlen, device=device), 0
    for b, i in itertools.product(range(cell.batch), j.split(1024)):
        kept += int(mod.mask(torch.tensor(b, device=device), 0, i[:, None], j).sum())
    return kept


def groups_of(cell: Cell) -> tuple[int | None, None]:
    """Sequences and heads that a mask of blocks tells apart."""
    return (cell.batch if cell.mod == "prefix" else None), None


def ours(cell: Cell, mod: Mod, provider: str, device: torch.device) -> Callable[..., Tensor]:
    """This library's attention of q, k, v and a table, heads first."""
    backend = "portable" if provider.endswith("portable") else None
    keywords: dict[str, Any] = {"mask_mod": mod.mask, "backend": backend}
    if provider.endswith("intervals"):
        keywords = {"block_mask": mod.intervals, "causal": cell.mod == "documents"}
    if provider.endswith(("lists", "portable")) and mod.mask is not None:
        lists = flashtile.create_block_mask(mod.mask, *groups_of(cell), cell.seqlen, cell.seqlen, device)
        keywords = {"block_mask": lists, "backend": backend}

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        score = None if mod.score is None else mod.score(table)
        given = (x.transpose(1, 2) for x in (q, k, v))
        return flashtile.attention(*given, score_mod=score, **keywords).transpose(1, 2)  # type: ignore[union-attr]

    return attend


def flex(cell: Cell, mod: Mod, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention, compiled on a GPU, with a mask of blocks that is made once."""
    torch.compiler.reset()
    n, block_mask = cell.seqlen, None
    if mod.mask is not None:
        block_mask = create_block_mask(mod.mask, *groups_of(cell), n, n, device=device)
    call = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        score = None if mod.score is None else mod.score(table)
        return call(q, k, v, score, block_mask)  # type: ignore[no-any-return]

    return attend


def inputs_of(cell: Cell, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and dout, heads first, of memory in this library's layout."""
    draw = torch.Generator(device=device).manual_seed(0)
    shape = cell.batch, cell.seqlen, cell.heads, cell.head_dim
    made = (torch.randn(shape, generator=draw, device=device) for _ in range(4))
    return tuple(x.to(getattr(torch, cell.dtype)).transpose(1, 2) for x in made)


def call_of(cell: Cell, mod: Mod, provider: str, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """A provider's timed call: (out,), or the gradients of q, k, v and what learns."""
    device, is_backward = tensors[0].device, cell.direction == "backward"
    absent = {"flashtile-intervals": mod.intervals, "flashtile-lists": mod.mask}
    if provider in absent and absent[provider] is None:
        raise NotTimedError("refused: not asked")
    if provider == "flex" and is_backward and device.type != "cuda":
        raise NotTimedError("refused: no backward on the CPU")
    attend = flex(cell, mod, device) if provider == "flex" else ours(cell, mod, provider, device)
    *given, dout = tensors
    leaves = [x.detach().requires_grad_(is_backward) for x in given]
    table = None if mod.table is None else mod.table.detach().requires_grad_(is_backward)
    if not is_backward:
        return lambda: (attend(*leaves, table),)
    wanted = leaves if table is None else [*leaves, table]
    with torch.enable_grad():
        out = attend(*leaves, table)
    return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)


class Reference:
    """Float64 results of the first head and the last, of all sequences."""

    def __init__(self, cell: Cell, mod: Mod, tensors: tuple[Tensor, ...]) -> None:
        self.cell, self.mod = cell, mod
        self.heads = sorted({0, cell.heads - 1})
        self.exact = {h: self._of_head(h, tensors) for h in self.heads}

    def _of_head(self, h: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        cell, mod, device = self.cell, self.mod, tensors[0].device
        table = None if mod.table is None else mod.table.detach().double().requires_grad_()
        i = torch.arange(cell.seqlen, device=device)
        rows: list[list[Tensor]] = []
        for b in range(cell.batch):
            q, k, v, dout = (x[b, h].detach().double().requires_grad_() for x in tensors)
            at = torch.tensor(b, device=device), torch.tensor(h, device=device), i[:, None], i[None, :]
            with torch.enable_grad():
                score = q @ k.T * cell.head_dim**-0.5
                score = score if mod.score is None else mod.score(table)(score, *at)
                score = score if mod.mask is None else score.masked_fill(~mod.mask(*at), -torch.inf)
                out = torch.softmax(score, -1) @ v
            if cell.direction == "forward":
                rows.append([out.detach()])
            else:
                wanted = [q, k, v] if table is None else [q, k, v, table]
                rows.append(list(torch.autograd.grad(out, wanted, dout)))
        found = [torch.stack(each) for each in zip(*rows, strict=True)]
        if table is not None and cell.direction == "backward":
            found[3] = found[3].sum(0).select(mod.head_axis, h)
        return found

    def check(self, outputs: Sequence[Tensor]) -> float:
        """The largest relative error of a result; ``NotTimedError`` if it is over LIMIT."""
        worst = 0.0
        for h in self.heads:
            for n, (got, exact) in enumerate(zip(outputs, self.exact[h], strict=True)):
                own = got.select(self.mod.head_axis, h) if n == 3 else got[:, h]
                error = float((own.double() - exact).norm() / exact.norm())
                worst = error if error != error else max(worst, error)
        if not worst <= LIMIT:
            raise NotTimedError(f"wrong: relative error {worst:.3g}, limit {LIMIT}")
        return worst


@torch.no_grad()
def measure_cell(
    cell: Cell, providers: Sequence[str], session: Session, rounds: int, burst: float
) -> list[results.Row]:
    """Checks and times a cell; a row for each provider."""
    device = session.device
    mod, tensors = mod_of(cell, device), inputs_of(cell, device)
    reference, calls, errors = Reference(cell, mod, tensors), {}, {}

    def checked(provider: str) -> tuple[Any, float]:
        call = call_of(cell, mod, provider, tensors)
        poison(call())
        return call, reference.check(call())

    for provider in providers:
        found = attempt(device, provider, functools.partial(checked, provider))
        errors[provider] = found if isinstance(found, str) else found[1]
        if not isinstance(found, str):
            calls[provider] = found[0]
    timings = measure(calls, device, rounds=rounds, burst_ms=burst, deadline=session.deadline)
    flops = (
        4.0 * cell.heads * cell.head_dim * kept_pairs(cell, mod, device) * (1 if cell.direction == "forward" else 2.5)
    )
    rows = []
    for provider, error in errors.items():
        measured: dict[str, Any] = {"error": error}
        if provider in timings:
            ms = timings[provider].median_ms
            measured |= {"median_ms": ms, "spread": timings[provider].spread, "tflops": flops / (ms * 1e9)}
        rows.append(session.run.row(asdict(cell), provider, **measured))
    return rows


def first_result(cell: Cell, provider: str) -> tuple[float, float]:
    """Seconds to the first output and to the first gradients, in this process."""
    device = torch.device("cuda")
    mod, tensors = mod_of(cell, device), inputs_of(cell, device)
    *given, dout = tensors
    leaves = [x.detach().requires_grad_() for x in given]
    # The first gradient that PyTorch is given has it import sympy, whatever the function: 0.7 s, no provider's.
    torch.autograd.grad(leaves[0] + 0, leaves[0], dout)
    wait(device)
    start = time.perf_counter()
    attend = flex(cell, mod, device) if provider == "flex" else ours(cell, mod, provider, device)
    out = attend(*leaves, mod.table)
    wait(device)
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, dout)
    wait(device)
    return middle - start, time.perf_counter() - middle


def measure_first(cell: Cell, providers: Sequence[str], session: Session) -> list[results.Row]:
    """``first_result`` in new processes, with an empty cache and then with a full one; milliseconds."""
    rows = []
    for provider in (each for each in providers if each in ("flashtile", "flex")):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            for cache in ("cold", "warm"):
                command = [sys.executable, "-m", "benchmarks.mods", "--worker", cell.name, provider]
                said = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
                words = said.stdout.split()
                for n, direction in enumerate(("forward", "backward")):
                    case = asdict(cell) | {"direction": f"first {direction}", "cache": cache}
                    ms = 1e3 * float(words[n - 2]) if said.returncode == 0 else None
                    error = None if ms is not None else f"failed: {said.stderr[-300:]}"
                    rows.append(session.run.row(case, provider, median_ms=ms, error=error))
    return rows


def cells(device: str, dtype: str = "bfloat16") -> list[Cell]:
    """All of them, the forward's first; on a CPU small ones."""
    sizes = (1, 256, 2) if device == "cpu" else (2, 8192, 16)
    return [
        Cell(mod, direction, dtype, *sizes, dim)
        for direction in ("forward", "backward") for dim in (128, 64) for mod in MODS
    ]  # fmt: skip


def report(rows: Sequence[results.Row]) -> str:
    """A line a cell: each provider's TFLOPS, or seconds to a first result, and two of ours over FlexAttention's."""
    lines, names = [], list(dict.fromkeys(row.provider for row in rows))
    for case in dict.fromkeys(tuple(row.case.items()) for row in rows):
        found = {row.provider: row for row in rows if tuple(row.case.items()) == case}
        values = {n: (r.tflops or (r.median_ms or 0) / 1e3 or None) for n, r in found.items()}
        about, flexs, ratios = dict(case), values.get("flex"), []
        for name in _RACED:
            mine = values.get(name)
            ratios.append(f"{mine / flexs:.2f}" if mine and flexs else "")
        label = f"{about['direction']} d{about['head_dim']} {about['mod']} {about.get('cache', '')}"
        lines.append([label, *(f"{values[n]:.3g}" if values.get(n) else "" for n in names), *ratios])
    return to_text([["cell", *names, *(f"{name} / flex" for name in _RACED)], *lines])


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
    chosen, providers = select(cells(args.device, args.dtype), args.cells), args.providers or PROVIDERS
    timed: Callable[[Cell], list[results.Row]]
    if args.first:
        chosen = [cell for cell in chosen if cell.direction == "forward"]
        timed = functools.partial(measure_first, providers=providers, session=session)
    else:
        timed = functools.partial(
            measure_cell, providers=providers, session=session, rounds=args.rounds, burst=args.burst_ms
        )
    rows, code = session.each(chosen, lambda cell: "first " * args.first + cell.name, timed)
    return rows, code, report(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the cells; ``--worker`` is how it starts a process for a first result."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--worker"]:
        (cell,) = (each for each in cells("cuda") if each.name == given[1])
        print(*first_result(cell, given[2]))
        return 0
    parser = new_parser("mods", __doc__, {"dtype": "bfloat16", "rounds": 7, "burst_ms": 6.0})
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    parser.add_argument("--first", action="store_true", help="seconds to a first result instead")
    return run_command(parser.parse_args(given), "mods", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
