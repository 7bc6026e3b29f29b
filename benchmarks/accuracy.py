"""``python -m benchmarks.accuracy``: how far every provider is from attention computed in float64.

Inputs are N(0, 1), and N(0, 1) plus N(0, 100) on 0.1% of the elements, the distribution with which Shah et al. 2024
(FlashAttention-3, arXiv:2407.08608, section 4.3) imitate the outliers of language models. They report a root mean
square error of 1.9e-4 for FlashAttention-2 and -3 in fp16 and of 3.2e-4 for standard attention, but not for which
lengths and head dims; so all providers get the same inputs here, and only the ratios of their errors compare.

Unlike the check before a timing, every element of every head is compared.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.cases import HEAD_DIMS, HIDDEN_SIZE, Case, Direction, Inputs, make_inputs
from benchmarks.checks import Outputs, Probe, compute
from benchmarks.providers import Provider, choose_providers
from benchmarks.run import GPU_PROVIDERS, second_call
from benchmarks.session import NotTimedError, Session, attempt, new_parser, run_command
from benchmarks.table import Table, in_order, to_text

# Share of elements with an outlier, by its name in rows and options.
INPUTS = {"normal": 0.0, "outliers": 0.001}
TENSORS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
PROVIDER_NAMES = {"cuda": GPU_PROVIDERS, "cpu": ("flashtile-cpu", "sdpa", "eager")}


def cases(
    seqlen: int = 8192,
    hidden: int = HIDDEN_SIZE,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[str] = ("float16", "bfloat16"),
    masks: Sequence[str] = ("full",),
    directions: Sequence[Direction] = ("forward", "backward"),
) -> list[Case]:
    """One sequence for each combination."""
    return [
        Case(direction, dtype, 1, seqlen, seqlen, hidden // dim, hidden // dim, dim, mask == "causal")
        for direction in directions
        for dtype in dtypes
        for dim in head_dims
        for mask in masks
    ]


def exact(case: Case, inputs: Inputs) -> Outputs:
    """The results of a dense case of batch 1 in float64, in the layout of q, k and v."""
    shape = inputs.q.shape
    names = TENSORS[case.direction]
    found = tuple(torch.empty(shape, dtype=torch.float64, device=inputs.q.device) for _ in names)
    for head in range(case.num_heads_q):
        computed = compute(case, inputs, Probe(0, None, slice(head, head + 1), head), torch.float64)
        for whole, part in zip(found, computed, strict=True):
            whole[0, :, head] = part.view(shape[1], shape[3])
    return found


def errors(outputs: Outputs, exact: Outputs, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each tensor: root mean square error, largest error, and error relative to the exact tensor's norm."""
    found = {}
    for name, got, want in zip(names, outputs, exact, strict=True):
        difference: Tensor = got.double() - want
        rmse, most = float(difference.square().mean().sqrt()), float(difference.abs().max())
        found[name] = {"rmse": rmse, "max_error": most, "relative": rmse / float(want.square().mean().sqrt())}
    return found


@torch.no_grad()
def measure(case: Case, kind: str, chosen: Sequence[Provider], session: Session) -> list[results.Row]:
    """One row per provider, for one case and one distribution of its inputs."""
    inputs = make_inputs(case, session.device, outliers=INPUTS[kind])
    wanted = exact(case, inputs)

    def values(provider: Provider) -> dict[str, dict[str, float]]:
        found = errors(second_call(provider, case, inputs)[1], wanted, TENSORS[case.direction])
        if not all(math.isfinite(x) for of in found.values() for x in of.values()):
            raise NotTimedError("wrong: not finite")
        return found

    rows = []
    for provider in chosen:
        found = attempt(session.device, provider.name, functools.partial(values, provider))
        measured: dict[str, Any] = {"error": found}
        if not isinstance(found, str):
            measured = {"error": max(of["relative"] for of in found.values()), "values": found}
        rows.append(session.run.row({**case.to_dict(), "inputs": kind}, provider.name, **measured))
    return rows


def error_table(rows: Sequence[results.Row], measure: str = "rmse") -> Table:
    """A line per case, distribution and tensor, a column per provider: ``rmse``, ``max_error`` or ``relative``."""
    names = in_order({row.provider for row in rows})
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        case = Case.from_dict({name: x for name, x in row.case.items() if name != "inputs"})
        for tensor in TENSORS[case.direction]:
            key = (f"d{case.head_dim} {case.mask} {case.dtype}", row.case["inputs"], tensor)
            shown = "-" if row.values is None else f"{row.values[tensor][measure]:.2e}"
            lines.setdefault(key, {})[row.provider] = shown
    head = [f"{measure} of", "inputs", "tensor", *names]
    return [head, *([*key, *(found.get(name, "") for name in names)] for key, found in lines.items())]


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
    names = args.providers or PROVIDER_NAMES[args.device]
    chosen = {each: choose_providers(names, each, session.device) for each in args.directions}
    grid = cases(args.seqlen, args.hidden, args.head_dims, args.dtypes, args.masks, args.directions)
    rows, code = session.each(
        [(case, kind) for case in grid for kind in args.inputs],
        lambda cell: f"{cell[0].name} {cell[1]}",
        lambda cell: measure(*cell, chosen[cell[0].direction], session),
    )
    return rows, code, "\n\n".join(to_text(error_table(rows, kind)) for kind in ("rmse", "max_error"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every cell; returns the process's exit code."""
    defaults = {
        "seqlen": 8192, "hidden": HIDDEN_SIZE, "head_dims": list(HEAD_DIMS), "dtypes": ["float16", "bfloat16"],
        "inputs": list(INPUTS), "masks": ["full"], "directions": list(TENSORS),
    }  # fmt: skip
    return run_command(new_parser("accuracy", __doc__, defaults).parse_args(argv), "accuracy", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
