"""``python -m benchmarks.varlen``: packed sequences of random lengths against a dense batch of the same work.

The lengths are drawn once from a seed, uniformly in their logarithm, until they fill the requested tokens. The dense
batch has the same number of tokens to within half a sequence, and sequences of the token-weighted mean length
``sum(n^2) / sum(n)``, so that a token sees as many keys on average. Both are timed in the same rounds; the difference
of their TFLOPS is the cost of packing.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import bounds, results, timing
from benchmarks.cases import DIRECTIONS, HIDDEN_SIZE, Case, Direction
from benchmarks.checks import Call
from benchmarks.providers import Provider, choose_providers
from benchmarks.run import checked, timed_row
from benchmarks.session import Session, new_parser, run_command
from benchmarks.table import BOUND, Table, in_order, to_text

PROVIDER_NAMES = {
    "cuda": ("flashtile", "flashtile-portable", "fa3", "fa2"),
    "cpu": ("flashtile-cpu", "sdpa"),
}
# Draws 30 lengths from 18 to 15,897 tokens for 65,536: both ends of the range, and work that a dense batch can match.
SEED = 3
TOKENS, SHORTEST, LONGEST = 65536, 16, 16384
# Dense lengths are rounded to it, so that the dense batch has no partial tile at the end.
_ROUND_TO = 128


def draw_lengths(
    tokens: int = TOKENS, shortest: int = SHORTEST, longest: int = LONGEST, seed: int = SEED
) -> tuple[int, ...]:
    """Random lengths that add up to ``tokens``; the last one takes the remainder."""
    draw = random.Random(seed)
    found: list[int] = []
    left = tokens
    while left:
        length = round(shortest * (longest / shortest) ** draw.random())
        # A remainder too short for another sequence is added to this one.
        length = left if left - length < shortest else length
        found.append(length)
        left -= length
    return tuple(found)


def cases(
    lengths: tuple[int, ...],
    hidden: int = HIDDEN_SIZE,
    head_dims: Sequence[int] = (64, 128),
    masks: Sequence[str] = ("full", "causal"),
    directions: Sequence[Direction] = DIRECTIONS,
    dtype: str = "bfloat16",
) -> list[Case]:
    """One packed case for each combination."""
    longest = max(lengths)
    return [
        Case(direction, dtype, len(lengths), longest, longest, hidden // dim, hidden // dim, dim, mask == "causal",
             lengths=lengths)
        for direction in directions for dim in head_dims for mask in masks
    ]  # fmt: skip


def dense_like(case: Case) -> Case:
    """A dense batch of about as many tokens and operations as a packed case."""
    assert case.lengths is not None
    tokens = sum(case.lengths)
    mean = sum(n * n for n in case.lengths) / tokens
    seqlen = max(1, round(mean / _ROUND_TO)) * _ROUND_TO if mean >= _ROUND_TO else max(1, round(mean))
    batch = max(1, round(tokens / seqlen))
    return replace(case, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, lengths=None)


@torch.no_grad()
def measure(
    case: Case, chosen: Sequence[Provider], session: Session, *, rounds: int, burst_ms: float
) -> list[results.Row]:
    """Checks and times a packed case and its dense match with every provider; two rows per provider."""
    calls: dict[tuple[Case, str], Call] = {}
    verdicts: dict[tuple[Case, str], float | str] = {}
    for each in (case, dense_like(case)):
        right, errors = checked(each, chosen, session.device)
        calls |= {(each, name): call for name, call in right.items()}
        verdicts |= {(each, name): error for name, error in errors.items()}
    timings = timing.measure(calls, session.device, rounds=rounds, burst_ms=burst_ms, deadline=session.deadline)
    return [
        timed_row(session.run, each, name, verdict, timings.get((each, name)))
        for (each, name), verdict in verdicts.items()
    ]


def ratios(rows: Sequence[results.Row]) -> dict[tuple[Case, str], tuple[float, float]]:
    """By packed case and provider: TFLOPS packed and TFLOPS of the dense match in the same run; later runs win."""
    speeds = {(row.run, Case.from_dict(row.case), row.provider): row.tflops for row in rows if row.tflops is not None}
    found = {}
    for (run, case, provider), packed in speeds.items():
        dense = speeds.get((run, dense_like(case), provider)) if case.lengths is not None else None
        if dense is not None:
            found[case, provider] = (packed, dense)
    return found


def varlen_table(rows: Sequence[results.Row]) -> Table:
    """A line per packed case and provider: rates, packed over dense, over the fastest peer, share of the bound."""
    found = ratios(rows)
    last = {(Case.from_dict(row.case), row.provider): row for row in rows if row.tflops is not None}
    head = ["packed case", "provider", "TFLOPS", "dense TFLOPS", "packed / dense", "packed / best peer", BOUND]
    lines = []
    for case in dict.fromkeys(case for case, _ in found):
        names = in_order([name for each, name in found if each == case])
        best = max((found[case, n][0] for n in names if not n.startswith("flashtile")), default=None)
        for name in names:
            packed, dense = found[case, name]
            against = f"{packed / best:.2f}" if best and name.startswith("flashtile") else ""
            rates = [f"{packed:.3g}", f"{dense:.3g}", f"{packed / dense:.3f}"]
            lines.append([case.name, name, *rates, against, bounds.shown(last[case, name], case)])
    return [head, *lines]


def _measure_all(args: argparse.Namespace, session: Session) -> tuple[list[results.Row], int, str]:
    lengths = draw_lengths(args.tokens, args.shortest, args.longest, args.seed)
    print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all", flush=True)
    names = args.providers or PROVIDER_NAMES[args.device]
    chosen = {each: choose_providers(names, each, session.device) for each in args.directions}
    timed = functools.partial(measure, session=session, rounds=args.rounds, burst_ms=args.burst_ms)
    rows, code = session.each(
        cases(lengths, args.hidden, args.head_dims, args.masks, args.directions, args.dtype),
        lambda case: f"{case.name} against {dense_like(case).name}",
        lambda case: timed(case, chosen[case.direction]),
    )
    return rows, code, to_text(varlen_table(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every cell; returns the process's exit code."""
    defaults = {
        "tokens": TOKENS, "shortest": SHORTEST, "longest": LONGEST, "seed": SEED, "hidden": HIDDEN_SIZE,
        "head_dims": [64, 128], "masks": ["full", "causal"], "directions": list(DIRECTIONS), "dtype": "bfloat16",
        "rounds": 10, "burst_ms": 10.0,
    }  # fmt: skip
    return run_command(new_parser("varlen", __doc__, defaults).parse_args(argv), "varlen", _measure_all)


if __name__ == "__main__":
    sys.exit(main())
