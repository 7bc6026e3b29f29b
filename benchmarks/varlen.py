"""``python -m benchmarks.varlen``: packed sequences of random lengths against a dense batch of the same work.

The lengths are drawn once from a seed, evenly in their logarithm, until they fill the tokens asked for. The dense batch
has as many tokens to within half a sequence, and sequences of the token-weighted mean length ``sum(n^2) / sum(n)``, so
that a token sees as many keys on average. Both are timed in the same rounds, and rates in TFLOPS are compared: what is
lost is what packing costs.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import results, timing
from benchmarks.budget import OUT_OF_TIME, hard_stop
from benchmarks.cases import HIDDEN_SIZE, Case, Direction
from benchmarks.plain import Call
from benchmarks.progress import Progress
from benchmarks.providers import Provider
from benchmarks.run import DeviceLostError, checked, choose_providers, timed_row
from benchmarks.session import Session, add_options, numbers, open_session, words
from benchmarks.table import Table, in_order, to_text
from benchmarks.timing import OutOfTimeError

PROVIDER_NAMES = {
    "cuda": ("flashtile-hopper", "flashtile-portable", "fa3", "fa2"),
    "cpu": ("flashtile-cpu", "sdpa"),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# Draws 30 lengths from 18 to 15,897 tokens for 65,536: both ends of the range, and work that a dense batch can match.
SEED = 3
TOKENS, SHORTEST, LONGEST = 65536, 16, 16384
# Dense lengths are rounded to it, so that the batch compared with pays for no ragged end.
_ROUND_TO = 128


def draw_lengths(
    tokens: int = TOKENS, shortest: int = SHORTEST, longest: int = LONGEST, seed: int = SEED
) -> tuple[int, ...]:
    """Random lengths that add up to ``tokens``; the last one fills what is left."""
    draw = random.Random(seed)
    found: list[int] = []
    left = tokens
    while left:
        length = round(shortest * (longest / shortest) ** draw.random())
        # What a next sequence could not have is given to this one.
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
    """The packed lengths in each combination."""
    longest = max(lengths)
    return [
        Case(direction, dtype, len(lengths), longest, longest, hidden // dim, hidden // dim, dim, mask == "causal",
             lengths=lengths)
        for direction in directions for dim in head_dims for mask in masks
    ]  # fmt: skip


def dense_like(case: Case) -> Case:
    """A dense batch of about the tokens and the operations of a packed case."""
    assert case.lengths is not None
    tokens = sum(case.lengths)
    mean = sum(n * n for n in case.lengths) / tokens
    seqlen = max(1, round(mean / _ROUND_TO)) * _ROUND_TO if mean >= _ROUND_TO else max(1, round(mean))
    batch = max(1, round(tokens / seqlen))
    return replace(case, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, lengths=None)


def measure(
    case: Case, chosen: Sequence[Provider], session: Session, *, rounds: int, burst_ms: float, deadline_s: float | None
) -> list[results.Row]:
    """Checks and times a packed case and its dense match by every provider; two rows each.

    Raises:
        DeviceLostError: If a provider broke the device.
        OutOfTimeError: If the deadline left no time for three rounds.
    """
    calls: dict[tuple[Case, str], Call] = {}
    verdicts: dict[tuple[Case, str], float | str] = {}
    for each in (case, dense_like(case)):
        right, errors = checked(each, chosen, session.device)
        calls |= {(each, name): call for name, call in right.items()}
        verdicts |= {(each, name): error for name, error in errors.items()}
    timings = timing.measure(calls, session.device, rounds=rounds, burst_ms=burst_ms, deadline_s=deadline_s)
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
    """A line a packed case and provider: rates, packed over dense, and over the same case by the fastest peer."""
    found = ratios(rows)
    head = ["packed case", "provider", "TFLOPS", "dense TFLOPS", "packed / dense", "packed / best peer"]
    lines = []
    for case in dict.fromkeys(case for case, _ in found):
        names = in_order([name for each, name in found if each == case])
        best = max((found[case, n][0] for n in names if not n.startswith("flashtile")), default=None)
        for name in names:
            packed, dense = found[case, name]
            against = f"{packed / best:.2f}" if best and name.startswith("flashtile") else ""
            lines.append([case.name, name, f"{packed:.3g}", f"{dense:.3g}", f"{packed / dense:.3f}", against])
    return [head, *lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.varlen", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in all")
    parser.add_argument("--shortest", type=int, default=SHORTEST)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--seed", type=int, default=SEED, help="of the lengths")
    parser.add_argument("--hidden", type=int, default=HIDDEN_SIZE, help="heads times head_dim")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128], metavar="A,B")
    parser.add_argument("--masks", type=words, default=["full", "causal"], metavar="A,B", help="full, causal")
    parser.add_argument("--directions", type=words, default=list(DIRECTIONS), metavar="A,B")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--burst-ms", type=float, default=10.0, help="about how long one sample takes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every cell; returns the process's exit code."""
    start_s = time.monotonic()
    args = _parser().parse_args(argv)
    session = open_session(args, "varlen")
    if session is None:
        return 2
    lengths = draw_lengths(args.tokens, args.shortest, args.longest, args.seed)
    print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all", flush=True)
    grid = cases(lengths, args.hidden, args.head_dims, args.masks, args.directions, args.dtype)
    chosen = {
        each: choose_providers(args.providers or PROVIDER_NAMES[args.device], each, session.device)
        for each in args.directions
    }
    left_s = None if args.budget_s is None else args.budget_s - (time.monotonic() - start_s)
    deadline_s = None if left_s is None else time.monotonic() + 0.9 * left_s
    timed = functools.partial(measure, rounds=args.rounds, burst_ms=args.burst_ms, deadline_s=deadline_s)
    rows: list[results.Row] = []
    code = 0
    with hard_stop(left_s), Progress(len(grid)) as progress, torch.no_grad():
        for case in grid:
            progress.begin(case.name)
            try:
                found = timed(case, chosen[case.direction], session)
            except (DeviceLostError, OutOfTimeError) as error:
                progress.note(f"{case.name}: stopped: {error}")
                code = OUT_OF_TIME if isinstance(error, OutOfTimeError) else 1
                break
            session.save(found)
            rows += found
            progress.end(f"{case.name} against {dense_like(case).name}: {len(found)} rows")
            for row in found:
                if isinstance(row.error, str):
                    progress.note(f"  {row.provider}: {row.error.splitlines()[0]}")
    print(f"\n{to_text(varlen_table(rows))}\n\n{len(rows)} rows appended to {session.out}")
    return code if rows else code or 1


if __name__ == "__main__":
    sys.exit(main())
