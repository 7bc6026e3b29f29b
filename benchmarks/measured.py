"""``python -m benchmarks.measured``: on which card and at which commit each suite was measured, and what is stale.

A suite is stale if the code that it times has changed since, by ``benchmarks.sources``, or if its rows do not say what
that code was. Suites of ``CURRENT`` must be of one card, one commit and the code as it stands; exits with 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results, sources
from benchmarks.providers import OURS
from benchmarks.results import Row
from benchmarks.session import words
from benchmarks.table import Table, to_text

# Suites whose rows the first pages call current, entered when all of them are measured; a test holds them to it.
CURRENT: tuple[str, ...] = ()
# Digests of other code that compiles to the same kernels -> which comparison by tools/same_code.py said so.
SAME: dict[str, str] = {}


@dataclass(frozen=True)
class Measured:
    """What rows the pages have of a suite."""

    suite: str
    device: str
    commits: tuple[str, ...]
    days: tuple[str, str]  # the first and the last
    cells: int
    state: str

    @property
    def stale(self) -> bool:
        """Whether what was timed is not what stands here, or nobody knows."""
        return self.state not in (_SAME, _UNJUDGED)


_SAME, _UNJUDGED = "the code as it stands", "not judged"


def measured(rows: Sequence[Row], library: Path = sources.LIBRARY) -> list[Measured]:
    """One record for each suite, of all rows of ours on the card that tables show: of which a table shows the last."""
    found = []
    for suite in sorted({row.suite for row in rows}):
        own = [row for row in results.of_suite(rows, suite) if row.provider.startswith(OURS)]
        if own:
            days = sorted(f"{row.run[:4]}-{row.run[4:6]}-{row.run[6:8]}" for row in own)
            commits = tuple(dict.fromkeys(row.commit for row in own))
            state = _state({row.code for row in own}, sources.digest(suite, library))
            cells = len({str(row.case) for row in own})
            found.append(Measured(suite, own[0].device, commits, (days[0], days[-1]), cells, state))
    return found


def _state(codes: set[str], now: str) -> str:
    if not now:
        return _UNJUDGED
    if "" in codes:
        return "stale: no record of the code"
    return _SAME if codes <= {now, *SAME} else "stale: the code has changed"


def problems(found: Sequence[Measured], suites: Sequence[str] = CURRENT) -> list[str]:
    """Why the suites' rows may not stand in one headline, a line each."""
    by_suite = {each.suite: each for each in found}
    said = [f"{suite}: no rows of ours" for suite in suites if suite not in by_suite]
    chosen = [by_suite[suite] for suite in suites if suite in by_suite]
    said += [f"{each.suite}: {each.state}" for each in chosen if each.stale]
    cards = {each.device for each in chosen}
    commits = {commit for each in chosen for commit in each.commits}
    said += [f"of {len(cards)} cards: {', '.join(sorted(cards))}"] if len(cards) > 1 else []
    said += [f"of {len(commits)} commits: {', '.join(sorted(commits))}"] if len(commits) > 1 else []
    return said


def measured_table(found: Sequence[Measured]) -> Table:
    """A line a suite."""
    lines = [["suite", "GPU or CPU", "cells", "commit", "measured", "state"]]
    for each in found:
        days = each.days[0] if len(set(each.days)) == 1 else " to ".join(each.days)
        lines.append([each.suite, each.device, str(each.cells), ", ".join(each.commits), days, each.state])
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the list and what is wrong with the suites that are called current; returns 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of saved rows")
    parser.add_argument("--suites", type=words, default=list(CURRENT), metavar="A,B", help="by default CURRENT")
    args = parser.parse_args(argv)
    found = measured(results.saved(args.results))
    wrong = problems(found, args.suites)
    about = f"current: {', '.join(args.suites) or 'none'}"
    print("\n".join([to_text(measured_table(found)), "", about, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
