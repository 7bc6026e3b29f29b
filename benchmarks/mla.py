"""``python -m benchmarks.mla``: attention over a cache of latent rows (MLA), beside FlashMLA's dense decode.

576 columns of keys, the first 512 being the values, one key head, causal, pages of 64; in the variant ``page16`` pages
of 16, which FlashMLA does not have; in ``fp8`` rows of 656 bytes, for which it has another kernel. Rates are bytes of
latent rows over time.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

from benchmarks import decode, results, table
from benchmarks.latent import MEASURES, groups
from benchmarks.providers import MLA_PEER
from benchmarks.session import new_parser

PROVIDER_NAMES = ("flashtile", MLA_PEER)


# A line per case: GB/s of latent rows and the time of each provider, and how many times faster ours is than the peer.
latent_table = functools.partial(table.speed_table, unit="GB/s", against=MLA_PEER)


def report(rows: Sequence[results.Row]) -> str:
    """What a run prints at its end."""
    grid = table.cells(rows)
    plain = decode.plain(grid)
    ratios = [ratio for cell in plain for name in table.ours(cell.rows)[:1] if (ratio := cell.ratio(name, MLA_PEER))]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    tables = [table.speed_table(grid, "us", MLA_PEER), decode.variants_table(grid)]
    failed = [line for line in table.problems(grid) if ": refused: " not in line]
    said = f"speed over {MLA_PEER}: geometric mean {mean:.2f}, least {min(ratios, default=math.nan):.2f}"
    return "\n\n".join([*map(table.to_text, tables), said, *failed])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and appends rows; returns the process's exit code."""
    parser = new_parser("mla", __doc__, {"rounds": 10, "burst_ms": 3.0})
    args = decode.add_options(parser, MEASURES).parse_args(argv)
    wanted = decode.selected(args, functools.partial(groups, device=args.device))
    return decode.run_suite(
        args, "mla", wanted, lambda x, session: decode.measure_groups(x, session, wanted, PROVIDER_NAMES, report)
    )


if __name__ == "__main__":
    sys.exit(main())
