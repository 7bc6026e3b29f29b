"""What compute-sanitizer printed, and what of it says nothing about the kernels."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import ROOT

BACKENDS = ROOT / "src" / "flashtile" / "backends"
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_RACE, _READ = "Race reported between", "Uninitialized __global__ memory read"
# A kernel of C++ comes with its arguments, and so with blanks; an offset follows every name, a line what was compiled
# with lines.
_PLACE = re.compile(
    r"\b(?:access )?at (?P<kernel>.+?)\+0x[0-9a-f]+(?: in (?P<file>\S+?):(?P<line>\d+))?(?: \[|$| and\b)"
)


@dataclass(frozen=True)
class Place:
    """Where an access stands: a kernel, and a line of a file if they are known."""

    kernel: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Report:
    """One error: its first line, and the accesses that it names."""

    text: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Verdict:
    """What a log comes to.

    Attributes:
        summed: Whether the tool printed its summary.
        errors: Errors and hazards by the tool's own count, but for what is left out; unprinted ones are among them.
        first: The first of them that was printed.
        left_out: What was left out, and how often; empty if nothing was.
    """

    summed: bool
    errors: int
    first: str
    left_out: str


def verdict(log: str, backend: str) -> Verdict:
    """Reads a log of calls of one backend."""
    counts = [int(a or b) for a, b in _SUMMARY.findall(log)]
    found = list(reports(log))
    starts = [r for r in found if is_of_the_compiler(r, backend)]
    others = [r for r in found if is_read_by_others(r)]
    counted = [r for r in found if r not in starts and r not in others]
    left_out = []
    if starts:
        left_out.append(f"hazards of the words by which the compiler starts and ends warps: {len(starts)}")
    if others:
        left_out.append(f"reads by others' kernels, such as {others[0].places[0].kernel[:60]}: {len(others)}")
    return Verdict(
        bool(counts),
        sum(counts) - len(starts) - len(others),
        counted[0].text if counted else "",
        "; ".join(left_out),
    )


def reports(log: str) -> Iterator[Report]:
    """The errors of a log: races with all their accesses, of anything else the first place named."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    for number, line in enumerate(lines):
        if _RACE in line:
            rest = lines[number + 1 :]
            more = next((n for n, each in enumerate(rest) if not each.startswith("and ")), len(rest))
            accesses = [line, *rest[:more]]
            places = [_place(each) for each in accesses]
            yield Report(" ".join(accesses), tuple(p for p in places if p) if all(places) else ())
        elif _READ in line or line.startswith("Invalid "):
            place = _place(lines[number + 1]) if number + 1 < len(lines) else None
            yield Report(f"{line} at {place.kernel}" if place else line, (place,) if place else ())


def _place(line: str) -> Place | None:
    match = _PLACE.search(line)
    return Place(match["kernel"], match["file"] or "", int(match["line"] or 0)) if match else None


def is_of_the_compiler(report: Report, backend: str) -> bool:
    """Whether a race is of the words in shared memory by which Triton tells warps what to run.

    The first warps write there what the others shall do, and at the kernel's end that they shall stop. A barrier of all
    threads, ``barrier.sync 1``, stands between the write and the reads, but at different places of the program, which
    the tool takes for no barrier. The compiler gives these accesses the line of the kernel's ``def`` and that of its
    last statement; no statement of a role's own has either, and an access without a line is none of these.
    """
    own = lines_of_starts(backend)
    return (
        _RACE in report.text
        and bool(report.places)
        and all(p.line in own.get((p.kernel, p.file.rpartition("/")[2]), ()) for p in report.places)
    )


def is_read_by_others(report: Report) -> bool:
    """Whether a kernel that is not ours read what the tool saw nobody write.

    The tool does not see what TMA stores (its release notes, "Known Limitations"), which is how products of vendors'
    libraries leave, too. Whatever our kernels leave unwritten is wrong by its numbers.
    """
    return _READ in report.text and bool(report.places) and report.places[0].kernel not in _kernels()


@functools.cache
def lines_of_starts(backend: str) -> dict[tuple[str, str], tuple[int, int]]:
    """For each kernel of a backend that starts warps, by name and file: the lines of its ``def`` and last statement."""
    return {
        (node.name, path.name): (node.lineno, node.body[-1].lineno)
        for path in sorted((BACKENDS / backend).glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and _starts_warps(node)
    }


def _starts_warps(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "warp_specialize" for each in ast.walk(node))


@functools.cache
def _kernels() -> frozenset[str]:
    """Names of everything that Triton compiles for the backends."""
    return frozenset(
        node.name
        for path in sorted(BACKENDS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    )
