"""``python -m benchmarks.accuracy``: how far every provider is from attention computed in float64.

Inputs are N(0, 1), and N(0, 1) with 0.1% of the elements struck by another N(0, 100), the distribution with which Shah
et al. 2024 (FlashAttention-3, arXiv:2407.08608, section 4.3) imitate the outliers of language models. They report a
root mean square error of 1.9e-4 for FlashAttention-2 and -3 in fp16 and of 3.2e-4 for standard attention, but not for
which lengths and head dims; so all providers get the same inputs here, and what counts is the ratio of their errors.

Unlike the check before a timing, every element of every head is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.budget import hard_stop
from benchmarks.cases import HEAD_DIMS, HIDDEN_SIZE, Case, Direction, Inputs, make_inputs
from benchmarks.checks import Outputs, Probe, compute
from benchmarks.progress import Progress
from benchmarks.providers import Provider
from benchmarks.run import DeviceLostError, choose_providers, failure, second_call, synchronize
from benchmarks.session import Session, add_options, numbers, open_session, words
from benchmarks.table import Table, in_order, to_text

# Share of elements with an outlier, by the name that rows and options use.
INPUTS = {"normal": 0.0, "outliers": 0.001}
TENSORS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
PROVIDER_NAMES = {
    "cuda": ("flashtile-hopper", "flashtile-portable", "fa3", "cudnn", "fa2", "eager"),
    "cpu": ("flashtile-cpu", "sdpa", "eager"),
}


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
    """Of each tensor: root mean square error, largest error, and error relative to the exact tensor's norm."""
    found = {}
    for name, got, want in zip(names, outputs, exact, strict=True):
        difference: Tensor = got.double() - want
        rmse = difference.square().mean().sqrt()
        found[name] = {
            "rmse": float(rmse),
            "max_error": float(difference.abs().max()),
            "relative": float(rmse / want.square().mean().sqrt()),
        }
    return found


def measure(case: Case, kind: str, chosen: Sequence[Provider], session: Session) -> list[results.Row]:
    """A row a provider for one case and one distribution of its inputs.

    Raises:
        DeviceLostError: If a provider broke the device.
    """
    inputs = make_inputs(case, session.device, outliers=INPUTS[kind])
    wanted = exact(case, inputs)
    rows = []
    for provider in chosen:
        measured: dict[str, Any]
        try:
            refusal = provider.refusal(case, inputs)
            if refusal is not None:
                measured = {"error": f"refused: {refusal}"}
            else:
                outputs = second_call(provider, case, inputs)[1]
                values = errors(outputs, wanted, TENSORS[case.direction])
                measured = {"error": max(of["relative"] for of in values.values()), "values": values}
                if not all(math.isfinite(x) for of in values.values() for x in of.values()):
                    measured = {"error": "wrong: not finite"}
        except Exception as error:  # one provider's failure must not cost the others their row
            synchronize(session.device, provider.name)
            measured = {"error": failure(error)}
        rows.append(session.run.row({**case.to_dict(), "inputs": kind}, provider.name, **measured))
    return rows


def error_table(rows: Sequence[results.Row], measure: str = "rmse") -> Table:
    """A line a case, distribution and tensor, a column a provider.

    Args:
        rows: Of this suite; later ones win.
        measure: ``rmse``, ``max_error`` or ``relative``.
    """
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=HIDDEN_SIZE, help="heads times head_dim")
    parser.add_argument("--head-dims", type=numbers, default=list(HEAD_DIMS), metavar="A,B")
    parser.add_argument("--dtypes", type=words, default=["float16", "bfloat16"], metavar="A,B")
    parser.add_argument("--inputs", type=words, default=list(INPUTS), metavar="A,B", help=", ".join(INPUTS))
    parser.add_argument("--masks", type=words, default=["full"], metavar="A,B", help="full, causal")
    parser.add_argument("--directions", type=words, default=list(TENSORS), metavar="A,B", help=", ".join(TENSORS))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every cell; returns the process's exit code."""
    args = _parser().parse_args(argv)
    session = open_session(args, "accuracy")
    if session is None:
        return 2
    grid = cases(args.seqlen, args.hidden, args.head_dims, args.dtypes, args.masks, args.directions)
    chosen = {
        each: choose_providers(args.providers or PROVIDER_NAMES[args.device], each, session.device)
        for each in args.directions
    }
    rows: list[results.Row] = []
    code = 0
    with hard_stop(args.budget_s), Progress(len(grid) * len(args.inputs)) as progress, torch.no_grad():
        for case, kind in ((case, kind) for case in grid for kind in args.inputs):
            progress.begin(f"{case.name} {kind}")
            try:
                found = measure(case, kind, chosen[case.direction], session)
            except DeviceLostError as error:
                progress.note(f"stopped: {error}")
                code = 1
                break
            session.save(found)
            rows += found
            shown = (f"{r.provider} {r.error if isinstance(r.error, str) else format(r.error, '.2e')}" for r in found)
            progress.end(f"{case.name} {kind}  " + " | ".join(shown))
    for kind in ("rmse", "max_error"):
        print(f"\n{to_text(error_table(rows, kind))}")
    print(f"\n{len(rows)} rows appended to {session.out}")
    return code if rows else 1


if __name__ == "__main__":
    sys.exit(main())
