"""What saved rows and logs must say for a stage of the acceptance run to count as shown.

A finding compares what was measured with a bar. One without a bar is a number worth reading. Whatever was not measured
(a peer that is not installed, a cell that the budget cut off) is missing from a count, and so is never shown.
"""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import accuracy, memory, sanitizer, table, train, varlen
from benchmarks.results import Row
from benchmarks.table import Cell

Rows = Sequence[Row]


@dataclass(frozen=True)
class Finding:
    """One sentence about what was seen.

    Attributes:
        text: With the numbers and their bar.
        met: Whether the bar was reached; None for a number without one.
    """

    text: str
    met: bool | None = None


@dataclass(frozen=True)
class Ended:
    """A stage that ran to its own end.

    Attributes:
        log: What it printed.
        work: The folder that it could write to.
        rows: Saved rows of these sources.
        new_lines: Lines that it added to files of the results folder, by name.
    """

    log: str
    work: Path
    rows: Rows
    new_lines: dict[str, int]


Judge = Callable[[Ended], list[Finding]]


def measured_rows(rows: Rows, suite: str, dtype: str | None = None) -> list[Row]:
    """The rows of a suite, of one dtype if one is named."""
    return [row for row in rows if row.suite == suite and (dtype is None or row.case.get("dtype") == dtype)]


def speed(
    suite: str,
    dtype: str,
    provider: str,
    against: tuple[str, ...],
    count: int,
    bars: tuple[float, float] | None,
) -> Judge:
    """Judges one provider against the fastest of its peers, cell by cell.

    Args:
        suite: ``forward`` or ``backward``.
        dtype: Of the cells.
        provider: One of ours.
        against: The peers; a cell counts only if all of them were timed in it, in one run with ours.
        count: Cells that there must be.
        bars: Least geometric mean and least ratio of any cell; None for none.
    """

    def judge(ended: Ended) -> list[Finding]:
        rows = [r for r in measured_rows(ended.rows, suite, dtype) if r.provider in (provider, *against)]
        ratios = [
            (r, cell.case.name) for cell in table.cells(rows) if (r := _ratio(cell, provider, against)) is not None
        ]
        peers = " and ".join(against)
        name = f"{suite} {dtype}: {provider} against {'the better of ' if len(against) > 1 else ''}{peers}"
        if not ratios:
            return [Finding(f"{name}: no cell was timed with all of them", met=False)]
        worst, where = min(ratios)
        mean = table.geomean([r for r, _ in ratios])
        text = f"{name}, {len(ratios)} of {count} cells: geomean {mean:.3f}"
        if bars is None:
            return [Finding(f"{text}, least {worst:.3f} ({where})", met=len(ratios) == count)]
        text += f" (bar {bars[0]:.2f}), least {worst:.3f} (bar {bars[1]:.2f}, {where})"
        return [Finding(text, met=len(ratios) == count and mean >= bars[0] and worst >= bars[1])]

    return judge


def _ratio(cell: Cell, provider: str, against: tuple[str, ...]) -> float | None:
    ratios = [cell.ratio(provider, peer) for peer in against]
    known = [r for r in ratios if r is not None]
    return min(known) if len(known) == len(ratios) else None


def nothing_wrong(suite: str, dtype: str | None = None) -> Judge:
    """No provider of ours was wrong or failed in the last word on any cell; refusals are named, but no fault."""

    def judge(ended: Ended) -> list[Finding]:
        last = {
            (str(r.case), r.provider): r
            for r in measured_rows(ended.rows, suite, dtype)
            if r.provider.startswith("flash")
        }
        texts = [f"{r.provider}: {r.error.splitlines()[0]}" for r in last.values() if isinstance(r.error, str)]
        bad = [text for text in dict.fromkeys(texts) if ": refused" not in text]
        found = [Finding(f"{suite}: nothing of ours wrong or failed in {len(last)} rows", met=bool(last) and not bad)]
        if bad:
            found = [Finding(f"{suite}: {text[:160]}", met=False) for text in bad[:5]]
        return found

    return judge


def all_of(*judges: Judge) -> Judge:
    """The findings of several judges, one after the other."""
    return lambda ended: [finding for judge in judges for finding in judge(ended)]


def memory_is_linear(ended: Ended) -> list[Finding]:
    """Extra memory of ours grows with the length, not with its square, up to 64k tokens, in both directions."""
    lines = memory.growth_table(measured_rows(ended.rows, "memory"))[1:]
    found = []
    for direction, provider, longest, extra, per_token, growth in lines:
        if not provider.startswith("flashtile"):
            continue
        linear = int(longest) >= 65536 and (growth == "none" or float(growth) <= 1.1)
        text = f"{provider} {direction}: {extra} MiB extra at {longest} tokens, {per_token} bytes a token"
        found.append(Finding(f"{text}, exponent {growth} (bar 1.1)", met=linear))
    return found or [Finding("no memory of ours was measured", met=False)]


def host_is_quick(ended: Ended) -> list[Finding]:
    """A warm forward call costs the host at most 15 us more than SDPA's; a first call compiles within 4 s."""
    last = {(r.case["measure"], r.case["direction"], r.provider): r for r in measured_rows(ended.rows, "host")}
    times = {key: row.median_ms for key, row in last.items() if row.median_ms is not None}
    found = []
    for (what, direction, provider), ms in times.items():
        if not provider.startswith("flashtile"):
            continue
        if what.startswith("first call, empty"):
            found.append(Finding(f"{provider} {what}, {direction}: {ms / 1e3:.2f} s (bar 4)", met=ms <= 4000))
        peer = times.get((what, direction, "sdpa"))
        if peer is not None:
            text = f"{provider} {direction}: {ms * 1e3:.1f} us a warm call, sdpa {peer * 1e3:.1f}"
            met = ms * 1e3 <= peer * 1e3 + 15 if direction == "forward" else None
            found.append(Finding(text + (" (bar 15 more)" if direction == "forward" else ""), met=met))
    return found or [Finding("no call of ours was timed", met=False)]


def accuracy_is_as_good(provider: str, peer: str, cells: dict[str, int]) -> Judge:
    """Judges the root mean square errors of a provider against a peer's, to within the two digits that are published.

    Args:
        provider: One of ours.
        peer: The other.
        cells: By direction, how many (case, tensor) pairs there must be.
    """

    def judge(ended: Ended) -> list[Finding]:
        rows = {(str(r.case), r.provider): r for r in measured_rows(ended.rows, "accuracy") if r.values}
        found = []
        for direction, count in cells.items():
            ratios = []
            for (case, name), row in rows.items():
                other = rows.get((case, peer))
                if name != provider or other is None or row.case["direction"] != direction:
                    continue
                for tensor in accuracy.TENSORS[direction]:
                    mine, theirs = (x.values[tensor]["rmse"] for x in (row, other) if x.values)
                    where = f"{tensor} d{row.case['head_dim']} {row.case['dtype']} {row.case['inputs']}"
                    ratios.append((mine / theirs, f"{where}: {mine:.2e} against {theirs:.2e}"))
            text = f"{direction} rmse, {provider} over {peer}, {len(ratios)} of {count}"
            if ratios:
                worst, where = max(ratios)
                text += f": geomean {table.geomean([r for r, _ in ratios]):.3f}, worst {worst:.3f} (bar 1.01; {where})"
                found.append(Finding(text, met=len(ratios) == count and worst <= 1.01))
            else:
                found.append(Finding(text, met=False))
        return found

    return judge


def packing_is_cheap(provider: str, cells: int) -> Judge:
    """Packed sequences keep nine tenths of the dense rate in the forward; the backward has no bar."""

    def judge(ended: Ended) -> list[Finding]:
        ratios = varlen.ratios(measured_rows(ended.rows, "varlen"))
        found = []
        for direction in ("forward", "backward"):
            mine = [
                (packed / dense, case.name)
                for (case, name), (packed, dense) in ratios.items()
                if name == provider and case.direction == direction
            ]
            text = f"packed over dense, {provider} {direction}, {len(mine)} of {cells} cells"
            if mine:
                text += f": {', '.join(f'{r:.3f}' for r, _ in mine)}"
            if direction == "forward":
                met = len(mine) == cells and min(r for r, _ in mine) >= 0.9
                found.append(Finding(text + " (bar 0.90)", met=met))
            else:
                found.append(Finding(text))
        return found

    return judge


def training_agrees(provider: str, steps: int, contexts: tuple[int, ...]) -> Judge:
    """The curve of ours lies on that of standard attention as that of FlashAttention 2 does, and speeds are known."""

    def judge(ended: Ended) -> list[Finding]:
        training = train.training_of(measured_rows(ended.rows, "train"))
        names = (provider, "fa2", "eager")
        trained = [len(training.losses.get(name, [])) for name in names]
        found = [Finding(f"steps of {', '.join(names)}: {trained} (bar {steps})", met=min(trained) >= steps)]
        if min(trained) > 0:
            base = train.smooth(training.losses["eager"])
            ours, peers = (_mean_distance(train.smooth(training.losses[name]), base) for name in names[:2])
            bar = max(2 * peers, 0.01)
            text = f"mean distance of the smoothed loss from standard attention: {provider} {ours:.4f}, fa2 {peers:.4f}"
            found.append(Finding(f"{text} (bar {bar:.4f})", met=ours <= bar))
        for context in contexts:
            speeds = training.tokens_per_s.get(context, {})
            shown = ", ".join(f"{name} {speeds[name]:,.0f}" for name in names if name in speeds) or "nothing"
            found.append(Finding(f"tokens/s at context {context}: {shown}", met=all(name in speeds for name in names)))
        return found

    return judge


def _mean_distance(a: list[float], b: list[float]) -> float:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=False)]
    return sum(gaps) / len(gaps)


def tests_pass(ended: Ended) -> list[Finding]:
    """Tests ran, and none failed; a run that skipped everything shows nothing."""
    report = ended.work / "junit.xml"
    if not report.exists():
        return [Finding("pytest left no report", met=False)]
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None and c not in failed]
    passed = len(cases) - len(failed) - len(skipped)
    text = f"{passed} tests passed, {len(failed)} failed, {len(skipped)} skipped or expected to fail"
    found = [Finding(text, met=passed > 0 and not failed)]
    return found + [Finding(f"{c.get('classname')}::{c.get('name')}", met=False) for c in failed[:10]]


_CALLS = re.compile(r"^(\w+): (\d+) calls right, (\d+) refused", re.MULTILINE)


def sanitizer_is_silent(backend: str) -> Judge:
    """The tool's own summary counts nothing of ours, and calls of the backend were really made under it."""

    def judge(ended: Ended) -> list[Finding]:
        verdict = sanitizer.verdict(ended.log, backend)
        calls = {name: int(right) for name, right, _ in _CALLS.findall(ended.log)}.get(backend, 0)
        if "Device not supported" in ended.log:
            return [Finding("compute-sanitizer refuses this device", met=False)]
        text = f"{verdict.errors} errors or hazards" if verdict.summed else "no summary of the tool"
        text += f" in {calls} calls of {backend}"
        if verdict.left_out:
            text += f", left out: {verdict.left_out}"
        if verdict.first:
            text += f"; the first: {verdict.first[:300]}"
        return [Finding(text, met=verdict.summed and verdict.errors == 0 and calls > 0)]

    return judge


_EXIT_CODES = re.compile(r"exit codes (\{.*?\})")


def sweep_is_whole(file: str) -> Judge:
    """A tuning sweep added rows, and every part of it that reports an exit code reports 0."""

    def judge(ended: Ended) -> list[Finding]:
        added = ended.new_lines.get(file, 0)
        codes: dict[str, int] = {}
        for text in _EXIT_CODES.findall(ended.log):
            codes |= ast.literal_eval(text)
        bad = {name: code for name, code in codes.items() if code}
        found = [Finding(f"{added} timings of the sweep saved", met=added > 0)]
        if codes:
            said = f"parts that ended badly, with exit codes: {bad}" if bad else f"all {len(codes)} parts ended well"
            found.append(Finding(said, met=not bad))
        return found

    return judge


def ended_well(ended: Ended) -> list[Finding]:
    """Nothing but the exit code, which the driver has looked at already; the last line is quoted."""
    lines = [line.strip() for line in ended.log.splitlines() if line.strip()]
    return [Finding(f"ended with exit code 0; its last line: {lines[-1][:160] if lines else ''}", met=True)]
