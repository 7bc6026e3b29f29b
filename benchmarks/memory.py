"""``python -m benchmarks.memory``: peak memory of a call beyond its inputs and outputs, against sequence length.

Standard attention holds a score matrix and grows with the square of the length; everything else should grow with the
length. The growth printed last is the exponent between the two longest sequences: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Sequence

import torch

from benchmarks.cases import DIRECTIONS, Case, Direction, Inputs, make_inputs
from benchmarks.providers import Provider, choose_providers, prepared
from benchmarks.results import Row
from benchmarks.run import GPU_PROVIDERS
from benchmarks.session import Session, attempt, new_parser, run_command
from benchmarks.table import Table, to_text

SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


def memory_cases(direction: Direction) -> list[Case]:
    """One sequence of 16 heads of 128, causal, 1k to 64k tokens."""
    return [Case(direction, "bfloat16", 1, n, n, 16, 16, 128, causal=True) for n in SEQLENS]


def extra_bytes(provider: Provider, case: Case, inputs: Inputs) -> int:
    """Peak of the CUDA allocator during one call, minus the memory in use before and the call's results.

    For a backward, the forward's saved results count as inputs.
    """
    device = inputs.q.device
    call = prepared(provider, case, inputs)
    call()  # kernels are loaded and library workspaces set up, once per process
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


@torch.no_grad()
def measure(case: Case, chosen: Sequence[Provider], session: Session) -> list[Row]:
    """One row per provider; one that does not fit has the reason."""
    inputs = make_inputs(case, session.device)
    rows = []
    for provider in chosen:
        extra = attempt(session.device, provider.name, functools.partial(extra_bytes, provider, case, inputs))
        torch.cuda.empty_cache()
        measured = {"error" if isinstance(extra, str) else "extra_bytes": extra}
        rows.append(session.run.row(case.to_dict(), provider.name, **measured))
    return rows


def growth_table(rows: Sequence[Row]) -> Table:
    """The exponent of every provider and direction."""
    points: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if row.extra_bytes is not None:
            points.setdefault((row.case["direction"], row.provider), []).append((row.case["seqlen_k"], row.extra_bytes))
    lines = [["direction", "provider", "longest", "extra MiB", "bytes a token", "growth"]]
    for (direction, provider), found in points.items():
        longest, most = max(found)
        exponent = "none" if (found_growth := growth(found)) is None else f"{found_growth:.2f}"
        lines.append([direction, provider, str(longest), f"{most / 2**20:.1f}", f"{most / longest:.1f}", exponent])
    return lines


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[Row], int, str]:
    names = args.providers or GPU_PROVIDERS
    chosen = {each: choose_providers(names, each, session.device) for each in DIRECTIONS}
    work = [case for each in DIRECTIONS for case in memory_cases(each)]
    rows, code = session.each(work, lambda case: case.name, lambda case: measure(case, chosen[case.direction], session))
    return rows, code, to_text(growth_table(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both directions; returns the process's exit code."""
    return run_command(new_parser("memory", __doc__, {}, ("cuda",)).parse_args(argv), "memory", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
