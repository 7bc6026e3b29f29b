"""Shared by all benchmarks: options, the record of a process, the loop over cells, and the time budget."""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import results
from benchmarks.timing import Deadline, OutOfTimeError, wait
from flashtile.core.errors import UnsupportedError

Cell = TypeVar("Cell")
Result = TypeVar("Result")

# Exit code of a process that was stopped within a cell.
OUT_OF_TIME = 75
_ERROR_CHARACTERS = 600
# Cells and rounds end this long before the budget, so that the process need not be stopped.
_RESERVE_S = 3.0


class DeviceLostError(RuntimeError):
    """The device no longer responds: every later result of this process would be meaningless."""


def synchronize(device: torch.device, culprit: str) -> None:
    """Waits for the device; ``DeviceLostError``, with the name of the last provider, if it no longer responds."""
    try:
        wait(device)
    except RuntimeError as error:
        raise DeviceLostError(f"{culprit} broke the device: {error}") from error


class NotTimedError(Exception):
    """Why a row has no time, as the row's text: ``refused: ...`` or ``wrong: ...``."""


def attempt(device: torch.device, name: str, action: Callable[[], Result]) -> Result | str:
    """An action's result, or the row's text if it raised, so that one failure does not lose the other rows."""
    try:
        return action()
    except DeviceLostError:
        raise
    except Exception as error:
        synchronize(device, name)
        if isinstance(error, NotTimedError | UnsupportedError):
            return str(error) if isinstance(error, NotTimedError) else f"refused: {error}"
        text = "".join(traceback.format_exception_only(error)).strip()
        return f"failed: {text}"[:_ERROR_CHARACTERS]


def complete(rows: Sequence[results.Row], providers: Sequence[str] = ()) -> dict[str, list[results.Row]]:
    """The rows of cells that need not be measured again: a run had all providers, and none failed, or twice."""
    by_run: dict[str, dict[str, list[results.Row]]] = {}
    for row in rows:
        if not providers or row.provider in providers:
            by_run.setdefault(row.cell, {}).setdefault(row.run, []).append(row)
    found = {}
    for cell, runs in by_run.items():
        whole = [of for of in runs.values() if not set(providers) - {row.provider for row in of}]
        good = [of for of in whole if not any(str(row.error).startswith("failed") for row in of)]
        if cell and (good or len(whole) > 1):
            found[cell] = (good or whole)[-1]
    return found


@dataclass(frozen=True)
class Session:
    """One process that measures: its rows' shared fields, device, output file and deadline."""

    run: results.Run
    device: torch.device
    out: Path
    deadline: Deadline = field(default_factory=Deadline)
    resume: bool = False
    whole: bool = False  # all cells are asked for

    def saved(self) -> list[results.Row]:
        """The rows of this process that are on the disk."""
        return [row for row in results.read([self.out] if self.out.exists() else []) if row.run == self.run.run]

    def left(
        self, cells: Sequence[Cell], name_of: Callable[[Cell], str], providers: Sequence[str] = ()
    ) -> tuple[list[Cell], list[results.Row]]:
        """The cells to measure, and to resume the rows of the others: of these sources, device and providers."""
        if self.resume and len({name_of(cell) for cell in cells}) < len(cells):
            raise ValueError("resume is of cells by name, and two have the same")
        rows = results.read([self.out] if self.resume and self.out.exists() else [])
        done = complete([row for row in rows if row.same_sources(self.run)], providers)
        kept = {name_of(cell): done[name_of(cell)] for cell in cells if name_of(cell) in done}
        return [cell for cell in cells if name_of(cell) not in kept], list(chain(*kept.values()))

    def each(
        self,
        cells: Sequence[Cell],
        name_of: Callable[[Cell], str],
        measure: Callable[[Cell], list[results.Row]],
        providers: Sequence[str] = (),
    ) -> tuple[list[results.Row], int]:
        """Measures the cells in order, saves and prints each one's rows; returns all rows and the exit code.

        To resume, cells that ``left`` leaves out are not measured again, and their rows come first. No cell is started
        that might end after the deadline, judged by the longest so far; a cell that raises ``OutOfTimeError`` gives no
        rows, and a lost device ends the process's work.
        """
        about: dict[str, Any] = {"cells": len(cells)} if self.whole else {}
        cells, rows = self.left(cells, name_of, providers)
        begun_s, longest_s = self.deadline.clock(), 0.0
        for done, cell in enumerate(cells):
            start_s = self.deadline.clock()
            if not self.deadline.allows(longest_s):
                print(f"out of time: stopped after {done} of {len(cells)} cells", flush=True)
                return rows, OUT_OF_TIME
            try:
                found = measure(cell)
            except (DeviceLostError, OutOfTimeError) as error:
                print(f"{name_of(cell)}: {error}: stopped after {done} of {len(cells)} cells", flush=True)
                return rows, OUT_OF_TIME if isinstance(error, OutOfTimeError) else 1
            now_s = self.deadline.clock()
            longest_s = max(longest_s, now_s - start_s)
            about |= {"cell": name_of(cell), "seconds": round(now_s - start_s, 1)}
            found = [replace(row, **about) for row in found]
            results.append(self.out, found)
            rows += found
            print(f"[{done + 1:2}/{len(cells)}] {now_s - begun_s:5.1f} s ", name_of(cell), end="  ")
            print(*map(shown, found), sep=" | ", flush=True)
        return rows, 0 if rows else 1


def shown(row: results.Row) -> str:
    """A row in a few words: its measurement, or the reason why there is none."""
    if row.median_ms is not None:
        text = f"{row.median_ms:.3f} ms ±{100 * (row.spread or 0):.1f}%"
    elif row.extra_bytes is not None:
        text = f"{row.extra_bytes / 2**20:.1f} MiB"
    elif row.values and "losses" in row.values:
        text = f"{row.values['losses'][-1]:.4f}"
    else:
        text = f"{row.error:.2e}" if isinstance(row.error, float) else str(row.error).splitlines()[0]
    return f"{row.case.get('config') or row.provider.removeprefix('flashtile-')} {text}"


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The integers of a comma-separated list."""
    return [int(word) for word in words(text)]


def new_parser(
    name: str,
    doc: str | None,
    defaults: Mapping[str, Any],
    devices: Sequence[str] = ("cuda", "cpu"),
    *,
    resumes: bool = True,
) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark, and an option for each default, of its type."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--providers", type=words, metavar="A,B", help="names separated by commas")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force if need be")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="leave out cells that FILE has from these sources")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")
    for option, default in defaults.items():
        kind: Callable[[str], Any] = type(default)
        if isinstance(default, list):
            kind = numbers if default and isinstance(default[0], int) else words
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, default=default, help=f"by default {shown}")
    return parser


Body = Callable[[argparse.Namespace, Session], tuple[list[results.Row], int, str]]


def run_command(
    args: argparse.Namespace, suite: str, body: Body, last_words: Callable[[Session], None] = lambda session: None
) -> int:
    """Opens a session, runs a benchmark in it and prints its report; returns the process's exit code.

    When the budget is spent, the process is killed, since no exception reaches a thread that waits for a device;
    ``last_words`` is called first, in a thread of its own. A ``ValueError`` from the body is reported as an invalid
    option.
    """
    start_s = time.monotonic()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    run = results.new_run(suite, device, args.commit)
    print(f"{suite} on {run.device}, {run.versions}, commit {run.commit}, run {run.run}", flush=True)
    left_s = math.inf if args.budget_s is None else args.budget_s - (time.monotonic() - start_s)
    deadline = Deadline(left_s - min(_RESERVE_S, 0.1 * left_s))
    whole = not getattr(args, "cells", None)
    out = args.out or results.default_file(suite, run.device)
    session = Session(run, device, out, deadline, getattr(args, "resume", False), whole)

    def stop() -> None:
        try:
            last_words(session)
            sys.stdout.flush()
        finally:
            os._exit(OUT_OF_TIME)

    timer = threading.Timer(max(0.0, left_s), stop)
    timer.daemon = True
    if left_s < math.inf:
        timer.start()
    try:
        _, code, report = body(args, session)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        timer.cancel()
    print(f"\n{report}\n\n{len(session.saved())} rows appended to {session.out}")
    return code
