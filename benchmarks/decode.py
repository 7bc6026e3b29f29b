"""``python -m benchmarks.decode``: attention over a cache of keys and values, beside FlashAttention-3's split decode.

Rates are bytes of keys and values over time. ``--measures`` lists how a call is timed: see ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from benchmarks import results, table
from benchmarks.caches import MEASURES, DecodeCase, draw_pool, groups
from benchmarks.cases import select
from benchmarks.checks import Call, Outputs, judged, poison
from benchmarks.latent import LatentCase
from benchmarks.providers import FlashMla, Flashtile, OwnBits, Provider, choose_providers
from benchmarks.session import Body, NotTimedError, Session, attempt, new_parser, run_command
from benchmarks.steps import StepCase
from benchmarks.table import Cell, Table
from benchmarks.timing import host_ms, interleaved, loop_ms, reps_for, summarise, time_burst

PROVIDER_NAMES = ("flashtile", "flashtile-hopper", "flashtile-portable", "flashtile-cpu", "fa3", "sdpa")
PEER = "fa3"
# A graph holds calls for about a millisecond, so that its start does not count.
_GRAPH_MS, _MOST_CALLS, _BURST = 1.0, 50, 50
# A plain cell and its variants, which are timed in the same rounds.
Group = tuple[DecodeCase, ...] | tuple[StepCase, ...] | tuple[LatentCase, ...]
_FA3_NAMES = {"k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k", "k_cache": "k", "v_cache": "v"}


def call_of(provider: Provider, case: DecodeCase | StepCase | LatentCase, tensors: dict[str, Tensor]) -> Call:
    """A provider's call; ``NotTimedError`` if it refuses the case."""
    if isinstance(provider, Flashtile):
        asked = {"batch_invariant": provider.asked} if isinstance(provider, OwnBits) else {}
        ours: Any = functools.partial(flashtile.attention_with_kvcache, backend=provider.backend, **asked)
        return lambda: (ours(**tensors),)
    if isinstance(case, LatentCase):
        return _of_latent_rows(provider, case, tensors)
    if provider.name == PEER and case.variant != "fp8":
        # As its flash_attn_with_kvcache: the operator chooses splits and packing.
        named: dict[str, Any] = {_FA3_NAMES.get(name, name): x for name, x in tensors.items()}
        theirs = functools.partial(torch.ops.flash_attn_3.fwd, softmax_scale=case.head_dim**-0.5, is_causal=True)
        return lambda: (theirs(**named, num_splits=0)[0],)
    # Beyond a gigabyte SDPA's times say nothing new.
    if provider.name != "sdpa" or isinstance(case, StepCase) or case.mixed or case.variant or case.cache_bytes > 2**30:
        raise NotTimedError("refused: no such caches")
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k_cache", "v_cache"))
    return lambda: (F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2),)


def _of_latent_rows(provider: Provider, case: LatentCase, tensors: dict[str, Tensor]) -> Call:
    if not isinstance(provider, FlashMla) or case.variant:
        raise NotTimedError("refused: no such caches")
    lead = [tensors["q"], tensors["k_cache"], 512, tensors["cache_seqlens"], tensors["page_table"], case.head_dim**-0.5]
    # As its users replay it: planned before, for these lengths.
    plan = provider.call(*lead, True, None, None)[2:]
    return lambda: (provider.call(*lead, True, *plan)[0],)


def sampler(measure: str, calls: Sequence[Call], device: torch.device, burst_ms: float) -> Callable[[], float]:
    """A function that times once what ``measure`` says, in milliseconds a call; the calls are made in turn."""
    if measure == "host":
        return functools.partial(host_ms, calls[0], device, _BURST)
    once_ms = loop_ms(calls[0], device, 3)
    if measure == "loop":
        return functools.partial(loop_ms, calls[0], device, reps_for(once_ms, burst_ms))
    graph, count = torch.cuda.CUDAGraph(), max(len(calls), min(_MOST_CALLS, math.ceil(_GRAPH_MS / once_ms)))
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    reps = reps_for(count * once_ms, burst_ms)

    def replay(_: Sequence[Call] = calls) -> float:  # the graph reads their tensors
        return time_burst(graph.replay, reps, device) / count

    return replay


@torch.no_grad()
def run_group(
    group: Group,
    chosen: Sequence[Provider],
    session: Session,
    pool: Tensor,
    rounds: int,
    burst_ms: float,
) -> list[results.Row]:
    """Checks every provider on every case of a group, then times all of them in the same rounds."""
    device, verdicts, samples = session.device, {}, {}
    for case in group:
        inputs = case.calls(pool)
        makers = {each.name: functools.partial(_second_call, each, case, inputs[0]) for each in chosen}
        right, said = judged(case.reference(inputs[0]), device, makers)
        for provider in chosen:
            name = provider.name
            verdicts[case, name] = said[name]
            if name in right:
                calls = [right[name], *(call_of(provider, case, tensors) for tensors in inputs[1:])]
                made = attempt(device, name, functools.partial(sampler, case.measure, calls, device, burst_ms))
                if isinstance(made, str):
                    verdicts[case, name] = made
                else:
                    samples[case, name] = made
    times = {key: vars(summarise(ms)) for key, ms in interleaved(samples, rounds, session.deadline).items()}
    return [
        session.run.row(asdict(case), name, error=verdict, **times.get((case, name), {}))
        for (case, name), verdict in verdicts.items()
    ]


def _second_call(
    provider: Provider, case: DecodeCase | StepCase | LatentCase, tensors: dict[str, Tensor]
) -> tuple[Call, Outputs]:
    call = call_of(provider, case, tensors)
    poison(call())
    if case.variant == "append":
        # Else the row that another provider wrote would do.
        poison((tensors["k_cache"][:, -1], tensors["v_cache"][:, -1]))
    return call, call()


# A line per case: GB/s of each provider and its time, and how many times faster ours is than the peer.
decode_table = functools.partial(table.speed_table, unit="GB/s", against=PEER)


def plain(grid: Sequence[Cell]) -> list[Cell]:
    """The cells that ratios are about: replays of graphs, without variants."""
    return [cell for cell in grid if cell.case.measure == "graph" and not cell.case.variant]


def variants_table(grid: Sequence[Cell]) -> Table:
    """The time of each variant over the time of its plain cell in the same run, by provider."""
    names = table.providers(grid)
    times = {(cell.case, name, row.run): row.median_ms for cell in grid for name, row in cell.rows.items()}
    lines = [["time / plain", *names]]
    for cell in grid:
        if cell.case.variant:
            run, base = next(iter(cell.rows.values())).run, replace(cell.case, variant="")
            pairs = [(cell.time(name), times.get((base, name, run))) for name in names]
            lines.append([cell.case.name, *(f"{own / of:.2f}" if own and of else "-" for own, of in pairs)])
    return lines


def report(rows: Sequence[results.Row], unit: str = "GB/s") -> str:
    """What a run prints at its end."""
    grid = table.cells(rows)
    tables = [table.speed_table(grid, unit, PEER), variants_table(grid), table.summary_table(plain(grid))]
    failed = [line for line in table.problems(grid) if ": refused: " not in line]
    return "\n\n".join([*map(table.to_text, tables), *failed])


def measure_groups(
    args: argparse.Namespace,
    session: Session,
    wanted: Sequence[Group],
    names: Sequence[str],
    tell: Callable[[list[results.Row]], str],
    ahead: Callable[[Sequence[Group], Sequence[Provider]], None] = lambda groups, chosen: None,
) -> tuple[list[results.Row], int, str]:
    """Measures the groups that the file lacks, after ``ahead`` of them: rows, exit code, what ``tell`` says."""
    chosen = choose_providers(args.providers or names, "decode", session.device)
    found = [provider.name for provider in chosen]
    left, _ = session.left(wanted, lambda group: group[0].name, found)
    ahead(left, chosen)
    pool = draw_pool(chain(*left), session.device)
    rest = (chosen, session, pool, args.rounds, args.burst_ms)
    rows, code = session.each(wanted, lambda group: group[0].name, lambda group: run_group(group, *rest), found)
    return rows, code, tell(rows)


def selected(args: argparse.Namespace, groups: Callable[[str], Sequence[Group]]) -> list[Group]:
    """The whole groups that contain a case which the patterns match: a variant needs its plain cell."""
    measures = args.measures or ["loop" if args.device == "cpu" else "graph"]
    found = [group for measure in measures for group in groups(measure)]
    return [group for group in found if select(list(group), args.cells)]


def add_options(parser: argparse.ArgumentParser, measures: Sequence[str]) -> argparse.ArgumentParser:
    """The options of suites of cached calls."""
    parser.add_argument("--measures", nargs="+", choices=measures, help="by default graph, on the CPU loop")
    parser.add_argument("--cells", metavar="PATTERN", help="globs or parts of cell names, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    return parser


def run_suite(args: argparse.Namespace, suite: str, wanted: Sequence[Group], body: Body) -> int:
    """Measures and appends rows, or lists the cells; returns the process's exit code."""
    if args.list:
        print("\n".join(" ".join(case.name for case in group) for group in wanted))
        return 0
    return run_command(args, suite, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    parser = new_parser("decode", __doc__, {"rounds": 10, "burst_ms": 3.0, "most_gb": 40.0})
    args = add_options(parser, MEASURES).parse_args(argv)
    wanted = selected(args, lambda measure: groups(measure, args.most_gb, args.device))
    return run_suite(
        args, "decode", wanted, lambda x, session: measure_groups(x, session, wanted, PROVIDER_NAMES, report)
    )


if __name__ == "__main__":
    sys.exit(main())
