"""Parses compute-sanitizer's output and discounts two kinds of reports that are not faults of the kernels."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import ROOT

_BACKENDS = ROOT / "src" / "flashtile" / "backends"
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_RACE, _READ = "Race reported between", "Uninitialized __global__ memory read"
# A C++ kernel's name includes its arguments, and so spaces; an offset follows every name, and a line number follows
# code compiled with line information.
_PLACE = re.compile(r"\b(?:access )?at (.+?)\+0x[0-9a-f]+(?: in (?:\S*/)?(\S+?):(\d+))?(?: \[|$| and\b)")
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Verdict:
    """The result of a log."""

    summed: bool  # whether the tool printed its summary
    errors: int  # and hazards, by the tool's own count, without the discounted ones; unprinted ones are included
    text: str  # the first of them that was printed, or the number discounted


def verdict(log: str) -> Verdict:
    """Reads a log."""
    counts = [int(a or b) for a, b in _SUMMARY.findall(log)]
    found = list(reports(log))
    counted = [
        text for text, places in found if not is_start_word(text, places) and not is_read_by_others(text, places)
    ]
    left_out = len(found) - len(counted)
    return Verdict(bool(counts), sum(counts) - left_out, counted[0][:300] if counted else f"{left_out} left out")


def reports(log: str) -> Iterator[tuple[str, list[Place | None]]]:
    """Each error with the kernel, file and line of its accesses: all accesses of a race, else the first."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    for number, line in enumerate(lines):
        if _RACE in line:
            more = itertools.takewhile(lambda each: each.startswith("and "), lines[number + 1 :])
            accesses = [line, *more]
            yield " ".join(accesses), [_place(each) for each in accesses]
        elif _READ in line or line.startswith("Invalid "):
            place = _place(lines[number + 1]) if number + 1 < len(lines) else None
            yield f"{line} at {place[0]}" if place else line, [place]


def _place(line: str) -> Place | None:
    match = _PLACE.search(line)
    return (match[1], match[2] or "", match[3] or "") if match else None


def is_start_word(text: str, places: list[Place | None]) -> bool:
    """Whether a race is on the words in shared memory by which Triton tells a kernel's warps what to run.

    The first warps write there which role the others run, and at the end that they stop. ``barrier.sync 1`` orders the
    accesses, but from different places of the program, which racecheck does not recognise as a barrier. The compiler
    gives the reads the line of the kernel's ``def``, which has no statement of the source. So a race is taken to be on
    these words if all its accesses are in one kernel and one of them is on that line.
    """
    kernels = {place[0] if place else None for place in places}
    return _RACE in text and len(kernels) == 1 and any(place in _definitions() for place in places)


def is_read_by_others(text: str, places: list[Place | None]) -> bool:
    """Whether a kernel that is not ours read memory that initcheck saw no write to.

    The tool does not see what TMA stores (its release notes, "Known Limitations"), which vendors' matrix products use
    too. Elements that our kernels leave unwritten are found by checks of the results.
    """
    ours = {name for name, _, _ in _definitions()}
    return _READ in text and places[0] is not None and places[0][0] not in ours


@functools.cache
def _definitions() -> frozenset[Place]:
    """Name, file and line of every function of the backends."""
    return frozenset(
        (match[1], path.name, str(number))
        for path in _BACKENDS.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := re.match(r"def (\w+)\(", line))
    )
