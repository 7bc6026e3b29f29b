"""``python -m benchmarks.memory``: peak memory of a call beyond its inputs and outputs, against sequence length.

Standard attention holds a score matrix and grows with the square of the length; everything else should grow with the
length. The growth printed last is the exponent between the two longest sequences: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.budget import hard_stop
from benchmarks.cases import Case, Direction, Inputs, make_inputs
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.run import choose_providers
from benchmarks.table import to_text

SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
PROVIDER_NAMES = ("flashtile-portable", "flashtile-hopper", "fa3", "cudnn", "fa2", "eager")


def memory_cases(direction: Direction) -> list[Case]:
    """One sequence of 16 heads of 128, causal, 1k to 64k tokens."""
    return [Case(direction, "bfloat16", 1, n, n, 16, 16, 128, causal=True) for n in SEQLENS]


def extra_bytes(provider: Provider, case: Case, inputs: Inputs) -> int:
    """Peak of the CUDA allocator during one call, less what was there before and what the call returns.

    For a backward, the forward's saved results count as inputs.
    """
    device = inputs.q.device
    call = provider.prepare(case, inputs)
    call()  # kernels are loaded and library workspaces set up, once a process
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    # In distinct storages: a peer may return gradients as views of one block.
    returned = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in outputs}
    return peak - before - sum(returned.values())


def growth(points: Sequence[tuple[int, int]]) -> float | None:
    """Exponent of the growth between the two longest sequences, None with fewer than two points or no memory."""
    (n0, b0), (n1, b1) = sorted(points)[-2:] if len(points) > 1 else ((1, 0), (1, 0))
    return math.log(b1 / b0) / math.log(n1 / n0) if b0 > 0 and b1 > 0 and n1 > n0 else None


def measure_rows(run: results.Run, chosen: Sequence[Provider], direction: Direction, out: Path) -> list[results.Row]:
    """A row a case and provider, saved as each case ends; what does not fit says so."""
    rows = []
    device = torch.device("cuda")
    for case in memory_cases(direction):
        inputs = make_inputs(case, device)
        for provider in chosen:
            try:
                refusal = provider.refusal(case, inputs)
                measured: dict[str, object] = {"error": f"refused: {refusal}"}
                if refusal is None:
                    measured = {"extra_bytes": extra_bytes(provider, case, inputs)}
            except Exception as error:
                measured = {"error": f"failed: {error}"[:600]}
            torch.cuda.empty_cache()
            rows.append(run.row(case.to_dict(), provider.name, **measured))
        results.append(out, rows[-len(chosen) :])
        print(f"{case.name}  " + " | ".join(_shown(row) for row in rows[-len(chosen) :]), flush=True)
    return rows


def _shown(row: results.Row) -> str:
    return f"{row.provider} {row.error if row.extra_bytes is None else f'{row.extra_bytes / 2**20:.1f} MiB'}"


def growth_table(rows: Sequence[results.Row]) -> list[list[str]]:
    """The exponent of every provider and direction."""
    points: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if row.extra_bytes is not None:
            points.setdefault((row.case["direction"], row.provider), []).append((row.case["seqlen_k"], row.extra_bytes))
    lines = [["direction", "provider", "longest", "extra MiB", "bytes a token", "growth"]]
    for (direction, provider), found in points.items():
        longest, most = max(found)
        exponent = growth(found)
        shown = "none" if exponent is None else f"{exponent:.2f}"
        lines.append([direction, provider, str(longest), f"{most / 2**20:.1f}", f"{most / longest:.1f}", shown])
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both directions; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--providers", default=",".join(PROVIDER_NAMES), metavar="A,B")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    args = parser.parse_args(argv)
    unknown = [name for name in args.providers.split(",") if name not in PROVIDERS]
    if unknown or not torch.cuda.is_available():
        print(f"no such provider: {', '.join(unknown)}" if unknown else "needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    run = results.new_run("memory", device, args.commit)
    out = args.out or results.default_file("memory", run.device)
    rows: list[results.Row] = []
    directions: tuple[Direction, ...] = ("forward", "backward")
    with torch.no_grad(), hard_stop(args.budget_s):
        for direction in directions:
            chosen = choose_providers(args.providers.split(","), direction, device)
            if chosen:
                rows += measure_rows(run, chosen, direction, out)
    print(f"\n{to_text(growth_table(rows))}\n\n{len(rows)} rows appended to {out}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
