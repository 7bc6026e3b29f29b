"""``python -m tests.fuzz builds``, ``numbers``, ``mixed``, ``functions``, ``selected`` and ``second``: random calls,
built for every architecture or computed; the last judges second derivatives.

On a machine with a GPU ``python -m tests.fuzz mixed --backend hopper --device cuda --count 500`` computes 500 steps of
a server there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# Tiles that somebody measured on this machine are not what is built.
os.environ["FLASHTILE_TILES"] = "off"

from flashtile_lab.kernels.build import ARCHS
from tests.fuzz.drawn import ENDLESS, KINDS, draw, sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a call has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("builds", "numbers", "mixed", "functions", "selected", "second"))
    parser.add_argument("--seed", type=int, default=0, help="the first call's number")
    parser.add_argument("--count", type=int, default=50, metavar="N", help="calls beside the sweep, or in all")
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--most", type=int, metavar="N", help="distinct builds of an architecture, spread over all")
    parser.add_argument("--no-sweep", action="store_true", help="the seed's calls alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--backend", default="cpu", help="of numbers: cpu, portable under TRITON_INTERPRET=1, hopper")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of numbers")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), help="of numbers: calls of one kind")
    parser.add_argument("--kinds", type=int, help="of mixed: kinds of batches by what is compiled; 0 for any")
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, flush=True)

    if args.what == "builds":
        from tests.fuzz.builds import fuzz

        calls = [] if args.no_sweep else sweep()
        calls += [draw(args.seed + n, ENDLESS) for n in range(args.count)]
        failures = fuzz(calls, args.arch, args.workers, args.most, say)
    elif args.what == "mixed":
        from tests.fuzz.mixed import fuzz as judge_batches

        failures = judge_batches(args.backend, args.seed, args.count, say, args.device, args.kinds)
    elif args.what == "functions":
        from tests.fuzz.functions import fuzz as judge_functions

        failures = judge_functions(args.backend, args.seed, args.count, say, args.device)
    elif args.what == "selected":
        from tests.fuzz.selected import fuzz as judge_selected

        failures = judge_selected(args.backend, args.seed, args.count, say, device=args.device)
    elif args.what == "second":
        from tests.second import fuzz as judge_second

        failures = judge_second(args.backend, args.seed, args.count, say, args.device)
    else:
        from tests.fuzz.judged import fuzz as judge_all

        failures = judge_all(args.backend, args.seed, args.count, say, args.kind, args.device)
    say(f"{len(failures)} faults")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
