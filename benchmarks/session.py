"""What the smaller benchmarks have in common: options, the record of a process, where its rows go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import results

Convert = Callable[[str], object]


@dataclass(frozen=True)
class Session:
    """One process that measures.

    Attributes:
        run: What its rows share.
        device: Where it measures.
        out: File that its rows are appended to.
    """

    run: results.Run
    device: torch.device
    out: Path

    def save(self, rows: Sequence[results.Row]) -> None:
        """Appends rows; they stay if the process dies next."""
        results.append(self.out, rows)


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The integers of a list with commas."""
    return [int(word) for word in words(text)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every smaller benchmark takes."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--providers", type=words, metavar="A,B", help="names separated by commas")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are appended here")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end within so many seconds, by force if need be")
    parser.add_argument("--commit", help="of a copy of the sources that has no repository")


def open_session(args: argparse.Namespace, suite: str) -> Session | None:
    """Records the process and says so; None, with the reason printed, where there is no such device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu", file=sys.stderr)
        return None
    device = torch.device(args.device)
    run = results.new_run(suite, device, args.commit)
    print(f"{suite} on {run.device}, {run.versions}, commit {run.commit}, run {run.run}", flush=True)
    return Session(run, device, args.out or results.default_file(suite, run.device))
